"""One trial: some steps at one size, measured, and the state put back.

Rules:
- Running out of memory is a value (`Trial.outcome`); any other error comes out unchanged, with the
  size added as a note, and never counts as "too big".
- State before = state after, on success, running out, error and Ctrl-C alike. A Ctrl-C that arrives
  while state is being put back waits until that is done.
- Recovery happens outside `except`: inside, the exception's traceback still holds the step's tensors.
- Only steps that really ran are counted, and a step that ran nothing is an error.
- Under `cudnn.benchmark` the first step of a size tries every algorithm, with workspaces that no later step
  takes. A trial is read from its second step on; a soak runs as a program does, with what the first one left.
- The steps are those of one loop: what its variables keep from step to step is dropped when they have ended.
- A soak that may settle ends once the allocator goes in circles: more steps would show nothing new.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch

from batchfit._engine.device import oom
from batchfit._engine.device.batch_norm_error import needs_two_samples
from batchfit._engine.device.cuda import allocator_mark, largest_bytes
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.pure.allocator_state import AllocatorState
from batchfit._engine.device.resolve import Device
from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.pure.soak import allocator_repeats
from batchfit._engine.workload import loop, phase
from batchfit._engine.workload.user_errors import NOTE
from batchfit.errors import NothingRanError, SnapshotError
from batchfit.results import Outcome, Trial


@dataclass(slots=True)
class _Readings:
    """What the steps have shown so far; kept apart from the step's own frame."""

    step_s: list[float] = field(default_factory=list)
    retries_at: list[int] = field(default_factory=list)
    held_bytes: int | None = None
    marks: list[AllocatorState] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return allocator_repeats(self.marks)

    def steps_that_retried(self, first: int) -> int:
        """In how many steps after the first ones allocations were retried."""
        return sum(one < two for one, two in pairwise(self.retries_at[first - 1 :]))


@dataclass(frozen=True, slots=True)
class _Failure:
    verdict: oom.Verdict
    message: str
    phase: str | None


