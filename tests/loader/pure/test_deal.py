"""Batches and ranks: every sample once, in order, whatever is wanted, cancelled and lost on the way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._loader.pure.deal import Deal, DealtSamples, Tape, count_batches, cut, share

several = examples(150)


@pytest.mark.parametrize(
    ("size", "world_size", "sizes"), [(17, 4, [5, 4, 4, 4]), (16, 4, [4] * 4), (3, 3, [1] * 3), (9, 1, [9])]
)
def test_a_batch_is_shared_out_evenly(size: int, world_size: int, sizes: list[int]) -> None:
    parts = [share(size, rank, world_size) for rank in range(world_size)]
    assert [stop - start for start, stop in parts] == sizes
    assert [i for start, stop in parts for i in range(start, stop)] == list(range(size))


@several
@given(st.integers(1, 5000), st.integers(1, 64))
def test_shares_are_in_order_complete_and_differ_by_one(size: int, world_size: int) -> None:
    parts = [share(size, rank, world_size) for rank in range(world_size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    sizes = [stop - start for start, stop in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("wanted", "left", "world_size", "size"),
    [
        (8, 100, 4, 8),
        (8, 16, 4, 8),
        (8, 12, 4, 8),  # 4 are left, one for each rank
        (8, 11, 4, 7),  # 3 would be left: one is given up
        (8, 9, 4, 5),
        (8, 8, 4, 8),
        (8, 5, 4, 5),
        (5, 6, 4, 6),  # two batches of at least 4 cannot be made
        (4, 7, 4, 7),
        (8, 3, 4, 0),
        (8, 0, 4, 0),
        (8, 3, 1, 3),
    ],
)
def test_the_end_of_an_epoch(wanted: int, left: int, world_size: int, size: int) -> None:
    assert cut(wanted, left, world_size=world_size) == size
    assert cut(wanted, min(left, wanted + world_size), world_size=world_size) == size


@several
@given(st.data(), st.integers(1, 12), st.integers(0, 400))
def test_every_sample_is_in_one_batch_and_every_rank_in_every_batch(
    data: st.DataObject, world_size: int, more: int
) -> None:
    left = world_size + more
    sizes = []
    while left:
        wanted = data.draw(st.integers(world_size, 60))
        size = cut(wanted, left, world_size=world_size)
        assert size >= world_size
        assert size < wanted + world_size  # a rank gets one more than its share at most
        sizes.append(size)
        left -= size
    assert sum(sizes) == world_size + more


@several
@given(st.integers(1, 60), st.integers(0, 500), st.integers(1, 8))
def test_drop_last_drops_what_is_no_full_batch(wanted: int, left: int, world_size: int) -> None:
    wanted = max(wanted, world_size)
    sizes = []
    while size := cut(wanted, left, world_size=world_size, drop_last=True):
        sizes.append(size)
        left -= size
    assert set(sizes) <= {wanted}
    assert left < wanted


@several
@given(st.integers(0, 3000), st.integers(1, 70))
def test_batches_are_counted_as_dataloader_would(left: int, size: int) -> None:
    assert count_batches(left, lambda number, position: size) == -(-left // size)
    assert count_batches(left, lambda number, position: size, drop_last=True) == left // size


def test_sizes_are_asked_for_by_number_and_position() -> None:
    asked = []

    def wanted(number: int, position: int) -> int:
        asked.append((number, position))
        return 10 * (number + 1)

    assert count_batches(55, wanted) == 3
    assert asked == [(0, 0), (1, 10), (2, 30), (3, 55)]


@several
@given(st.data(), st.integers(0, 200), st.integers(1, 8))
def test_a_ledger_hands_out_every_sample_once_in_order(data: st.DataObject, length: int, depth: int) -> None:
    """A loader with `depth` prefetched batches, cancelled at random: what it hands out is the epoch."""
    ledger, size = DealtSamples(serial=7, discarded_below=7), 5
    seen: list[int] = []
    serials: list[int] = []
    while True:
        while len(ledger.prefetched) < depth and (took := cut(size, length - ledger.cursor)):
            ledger = ledger.deal(took)
            serials.append(ledger.prefetched[-1].serial)
        if not ledger.prefetched:
            break
        first = ledger.prefetched[0]
        ledger = ledger.arrived(first.serial)
        if ledger.is_discarded(first.serial):
            ledger = ledger.throw_away()
        else:
            assert first.number == ledger.batches
            ledger = ledger.hand()
            seen += range(first.start, first.stop)
            assert ledger.handed == len(seen)
        if data.draw(st.integers(0, 4)) == 0:
            size = data.draw(st.integers(1, 20))
            ledger = ledger.cancel()
            assert ledger.cursor == ledger.handed == len(seen)
            assert not ledger.fresh
    assert seen == list(range(length))
    assert serials == list(range(7, 7 + len(serials)))


def test_what_failed_is_passed_over() -> None:
    ledger = DealtSamples().deal(4).deal(4).deal(4)
    later = ledger.arrived(1).hand()
    assert (later.handed, later.batches) == (8, 2)
    assert [deal.serial for deal in later.prefetched] == [2]
    assert ledger.cancel().deal(4).prefetched[-1] == Deal(3, 0, 0, 4)  # and comes again after a cancel


def test_a_short_batch_moves_what_comes_after_it() -> None:
    ledger = DealtSamples().deal(8).deal(8).hand_part(3)
    assert (ledger.handed, ledger.batches, ledger.cursor, ledger.number) == (3, 1, 11, 2)
    assert ledger.prefetched == (Deal(1, 1, 3, 11),)
    none = ledger.hand_part(0)
    assert (none.handed, none.batches, none.cursor, none.number) == (3, 1, 3, 1)


def test_a_ledger_goes_on_and_begins_again() -> None:
    ledger = DealtSamples().deal(8).deal(8).hand()
    assert ledger.next_epoch() == DealtSamples(serial=2, discarded_below=2)
    on = ledger.resumed(100, 7).deal(5)
    assert on.prefetched == (Deal(2, 7, 100, 105),)
    assert not on.is_discarded(2)
    assert on.is_discarded(1)


class Counting:
    """A stream of numbers with a state, as samplers and iterable datasets have."""

    def __init__(self, stop: int, at: int = 0) -> None:
        self.at, self.stop = at, stop

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == self.stop:
            raise StopIteration
        self.at += 1
        return self.at - 1


@several
@given(st.data(), st.integers(0, 60))
def test_a_tape_can_be_read_again_and_left_anywhere(data: st.DataObject, length: int) -> None:
    source = Counting(length)
    tape = Tape(source, snapshot=lambda: source.at)
    handed = 0
    for _ in range(data.draw(st.integers(0, 12))):
        before = tape.position
        want = data.draw(st.integers(0, 9))
        ready = tape.ready(want)
        assert ready == min(want, length - before)
        assert tape.take(want) == list(range(before, before + ready))
        handed = data.draw(st.integers(handed, tape.position))
        tape.forget(handed)
        if data.draw(st.booleans()):
            tape.rewind(data.draw(st.integers(handed, tape.position)))
        # Wherever it is left from `handed` on, another one can go on there.
        state, skip = tape.mark(handed)
        rest = list(Counting(length, state))[skip:]
        assert rest == list(range(handed, length))
    with pytest.raises(ValueError, match="position must be from"):
        tape.rewind(handed - 1)


def test_a_tape_keeps_only_what_can_come_again() -> None:
    source = Counting(10**6)
    tape = Tape(source, snapshot=lambda: source.at)
    for _ in range(1000):
        tape.take(10)
        tape.forget(tape.position)
    assert len(tape.kept) == 0
    assert len(tape.marks) <= 2


def test_a_stream_that_broke_has_not_ended() -> None:
    def source() -> Iterator[int]:
        yield 0
        raise OSError("the disk is gone")

    tape = Tape(source())
    for _ in range(2):
        with pytest.raises(OSError, match="the disk is gone"):
            tape.take(2)
    assert tape.take(1) == [0]
    assert not tape.ended
