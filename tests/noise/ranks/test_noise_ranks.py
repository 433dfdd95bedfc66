"""The noise scale over the ranks of DDP: real processes, against per-sample gradients of the joined batch."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn

from batchfit import GradientNoise, Microbatcher
from batchfit._noise.pure.estimate import observe

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
SIZES = [3, 5]
DIMENSIONS, STEPS = 6, 30


def samples(rank: int, step: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(SIZES[rank], DIMENSIONS, generator=made, dtype=torch.float64) + 1.0


class Dot(nn.Module):
    """Its gradient for a sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(DIMENSIONS // 2, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(DIMENSIONS // 2, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.cat([self.first, self.second])).mean()


def ddp(rank: int) -> Any:
    """(readings and states with a hook, a joined reading of two ranks that measure alone)"""
    model = nn.parallel.DistributedDataParallel(Dot(), bucket_cap_mb=1)
    noise = GradientNoise(model)
    noise.watch_ranks(model)
    alone = GradientNoise(own := Dot())
    mb = Microbatcher(own, microbatch_size=2, noise=alone)
    for step in range(STEPS):
        model.zero_grad()
        batch = samples(rank, step)
        if step % 2:  # accumulated: the hook sees the sum
            with model.no_sync():
                (model(batch[:2]) * 2 / len(batch)).backward()
            (model(batch[2:]) * (len(batch) - 2) / len(batch)).backward()
        else:
            model(batch).backward()
        noise.microbatch(len(batch))
        noise.total()
        own.zero_grad()
        mb.backward(own, batch)
    refused = ""
    try:
        noise.reading(group=dist.group.WORLD)
    except ValueError as error:
        refused = str(error)
    joined = alone.reading(group=dist.group.WORLD)
    return asdict(noise.reading()), noise.state_dict(), asdict(joined), asdict(alone.reading()), refused


def test_two_ranks_are_two_parts_of_a_batch() -> None:
    outcomes = run_ranks(ddp, world_size=2, timeout_s=120)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    (reading, state, joined, first, refused), (other, other_state, other_joined, second, _) = (
        outcome.value for outcome in outcomes
    )
    assert (reading, state, joined) == (other, other_state, other_joined)
    pairs = []
    for step in range(STEPS):
        means = [samples(rank, step).mean(0) for rank in range(2)]
        norms = [float(mean.square().sum()) for mean in means]
        total = float(((means[0] + means[1]) / 2).square().sum())
        pairs.append(observe(SIZES, norms, total, weights=[1.0, 1.0]))
    # The samples of all ranks count; weights of steps differ by less than their memory of 200.
    assert reading["samples"] == STEPS * sum(SIZES)
    weights = [math.exp((step - STEPS) / 200) for step in range(STEPS)]
    for name in ("noise", "signal"):
        values = [getattr(pair, name) for pair in pairs]
        mean = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        assert reading[name] == pytest.approx(mean, rel=1e-9)
    assert first["noise"] != second["noise"]
    assert joined["noise"] == pytest.approx((first["noise"] + second["noise"]) / 2)
    assert joined["samples"] == STEPS * sum(SIZES)
    assert "group must be None with watch_ranks" in refused


def scaled_and_weighted(rank: int) -> Any:
    """(the state of plain steps, of the same steps by a GradScaler, of the same with a factor a rank)"""
    states = []
    for way in ("plain", "scaler", "weight"):
        model = nn.parallel.DistributedDataParallel(Dot())
        noise = GradientNoise(model)
        noise.watch_ranks(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if way == "scaler" else None
        share = SIZES[rank] * len(SIZES) / sum(SIZES) if way == "weight" else None
        for step in range(STEPS):
            model.zero_grad()
            batch = samples(rank, step)
            loss = model(batch) * (share or 1.0)
            (loss if scaler is None else scaler.scale(loss)).backward()
            noise.microbatch(len(batch), share=share, scaler=scaler)
            noise.total(scaler=scaler)
        states.append(noise.state_dict())
    return states


def test_a_scaler_and_the_factors_of_ranks_are_taken_out() -> None:
    outcomes = run_ranks(scaled_and_weighted, world_size=2, timeout_s=120)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
    assert outcomes[0].value == outcomes[1].value
    plain, scaler, weight = outcomes[0].value
    assert scaler == pytest.approx(plain, rel=1e-9)
    # With its part of the samples as the factor of each rank, the gradient is that of the joined batch.
    pairs = []
    for step in range(STEPS):
        means = [samples(rank, step).mean(0) for rank in range(2)]
        norms = [float(mean.square().sum()) for mean in means]
        joined = torch.cat([samples(rank, step) for rank in range(2)]).mean(0)
        pairs.append(observe(SIZES, norms, float(joined.square().sum())))
    weights = [math.exp((step - STEPS) / 200) for step in range(STEPS)]
    for name in ("noise", "signal"):
        values = [getattr(pair, name) for pair in pairs]
        mean = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        assert weight[name] == pytest.approx(mean, rel=1e-9)
    assert weight["signal"] != pytest.approx(plain["signal"], rel=1e-3)
