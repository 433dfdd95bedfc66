"""The memory breakdown at one moment of a snapshot's history: by kind, by module, by line; and over time.

Rules: each list adds up to what is live, byte for byte, in bytes that were asked for. What was live before
the history began is reported as such, with its stack where the file has it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from batchfit._why.pure.lifetimes import Lifetimes
from batchfit._why.pure.snapshot import ALLOC, FREE, FREE_REQUESTED
from batchfit._why.pure.stacks import BEFORE, KIND_NAMES, PHASES, StackTable

_BEFORE = "before the recording"
POINTS = 240  # of a timeline


@final
@dataclass(frozen=True, slots=True)
class LivePart:
    """A part of what is live."""

    name: str
    size: int
    blocks: int
    kinds: dict[str, int]
    functions: tuple[str, ...] = ()  # innermost ones, that which allocated most first


@final
@dataclass(frozen=True, slots=True)
class LiveMemory:
    """What is live after one entry: (stack, whether the history has it) -> (bytes, blocks)."""

    table: StackTable
    sizes: dict[tuple[int, bool], tuple[int, int]]

    @classmethod
    def after(cls, lives: Lifetimes, entry: int, table: StackTable) -> LiveMemory:
        sizes: Counter[tuple[int, bool]] = Counter()
        blocks: Counter[tuple[int, bool]] = Counter()
        history = lives.history
        for number in lives.live_after(entry):
            key = history.stacks[number], True
            sizes[key] += history.sizes[number]
            blocks[key] += 1
        for one in lives.earlier_after(entry):
            key = one.stack, False
            sizes[key] += one.size
            blocks[key] += 1
        return cls(table, {key: (sizes[key], blocks[key]) for key in sizes})

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.sizes.values())

    def by_kind(self) -> list[LivePart]:
        found = {part.name: part for part in self._parts(lambda key: KIND_NAMES[self._kind(key)])}
        return [found[name] for name in KIND_NAMES if name in found]

    def by_line(self) -> list[LivePart]:
        return self._parts(lambda key: self._named(key, self.table.line))

    def by_module(self) -> list[LivePart]:
        return self._parts(lambda key: self._named(key, self.table.module))

    def _kind(self, key: tuple[int, bool]) -> int:
        stack, recorded = key
        return self.table.kinds[stack] if recorded or stack else BEFORE

    def _named(self, key: tuple[int, bool], name: Callable[[int], str]) -> str:
        stack, recorded = key
        return name(stack) if recorded or stack else _BEFORE

    def _parts(self, name_of: Callable[[tuple[int, bool]], str]) -> list[LivePart]:
        kinds: dict[str, Counter[str]] = defaultdict(Counter)
        functions: dict[str, Counter[str]] = defaultdict(Counter)
        blocks: Counter[str] = Counter()
        for key, (size, count) in self.sizes.items():
            name = name_of(key)
            kinds[name][KIND_NAMES[self._kind(key)]] += size
            functions[name][self.table.innermost(key[0])] += size
            blocks[name] += count
        found = [
            LivePart(
                name,
                sum(counted.values()),
                blocks[name],
                dict(counted),
                tuple(one for one, _ in functions[name].most_common(3) if one and one != name),
            )
            for name, counted in kinds.items()
        ]
        return sorted(found, key=lambda one: -one.size)


@final
@dataclass(frozen=True, slots=True)
class TimedMemory:
    """What is live, by kind, and what is reserved after one entry."""

    entry: int
    phase: str
    kinds: dict[str, int]
    reserved: int


def timeline(lives: Lifetimes, table: StackTable, points: int = POINTS) -> list[TimedMemory]:
    """The history in stretches of equal length, each at its highest entry."""
    chosen = list(_highest(lives, points))
    history, kinds = lives.history, table.kinds
    live = [0] * len(KIND_NAMES)
    for one in lives.earlier:
        live[kinds[one.stack] if one.stack else BEFORE] += one.size
    freeing = FREE if FREE in history.actions else FREE_REQUESTED
    begun: dict[int, int] = {}
    found: list[TimedMemory] = []
    at, phase = 0, ""
    earlier = {one.address: one.stack for one in lives.earlier}
    for entry in range(chosen[-1] + 1 if chosen else 0):
        action, address = history.actions[entry], history.addresses[entry]
        if action == ALLOC:
            stack = history.stacks[entry]
            old = begun.get(address)
            if old is not None:
                live[kinds[history.stacks[old]]] -= history.sizes[old]
            begun[address] = entry
            live[kinds[stack]] += history.sizes[entry]
            phase = PHASES.get(kinds[stack], phase)
        elif action == freeing:
            alloc = begun.pop(address, None)
            if alloc is not None:
                live[kinds[history.stacks[alloc]]] -= history.sizes[alloc]
            else:
                stack = earlier.get(address, 0)
                live[kinds[stack] if stack else BEFORE] -= history.sizes[entry]
        if entry == chosen[at]:
            held = {KIND_NAMES[kind]: size for kind, size in enumerate(live) if size > 0}
            found.append(TimedMemory(entry, phase, held, lives.reserved[entry]))
            at += 1
    return found


def _highest(lives: Lifetimes, points: int) -> Iterator[int]:
    """The entry of each stretch after which the most is live."""
    totals = lives.totals
    stretch = max(1, -(-len(totals) // points))
    for begin in range(0, len(totals), stretch):
        part = totals[begin : begin + stretch]
        yield begin + part.index(max(part))
