"""A run that goes on with another number of ranks: real processes, 2, then 4, then 1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn

from batchfit._decide.world import Progress

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
BATCH, STEPS = 10, 2


def train(rank: int, state: Any) -> Any:
    """Two steps of batches of 10, dealt out over all ranks in microbatches of at most 2."""
    progress = Progress(**state["progress"])
    model = nn.Linear(3, 1, dtype=torch.float64)
    with torch.no_grad():
        for parameter, values in zip(model.parameters(), state["weights"], strict=True):
            parameter.copy_(torch.tensor(values, dtype=torch.float64))
    data = torch.linspace(-1, 1, 3 * 100, dtype=torch.float64).sin().view(100, 3)
    seen: list[int] = []
    world_size = dist.get_world_size()
    for _ in range(STEPS):
        model.zero_grad()
        span = list(progress.span(rank=rank, world_size=world_size))
        at = 0
        for size in progress.microbatches(rank=rank, world_size=world_size):
            part = span[at : at + size]
            (model(data[part]).square().sum() / progress.batch_size).backward()
            at, seen = at + size, seen + part
        with torch.no_grad():
            for parameter in model.parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(gradient)
                parameter -= 0.1 * gradient
        progress = progress.after_step()
    kept = {"batch_size": progress.batch_size, "samples_seen": progress.samples_seen}
    weights = [parameter.tolist() for parameter in model.parameters()]
    return {"progress": {**kept, "microbatch_size": 2}, "weights": weights, "seen": seen}


@gloo
def test_two_then_four_then_one_rank_train_as_one() -> None:
    start: Any = {"progress": {"batch_size": BATCH, "microbatch_size": 2}}
    start["weights"] = [[[0.5, -0.25, 0.125]], [0.0]]
    state, seen = start, []
    for world_size in (2, 4, 1):
        outcomes = run_ranks(train, world_size=world_size, args=(state,))
        assert [outcome.error for outcome in outcomes] == [None] * world_size, outcomes[0].trace
        state = outcomes[0].value
        assert all(outcome.value["weights"] == state["weights"] for outcome in outcomes)
        seen += [sample for outcome in outcomes for sample in outcome.value["seen"]]
    assert sorted(seen) == list(range(3 * STEPS * BATCH))
    alone = start
    for _ in range(3):
        alone = run_ranks(train, world_size=1, args=(alone,))[0].value
    for mine, theirs in zip(state["weights"], alone["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-12, atol=1e-12)
