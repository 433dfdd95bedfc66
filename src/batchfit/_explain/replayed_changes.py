"""What each change to a step would save: the step as it is and changed, traced and replayed.

Rules:
- A what-if is a trace of the changed step, replayed like any prediction; nothing comes from a rule of thumb.
- What brings less than 2 % is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from batchfit._engine.allocator.caching import AllocatorSettings
from batchfit._engine.allocator.footprint import Footprint, ShapeChangedError, Trace, expected_end
from batchfit._engine.allocator.replay import largest
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.device.gpu import is_capped
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.trace.oracle import (
    Basis,
    Oracle,
    allocator_caveats,
    allocator_rules,
    held_beside,
    margin_of,
)
from batchfit._engine.trace.trace import STEPS, WorkloadTraces, trace
from batchfit._engine.trace.workload import TracedWorkload, most_on_host, trace_workload
from batchfit._engine.workload.reachable import StepReach
from batchfit._explain.pure.holders import Peak
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
from batchfit.results import WhatIf

LEAST_GAIN = 1.02  # what brings less is left out
_LEAST_GAIN_OF_PAIR = 1.05  # what two changes must bring beyond the better one
_FAR_BEYOND_TRACE = 1.5  # lines are drawn again where the answer is that many times beyond their last trace


@final
@dataclass(frozen=True, slots=True)
class TracedOutcome:
    """How the step fares, as it is or changed: its trace at the size in question, and the largest size."""

    at_size: Trace
    traced: TracedWorkload | None  # for any size; None without a budget
    largest: int | None

    @property
    def peak_bytes(self) -> int:
        return Peak.of(self.at_size).size


@final
class Study:
    """Traces of one workload, as it is and changed; what several questions need is traced once."""

    def __init__(
        self,
        reach: StepReach,
        rules: CudaRules,
        size: int,
        budget_bytes: int | None,
        basis: Basis,
        around: tuple[Any, ...] = (),
    ) -> None:
        """`around` are contexts of every trace, which spread the model over ranks."""
        self._around = around
        self.reach = reach
        self.workload = workload = reach.workload
        self.rules = rules
        self.size = size
        self.budget_bytes = budget_bytes
        self.capacity: int | None = None  # the budget less the margin that a prediction leaves free
        beside = held_beside(reach.parts, rules.gpu)[0] if basis == "GPU, not run" else 0
        self.residual = (float(beside), 0.0)
        capped = False
        if basis == "GPU, not run" and budget_bytes is not None:
            capped = is_capped(device_to_run(workload._held), budget_bytes)
        self.settings = allocator_rules(capped=capped)
        self.notes = allocator_caveats(self.settings)
        self._traits = StepTraits()
        self._at_size: dict[tuple[str, ...], Trace | None] = {}
        self.base = self._as_it_is(basis)

    def _as_it_is(self, basis: Basis) -> TracedOutcome:
        traced = None
        if self.budget_bytes is not None:
            traced = trace_workload(
                self.workload,
                rules=self.rules,
                budget_bytes=self.budget_bytes,
                reach=self.reach,
                changes=self._around,
            )
            self.capacity = round(self.budget_bytes * (1 - margin_of(traced, basis)))
        else:  # a warm-up: the first trace in a process differs by a few operations that are done once
            self._traced(steps=1)
        at_size = self._traced(self._traits)
        try:
            return TracedOutcome(at_size, traced, self._largest(traced, self.settings))
        except UntraceableError as error:  # the memory breakdown is known all the same
            self.notes.append(f"the largest batch: {error}")
            return TracedOutcome(at_size, traced, None)

    def _largest(self, traced: TracedWorkload | None, settings: AllocatorSettings) -> int | None:
        if traced is None or self.capacity is None:
            return None
        found = Oracle(traced, settings, self.residual).largest(self.capacity, None)
        return 0 if found is None else found.size

    # -- what would change it

    def what_ifs(self) -> list[WhatIf]:
        """Each change that brings something, the best first."""
        if self.base.traced is not None and self.base.traced.footprint is None:
            self.notes.append(
                "what-ifs: the step allocates in another order at each size, so none was traced"
            )
            return []
        tried = [(change, self._tried((change,))) for change in self._changes()]
        single = [(change, after, self._what_if((change,), after)) for change, after in tried if after]
        single.sort(key=lambda one: -one[2].gain)
        alone = [one for _, _, one in single]
        found = alone + self._pairs(single) + self._expandable() + self._small_step_first()
        return sorted((one for one in found if one.gain >= LEAST_GAIN), key=lambda one: -one.gain)

    def _changes(self) -> list[Change]:
        """Those that apply to this workload."""
        found = self._best_level(checkpointing(self.reach, self._traits.learning))
        if self._around:  # weights and optimizers are those of a rank, and are not exchanged for others
            return found + chunked_loss(self.workload) + shorter_sequence(self.workload, self._traits.length)
        found += lower_precision(self.reach, self.rules.gpu, uses_autocast=self._traits.autocast)
        if self._loss_share() >= LEAST_GAIN - 1:
            found += chunked_loss(self.workload)
        if self._in_optimizer(self.base):
            found += update_changes(self.reach)
        if self._state_bytes() >= (LEAST_GAIN - 1) * (self.capacity or self.base.peak_bytes):
            found += smaller_optimizer(self.reach)
        found += shorter_sequence(self.workload, self._traits.length)
        return found

    def _best_level(self, levels: list[Change]) -> list[Change]:
        """Of blocks within blocks, those whose checkpointing brings the most at the size in question."""
        if len(levels) < 2:
            return levels
        traces = [(self._trace_at_size((level,)), level) for level in levels]
        sizes = [Peak.of(one).size if one is not None else self.base.peak_bytes for one, _ in traces]
        return [levels[sizes.index(min(sizes))]]

    def _pairs(self, single: list[tuple[Change, TracedOutcome, WhatIf]]) -> list[WhatIf]:
        """The best change together with the next best of another group, where that pays.

        A change that moves the peak to the optimizer's step goes with another way through that step.
        """
        kept = [one for one in single if one[0].same_result and one[2].gain >= LEAST_GAIN]
        if not kept:
            return []
        best, outcome, alone = kept[0]
        partners = [change for change, _, _ in kept if change.group != best.group][:1]
        if best.group != "optimizer" and not partners and self._in_optimizer(outcome):
            partners = update_changes(self.reach)[:1]
        pairs = [((best, partner), self._tried((best, partner))) for partner in partners]
        found = [self._what_if(pair, after) for pair, after in pairs if after]
        return [one for one in found if one.gain >= _LEAST_GAIN_OF_PAIR * alone.gain]

    def _expandable(self) -> list[WhatIf]:
        """The same trace in an allocator whose segments grow."""
        if self.settings.expandable_segments or self.base.largest is None:
            return []
        after = self._largest(self.base.traced, replace(self.settings, expandable_segments=True))
        how = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        return [
            self._compared("expandable segments", how, "next to nothing", replace(self.base, largest=after))
        ]

    def _small_step_first(self) -> list[WhatIf]:
        """The same trace after a step of one sample.

        What stays after a first full step (cuBLAS's workspaces, the optimizer's state) may lie in large
        blocks, which can then not be released.
        """
        traced = self.base.traced
        if traced is None or traced.footprint is None or self.base.largest is None or self.capacity is None:
            return []
        found = largest(
            traced.footprint,
            capacity_bytes=self.capacity,
            rules=self.settings,
            extra=self.residual,
            first_size=1,
            may_retry=traced.may_retry,
        )
        if found is None or found.size < LEAST_GAIN * self.base.largest:
            return []
        change = "a step of one sample before the first full one"
        how = "train on one sample, then torch.cuda.empty_cache()"
        cost = "one short step; what stays between steps then lies in no large block"
        return [self._compared(change, how, cost, replace(self.base, largest=found.size))]

    def _what_if(self, changes: tuple[Change, ...], outcome: TracedOutcome) -> WhatIf:
        change = " and ".join(one.name for one in changes)
        how = "; ".join(one.how for one in changes)
        cost = "; ".join(one.cost for one in changes if one.cost)
        return self._compared(change, how, cost, outcome)

    def _compared(self, change: str, how: str, cost: str, after: TracedOutcome) -> WhatIf:
        return WhatIf(
            change=change,
            how=how,
            largest_before=self.base.largest,
            largest_after=after.largest,
            peak_bytes_before=self.base.peak_bytes,
            peak_bytes_after=after.peak_bytes,
            cost=cost,
        )

    def _in_optimizer(self, outcome: TracedOutcome) -> bool:
        """Whether another way through the optimizer's step could help, at this or the largest size."""
        if outside_share(outcome.at_size, outcome.at_size.sizes, "optimizer") * LEAST_GAIN < 1:
            return True
        if outcome.traced is None or outcome.traced.footprint is None or not outcome.largest:
            return False
        footprint = outcome.traced.footprint
        return outside_share(footprint, footprint.sizes_at(outcome.largest), "optimizer") * LEAST_GAIN < 1

    def _loss_share(self) -> float:
        """What a cross-entropy's log-probabilities and their gradient hold of the peak."""
        peak = Peak.of(self.base.at_size)
        origins = self.base.at_size.origins
        own = (block for block in peak.live if "log_softmax" in origins[block].operation)
        return sum(map(peak.size_of, own)) / max(peak.size, 1)

    def _state_bytes(self) -> int:
        """What the optimizer keeps: less of it cannot bring more."""
        at_size = self.base.at_size
        pairs = zip(at_size.sizes, at_size.origins, strict=True)
        return sum(size for size, origin in pairs if origin.kind == "optimizer")

    # -- traces of changed steps

    def _tried(self, changes: tuple[Change, ...]) -> TracedOutcome | None:
        """The changed step; None where it cannot be traced."""
        first = self._trace_at_size(changes)
        if first is None:
            return None
        if self.capacity is None:
            return TracedOutcome(first, None, None)
        try:
            traced = self._lines(first, changes)
        except (UntraceableError, ShapeChangedError) as error:
            self._note(changes, error)
            return None
        return TracedOutcome(first, traced, self._largest(traced, self.settings))

    def _trace_at_size(self, changes: tuple[Change, ...]) -> Trace | None:
        key = tuple(one.name for one in changes)
        if key not in self._at_size:
            self._at_size[key] = None
            try:
                self._at_size[key] = self._trace(self.size, changes)
            except UntraceableError as error:
                self._note(changes, error)
        return self._at_size[key]

    def _trace(self, size: int, changes: tuple[Change, ...]) -> Trace:
        return self._traced(*(context for one in changes for context in one.contexts), size=size)

    def _traced(self, *contexts: Any, size: int | None = None, steps: int = STEPS) -> Trace:
        return trace(
            self.workload,
            self.size if size is None else size,
            rules=self.rules,
            steps=steps,
            changes=(*self._around, *contexts),
            reach=self.reach,
        )

    def _lines(self, first: Trace, changes: tuple[Change, ...]) -> TracedWorkload:
        """Lines through the trace at the size in question and one where the end may be.

        With checkpointing the end moves far up: where it lies well beyond the second trace, it is traced
        there, and the lines go through that.
        """
        assert self.capacity is not None
        second = self._trace(self._other_size(first, expected_end(first, self.capacity)), changes)
        try:
            traced = self._through(first, second)
        except ShapeChangedError:  # one sample alone goes other ways through many programs
            first = self._trace(second.size // 2 if second.size > 5 else second.size + 1, changes)
            traced = self._through(first, second)
        end = self._largest(traced, self.settings) or 1
        if end <= _FAR_BEYOND_TRACE * max(first.size, second.size):
            return traced
        further = self._other_size(first, end)
        return traced if further == second.size else self._through(first, self._trace(further, changes))

    def _through(self, first: Trace, second: Trace) -> TracedWorkload:
        footprint = Footprint.between(first, second)
        return TracedWorkload(
            WorkloadTraces(self.reach, self.rules, self._around), footprint, (first.size, second.size)
        )

    def _other_size(self, first: Trace, end: int) -> int:
        """A size near `end` whose batch the host can make, well apart from the first trace's."""
        most = min(end, most_on_host(first.batch_bytes / first.size))
        if most >= 1 and abs(most - first.size) > first.size // 4:
            return most
        return first.size // 2 if first.size > 3 else 2 * first.size

    def _note(self, changes: tuple[Change, ...], error: Exception) -> None:
        self.notes.append(f"what-if {' and '.join(one.name for one in changes)}: {error}")


def outside_share(stream: Trace | Footprint, sizes: Sequence[int], phase: str) -> float:
    """The highest moment outside a phase as a share of the highest of all."""
    live = peak = outside = 0
    for event in stream.events:
        if event < 0:
            live -= sizes[~event]
            continue
        live += sizes[event]
        peak = max(peak, live)
        if stream.origins[event].phase != phase:
            outside = max(outside, live)
    return outside / max(peak, 1)
