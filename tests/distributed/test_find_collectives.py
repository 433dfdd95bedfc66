"""find_batch_size where steps hold collectives: one rank's OOM, anywhere in a step, is everyone's answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from launch import run_ranks
from parallel_models import failing, make, operations, search, seeded

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)


def fails_alone(rank: int, kind: str, points: int, who: list[int]) -> Any:
    """Ranks `who` run out above 4 samples, in turn at several operations and steps of a trial."""
    found = []
    world = make(kind)
    seeded(world, rank, steps=3)
    count = operations(world)
    where = sorted({count * point // points for point in range(points)} | {count - 1})
    for number, at in enumerate(where):
        plain = make(kind)
        world = make(kind)
        warm = number % 2 * 3
        seeded(plain, rank, steps=warm + 2)
        seeded(world, rank, steps=warm)
        before = world.facts()
        in_step = 1 + number % 3
        step = failing(world.step, above=4, at=at, in_step=in_step) if rank in who else world.step
        fit = search(step, world)
        same = world.facts() == before
        world.step(3)
        world.step(3)
        found.append([at, fit.batch_size, fit.to_json(), same, world.facts() == plain.facts()])
    return found


@gloo
@pytest.mark.parametrize(
    ("kind", "points", "world_size", "who"),
    [
        ("ddp", 12, 2, [1]),
        ("ddp_buffers", 8, 2, [0]),
        ("fsdp2", 12, 2, [1]),
        ("fsdp2", 4, 4, [0, 2]),
        ("ddp", 4, 4, [0, 2, 3]),
        ("gathers", 6, 2, [1]),
    ],
)
def test_a_rank_that_runs_out_alone(kind: str, points: int, world_size: int, who: list[int]) -> None:
    outcomes = run_ranks(fails_alone, world_size=world_size, args=(kind, points, who), timeout_s=100)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert not outcome.killed_by_us, "hangs"
    first = outcomes[0].value
    assert len(first) > points // 2
    for outcome in outcomes:
        for (at, size, text, same, equal), (_, _, main, _, _) in zip(outcome.value, first, strict=True):
            assert size == 4, f"operation {at}"
            assert text == main, f"operation {at}: another result than rank 0's"
            assert same, f"operation {at}: state is not put back"
            assert equal, f"operation {at}: training on differs"
