"""Follows a search for the command line: the step that runs, the trials so far, what an interrupt leaves.

Rules: a watched workload behaves as the one it wraps, state and all; a trial is kept before anything is
drawn, so an interrupt loses none; no exception and no result of a step is held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from batchfit._cli.progress import ProgressDisplay

if TYPE_CHECKING:
    from batchfit._find.pure.search import Search
    from batchfit.results import FitResult, Trial
    from batchfit.workload import Workload

Step = Callable[[int], object]


class SearchWatch:
    """What is known of a search while it runs."""

    def __init__(self, progress: ProgressDisplay) -> None:
        self.trials: list[Trial] = []
        self.budget_bytes = 0
        self.device = ""
        self.started = False  # a step of the user's has begun
        self.caveats_of: Callable[[int], tuple[str, ...]] | None = None  # what a program's trials do not show
        self._progress = progress
        self._begun_s = time.monotonic()
        self._number = 0

    def over(self, workload: Workload) -> Workload:
        """The same workload, watched."""
        return workload._watched(self._watched(workload.step))

    def on_trial(self, trial: Trial, budget_bytes: int) -> None:
        """For `find_batch_size(on_trial=...)`."""
        self.trials.append(trial)
        self.budget_bytes = budget_bytes
        self._number = 0
        # Those of an earlier run, which `--resume` goes on with, are counted too.
        self._progress.trial(len(self.trials), trial, budget_bytes)

    def partial(self, search: Search) -> FitResult | None:
        """The result of `search`, interrupted after the trials so far; None where no size had run.

        Nor where trials of an earlier run were read, and the device is not known yet: the file has them.
        """
        if not self.trials or not self.device:
            return None
        from batchfit._find.driver import observation_of
        from batchfit._find.find import fit_result
        from batchfit.errors import SearchStoppedError

        search = replace(search, budget_bytes=self.budget_bytes)
        for trial in self.trials:
            search = search.tell(observation_of(trial))
        search = search.under(self.budget_bytes)  # what ran while there was more memory does not count
        try:
            return fit_result(
                search,
                self.trials,
                stopped_because="interrupted",
                budget_bytes=self.budget_bytes,
                device=self.device,
                elapsed_s=time.monotonic() - self._begun_s,
                caveats_of=self.caveats_of,
            )
        except SearchStoppedError:
            return None

    def step(self, batch_size: int, number: int) -> None:
        """Step `number` of a trial begins, here or in a child process."""
        self.started = True
        self._number = number
        self._progress.step(batch_size, number)

    def _watched(self, step: Step) -> Step:
        def watched(batch_size: int) -> object:
            self.step(batch_size, self._number + 1)
            return step(batch_size)

        return watched
