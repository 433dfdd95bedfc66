"""When a soak has shown all: an allocator that goes in circles, simulated and for all time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from examples import examples
from hypothesis import event, given
from hypothesis import strategies as st

from batchfit._engine.allocator.caching import MIB, Block, CachingAllocator
from batchfit._engine.device.pure.allocator_state import AllocatorState, layout_of
from batchfit._engine.trial.pure.soak import LEAST, allocator_repeats

KIB = 2**10


def marks(
    layouts: Iterable[int],
    *,
    requests: Sequence[int] = (7,),
    retries_at: frozenset[int] = frozenset(),
    updates: Sequence[int] = (),
) -> list[AllocatorState]:
    """`updates`: how many steps each optimizer waits from one move to the next."""
    found, asked, retries = [], 0, 0
    for step, layout in enumerate(layouts):
        asked += requests[step % len(requests)]
        retries += step in retries_at
        moved = tuple((step + 1) // every for every in updates)
        found.append(AllocatorState(layout, retries, asked, 100 * asked, moved))
    return found


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_rounds_of_a_few_steps(steps: int) -> None:
    assert allocator_repeats(marks(number % steps for number in range(LEAST)))
    assert not allocator_repeats(marks(number % steps for number in range(LEAST - 1))), "too few"


def test_a_round_may_have_five_steps_once_there_are_two_of_them() -> None:
    assert not allocator_repeats(marks(number % 5 for number in range(10))), (
        "what the first step asked is not known"
    )
    assert allocator_repeats(marks(number % 5 for number in range(11)))
    assert not allocator_repeats(marks(number % 6 for number in range(40))), "nobody waits for longer ones"


def test_what_moves_on_does_not_go_round() -> None:
    assert not allocator_repeats(marks(range(25)))
    assert not allocator_repeats(marks([*[0] * 20, 1])), "the last step went elsewhere"
    assert allocator_repeats(marks([*range(7), *[7] * 6])), "how it began is no matter"
    assert not allocator_repeats(marks([*range(7), *[7] * 5])), "the first of the five came from elsewhere"


def test_two_steps_alike_are_no_round() -> None:
    """The third one of three is large, and comes after two small ones."""
    found = marks([0] * 11, requests=[7, 7, 90])
    assert allocator_repeats(found), "as a round of three"
    assert not allocator_repeats(
        [*found, AllocatorState(5, 0, found[-1].requests + 7, found[-1].requested_bytes + 700)]
    )
    assert not allocator_repeats(marks([0] * 25, requests=[*[7] * 5, 90])), (
        "a round of six: not seen as one of one"
    )


def test_steps_that_leave_the_same_but_ask_for_something_else() -> None:
    """Samples of other lengths: all is gone when the step ends, and the next one may need more."""
    assert not allocator_repeats(marks([0] * 25, requests=[7, 9, 8, 7, 6, 5, 9, 3, 11, 2, 4]))
    assert allocator_repeats(marks([0] * 25, requests=[7, 9])), "by turns: a round of two"


def test_a_branch_that_is_taken_now_and_then_comes_again() -> None:
    often = [90, 7, 7, 90, 7, 90, 90, 7, 90, 7, 7, 7, 7, 7, 7, 90, 90, 7]
    assert not any(allocator_repeats(marks([0] * count, requests=often)) for count in range(len(often)))
    begins = [50, 50, 7, 60, *[7] * 11]  # the second of two kernels was compiled in the fourth step
    assert [allocator_repeats(marks([0] * count, requests=begins)) for count in (10, 13, 14)] == [
        False,
        False,
        True,
    ]
    assert allocator_repeats(marks([0] * 10, requests=[90, 80, *[7] * 8])), "the first two are the warm-up"


@pytest.mark.parametrize("every", [1, 4, 5, 6, 7, 16])
def test_an_optimizer_that_waits_has_not_shown_what_it_needs(every: int) -> None:
    """While gradients are added up, all steps ask for the same; Adam makes its state in the last of them."""
    assert allocator_repeats(marks([0] * 14, updates=[1, every])) is (every <= 5)
    assert allocator_repeats(marks([0] * 14, updates=[])), "none, as in inference"


@pytest.mark.parametrize(("at", "goes"), [(3, True), (5, True), (6, False), (11, False)])
def test_a_retry_in_a_round_comes_again_for_ever(at: int, goes: bool) -> None:
    assert allocator_repeats(marks([0] * 12, retries_at=frozenset({at}))) is goes


# Any program, on the simulated allocator: once it goes round, it goes on like that.


class Program:
    """Steps that take and free blocks in a fixed order; some live on into the next step."""

    def __init__(self, capacity_bytes: int, steps: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.device, self.capacity_bytes = CachingAllocator(capacity_bytes), capacity_bytes
        self.steps, self.number = steps, 0
        self.live: list[tuple[int, Block]] = []  # with the moment at which each is freed
        self.moment = self.requests = self.requested_bytes = 0

    def step(self) -> bool:
        """Whether there was room."""
        for size, moments in self.steps[self.number % len(self.steps)]:
            self.moment += 1
            for ends, block in [one for one in self.live if one[0] <= self.moment]:
                self.device.free(block)
                self.live.remove((ends, block))
            block = self.device.allocate(size)
            if block is None:
                return False
            self.requests, self.requested_bytes = self.requests + 1, self.requested_bytes + size
            self.live.append((self.moment + moments, block))
        self.number += 1
        return True

    def mark(self) -> AllocatorState:
        """As `CudaDevice.mark` reads a real allocator."""
        device = self.device
        every = [block for _, block in self.live]
        every += [*device.small.blocks.values(), *device.large.blocks.values()]
        small = [one for one in every if one.pool is device.small]
        layout = layout_of(
            ((one.address, one.size, one.live) for one in every if one.pool is device.large),
            ((one.address, one.size, one.live) for one in small),
            small_bytes=sum(one.size for one in small),
            held_bytes=sum(one.size for one in every if one.live),
            room_bytes=self.capacity_bytes - device.reserved_bytes,
        )
        return AllocatorState(layout, device.retries, self.requests, self.requested_bytes)


sizes = st.one_of(
    st.integers(1, 64).map(lambda count: count * 16 * KIB),
    st.integers(1, 80).map(lambda count: count * MIB // 2 + 4 * KIB),
)
step_of = st.lists(st.tuples(sizes, st.integers(1, 40)), min_size=1, max_size=12)


@examples(400)
@given(st.lists(step_of, min_size=1, max_size=3), st.integers(40, 600))
def test_what_repeats_is_never_out_of_memory_and_never_retries_again(
    steps: list[list[tuple[int, int]]], capacity: int
) -> None:
    program = Program(capacity * MIB, steps)
    found: list[AllocatorState] = []
    while len(found) < 40 and not allocator_repeats(found):
        if not program.step():
            event("ran out first")
            return
        found.append(program.mark())
    event("goes round" if allocator_repeats(found) else "does not within 40 steps")
    if allocator_repeats(found):
        retries = program.device.retries
        assert all(program.step() for _ in range(120))
        assert program.device.retries == retries
