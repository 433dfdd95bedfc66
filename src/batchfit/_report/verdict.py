"""The answer of each result in a sentence, and the figures below it.

Rules: what to do comes first (a recommended size), then what was found, then what was only predicted; a
prediction is set against the search that followed it where both were about the same memory. Nothing is
claimed that the results do not say.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchfit._charts.throughput_page import format_rate, format_seconds
from batchfit._report.files import NothingFits, SchedulePlan
from batchfit._report.markup import Fact
from batchfit._report.oom import oom_facts
from batchfit._report.plan import plan_clause, plan_facts
from batchfit._report.sweep import sweep_clause, sweep_facts
from batchfit._units import format_bytes
from batchfit.results import (
    FitResult,
    MemoryCheck,
    MemoryExplanation,
    OomExplanation,
    Plan,
    Prediction,
    Result,
    SweepResult,
    ThroughputProfile,
)

_SAME_BUDGET = 0.02
_HEADLINES = 3  # more are not read


def verdict(results: Sequence[Result]) -> list[str]:
    """A headline for each of them, the most important first."""
    fits = [one for one in results if isinstance(one, FitResult)]
    clauses = [_recommended(one) for one in results if isinstance(one, ThroughputProfile)]
    clauses += [one.summary for one in results if isinstance(one, OomExplanation)]
    clauses += [plan_clause(one) for one in results if isinstance(one, Plan)]
    clauses += [sweep_clause(one) for one in results if isinstance(one, SweepResult)]
    compared: set[int] = set()
    for fit in fits:
        match = next((p for p in results if isinstance(p, Prediction) and _same_memory(p, fit)), None)
        if match is not None:
            compared.add(id(match))
        clauses.append(_found(fit, match))
    alone = [one for one in results if isinstance(one, Prediction) and id(one) not in compared]
    clauses += [_predicted(alone[0])] if len(alone) == 1 else []
    clauses += [_predicted_each(alone)] if len(alone) > 1 else []
    clauses += [_nothing(one) for one in results if isinstance(one, NothingFits)]
    clauses += [one.summary for one in results if isinstance(one, MemoryExplanation)]
    clauses += [one.summary for one in results if isinstance(one, MemoryCheck)]
    clauses += [_planned(one) for one in results if isinstance(one, SchedulePlan)]
    left = len(clauses) - _HEADLINES
    found = clauses[:_HEADLINES] + ([f"and {left} more below"] if left > 0 else [])
    return [f"{text[:1].upper()}{text[1:]}." for text in found]


def facts_of(results: Sequence[Result]) -> list[Fact]:
    """The figures that people look for: of the first result of each kind, and of a few predictions."""
    found: list[Fact] = []
    seen: set[type[Result]] = set()
    few = sum(isinstance(one, Prediction) for one in results) <= 4
    # A recommendation first, as in the sentence.
    for one in sorted(results, key=lambda one: not isinstance(one, ThroughputProfile)):
        if type(one) in seen and not (few and isinstance(one, Prediction)):
            continue
        seen.add(type(one))
        found += _facts(one)
    return found[:8]


def _facts(one: Result) -> list[Fact]:
    if isinstance(one, FitResult):
        return _facts_of_fit(one)
    if isinstance(one, Prediction):
        return [
            Fact(
                "predicted batch size",
                _count(one.batch_size),
                f"{one.card}, {format_bytes(one.budget_bytes)}",
            )
        ]
    if isinstance(one, ThroughputProfile) and one.points:
        best = next((p for p in one.points if p.size == one.recommended), one.best)
        share = (
            f"{best.samples_per_s / one.best.samples_per_s:.0%} of the best" if one.best.samples_per_s else ""
        )
        return [
            Fact("recommended batch size", f"{one.recommended:,}", f"largest measured: {one.largest:,}"),
            Fact("throughput there", f"{format_rate(best.samples_per_s)}/s", share),
            Fact("time per step", format_seconds(best.step_s), "" if best.steady else "not steady"),
        ]
    if isinstance(one, MemoryExplanation):
        return [
            Fact(f"peak at size {one.batch_size:,}", format_bytes(one.peak_bytes), f"in {one.peak_phase}"),
            *([Fact("largest batch as it is", f"{one.largest:,}")] if one.largest is not None else []),
        ]
    if isinstance(one, MemoryCheck):
        return [
            Fact(f"peak at size {one.batch_size:,}", format_bytes(one.peak_bytes), f"in {one.peak_phase}"),
            Fact("check", "passed" if one.passed else "failed", one.name),
        ]
    if isinstance(one, OomExplanation):
        return oom_facts(one)
    if isinstance(one, Plan):
        return plan_facts(one)
    if isinstance(one, SweepResult):
        return sweep_facts(one)
    if isinstance(one, SchedulePlan):
        against = f"a constant {one.initial_batch_size:,} makes {one.updates_at_constant_size:,}"
        sizes = [phase.batch_size for phase in one.phases] or [one.initial_batch_size]
        return [
            Fact("updates", f"{one.updates:,}", against),
            Fact("batch sizes", f"{min(sizes):,} to {max(sizes):,}", f"{len(sizes)} phases"),
        ]
    return []


def _facts_of_fit(one: FitResult) -> list[Fact]:
    lost = sum(not trial.fits for trial in one.trials)
    ran_out = "none failed" if not lost else f"{lost} failed"
    found = [
        Fact("batch size found", f"{one.batch_size:,}", one.lasted),
        Fact("trials", str(len(one.trials)), f"{ran_out}, {one.elapsed_s:.1f} s in all"),
    ]
    if one.peak_bytes is not None:
        share = f"{one.peak_bytes / one.budget_bytes:.1%} of " if one.budget_bytes > 0 else "of "
        found.append(
            Fact("peak memory", format_bytes(one.peak_bytes), share + format_bytes(one.budget_bytes))
        )
    return found


def _recommended(one: ThroughputProfile) -> str:
    text = one.reason.rstrip(".")
    text = f"{text} (low confidence: {one.doubt})" if one.doubt else text
    return f"batch size {text}" if text[:1].isdigit() else text


def _found(fit: FitResult, prediction: Prediction | None) -> str:
    held = f"it {fit.lasted}"
    if fit.peak_bytes is not None:
        held = (
            f"it peaks at {format_bytes(fit.peak_bytes)} of {format_bytes(fit.budget_bytes)} and {held[3:]}"
        )
    against = f" ({prediction.batch_size:,} was predicted)" if prediction is not None else ""
    largest = " is the largest that lasts" if fit.sustained else " fits"
    return f"batch size {fit.batch_size:,}{largest} on {fit.device}{against}: {held}"


def _predicted(one: Prediction) -> str:
    what = f"batch size {one.batch_size:,} is" if one.batch_size else "not even a batch of 1 is"
    return f"{what} predicted to fit in {format_bytes(one.budget_bytes)} on {one.card}"


def _predicted_each(several: Sequence[Prediction]) -> str:
    sizes = [f"{_count(one.batch_size)} on {one.card} ({format_bytes(one.budget_bytes)})" for one in several]
    return f"predicted to fit are {', '.join(sizes[:-1])} and {sizes[-1]}"


def _count(size: int) -> str:
    return f"{size:,}" if size else "none"


def _nothing(one: NothingFits) -> str:
    return f"not even a batch of 1 is predicted to fit in {format_bytes(one.budget_bytes)} on {one.card}"


def _planned(one: SchedulePlan) -> str:
    change = f"{abs(one.updates_saved):.1%} {'fewer' if one.updates_saved >= 0 else 'more'}"
    return (
        f"the schedule makes {one.updates:,} updates in {one.epochs:,} epochs, {change} than a constant "
        f"{one.initial_batch_size:,}"
    )


def _same_memory(one: Prediction, fit: FitResult) -> bool:
    """Whether a prediction was about what was then run: a CPU's virtual memory holds no CUDA workspaces."""
    near = abs(one.budget_bytes - fit.budget_bytes) <= _SAME_BUDGET * fit.budget_bytes
    return near and fit.device.startswith("cuda")
