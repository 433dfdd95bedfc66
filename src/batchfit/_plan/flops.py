"""Floating-point operations per sample, counted in a trace of one step.

Rules: torch's own formulas count products, convolutions and attention; products by experts are counted here;
the rest is memory traffic. What
bitsandbytes' 4-bit products compute has no formula there: they are counted as LoRA's on plain weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
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


_GROUPED: Any = getattr(torch.ops.aten, "_grouped_mm", None) and torch.ops.aten._grouped_mm.default


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees operations before the recorder does: attention is whole here."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if func is _GROUPED:
            self.total += _of_groups(*args[:2])
        elif formula is not None:
            self.total += formula(*_with_all_heads(func, args), **(kwargs or {}), out_val=out)
        return out


def _of_groups(one: Tensor, two: Tensor) -> int:
    """Of products by groups of rows, one per expert: every row is in one group."""
    if two.dim() == 2:  # the gradient of weights: rows are summed over
        return 2 * one.shape[-2] * one.shape[-1] * two.shape[-1]
    return int(2 * one.numel() * two.shape[-1])


def _with_all_heads(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Where heads share keys and values, these as if each head had its own.

    torch's formulas refuse them before 2.12; the products are done for each head in any case.
    """
    if "scaled_dot_product" not in str(func):
        return args
    heads = max(one.shape[1] for one in args[:4] if isinstance(one, Tensor))
    return tuple(
        torch.Size((one.shape[0], heads, *one.shape[2:]))
        if isinstance(one, Tensor) and one.dim() == 4
        else one
        for one in args
    )
