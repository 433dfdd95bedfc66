"""The trace of a deep model from those of shallow ones: what one more layer adds comes again for each layer.

Rules:
- Traces are compared as texts. A word is a block that is allocated (its bytes, kind, phase, operation, line,
  and its module without the numbers), or one that is freed: the n-th youngest of its kind that is there.
- Three depths are traced, one layer (or one period of layers) apart. What the deepest has more than the
  middle one must stand beside its own like, word for word; the middle one without it must be the shallowest.
  All else is refused (`NotRepeatedError`).
- What is extended has the blocks, sizes, origins and events of a trace of the whole model, in its order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Self, final

from batchfit._engine.allocator.footprint import Origin, Trace, check_same_stream

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a module's path
_BORDER = 0  # the word where a step ends


class NotRepeatedError(Exception):
    """The traces are not those of a model with one layer more each."""


@final
class _Insertion(NamedTuple):
    """What a deeper trace has before word `at` of the shallower one: `length` words from `begins` on."""

    at: int
    begins: int
    length: int


@final
class _Words:
    """A trace as a text; `blocks` has the block that each word is about, `None` at a border."""

    def __init__(self, trace: Trace, vocabulary: dict[Hashable, int]) -> None:
        self.trace = trace
        self.words: list[int] = []
        self.blocks: list[int | None] = []
        self.freed: dict[int, tuple[int, int]] = {}  # of a word: which word allocated it, and how young it is
        self._vocabulary = vocabulary
        self._living: dict[int, list[int]] = defaultdict(list)
        self._allocated: dict[int, int] = {}
        self._read()

    def _read(self) -> None:
        trace, run = self.trace, list[int]()
        borders = {trace.begins, *trace.step_ends}
        for position, event in enumerate((*trace.events, None)):
            if run and (event is None or event >= 0 or position in borders):
                self._free(run)
                run = []
            if position in borders:
                self._put(_BORDER, None)
            if event is None:
                break
            if event < 0:
                run.append(~event)
                continue
            origin = trace.origins[event]
            word = self._word((trace.sizes[event], replace(origin, module=_NUMBER.sub("#", origin.module))))
            self._allocated[event] = word
            self._living[word].append(event)
            self._put(word, event)

    def _free(self, run: list[int]) -> None:
        """The allocator does not mind the order of frees between two allocations: the youngest go first."""
        for block in sorted(run, reverse=True):
            made_by = self._allocated[block]
            living = self._living[made_by]
            at = next(place for place in reversed(range(len(living))) if living[place] == block)
            young = len(living) - 1 - at
            del living[at]
            word = self._word((made_by, young))
            self.freed[word] = made_by, young
            self._put(word, block)

    def _word(self, meaning: Hashable) -> int:
        return self._vocabulary.setdefault(meaning, len(self._vocabulary) + 1)

    def _put(self, word: int, block: int | None) -> None:
        self.words.append(word)
        self.blocks.append(block)

    def numbers(self, place: int) -> tuple[int, ...]:
        """The numbers in the path of the module of that word's block."""
        block = self.blocks[place]
        return () if block is None else _numbers(self.trace.origins[block])


@final
@dataclass(frozen=True, slots=True)
class Repetition:
    """How the trace of a deep model follows from one of `middle`'s depth."""

    middle: Trace
    whole: Trace
    like: tuple[int, ...]  # of each block of `whole`: the block of `middle` that it is like
    paths: tuple[tuple[int, ...], ...]  # of each block of `whole`: the numbers in its module's path

    @classmethod
    def learned(cls, shallow: Trace, middle: Trace, deep: Trace, *, more: int) -> Self:
        """From traces of three depths at one size; `more` layers (or periods) than `middle` are wanted."""
        vocabulary: dict[Hashable, int] = {}
        few, some, many = (_Words(one, vocabulary) for one in (shallow, middle, deep))
        insertions = _insertions(some.words, many.words)
        left = list(some.words)
        for one in reversed(insertions):
            if left[one.at - one.length : one.at] != many.words[one.begins : one.begins + one.length]:
                raise NotRepeatedError("what one more layer adds is not beside its like")
            del left[one.at - one.length : one.at]
        if left != few.words:
            raise NotRepeatedError("one more layer adds something else than the one before it")
        return cls(middle, *_written(some, _steps(some, many, insertions), insertions, more))

    def extended(self, trace: Trace) -> Trace:
        """The whole trace for one of `middle`'s depth at any size; it may have fewer steps."""
        check_same_stream(self.middle, trace, beginning=True)
        begun = self.whole.beginning(len(trace.step_ends))
        like = self.like[: len(begun.sizes)]
        origins = map(_renumbered, (trace.origins[block] for block in like), self.paths)
        return replace(
            begun,
            size=trace.size,
            sizes=tuple(trace.sizes[block] for block in like),
            origins=tuple(origins),
        )


