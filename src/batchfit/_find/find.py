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
from collections.abc import Callable
from dataclasses import replace

from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.resolve import Device, DeviceSpec
from batchfit._engine.distributed.lost_ranks import telling_others
from batchfit._engine.distributed.ranks import Ranks
from batchfit._find.driver import SearchDriver
from batchfit._find.outcome import fit_result
from batchfit._find.predict_first import with_prediction
from batchfit._find.pure.options import FindOptions, OnTrial
from batchfit._find.recall import Known, confirm
from batchfit._find.session import FindSession, FindTarget
from batchfit.results import FitResult
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
        workload: what one step is; a plain `step(batch_size)` is accepted, with its state undeclared.
            With `isolate`: a module-level function that returns the workload, or its name as
            "file.py:function" or "package.module:function".
        budget: bytes the program may use ("24GiB"); default: all that is free on a GPU. On a CPU this is
            virtual memory, and the default a quarter of the free RAM, at most 4 GiB, beside what the model
            and the optimizer hold.
        max_size, min_size, multiple_of, power_of_two: the sizes allowed.
        strategy: "guided" (default), "bisect", "halve", "grow" or "powers".
        tolerance: "guided" stops when about this share could still be gained; 0 is exact.
        start: the first size to try, an estimate; needed by "halve" and "grow" unless `max_size` is given.
        attempts: how many sizes "grow" may try.
        steps: steps in a trial, at least 2: the first step understates, since optimizers allocate in it.
        soak_steps: steps in the soak that the answer has to survive; 0 for none. Default: 25, or ten and more
            of them until the allocator of a GPU repeats itself, after which nothing new can happen; all of
            them where the state is not declared. Where a step generates, `steps` are enough, and one for a
            trial.
        max_trials, time_limit_s: end the search early with what it has.
        predict: "guided" on a GPU begins with what a prediction says, where the step can be traced; not with
            `isolate`.
        device: where the workload runs ("cuda:1", 1, "GPU-8932f937"); default: where its state is.
        isolate: run each trial in a child process, so that one that is killed, hangs or poisons the device
            counts as too big and the search goes on.
        timeout_s: with `isolate`, stop a child whose step (or whose loading) takes longer; default: never.
        resume: a file in which the search is kept after each trial, and from which a later call with the
            same settings goes on.
        store: use answers found before, each confirmed by one trial, and keep this one; not with `isolate`.
        fresh: search even if there is a stored answer, and replace it.
        key: a name for this workload in the store, for a step that says nothing about itself; turns
            `store` on.
        on_trial: called with each trial and the budget in bytes, as soon as the trial ends.

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
    with (
        Interrupts(is_open=True),  # a second Ctrl-C waits until the first has been cleaned up after
        telling_others(ranks) as everyone,
        contextlib.ExitStack() as stack,
    ):
        session = FindSession.open(workload, make_options(), ranks, everyone, stack, begun_s=begun_s)
        recalled = session.recall()
        driver = SearchDriver(session)
        confirmed = _search(driver, recalled.known)
        fit = _result(driver, recalled.known if confirmed else None)
        driver.report_growth()
        return recalled.keep(fit)


def _search(driver: SearchDriver, known: Known | None) -> bool:
    """Run the search to its end, first what is stored or predicted; whether a stored size was confirmed."""
    with driver:
        search, confirmed = confirm(driver.search, known, driver.attempt)
        driver.search = replace(driver.search, start=search.start)
        if confirmed:
            return True
        # A resumed search keeps its prediction. A trace issues no collectives, for which ranks would wait.
        if driver.session.options.predicts and not driver.resumed and driver.ranks.world_size == 1:
            predicted = with_prediction(driver)
            if predicted.budget_bytes == driver.search.budget_bytes:
                driver.search = replace(driver.search, predicted=predicted.predicted)
        driver.run_to_end()
    return False


def _result(driver: SearchDriver, confirmed: Known | None) -> FitResult:
    """One result, the same on all ranks; `confirmed` is a stored size that has run again."""
    search, trials, room, runs, ranks = driver.search, driver.trials, driver.room, driver.runs, driver.ranks
    mine = [time.perf_counter() - driver.begun_s, runs.device.name, runs.samples]
    ends = ranks.gather(mine, doing="the end of the search")
    elapsed_s, device = max(seconds for seconds, _, _ in ends), ends[0][1]
    samples = min((count for _, _, count in ends if count is not None), default=None)
    ranks.settle()
    if driver.resumed == len(trials) > 0 and ranks.is_main:
        log.info("the search to resume had ended before: nothing was run")
    if search.stopped_because == "largest" and confirmed is None and ranks.is_main:
        log.warning(
            "memory on %s does not grow with the batch size: is it where the step runs?", runs.device.name
        )
    stopped = search.stopped_because or "time_limit"
    fit = fit_result(
        search,
        trials,
        stopped_because=stopped if confirmed is None else "stored",
        budget_bytes=room.budget_bytes,
        device=device,
        elapsed_s=driver.session.earlier_s + elapsed_s,
        trials_resumed=driver.resumed,
        shrunk_from_bytes=room.begun_bytes if room.gone_bytes else None,
        state_bytes=runs.state_bytes if search.best is None else None,
    ).model_copy(update={"samples": samples})
    if confirmed is None:
        return fit
    return fit.model_copy(update={"from_store": True, "stored_age_s": confirmed.age_s})
