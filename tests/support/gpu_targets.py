"""Factories for `test_trials_in_children_gpu.py`: a child process imports them by name."""

from __future__ import annotations

import torch
from torch import nn
from torch_private import gpu_sleep

import batchfit


def small_net() -> batchfit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    return batchfit.training(
        model, optimizer, lambda model, x: model(x).square().mean(), lambda n: torch.randn(n, 1024)
    )


def poisoned_above_16() -> batchfit.Workload:
    """A kernel asserts on the device, after which the process can do nothing more with it."""
    work = small_net()

    def step(batch_size: int) -> None:
        work.step(batch_size)
        if batch_size > 16:
            table = torch.zeros(4, device="cuda")
            table[torch.full((batch_size,), 10**6, device="cuda")].sum()
            torch.cuda.synchronize()

    return work.with_step(step)


def hung_above_16() -> batchfit.Workload:
    """A kernel that does not end while the time-out lasts."""
    work = small_net()

    def step(batch_size: int) -> None:
        work.step(batch_size)
        if batch_size > 16:
            gpu_sleep(10**12)

    return work.with_step(step)
