"""Batches by tokens, decided without torch: which samples of a window make a batch, and for which rank.

Rules
- A batch is a run of neighbours in a window that is sorted by length, as long as it fits: no sample of a
  window is in two batches, and none is left out without a word.
- Each step takes a batch per rank, neighbours in length, so that ranks take about equally long.
- What does not make a step for all ranks, and the run that reached the end of its window, are set aside for
  the next window: to every batch but the last of an epoch no neighbour could be added.
- At the end of an epoch, batches are cut in two until every rank has one. Where there are not enough samples
  even for that, samples of the last step come again (as DistributedSampler does), fewer than there are ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any, final

Run = tuple[int, int]  # the first position in a window, and the one after the last


@final
@dataclass(frozen=True, slots=True)
class TokenLimits:
    """What a batch of one rank may hold."""

    max_tokens: int
    max_rows: int | None = None
    multiple_of: int = 1
    pad_to_multiple_of: int = 1
    packed: bool = False

    def padded(self, length: int) -> int:
        """The tokens of a row as long as that, with its padding."""
        return -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def tokens(self, lengths: Sequence[int]) -> int:
        """The tokens of a batch of these samples, as they are counted."""
        return sum(lengths) if self.packed else self.padded(max(lengths)) * len(lengths)

    def squares(self, lengths: Sequence[int]) -> int:
        """The squared lengths of a batch of these samples, added up: what attention may need."""
        if self.packed:
            return sum(length * length for length in lengths)
        return self.padded(max(lengths)) ** 2 * len(lengths)

    def rounded(self, rows: int) -> int:
        """A multiple of `multiple_of`, where there are that many."""
        return rows - rows % self.multiple_of if rows >= self.multiple_of else rows

    def is_full(self, lengths: Sequence[int]) -> bool:
        """Whether one more sample as long as its longest would not fit."""
        rows = len(lengths)
        longest = max(lengths)
        more = sum(lengths) + longest if self.packed else self.padded(longest) * (rows + 1)
        return rows == self.max_rows or more > self.max_tokens


@final
@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The steps of a window: a run per rank in each.

    Attributes:
        steps: in each step the run of each rank.
        rest: the positions that are set aside.
        repeated: how many samples come twice.
    """

    steps: tuple[tuple[Run, ...], ...]
    rest: tuple[int, ...] = ()
    repeated: int = 0


def cut_by_tokens(lengths: Sequence[int], limits: TokenLimits) -> list[Run]:
    """Runs of samples, each as long as fits; `lengths` are sorted, in either direction, unless packed."""
    runs: list[Run] = []
    run_from, start = _longest_run(lengths, limits), 0
    while start < len(lengths):
        runs.append(run_from(start))
        start = runs[-1][1]
    return runs


def longest_runs(lengths: Sequence[int], limits: TokenLimits, first: int) -> list[Run]:
    """The longest run that begins with each sample from `first` on, where `lengths` fall."""
    return list(map(_longest_run(lengths, limits), range(first, len(lengths))))


def _longest_run(lengths: Sequence[int], limits: TokenLimits) -> Callable[[int], Run]:
    """The longest run from a position on, as a function of that position."""
    count = len(lengths)
    totals = list(accumulate(lengths, initial=0)) if limits.packed else []
    descending = count > 0 and lengths[0] >= lengths[-1]

    def run_from(start: int) -> Run:
        most = count if limits.max_rows is None else min(count, start + limits.max_rows)
        if limits.packed:
            stop = bisect_right(totals, totals[start] + limits.max_tokens, start + 1, most + 1) - 1
        elif descending:
            stop = start + limits.max_tokens // limits.padded(lengths[start])
        else:
            # Tokens grow with every sample that is added, which is the longest so far.
            ends = range(start + 1, most + 1)
            tokens = lambda stop: limits.padded(lengths[stop - 1]) * (stop - start)  # noqa: E731
            stop = start + bisect_right(ends, limits.max_tokens, key=tokens)
        return start, start + limits.rounded(min(stop, most) - start)

    return run_from


def plan_window(
    lengths: Sequence[int],
    limits: TokenLimits,
    *,
    world_size: int = 1,
    random: Random | None = None,
    is_last: bool = False,
    drop_last: bool = False,
) -> WindowPlan:
    """The steps of a window of samples, in a random order where there is one."""
    runs = cut_by_tokens(lengths, limits)
    rest: list[int] = []
    if runs and (drop_last or not is_last) and not limits.is_full(lengths[slice(*runs[-1])]):
        rest += range(*runs.pop())
    repeated, extra = 0, len(runs) % world_size
    if extra and is_last and not drop_last:
        runs, repeated = evened(runs, world_size)
    elif extra:
        last = len(runs) - extra
        first = last if random is None else random.randint(0, last)
        for run in runs[first : first + extra]:
            rest += range(*run)
        del runs[first : first + extra]
    steps = [tuple(runs[at : at + world_size]) for at in range(0, len(runs), world_size)]
    if random is not None:
        random.shuffle(steps)
    return WindowPlan(tuple(steps), tuple(rest), repeated)


def evened(runs: Sequence[Run], world_size: int) -> tuple[list[Run], int]:
    """As many runs as a multiple of `world_size`, by cutting the longest in two; and how many samples repeat.

    Only runs of one sample are repeated, the last ones.
    """
    found = list(runs)
    missing = -len(found) % world_size
    for _ in range(missing):
        at = max(range(len(found)), key=lambda one: found[one][1] - found[one][0])
        start, stop = found[at]
        if stop - start < 2:
            break
        middle = (start + stop + 1) // 2
        found[at : at + 1] = [(start, middle), (middle, stop)]
        missing -= 1
    whole = len(found)
    return found + [found[whole - 1 - number % whole] for number in range(missing)], missing


@final
@dataclass(frozen=True, slots=True)
class TokenPosition:
    """How far an epoch has been dealt out: a plan, and how many of its steps.

    A plan is made of `held` and of the epoch's order from `start` on, for `max_tokens` and `world_size`: with
    both the same, it is the same plan again. Steps, samples and tokens are those of the epoch.

    Attributes:
        held: samples that earlier plans have set aside, by index.
        start: where the plan's other samples begin in the order of the epoch.
        max_tokens: what the plan was made with; 0: there is none yet.
        world_size: for how many ranks.
        dealt: steps of this plan that were dealt out.
        steps: steps of the epoch.
        samples: samples of the epoch, over all ranks.
        tokens: tokens of the epoch, over all ranks, without padding.
    """

    held: tuple[int, ...] = ()
    start: int = 0
    max_tokens: int = 0
    world_size: int = 0
    dealt: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {name: getattr(self, name) for name in self.__slots__} | {"held": list(self.held)}

    @classmethod
    def from_dict(cls, state: Any) -> TokenPosition:
        """What `to_dict` gave."""
        return cls(**{**state, "held": tuple(state["held"])})
