"""ZeRO's first stage in a trace: DDP, and an optimizer whose state is that of this rank's parameters.

As torch's `ZeroRedundancyOptimizer` deals them out: the largest first, each to the rank with the least so
far. What is traced is the rank that has the most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.cuda_model.dispatch import replaced
from batchfit._engine.torch_private.optimizers import forget_shares
from batchfit._engine.trace.fake_state import Faked
from batchfit.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class SharedState:
    """Optimizers that step with one rank's part of their parameters."""

    ranks: int
    optimizers: tuple[torch.optim.Optimizer, ...]

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Faked) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                groups = [list(group["params"]) for group in optimizer.param_groups]
                mine = largest_share(groups, self.ranks)
                for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                    group["params"] = [one for one in parameters if id(one) in mine]
                for one in [one for one in optimizer.state if id(one) not in mine]:
                    del optimizer.state[one]
                everything = [one for group in groups for one in group]
                stack.enter_context(replaced(optimizer, "zero_grad", _Zeroed(everything)))
            yield


@final
@dataclass(frozen=True, slots=True)
class OwnShares:
    """`ZeroRedundancyOptimizer`s of the program's own: they know the real parameters by rank."""

    optimizers: tuple[torch.optim.Optimizer, ...]

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Faked) -> Iterator[None]:
        for optimizer in self.optimizers:
            forget_shares(optimizer)
        yield


def largest_share(groups: list[list[Tensor]], ranks: int) -> set[int]:
    """The ids of the parameters of the rank that has the most of them."""
    sizes = [0] * ranks
    shares: list[set[int]] = [set() for _ in range(ranks)]
    for parameters in groups:
        for one in sorted(parameters, key=lambda one: -one.numel()):
            rank = sizes.index(min(sizes))
            sizes[rank] += one.numel()
            shares[rank].add(id(one))
    return shares[sizes.index(max(sizes))]


@final
@dataclass(frozen=True, slots=True)
class _Zeroed:
    """`zero_grad` of all parameters, those of other ranks too."""

    parameters: list[Any]

    def __call__(self, set_to_none: bool = True) -> None:
        for one in self.parameters:
            if set_to_none:
                one.grad = None
            elif one.grad is not None:
                with torch.no_grad():
                    one.grad.zero_()
