"""profile_throughput on several ranks: the same sizes, one result, and a rank that lags is named."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchfit
from batchfit.results import ThroughputProfile
from batchfit.testing import FakeDevice

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
MIB = 2**20


def ddp(rank: int, lag_s: float) -> Any:
    """A step of DDP in which rank 1 does something else for a while."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(0.06 + (lag_s if rank == 1 else 0.0))
        return model(batch).square().mean()

    work = batchfit.training(model, optimizer, loss_fn, torch.ones(2, 16))
    before = [one.detach().clone() for one in model.parameters()]
    profile = batchfit.profile_throughput(work, sizes=[2, 4], budget="64MiB")
    same = all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    return profile.to_json(), same


@gloo
@pytest.mark.parametrize("lag_s", [0.05, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_rank_that_lags_is_named(lag_s: float) -> None:
    outcomes = run_ranks(ddp, world_size=2, args=(lag_s,))
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    (first, same), (second, also) = (outcome.value for outcome in outcomes)
    assert first == second
    assert same
    assert also
    profile = ThroughputProfile.from_json(first)
    assert profile.world_size == 2
    point = profile.at(4)
    assert point.samples_per_s == pytest.approx(2 * 4 / point.step_s)
    if lag_s:
        assert [one.kind for one in profile.bottlenecks] == ["sync-bound"]
        assert "rank 1" in profile.bottlenecks[0].evidence
    else:
        assert not any("lag" in one.evidence or "rank 1" in one.evidence for one in profile.bottlenecks)


def unequal(rank: int) -> Any:
    """Rank 1 needs twice the memory a sample: its limit is everyone's."""
    device = FakeDevice(100 * MIB, peak=lambda size: size * MIB * (rank + 1))
    sizes: list[int] = []

    def step(size: int) -> None:
        sizes.append(size)
        device.step(size)
        time.sleep(0.002)

    profile = batchfit.profile_throughput(
        batchfit.Workload(step, state=[]), device=device, sizes=[8, 64, 32], diagnose=False
    )
    return profile.to_json(), sorted(set(sizes)), len(sizes)


@gloo
def test_one_ranks_oom_is_everyones() -> None:
    outcomes = run_ranks(unequal, world_size=2)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    (first, sizes, _), (second, also, _) = (outcome.value for outcome in outcomes)
    assert first == second
    assert sizes == also == [8, 32, 64]
    profile = ThroughputProfile.from_json(first)
    assert profile.too_large == (64,)
    assert [point.size for point in profile.points] == [8, 32]


def other_settings(rank: int) -> Any:
    work = batchfit.Workload(lambda size: None, state=[])
    return batchfit.profile_throughput(work, device=FakeDevice(MIB), sizes=[rank + 1]).to_json()


@gloo
def test_ranks_with_other_settings_are_reported() -> None:
    outcomes = run_ranks(other_settings, world_size=2)
    assert [outcome.error for outcome in outcomes] == ["RanksDisagreeError"] * 2
