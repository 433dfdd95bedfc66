"""Small models whose steps talk to other ranks, and steps of theirs that fail where a test says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import batchfit
from batchfit.testing import FakeDevice, count_operations, fail_at

WIDTH = 8


@dataclass
class World:
    """A model on this rank, its optimizer and one step of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], object]

    def facts(self) -> list[list[float]]:
        """All numbers of the parameters and of the optimizer's state that this rank holds."""
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        tensors += list(self.model.buffers())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [local(tensor).double().flatten().tolist() for tensor in tensors]


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def layers() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25), nn.GELU(), nn.Linear(WIDTH, WIDTH)]


def make(kind: str, *, clip: bool = False) -> World:
    """`ddp`, `ddp_buffers` (broadcast), `fsdp2`, `fsdp2_clipped`, `gathers` (it sends what grows with n)."""
    torch.manual_seed(0)
    parts = layers()
    model: nn.Module
    if kind == "ddp_buffers":
        parts.insert(1, nn.BatchNorm1d(WIDTH))
    model = nn.Sequential(*parts)
    if kind.startswith("fsdp2"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (parts[0], parts[-1], model):
            fully_shard(part, mesh=mesh)
    else:
        # one bucket a parameter: a failure can come between two of them
        model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def step(n: int) -> None:
        optimizer.zero_grad()
        out = model(torch.randn(n, WIDTH))
        if kind == "gathers":
            everyones = [torch.empty_like(out) for _ in range(dist.get_world_size())]
            dist.all_gather(everyones, out.detach())
            out = out * sum(one.mean() for one in everyones)
        out.square().mean().backward()
        if clip or kind == "fsdp2_clipped":  # the norm over all shards is a collective in the step
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return World(model, optimizer, step)


def seeded(world: World, rank: int, *, steps: int) -> None:
    torch.manual_seed(10 + rank)
    for _ in range(steps):
        world.step(3)


def operations(world: World) -> int:
    """How many operations a steady step has."""
    with count_operations() as seen:
        world.step(2)
    return seen.operations


def failing(step: Callable[[int], object], *, above: int, at: int, in_step: int, error: Any = None) -> Any:
    """The step, failing at operation `at` of every `in_step`-th call at a size above `above`."""
    calls = 0

    def faulty_step(n: int) -> object:
        nonlocal calls
        calls = calls + 1 if n > above else 0
        fails = n > above and calls % 3 == in_step % 3
        with fail_at(at, error=error) if fails else nullcontext():
            return step(n)

    return faulty_step


def search(step: Any, world: World, **settings: Any) -> batchfit.FitResult:
    workload = batchfit.Workload(step, state=[world.model, world.optimizer])
    settings = {
        "max_size": 6,
        "strategy": "bisect",
        "soak_steps": 0,
        "device": FakeDevice(2**30, peak=lambda n: n),
        **settings,
    }
    return batchfit.find_batch_size(workload, **settings)
