"""The trials of a program: each is a run of its command, with a probe in its Python.

Rules:
- One trial, one run of the command; a size that has run long enough is not run again for its stability
  check.
- Starting a program costs more than its steps. Where the steps of a stability check cost less than half of
  the start, a trial takes them at once: then the answer needs no run of its own.
- A program that ends by itself has run whole at that size.
- The time limit of a search ends a run, too: programs may take longer to start than the limit is.
- Nothing outlives a trial: neither a process nor a file of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, final

from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial.in_children import ChildDevice
from batchfit._engine.trial.trial import LargestBatch, RunTrial, TimeIsOver, TrialRequest
from batchfit._program.followed_run import FollowedRun, RunPace
from batchfit._program.probe_run import check_seen, ram_bytes, start_run
from batchfit._program.pure.caveats import caveats_of_runs
from batchfit._program.pure.size_use import SizeUse, note_use
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.rank_reports import Reports
from batchfit._program.run_verdict import trial_of
from batchfit.results import Trial

_SOAK_SHARE_OF_START = 0.5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTarget:
    """A program to run at many sizes."""

    template: CommandTemplate
    budget_bytes: int | None = None
    device: str | None = None
    timeout_s: float | None = None
    deadline_s: float | None = None  # of the whole search, by the monotonic clock
    soak_steps: int = 25
    on_device: Callable[[str, int], object] | None = None
    on_step: Callable[[int, int], object] | None = None


@final
@dataclass(slots=True)
class _Ran:
    trial: Trial
    whole: bool  # the program ended by itself
    evaluated: bool
    only_evaluates: bool
    unreported_s: float = 0.0  # what it took, while the search does not know of it


@final
class ProgramTrials:
    """Runs the trials of a search as runs of a command."""

    def __init__(
        self, target: ProgramTarget, first: TrialRequest, *, known: ChildDevice | None = None
    ) -> None:
        """`first` is the request that the search will begin with: it shows the device."""
        self.target = target
        self._first = first
        self._device = known
        self._ran: dict[int, _Ran] = {}
        self._uses: list[SizeUse] = []
        self._samples: int | None = None
        self._holders: list[tuple[str, int]] = []
        self._available = 0 if known is None else known.available_bytes
        self.world_size = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end: each trial ends its own run."""

    @property
    def device(self) -> ChildDevice:
        """Where the program runs; the first trial is run to see it."""
        if self._device is None:
            with contextlib.suppress(TimeIsOver):  # the search asks for this trial again, and ends
                trial = self._run(self._first, budget_bytes=self.target.budget_bytes)
                self._ran[trial.size].unreported_s = trial.elapsed_s
            if self._device is None:  # its first run has ended before it had chosen a device
                self._see("cpu", self.target.budget_bytes or ram_bytes())
        assert self._device is not None
        return self._device

    def _see(self, name: str, available_bytes: int) -> None:
        self._available = available_bytes
        if self._device is None:
            self._device = ChildDevice(
                name, available_bytes, max(available_bytes, self.target.budget_bytes or 0), 0
            )
            if self.target.on_device is not None:
                self.target.on_device(name, available_bytes)

    @property
    def state_elements(self) -> int:
        """Not known: the state is in the program."""
        return 0

    @property
    def state_bytes(self) -> None:
        """Not known: the state is in the program."""
        return None

    def holders(self, live_bytes: int | None) -> list[tuple[str, int]]:
        """What the program's probe saw at its last OOM."""
        return self._holders

    @property
    def further(self) -> str:
        """The command that traces the program at the smallest size that was run."""
        size = min(self._ran, default=self._first.size)
        return f"batchfit explain --batch-size {size} -- {self.target.template.shown_template()}"

    @property
    def samples(self) -> int | None:
        """How many samples the program's batches have at most, where that was met."""
        return self._samples

    def made_of(self, size: int) -> str:
        """Nothing to say: the program makes its own batches."""
        return ""

    def caveats(self, size: int) -> tuple[str, ...]:
        """What the run at this size did not show of the program."""
        ran = self._ran.get(size)
        if ran is None:  # in an earlier search, which this one goes on with
            return ()
        return caveats_of_runs(
            ran.trial.steps_run,
            whole=ran.whole,
            evaluation=ran.evaluated,
            only_evaluates=ran.only_evaluates,
        )

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Do nothing: a program whose rank failed is ended as a whole."""

    def reachable_bytes(self, least_bytes: int) -> int:
        """Bytes that the last run could use."""
        return self._available

    def reachable_after_bytes(self) -> int:
        """Bytes that the last run could use."""
        return self._available

    def regroup(self) -> None:
        """Do nothing: no state of a trial outlives its run."""

    @contextlib.contextmanager
    def trying(self, budget_bytes: int) -> Iterator[RunTrial]:
        """A context with a function that runs one trial under the budget."""
        yield partial(self._run, budget_bytes=budget_bytes)

    def _run(self, request: TrialRequest, *, budget_bytes: int | None) -> Trial:
        known = self._ran.get(request.size)
        if known is not None and (
            known.whole or not known.trial.fits or known.trial.steps_run >= request.steps
        ):
            elapsed_s, known.unreported_s = known.unreported_s, 0.0
            return known.trial.model_copy(update={"soak": request.soak, "elapsed_s": elapsed_s})
        return self.run_paced(request, self._soak_pace, budget_bytes=budget_bytes)[0]

    def run_paced(
        self, request: TrialRequest, pace: RunPace, *, budget_bytes: int | None
    ) -> tuple[Trial, Reports]:
        """One run of the command, as long as `pace` has it, and what its ranks have reported."""
        followed = self._follow_run(request, pace, budget_bytes)
        if followed.is_cut_off:
            raise TimeIsOver
        reports = followed.reports
        self.world_size = max(self.world_size, reports.world_size)
        self._holders = reports.holders or self._holders
        fitted = [size for size, known in self._ran.items() if known.trial.fits]
        trial = trial_of(followed, self.target.template, ran=fitted)
        if reports.device:
            self._see(reports.device, reports.budget_bytes or ram_bytes())
        self._ran[request.size] = _Ran(
            trial,
            whole=trial.fits and not followed.reached,
            evaluated=reports.evaluated,
            only_evaluates=reports.is_evaluation,
        )
        lines = reports.last_lines(followed.run.tail.lines())
        largest = note_use(self._uses, reports.use(request.size), lines) if trial.fits else None
        if largest is not None:
            self._samples = largest
            raise LargestBatch(largest)
        return trial, reports

    def _follow_run(self, request: TrialRequest, pace: RunPace, budget_bytes: int | None) -> FollowedRun:
        target = self.target
        settings = {"steps": request.steps, "device": target.device or "", "budget_bytes": budget_bytes}
        run = start_run(target.template, request.size, settings)
        followed = FollowedRun(run, request, pace)
        try:
            followed.follow(timeout_s=target.timeout_s, deadline_s=target.deadline_s, on_step=target.on_step)
            check_seen(run, target.template.words, heard=followed.reports.heard, code=followed.code)
        finally:
            run.end()
        return followed

    def _soak_pace(self, reports: Reports, *, start_s: float) -> dict[str, Any] | None:
        """On to the steps of a stability check, where they cost little beside another start."""
        more = self.target.soak_steps - reports.steps_run
        cost_s = more * (reports.step_s() or 0.0)
        if more <= 0 or cost_s > _SOAK_SHARE_OF_START * start_s:
            return None
        return {"until": self.target.soak_steps}
