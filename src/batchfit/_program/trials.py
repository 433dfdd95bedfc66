"""The trials of a program: each is a run of its command, with a probe in its Python.

Rules:
- One trial, one run of the command; a size that has run long enough is not run again for its stability
  check.
- Starting a program costs more than its steps. Where the steps of a stability check cost less than half of
  the start, a trial takes them at once: then the answer needs no run of its own.
- What counts as too big: an OOM on any rank, caught or not; a process that was killed; a run that hangs after
  its first step. Every other failure is the program's own, with its last lines.
- A program that ends by itself has run whole at that size.
- Nothing outlives a trial: neither a process nor a file of ours.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self, final

from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial.in_children import ChildDevice, ending_text
from batchfit._engine.trial.trial import LargestBatch, RunTrial, TrialRequest
from batchfit._program.command_run import CommandRun
from batchfit._program.probe_run import check_seen, ram_bytes, start_run
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.pure.usage import SizeUse, largest_batch, wrong_use
from batchfit._program.rank_reports import Reports
from batchfit.errors import ProgramError
from batchfit.results import Trial

_SILENT_S = 600.0  # without a word after its first step: then it hangs
_FIRST_STEP_S = 3600.0  # without a word before: models are loaded, and data is prepared
_NO_STEP_S = 4 * 3600.0  # whatever it prints
_OTHERS_S = 10.0  # for what the other ranks and the launcher say, after one rank has failed
_SOAK_SHARE_OF_START = 0.5
_ASKS = "the program asks for input, and a probe has none"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTarget:
    """A program to run at many sizes."""

    template: CommandTemplate
    budget_bytes: int | None = None
    device: str | None = None
    timeout_s: float | None = None
    soak_steps: int = 25
    on_device: Callable[[str, int], object] | None = None
    on_step: Callable[[int, int], object] | None = None


class RunPace(Protocol):
    """Says how a run goes on once all ranks have taken the steps that were asked for."""

    def __call__(self, reports: Reports, *, start_s: float) -> dict[str, Any] | None:
        """What to answer the ranks that wait (`until` which step); None where the run has shown enough."""


@final
@dataclass(slots=True)
class _Ran:
    trial: Trial
    whole: bool  # the program ended by itself
    unseen_s: float = 0.0  # what it took, while the search does not know of it


@final
@dataclass(slots=True)
class _Follow:
    """One run while it is followed."""

    run: CommandRun
    request: TrialRequest
    pace: RunPace
    reports: Reports = field(default_factory=Reports)
    code: int | None = None
    silent: bool = False
    reached: bool = False
    not_started: list[Any] | None = None
    failed_s: float | None = None
    waited_s: float = 0.0  # the limit that it hung for


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
        self._available = 0 if known is None else known.available_bytes
        self.starts_s: list[float] = []
        self.world_size = 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to end: each trial ends its own run."""

    @property
    def device(self) -> ChildDevice:
        """Where the program runs; the first trial is run to see it."""
        if self._device is None:
            trial = self._run(self._first, budget_bytes=self.target.budget_bytes)
            self._ran[trial.size].unseen_s = trial.elapsed_s
            if self._device is None:  # its first run was out of memory before it had chosen a device
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

    @property
    def samples(self) -> int | None:
        """How many samples the program's batches have at most, where that was met."""
        return self._samples

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
            elapsed_s, known.unseen_s = known.unseen_s, 0.0
            return known.trial.model_copy(update={"soak": request.soak, "elapsed_s": elapsed_s})
        return self.run_paced(request, self._soak_pace, budget_bytes=budget_bytes)[0]

    def run_paced(
        self, request: TrialRequest, pace: RunPace, *, budget_bytes: int | None
    ) -> tuple[Trial, Reports]:
        """One run of the command, as long as `pace` has it, and what its ranks have reported."""
        follow = self._follow_run(request, pace, budget_bytes)
        trial = self._judged(follow)
        whole = trial.fits and not follow.reached
        if follow.reports.device:
            self._see(follow.reports.device, follow.reports.budget_bytes or ram_bytes())
        self._ran[request.size] = _Ran(trial, whole)
        if trial.fits:
            self._note_use(follow.reports.use(request.size))
        return trial, follow.reports

    def _note_use(self, use: SizeUse) -> None:
        self._uses.append(use)
        wrong = wrong_use(self._uses)
        if wrong:
            raise ProgramError(wrong)
        largest = largest_batch(self._uses)
        if largest is not None and use.size > largest:
            self._samples = largest
            raise LargestBatch(largest)

    # --- one run

    def _follow_run(self, request: TrialRequest, pace: RunPace, budget_bytes: int | None) -> _Follow:
        target = self.target
        settings = {
            "steps": request.steps,
            "device": target.device or "",
            "budget_bytes": budget_bytes,
        }
        run = start_run(target.template, request.size, settings)
        follow = _Follow(run, request, pace)
        try:
            self._follow(follow)
            check_seen(run, target.template.words, heard=follow.reports.heard, code=follow.code)
        finally:
            run.end()
        return follow

    def _follow(self, follow: _Follow) -> None:
        """Listen until there is an answer, or the program has ended."""
        run, reports = follow.run, follow.reports
        for event in run.events():
            kind, now = event["kind"], time.monotonic()
            reports.take(event, now)
            if reports.other_nodes:
                return
            if kind == "not_started":
                follow.not_started = event["error"]
                return
            if kind == "ended":
                follow.code = event["code"]
                for late in run.drain():
                    reports.take(late, now)
                return
            if kind == "step" and self.target.on_step is not None:
                self.target.on_step(follow.request.size, event["number"])
            if kind == "reached" and self._is_enough(follow):
                follow.reached = True
                return
            if reports.failure is not None:
                follow.failed_s = follow.failed_s or now
                certain = reports.failure.weight == 3
                if certain or now - follow.failed_s > _OTHERS_S:
                    return
            if self._hangs(follow, now):
                follow.silent = True
                return

    def _hangs(self, follow: _Follow, now_s: float) -> bool:
        """Whether there was no step, or not even a word, for too long."""
        run, last_s = follow.run, follow.reports.last_step_s
        limit_s = self.target.timeout_s or _NO_STEP_S
        silent_s = self.target.timeout_s or (_FIRST_STEP_S if last_s is None else _SILENT_S)
        if now_s - run.silent_since_s >= silent_s:
            follow.waited_s = silent_s
            return True
        follow.waited_s = limit_s
        return now_s - (last_s or run.begun_s) >= limit_s

    def _is_enough(self, follow: _Follow) -> bool:
        """Whether all ranks have taken the steps, and no more of them are wanted."""
        reports, run = follow.reports, follow.run
        peers = reports.waiting()
        if not peers:
            return False
        answer = follow.pace(reports, start_s=(reports.first_pass_s or run.begun_s) - run.begun_s)
        if answer is None:
            return True
        reports.go_on()
        run.answer(peers, **answer)
        return False

    def _soak_pace(self, reports: Reports, *, start_s: float) -> dict[str, Any] | None:
        """On to the steps of a stability check, where they cost little beside another start."""
        more = self.target.soak_steps - reports.steps_run
        cost_s = more * (reports.step_s() or 0.0)
        if more <= 0 or cost_s > _SOAK_SHARE_OF_START * start_s:
            return None
        return {"until": self.target.soak_steps}

    def _judged(self, follow: _Follow) -> Trial:
        """The trial that a run was; raises where it was none."""
        reports, request, run = follow.reports, follow.request, follow.run
        elapsed_s = time.monotonic() - run.begun_s
        self.world_size = max(self.world_size, reports.world_size)
        if reports.first_pass_s is not None:
            self.starts_s.append(reports.first_pass_s - run.begun_s)
        made = partial(reports.trial, request.size, soak=request.soak, elapsed_s=elapsed_s)
        self._check_nodes(reports)
        if follow.not_started is not None:
            raise self.target.template.not_started(follow.not_started[1])
        if follow.reached:
            return made(outcome="fits")
        failure = reports.failure
        if failure is not None and failure.outcome is not None:
            mine = failure.ambiguous and not self._smaller_ran(request.size)
            if not mine:
                return made(outcome=failure.outcome)
        if failure is not None and not (failure.lost and reports.died):
            raise self._own_error(follow)
        if follow.silent:
            return self._hung(follow, made)
        code = follow.code or 0
        if code == 0 and reports.steps_run:
            return made(outcome="fits")
        if code == 0 and not reports.died:
            if self._smaller_ran(request.size):
                text = "the program ended without a step: has it fewer samples than the batch?"
                return made(outcome="too_large", message=text)
            raise self._error("the program ended before its first step", follow)
        return self._died(follow, made)

    def _died(self, follow: _Follow, made: Callable[..., Trial]) -> Trial:
        """A program that ended with a code, or by a signal, and said nothing about it."""
        reports, code = follow.reports, follow.code or 0
        code = 128 - code if code > 128 else code  # as a shell says it: 137 is SIGKILL
        smaller = self._smaller_ran(follow.request.size)
        handled = reports.handled
        if handled is not None and code != -9:
            if handled.outcome is None or (handled.ambiguous and not smaller):
                raise self._error(f"the program raised {handled.text}", follow)
            return made(outcome=handled.outcome, message=handled.text)
        killed = code == -9 or reports.died
        if code == -9 or (smaller and (killed or code < 0)):
            return made(outcome="killed", message=f"the program {ending_text(-9 if killed else code)}")
        if any(line.startswith("EOFError: ") for line in follow.run.tail.lines()):
            raise self._error(_ASKS, follow)
        number = reports.steps_run
        where = f"in step {number + 1}" if number else "before its first step"
        how = "lost a process" if reports.died and code >= 0 else ending_text(code)
        raise self._error(f"the program {how} {where}", follow)

    def _hung(self, follow: _Follow, made: Callable[..., Trial]) -> Trial:
        text = f"within {follow.waited_s:g} s (timeout_s sets how long to wait)"
        if not follow.reports.stepping:
            raise self._error(f"the program took no step {text}", follow)
        return made(outcome="timeout", message=f"the program was stopped: no step {text}")

    def _smaller_ran(self, size: int) -> bool:
        return any(one < size and ran.trial.fits for one, ran in self._ran.items())

    def _own_error(self, follow: _Follow) -> ProgramError:
        failure = follow.reports.failure
        assert failure is not None
        if failure.kind == "EOFError":
            return self._error(_ASKS, follow)
        return self._error(f"the program raised {failure.text}", follow)

    def _error(self, text: str, follow: _Follow) -> ProgramError:
        smaller = sorted(size for size, ran in self._ran.items() if ran.trial.fits)
        ran = f" ({smaller[-1]} ran)" if smaller else ""
        lines = follow.reports.last_lines(follow.run.tail.lines())
        return ProgramError(f"{text}, at batch size {follow.request.size}{ran}", lines=lines)

    def _check_nodes(self, reports: Reports) -> None:
        one = reports.other_nodes
        if one is not None:
            raise ProgramError(
                f"the program has {one.world_size} ranks, {one.local_world_size} of them on this node: a "
                "search runs on one node. Find with one node, and use the size per process on all"
            )
