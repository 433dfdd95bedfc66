"""A search for the largest size that fits, as a value: `ask()` what to try, `tell()` what happened.

Rules:
- A search is its settings and its observations, nothing else: it can be written to a file at any point, held
  by every rank and replayed, and gives the same answers.
- It decides and never runs anything; `run` is the one loop that drives it.
- The answer has been run, is an allowed size, and with `soak` has survived a soak.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from typing import Any

from batchfit._documents import parse_json
from batchfit._find.pure.bracket import Bracket, Observation, Request, State
from batchfit._find.pure.strategies import STRATEGIES
from batchfit.errors import ResultFileError

__all__ = ["STRATEGIES", "Observation", "Request", "Search", "run"]

SCHEMA_VERSION = 2


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
        for name in ("power_of_two", "soak"):
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


def run(search: Search, trial: Callable[[Request], Observation | None]) -> Search:
    """Ask, try, tell until the search is over: the one driver of every strategy.

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


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