def _insertions(short: Sequence[int], long: Sequence[int]) -> list[_Insertion]:
    """What the longer text has more, each right after its like."""
    found: list[_Insertion] = []
    at = there = 0
    left = len(long) - len(short)
    while True:
        same = _same(short, at, long, there)
        at, there = at + same, there + same
        if at == len(short) and there == len(long):
            return found
        reach = [
            (_same(short, at, long, there + length) + (there + length == len(long)), -length)
            for length in range(1, min(left, there) + 1)
            if long[there + length - 1] == long[there - 1]
            and long[there : there + length] == long[there - length : there]
        ]
        farthest, length = max(reach, default=(0, 0))
        if not farthest:
            raise NotRepeatedError("one more layer changes what the others do")
        found.append(_Insertion(at, there, -length))
        there, left = there - length, left + length


def _same(short: Sequence[int], at: int, long: Sequence[int], there: int) -> int:
    """How many words are the same from these places on."""
    count = 0
    for one, two in zip(islice(short, at, None), islice(long, there, None), strict=False):
        if one != two:
            break
        count += 1
    return count


def _steps(
    some: _Words, many: _Words, insertions: Sequence[_Insertion]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """By how much the numbers of each word's path grow with each layer more, and from copy to copy."""
    moved = 0
    waiting = list(insertions)
    by_layer: list[tuple[int, ...]] = []
    for place in range(len(some.words)):
        while waiting and waiting[0].at == place:
            moved += waiting.pop(0).length
        by_layer.append(_difference(many.numbers(place + moved), some.numbers(place)))
    by_copy: list[tuple[int, ...]] = [()] * len(some.words)
    for one in insertions:
        for place in range(one.length):
            copies = one.begins + place
            own = one.at - one.length + place
            by_copy[own] = _difference(many.numbers(copies), many.numbers(copies - one.length))
    return list(zip(by_layer, by_copy, strict=True))


def _written(
    some: _Words,
    steps: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    insertions: Sequence[_Insertion],
    more: int,
) -> tuple[Trace, tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The whole trace: the text with `more` copies of each insertion, read again as blocks and events."""
    like: list[int] = []
    paths: list[tuple[int, ...]] = []
    events: list[int] = []
    borders: list[int] = []
    living: dict[int, list[int]] = defaultdict(list)
    for place, copy in _places(len(some.words), insertions, more):
        word, block = some.words[place], some.blocks[place]
        if block is None:
            borders.append(len(events))
        elif word in some.freed:
            made_by, young = some.freed[word]
            there = living[made_by]
            if young >= len(there):
                raise NotRepeatedError("a layer frees what none has allocated")
            events.append(~there.pop(len(there) - 1 - young))
        else:
            by_layer, by_copy = steps[place]
            path = some.numbers(place)
            path = _moved(path, by_layer, more)
            paths.append(_moved(path, by_copy, copy) if copy else path)
            living[word].append(len(like))
            events.append(len(like))
            like.append(block)
    middle = some.trace
    begins, *ends = borders
    whole = Trace(
        middle.size,
        tuple(middle.sizes[block] for block in like),
        tuple(middle.origins[block] for block in like),
        tuple(events),
        begins,
        tuple(ends),
    )
    return whole.ordered(), tuple(like), tuple(paths)


def _places(count: int, insertions: Sequence[_Insertion], more: int) -> Iterator[tuple[int, int]]:
    """The words of the whole text, as places in the middle one, and which copy of an insertion they are."""
    begin = 0
    for one in insertions:
        yield from ((place, 0) for place in range(begin, one.at))
        for copy in range(1, more + 1):
            yield from ((place, copy) for place in range(one.at - one.length, one.at))
        begin = one.at
    yield from ((place, 0) for place in range(begin, count))


def _numbers(origin: Origin) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(origin.module)))


def _renumbered(origin: Origin, numbers: tuple[int, ...]) -> Origin:
    """The same place in another layer."""
    if not numbers:
        return origin
    given = iter(numbers)
    return replace(origin, module=_NUMBER.sub(lambda _: str(next(given)), origin.module))


def _difference(one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, two, strict=True))


def _moved(path: tuple[int, ...], step: tuple[int, ...], times: int) -> tuple[int, ...]:
    return tuple(number + by * times for number, by in zip(path, step, strict=True))
