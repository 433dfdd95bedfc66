"""The steps of a training loop, found in stacks of allocations: what leaks, and which step is longer.

No entry of a history says where a step begins. But a loop's body runs from its first line to its last and
back to its first: the line of the function that has the loop jumps back once per step.

Rules:
- The loop is the outermost function whose line jumps back to the same line at least twice; where optimizers
  show in the stacks, the one whose jumps are nearest to the number of their steps.
- A leak is what several earlier steps have left behind from one line, and most of them. What one step alone
  leaves (optimizer state, a cache that was filled) is none.
- The step of the OOM is compared with the middle of those before it, the first left out: it creates state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import final

from batchfit._why.pure.lifetimes import Lifetimes
from batchfit._why.pure.snapshot import ALLOC, MemorySnapshot, StackFrame
from batchfit._why.pure.stacks import INSIDE_A_MODULE, is_loop_file

_FEWEST_LEAKING = 3  # steps that left something behind
_LEAKING_SHARE = 0.6  # of the steps that are over
_Loop = tuple[int, str, str]  # depth, file, function


@final
@dataclass(frozen=True, slots=True)
class LoopStep:
    """One step of the loop: its entries, and what it needed beyond what was live when it began."""

    begin: int
    end: int
    grew_bytes: int  # the most that was live in it, less what was live when it began


@final
@dataclass(frozen=True, slots=True)
class LeakingLine:
    """What earlier steps have left behind from one line."""

    name: str
    bytes_per_step: int
    steps: int  # that left something behind
    of_steps: int
    size: int
    kind: int


@final
@dataclass(frozen=True, slots=True)
class StepLoop:
    """The steps of a history; empty where none were found."""

    steps: tuple[LoopStep, ...] = ()
    function: str = ""


def find_steps(snapshot: MemorySnapshot, lives: Lifetimes) -> StepLoop:
    """The steps up to the end of a history."""
    history, end = lives.history, lives.end
    outward = [tuple(reversed(stack)) for stack in snapshot.stacks]
    jumps: dict[tuple[_Loop, int], list[int]] = defaultdict(list)
    known: dict[tuple[int, int], list[tuple[_Loop, int]]] = {}
    in_optimizer = [any("torch/optim/" in one.filename for one in stack) for stack in snapshot.stacks]
    optimizer_steps = 0
    before = first = -1
    for entry, (action, stack) in enumerate(zip(history.actions[:end], history.stacks[:end], strict=True)):
        if action != ALLOC or not stack or stack == before:
            continue
        if before < 0:
            before, first = stack, entry
            continue
        pair = before, stack
        found = known.get(pair)
        if found is None:
            found = known[pair] = _jump(outward[before], outward[stack])
        for one in found:
            jumps[one].append(entry)
        optimizer_steps += in_optimizer[stack] and not in_optimizer[before]
        before = stack
    chosen = _chosen(jumps, optimizer_steps)
    if chosen is None:
        return StepLoop()
    (depth, file, name), line = chosen
    begins = jumps[chosen]
    start = next(
        (
            n
            for n in range(first, begins[0])
            if history.actions[n] == ALLOC and _at(outward[history.stacks[n]], depth, file, name) >= line
        ),
        begins[0],
    )
    if start < begins[0]:
        begins = [start, *begins]
    return StepLoop(tuple(_steps(begins, lives)), f"{name}, {file}")


def _jump(before: tuple[StackFrame, ...], after: tuple[StackFrame, ...]) -> list[tuple[_Loop, int]]:
    """Where the outermost function that has moved has jumped back to."""
    for depth, (one, two) in enumerate(zip(before, after, strict=False)):
        if one is two:
            if one.name in INSIDE_A_MODULE or "torch/optim/" in one.filename:
                return []  # a loop of a model's own, or of an optimizer's
            continue
        same = one.filename == two.filename and one.name == two.name
        if same and two.line < one.line and is_loop_file(two.filename):
            return [((depth, two.filename, two.name), two.line)]
        return []
    return []


def _at(outward: tuple[StackFrame, ...], depth: int, file: str, name: str) -> int:
    """The line of a function at a depth of a stack; -1 where another is there."""
    if len(outward) <= depth:
        return -1
    frame = outward[depth]
    return frame.line if (frame.filename, frame.name) == (file, name) else -1


def _chosen(jumps: dict[tuple[_Loop, int], list[int]], optimizer_steps: int) -> tuple[_Loop, int] | None:
    several = {key: len(entries) for key, entries in jumps.items() if len(entries) > 1}
    if not several:
        return None
    if optimizer_steps > 1:
        return min(several, key=lambda key: (abs(several[key] - optimizer_steps), key[0][0], key[1]))
    depth = min(key[0][0] for key in several)
    return min((key for key in several if key[0][0] == depth), key=lambda key: (-several[key], key[1]))


def _steps(begins: list[int], lives: Lifetimes) -> Iterator[LoopStep]:
    totals = lives.totals
    for begin, end in zip(begins, [*begins[1:], lives.end], strict=True):
        if begin < end:
            live = totals[begin - 1] if begin else lives.begin_bytes
            yield LoopStep(begin, end, max(max(totals[begin:end]) - live, 0))


def leaks(
    lives: Lifetimes, loop: StepLoop, name_of: Callable[[int], str], kinds: list[int]
) -> list[LeakingLine]:
    """Lines from which most of the steps that are over have left something behind, the most first."""
    over = len(loop.steps) - 2  # the last one is running, the one before it may be still referred to
    if over < _FEWEST_LEAKING:
        return []
    begins = [one.begin for one in loop.steps]
    sizes: Counter[str] = Counter()
    steps: dict[str, set[int]] = defaultdict(set)
    of_kind: dict[str, Counter[int]] = defaultdict(Counter)
    history = lives.history
    names: dict[int, str] = {}
    for entry in lives.live_after(lives.end - 1):
        step = bisect_right(begins, entry) - 1
        if not 0 <= step < over:
            continue
        stack = history.stacks[entry]
        name = names.get(stack)
        if name is None:
            name = names[stack] = name_of(stack)
        sizes[name] += history.sizes[entry]
        steps[name].add(step)
        of_kind[name][kinds[stack]] += history.sizes[entry]
    found = [
        LeakingLine(
            name,
            sizes[name] // len(steps[name]),
            len(steps[name]),
            over,
            sizes[name],
            of_kind[name].most_common(1)[0][0],
        )
        for name in sizes
        if len(steps[name]) >= max(_FEWEST_LEAKING, _LEAKING_SHARE * over)
    ]
    return sorted(found, key=lambda one: -one.size)


@final
@dataclass(frozen=True, slots=True)
class LongStep:
    """The step of the OOM beside those before it."""

    number: int
    grew_bytes: int
    typical_bytes: int  # the middle of the steps before it
    longest_bytes: int
    name: str = ""  # the first line that asked for another size than before
    size: int = 0
    typical_size: int = 0

    @property
    def ratio(self) -> float:
        """How many times as much as the steps before it."""
        return self.grew_bytes / max(self.typical_bytes, 1)


def last_step(lives: Lifetimes, loop: StepLoop, asked: int, name_of: Callable[[int], str]) -> LongStep | None:
    """The step that ran last, with the request that failed; None where there is none to compare it with."""
    if len(loop.steps) < 3:
        return None
    last, before = loop.steps[-1], loop.steps[1:-1]
    stack, size, usual = _first_difference(lives, loop)
    return LongStep(
        len(loop.steps),
        last.grew_bytes + asked,
        round(median(one.grew_bytes for one in before)),
        max(one.grew_bytes for one in before),
        name_of(stack) if stack >= 0 else "",
        size,
        usual,
    )


def _first_difference(lives: Lifetimes, loop: StepLoop) -> tuple[int, int, int]:
    """The first allocation of the last step that is larger than any of its stack's before: (stack, ...)."""
    history = lives.history
    usual: dict[int, int] = {}
    last = loop.steps[-1]
    for n in range(loop.steps[0].begin, last.begin):
        if history.actions[n] == ALLOC and history.stacks[n]:
            stack = history.stacks[n]
            usual[stack] = max(usual.get(stack, 0), history.sizes[n])
    for n in range(last.begin, last.end):
        stack = history.stacks[n]
        if history.actions[n] == ALLOC and history.sizes[n] > 1.2 * usual.get(stack, history.sizes[n]):
            return stack, history.sizes[n], usual[stack]
    return -1, 0, 0
