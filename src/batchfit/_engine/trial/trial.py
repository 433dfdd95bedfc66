"""One trial: some steps at one size, measured, and the state restored.

Rules (those of `guarded_steps.py`, and):
- An OOM is a value (`Trial.outcome`); no other error ever counts as "too big".
- Only steps that really ran are counted.
- Under `cudnn.benchmark` the first step of a size tries every algorithm, with workspaces that no later step
  takes. A trial is read from its second step on; a soak runs as a program does, with what the first one left.
- A soak that may settle ends once the allocator repeats itself: more steps would show nothing new.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol, final

import torch

from batchfit._engine.device.device import BudgetedDevice, Device
from batchfit._engine.device.gpu import CachingDevice
from batchfit._engine.device.pure.allocator_state import AllocatorState
from batchfit._engine.device.tensors import optimizers_in, tensors_in, trained_in
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.guarded_steps import (
    Step,
    StepCalls,
    gradient_bytes,
    guarded_steps,
    tunes_in_first_step,
)
from batchfit._engine.trial.pure.soak import allocator_repeats
from batchfit._engine.workload import loop
from batchfit.results import Trial
from batchfit.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class TrialRequest:
    """One trial to run.

    `may_settle`: a soak may end early, once the allocator repeats itself.
    `generation_steps`: the number of steps where each step generates; None for `steps`.
    `is_smallest`: no smaller size is allowed, so an ambiguous error is the user's and not an OOM.
    """

    size: int
    steps: int
    soak: bool = False
    may_settle: bool = False
    generation_steps: int | None = None
    is_smallest: bool = False

    def steps_of(self, kind: str) -> int:
        """How many steps a workload of that kind runs."""
        if self.generation_steps is None or kind != "generation":
            return self.steps
        return min(self.steps, self.generation_steps)


# Runs one trial; None where another rank's trial failed and this rank's was ended for it.
RunTrial = Callable[[TrialRequest], Trial | None]


class LargestBatch(Exception):
    """A trial has shown that no batch of the program is larger than `size`."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"no batch is larger than {size}")


class TimeIsOver(Exception):
    """The time of the search was over before a trial was: it was ended, and says nothing about its size."""


