"""A search for the largest size that fits, as a value: `ask()` what to try, `tell()` what happened.

Rules:
- A search is its settings and its observations, nothing else: it can be written to a file at any point, held
  by every rank and replayed, and gives the same answers.
- It decides and never runs anything; `run` is the one loop that drives it.
- The answer has been run, is an allowed size, and with `soak` has survived a soak.

On a device that other programs use too:
- The budget only goes down. What others give back is not taken up behind the user's back.
- Less memory than the budget, by more than others come and go with, is a smaller budget: for the rest of the
  search, and for its answer.
- An OOM under a larger budget is one under a smaller budget. What ran counts only if it took no more
  than the smaller one, and a prediction for the larger one not at all.
- A trial that no longer counts was run all the same: limits on trials and sizes count it. Where nothing is
  left of them one more is allowed, since without any there would be no answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from batchfit._config_files import parse_json
from batchfit._find.pure.bracket import Bracket, Observation, Request, State
from batchfit._find.pure.strategies import STRATEGIES
from batchfit.errors import ResultFileError

__all__ = ["STRATEGIES", "Observation", "Request", "Search", "SharedBudget", "run"]

SCHEMA_VERSION = 2
# Below both of these nothing has changed: other programs come and go, and libraries load as they are needed.
SLACK_BYTES = 64 * 2**20
SLACK_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(State):
    """A search in progress; `tell` returns the next one.

    >>> search = Search(strategy="bisect", max_size=64, soak=False)
    >>> while (request := search.ask()) is not None:
    ...     search = search.tell(Observation(size=request.size, fits=request.size <= 41))
    >>> search.best, search.stopped_because, len(search.observations)
    (41, 'bracketed', 6)
    """

    def __post_init__(self) -> None:
        strategy: object = self.strategy
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        for name in ("min_size", "multiple_of", "attempts"):
            _positive(name, getattr(self, name))
        for name in ("budget_bytes", "max_size", "start", "max_trials", "predicted"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("power_of_two", "soak", "costly_trials"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        tolerance: object = self.tolerance
        number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
        if not number or not 0 <= self.tolerance < 1:
            raise ValueError(f"tolerance must be at least 0 and below 1, not {self.tolerance!r}")
        self._check_sizes()

    def _check_sizes(self) -> None:
        if self.max_size is not None and self.max_size < self.min_size:
            raise ValueError(f"max_size must be at least min_size ({self.min_size}), not {self.max_size!r}")
        if self.power_of_two and self.multiple_of & (self.multiple_of - 1):
            raise ValueError(
                f"multiple_of must be a power of two with power_of_two, not {self.multiple_of!r}"
            )
        sizes = self.sizes
        if sizes.count < 1:
            raise ValueError(
                f"max_size must leave an allowed size (the smallest is {sizes.first}), not {self.max_size!r}"
            )
        if self.strategy in ("halve", "grow") and self.start is None and self.max_size is None:
            raise ValueError(f"start must be given for strategy {self.strategy!r} without max_size, not None")
        for one in self.observations:
            if one.size not in sizes:
                raise ValueError(f"observations must hold allowed sizes only, not {one.size!r}")

    def ask(self) -> Request | None:
        """The next trial to run; None when the search is over."""
        step = _decide(self)
        return step if isinstance(step, Request) else None

    def tell(self, observation: Observation) -> Search:
        """The search after one more trial, whether or not `ask` asked for it."""
        if not isinstance(observation, Observation):
            raise TypeError(f"observation must be an Observation, not {observation!r}")
        return replace(self, observations=(*self.observations, observation))

    @property
    def best(self) -> int | None:
        """The largest size that ran; once the search is over, the largest that survived a soak, if any."""
        bracket = Bracket.of(self)
        if bracket.sustained is not None and (bracket.soak_failed or not isinstance(_decide(self), Request)):
            return bracket.sustained
        ran = (
            one.size
            for one in self.observations
            if one.fits and (bracket.bad is None or one.size < bracket.bad)
        )
        return max(ran, default=None)

    @property
    def stopped_because(self) -> str | None:
        """Why the search is over: a key of `results.REASONS`, or "nothing_fits"; None while it goes on."""
        step = _decide(self)
        return None if isinstance(step, Request) else step

    def under(self, budget_bytes: int) -> Search:
        """The search under a budget no larger than its own: with the observations that still hold."""
        kept = tuple(one for one in self.observations if not one.fits or _used_bytes(one) <= budget_bytes)
        forgotten = len(self.observations) - len(kept)
        short = sum(not one.soak for one in self.observations) - sum(not one.soak for one in kept)
        smaller = self.budget_bytes is not None and budget_bytes < self.budget_bytes
        return replace(
            self,
            budget_bytes=budget_bytes,
            observations=kept,
            max_trials=self.max_trials and max(1, self.max_trials - forgotten),
            attempts=max(1, self.attempts - short),  # of which soaks are none
            predicted=None if smaller else self.predicted,
        )

    def to_json(self) -> str:
        """This search as JSON text: settings and history."""
        return json.dumps({"kind": "search", "schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str | bytes) -> Search:
        """The search that `to_json` wrote."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ResultFileError(f"not JSON: {error}") from None
        if not isinstance(data, dict) or data.get("kind") != "search":
            raise ResultFileError("field 'kind' of Search: must be 'search'")
        version = data.get("schema_version")
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ResultFileError(
                f"schema_version is {version!r}, and this batchfit reads {SCHEMA_VERSION}. "
                "Upgrade batchfit to read this file."
            )
        if version < SCHEMA_VERSION:
            raise ResultFileError(
                f"schema_version is {version!r}, of an older batchfit, and this one reads {SCHEMA_VERSION}. "
                "Delete the file, or name another, to begin a new search."
            )
        try:
            observations = tuple(Observation(**_known(Observation, one)) for one in data["observations"])
            return cls(**{**_known(cls, data), "observations": observations})
        except (TypeError, ValueError, AttributeError) as error:
            raise ResultFileError(f"not a search: {error}") from None


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


def run(search: Search, trial: Callable[[Request], Observation | None]) -> Search:
    """`ask`, try, `tell` until the search is over: the one driver of every strategy.

    A trial that answers None was not run: the caller has no more time.
    """
    while (request := search.ask()) is not None:
        observation = trial(request)
        if observation is None:
            break
        search = search.tell(observation)
    return search


@lru_cache(maxsize=256)
def _decide(search: Search) -> Request | str:
    """The next trial, or why there is none; computed once per state, for `ask` and all properties."""
    step = STRATEGIES[search.strategy](search)
    if search.max_trials is None or not isinstance(step, Request):
        return step
    left = search.max_trials - len(search.observations)
    if left <= 0:
        return "max_trials"
    if left == 1 and search.soak:
        # The last trial is for the soak: of what ran, or else of what would have been tried.
        bracket = Bracket.of(search)
        size = step.size if bracket.good == bracket.sustained else bracket.good or step.size
        return Request(size, True)
    return step


def _known(cls: type[Search] | type[Observation], data: dict[str, Any]) -> dict[str, Any]:
    """The fields of `data` that `cls` has: a later version may have written more."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in data.items() if name in names}


def _used_bytes(trial: Observation) -> int:
    """What the trial took of the device; 0 where that was not read."""
    used = trial.allocated_bytes if trial.reserved_bytes is None else trial.reserved_bytes
    return used or 0


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
