"""A run that goes on with another number of ranks: real processes, 2, then 4, then 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchfit

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
STEPS = 3


def train(rank: int, state: dict[str, Any]) -> dict[str, Any]:
    """Three steps of batches of 10 in microbatches of at most 2, from a checkpoint to the next."""
    data = torch.linspace(-1, 1, 3 * 100, dtype=torch.float64).sin().view(100, 3)
    dataset = [(number, data[number]) for number in range(100)]
    loader = batchfit.ResizableLoader(dataset, 10, shuffle=True, seed=3)
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), state["weights"], strict=True):
            parameter.copy_(torch.tensor(values, dtype=torch.float64))
    if "loader" in state:
        loader.load_state_dict(state["loader"])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mb = batchfit.Microbatcher(wrapped, microbatch_size=2)
    if "mb" in state:
        mb.load_state_dict(state["mb"])
    seen: list[int] = []
    for _, (numbers, samples) in zip(range(STEPS), loader, strict=False):
        seen += numbers.tolist()
        optimizer.zero_grad()
        report = mb.backward(lambda micro: wrapped(micro).square().mean(), samples)
        assert max(report.microbatch_sizes) <= 2
        mb.step(optimizer)
    return {
        "weights": [parameter.tolist() for parameter in model.parameters()],
        "loader": loader.state_dict(),
        "mb": mb.state_dict(),
        "seen": seen,
    }


@gloo
def test_two_then_four_then_one_rank_train_as_one() -> None:
    start: dict[str, Any] = {"weights": [[[0.5, -0.25, 0.125]], [0.0]]}
    state, seen = start, []
    for world_size in (2, 4, 1):
        outcomes = run_ranks(train, world_size=world_size, args=(state,))
        assert [outcome.error for outcome in outcomes] == [None] * world_size, outcomes[0].trace
        state = outcomes[0].value
        assert all(outcome.value["weights"] == state["weights"] for outcome in outcomes)
        assert all(outcome.value["loader"] == state["loader"] for outcome in outcomes)
        seen.append(sorted(sample for outcome in outcomes for sample in outcome.value["seen"]))
    alone = start
    for samples in seen:
        alone = run_ranks(train, world_size=1, args=(alone,))[0].value
        assert sorted(alone["seen"]) == samples
    assert len({sample for samples in seen for sample in samples}) == 3 * STEPS * 10
    for mine, theirs in zip(state["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)
