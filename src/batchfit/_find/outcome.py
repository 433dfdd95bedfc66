"""From trials to what a search learns, and to the result that the user gets.

Rules: one rank's failure is everyone's; a soak that still retries allocations is not sustained; a result
names a size that ran, and where none did an error says why.
"""

from __future__ import annotations

from typing import Any

import torch

import batchfit
from batchfit._find.pure.search import Observation, Search
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.results import FitResult, Trial


def fit_result(
    search: Search,
    trials: list[Trial],
    *,
    stopped_because: str,
    budget_bytes: int,
    device: str,
    elapsed_s: float,
    trials_resumed: int = 0,
    shrunk_from_bytes: int | None = None,
    state_bytes: int | None = None,
) -> FitResult:
    """The result of a search that has ended, for whatever reason; raises where no size ran."""
    if search.best is None:
        if stopped_because in ("max_trials", "time_limit", "attempts", "interrupted"):
            tried = ", ".join(str(trial.size) for trial in trials) or "none"
            raise SearchStoppedError(
                f"no size had run when the search stopped ({stopped_because}; sizes tried: {tried}). "
                "Allow more trials or time, or start lower."
            )
        last = trials[-1]
        raise NothingFitsError(
            last.size,
            device=device,
            budget_bytes=budget_bytes,
            peak_bytes=last.reserved_bytes if last.reserved_bytes is not None else last.peak_bytes,
            state_bytes=state_bytes,
            phase=last.phase,
            detail=_why(trials),
        )
    at_best = [trial for trial in trials if trial.size == search.best and trial.fits]
    peaks = [trial.peak_bytes for trial in at_best if trial.peak_bytes is not None]
    return FitResult(
        batch_size=search.best,
        trials=tuple(trials),
        survived_steps=max(trial.steps_run for trial in at_best),
        stopped_because=stopped_because,
        budget_bytes=budget_bytes,
        peak_bytes=max(peaks) if peaks else None,
        device=device,
        strategy=search.strategy,
        elapsed_s=elapsed_s,
        trials_resumed=trials_resumed,
        shrunk_from_bytes=shrunk_from_bytes,
        batchfit_version=batchfit.__version__,
        torch_version=torch.__version__,
    )


def _why(trials: list[Trial]) -> str:
    """Why the smallest size did not run; said of all sizes where none of them gave an answer at all."""
    outcomes = {trial.outcome for trial in trials}
    if outcomes <= {"killed", "timeout"} and len(trials) > 1:
        how = (
            "killed"
            if outcomes == {"killed"}
            else "stopped"
            if outcomes == {"timeout"}
            else "killed or stopped"
        )
        return f"every size that was tried was {how}; the last: {trials[-1].message}"
    return trials[-1].message


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
