"""What has changed between two records: the fewest lines that say it, the largest change first.

Rules:
- Like is compared with like: the peak now with the moment before that the same line of that phase made high.
- The changes add up to the change of that moment, byte for byte.
- A line whose text was edited is the same line, if file and function are the same and the texts are alike; so
  is one that was moved to another function.
- A line that is reached by another way, with the same bytes, has not changed: code that was wrapped or moved.
- Nor has a tensor that another line of the same function makes now: one line that was split into two.
- The largest change comes first, of those that go the way of the sum.
- What is all new (or gone) below one line is one change of that line: the call of a model that used to run
  under `no_grad`, not the ten lines inside the model. So is what a line leads to that was edited, where no
  line that it leads to was.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from typing import final

from batchfit._check.pure.record import (
    HeldRow,
    OptimizerRecord,
    PeakRecord,
    PhaseMoment,
    SourcePlace,
    TensorMade,
)

_MOSTLY_NEW = 20  # times as many bytes as before, below one line
_ALIKE_TEXT = 0.6  # of two texts of one line, before and after an edit
_LARGE_SHARE = 0.01  # of the peak: what a line makes is worth a word
_Maker = tuple[tuple[str, ...], str, str, str, tuple[str, str]]
_SAME_STATE = 0.05  # of state per weight: what rounding to blocks makes of it in a small model


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """What one line, module or kind holds at the peak, before and now.

    `before_text` is the innermost line's text before it was edited; empty where it was not.
    """

    chain: tuple[str, ...]
    before: Mapping[str, int]  # bytes by kind
    now: Mapping[str, int]
    before_of: str = ""
    now_of: str = ""
    whole: bool = False  # all that the line leads to, in several lines
    before_text: str = ""

    @property
    def change(self) -> int:
        return sum(self.now.values()) - sum(self.before.values())


@final
@dataclass(slots=True)
class _Branch:
    """A line with all that it leads to."""

    before: Counter[str] = field(default_factory=Counter)  # its own
    now: Counter[str] = field(default_factory=Counter)
    before_of: tuple[int, str] = (0, "")
    now_of: tuple[int, str] = (0, "")
    children: dict[str, _Branch] = field(default_factory=dict)

    def total(self) -> tuple[Counter[str], Counter[str]]:
        before, now = Counter(self.before), Counter(self.now)
        for child in self.children.values():
            more = child.total()
            before += more[0]
            now += more[1]
        return before, now

    def has_changed_below(self, other: Container[str]) -> bool:
        """Whether a line that this one leads to is one of `other`, and holds more or less than before."""
        for text, child in self.children.items():
            before, now = child.total()
            if text in other and before.total() != now.total():
                return True
            if child.has_changed_below(other):
                return True
        return False

    def largest(self) -> tuple[str, str]:
        """Of which blocks it mostly is, before and now."""
        branches = [self]
        for branch in branches:
            branches += branch.children.values()
        return max(one.before_of for one in branches)[1], max(one.now_of for one in branches)[1]


def counterpart(before: PeakRecord, now: PeakRecord) -> PhaseMoment:
    """The moment of the record before that the peak now is compared with."""
    every = [row for moment in before.moments for row in moment.lines]
    edited = edited_lines(_texts(every), _texts(now.peak.lines))
    old = {after: text for text, after in edited.items()}
    return before.like(now.peak, old.get(now.peak.line, now.peak.line))


def line_changes(before: PeakRecord, now: PeakRecord) -> list[Difference]:
    """By source line."""
    earlier, later = list(counterpart(before, now).lines), list(now.peak.lines)
    if has_other_optimizer(before.optimizer, now.optimizer):
        # Else the state of each parameter goes by the line of the parameter.
        place = now.optimizer.place or before.optimizer.place or "optimizer state"
        earlier, later = (_at_one_place(rows, "optimizer", place) for rows in (earlier, later))
    old = _texts(earlier)
    edited = edited_lines(old, _texts(later))
    earlier = _split(_rerouted(_with_texts(earlier, edited), later), later)
    origins = {after: text for text, after in edited.items()}
    found = row_changes(earlier, later, other=_texts(later) - old)
    return [replace(one, before_text=origins.get(one.chain[-1], "")) for one in found]


def changed_causes(before: PeakRecord, now: PeakRecord) -> list[HeldRow]:
    """New and edited lines that make much and hold nothing at the peak: others may hold more for it.

    What differs in its shape alone is no cause: a longer sequence changes all shapes.
    """
    edited = edited_lines(_texts(before.peak.lines), _texts(now.peak.lines))
    old = _texts(before.peak.lines)
    made = {(row.chain[-1], TensorMade.parsed(row.of).kind) for row in _with_texts(before.peak.lines, edited)}
    # What is live at another moment has a row, however small it is.
    least = _LARGE_SHARE * now.peak.size
    small = {row.chain[-1] for one in now.moments for row in one.lines if 0 < row.size < least}
    held = small | {row.chain[-1] for row in now.peak.lines if row.size}
    found: dict[str, HeldRow] = {}
    for row in now.peak.lines:
        text = row.chain[-1]
        is_cause = row.kind == "activations" and text not in old | held and SourcePlace.parsed(text).file
        if is_cause and (text, TensorMade.parsed(row.of).kind) not in made:
            found.setdefault(text, row)
    return list(found.values())


def _with_texts(rows: Iterable[HeldRow], edited: Mapping[str, str]) -> list[HeldRow]:
    return [row._replace(chain=tuple(edited.get(text, text) for text in row.chain)) for row in rows]


def row_changes(
    before: Iterable[HeldRow], now: Iterable[HeldRow], *, other: Container[str] = ()
) -> list[Difference]:
    """By the rows' chains; `other` are texts of lines that are new or edited."""
    root = _Branch()
    for rows, is_now in ((before, False), (now, True)):
        for row in rows:
            branch = root
            for text in row.chain:
                branch = branch.children.setdefault(text, _Branch())
            if is_now:
                branch.now[row.kind] += row.size
                branch.now_of = max(branch.now_of, (row.size, row.of))
            else:
                branch.before[row.kind] += row.size
                branch.before_of = max(branch.before_of, (row.size, row.of))
    found = [one for text, branch in root.children.items() for one in _named(branch, (text,), other)]
    grew = sum(one.change for one in found) >= 0
    return sorted(found, key=lambda one: ((one.change > 0) != grew, -abs(one.change), one.chain))


