"""How long a step takes at one size: warmed up, repeated until that is known, and the state restored.

Rules (those of `_engine/trial/guarded_steps.py`, and):
- Warm-up steps (compilation, autotuning, a growing cache) are run until times settle, and are not timed.
- On CUDA the steps of a chunk follow each other as in a training loop, with an event after each and one
  synchronization at the end: one after each step would count the host's work twice. Elsewhere each step is
  synchronized.
- All ranks take the same number of steps: before each further one a rank calls `agree`, and so does a rank
  that failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, final

import torch

from batchfit._engine.device.device import Device, Peaks, counts_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.sizing.memory_budget import begin_peak
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private.dynamo import compilations
from batchfit._engine.trial.guarded_steps import (
    Step,
    StepCalls,
    gradient_bytes,
    guarded_steps,
    tunes_in_first_step,
)
from batchfit._profile.pure.steady import Interval, Timing, Verdict, is_warm, verdict

# (go on?, failed?) -> whether to go on, the same on all ranks; None where one of them failed
Agree = Callable[[bool, bool], bool | None]

_CHUNK = 5


def alone(wants_more: bool, failed: bool) -> bool | None:
    """The agreement of one process with itself."""
    return None if failed else wants_more


@final
@dataclass(slots=True)
class TimedRun:
    """What the steps at one size showed. Times are per step, in seconds."""

    size: int
    warmup_s: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)  # to issue a step, on a device that runs on its own
    outcome: Literal["fits", "oom", "too_large"] = "fits"
    message: str = ""
    peaks: Peaks | None = None
    held_bytes: int | None = None  # between steps, gradients not counted: a floor under all sizes' peaks
    alloc_retries: int = 0  # while timed: those of warm-up do not come again
    recompilations: int = 0
    late_recompilations: int = 0  # while timed
    verdict: Verdict = "noisy"
    stopped: Literal["enough", "time"] = "enough"

    @property
    def fits(self) -> bool:
        return self.outcome == "fits"

    @property
    def interval(self) -> Interval:
        """The time of one step."""
        return Interval.of(self.times_s)

    @property
    def first_step_s(self) -> float:
        """The first step, which pays for whatever a new size costs."""
        return self.warmup_s[0] if self.warmup_s else 0.0


def run_timed(
    step: Step,
    size: int,
    *,
    device: Device,
    snapshot: Snapshot,
    timing: Timing,
    deadline_s: float | None = None,
    agree: Agree = alone,
    raise_ambiguous: bool = False,
    after: Callable[[], bool] | None = None,
    parameters: Sequence[torch.Tensor] = (),
) -> TimedRun:
    """Time steps of `size` samples; `deadline_s` is on `time.perf_counter`'s clock.

    `parameters` are those whose gradients a step may free: they do not count as held.
    `after` is called when all has been read, before the state is restored; it returns False where it was cut
    off in the middle of a step.
    """
    run, calls = TimedRun(size), StepCalls(step, size)
    counted = device if counts_memory(device) else None
    if counted is not None:
        counted.reset()
    with guarded_steps(snapshot, device=counted) as guarded:
        failure = guarded.run(
            lambda _: _take_steps(calls, run, device, timing, deadline_s, agree),
            raise_ambiguous=raise_ambiguous,
            note=calls.note,
        )
        if failure is not None:
            run.outcome = "too_large" if failure.verdict == "too_large" else "oom"
            run.message = failure.message
            with guarded.interruptible():
                agree(False, True)
        guarded.completed = run.fits
        if counted is not None:
            run.peaks = counted.peaks()
            run.held_bytes = max(0, counted.held_bytes() - gradient_bytes(parameters))
        if after is not None and run.fits:
            with guarded.interruptible():
                guarded.completed = after()
    if run.times_s:
        run.verdict = verdict(run.times_s, target=timing.target)
    return run


def _take_steps(
    call: StepCalls, run: TimedRun, device: Device, timing: Timing, deadline_s: float | None, agree: Agree
) -> None:
    """Warm up, then time; both end early where another rank has failed."""

    def late() -> bool:
        return deadline_s is not None and time.perf_counter() >= deadline_s

    def agrees(wants_more: bool) -> bool:
        answer = agree(wants_more, False)
        if answer is None:
            run.outcome, run.message = "oom", "another rank ran out of memory"
        return bool(answer)

    compiled = compilations()
    goes_on = True
    while goes_on:
        begun = time.perf_counter()
        call()
        device.synchronize()
        run.warmup_s.append(time.perf_counter() - begun)
        if len(run.warmup_s) == 1 and tunes_in_first_step(device):
            begin_peak(device)  # workspaces of algorithms that no later step takes
        goes_on = agrees(not is_warm(run.warmup_s, most=timing.most_warmup) and not late())
    if not run.fits:
        return
    warmed, retries = compilations(), _retries(device)
    goes_on = True
    count = timing.least
    while goes_on:
        chunk = _on_cuda if isinstance(device, CudaDevice) else _each_synchronized
        chunk(call, run, device, count)
        enough = timing.is_enough(run.times_s)
        if not enough and late():
            run.stopped = "time"
        goes_on = agrees(not enough and not late())
        count = min(_CHUNK, timing.most - len(run.times_s))
    run.alloc_retries = _retries(device) - retries
    run.recompilations, run.late_recompilations = compilations() - compiled, compilations() - warmed


def _each_synchronized(call: StepCalls, run: TimedRun, device: Device, count: int) -> None:
    for _ in range(count):
        begun = time.perf_counter()
        call()
        device.synchronize()
        run.times_s.append(time.perf_counter() - begun)


def _on_cuda(call: StepCalls, run: TimedRun, device: Any, count: int) -> None:
    """Time a chunk of steps as a loop runs them: times between events, and the time to issue the first."""
    event: Any = torch.cuda.Event
    with torch.cuda.device(device.index):
        events = [event(enable_timing=True) for _ in range(count + 1)]
        device.synchronize()
        events[0].record()
        for number in range(count):
            begun = time.perf_counter()
            call()
            if number == 0:  # later ones may have to wait for room in the queue
                run.host_s.append(time.perf_counter() - begun)
            events[number + 1].record()
        device.synchronize()
    run.times_s += [one.elapsed_time(two) / 1e3 for one, two in pairwise(events)]


def _retries(device: Device) -> int:
    return device.alloc_retries() if counts_memory(device) else 0
