"""ZeRO 1 in a trace: DDP, and an optimizer with state for this rank's share of the parameters.

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

from batchfit._engine.torch_private.optimizers import forget_shares
from batchfit._engine.torch_private.replaced import replaced
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
                share = largest_share(groups, self.ranks)
                for group, parameters in zip(optimizer.param_groups, share, strict=True):
                    group["params"] = parameters
                mine = {id(one) for parameters in share for one in parameters}
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


def largest_share(groups: list[list[Tensor]], ranks: int) -> list[list[Tensor]]:
    """The parameters of the rank that has the most of them, by group, the largest first.

    The order counts: a step takes what it works with for one parameter before it lets go of the last one's.
    """
    sizes = [0] * ranks
    shares: list[list[list[Tensor]]] = [[[] for _ in groups] for _ in range(ranks)]
    for number, parameters in enumerate(groups):
        for one in sorted(parameters, key=lambda one: -one.numel()):
            rank = sizes.index(min(sizes))
            sizes[rank] += one.numel()
            shares[rank][number].append(one)
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
