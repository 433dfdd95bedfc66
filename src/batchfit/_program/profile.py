"""`batchfit profile -- python train.py --batch-size {}`: samples per second by size, from runs of a program.

Rules:
- Sizes are chosen and judged as those of a workload are (`_profile.measuring`); here they are timed.
- One run per timing. A step's time is that of the program's own loop, data and logging included; of several
  ranks, the slowest one's.
- Memory first: on a CPU it is counted by a mode that slows every operation, so it is counted for a few steps
  and left before the steps that are timed.
- A program whose steps take more forward passes at small sizes accumulates gradients: then passes are
  compared, not steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from batchfit._engine.device.device import Peaks, usable_bytes
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.trial.trial import LargestBatch, TrialRequest
from batchfit._profile.diagnosis import timed_facts
from batchfit._profile.measuring import Measuring, Rates
from batchfit._profile.memory_outlook import MemoryOutlook
from batchfit._profile.pure.diagnose import diagnose
from batchfit._profile.pure.options import ProfileOptions
from batchfit._profile.pure.steady import Timing, verdict
from batchfit._profile.timing import TimedRun
from batchfit._program.config_copy import changed_files
from batchfit._program.pure.step_pace import MEMORY_STEPS, TimedSteps
from batchfit._program.rank_reports import RankReport, Reports
from batchfit._program.trials import ProgramTarget, ProgramTrials
from batchfit.results import Bottleneck, ThroughputProfile, Trial


def profile_program(
    target: ProgramTarget, options: ProfileOptions, *, on_size: Callable[[int], object] = lambda size: None
) -> ThroughputProfile:
    """Measure the program's throughput by size; `on_size` is called before each run."""
    begun_s = time.perf_counter()
    changed_files(target.template, options.smallest)  # what is wrong with them is said before anything is run
    with Interrupts():
        timer = ProgramTimer(target, options, begun_s=begun_s, on_size=on_size)
        measuring = Measuring(timer, options)
        try:
            measuring.to_the_end()
        except KeyboardInterrupt as stop:
            measuring.hand_over(stop, elapsed_s=time.perf_counter() - begun_s)
            raise
        found = _diagnosed(measuring, timer) if options.diagnose else ()
        return measuring.result(found, elapsed_s=time.perf_counter() - begun_s)


def _diagnosed(measuring: Measuring, timer: ProgramTimer) -> tuple[Bottleneck, ...]:
    """What the times and the memory of the sizes say; nothing more is run."""
    chosen = measuring.knee.recommended
    point = next(one for one in measuring.points() if one.size == chosen)
    facts = timed_facts(
        point,
        measuring.runs,
        budget_bytes=timer.budget_bytes,
        has_own_clock=timer.device_name.startswith("cuda"),
        cut_off_by_memory=measuring.is_cut_off,
    )
    return diagnose(facts)