def run_trial(
    step: Callable[[int], object],
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
    """Run `steps` steps at `size` and say how it went.

    `may_settle`: fewer will do, if the allocator repeats itself and all of `optimizers` step meanwhile, or
    if it retries again where it should have settled.
    `generates`: a cache grows in each step, and whenever it has outgrown the blocks that are free, these go
    back and others are taken. Such retries are how it works, and no sign that the next step will not fit.

    `parameters` are those whose gradients a step may free before it makes new ones: they do not count
    as held, nor does what a loop's variables keep, since the floor under every peak is what is live at every
    moment, at any size.
    `raise_ambiguous` is for the smallest size allowed: an error that may or may not mean memory
    cannot be cured by going lower, so it is the user's and comes out unchanged.
    """
    started = time.perf_counter()
    readings = _Readings()
    ambient = sys.exception()
    raised: BaseException | None = None
    cut_off = True
    device.reset()
    before = device.alloc_retries()
    with Interrupts() as interrupts:
        try:
            with interrupts.opened():
                failure = _run_steps(
                    step,
                    size,
                    steps,
                    device,
                    parameters,
                    readings,
                    soak,
                    may_settle,
                    optimizers,
                    generates,
                    raise_ambiguous,
                )
            cut_off = failure is not None
            peaks, largest = device.peaks(), largest_bytes(device)
            retries = device.alloc_retries() - before
        except BaseException as error:
            raised = error
            raise
        finally:
            phase.clear()
            # A dead context can put nothing back, and trying would hide the error.
            if raised is None or oom.classify(raised, ambient=ambient) != "fatal":
                put_back(snapshot, device, raised, cut_off=cut_off)
            raised = None  # or this frame and its exception would keep each other alive
    settled_retries = 0
    if soak and not generates and not readings.settled and len(readings.retries_at) >= steps // 2:
        settled_retries = retries - (readings.retries_at[steps // 2 - 1] - before)
    return Trial(
        size=size,
        outcome=_outcome(failure),
        steps_run=len(readings.step_s),
        peak_bytes=peaks.allocated_bytes,
        reserved_bytes=peaks.reserved_bytes,
        split_bytes=peaks.split_bytes,
        largest_bytes=largest,
        held_bytes=readings.held_bytes,
        alloc_retries=retries,
        settled_retries=settled_retries,
        step_s=statistics.median(readings.step_s[1:] or readings.step_s) if readings.step_s else None,
        elapsed_s=time.perf_counter() - started,
        soak=soak,
        settled=failure is None and readings.settled,
        ambiguous=failure is not None and failure.verdict == "ambiguous",
        phase=failure.phase if failure else None,
        message=failure.message if failure else "",
    )


def _run_steps(
    step: Callable[[int], object],
    size: int,
    steps: int,
    device: Device,
    parameters: Sequence[torch.Tensor],
    readings: _Readings,
    soak: bool,
    may_settle: bool,
    optimizers: Sequence[Any],
    generates: bool,
    raise_ambiguous: bool,
) -> _Failure | None:
    ambient = sys.exception()
    try:
        with loop.running(most_passes=loop.PASSES) as kept:
            for number in range(steps):
                if number == 1 and not soak and _autotunes(device):
                    device.reset()
                phase.clear()
                begun = time.perf_counter()
                nothing = lazy_kind(step(size))
                if nothing:
                    raise NothingRanError(
                        f"the step returned {nothing} instead of running: nothing was measured. "
                        "Give batchfit a plain function that runs one step when it is called."
                    )
                device.synchronize()
                readings.step_s.append(time.perf_counter() - begun)
                readings.retries_at.append(device.alloc_retries())
                beside = _gradient_bytes(parameters) + kept.held_bytes(device.name)
                readings.held_bytes = max(0, device.held_bytes() - beside)
                mark = allocator_mark(device) if may_settle else None
                if mark is not None:
                    updates = tuple(_updates(one) for one in optimizers)
                    readings.marks.append(replace(mark, updates=updates))
                    if readings.settled:
                        break
                if may_settle and not generates and readings.steps_that_retried(steps // 2) > 1:
                    break  # it retries again and again
    except Exception as error:
        verdict = oom.classify(error, ambient=ambient)
        if verdict in ("error", "fatal") or (verdict == "ambiguous" and raise_ambiguous):
            error.add_note(_note(size, len(readings.step_s) + 1, phase.current(), verdict, error))
            raise
        # The text, never the exception: its traceback holds the tensors of the failed step.
        return _Failure(verdict, oom.describe(error, ambient=ambient), phase.current())
    return None


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


def _autotunes(device: Device) -> bool:
    """Whether cuDNN has tried all its algorithms in the first step."""
    return device.name.startswith("cuda") and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def put_back(snapshot: Snapshot, device: Device, raised: BaseException | None, *, cut_off: bool) -> None:
    """Free what the steps left, then put the state back."""
    # A failed step may have left cycles that hold its tensors, and putting gradients back needs memory.
    gc.collect()
    crowded = False
    try:
        snapshot.restore(cut_off=cut_off)
    except SnapshotError:
        if raised is None:
            raise
        crowded = True
    if crowded:
        # The error on its way out holds the step's tensors through its frames. They are dropped only
        # here, where the state would be lost otherwise: a debugger would like to see them.
        assert raised is not None
        traceback.clear_frames(raised.__traceback__)
        gc.collect()
        device.reset()
        snapshot.restore()
    device.reset()


def _gradient_bytes(parameters: Sequence[torch.Tensor]) -> int:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return sum(gradient.numel() * gradient.element_size() for gradient in gradients)


def lazy_kind(returned: object) -> str:
    """What kind of unstarted work a step returned, or "" when it ran."""
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return "a generator"
    if inspect.iscoroutine(returned):
        returned.close()  # it will never be awaited; without this Python warns about it
        return "a coroutine"
    return ""


def _note(size: int, step_number: int, at: str | None, verdict: oom.Verdict, error: BaseException) -> str:
    where = f"step {step_number}, {at}" if at else f"step {step_number}"
    note = f"{NOTE} {size} ({where})"
    if size == 1 and needs_two_samples(error):
        note += "; batch normalization needs two samples in training mode"
    if verdict == "fatal":
        note += "; the device context is dead, so state could not be put back: restart the process"
    if verdict == "ambiguous":
        note += "; this is the smallest size allowed, so the error does not come from the size"
    return note


def _outcome(failure: _Failure | None) -> Outcome:
    if failure is None:
        return "fits"
    return "too_large" if failure.verdict == "too_large" else "oom"
