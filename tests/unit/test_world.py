"""A batch dealt out over ranks: all of it, once, whatever their number, and however often that changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchfit._decide.world import Progress, local_batch, local_span

WORLDS = st.integers(1, 9)


@settings(deadline=None)
@given(batch_size=st.integers(1, 200), world_size=WORLDS)
def test_the_parts_are_the_batch_and_nearly_equal(batch_size: int, world_size: int) -> None:
    parts = [local_batch(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sum(parts) == batch_size
    assert max(parts) - min(parts) <= 1
    assert parts == sorted(parts, reverse=True)
    spans = [local_span(batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [sample for span in spans for sample in span] == list(range(batch_size))


@settings(deadline=None)
@given(
    batch_size=st.integers(1, 40),
    worlds=st.lists(WORLDS, min_size=1, max_size=8),
    microbatch_size=st.none() | st.integers(1, 16),
)
def test_restarts_with_other_numbers_of_ranks_see_every_sample_once(
    batch_size: int, worlds: list[int], microbatch_size: int | None
) -> None:
    progress = Progress(batch_size=batch_size, microbatch_size=microbatch_size)
    seen: list[int] = []
    for world_size in worlds:
        for rank in range(world_size):
            span = progress.span(rank=rank, world_size=world_size)
            pieces = progress.microbatches(rank=rank, world_size=world_size)
            assert sum(pieces) == len(span)
            assert all(0 < piece <= (microbatch_size or batch_size) for piece in pieces)
            seen += span
        progress = progress.after_step()
    assert seen == list(range(batch_size * len(worlds)))


@pytest.mark.parametrize(
    ("settings_given", "words"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer, not 0"),
        ({"batch_size": 4, "samples_seen": -1}, "samples_seen must be an integer of at least 0, not -1"),
        (
            {"batch_size": 4, "microbatch_size": 0},
            "microbatch_size must be a positive integer or None, not 0",
        ),
    ],
)
def test_wrong_values_are_named(settings_given: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Progress(**settings_given)
    with pytest.raises(ValueError, match="rank must be an integer from 0 to 1, not 2"):
        local_batch(4, rank=2, world_size=2)
