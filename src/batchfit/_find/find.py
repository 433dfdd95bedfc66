"""`find_batch_size`: the largest size of one forward/backward in one process that really runs.

Rules:
- Options are checked before any device work (`_find.pure.options`).
- The search decides (`_find.pure.search`), the trial measures (`_engine.trial.trial`); this file only drives.
- The answer has been run; the last trial is the soak, and a soak that fails counts as too big.
- Under `torch.distributed` all ranks try the same size, and one rank's failure is everyone's.
- Where a trial runs (here, or in a child process with `isolate`) makes no difference to the search.
- Other programs use the device too: what they take while the search runs is noticed (`_find.driver`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

import batchfit
from batchfit._engine.device.device import Device
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.resolve import DeviceSpec
from batchfit._engine.distributed.ranks import Ranks, telling_others
from batchfit._find.driver import SearchDriver
from batchfit._find.nothing_fits import why_nothing_fits
from batchfit._find.predict_first import with_prediction
from batchfit._find.pure.options import FindOptions, OnTrial
from batchfit._find.pure.search import Search
from batchfit._find.recall import Known, confirm
from batchfit._find.session import FindSession, FindTarget, OwnTrials
from batchfit.errors import NothingFitsError, SearchStoppedError
from batchfit.results import FitResult, Trial
from batchfit.workload import Workload

log = logging.getLogger("batchfit")


def find_batch_size(
    workload: Workload | Callable[[int], object] | Callable[[], object] | str,
    *,
    budget: int | str | None = None,
    max_size: int | None = None,
    min_size: int = 1,
    strategy: str = "guided",
    multiple_of: int = 1,
    power_of_two: bool = False,
    tolerance: float = 0.02,
    start: int | None = None,
    attempts: int = 5,
    steps: int = 3,
    soak_steps: int | None = None,
    max_trials: int | None = None,
    time_limit_s: float | None = None,
    predict: bool = True,
    device: DeviceSpec | Device | None = None,
    isolate: bool = False,
    timeout_s: float | None = None,
    resume: str | os.PathLike[str] | None = None,
    store: bool = False,
    fresh: bool = False,
    key: str | None = None,
    on_trial: OnTrial | None = None,
) -> FitResult:
    """Find the largest batch size that runs, and keeps running.

    ```python
    fit = batchfit.find_batch_size(batchfit.training(model, optimizer, loss_fn, make_batch))
    loader = DataLoader(dataset, batch_size=fit.batch_size)
    ```

    Args:
        workload: what one step is; a plain `step(batch_size)` is accepted, with its state undeclared. With
            `isolate`: a module-level function that returns the workload, or its name as "file.py:function" or
            "package.module:function".
        budget: bytes the program may use ("24GiB"); default: all that is free on a GPU. On a CPU this is
            virtual memory, and the default a quarter of the free RAM, at most 4 GiB, beside what the model
            and the optimizer hold.
        max_size: the largest size allowed; default: no limit.
        min_size: the smallest size allowed.
        strategy: "guided" (default), "bisect", "halve", "grow" or "powers".
        multiple_of: only multiples of this are allowed.
        power_of_two: only powers of two are allowed.
        tolerance: "guided" stops when about this share could still be gained; 0 is exact.
        start: the first size to try, an estimate; needed by "halve" and "grow" unless `max_size` is given.
        attempts: how many sizes "grow" may try.
        steps: steps in a trial, at least 2: the first step understates, since optimizers allocate in it.
        soak_steps: steps of the stability check (soak) at the end; 0 for none. Default: 25, or ten and more
            of them until the allocator of a GPU repeats itself, after which nothing new can happen; all of
            them where the state is not declared. Where a step generates, `steps` are enough, and one for a
            trial.
        max_trials: end the search after that many trials, with what it has.
        time_limit_s: end the search after that many seconds, with what it has.
        predict: "guided" on a GPU begins with what a prediction says, where the step can be traced; not with
            `isolate`.
        device: where the workload runs ("cuda:1", 1, "GPU-8932f937"); default: where its state is.
        isolate: run each trial in a child process, so that one that is killed, hangs or poisons the device
            counts as too big and the search goes on.
        timeout_s: with `isolate`, stop a child whose step (or whose loading) takes longer; default: never.
        resume: a file in which the search is kept after each trial, and from which a later call with the same
            settings goes on.
        store: use answers found before, each confirmed by one trial, and keep this one; not with `isolate`.
        fresh: search even if there is a stored answer, and replace it.
        key: a name for this workload in the store, for a step that says nothing about itself; turns `store`
            on.
        on_trial: called with each trial and the budget in bytes, as soon as the trial ends.

    Returns:
        A `FitResult`: `batch_size` is that of one forward/backward in one process (per GPU).

    Raises:
        NothingFitsError: not even the smallest size allowed fits.
        SearchStoppedError: a limit ended the search before any size ran.
        ChildDiedError: a child process ended for a reason that is not the size.
        SettingsDifferError: the file to resume from holds a search with other settings.
    """
    keywords = {**locals()}  # every argument, by its name
    return find_with(keywords.pop("workload"), lambda: FindOptions(**keywords))


def find_with(workload: FindTarget, make_options: Callable[[], FindOptions]) -> FitResult:
    """Find the largest batch size. An error of `make_options` on one rank ends the search on all ranks."""
    begun_s, ranks = time.perf_counter(), Ranks.current()
    # A second Ctrl-C waits until the first has been cleaned up after. Trials that are runs of a command have
    # safe points of their own: then not even the first comes in between.
    with (
        Interrupts(is_open=not isinstance(workload, OwnTrials)),
        telling_others(ranks) as everyone,
        contextlib.ExitStack() as stack,
    ):
        session = FindSession.open(workload, make_options(), ranks, everyone, stack, begun_s=begun_s)
        recalled = session.recall()
        known = None if recalled is None else recalled.known
        driver = SearchDriver(session)
        confirmed = _search(driver, known)
        fit = _result(driver, known if confirmed else None)
        driver.report_growth()
        if recalled is not None:
            recalled.keep(fit)
        return fit


def _search(driver: SearchDriver, known: Known | None) -> bool:
    """Run the search to its end, first what is stored or predicted; whether a stored size was confirmed."""
    with driver:
        if known is not None:
            search, confirmed = confirm(driver.search, known, driver.attempt)
            driver.search = replace(driver.search, start=search.start)
            if confirmed:
                return True
        runs = None if driver.resumed else driver.session.predictable  # a resumed search keeps its prediction
        if runs is not None:
            predicted = with_prediction(driver, runs)
            if predicted.budget_bytes == driver.search.budget_bytes:
                driver.search = replace(driver.search, predicted=predicted.predicted)
        driver.run_to_end()
    return False


def _result(driver: SearchDriver, confirmed: Known | None) -> FitResult:
    """One result, the same on all ranks; `confirmed` is a stored size that has run again."""
    search, trials, room, runs, ranks = driver.search, driver.trials, driver.room, driver.runs, driver.ranks
    work = driver.session.work
    made_of = "" if search.best is None else runs.made_of(search.best)
    mine = [time.perf_counter() - driver.begun_s, runs.device.name, runs.samples, made_of]
    ends = ranks.gather(mine, doing="the end of the search")
    elapsed_s, device, made_of = max(one[0] for one in ends), ends[0][1], ends[0][3]
    samples = min((one[2] for one in ends if one[2] is not None), default=None)
    ranks.settle()
    if driver.resumed == len(trials) > 0 and ranks.is_main:
        log.info("the search to resume had ended before: nothing was run")
    if search.stopped_because == "largest" and confirmed is None and ranks.is_main:
        log.warning(
            "memory on %s does not grow with the batch size: is it where the step runs?", runs.device.name
        )
    stopped = search.stopped_because or "time_limit"
    return fit_result(
        search,
        trials,
        stopped_because=stopped if confirmed is None else "stored",
        budget_bytes=room.budget_bytes,
        device=device,
        elapsed_s=driver.session.earlier_s + elapsed_s,
        trials_resumed=driver.resumed,
        shrunk_from_bytes=room.begun_bytes if room.gone_bytes else None,
        state_bytes=runs.state_bytes if search.best is None else None,
        why=partial(why_nothing_fits, runs, budget_bytes=room.budget_bytes),
        samples=samples,
        made_of=made_of,
        unit="tokens" if work is not None and work._by_tokens else "samples",
        stored_age_s=None if confirmed is None else confirmed.age_s,
        caveats_of=None if driver.session.own is None else driver.session.own.caveats,
    )


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
    why: Callable[[Trial], Mapping[str, Any]] | None = None,
    samples: int | None = None,
    made_of: str = "",
    unit: Literal["samples", "tokens"] = "samples",
    stored_age_s: float | None = None,
    caveats_of: Callable[[int], tuple[str, ...]] | None = None,
) -> FitResult:
    """The result of a search that has ended, for whatever reason; raises where no size ran.

    `why` is then asked who held the memory. `caveats_of`: what the trials at a size did not show.
    """
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
            **({} if why is None else why(last)),
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
        samples=samples,
        made_of=made_of,
        unit=unit,
        from_store=stored_age_s is not None,
        stored_age_s=stored_age_s,
        unseen=() if caveats_of is None else caveats_of(search.best),
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
