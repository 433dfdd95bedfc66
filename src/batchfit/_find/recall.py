"""How one search uses the store: what was found before, one trial that confirms it, what is kept.

Rules:
- A stored size is an answer only after one trial here and now: the soak, in the same budget. The trial must
  also match the stored one; where it needs less, something has changed that the key does not show, and
  the search goes on.
- A stored size is not even tried where it cannot be the answer: what it used exceeds the budget, or the
  budget has grown by more than half the tolerance.
- Only what a search ended by itself is kept, never what a limit or an interrupt left.
- A search that is resumed goes on: a stored size does not cut it short unless it has been tried in it.
- Rank 0 alone reads and writes; the key is made of every rank's part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.store.key import NoKeyError, NoSampleError, digest_of
from batchfit._find.pure.search import Observation, Request, Search
from batchfit.results import FitResult

if TYPE_CHECKING:
    from batchfit._engine.store.sqlite import Store, StoredAnswer

log = logging.getLogger("batchfit")

KEY_VERSION: Final = 2  # to be raised where a key means something else than it did
# Ends that would come again: another run with more time or trials could not do better.
_OWN_ENDS: Final = frozenset(
    {"within_tolerance", "bracketed", "predicted", "max_size", "near_max_size", "attempts", "strategy"}
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A size from the store, with what there is to compare."""

    size: int
    peak_bytes: int | None
    used_bytes: int | None
    budget_bytes: int
    age_s: float

    @classmethod
    def of(cls, answer: StoredAnswer) -> Known:
        fit = answer.fit
        runs = [trial for trial in fit.trials if trial.size == fit.batch_size and trial.fits]
        used = [trial.reserved_bytes or trial.peak_bytes for trial in runs]
        return cls(
            size=fit.batch_size,
            peak_bytes=fit.peak_bytes,
            used_bytes=max((count for count in used if count is not None), default=None),
            budget_bytes=fit.budget_bytes,
            age_s=answer.age_s,
        )

    def may_answer(self, search: Search) -> bool:
        """The size is worth a trial: it can run in the budget of now, and no larger one is likely to."""
        budget = search.budget_bytes or 0
        needed = self.budget_bytes if self.used_bytes is None else self.used_bytes
        most = self.budget_bytes * (1 + _tolerance(search) / 2)
        return self.size in search.sizes and needed <= budget <= most

    def matches(self, trial: Observation, search: Search) -> bool:
        """A trial of the size takes no less memory than it did."""
        if self.peak_bytes is None or trial.allocated_bytes is None:
            return True
        return trial.allocated_bytes >= (1 - _tolerance(search)) * self.peak_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """The store in one search: `known` is the same on all ranks, `keep` writes on one."""

    key: str
    known: Known | None
    fresh: bool
    store: Store | None  # on rank 0, where there is SQLite

    def keep(self, fit: FitResult) -> None:
        """Store the answer of a search that has ended; one from the store is there already, and was used."""
        if self.store is None:
            return
        if fit.from_store:
            self.store.mark_used(self.key)
        # Where nothing was run now, nothing says what is true now.
        elif fit.stopped_because in _OWN_ENDS and fit.trials_resumed < len(fit.trials):
            # What is known was tried and is no longer true.
            self.store.put(self.key, fit, alone=self.fresh or self.known is not None)


def recall(
    make_digest: Callable[[], str],
    search: Search,
    ranks: Ranks,
    *,
    fresh: bool,
    steps: int,
    soak_steps: int | None,
    predict: bool = True,
) -> Recall | None:
    """What the store says about this search, on all ranks; None without a key.

    `make_digest` makes this rank's part of the key.
    """
    mine: str | None = None
    why = ""
    try:
        mine = make_digest()
    except NoSampleError:
        pass
    except NoKeyError as error:
        why = str(error)
    except Exception as error:  # noqa: BLE001  objects of the user's are read, and may raise anything
        why = f"reading it raised {type(error).__name__}: {error}"
    parts = ranks.gather([mine, why], doing="the key of the store")
    digests = [digest for digest, _ in parts]
    if None in digests:
        reasons = [reason for _, reason in parts if reason]
        if reasons and ranks.is_main:
            log.warning("the answer is not stored: %s. Pass key= to name this workload", reasons[0])
        return None
    key = key_of_search(digests, search, steps=steps, soak_steps=soak_steps, predict=predict)
    store = _opened() if ranks.is_main else None
    best: Known | None = None
    if store is not None and not fresh:
        usable = [known for one in store.get(key) if (known := Known.of(one)).may_answer(search)]
        budget = search.budget_bytes or 0
        best = min(usable, key=lambda known: abs(known.budget_bytes - budget), default=None)
    held = ranks.gather(None if best is None else asdict(best), doing="what the store holds")[0]
    return Recall(key=key, known=None if held is None else Known(**held), fresh=fresh, store=store)


def key_of_search(
    digests: list[str | None], search: Search, *, steps: int, soak_steps: int | None, predict: bool = True
) -> str:
    """The key of a search in the store, from every rank's part."""
    return digest_of([KEY_VERSION, digests, _settings(search, predict), steps, soak_steps])


def stored_size(key: str, search: Search) -> int | None:
    """The size that was found last for this key, and that this search may try; None without one."""
    store = _opened()
    sizes = [] if store is None else [one.fit.batch_size for one in store.get(key)]
    return next((size for size in sizes if size in search.sizes), None)


def _opened() -> Store | None:
    try:
        from batchfit._engine.store.sqlite import Store
    except ImportError as error:  # a Python that was built without SQLite
        log.warning("found sizes are not stored: %s", error)
        return None
    return Store()


def confirm(
    search: Search, known: Known, attempt: Callable[[Request], Observation | None]
) -> tuple[Search, bool]:
    """One trial of the known size, observed by the search; whether that size is the answer.

    A resumed search has run that trial before, or was begun without one: none is run now.
    """
    if search.ask() is None and len(search.observations) != 1:
        return search, False
    if search.observations:
        before = [one for one in search.observations if one.size == search.best and one.soak == search.soak]
        return search, search.best == known.size and any(
            one.fits and known.matches(one, search) for one in before
        )
    trial = attempt(Request(known.size, search.soak))
    if trial is None:
        return search, False
    search = search.tell(trial)
    if trial.fits:
        return search, known.matches(trial, search)
    if search.strategy == "guided" and search.start is None:
        search = replace(search, start=known.size)  # it ran once: the answer is not far below
    return search, False


def _tolerance(search: Search) -> float:
    """How far from the largest size an answer may be: only one strategy stops early."""
    return search.tolerance if search.strategy == "guided" else 0.0


def _settings(search: Search, predict: bool) -> dict[str, Any]:
    """The settings that change the answer. Limits do not: what they cut short is not kept."""
    names = ["strategy", "min_size", "max_size", "multiple_of", "power_of_two", "tolerance", "soak"]
    if search.strategy in ("halve", "grow"):
        names += ["start", "attempts"]
    settings = {name: getattr(search, name) for name in names}
    if search.strategy == "guided":
        settings["predict"] = predict  # who measures alone wants no end that a prediction has set
    return settings
