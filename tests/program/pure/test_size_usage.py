"""What a program does with the size, from what two sizes showed."""

from __future__ import annotations

import pytest

from batchfit._program.pure.size_use import SizeUse, largest_batch, note_use, wrong_use
from batchfit.errors import ProgramError


def use(
    size: int, *, samples: int, passes: int = 1, peak: int | None = 1000, elements: int | None = None
) -> SizeUse:
    elements = 10 * samples if elements is None else elements
    return SizeUse(size=size, samples=samples, elements=elements, passes=passes, peak_bytes=peak)


def test_a_program_that_uses_the_size() -> None:
    uses = [use(1, samples=1), use(8, samples=8, peak=8000)]
    assert wrong_use(uses) == ""
    assert largest_batch(uses) is None


def test_accumulation_is_said_with_both_sizes() -> None:
    text = wrong_use([use(8, samples=8), use(64, samples=8, passes=8)])
    assert "at 8 a step is 1 x 8 samples, at 64 it is 8 x 8, so" in text


def test_a_size_that_changes_nothing() -> None:
    assert "the size changes nothing" in wrong_use([use(1, samples=32), use(16, samples=32)])


def test_a_first_dimension_that_is_no_batch_says_nothing_where_memory_grows() -> None:
    assert wrong_use([use(1, samples=128), use(16, samples=128, peak=9000)]) == ""


def test_sequences_before_the_batch_or_packed_ones_use_the_size_where_they_hold_more() -> None:
    assert wrong_use([use(1, samples=128, elements=128), use(2, samples=128, elements=256)]) == ""


def test_without_readings_or_twice_the_size_nothing_is_said() -> None:
    assert wrong_use([use(8, samples=8, peak=None), use(64, samples=8, peak=None)]) == ""
    assert wrong_use([use(8, samples=8), use(9, samples=8)]) == ""


def test_sizes_beyond_the_samples_say_nothing_of_each_other() -> None:
    uses: list[SizeUse] = []
    beyond = [use(size, samples=50, peak=9000) for size in (100, 1000)]
    assert note_use(uses, use(4, samples=4)) is None
    assert [note_use(uses, one) for one in beyond] == [50, 50]
    assert [one.size for one in uses] == [4]
    with pytest.raises(ProgramError, match="the size changes nothing"):
        note_use(uses, use(8, samples=4))


def test_a_dataset_that_ends() -> None:
    assert largest_batch([use(4, samples=4), use(64, samples=50, peak=9000)]) == 50
    # Two views per sample: what counts is the size, not the rows.
    assert largest_batch([use(4, samples=8), use(64, samples=100, peak=9000)]) == 50
    assert largest_batch([use(4, samples=3), use(64, samples=50, peak=9000)]) is None