class TrialRunner(Protocol):
    """Runs the trials of a search: `InProcess`, or `InChildren` with `isolate=True`."""

    @property
    def device(self) -> BudgetedDevice:
        """Where the workload runs."""

    @property
    def state_elements(self) -> int:
        """How many numbers the workload's state holds."""

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients and present optimizer state; None where they are not known."""

    def holders(self, live_bytes: int | None) -> list[tuple[str, int]]:
        """What held the most of so many live bytes when a trial was out of memory, where that is known."""

    @property
    def further(self) -> str:
        """The command that shows more of it; empty where that is the usual one."""

    @property
    def samples(self) -> int | None:
        """How many samples the workload's dataset has; None where that is not known."""

    def made_of(self, size: int) -> str:
        """What batches of that size are made of, where that is not plain; empty where it is."""

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Record which collectives a step issues, at a few small sizes, on all ranks together."""

    def trying(self, budget_bytes: int) -> AbstractContextManager[RunTrial]:
        """A context with a function that runs one trial under the budget."""

    def reachable_bytes(self, least_bytes: int) -> int:
        """Bytes that the next trial may use; may wait a while for `least_bytes` to be released."""

    def reachable_after_bytes(self) -> int:
        """Bytes that were reachable when the last trial had ended."""

    def regroup(self) -> None:
        """Repair wrappers such as DDP on all ranks, after a trial that failed on any rank."""


@dataclass(slots=True, kw_only=True)
class _TrialSteps:
    """The steps of one trial, and what they have shown so far; kept apart from the step's own frame."""

    device: Device
    parameters: Sequence[torch.Tensor]
    steps: int
    soak: bool
    may_settle: bool
    optimizers: Sequence[Any]
    generates: bool
    step_s: list[float] = field(default_factory=list)
    retries_at: list[int] = field(default_factory=list)
    held_bytes: int | None = None
    marks: list[AllocatorState] = field(default_factory=list)
    settled: bool = False  # the allocator repeats itself

    def run(self, call: StepCalls, variables: loop.Loop) -> None:
        """Run the steps, and read the device after each."""
        for number in range(self.steps):
            if number == 1 and not self.soak and tunes_in_first_step(self.device):
                self.device.reset()
            begun = time.perf_counter()
            call()
            self.device.synchronize()
            self.step_s.append(time.perf_counter() - begun)
            self.retries_at.append(self.device.alloc_retries())
            beside = gradient_bytes(self.parameters) + variables.held_bytes(self.device.name)
            self.held_bytes = max(0, self.device.held_bytes() - beside)
            if self.may_settle and self._shows_nothing_new():
                break

    def _shows_nothing_new(self) -> bool:
        """Whether further steps of a soak would: the allocator repeats itself, or has retried repeatedly."""
        mark = self.device.mark() if isinstance(self.device, CachingDevice) else None
        if mark is not None:
            updates = tuple(_updates(one) for one in self.optimizers)
            self.marks.append(replace(mark, updates=updates))
            self.settled = allocator_repeats(self.marks)
            if self.settled:
                return True
        late = self.retries_at[self.steps // 2 - 1 :]
        return not self.generates and sum(one < two for one, two in pairwise(late)) > 1

    def settled_retries(self, before: int, retries: int) -> int:
        """Retries in the second half of a soak, where the allocator should have settled."""
        half = self.steps // 2
        if not self.soak or self.generates or self.settled or len(self.retries_at) < half:
            return 0
        return retries - (self.retries_at[half - 1] - before)


def run_request(
    request: TrialRequest, work: Workload, *, step: Step | None = None, device: Device, snapshot: Snapshot
) -> Trial:
    """Run the trial of a workload that is requested; `step` stands in for the workload's own."""
    return run_trial(
        step or work.step,
        request.size,
        device=device,
        snapshot=snapshot,
        parameters=trained_in(work.state),
        steps=request.steps_of(work.kind),
        soak=request.soak,
        may_settle=request.may_settle and work.declared,  # else its optimizers are not known
        optimizers=optimizers_in(work.state),
        generates=work.kind == "generation",
        raise_ambiguous=request.is_smallest,
    )


def run_trial(
    step: Step,
    size: int,
    *,
    device: Device,
    snapshot: Snapshot,
    parameters: Sequence[torch.Tensor] = (),
    steps: int = 3,
    soak: bool = False,
    may_settle: bool = False,
    optimizers: Sequence[Any] = (),
    generates: bool = False,
    raise_ambiguous: bool = False,
) -> Trial:
    """Run `steps` steps at `size`, restore the state, and return what was measured.

    `may_settle`: fewer steps are enough if the allocator repeats itself and all of `optimizers` step
    meanwhile, or if it retries where it should have settled.
    `generates`: a cache grows in each step. Whenever it has outgrown the free blocks, these are released and
    others are reserved. Such retries are no sign that the next step will not fit.

    `parameters` are those whose gradients a step may free before it makes new ones: they do not count
    as held, nor does what a loop's variables keep, since the floor under every peak is what is live at every
    moment, at any size.
    `raise_ambiguous` is for the smallest size allowed: a smaller size cannot cure an error that may or may
    not mean memory, so the error is the user's and comes out unchanged.
    """
    started = time.perf_counter()
    calls = StepCalls(step, size)
    seen = _TrialSteps(
        device=device,
        parameters=parameters,
        steps=steps,
        soak=soak,
        may_settle=may_settle,
        optimizers=optimizers,
        generates=generates,
    )
    device.reset()
    before = device.alloc_retries()
    with guarded_steps(snapshot, device=device) as guarded:
        failure = guarded.run(
            lambda variables: seen.run(calls, variables),
            raise_ambiguous=raise_ambiguous,
            note=calls.note,
            most_passes=loop.PASSES,
        )
        peaks = device.peaks()
        largest = device.largest_bytes() if isinstance(device, CachingDevice) else None
        retries = device.alloc_retries() - before
    return Trial(
        size=size,
        outcome="fits" if failure is None else failure.outcome,
        steps_run=len(seen.step_s),
        peak_bytes=peaks.allocated_bytes,
        reserved_bytes=peaks.reserved_bytes,
        split_bytes=peaks.split_bytes,
        largest_bytes=largest,
        held_bytes=seen.held_bytes,
        alloc_retries=retries,
        settled_retries=seen.settled_retries(before, retries),
        step_s=statistics.median(seen.step_s[1:] or seen.step_s) if seen.step_s else None,
        elapsed_s=time.perf_counter() - started,
        soak=soak,
        settled=failure is None and seen.settled,
        ambiguous=failure is not None and failure.verdict == "ambiguous",
        phase=None if failure is None else failure.phase,
        message="" if failure is None else failure.message,
    )


def _updates(optimizer: Any) -> int:
    """A number that changes with every step of an optimizer.

    Most write in place, which torch counts; fused ones do not let it see that of parameters, but count steps
    in a tensor, and others in a number. Where nothing shows, a soak runs to its end.
    """
    states = list(getattr(optimizer, "state", {}).values())
    counted = 0
    for tensor in tensors_in((optimizer, states)):
        counted += 1 if tensor.is_inference() else 1 + tensor._version
    for one in (*optimizer.param_groups, *states):
        steps = one.get("step") if isinstance(one, Mapping) else None
        counted += steps if isinstance(steps, int) else 0
    return counted
