"""A loop from a few of its passes: what is written is what all passes would have left in the trace."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.allocator import token_loops
from batchfit._engine.allocator.footprint import Origin, ShapeChangedError, Trace
from batchfit._engine.allocator.token_loops import TokenLoop, with_all_passes


@dataclass(frozen=True)
class Block:
    """One of a pass: its bytes at pass t, and when it is freed: some allocations later, or in the next."""

    fixed: int
    more: int
    lives: int  # allocations after its own; as many as there are, and the next pass frees it


BLOCKS = st.builds(Block, fixed=st.integers(0, 50), more=st.integers(0, 20), lives=st.integers(0, 6))


class Program:
    """Writes the trace of a loop: what is there before it, passes, and what comes after."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks, self.before = blocks, []
        self.sizes, self.events, self.origins = [], [], []  # type: ignore[var-annotated]
        self.spans: list[tuple[int, int]] = []

    def allocate(self, size: int, operation: str) -> int:
        self.sizes.append(size)
        self.origins.append(Origin("activations", "forward", operation=operation))
        self.events.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def one_pass(self, number: int) -> None:
        begin, mine = len(self.events), list[int]()
        frees: dict[int, list[int]] = {}
        handed_on = []
        for index, block in enumerate(self.blocks):
            made = self.allocate(block.fixed + block.more * number, f"op {index}")
            mine.append(made)
            if index + block.lives < len(self.blocks):
                frees.setdefault(index + block.lives, []).append(made)
            else:
                handed_on.append(made)
            self.events += [~one for one in frees.get(index, ())]
            if index < len(self.before):
                self.events.append(~self.before[index])
        self.before = handed_on
        self.spans.append((begin, len(self.events)))

    def jump(self, number: int) -> None:
        """What is handed on, as it would be after the pass of that number."""
        longer = [block for index, block in enumerate(self.blocks) if index + block.lives >= len(self.blocks)]
        for index, block in enumerate(longer):
            new = self.allocate(block.fixed + block.more * number, "jump")
            self.events.append(~self.before[index])
            self.before[index] = new

    def trace(self, numbers: list[int]) -> tuple[Trace, list[tuple[int, int]]]:
        held = self.allocate(100, "weights")
        begins = len(self.events)
        at = 0
        for number in numbers:
            if number > at + 1:
                self.jump(number - 1)
            self.one_pass(number)
            at = number
        self.events += [~one for one in self.before]
        after = self.allocate(7, "after")
        self.events += [~after]
        ends = (len(self.events),)
        assert held == 0
        found = Trace(3, tuple(self.sizes), tuple(self.origins), tuple(self.events), begins, ends)
        return found, self.spans


def loop_of(spans: list[tuple[int, int]], numbers: list[int], count: int) -> TokenLoop:
    first, a, b, c, d = spans
    return TokenLoop(first, (a, b), (c, d), (numbers[2], numbers[4]), count)


@examples(200)
@given(
    blocks=st.lists(BLOCKS, min_size=1, max_size=6),
    early=st.integers(3, 6),
    late=st.integers(8, 12),
    after=st.integers(0, 3),
)
def test_all_passes_are_written_as_they_would_have_been_traced(
    blocks: list[Block], early: int, late: int, after: int
) -> None:
    count, numbers = late + after, [1, early - 1, early, late - 1, late]
    every, _ = Program(blocks).trace(list(range(1, count + 1)))
    few, spans = Program(blocks).trace(numbers)
    written = with_all_passes(few, [loop_of(spans, numbers, count)])
    assert written.ordered() == every.ordered()


@pytest.mark.parametrize(
    ("count", "most", "written"),
    [
        (11, 8, [2, 9, 10, 11]),
        (11, 20, [*range(2, 12)]),
        (12, 20, [2, 4, *range(6, 13)]),
        (100, 20, [2, 48, *range(94, 101)]),
        (100, 1, [2, 98, 99, 100]),  # a pass of very many events
    ],
)
def test_of_a_long_loop_the_last_passes_are_written_and_some_before_them(
    monkeypatch: pytest.MonkeyPatch, count: int, most: int, written: list[int]
) -> None:
    numbers = [1, 2, 3, 9, 10]
    few, spans = Program([Block(10, 3, 9)]).trace(numbers)
    monkeypatch.setattr(token_loops, "_MOST_EVENTS", most)  # of 2 a pass
    found = with_all_passes(few, [loop_of(spans, numbers, count)])
    assert found.sizes == (100, 13, *(10 + 3 * number for number in written), 7)
    assert found.peak_bytes == 100 + sum(10 + 3 * number for number in written[-2:])


class TestRefused:
    NUMBERS = (1, 2, 3, 9, 10)

    def few(self) -> tuple[Trace, TokenLoop]:
        few, spans = Program([Block(10, 3, 9), Block(5, 0, 0)]).trace(list(self.NUMBERS))
        return few, loop_of(spans, list(self.NUMBERS), 12)

    def test_another_operation_in_the_late_pass(self) -> None:
        few, loop = self.few()
        origins = list(few.origins)
        block = next(event for event in few.events[slice(*loop.late[1])] if event >= 0)
        origins[block] = Origin("activations", "forward", operation="another")
        changed = Trace(few.size, few.sizes, tuple(origins), few.events, few.begins, few.step_ends)
        with pytest.raises(ShapeChangedError, match="not alike"):
            with_all_passes(changed, [loop])

    def test_a_pass_that_frees_what_is_older_than_the_last(self) -> None:
        few, loop = self.few()
        events = list(few.events)
        events.insert(loop.late[1][1] - 1, ~0)  # the weights
        late = (loop.late[0], (loop.late[1][0], loop.late[1][1] + 1))
        changed = Trace(few.size, few.sizes, few.origins, tuple(events), few.begins, (len(events),))
        with pytest.raises(ShapeChangedError, match="older than the pass before"):
            with_all_passes(changed, [TokenLoop(loop.first, loop.early, late, loop.numbers, loop.count)])

    def test_what_was_there_before_goes_between_the_passes(self) -> None:
        few, loop = self.few()
        events = list(few.events)
        events.insert(loop.early[1][1], ~0)
        late = tuple((begin + 1, end + 1) for begin, end in loop.late)
        changed = Trace(few.size, few.sizes, few.origins, tuple(events), few.begins, (len(events),))
        with pytest.raises(ShapeChangedError, match="frees late"):
            with_all_passes(
                changed, [TokenLoop(loop.first, loop.early, (late[0], late[1]), loop.numbers, loop.count)]
            )

    def test_what_a_pass_between_made_is_freed_at_the_end(self) -> None:
        few, loop = self.few()
        block = next(event for event in few.events[slice(*loop.early[1])] if event >= 0)
        kept = [event for event in few.events if event != ~block] + [~block]
        moved = len(few.events[: loop.late[1][0]]) - len(
            [event for event in few.events[: loop.late[1][0]] if event != ~block]
        )
        late = tuple((begin - moved, end - moved) for begin, end in loop.late)
        changed = Trace(few.size, few.sizes, few.origins, tuple(kept), few.begins, (len(kept),))
        with pytest.raises(ShapeChangedError, match="leaves behind"):
            with_all_passes(
                changed, [TokenLoop(loop.first, loop.early, (late[0], late[1]), loop.numbers, loop.count)]
            )
