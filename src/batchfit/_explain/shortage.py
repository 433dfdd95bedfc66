"""For the error that nothing fits: the memory breakdown, and the cheapest changes that would make it fit.

Rules:
- Nothing is paid until a size has failed. Then the step is traced once, with fake tensors: no memory of the
  GPU is used, and the user's objects are as they were afterwards.
- Changes are tried from the cheapest to the dearest, each on top of those that brought something; what turns
  out not to be needed is left out again. What is named makes the size fit by prediction: its trace was
  replayed within the budget.
- A step that cannot be traced has no shortage: the error says what it knows without.
- On a CPU (`virtual_memory`) live bytes count, without the workspaces of a GPU's kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from torch import nn

from batchfit._engine.allocator.caching import AllocatorSettings
from batchfit._engine.allocator.footprint import STATE, Footprint, Trace
from batchfit._engine.allocator.replay import simulate
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.oracle import MARGINS, allocator_rules, held_beside
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._explain.less_state import eight_bit, lora
from batchfit._explain.pure.holders import Peak, PeakPart, by_line
from batchfit._explain.step_variables import StepTraits
from batchfit._explain.what_if import (
    Change,
    checkpointing,
    chunked_loss,
    lower_precision,
    shorter_sequence,
    smaller_optimizer,
    update_changes,
)
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

LIMIT_S = 30.0  # for all of it, beside a search that took longer
_TOP = 3
_EXPANDABLE = ("expandable segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
_LEAST_GAIN = 1.01  # a change that brings less is no part of the answer


@final
@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a size does not fit. What an error takes: `holders` and `changes` go into it as they are."""

    size: int
    peak_bytes: int
    card: str
    holders: tuple[tuple[str, int], ...]
    changes: tuple[tuple[str, str], ...] = ()  # what makes it fit together, and how to write each
    changed_bytes: int | None = None  # the peak with them; without changes that fit, the least that was found
    tried: tuple[str, ...] = ()  # what does not make it fit, where nothing does; empty where time ran out

    def for_error(self) -> dict[str, Any]:
        """Keywords of `NothingFitsError`."""
        return {
            "holders": self.holders,
            "changes": self.changes,
            "changed_bytes": self.changed_bytes,
            "tried": self.tried,
            "traced": True,
        }


def shortage_of(
    workload: Workload,
    *,
    size: int,
    budget_bytes: int,
    rules: CudaRules | None = None,
    settings: AllocatorSettings | None = None,
    beside_bytes: int | None = None,
    on_cpu: bool = False,
    margin: float = MARGINS["no GPU"],
    limit_s: float = LIMIT_S,
) -> Shortage | None:
    """Why that size of a workload does not fit a budget; None where the step cannot be traced.

    Without `rules` it is traced for the GPU that is here, or a usual one: as if there were none, so that
    whatever a program does with a fake tensor, its real device is safe. `beside_bytes` is what is held
    besides what a trace counts, if known.
    """
    ends = time.perf_counter() + limit_s
    try:
        reach = reach_of(workload)
        if not any(isinstance(part, nn.Module) for part in reach.parts) or workload._by_tokens:
            return None
        if rules is None:
            here = rules_for(workload, reach=reach)
            rules = here if here.device.type != "cuda" else rules_for(workload, here.gpu, reach)
        if beside_bytes is None:
            beside_bytes = 0 if on_cpu else held_beside(reach.parts, rules.gpu)[0]
        capacity_bytes = round(budget_bytes * (1 - margin)) - beside_bytes
        room = _Allowance(capacity_bytes, allocator_rules() if settings is None else settings, on_cpu)
        return _ShortStudy(reach, rules, size, room, ends).answer()
    except UntraceableError as error:
        log.info("no memory breakdown of the size that failed: %s", str(error))
    except Exception as error:  # noqa: BLE001  the error to be explained is what the user shall see
        log.warning("no memory breakdown of the size that failed: %s: %s", type(error).__name__, str(error))
    return None


def for_error(workload: Workload, **asked: Any) -> dict[str, Any] | None:
    """What an error says of a workload's shortage: plain data, so that a child process can answer."""
    found = shortage_of(workload, **asked)
    return None if found is None else found.for_error()


def holders_of(peak: Peak) -> tuple[tuple[str, int], ...]:
    """The source lines, and kinds of state, that hold the most of a peak."""
    return tuple((_named(one), one.size) for one in by_line(peak)[:_TOP] if one.size)


def _named(row: PeakPart) -> str:
    plain = next(iter(row.kinds), "") in STATE or not row.operations or ":" not in row.name
    return row.name if plain else f"{row.name} ({row.operations[0]})"


@final
@dataclass(frozen=True, slots=True)
class _Allowance:
    """What a step may use, and whether a trace fits it."""

    capacity_bytes: int
    settings: AllocatorSettings
    on_cpu: bool

    def growing(self) -> _Allowance:
        """The same with segments that grow."""
        return replace(self, settings=replace(self.settings, expandable_segments=True))

    def holds(self, traced: Trace, *, may_retry: bool) -> bool:
        if self.capacity_bytes <= 0 or peak_bytes(traced) > self.capacity_bytes:
            return False
        if self.on_cpu:
            return True
        run = simulate(
            Footprint.of(traced),
            traced.size,
            capacity_bytes=self.capacity_bytes,
            rules=self.settings,
            may_retry=may_retry,
        )
        return run.sustained


def peak_bytes(traced: Trace) -> int:
    """Live bytes at the highest moment."""
    return Peak.of(traced).size