@final
class ProgramTimer:
    """Times sizes by runs of a command."""

    device_model = ""  # known to the program alone
    is_main = True

    def __init__(
        self,
        target: ProgramTarget,
        options: ProfileOptions,
        *,
        begun_s: float,
        on_size: Callable[[int], object],
    ) -> None:
        self._trials = ProgramTrials(target, TrialRequest(options.smallest, steps=MEMORY_STEPS))
        self._asked_bytes, self._options, self._on_size = target.budget_bytes, options, on_size
        limit_s = options.time_limit_s
        self._deadline_s = None if limit_s is None else begun_s + limit_s
        self._outlook: MemoryOutlook | None = None
        self._most: int | None = None  # as many samples as the program has
        self._passes: dict[int, int] = {}  # per step, by size
        self._slowed = False
        self.budget_bytes = target.budget_bytes or 0

    @property
    def world_size(self) -> int:
        """How many ranks the program has."""
        return self._trials.world_size

    @property
    def device_name(self) -> str:
        """As the program's torch has it."""
        return self._trials.device.name

    def is_late(self) -> bool:
        """Whether the time is over."""
        return self._deadline_s is not None and time.perf_counter() >= self._deadline_s

    def limit(self) -> int | None:
        """The largest size that memory and the program's data allow, as far as is known."""
        known = [one for one in (self._outlook and self._outlook.limit(), self._most) if one is not None]
        return min(known, default=None)

    def time(
        self, size: int, timing: Timing, *, smallest: bool = False, count_flops: bool = False
    ) -> TimedRun:
        """One run of the program at the size, timed; FLOPs of a program are not counted."""
        self._on_size(size)
        pace = _TimingPace(timing, self.is_late)
        request = TrialRequest(size, steps=MEMORY_STEPS, is_smallest=smallest)
        try:
            trial, reports = self._trials.run_paced(request, pace, budget_bytes=self._asked_bytes)
        except LargestBatch as end:
            self._most = end.size
            message = f"the program has samples for a batch of {end.size} at most"
            return TimedRun(size, outcome="too_large", message=message)
        self._see_device()
        if not trial.fits:
            return TimedRun(
                size, outcome="too_large" if trial.outcome == "too_large" else "oom", message=trial.message
            )
        self._passes[size] = max(1, reports.use(size).passes)
        self._slowed |= pace.slowed
        run = self._run_of(trial, TimedSteps.of(pace.times_s(reports), timing), timing)
        if self.is_late():
            run.stopped = "time"
        assert self._outlook is not None
        self._outlook.learn(run)
        return run

    def _run_of(self, trial: Trial, steps: TimedSteps, timing: Timing) -> TimedRun:
        run = TimedRun(trial.size)
        run.warmup_s, run.times_s = list(steps.times_s[: steps.warmup]), list(steps.counted)
        if trial.peak_bytes is not None:
            run.peaks = Peaks(trial.peak_bytes, trial.reserved_bytes, trial.split_bytes)
        run.held_bytes, run.alloc_retries = trial.held_bytes, trial.alloc_retries
        run.verdict = verdict(run.times_s, target=timing.target)
        return run

    def _see_device(self) -> None:
        """The first run has shown the device, and so the budget."""
        if self._outlook is None:
            options = self._options
            self.budget_bytes = usable_bytes(self._trials.device, options.budget, options.budget_bytes)
            self._outlook = MemoryOutlook(self.budget_bytes)

    # --- what a step gets done

    @property
    def _accumulates(self) -> bool:
        """Whether a step takes another number of forward passes at another size."""
        return len(set(self._passes.values())) > 1

    def pace_s(self, run: TimedRun) -> float:
        """Seconds of one forward pass with its part of the step."""
        return run.interval.median / self._passes[run.size]

    def rates(self, run: TimedRun, *, tokens_per_sample: int | None) -> Rates:
        """What a step of this run gets done."""
        passes = self._passes[run.size] if self._accumulates else 1
        per_s = run.size * passes * self.world_size / run.interval.median
        return Rates(per_s, None if tokens_per_sample is None else tokens_per_sample * per_s)

    def why_out_of_memory(self, run: TimedRun) -> dict[str, Any]:
        """What the program's probe saw of the smallest size: keywords of `NothingFitsError`."""
        return {"holders": self._trials.holders(None), "further": self._trials.further}

    def notes(self, runs: Mapping[int, TimedRun]) -> Iterator[str]:
        """What is to be known of the times beside what the points say."""
        passes = {self._passes[size] for size in runs}
        if len(passes) > 1:
            yield (
                f"a step takes {min(passes)} to {max(passes)} forward passes (gradient accumulation): "
                "samples/s count all of them"
            )
        elif (each := max(passes)) > 1:
            yield (
                f"a step takes {each} forward passes: where they accumulate gradients, samples/s are "
                f"{each} times as many"
            )
        if self._slowed:
            yield "timed under virtual memory, which makes every operation slower"


@final
class _TimingPace:
    """Lets one run go on until its step time is known."""

    def __init__(self, timing: Timing, is_late: Callable[[], bool]) -> None:
        self._timing, self._is_late = timing, is_late
        self._left_at: int | None = None  # the step from which on only time counted
        self.slowed = False

    def __call__(self, reports: Reports, *, start_s: float) -> dict[str, Any] | None:
        """The step to go on to; None where there are enough."""
        counting = any(rank.counts_memory for rank in reports.stepping)
        if counting and self._left_at is None:
            self._left_at = reports.steps_run
            return {"until": reports.steps_run + 2, "only_time": True}
        self.slowed = counting
        more = TimedSteps.of(self.times_s(reports), self._timing).more(self._timing, start_s=start_s)
        return None if not more or self._is_late() else {"until": reports.steps_run + more}

    def times_s(self, reports: Reports) -> list[float]:
        """The steps of the slowest rank."""
        return max((self._of(rank) for rank in reports.stepping), key=_median_s)

    def _of(self, rank: RankReport) -> list[float]:
        if rank.steps_s and len(rank.steps_s) >= len(rank.steps) - (self._left_at or 0):
            return rank.steps_s
        # It ended by itself, and could not say what its device took.
        return [one["step_s"] for one in rank.steps if one["number"] > (self._left_at or 0)] or [
            one["step_s"] for one in rank.steps
        ]


def _median_s(times_s: list[float]) -> float:
    return sorted(times_s)[len(times_s) // 2]
