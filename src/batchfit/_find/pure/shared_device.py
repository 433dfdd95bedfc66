"""The budget of a search on a device that other programs use too.

Rules:
- The budget only goes down. What others give back is not taken up behind the user's back.
- Less memory than the budget, by more than others come and go with, is a smaller budget: for the rest of the
  search, and for its answer.
- An OOM under a larger budget is one under a smaller budget. What ran counts only if it took no more
  than the smaller one, and a prediction for the larger one not at all.
- A trial that no longer counts was run all the same: limits on trials and sizes count it. Where nothing is
  left of them one more is allowed, since without any there would be no answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchfit._find.pure.search import Observation, Search

# Below both of these nothing has changed: other programs come and go, and libraries load as they are needed.
SLACK_BYTES = 64 * 2**20
SLACK_SHARE = 0.03


@dataclass(frozen=True, slots=True)
class SharedBudget:
    """What a search may use now, and what it might when it began.

    >>> MiB = 2**20
    >>> room = SharedBudget(1000 * MiB, 1000 * MiB).after(700 * MiB)
    >>> room.budget_bytes // MiB, room.gone_bytes // MiB
    (700, 300)
    >>> room.after(1000 * MiB) == room
    True
    """

    budget_bytes: int
    begun_bytes: int

    @property
    def gone_bytes(self) -> int:
        """What others have taken since the search began."""
        return self.begun_bytes - self.budget_bytes

    @property
    def least_bytes(self) -> int:
        """With so much reachable nothing is lacking."""
        return max(0, self.budget_bytes - self._slack())

    def lacks(self, reachable_bytes: int) -> bool:
        """So little is reachable that a trial may have an OOM for a reason other than its size."""
        return reachable_bytes < self.least_bytes

    def is_exceeded(self, reachable_bytes: int) -> bool:
        """So much is reachable that a trial may use more than the budget."""
        return reachable_bytes - self.budget_bytes > self._slack()

    def has_grown(self, reachable_bytes: int) -> bool:
        """More is reachable than when the search began."""
        return reachable_bytes - self.begun_bytes > self._slack()

    def after(self, reachable_bytes: int) -> SharedBudget:
        """The room once that much is seen to be reachable."""
        if not self.lacks(reachable_bytes):
            return self
        return replace(self, budget_bytes=max(1, reachable_bytes))

    def _slack(self) -> int:
        return max(SLACK_BYTES, int(self.budget_bytes * SLACK_SHARE))


def under(search: Search, budget_bytes: int) -> Search:
    """The search under a budget no larger than its own: with the observations that still hold."""
    kept = tuple(one for one in search.observations if not one.fits or _used_bytes(one) <= budget_bytes)
    forgotten = len(search.observations) - len(kept)
    short = sum(not one.soak for one in search.observations) - sum(not one.soak for one in kept)
    smaller = search.budget_bytes is not None and budget_bytes < search.budget_bytes
    return replace(
        search,
        budget_bytes=budget_bytes,
        observations=kept,
        max_trials=search.max_trials and max(1, search.max_trials - forgotten),
        attempts=max(1, search.attempts - short),  # of which soaks are none
        predicted=None if smaller else search.predicted,
    )


def _used_bytes(trial: Observation) -> int:
    """What the trial took of the device; 0 where that was not read."""
    if trial.reserved_bytes is not None:
        return trial.reserved_bytes
    return trial.allocated_bytes or 0
