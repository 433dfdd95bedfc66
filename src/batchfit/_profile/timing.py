"""How long a step takes at one size: warmed up, repeated until that is known, and the state put back.

Rules:
- As with a trial: running out of memory is a value, any other error comes out unchanged with the size as a
  note, and state before = state after, on success, running out, error and Ctrl-C alike.
- Warm-up steps (compilation, autotuning, a growing cache) are run until times settle, and are not timed.
- On CUDA the steps of a chunk follow each other as in a training loop, with an event after each and one wait
  at the end: a wait after each step would count the host's work twice. Elsewhere each step is waited for.
- All ranks take the same number of steps: `agree` is asked before each further one, by a rank that failed
  too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, final

import torch

from batchfit._engine.device import oom
from batchfit._engine.device.compile import compilations
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.readings import begin_peak
from batchfit._engine.device.resolve import CpuDevice, CudaDevice, Device, Peaks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.trial import _gradient_bytes, _note, lazy_kind, put_back
from batchfit._engine.virtual_memory.memory import active
from batchfit._engine.workload import loop, phase
from batchfit._profile.pure.steady import Interval, Timing, Verdict, is_warm, verdict
from batchfit.errors import NothingRanError

Step = Callable[[int], object]
# (go on?, failed?) -> whether to go on, the same on all ranks; None where one of them failed
Agree = Callable[[bool, bool], bool | None]

_CHUNK = 5


def alone(wants_more: bool, failed: bool) -> bool | None:
    """The agreement of one process with itself."""
    return None if failed else wants_more


class _PeerFailed(Exception):
    """Another rank has run out of memory at this size."""


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
    around: AbstractContextManager[object] | None = None,
    after: Callable[[], bool] | None = None,
    parameters: Sequence[torch.Tensor] = (),
) -> TimedRun:
    """Time steps of `size` samples; `deadline_s` is on `time.perf_counter`'s clock.

    `parameters` are those whose gradients a step may free: they do not count as held.
    `after` is called when all has been read, before the state is put back; False says that it was cut off.
    """
    run = TimedRun(size)
    ended = True
    ambient = sys.exception()
    raised: BaseException | None = None
    counts = counts_memory(device)
    if counts:
        device.reset()
    with Interrupts() as interrupts:
        try:
            with interrupts.opened(), around or nullcontext():
                if _attempted(step, run, device, timing, deadline_s, agree, raise_ambiguous):
                    agree(False, True)
            if counts:
                run.peaks = device.peaks()
                run.held_bytes = max(0, device.held_bytes() - _gradient_bytes(parameters))
            if after is not None and run.fits:
                with interrupts.opened():
                    ended = after()
        except BaseException as error:
            raised = error
            raise
        finally:
            phase.clear()
            if raised is None or oom.classify(raised, ambient=ambient) != "fatal":
                cut_off = raised is not None or not run.fits or not ended
                put_back(snapshot, device if counts else UNCOUNTED, raised, cut_off=cut_off)
            raised = None
    if run.times_s:
        run.verdict = verdict(run.times_s, target=timing.target)
    return run


def _attempted(
    step: Step,
    run: TimedRun,
    device: Device,
    timing: Timing,
    deadline_s: float | None,
    agree: Agree,
    raise_ambiguous: bool,
) -> bool:
    """Run the steps; True where they ran out of memory here, which the other ranks have to be told."""
    ambient = sys.exception()
    try:
        with loop.running():
            _take_steps(step, run, device, timing, deadline_s, agree)
    except _PeerFailed:
        run.outcome, run.message = "oom", "another rank ran out of memory"
    except Exception as error:
        kind = oom.classify(error, ambient=ambient)
        if kind in ("error", "fatal") or (kind == "ambiguous" and raise_ambiguous):
            number = len(run.warmup_s) + len(run.times_s) + 1
            error.add_note(_note(run.size, number, phase.current(), kind, error))
            raise
        run.outcome = "too_large" if kind == "too_large" else "oom"
        run.message = oom.describe(error, ambient=ambient)
        return True
    return False


def _take_steps(
    step: Step, run: TimedRun, device: Device, timing: Timing, deadline_s: float | None, agree: Agree
) -> None:
    def late() -> bool:
        return deadline_s is not None and time.perf_counter() >= deadline_s

    def asked(wants_more: bool) -> bool:
        answer = agree(wants_more, False)
        if answer is None:
            raise _PeerFailed
        return answer

    compiled = compilations()
    goes_on = True
    while goes_on:
        begun = time.perf_counter()
        _one(step, run.size)
        device.synchronize()
        run.warmup_s.append(time.perf_counter() - begun)
        if len(run.warmup_s) == 1 and _autotunes(device):
            begin_peak(device)  # workspaces of algorithms that no later step takes
        goes_on = asked(not is_warm(run.warmup_s, most=timing.most_warmup) and not late())
    warmed, retries = compilations(), _retries(device)
    goes_on = True
    count = timing.least
    while goes_on:
        chunk = _on_cuda if isinstance(device, CudaDevice) else _waited_for
        chunk(step, run, device, count)
        enough = timing.is_enough(run.times_s)
        if not enough and late():
            run.stopped = "time"
        goes_on = asked(not enough and not late())
        count = min(_CHUNK, timing.most - len(run.times_s))
    run.alloc_retries = _retries(device) - retries
    run.recompilations, run.late_recompilations = compilations() - compiled, compilations() - warmed


def _waited_for(step: Step, run: TimedRun, device: Device, count: int) -> None:
    for _ in range(count):
        begun = time.perf_counter()
        _one(step, run.size)
        device.synchronize()
        run.times_s.append(time.perf_counter() - begun)


def _on_cuda(step: Step, run: TimedRun, device: Any, count: int) -> None:
    """A chunk of steps as a loop runs them: times between events, and how long the first took to issue."""
    event: Any = torch.cuda.Event
    with torch.cuda.device(device.index):
        events = [event(enable_timing=True) for _ in range(count + 1)]
        device.synchronize()
        events[0].record()
        for number in range(count):
            begun = time.perf_counter()
            _one(step, run.size)
            if number == 0:  # later ones may have to wait for room in the queue
                run.host_s.append(time.perf_counter() - begun)
            events[number + 1].record()
        device.synchronize()
    run.times_s += [one.elapsed_time(two) / 1e3 for one, two in pairwise(events)]


def _one(step: Step, size: int) -> None:
    phase.clear()
    nothing = lazy_kind(step(size))
    if nothing:
        raise NothingRanError(
            f"the step returned {nothing} instead of running: nothing was measured. "
            "Give batchfit a plain function that runs one step when it is called."
        )


def _autotunes(device: Device) -> bool:
    return isinstance(device, CudaDevice) and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def counts_memory(device: Device) -> bool:
    """Whether the device's memory can be read now: a CPU's only under `virtual_memory`."""
    return not isinstance(device, CpuDevice) or active() is not None


def _retries(device: Device) -> int:
    return device.alloc_retries() if counts_memory(device) else 0


@final
class _Uncounted:
    """Stands for a device whose memory nobody counts, where state is put back."""

    name = "cpu"

    def reset(self) -> None:
        """There is nothing to reset."""


UNCOUNTED: Any = _Uncounted()
