"""The last lines of a program: as a person would want them."""

from __future__ import annotations

from batchfit._program.pure.tail import Tail


def test_lines_come_in_parts_and_a_progress_bar_is_its_last_state() -> None:
    tail = Tail()
    for part in ("load", "ing\n\n", "10%\r50%\r", "100%\r\n\x1b[31mred\x1b[0m\nlast"):
        tail.take(part)
    assert tail.lines() == ["loading", "100%", "red", "last"]
    assert tail.lines(2) == ["red", "last"]


def test_it_does_not_grow_with_what_is_printed() -> None:
    tail = Tail()
    for _ in range(100):
        tail.take("x" * 10_000)
    tail.take("\n" + "line\n" * 10_000)
    assert len(tail.lines(10_000)) <= 200
    assert all(len(line) <= 400 for line in tail.lines(10_000))
