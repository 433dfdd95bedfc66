"""Which trial a run of the program was, or what is wrong with the program.

Rules:
- Too big is: an OOM on any rank, caught or not; a process that was killed; a run that hangs after its first
  step. Every other failure is the program's own, with its last lines.
- What is ambiguous (an error of a library, a kill of one process, a run without a step) counts as too big
  only where a smaller size ran.
- Where a smaller size ran and this one took no step, an error such as a loop without an iteration leaves
  (a loss that was never set, a mean over nothing) says that the program has too few samples.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from batchfit._engine.trial.in_children import ending_text
from batchfit._program.followed_run import FollowedRun
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.rank_reports import ProgramFailure
from batchfit.errors import ProgramError
from batchfit.results import Outcome, Trial

_ASKS = "the program asks for input, and a probe has none"
_FEW_SAMPLES = "has it fewer samples than the batch?"
_OF_NO_BATCH = frozenset(
    {"UnboundLocalError", "NameError", "ZeroDivisionError", "IndexError", "ValueError", "AssertionError"}
)


def trial_of(followed: FollowedRun, template: CommandTemplate, *, ran: Sequence[int]) -> Trial:
    """The trial that a run was, or a `ProgramError`; `ran` are the sizes that fitted before."""
    return _Verdict(followed, ran).trial(template)


class _Verdict:
    def __init__(self, followed: FollowedRun, ran: Sequence[int]) -> None:
        self._followed, self._ran = followed, ran
        self._reports, self._size = followed.reports, followed.request.size
        self._smaller_ran = any(one < self._size for one in ran)
        self._elapsed_s = time.monotonic() - followed.run.begun_s

    def trial(self, template: CommandTemplate) -> Trial:
        followed, reports = self._followed, self._reports
        self._check_nodes()
        if followed.not_started is not None:
            raise template.not_started(followed.not_started)
        if followed.reached:
            return self._made("fits")
        failure = reports.failure
        if failure is not None and failure.outcome is not None and (failure.is_certain or self._smaller_ran):
            return self._made(failure.outcome)
        if failure is not None and self._has_no_batch(failure):
            return self._made("too_large", f"{failure.text}: {_FEW_SAMPLES}")
        if failure is not None and not (failure.lost and reports.died):
            raise self._error(_ASKS if failure.kind == "EOFError" else f"the program raised {failure.text}")
        if followed.hung:
            return self._hung()
        if not followed.code and reports.steps_run:
            return self._made("fits")
        if followed.code or reports.died:
            return self._died(followed.code or 0)
        if self._smaller_ran:
            return self._made("too_large", f"the program ended without a step: {_FEW_SAMPLES}")
        if reports.passes:
            raise self._error(
                f"the program ended without a step of its optimizer, after {reports.passes} forward passes"
            )
        raise self._error("the program ended before its first step")

    def _has_no_batch(self, failure: ProgramFailure) -> bool:
        return self._smaller_ran and not self._reports.steps_run and failure.kind in _OF_NO_BATCH

    def _died(self, code: int) -> Trial:
        """A program that ended with a code, or by a signal, and said nothing about it."""
        reports = self._reports
        code = 128 - code if code > 128 else code  # as a shell says it: 137 is SIGKILL
        handled = reports.handled
        if handled is not None and self._has_no_batch(handled):
            return self._made("too_large", f"{handled.text}: {_FEW_SAMPLES}")
        if handled is not None and code != -9:
            if handled.outcome is None or (handled.ambiguous and not self._smaller_ran):
                raise self._error(f"the program raised {handled.text}")
            return self._made(handled.outcome, handled.text)
        killed = code == -9 or reports.died
        if code == -9 or (self._smaller_ran and (killed or code < 0)):
            return self._made("killed", f"the program {ending_text(-9 if killed else code)}")
        if any(line.startswith("EOFError: ") for line in self._followed.run.tail.lines()):
            raise self._error(_ASKS)
        number = reports.steps_run
        where = f"in step {number + 1}" if number else "before its first step"
        how = "lost a process" if reports.died and code >= 0 else ending_text(code)
        raise self._error(f"the program {how} {where}")

    def _hung(self) -> Trial:
        text = f"within {self._followed.waited_s:g} s (timeout_s sets how long to wait)"
        if not self._reports.stepping:
            raise self._error(f"the program took no step {text}")
        return self._made("timeout", f"the program was stopped: no step {text}")

    def _made(self, outcome: Outcome, message: str = "") -> Trial:
        return self._reports.trial(
            self._size,
            soak=self._followed.request.soak,
            elapsed_s=self._elapsed_s,
            outcome=outcome,
            message=message,
        )

    def _error(self, text: str) -> ProgramError:
        ran = f" ({max(self._ran)} ran)" if self._ran else ""
        return ProgramError(f"{text}, at batch size {self._size}{ran}", lines=self._lines())

    def _lines(self) -> list[str]:
        return self._reports.last_lines(self._followed.run.tail.lines())

    def _check_nodes(self) -> None:
        one = self._reports.other_nodes
        if one is not None:
            raise ProgramError(
                f"the program has {one.world_size} ranks, {one.local_world_size} of them on this node: a "
                "search runs on one node. Find with one node, and use the size per process on all",
                lines=self._lines(),
            )
