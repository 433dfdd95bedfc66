"""A search on a GPU begins with a prediction, once one small run has confirmed that prediction.

Rules:
- Only a step whose state is declared, on torch's own CUDA allocator, is predicted.
- The confirming run is a small trial of the search. Of a step that generates it is a run of a few tokens.
- A search needs no prediction: where none is possible the search goes on as it was.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from batchfit._engine.device import oom
from batchfit._engine.device.resolve import Device
from batchfit._engine.trial.in_process import InProcess
from batchfit._find.driver import SearchDriver
from batchfit._find.foresight import Foresight
from batchfit._find.pure.search import Request, Search
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

_SHORTENED_TOKENS = 4  # enough to see whether a prediction of generation is right


def is_traceable(work: Workload, device: Device) -> bool:
    """Whether a trace predicts the memory of this device: CUDA with torch's own allocator, state declared."""
    own = getattr(device, "is_torchs_own", True)  # the only allocator that can be replayed
    return device.name.startswith("cuda") and own and work.declared


def with_prediction(driver: SearchDriver) -> Search:
    """The search with a predicted size, after a small run that confirms the prediction."""
    search, runs = driver.search, driver.runs
    if search.ask() is None or not (isinstance(runs, InProcess) and is_traceable(runs.work, runs.device)):
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
