"""Factories and measures that other processes load: for sweeps on devices, ranks and Ray."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchfit
from batchfit.testing import simulated_oom

KNOBS = [
    {"width": 8, "kind": "plain"},
    {"width": 16, "kind": "short"},
    {"width": 8, "kind": "broken"},
    {"width": 8, "kind": "never"},
]
SETTINGS: dict[str, Any] = {"batch_size": 24, "budget": "16MiB", "steps": 2, "soak_steps": 2}


def quick() -> None:
    """In a process that runs nothing but this: let garbage collection pass over all of torch."""
    if "pytest" not in sys.modules and gc.get_freeze_count() == 0:
        gc.freeze()


def make(width: int, kind: str) -> batchfit.Workload:
    """A small model; "broken" raises, and "never" fits not even once."""
    quick()
    if kind == "broken":
        raise ValueError(f"no {kind} model of width {width}")
    torch.manual_seed(width)
    model = nn.Linear(width, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if kind == "never" or (kind == "short" and len(batch) > 9):
            raise simulated_oom()
        value: torch.Tensor = model(batch).square().mean()
        return value

    return batchfit.training(model, optimizer, loss, torch.ones(2, width))


def measure(workload: batchfit.Workload, size: int, width: int) -> dict[str, Any]:
    """Runs out above 20 samples."""
    if size > 20:
        raise simulated_oom()
    assert workload.model is not None
    return {"mean": round(workload.model(torch.ones(size, width)).mean().item(), 5), "size": size}


def half(configuration: dict[str, Any], batch_size: int) -> int:
    return batch_size // 2


def _step(most: int) -> Callable[[int], None]:
    def step(size: int) -> None:
        if size > most:
            raise simulated_oom()

    return step


def dying(folder: str, number: int, deaths: int) -> batchfit.Workload:
    """Kills its process the first `deaths` times that configuration 2 is made; notes who made what."""
    quick()
    place = Path(folder) / f"made-{number}"
    with place.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if number == 2 and len(place.read_text().splitlines()) <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    return batchfit.Workload(_step(number), state=[])


def noted(folder: str, number: int) -> batchfit.Workload:
    """Notes who makes what; 5 and 6 take long enough to be killed in."""
    quick()
    with (Path(folder) / f"made-{number}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    if number in (5, 6):
        time.sleep(1.0)
    return batchfit.Workload(_step(number + 4), state=[])


def deadly(number: int) -> batchfit.Workload:
    """Configuration 2 kills every process that makes it."""
    quick()
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return batchfit.Workload(_step(number + 4), state=[])


def poisoned(number: int) -> batchfit.Workload:
    """Configuration 1 leaves a dead device behind."""

    def step(size: int) -> None:
        if number == 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    return batchfit.Workload(step, state=[])


def whoami(number: int) -> batchfit.Workload:
    print(f"made {number}")
    return batchfit.Workload(_step(number), state=[])


def process(workload: batchfit.Workload, size: int) -> dict[str, Any]:
    """Says where it ran: the process, and the GPUs that it may see."""
    return {"pid": os.getpid(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "all")}


def slow(folder: str, number: int) -> batchfit.Workload:
    """Says that it has begun, and takes its time from the third on."""
    quick()
    (Path(folder) / f"begun-{number}-{os.getpid()}").touch()
    if number > 2 and not (Path(folder) / "hurry").exists():
        time.sleep(120)
    return batchfit.Workload(_step(number), state=[])


def on_one_rank_only(number: int, where: str) -> batchfit.Workload:
    """Under a launcher: rank 1 alone raises in a factory, a step or a measurement, or dies; others talk."""
    import torch.distributed as dist

    quick()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 1 and where == "factory":
        raise ValueError("only on this rank")
    if rank == 1 and where == "death":
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)  # as DDP does when it is made

    def step(size: int) -> None:
        if rank == 1 and where == "step":
            raise KeyError("only in this step")
        if size > number - rank:
            raise simulated_oom()

    return batchfit.Workload(step, state=[])


def measured_together(workload: batchfit.Workload, size: int, where: str) -> dict[str, Any]:
    import torch.distributed as dist

    rank = dist.get_rank()
    if rank == 1 and where == "measure":
        raise ZeroDivisionError("only in this measurement")
    if rank == 1 and size > 3 and where == "smaller":
        raise simulated_oom()
    return {"rank": rank, "size": size}
