"""One profile while it is measured: which sizes are timed, and the result that they make.

Rules: the search for the knee decides (`_profile.pure.knee`), a timer measures (`SizeTimer`): steps of a
workload in this process (`_profile.bench`), or runs of a program. This file only drives, so that both give
the same answer for the same times.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, final

import torch

import batchfit
from batchfit._engine.device.oom import needs_two_samples
from batchfit._profile.pure.knee import Timed, TimingRequest, marginal_gains
from batchfit._profile.pure.options import ProfileOptions
from batchfit._profile.pure.steady import BRIEF, FINE, Timing, fine_after, is_fine, verdict
from batchfit._profile.reasons import KnownSizes, accumulation, notes, reason
from batchfit._profile.timing import TimedRun
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.results import Bottleneck, ThroughputPoint, ThroughputProfile

log = logging.getLogger("batchfit")


class Rates(NamedTuple):
    """What a step gets done per second, over all ranks; FLOPs on each."""

    samples_per_s: float
    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    flops_share: float | None = None


class SizeTimer(Protocol):
    """Times one size after another, within a budget."""

    budget_bytes: int

    @property
    def world_size(self) -> int: ...
    @property
    def device_name(self) -> str: ...
    @property
    def device_model(self) -> str: ...
    @property
    def is_main(self) -> bool: ...

    def time(
        self, size: int, timing: Timing, *, smallest: bool = False, count_flops: bool = False
    ) -> TimedRun:
        """Steps at one size; one that is out of memory is a run that does not fit."""

    def limit(self) -> int | None:
        """The largest size that memory allows, as far as the readings say."""

    def is_late(self) -> bool:
        """Whether the time is over."""

    def pace_s(self, run: TimedRun) -> float:
        """Seconds that sizes are compared by, for `run.size` samples."""

    def rates(self, run: TimedRun, *, tokens_per_sample: int | None) -> Rates:
        """What a step of this run gets done."""

    def why_out_of_memory(self, run: TimedRun) -> dict[str, Any]:
        """What the error says of the smallest size, if that did not fit: keywords of `NothingFitsError`."""

    def notes(self, runs: Mapping[int, TimedRun]) -> Iterator[str]:
        """What is to be known of the times beside what the points say."""


@final
class Measuring:
    """The sizes of one profile, timed one after another."""

    def __init__(self, timer: SizeTimer, options: ProfileOptions) -> None:
        self.timer, self.options, self.knee = timer, options, options.knee()
        self._largest = options.largest
        self.runs: dict[int, TimedRun] = {}  # the finest run of each size
        self._too_large: list[TimedRun] = []
        self._first_s: dict[int, float] = {}
        self._begun = time.perf_counter()
        self._stopped = "measured"
        self.aside: Sequence[str] = ()  # what the diagnosis could not measure

    def to_the_end(self) -> None:
        """`ask`, time and `tell` until there is nothing more to learn, or the time is over."""
        while (ask := self.knee.ask()) is not None:
            if self.timer.is_late():
                self._stopped = "time_limit"
                break
            try:
                run = self.timer.time(
                    ask.size,
                    self._timing(ask),
                    smallest=self._is_smallest(ask.size),
                    count_flops=not self.runs,
                )
            except Exception as error:
                if ask.size > 1 or self.knee.sizes or self._largest == 1 or not needs_two_samples(error):
                    raise
                self.knee = replace(self.knee, smallest=2)
                if self.timer.is_main:
                    log.info("batch normalization cannot train on one sample: sizes from 2 up are timed")
                continue
            if not run.fits:
                self._too_large.append(run)
                self.knee = self.knee.tell(Timed(ask.size, fits=False))
                continue
            self._keep(run, fine=ask.fine)
            if not self.knee.sizes:
                self.knee = replace(self.knee, limit=self._limit())
        if not self.runs:
            self._nothing_ran()
        if any(run.stopped == "time" for run in self.runs.values()):
            self._stopped = "time_limit"

    def _keep(self, run: TimedRun, *, fine: bool) -> None:
        interval = run.interval
        fine = fine or is_fine(run.times_s)
        self.knee = self.knee.tell(Timed(run.size, self.timer.pace_s(run), interval.spread, fine=fine))
        before = self.runs.get(run.size)
        self._first_s.setdefault(run.size, run.first_step_s)
        if before is not None:
            run.recompilations += before.recompilations
            if min(len(before.times_s), len(run.times_s)) >= FINE.least:  # both fine: all of it counts
                run.times_s[:0] = before.times_s
                run.verdict = verdict(run.times_s, target=FINE.target)
        if before is None or len(run.times_s) >= len(before.times_s):
            self.runs[run.size] = run
        point = self._point(run, None)
        log.info("batch size %d: %.4g samples/s", point.size, point.samples_per_s)
        if (on_point := self.options.on_point) is not None and self.timer.is_main:
            on_point(point)

    def _timing(self, ask: TimingRequest) -> Timing:
        if self.knee.sizes:
            return FINE
        return fine_after(time.perf_counter() - self._begun) if ask.fine else BRIEF

    def _is_smallest(self, size: int) -> bool:
        return size == (min(self.knee.sizes) if self.knee.sizes else self.knee.smallest)

    def _limit(self) -> int | None:
        """The largest size worth asking for: what the caller said, and what memory allows."""
        known = [one for one in (self._largest, self.timer.limit()) if one is not None]
        return max(min(known), max(self.runs)) if known else None

    def _room(self) -> KnownSizes:
        """What is known about the sizes that fit, whatever sizes the caller wanted timed."""
        failed = min((run.size for run in self._too_large), default=None)
        known = max(self.timer.limit() or 0, max(self.runs))
        return KnownSizes(known if failed is None else min(known, failed - 1), failed)

    def _nothing_ran(self) -> None:
        if not self._too_large:
            raise SearchStoppedError(
                "no size was timed when the profile stopped (time_limit). Allow more time, or name sizes."
            )
        last = min(self._too_large, key=lambda run: run.size)
        raise NothingFitsError(
            last.size,
            device=self.timer.device_name,
            budget_bytes=self.timer.budget_bytes,
            detail=last.message,
            advice="" if last.size == 1 else "Name smaller sizes, or shrink the model.",
            **self.timer.why_out_of_memory(last),
        )

    def hand_over(self, stop: KeyboardInterrupt, *, elapsed_s: float) -> None:
        """What was timed until an interrupt goes along with it, as its attribute `profile`."""
        if self.runs:
            self._stopped = "interrupted"
            vars(stop)["profile"] = self.result((), elapsed_s=elapsed_s)

    @property
    def is_cut_off(self) -> bool:
        """Whether memory, and nothing that the caller asked for, ends the sizes right above the answer."""
        ceiling, chosen = self.knee.ceiling, self.knee.recommended
        if ceiling is None or chosen is None or self.knee.sizes:
            return False
        return chosen * 4 / 3 > ceiling and (self._largest is None or ceiling < self._largest)

    def points(self) -> tuple[ThroughputPoint, ...]:
        """What was measured, by size."""
        gains = marginal_gains({size: size / self.timer.pace_s(run) for size, run in self.runs.items()})
        return tuple(self._point(self.runs[size], gains.get(size)) for size in sorted(self.runs))

    def _point(self, run: TimedRun, gain: float | None) -> ThroughputPoint:
        interval = run.interval
        rates = self.timer.rates(run, tokens_per_sample=self.options.tokens_per_sample)
        return ThroughputPoint(
            size=run.size,
            step_s=interval.median,
            step_s_low=interval.low,
            step_s_high=interval.high,
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            peak_bytes=run.peaks.allocated_bytes if run.peaks else None,
            reserved_bytes=run.peaks.reserved_bytes if run.peaks else None,
            alloc_retries=run.alloc_retries,
            flops_per_s=rates.flops_per_s,
            flops_share=rates.flops_share,
            steps_timed=len(run.times_s),
            steps_warmed=len(run.warmup_s),
            steady=run.verdict == "steady",
            first_step_s=self._first_s[run.size],
            host_s=min(run.host_s) if run.host_s else None,
            recompilations=run.recompilations,
            gain=gain,
        )

    def result(self, diagnosis: tuple[Bottleneck, ...], *, elapsed_s: float) -> ThroughputProfile:
        """The profile."""
        points, timer, room = self.points(), self.timer, self._room()
        chosen = self.knee.recommended
        assert chosen is not None
        return ThroughputProfile(
            points=points,
            recommended=chosen,
            largest=points[-1].size,
            limit=room.known if room.failed is not None or timer.limit() is not None else None,
            within=self.knee.within,
            reason=reason(points, chosen, within=self.knee.within),
            diagnosis=diagnosis,
            accumulation=accumulation(
                points, chosen, self.options.target_batch_size, room, world_size=timer.world_size
            ),
            too_large=tuple(sorted(run.size for run in self._too_large)),
            stopped_because=self._stopped,
            budget_bytes=timer.budget_bytes,
            device=timer.device_name,
            device_model=timer.device_model,
            world_size=timer.world_size,
            notes=(
                *notes(self.runs, points, stopped=self._stopped),
                *timer.notes(self.runs),
                *self.aside,
            ),
            elapsed_s=elapsed_s,
            batchfit_version=batchfit.__version__,
            torch_version=torch.__version__,
        )
