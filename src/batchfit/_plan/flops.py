"""What one sample costs in floating-point operations: one forward and backward on the meta device, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from batchfit._engine.torch_private.dispatch import TorchDispatchMode


def counted(run: Callable[[], Tensor]) -> float:
    """The operations of `run` and of the backward pass of the loss that it returns.

    torch's own formulas count products, convolutions and attention; the rest is memory traffic.
    """
    with _Counter() as counter:
        run().backward()  # type: ignore[no-untyped-call]
    return float(counter.total)


class _Counter(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out