def _named(branch: _Branch, chain: tuple[str, ...], other: Container[str]) -> list[Difference]:
    before, now = branch.total()
    less, more = sorted((before.total(), now.total()))
    if branch.children and less != more:
        mostly_new = less * _MOSTLY_NEW <= more
        if mostly_new or (chain[-1] in other and not branch.has_changed_below(other)):
            return [Difference(chain, dict(before), dict(now), *branch.largest(), whole=True)]
    found = []
    if branch.before.total() != branch.now.total():
        own = dict(branch.before), dict(branch.now)
        found.append(Difference(chain, *own, branch.before_of[1], branch.now_of[1]))
    for text, child in branch.children.items():
        found += _named(child, (*chain, text), other)
    return found


def has_other_optimizer(before: OptimizerRecord, now: OptimizerRecord) -> bool:
    """Whether the optimizer's state is another for the same weights."""
    gap = abs(before.state_per_weight - now.state_per_weight)
    return before.name != now.name or gap > _SAME_STATE * max(before.state_per_weight, now.state_per_weight)


def _at_one_place(rows: Sequence[HeldRow], kind: str, place: str) -> list[HeldRow]:
    return [row._replace(chain=(place,), of="") if row.kind == kind else row for row in rows]


def _texts(rows: Iterable[HeldRow]) -> set[str]:
    return {text for row in rows for text in row.chain}


def edited_lines(before: set[str], now: set[str]) -> dict[str, str]:
    """Lines that are gone, each with the new one that it became: moved as it is, or edited where it is."""
    gone, new = (
        [SourcePlace.parsed(text) for text in sorted(texts)] for texts in (before - now, now - before)
    )
    pairs = sorted(
        (-likeness, one, two)
        for one in gone
        for two in new
        if (likeness := _likeness(one, two)) >= _ALIKE_TEXT
    )
    found: dict[SourcePlace, SourcePlace] = {}
    for _, one, two in pairs:
        if one not in found and two not in found.values():
            found[one] = two
    return {one.text: two.text for one, two in found.items()}


