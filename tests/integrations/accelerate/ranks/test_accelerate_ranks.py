"""Accelerate's decorator, ours, on several ranks: one rank's out-of-memory is everyone's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs accelerate")

import torch
import torch.distributed as dist
from launch import _free_port, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchfit
from batchfit.testing import simulated_oom, virtual_memory

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)


def unequal(rank: int) -> Any:
    """Rank 0 could train with 100 and rank 1 with 41 only; no collective before that shows."""
    from batchfit.integrations.accelerate import find_executable_batch_size

    runs: list[list[int]] = []

    @find_executable_batch_size(starting_batch_size=128)
    def train(batch_size: int) -> str:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        runs.append([batch_size, 0])
        for _ in range(5):
            if batch_size > (41 if rank else 100):
                raise simulated_oom()
            weight.grad = torch.ones(2)
            optimizer.step()
            runs[-1][1] += 1
        return f"rank {rank} with {batch_size}"

    value = train()
    return value, [size for size, _ in runs], sum(steps for _, steps in runs)


@gloo
def test_all_ranks_run_the_same_sizes_and_end_with_one_that_fits_them_all() -> None:
    first, second = run_ranks(unequal, world_size=2)
    assert (first.error, second.error) == (None, None), first.trace + second.trace
    assert first.value[0] == "rank 0 with 40"
    assert second.value[0] == "rank 1 with 40"
    assert first.value[1] == second.value[1]
    assert second.value[1][0] == 128


def one_fails(rank: int) -> Any:
    from batchfit.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        if rank == 1:
            raise ValueError("a bad row on rank 1")

    train()


@gloo
def test_an_error_of_one_rank_ends_the_others_at_once() -> None:
    first, second = run_ranks(one_fails, world_size=2)
    assert second.error == "ValueError"
    assert first.error == "RankMissingError"
    assert "a bad row on rank 1" in first.text


def wrapped(rank: int) -> Any:
    """DDP: rank 1 has an OOM alone, in a step with collectives; the workload knows before the training."""
    from batchfit.integrations.accelerate import find_executable_batch_size

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    sizes: list[int] = []

    def make() -> batchfit.Workload:
        return batchfit.training(
            model, optimizer, lambda model, x: model(x).square().mean(), torch.ones(2, 64)
        )

    @find_executable_batch_size(starting_batch_size=4096, workload=make)
    def train(batch_size: int) -> None:
        sizes.append(batch_size)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(batch_size, 64)).square().mean().backward()
            optimizer.step()

    with virtual_memory("1MiB" if rank else "2MiB"):
        train()
    return sizes


@gloo
def test_a_workload_survives_a_rank_that_is_out_of_memory_alone_inside_a_collective() -> None:
    first, second = run_ranks(wrapped, world_size=2)
    assert (first.error, second.error) == (None, None), first.trace + second.trace
    assert first.value == second.value
    assert len(first.value) == 1
    assert 500 < first.value[0] < 2000


def alone_in_a_collective(rank: int) -> Any:
    from batchfit.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            if rank == 1 and step == 1:
                raise simulated_oom()
            model(torch.ones(batch_size, 4)).sum().backward()
            optimizer.step()
        return batch_size

    return train()


@gloo
@pytest.mark.slow
def test_a_rank_that_is_out_of_memory_alone_inside_a_collective_is_named_on_all() -> None:
    """At the process group's time-out, 30 s here: nothing can wake a rank that waits inside gloo."""
    outcomes = run_ranks(alone_in_a_collective, world_size=2, timeout_s=150)
    assert [outcome.error for outcome in outcomes] == ["CollectivesError"] * 2
    assert all("rank 1 ran out of memory at batch size 16" in outcome.text for outcome in outcomes)


def launched(rank: int, port: int) -> Any:
    """As `accelerate launch` does it: Accelerator makes the group, and wraps models in DDP."""
    import os

    for name, value in {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }.items():
        os.environ[name] = str(value)
    from accelerate import Accelerator
    from accelerate_state import prepared_models
    from torch.utils.data import DataLoader, TensorDataset

    from batchfit.integrations.accelerate import backward, find_executable_batch_size

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    data = TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(1)))
    runs: list[int] = []

    def weights(microbatch_size: int | None, batch_size: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size))
        assert isinstance(model, DistributedDataParallel)
        if batch_size > 20:  # on both ranks, before the gradients are reduced
            raise simulated_oom()
        mb = batchfit.Microbatcher(model, microbatch_size=microbatch_size)
        for (x,) in loader:
            with accelerator.accumulate(model):
                if microbatch_size is None:
                    accelerator.backward(model(x).square().mean())
                else:
                    backward(accelerator, mb, lambda micro: model(micro).square().mean(), x)
                optimizer.step()
                optimizer.zero_grad()
        return [float(value) for value in model.module.weight.detach().flatten()]

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> list[float]:
        runs.append(batch_size)
        return weights(None, batch_size)

    whole = train()
    prepared = len(prepared_models(accelerator))
    parts = weights(3, runs[-1])
    answer = [runs, prepared, max(abs(one - other) for one, other in zip(whole, parts, strict=True))]
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()
    return answer


@gloo
def test_a_launched_accelerator_prepares_searches_and_accumulates_on_two_ranks() -> None:
    first, second = run_ranks(launched, world_size=2, args=(_free_port(),), group=False, timeout_s=90)
    assert (first.error, second.error) == (None, None), first.trace + second.trace
    assert first.value == second.value
    runs, prepared, difference = first.value
    assert runs[0] == 64
    assert runs[-1] in (19, 20)
    assert prepared == 1  # those of the failed attempts are gone
    assert difference < 1e-6
