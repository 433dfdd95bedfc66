"""The trials of a search: run on all ranks, told to it and kept, while other programs use the device too.

Rules:
- Each trial is told to the search, kept and shown once it has ended, in this order.
- Before each trial, and after one that ran out, all ranks look at what is reachable. They decide on the least
  that any of them sees, so that all decide the same.
- A file that cannot be kept any more (a full disk) is a warning: the search, and its answer, go on.
- Less than the budget is the budget from then on. A trial that ran out while memory was gone for a moment
  does not count and is run once more; one that ran out because memory is gone counts under what is left.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self, final

from batchfit._engine.device.batch_norm_error import needs_two_samples
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial.interface import RunTrial, TrialRequest, TrialRunner
from batchfit._engine.trial.pure.soak import LEAST, SOAK_STEPS
from batchfit._find.outcome import observation_of, worst
from batchfit._find.pure.search import Observation, Request, Search
from batchfit._find.pure.shared_device import SharedBudget, under
from batchfit._units import format_bytes
from batchfit.results import Trial

log = logging.getLogger("batchfit")

OnTrial = Callable[[Trial, int], object]
Keep = Callable[[Search, list[Trial], float], None]

# For memory that another program had for a moment only to come back, after a trial that ran out meanwhile.
_PATIENCE_S = 1.0
_PAUSE_S = 0.05


@final
class SearchDriver:
    """The trials of one search, in this process or in children, on one rank or several.

    `search` forgets what no longer holds when memory goes; `keep` is given all that it was told.
    """

    def __init__(
        self,
        search: Search,
        trials: list[Trial],
        runs: TrialRunner,
        ranks: Ranks,
        *,
        steps: int,
        soak_steps: int | None,
        time_limit_s: float | None,
        on_trial: OnTrial | None,
        keep: Keep | None,
        begun: float,
    ) -> None:
        budget_bytes = search.budget_bytes or 0
        self.search = under(search, budget_bytes)
        self.room = SharedBudget(budget_bytes, budget_bytes)
        self.trials, self.runs, self.ranks, self.begun = trials, runs, ranks, begun
        self._observations, self._start, self._attempts = search.observations, search.start, search.attempts
        self._min_size = search.min_size
        self._steps, self._time_limit_s = steps, time_limit_s
        self._steps_of_a_soak = max(SOAK_STEPS, steps) if soak_steps is None else soak_steps
        # Ranks take the same number of steps, and each of them has an allocator of its own.
        self._may_settle = soak_steps is None and ranks.world_size == 1 and steps <= LEAST
        # A step that generates goes through hundreds of lengths, and all is gone after it: a trial is one. A
        # second call finds memory in other pieces than the first: a soak has a few.
        self._few = None if soak_steps is not None else (1, steps)
        self._on_trial, self._keep = on_trial, keep
        self._stack = contextlib.ExitStack()
        self._keep_as_it_is(0.0)  # a file that cannot be written is an error before any trial

    def __enter__(self) -> Self:
        self._limit()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def to_the_end(self) -> None:
        """Ask, try and tell until the search is over, or the time is."""
        while self.search.ask() is not None and self.may_begin():
            ask = self.search.ask()  # again: with less memory it may be another, or none
            if ask is not None:
                self._try(ask)

    def attempt(self, ask: Request) -> Observation | None:
        """One trial, whether or not the search has asked for it; None where there is no time for it."""
        return self._try(ask) if self.may_begin() else None

    def _try(self, ask: Request) -> Observation | None:
        """One trial, told to the search; None where no step of one sample can run, so that it begins at 2."""
        try:
            trial = self._tried(ask)
        except Exception as error:
            # On all ranks, which run the same step: nobody waits for another.
            if ask.size > 1 or not needs_two_samples(error) or self.search.max_size == 1:
                raise
        else:
            return self._tell(trial)
        self.search = replace(self.search, min_size=2)
        if self.ranks.is_main:
            log.info("batch normalization cannot train on one sample: sizes from 2 up are tried")
        return None

    def tell_of_growth(self) -> None:
        """Say that there is more memory now than the search could use."""
        reachable = self.runs.reachable_after_bytes()
        elsewhere = self.runs.device.name.partition(":")[0] != "cpu"  # RAM comes and goes all the time
        if self.ranks.is_main and elsewhere and self.room.has_grown(reachable):
            log.info(
                "%s are free on %s now, and %s were when the search began: its answer is for that",
                *(format_bytes(reachable), self.runs.device.name, format_bytes(self.room.begun_bytes)),
            )

    def may_begin(self) -> bool:
        """Whether there is time for another trial; what is reachable is looked at on the way."""
        elapsed_s = time.perf_counter() - self.begun
        late = self._time_limit_s is not None and elapsed_s >= self._time_limit_s
        mine = 0 if late else self.runs.reachable_bytes(self.room.least_bytes)
        seen = self.ranks.gather([late, mine], doing="the time and the memory that are left")
        if any(is_late for is_late, _ in seen):
            return False
        self._make_do_with(min(reachable for _, reachable in seen))
        if self.room.is_exceeded(mine) and getattr(self.runs.device, "can_limit", True):
            self._limit()  # the budget was all that was free, so nothing was limited; now more is free
        return True

    def _tried(self, ask: Request) -> Trial:
        """One trial; again, if it ran out while another program had some of the memory for a moment."""
        trial, reachable = self._run(ask)
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
                    "batch size %d ran out while another program had memory of %s; it is free again, so the "
                    "size is tried once more",
                    *(ask.size, self.runs.device.name),
                )
            trial, reachable = self._run(ask)
        if not trial.fits:
            self._make_do_with(reachable)
        return trial

    def _run(self, ask: Request) -> tuple[Trial, int]:
        """One trial on all ranks, and the least that any of them can reach after it."""
        request = TrialRequest(
            ask.size,
            steps=self._steps_of_a_soak if ask.soak else self._steps,
            soak=ask.soak,
            may_settle=ask.soak and self._may_settle,
            generation_steps=None if self._few is None else self._few[ask.soak],
            is_smallest=ask.size == self.search.sizes.first,
        )
        mine = self._run_one(request)
        answers = self.ranks.gather(
            [None if mine is None else mine.model_dump(), self.runs.reachable_after_bytes()],
            doing=f"the trial of batch size {ask.size}",
        )
        # A rank whose trial was cut off has no answer: another one has failed, and that one tells.
        trial = worst([Trial.model_validate(answer) for answer, _ in answers if answer is not None])
        if not trial.fits:
            self.runs.regroup()
        return trial, min(reachable for _, reachable in answers)

    def _tell(self, trial: Trial) -> Observation:
        learned = observation_of(trial)
        self.trials.append(trial)
        self._observations = (*self._observations, learned)
        self.search = self.search.tell(learned)
        try:
            self._keep_as_it_is(time.perf_counter() - self.begun)
        except OSError as error:
            log.warning("the search could not be kept after batch size %d: %s", trial.size, error)
        if self.ranks.is_main:
            log.info("batch size %d: %s", trial.size, trial.verdict)
            if self._on_trial is not None:
                self._on_trial(trial, self.room.budget_bytes)
        return learned

    def _make_do_with(self, reachable_bytes: int) -> None:
        """Search on within what is reachable, if that is less than the budget."""
        if not self.room.lacks(reachable_bytes):
            return
        before, self.room = self.room.budget_bytes, self.room.after(reachable_bytes)
        self.search = under(self.search, self.room.budget_bytes)
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
        self._run_one: RunTrial = self._stack.enter_context(self.runs.trying(self.room.budget_bytes))

    def _keep_as_it_is(self, elapsed_s: float) -> None:
        if self._keep is not None and self.ranks.is_main:
            # As it was asked for, with all that it was told: this is what a later run compares.
            whole = replace(
                self.search,
                observations=self._observations,
                start=self._start,
                attempts=self._attempts,
                min_size=self._min_size,
            )
            self._keep(whole, self.trials, elapsed_s)
