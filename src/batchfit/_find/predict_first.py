"""A search on a GPU begins with a prediction, once one small run has confirmed that prediction.

Rules:
- The confirming run is a small trial of the search. Of a step that generates it is a run of a few tokens.
- A search needs no prediction: where none is possible the search goes on as it was.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from batchfit._engine.device import oom
from batchfit._engine.device.gpu import is_capped
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.trace.oracle import MARGINS, WORKSPACE_BYTES, Oracle, allocator_rules, held_beside
from batchfit._engine.trace.workload import glance, rules_for
from batchfit._engine.trial.in_process import InProcess
from batchfit._engine.workload.reachable import reach_of
from batchfit._find.driver import SearchDriver
from batchfit._find.pure.search import Request, Search
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

_PATIENCE_S = 6.0  # a search that measures only takes no longer than a few traces of a huge step
_PATIENCE_GENERATION_S = 15.0  # nor than those of a few tokens, if it has to make all of them
# How far a trace may be above and below a real run, as a share of its peak, and still be believed.
_TOO_MUCH = 0.05
_TOO_LITTLE = 0.25
_SHORTENED_TOKENS = 4  # enough to see whether a prediction of generation is right


@dataclass(frozen=True, slots=True)
class Foresight:
    """A prediction for a search on the GPU, which a run of a small size corrects."""

    oracle: Oracle
    budget_bytes: int
    margin: float
    unsure_bytes: int  # that may be held for good besides what the oracle knows of
    name: str = "prediction"  # what the log calls it

    @classmethod
    def of(cls, work: Workload, *, budget_bytes: int, name: str = "prediction") -> Foresight | None:
        """None where the step cannot be traced: then the search measures only.

        Traced as if there were no GPU: whatever a program does with a fake tensor, its real device is safe.
        A search needs no prediction, so nothing that goes wrong here ends it: what is wrong with the step
        itself comes out of the first trial.
        """
        reach = reach_of(work)
        here = rules_for(work, reach=reach)
        if here.device.type != "cuda":
            return None
        rules = rules_for(work, here.gpu, reach)
        try:
            limit_s = _PATIENCE_GENERATION_S if work.kind == "generation" else _PATIENCE_S
            traced = glance(reach, rules=rules, budget_bytes=budget_bytes, limit_s=limit_s)
            settings = allocator_rules(capped=is_capped(device_to_run(work._held), budget_bytes))
        except UntraceableError as error:
            log.info("no %s: %s", name, str(error))
            return None
        except Exception as error:  # noqa: BLE001
            log.warning("no %s, measuring: %s: %s", name, type(error).__name__, str(error))
            return None
        if traced.footprint is None:
            log.info("no %s: memory is no straight line in the batch size", name)
            return None
        beside, unsure = held_beside(reach.parts, rules.gpu)
        oracle = Oracle(traced, settings, (float(beside), 0.0))
        return cls(oracle, budget_bytes, MARGINS["calibrated"], unsure, name)

    def largest(self, most: int | None = None) -> int | None:
        """The largest size, the margin taken off; None where not even one sample fits."""
        found = self.oracle.largest(round(self.budget_bytes * (1 - self.margin)), most)
        return None if found is None else found.size

    def size_to_confirm(self) -> int | None:
        """A small size above the last knee, to compare the prediction with; None where none is small."""
        footprint = self.oracle.traced.footprint
        if footprint is None:
            return None
        end = footprint.upper_bound(self.budget_bytes, self.oracle.residual)
        if end < 8:
            return None
        knee = max(line.size for line in footprint.peak_lines(end))
        return min(max(int(knee) + 1, end // 8), end // 3)

    def corrected(self, size: int, peak_bytes: int) -> Foresight | None:
        """The same with what a real run of `size` needed beyond the trace: little is fixed, more per sample.

        None where the two are too far apart: the step is not what was traced, or no line in the size.
        """
        gap = peak_bytes - self.oracle.peak(size)
        if not -_TOO_MUCH * peak_bytes <= gap <= _TOO_LITTLE * peak_bytes:
            log.info("no %s: the trace says %+.0f %% at %d", self.name, -100 * gap / peak_bytes, size)
            return None
        fixed, slope = self.oracle.residual
        # A workspace that was not seen, as a rule, or held beside the step: no part of each sample.
        small = gap < WORKSPACE_BYTES + self.unsure_bytes
        residual = (fixed + gap, slope) if small else (fixed, slope + gap / size)
        return replace(self, oracle=replace(self.oracle, residual=residual))

    def as_corrected(self, other: Foresight) -> Foresight:
        """The same with what a real run of another workload, a part of this one, needed beyond its trace."""
        return replace(self, oracle=replace(self.oracle, residual=other.oracle.residual))


def with_prediction(driver: SearchDriver, runs: InProcess) -> Search:
    """The search with a predicted size, after a small run that confirms the prediction."""
    search = driver.search
    if search.ask() is None:
        return search
    # A confirming trial must leave two others: the last one is the soak, which would be of the small size.
    few = search.max_trials is not None and search.max_trials - len(search.observations) < 3
    shortened = runs.work._brief(_SHORTENED_TOKENS)
    if few and shortened is None:
        return search
    sight = Foresight.of(runs.work, budget_bytes=search.budget_bytes or 0)
    if sight is None:
        return search
    size = sight.size_to_confirm()
    if (
        size is not None
        and size in search.sizes
        and all(one.fits or size < one.size for one in search.observations)
    ):
        corrected = None
        if shortened is not None and driver.may_begin():
            corrected = _confirmed_by_tokens(sight, runs, shortened, size)
        if corrected is None:
            learned = None if few else driver.attempt(Request(size, False))
            if learned is None:
                return search
            search = search.tell(learned)
            if not learned.fits or learned.allocated_bytes is None:
                return search
            corrected = sight.corrected(size, learned.allocated_bytes)
            if corrected is None:
                return search
        sight = corrected
    found = sight.largest(search.max_size)
    return search if found is None or found < search.sizes.first else replace(search, predicted=found)


def _confirmed_by_tokens(
    sight: Foresight, runs: InProcess, shortened: Workload, size: int
) -> Foresight | None:
    """A prediction of generation, corrected by a real run of a few tokens; None where that run says nothing.

    A small trial would make every token, and the first call of `generate` at a size is slow, however small:
    on an H200 it was a third of the search. What is wrong with a step comes out of a trial, not of this run,
    unless the error leaves no device to run a trial on.
    """
    short = Foresight.of(shortened, budget_bytes=sight.budget_bytes, name="prediction of a few tokens")
    if short is None:
        return None
    try:
        trial = runs.run_shortened(shortened, size)
    except Exception as error:
        if oom.classify(error) == "fatal":
            raise
        log.info("no run of %d tokens: %s: %s", _SHORTENED_TOKENS, type(error).__name__, str(error))
        return None
    corrected = (
        short.corrected(size, trial.peak_bytes) if trial.fits and trial.peak_bytes is not None else None
    )
    if corrected is None:
        return None
    log.info(
        "batch size %d: %d tokens were made, and needed about what was predicted", size, _SHORTENED_TOKENS
    )
    return sight.as_corrected(corrected)
