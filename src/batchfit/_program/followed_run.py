"""One run of the command, followed until it has shown enough, has failed, or has ended.

Rules: nothing is judged here, `run_verdict.py` does. An OOM is certain at once; after any other failure the
other ranks and the launcher have a moment to say more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from batchfit._engine.trial.trial import TrialRequest
from batchfit._program.command_run import CommandRun
from batchfit._program.rank_reports import Reports

_SILENT_S = 600.0  # without a word after its first step: then it hangs
_FIRST_STEP_S = 3600.0  # without a word before: models are loaded, and data is prepared
_NO_STEP_S = 4 * 3600.0  # whatever it prints
_OTHERS_S = 10.0  # for what the other ranks and the launcher say, after one rank has failed


class RunPace(Protocol):
    """Says how a run goes on once all ranks have taken the steps that were asked for."""

    def __call__(self, reports: Reports, *, start_s: float) -> dict[str, Any] | None:
        """What to answer the ranks that wait (`until` which step); None where the run has shown enough."""


@final
@dataclass(slots=True)
class FollowedRun:
    """What is known of a run so far.

    `reached`: it took all steps that were wanted. `code`: it has ended by itself, so. `hung`: no step came
    within `waited_s`. `is_cut_off`: the time of the search is over. `not_started`: the system refused the
    command, and why.
    """

    run: CommandRun
    request: TrialRequest
    pace: RunPace
    reports: Reports = field(default_factory=Reports)
    reached: bool = False
    code: int | None = None
    hung: bool = False
    waited_s: float = 0.0
    is_cut_off: bool = False
    not_started: str | None = None
    _failed_s: float | None = None

    def follow(
        self,
        *,
        timeout_s: float | None,
        deadline_s: float | None = None,
        on_step: Callable[[int, int], object] | None = None,
    ) -> None:
        """Listen until there is an answer, or the program has ended; `on_step` gets size and number."""
        for event in self.run.events():
            kind, now = event["kind"], time.monotonic()
            self.reports.take(event, now)
            if kind == "step" and on_step is not None:
                on_step(self.request.size, event["number"])
            if kind == "not_started":
                self.not_started = event["error"][1]
            elif kind == "ended":
                self._take_the_rest(event["code"], now)
            elif kind == "reached":
                self.reached = self._has_shown_enough()
            self.hung = self._is_late(timeout_s, now)
            if self._is_over(now):
                return
            if deadline_s is not None and now >= deadline_s:
                self.is_cut_off = True
                return

    def _is_over(self, now_s: float) -> bool:
        if self.reached or self.hung or self.code is not None or self.not_started is not None:
            return True
        reports = self.reports
        if reports.failure is not None and self._failed_s is None:
            self._failed_s = now_s
        waited = self._failed_s is not None and now_s - self._failed_s > _OTHERS_S
        certain = reports.failure is not None and reports.failure.is_certain
        return certain or waited or reports.other_nodes is not None

    def _take_the_rest(self, code: int, now_s: float) -> None:
        self.code = code
        for late in self.run.drain():
            self.reports.take(late, now_s)

    def _is_late(self, timeout_s: float | None, now_s: float) -> bool:
        """Whether there was no step, or not even a word, for too long."""
        run, last_s = self.run, self.reports.last_step_s
        silent_s = timeout_s or (_FIRST_STEP_S if last_s is None else _SILENT_S)
        no_step_s = timeout_s or _NO_STEP_S
        is_silent = now_s - run.silent_since_s >= silent_s
        self.waited_s = silent_s if is_silent else no_step_s
        return is_silent or now_s - (last_s or run.begun_s) >= no_step_s

    def _has_shown_enough(self) -> bool:
        """Whether all ranks have taken the steps, and no more of them are wanted."""
        reports, run = self.reports, self.run
        peers = reports.waiting()
        if not peers:
            return False
        answer = self.pace(reports, start_s=(reports.first_pass_s or run.begun_s) - run.begun_s)
        if answer is None:
            return True
        reports.go_on()
        run.answer(peers, **answer)
        return False