def _likeness(one: SourcePlace, two: SourcePlace) -> float:
    """1 and more for a line that was moved, up to 1 for one that was edited, 0 for others."""
    if not one.file or not two.file:
        return 0.0
    same_function = one.file == two.file and one.function == two.function
    if one.code == two.code:
        return 1.0 + (one.file == two.file) + (one.function == two.function)
    if not same_function:
        return 0.0
    if _is_wrapped(one.code, two.code) or _is_wrapped(two.code, one.code):
        return _ALIKE_TEXT
    return SequenceMatcher(None, one.code, two.code, autojunk=False).ratio()


def _is_wrapped(short: str, long: str) -> bool:
    """Whether a line assigns to the same name, and uses all that the other one does: `x = block(x)`."""
    names, more = (re.findall(r"[A-Za-z_]\w*", code) for code in (short, long))
    return len(set(names)) > 1 and names[:1] == more[:1] and set(names) <= set(more)


def _rerouted(before: Sequence[HeldRow], now: Sequence[HeldRow]) -> list[HeldRow]:
    """The rows before, where a line is reached by a new way with the chain of that way.

    Only what is gone from one way and new on another is moved, and no more than is there.
    """
    ways_before, ways_now = _ways(before), _ways(now)
    found: list[HeldRow] = []
    for key in ways_before:
        room = {
            chain: row.size for chain, row in ways_now.get(key, {}).items() if chain not in ways_before[key]
        }
        for chain, row in ways_before[key].items():
            left = row.size
            if chain not in ways_now.get(key, {}):
                for other in sorted(room, key=lambda one: (room[one] != row.size, one)):
                    moved = min(left, room[other])
                    if moved:
                        found.append(row._replace(chain=other, size=moved))
                        room[other] -= moved
                        left -= moved
            if left or not row.size:
                found.append(row._replace(size=left))
    return found


def _split(before: Sequence[HeldRow], now: Sequence[HeldRow]) -> list[HeldRow]:
    """The rows before, where a new line of a function makes what another line of it has made, at the new one.

    It is the same if it is of one kind, operation and dtype, and no more than the old line holds less.
    """
    known = {(row.chain, row.kind) for row in before}
    sizes: Counter[tuple[tuple[str, ...], str]] = Counter()
    new: dict[_Maker, Counter[tuple[str, ...]]] = defaultdict(Counter)
    for row in now:
        sizes[row.chain, row.kind] += row.size
        maker = _maker(row)
        if maker is not None and (row.chain, row.kind) not in known:
            new[maker][row.chain] += row.size
    found: list[HeldRow] = []
    for row in before:
        maker = _maker(row)
        room = Counter() if maker is None else new.get(maker, Counter())
        left, less = row.size, row.size - sizes[row.chain, row.kind]
        for chain in room:
            moved = max(min(less, room[chain]), 0)
            if moved:
                found.append(row._replace(chain=chain, size=moved))
                room[chain] -= moved
                left -= moved
                less -= moved
        if left or not row.size:
            found.append(row._replace(size=left))
    return found


def _maker(row: HeldRow) -> _Maker | None:
    """The function that makes a row, how it is reached, and what it makes; None without a line."""
    place = SourcePlace.parsed(row.chain[-1])
    if not place.file or not row.of:
        return None
    return row.chain[:-1], place.file, place.function, row.kind, TensorMade.parsed(row.of).kind


def _ways(rows: Iterable[HeldRow]) -> dict[tuple[str, str], dict[tuple[str, ...], HeldRow]]:
    """By innermost line and kind: the chains that lead there."""
    found: dict[tuple[str, str], dict[tuple[str, ...], HeldRow]] = defaultdict(dict)
    for row in rows:
        ways = found[row.chain[-1], row.kind]
        known = ways.get(row.chain)
        ways[row.chain] = row if known is None else row._replace(size=row.size + known.size)
    return found
