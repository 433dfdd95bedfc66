"""The trials of a search: run on all ranks, reported and saved, while other programs use the device too.

Rules:
- The search observes each trial that has ended; then the trial is saved, then shown.
- Before each trial, and after a trial that was out of memory, all ranks check what is reachable. They decide
  by the least that any rank can reach, so that all decide the same.
- A file that can no longer be saved (a full disk) is a warning: the search, and its answer, go on.
- Less than the budget is the budget from then on. A trial that was out of memory while another program held
  memory for a moment does not count and is run once more. Where that memory stays gone, the trial counts
  under what is left.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import replace
from typing import Any, Self, final

from batchfit._engine.device.oom import needs_two_samples
from batchfit._engine.trial.pure.soak import LEAST, SOAK_STEPS
from batchfit._engine.trial.trial import LargestBatch, RunTrial, TimeIsOver, TrialRequest
from batchfit._find.pure.search import Observation, Request, SharedBudget
from batchfit._find.session import FindSession
from batchfit._units import format_bytes
from batchfit.results import Trial

log = logging.getLogger("batchfit")

# How long to wait, after a trial that was out of memory, for memory that another program held for a moment.
_PATIENCE_S = 1.0
_PAUSE_S = 0.05


@final
class SearchDriver:
    """The trials of one search, in this process or in children, on one rank or several.

    `search` drops observations that no longer hold when memory goes; the resume file has all of them.
    """

    def __init__(self, session: FindSession) -> None:
        options, search = session.options, session.search
        budget_bytes = search.budget_bytes or 0
        self.session, self.runs, self.ranks = session, session.runs, session.ranks
        self.begun_s, self.trials, self.resumed = session.begun_s, session.trials, len(session.trials)
        self.search = search.under(budget_bytes)
        self.room = SharedBudget(budget_bytes, budget_bytes)
        self._asked, self._observations = search, search.observations
        steps, soak_steps = options.steps, options.soak_steps
        self._soak_steps = max(SOAK_STEPS, steps) if soak_steps is None else soak_steps
        # Ranks take the same number of steps, and each of them has an allocator of its own.
        self._may_settle = soak_steps is None and self.ranks.world_size == 1 and steps <= LEAST
        # A step that generates goes through hundreds of lengths and then releases everything: a trial is one
        # step. A second call meets the fragmentation of the first, so that a soak has a few.
        self._generation_steps = None if soak_steps is not None else (1, steps)
        self._time_is_over = False  # a trial was ended by it
        self._stack = contextlib.ExitStack()
        self._save(0.0)  # a file that cannot be written is an error before any trial

    def __enter__(self) -> Self:
        self._limit()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def run_to_end(self) -> None:
        """Run what the search asks for until it is over, or the time is."""
        while self.search.ask() is not None and self.may_begin():
            request = self.search.ask()  # a second time: with less memory it may be another request, or none
            if request is not None:
                self._try(request)

    def attempt(self, request: Request) -> Observation | None:
        """One trial, whether or not the search has asked for it; None where there is no time for it."""
        return self._try(request) if self.may_begin() else None

    def may_begin(self) -> bool:
        """Whether there is time for another trial; reachable memory is checked on the way."""
        limit_s = self.session.options.time_limit_s
        late = (limit_s is not None and time.perf_counter() - self.begun_s >= limit_s) or self._time_is_over
        mine = 0 if late else self.runs.reachable_bytes(self.room.least_bytes)
        seen = self.ranks.gather([late, mine], doing="the time and the memory that are left")
        if any(is_late for is_late, _ in seen):
            return False
        self._shrink_to(min(reachable for _, reachable in seen))
        if self.room.is_exceeded(mine) and getattr(self.runs.device, "can_limit", True):
            self._limit()  # the budget was all that was free, so nothing was limited; now more is free
        return True

    def report_growth(self) -> None:
        """Log that there is more memory now than the search could use, unless the user has set the budget."""
        asked_bytes = self.session.options.budget_bytes
        if asked_bytes is not None and self.room.begun_bytes >= asked_bytes:
            return
        reachable = self.runs.reachable_after_bytes()
        on_cpu = self.runs.device.name.partition(":")[0] == "cpu"  # free RAM changes all the time
        if self.ranks.is_main and not on_cpu and self.room.has_grown(reachable):
            log.info(
                "%s are free on %s now, and %s were when the search began: its answer is for that",
                *(format_bytes(reachable), self.runs.device.name, format_bytes(self.room.begun_bytes)),
            )

    def _try(self, request: Request) -> Observation | None:
        """One trial, observed; None where it was none: the search goes on within other bounds, or is over."""
        try:
            trial = self._run_unless_disturbed(request)
        except LargestBatch as end:
            self.search = replace(self.search, max_size=max(end.size, self.search.sizes.first))
            return None
        except TimeIsOver:
            self._time_is_over = True
            return None
        except Exception as error:
            # On all ranks, which run the same step: nobody waits for another.
            if request.size > 1 or not needs_two_samples(error) or self.search.max_size == 1:
                raise
        else:
            return self._observe(trial)
        self.search = replace(self.search, min_size=2)
        if self.ranks.is_main:
            log.info("batch normalization cannot train on one sample: sizes from 2 up are tried")
        return None

    def _run_unless_disturbed(self, request: Request) -> Trial:
        """One trial; a second time, if it was out of memory that another program held for a moment."""
        trial, reachable = self._run(request)
        if trial.fits or not self.room.lacks(reachable):
            return trial
        deadline = time.monotonic() + _PATIENCE_S
        least = self.room.least_bytes
        while (mine := self.runs.reachable_bytes(least)) < least and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        reachable = min(self.ranks.gather(mine, doing="the memory that came back"))
        if not self.room.lacks(reachable):
            if self.ranks.is_main:
                log.warning(
                    "batch size %d was out of memory while another program held memory of %s; that is free "
                    "again, so the size is tried once more",
                    *(request.size, self.runs.device.name),
                )
            trial, reachable = self._run(request)
        if not trial.fits:
            self._shrink_to(reachable)
        return trial

    def _run(self, request: Request) -> tuple[Trial, int]:
        """One trial on all ranks, and the least that any of them can reach after it."""
        size, soak, generation_steps = request.size, request.soak, self._generation_steps
        mine = self._run_trial(
            TrialRequest(
                size,
                steps=self._soak_steps if soak else self.session.options.steps,
                soak=soak,
                may_settle=soak and self._may_settle,
                generation_steps=None if generation_steps is None else generation_steps[soak],
                is_smallest=size == self.search.sizes.first,
            )
        )
        answers = self.ranks.gather(
            [None if mine is None else mine.model_dump(), self.runs.reachable_after_bytes()],
            doing=f"the trial of batch size {size}",
        )
        # A rank whose trial was cut off has no answer: another rank's trial has failed, and has one.
        trial = worst([Trial.model_validate(answer) for answer, _ in answers if answer is not None])
        if not trial.fits:
            self.runs.regroup()
        return trial, min(reachable for _, reachable in answers)

    def _observe(self, trial: Trial) -> Observation:
        observation = observation_of(trial)
        self.trials.append(trial)
        self._observations = (*self._observations, observation)
        self.search = self.search.tell(observation)
        try:
            self._save(time.perf_counter() - self.begun_s)
        except OSError as error:
            log.warning("the search could not be kept after batch size %d: %s", trial.size, error)
        if self.ranks.is_main:
            log.info("batch size %d: %s", trial.size, trial.verdict)
            if (on_trial := self.session.options.on_trial) is not None:
                on_trial(trial, self.room.budget_bytes)
        return observation

    def _shrink_to(self, reachable_bytes: int) -> None:
        """Search on within what is reachable, if that is less than the budget."""
        if not self.room.lacks(reachable_bytes):
            return
        before, self.room = self.room.budget_bytes, self.room.after(reachable_bytes)
        self.search = self.search.under(self.room.budget_bytes)
        if self.ranks.is_main:
            log.warning(
                "%s of %s went to other programs during the search (or to libraries that this one has "
                "loaded); searching on within %s, and the answer is for that",
                *(format_bytes(before - self.room.budget_bytes), self.runs.device.name),
                format_bytes(self.room.budget_bytes),
            )
        self._limit()

    def _limit(self) -> None:
        """Hold trials to the budget as it is now."""
        self._stack.close()
        self._run_trial: RunTrial = self._stack.enter_context(self.runs.trying(self.room.budget_bytes))

    def _save(self, elapsed_s: float) -> None:
        if self.session.file is None or not self.ranks.is_main:
            return
        asked = self._asked
        # As it was asked for, with every observation: this is what a later run compares.
        whole = replace(
            self.search,
            observations=self._observations,
            start=asked.start,
            attempts=asked.attempts,
            min_size=asked.min_size,
            max_size=asked.max_size,
        )
        self.session.file.save(whole, self.trials, elapsed_s)


def observation_of(trial: Trial) -> Observation:
    """What a trial teaches the search. A soak that still retries allocations is not sustained."""
    return Observation(
        size=trial.size,
        fits=trial.fits and trial.settled_retries == 0,
        soak=trial.soak,
        allocated_bytes=trial.peak_bytes,
        reserved_bytes=trial.reserved_bytes,
        split_bytes=trial.split_bytes,
        largest_bytes=trial.largest_bytes,
        held_bytes=trial.held_bytes,
        retries=trial.alloc_retries,
    )


def worst(trials: list[Trial]) -> Trial:
    """One trial that stands for all ranks': failed if any failed, with the highest readings."""

    def highest(name: str) -> Any:
        values = [getattr(trial, name) for trial in trials]
        return max((value for value in values if value is not None), default=None)

    base = min(trials, key=lambda trial: (trial.fits, trial.steps_run))
    held = [trial.held_bytes for trial in trials if trial.held_bytes is not None]
    readings = (
        "peak_bytes",
        "reserved_bytes",
        "split_bytes",
        "largest_bytes",
        "alloc_retries",
        "settled_retries",
        "step_s",
        "elapsed_s",
    )
    update: dict[str, Any] = {name: highest(name) for name in readings}
    return base.model_copy(update={**update, "held_bytes": min(held, default=None)})
