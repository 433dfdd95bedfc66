"""Batches by tokens on real ranks under DDP, which hangs where one rank has a batch more than another."""

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
LENGTHS = [1 + number * 13 % 47 for number in range(150)]
DATA = [
    (number, torch.linspace(0, 1, length, dtype=torch.float64) + number / 150)
    for number, length in enumerate(LENGTHS)
]


def padded(samples: list[tuple[int, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, values = zip(*samples, strict=True)
    return torch.tensor(numbers), nn.utils.rnn.pad_sequence(list(values), batch_first=True)


def train(rank: int, state: dict[str, Any], max_tokens: int, steps: int | None) -> dict[str, Any]:
    """So many steps from a checkpoint to the next, or to the end of the epoch."""
    sampler = batchfit.TokenBatchSampler(LENGTHS, max_tokens, seed=3)
    loader = batchfit.ResizableLoader(DATA, batch_sampler=sampler, collate_fn=padded)
    model = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(state["weights"][0])
        model.bias.fill_(state["weights"][1])
    if "loader" in state:
        loader.load_state_dict(state["loader"])
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[list[int]] = []
    for numbers, values in loader:
        seen.append(numbers.tolist())
        assert values.numel() <= max_tokens
        optimizer.zero_grad()
        loss = wrapped(values.sum(1, keepdim=True) / 47).square().mean()
        (loss * loader.weight).backward()
        optimizer.step()
        if len(seen) == steps:
            break
    return {"weights": [model.weight.item(), model.bias.item()], "loader": loader.state_dict(), "seen": seen}


def alone(weights: list[float], steps: list[list[int]]) -> list[float]:
    """The same steps in one process, each of all samples at once."""
    model = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(weights[0])
        model.bias.fill_(weights[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for numbers in steps:
        sums = torch.stack([DATA[number][1].sum() for number in numbers])[:, None]
        optimizer.zero_grad()
        model(sums / 47).square().mean().backward()
        optimizer.step()
    return [model.weight.item(), model.bias.item()]


def check(runs: list[tuple[int, int, int | None]]) -> None:
    """Runs of so many ranks, tokens and steps, each from the checkpoint of the one before."""
    state: dict[str, Any] = {"weights": [0.5, -0.25]}
    came: list[int] = []
    for world_size, max_tokens, steps in runs:
        before = state
        outcomes = run_ranks(train, world_size=world_size, args=(before, max_tokens, steps))
        assert [outcome.error for outcome in outcomes] == [None] * world_size, outcomes[0].trace
        state = outcomes[0].value
        assert all(outcome.value["loader"] == state["loader"] for outcome in outcomes)
        assert all(outcome.value["weights"] == state["weights"] for outcome in outcomes)
        of_ranks = [outcome.value["seen"] for outcome in outcomes]
        together = [[number for mine in step for number in mine] for step in zip(*of_ranks, strict=True)]
        assert state["weights"] == pytest.approx(alone(before["weights"], together), rel=1e-12)
        came += [number for step in together for number in step]
    assert len(came) == len(set(came))
    assert set(came) == set(range(len(LENGTHS)))


@gloo
def test_two_ranks_train_as_one_then_one_rank_goes_on() -> None:
    check([(2, 96, 4), (1, 160, None)])


@gloo
@pytest.mark.slow
def test_any_number_of_ranks_goes_on_with_other_tokens() -> None:
    check([(3, 64, 5), (4, 128, 2), (2, 47, 6), (4, 80, None)])
