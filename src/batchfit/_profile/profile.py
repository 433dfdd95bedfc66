"""`profile_throughput`: throughput by batch size, where more stops paying, and what holds it back.

Rules:
- Arguments are checked before any device work.
- The search for the knee decides (`_profile.pure.knee`), the bench measures (`_profile.bench`), the rules of
  `_profile.pure.diagnose` judge; this file only drives.
- The recommended size has been timed. A size with an OOM is too large, and the profile goes on.
- State is restored after every size and every reading, bit for bit.
- Under `torch.distributed` all ranks time the same sizes together, and all get rank 0's result.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

import batchfit
from batchfit._engine.device.device import Device, usable_bytes
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.oom import needs_two_samples
from batchfit._engine.device.resolve import DeviceSpec, device_to_run
from batchfit._engine.device.tensors import ram_bytes
from batchfit._engine.distributed.ranks import Ranks, telling_others
from batchfit._profile.bench import Bench
from batchfit._profile.diagnosis import Diagnosis, diagnosed
from batchfit._profile.pure.knee import Timed, TimingRequest, marginal_gains
from batchfit._profile.pure.options import OnPoint, ProfileOptions
from batchfit._profile.pure.peak_flops import peak_flops
from batchfit._profile.pure.steady import BRIEF, FINE, Timing, fine_after, is_fine, verdict
from batchfit._profile.readings import PATIENCE_S, loader_pace
from batchfit._profile.reasons import KnownSizes, accumulation, notes, reason
from batchfit._profile.timing import TimedRun
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.results import Bottleneck, ThroughputPoint, ThroughputProfile
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")


def profile_throughput(
    workload: Workload | Callable[[int], object],
    *,
    smallest: int = 1,
    largest: int | None = None,
    sizes: Sequence[int] | None = None,
    within: float = 0.05,
    budget: int | str | None = None,
    time_limit_s: float | None = None,
    device: DeviceSpec | Device | None = None,
    tokens_per_sample: int | None = None,
    loader: Iterable[Any] | None = None,
    target_batch_size: int | None = None,
    diagnose: bool = True,
    on_point: OnPoint | None = None,
) -> ThroughputProfile:
    """Measure throughput by batch size, and recommend the smallest size that is close to the best.

    ```python
    profile = batchfit.profile_throughput(batchfit.training(model, optimizer, loss_fn, make_batch))
    loader = DataLoader(dataset, batch_size=profile.recommended)
    print(profile)
    ```

    Args:
        workload: what one step is; a plain `step(batch_size)` is accepted, with its state undeclared.
        smallest: the size to begin with, where a batch of 1 does not run (BatchNorm).
        largest: the largest size to time, such as `find_batch_size` has found; default: what memory readings
            at small sizes allow.
        sizes: time exactly these sizes, finely, instead of looking for the knee.
        within: how far from the best throughput the recommended size may be.
        budget: bytes the program may use ("24GiB"); default: all that is free on a GPU, and of RAM a quarter,
            at most 4 GiB, beside what the model and the optimizer hold.
        time_limit_s: stop with what was measured so far.
        device: where the workload runs; default: where its state is.
        tokens_per_sample: tokens in a sample; default: read off `input_ids`, where the model is given some.
        loader: the program's own data loader: it is timed alone and with the step.
        target_batch_size: a batch that the training wants (over all ranks); where it does not fit, the result
            says how to accumulate it.
        diagnose: look for the bottleneck: a few more steps at the recommended size.
        on_point: called with each point as it is measured.

    Returns:
        A `ThroughputProfile`: sizes are per process, and `recommended` is the one to use.

    Raises:
        NothingFitsError: not even a batch of 1 (or the smallest of `sizes`) fits.
        SearchStoppedError: `time_limit_s` was over before any size was timed.
    """
    keywords = {**locals()}  # every argument, by its name
    return profile_with(keywords.pop("workload"), lambda: ProfileOptions(**keywords))


def profile_with(
    workload: Workload | Callable[[int], object], make_options: Callable[[], ProfileOptions]
) -> ThroughputProfile:
    """Measure throughput; an error of `make_options` on one rank ends the profile on all ranks."""
    begun_s, ranks = time.perf_counter(), Ranks.current()
    with Interrupts(is_open=True), telling_others(ranks):
        work, options = as_workload(workload), make_options()
        with _bench(work, options, ranks, begun_s) as bench:
            measuring = _Measuring(bench, options)
            measuring.time_loader()
            try:
                measuring.to_the_end()
                found = measuring.diagnosed() if options.diagnose else ()
            except KeyboardInterrupt as stop:
                measuring.hand_over(stop, elapsed_s=time.perf_counter() - begun_s)
                raise
        profile = measuring.result(found, elapsed_s=time.perf_counter() - begun_s)
        texts = ranks.gather(profile.to_json() if ranks.is_main else "", doing="the profile")
        ranks.settle()
        return profile if ranks.is_main else ThroughputProfile.from_json(texts[0])


def _bench(work: Workload, options: ProfileOptions, ranks: Ranks, begun_s: float) -> Bench:
    """Where sizes are timed, within a budget that all ranks have agreed on."""
    device = device_to_run(work._held, options.device)
    settings = [options.knee().to_json(), options.target_batch_size, options.diagnose, options.loader is None]
    ranks.same(settings, doing="the settings")
    usable = usable_bytes(
        device, options.budget, options.budget_bytes, held_bytes=ram_bytes(work._held), says=ranks.is_main
    )
    budget_bytes = ranks.minimum(usable, doing="the budget")
    if not work.declared and ranks.is_main:
        warnings.warn(
            "the step's state is not declared, so timing changes the model and optimizer that it uses. "
            "Pass batchfit.Workload(step, state=[model, optimizer]) to have them restored afterwards.",
            stacklevel=4,  # the caller of `profile_throughput`
        )
    deadline_s = None if options.time_limit_s is None else begun_s + options.time_limit_s
    return Bench(work, device, ranks, budget_bytes=budget_bytes, deadline_s=deadline_s)


class _Measuring:
    """The sizes of one profile, timed one after another."""

    def __init__(self, bench: Bench, options: ProfileOptions) -> None:
        self.bench, self.options, self.knee = bench, options, options.knee()
        self._largest = options.largest
        self.runs: dict[int, TimedRun] = {}  # the finest run of each size
        self.pace: Any = None  # a loader's, where there is one
        self._too_large: list[TimedRun] = []
        self._first_s: dict[int, float] = {}
        self._begun = time.perf_counter()
        self._stopped = "measured"
        self._aside: Sequence[str] = ()  # what the diagnosis could not measure

    def time_loader(self) -> None:
        """Time the loader alone, where there is one.

        First, so that an error of the loader comes at once; with a small part of the time.
        """
        loader, limit_s = self.options.loader, self.options.time_limit_s
        if loader is not None:
            patience_s = PATIENCE_S if limit_s is None else min(PATIENCE_S, limit_s / 5)
            self.pace = self.bench.briefly(lambda: loader_pace(loader, patience_s=patience_s))

    def to_the_end(self) -> None:
        """Ask, time and tell until there is nothing more to learn, or the time is over."""
        bench = self.bench
        while (ask := self.knee.ask()) is not None:
            if self._is_late():
                self._stopped = "time_limit"
                break
            try:
                run = bench.time(
                    ask.size,
                    self._timing(ask),
                    smallest=self._is_smallest(ask.size),
                    count_flops=not self.runs,
                )
            except Exception as error:
                if ask.size > 1 or self.knee.sizes or self._largest == 1 or not needs_two_samples(error):
                    raise
                self.knee = replace(self.knee, smallest=2)
                if bench.ranks.is_main:
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

    def diagnosed(self) -> tuple[Bottleneck, ...]:
        """What holds the recommended size back, from a few more steps, or without them where time is over."""
        found = Diagnosis(self.bench, self.knee, self.runs, self.options.loader, self.pace, self.is_cut_off)
        diagnosis = diagnosed(found, self.points(), may_step=not self._is_late())
        self._aside = diagnosis.notes
        return diagnosis.bottlenecks

    def _keep(self, run: TimedRun, *, fine: bool) -> None:
        interval = run.interval
        fine = fine or is_fine(run.times_s)
        self.knee = self.knee.tell(Timed(run.size, interval.median, interval.spread, fine=fine))
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
        if (on_point := self.options.on_point) is not None and self.bench.ranks.is_main:
            on_point(point)

    def _timing(self, ask: TimingRequest) -> Timing:
        if self.knee.sizes:
            return FINE
        return fine_after(time.perf_counter() - self._begun) if ask.fine else BRIEF

    def _is_smallest(self, size: int) -> bool:
        return size == (min(self.knee.sizes) if self.knee.sizes else self.knee.smallest)

    def _is_late(self) -> bool:
        """Whether the time is over, on any rank."""
        deadline_s = self.bench.deadline_s
        late = deadline_s is not None and time.perf_counter() >= deadline_s
        return self.bench.ranks.any(late, doing="the time that is left")

    def _limit(self) -> int | None:
        """The largest size worth asking for: what the caller said, and what memory allows."""
        known = [one for one in (self._largest, self.bench.limit()) if one is not None]
        return max(min(known), max(self.runs)) if known else None

    def _room(self) -> KnownSizes:
        """What is known about the sizes that fit, whatever sizes the caller wanted timed."""
        failed = min((run.size for run in self._too_large), default=None)
        known = max(self.bench.limit() or 0, max(self.runs))
        return KnownSizes(known if failed is None else min(known, failed - 1), failed)

    def _nothing_ran(self) -> None:
        if not self._too_large:
            raise SearchStoppedError(
                "no size was timed when the profile stopped (time_limit). Allow more time, or name sizes."
            )
        last = min(self._too_large, key=lambda run: run.size)
        raise NothingFitsError(
            last.size,
            device=self.bench.device.name,
            budget_bytes=self.bench.budget_bytes,
            detail=last.message,
            advice="" if last.size == 1 else "Name smaller sizes, or shrink the model.",
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
        gains = marginal_gains({size: size / run.interval.median for size, run in self.runs.items()})
        return tuple(self._point(self.runs[size], gains.get(size)) for size in sorted(self.runs))

    def _point(self, run: TimedRun, gain: float | None) -> ThroughputPoint:
        interval, world_size = run.interval, self.bench.ranks.world_size
        seen = self.bench.seen[run.size]
        tokens = self.options.tokens_per_sample
        passes = self.bench.work._passes  # a step accumulates the gradients of this many times `size` samples
        per_s = run.size * passes * world_size / interval.median
        per_sample = self.bench.flops_per_sample
        flops = per_sample * run.size * passes / interval.median if per_sample else None
        peak = peak_flops(device_model(self.bench.device), seen.precision)
        if tokens is None and seen.tokens:
            tokens_per_s: float | None = seen.tokens * passes * world_size / interval.median
        else:
            tokens_per_s = None if tokens is None else tokens * per_s
        return ThroughputPoint(
            size=run.size,
            step_s=interval.median,
            step_s_low=interval.low,
            step_s_high=interval.high,
            samples_per_s=per_s,
            tokens_per_s=tokens_per_s,
            peak_bytes=run.peaks.allocated_bytes if run.peaks else None,
            reserved_bytes=run.peaks.reserved_bytes if run.peaks else None,
            alloc_retries=run.alloc_retries,
            flops_per_s=flops,
            flops_share=flops / peak if flops is not None and peak else None,
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
        points, bench, room = self.points(), self.bench, self._room()
        chosen = self.knee.recommended
        assert chosen is not None
        return ThroughputProfile(
            points=points,
            recommended=chosen,
            largest=points[-1].size,
            limit=room.known if room.failed is not None or bench.limit() is not None else None,
            within=self.knee.within,
            reason=reason(points, chosen, within=self.knee.within),
            diagnosis=diagnosis,
            accumulation=accumulation(
                points, chosen, self.options.target_batch_size, room, world_size=bench.ranks.world_size
            ),
            too_large=tuple(sorted(run.size for run in self._too_large)),
            stopped_because=self._stopped,
            budget_bytes=bench.budget_bytes,
            device=bench.device.name,
            device_model=device_model(bench.device),
            world_size=bench.ranks.world_size,
            notes=(*notes(bench, self.runs, points, stopped=self._stopped), *self._aside),
            elapsed_s=elapsed_s,
            batchfit_version=batchfit.__version__,
            torch_version=torch.__version__,
        )


def device_model(device: Device) -> str:
    """`NVIDIA H200`; empty where torch does not tell."""
    if isinstance(device, CudaDevice):
        with contextlib.suppress(RuntimeError, AssertionError):
            return torch.cuda.get_device_name(device.index)
    return ""
