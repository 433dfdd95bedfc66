"""After the program has ended: what is an OOM, and with which size it is started again."""

from __future__ import annotations

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._find.pure.bracket import Sizes
from batchfit._program.pure.after_exit import Ending, first_line, next_size
from batchfit._program.pure.run_options import RunOptions

ALL = Sizes.between(1, 2**30)


@pytest.mark.parametrize(("code", "shown"), [(0, 0), (3, 3), (-9, 137), (-15, 143), (255, 255)])
def test_an_exit_code_is_what_a_shell_would_say(code: int, shown: int) -> None:
    assert Ending(code=code).exit_code == shown


@pytest.mark.parametrize(
    ("ending", "is_oom"),
    [
        (Ending(code=1, oom="CUDA out of memory"), True),
        (Ending(code=0, oom="caught, and went on"), False),
        (Ending(code=1, oom="CUDA out of memory", stopped=True), False),
        (Ending(code=1), False),
        (Ending(code=-9, kernel_kills=1), True),
        (Ending(code=137, kernel_kills=1), True),
        (Ending(code=-9), False),
        (Ending(code=1, kernel_kills=1), False),
        (Ending(code=-11, kernel_kills=1), False),
    ],
)
def test_what_counts_as_out_of_memory(ending: Ending, is_oom: bool) -> None:
    assert bool(ending.too_large) == is_oom


def test_the_next_size_is_four_fifths_or_one_that_ran_a_little_below() -> None:
    assert next_size(100, ALL, []) == 80
    assert next_size(100, ALL, [89, 95, 100]) == 89
    assert next_size(2, ALL, []) == 1
    assert next_size(1, ALL, []) is None
    assert next_size(96, Sizes.between(1, 2**30, multiple_of=32), []) == 64
    assert next_size(64, Sizes.between(1, 2**30, doubling=True), []) == 32
    assert next_size(8, Sizes.between(8, 64), [4]) is None
    assert next_size(6, Sizes.between(1, 64, multiple_of=5), []) == 5


@given(
    size=st.integers(1, 10_000),
    least=st.integers(1, 50),
    of=st.integers(1, 16),
    doubling=st.booleans(),
    ran=st.lists(st.integers(1, 10_000), max_size=4),
)
@examples(200)
def test_each_start_is_smaller_and_allowed(
    size: int, least: int, of: int, doubling: bool, ran: list[int]
) -> None:
    sizes = Sizes.between(least, 2**30, multiple_of=of, doubling=doubling)
    starts = [size]
    while (following := next_size(starts[-1], sizes, ran)) is not None:
        assert following in sizes
        assert following < starts[-1]
        starts.append(following)
    assert starts[-1] == min(size, sizes.first)


def test_a_reason_is_one_short_line() -> None:
    long = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79"
    )
    assert first_line(long) == "CUDA out of memory. Tried to allocate 20.00 MiB"
    assert first_line("a\nb") == "a"
    assert len(first_line("x" * 500)) == 100
    assert first_line("") == ""


def test_a_margin_stays_below_the_largest() -> None:
    assert RunOptions().size_of(100, ALL) == 100
    assert RunOptions(margin=0.1).size_of(100, ALL) == 90
    assert RunOptions(margin=0.1).size_of(100, Sizes.between(1, 2**30, multiple_of=32)) == 64
    assert RunOptions(margin=0.9).size_of(1, ALL) == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size must be"),
        ({"restarts": -1}, "restarts must be"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1"),
        ({"margin": float("nan")}, "margin must be at least 0 and below 1"),
        ({"size": 4, "margin": 0.1}, "margin must be left out with size"),
    ],
)
def test_wrong_options_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunOptions(**values)  # type: ignore[arg-type]
