"""What one sample costs in floating-point operations, counted in a trace of one step.

Rules: torch's own formulas count products, convolutions and attention; the rest is memory traffic. What
bitsandbytes' 4-bit products compute has no formula there: they are counted as LoRA's on plain weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from batchfit._engine.allocator.gpus import DEFAULT
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.trace.trace import trace
from batchfit.workload import Workload


def flops_per_sample(work: Workload) -> float:
    """The operations of a step of one sample, forward and backward."""
    counter = _Counter()

    def step(size: int) -> None:
        with counter:
            work.step(size)

    counted = Workload(step, state=work.state)
    trace(counted, 1, rules=CudaRules(DEFAULT, torch.device("cpu", 1)), steps=1)
    return float(counter.total)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees operations before the recorder does: attention is whole here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