def _state_bytes(traced: Trace) -> int:
    """Weights, gradients and optimizer state at the peak."""
    peak = Peak.of(traced)
    return sum(peak.size_of(block) for block in peak.live if traced.origins[block].kind in STATE)


def _as_on_cpu(traced: Trace) -> Trace:
    """A trace without the workspaces of a GPU's kernels."""
    pairs = zip(traced.sizes, traced.origins, strict=True)
    return replace(traced, sizes=tuple(0 if origin.kind == "workspaces" else size for size, origin in pairs))


@final
@dataclass(slots=True)
class _ShortStudy:
    """One size of a step, as it is and changed."""

    reach: StepReach
    rules: CudaRules
    size: int
    room: _Allowance
    ends: float
    _traits: StepTraits = field(default_factory=StepTraits)
    _traced: dict[tuple[str, ...], Trace | None] = field(default_factory=dict)

    def answer(self) -> Shortage:
        # A warm-up: the first trace in a process differs by a few operations that are done once.
        trace(self.reach.workload, self.size, rules=self.rules, steps=1, reach=self.reach)
        plain = self._trace((), first=(self._traits,))
        holders = holders_of(Peak.of(plain))
        found = Shortage(self.size, peak_bytes(plain), self.rules.gpu.name, holders)
        if self._fits(plain):  # something that the trace does not see has made the difference
            return found
        if self.room.growing().holds(plain, may_retry=self._may_retry):  # it is fragmentation alone
            return replace(found, changes=(_EXPANDABLE,), changed_bytes=found.peak_bytes)
        kept, traced = self._grown(plain)
        if kept and self._fits(traced):
            kept = self._needed(kept)
            after = self._with(kept) or traced
            named = tuple((one.name, one.how) for one in kept)
            return replace(found, changes=named, changed_bytes=peak_bytes(after))
        tried = tuple(one.name for one in kept) if time.perf_counter() < self.ends else ()
        return replace(found, changed_bytes=peak_bytes(traced) if tried else None, tried=tried)

    def _grown(self, plain: Trace) -> tuple[tuple[Change, ...], Trace]:
        """Changes on top of each other, from the cheapest, until the size fits or there are no more."""
        kept: tuple[Change, ...] = ()
        now = plain
        keeps_less = list(self._with_less_state())
        changes = [*self._with_less_activations(), *keeps_less]
        if _state_bytes(plain) > self.room.capacity_bytes:  # nothing else alone would do
            changes = [*keeps_less, *(one for one in changes if one not in keeps_less)]
        for change in changes:
            if self._fits(now) or time.perf_counter() > self.ends:
                break
            others = tuple(one for one in kept if one.group != change.group)  # a dearer one takes its place
            after = self._with((*others, change))
            if after is None:
                continue
            if self._fits(after) or peak_bytes(after) * _LEAST_GAIN < peak_bytes(now):
                kept, now = (*others, change), after
        return kept, now

    def _needed(self, kept: tuple[Change, ...]) -> tuple[Change, ...]:
        """The same without what it fits without, the dearest first; the last one was needed."""
        for change in reversed(kept[:-1]):
            fewer = tuple(one for one in kept if one is not change)
            if not fewer or time.perf_counter() > self.ends:
                continue
            after = self._with(fewer)
            if after is not None and self._fits(after):
                kept = fewer
        return kept

    def _with_less_activations(self) -> Iterator[Change]:
        """What applies to this step and training does not see, the cheapest first."""
        updates = update_changes(self.reach)
        yield from updates[:1]
        yield from chunked_loss(self.reach.workload)
        yield from updates[1:]
        yield from self._best_of(checkpointing(self.reach, self._traits.learning))
        yield from (one for one in self._precision() if one.same_result)

    def _with_less_state(self) -> Iterator[Change]:
        """What trains otherwise, the cheapest first."""
        yield from eight_bit(self.reach)
        yield from lora(self.reach)
        yield from (one for one in self._precision() if not one.same_result)
        yield from shorter_sequence(self.reach.workload, self._traits.length)
        yield from smaller_optimizer(self.reach)

    def _precision(self) -> list[Change]:
        return lower_precision(self.reach, self.rules.gpu, uses_autocast=self._traits.autocast)

    def _best_of(self, levels: list[Change]) -> list[Change]:
        """Of blocks within blocks, those whose checkpointing brings the most."""
        traces = [(level, self._with((level,))) for level in levels]
        sizes = [(peak_bytes(one), number) for number, (_, one) in enumerate(traces) if one is not None]
        return [levels[min(sizes)[1]]] if sizes else []

    def _fits(self, traced: Trace) -> bool:
        return self.room.holds(traced, may_retry=self._may_retry)

    @property
    def _may_retry(self) -> bool:
        return self.reach.workload.kind == "generation"

    def _with(self, changes: Sequence[Change]) -> Trace | None:
        """The changed step; None where it cannot be traced."""
        key = tuple(one.name for one in changes)
        if key not in self._traced:
            try:
                self._traced[key] = self._trace(changes)
            except UntraceableError as error:
                log.debug("%s: %s", " and ".join(key), str(error))
                self._traced[key] = None
        return self._traced[key]

    def _trace(self, changes: Sequence[Change], *, first: Sequence[Any] = ()) -> Trace:
        contexts = (*first, *(context for one in changes for context in one.contexts))
        made = trace(
            self.reach.workload,
            self.size,
            rules=self.rules,
            changes=contexts,
            reach=self.reach,
            limit_s=max(1.0, self.ends - time.perf_counter()),
        )
        return _as_on_cpu(made) if self.room.on_cpu else made
