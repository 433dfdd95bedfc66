"""`find_batch_size`: the largest size of one forward/backward in one process that really runs.

Rules:
- Arguments are checked before any device work.
- The search decides (`_find.pure.search`), the trial measures (`_engine.trial.trial`); this file only drives.
- The answer has been run; the last trial is the soak, and a soak that fails counts as too big.
- Under `torch.distributed` all ranks try the same size, and one rank's failure is everyone's.
- Where a trial runs (here, or in a child process with `isolate`) makes no difference to the search.
- Other programs use the device too: what they take while the search runs is noticed (`_find.driver`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from batchfit._arguments import MOST_STEPS, check_callback, check_whole, checked_file
from batchfit._engine.device import oom
from batchfit._engine.device.budget import usable_bytes
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.resolve import Device, DeviceSpec
from batchfit._engine.distributed.lost_ranks import telling_others
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.store.key import rank_digest
from batchfit._engine.trial.in_children import Factory, InChildren
from batchfit._engine.trial.in_process import InProcess
from batchfit._engine.trial.interface import TrialRunner
from batchfit._engine.workload.placement import device_to_run, ram_held_bytes
from batchfit._files import locked
from batchfit._find.driver import OnTrial, SearchDriver
from batchfit._find.foresight import Foresight
from batchfit._find.outcome import fit_result as fit_result
from batchfit._find.pure.search import Request, Search
from batchfit._find.pure.shared_device import SharedBudget
from batchfit._find.recall import Known, Recall, check_store, confirm, recall
from batchfit._find.resume import ResumeFile
from batchfit._units import format_bytes, parse_bytes
from batchfit.results import FitResult, Trial
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")

_GLIMPSE = 4  # tokens that tell whether a prediction of generation is right


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
    begun = time.perf_counter()
    ranks = Ranks.current()
    with (
        Interrupts(is_open=True),  # a second Ctrl-C waits until the first has been cleaned up after
        telling_others(ranks) as everyone,
        contextlib.ExitStack() as stack,
    ):
        check_isolation(isolate, timeout_s, resume)
        check_steps(steps, soak_steps, time_limit_s, on_trial)
        work = None if isolate else as_workload(workload)
        factory = Factory.of(workload) if isolate else None
        search = Search(
            strategy=strategy,
            min_size=min_size,
            max_size=max_size,
            multiple_of=multiple_of,
            power_of_two=power_of_two,
            tolerance=tolerance,
            start=start,
            attempts=attempts,
            max_trials=max_trials,
            soak=soak_steps != 0,
        )
        if type(predict) is not bool:
            raise TypeError(f"predict must be True or False, not {predict!r}")
        check_store(store, fresh, key, work, isolate=isolate)
        asked_bytes = None if budget is None else parse_bytes(budget)
        file = None if resume is None else ResumeFile(resume)
        asked = {"budget": asked_bytes, "steps": steps, "soak_steps": soak_steps, "torch": torch.__version__}
        asked["world_size"] = ranks.world_size
        text = ""
        if file is not None and ranks.is_main:
            stack.enter_context(locked(file.path))
            text = file.read(search, asked)
        everyone.meet()
        runs: TrialRunner
        if factory is not None:
            named = str(device) if type(device) is int else device
            runs = stack.enter_context(InChildren(factory, device=named, timeout_s=timeout_s, ranks=ranks))
        elif work is not None:
            runs = InProcess(work, device_to_run(work, device))
        place = runs.device
        settings = [search.to_json(), steps, soak_steps, time_limit_s is not None, resume is not None]
        settings += [predict, store, fresh, key]
        ranks.same(settings, doing="the settings of the search")
        usable = usable_bytes(
            place,
            budget,
            asked_bytes,
            held_bytes=0 if work is None else ram_held_bytes(work),
            says=ranks.is_main,
        )
        budget_bytes = ranks.minimum(usable, doing="the budget")
        search = replace(search, budget_bytes=budget_bytes)
        trials: list[Trial] = []
        if file is not None:
            made = {"device": place.name, "state_elements": runs.state_elements}
            # The file is rank 0's: the other ranks' devices have other names.
            text, made = ranks.gather([text, made], doing="the search to resume")[0]
            search, trials = file.begin(text, search, {**asked, **made})
            search = _with_less(search, budget_bytes, place.name)
        if work is not None and not work.declared and ranks.is_main:
            warnings.warn(
                "the step's state is not declared, so a trial changes the model and optimizer that it uses. "
                "Pass batchfit.Workload(step, state=[model, optimizer]) to have them put back afterwards.",
                stacklevel=2,
            )
        if search.ask() is not None:
            runs.rehearse(ranks, search.sizes.to_rehearse())
        before = Recall()
        if isinstance(runs, InProcess) and (store or key is not None):
            make_digest = partial(
                rank_digest,
                runs.work,
                runs.device,
                name=key,
                sample_size=search.sizes.first,
                asked_bytes=asked_bytes,
            )
            before = recall(
                make_digest, search, ranks, fresh=fresh, steps=steps, soak_steps=soak_steps, predict=predict
            )
        trying = SearchDriver(
            search,
            trials,
            runs,
            ranks,
            steps=steps,
            soak_steps=soak_steps,
            time_limit_s=time_limit_s,
            on_trial=on_trial,
            keep=None if file is None else file.save,
            begun=begun,
        )
        ahead = predict and strategy == "guided" and start is None
        earlier_s = 0.0 if file is None else file.earlier_s
        fit = _search(trying, predict=ahead, known=before.known, earlier_s=earlier_s)
        if asked_bytes is None or trying.room.begun_bytes < asked_bytes:
            trying.tell_of_growth()
        return before.keep(fit)


def _search(trying: SearchDriver, *, predict: bool, known: Known | None, earlier_s: float) -> FitResult:
    """Run the search to its end: what is known and what is predicted first."""
    runs, ranks, before = trying.runs, trying.ranks, len(trying.trials)
    with trying:
        search, confirmed = confirm(trying.search, known, trying.attempt)
        trying.search = replace(trying.search, start=search.start)
        # A resumed search has had its look, and keeps what it predicted. Ranks that talk to each other in a
        # step would wait for what a trace never sends.
        if predict and not confirmed and not before and ranks.world_size == 1:
            seen = _foreseen(trying)
            if seen.budget_bytes == trying.search.budget_bytes:
                trying.search = replace(trying.search, predicted=seen.predicted)
        if not confirmed:
            trying.to_the_end()
    ended, trials, room = trying.search, trying.trials, trying.room
    mine = [time.perf_counter() - trying.begun, runs.device.name, runs.samples]
    ends = ranks.gather(mine, doing="the end of the search")
    # One result, the same on all ranks.
    elapsed_s, device = max(seconds for seconds, _, _ in ends), ends[0][1]
    samples = min((count for _, _, count in ends if count is not None), default=None)
    ranks.settle()
    if before == len(trials) > 0 and ranks.is_main:
        log.info("the search to resume had ended before: nothing was run")
    if ended.stopped_because == "largest" and not confirmed and ranks.is_main:
        log.warning(
            "memory on %s does not grow with the batch size: is it where the step runs?", runs.device.name
        )
    fit = fit_result(
        ended,
        trials,
        stopped_because="stored" if confirmed else ended.stopped_because or "time_limit",
        budget_bytes=room.budget_bytes,
        device=device,
        elapsed_s=earlier_s + elapsed_s,
        trials_resumed=before,
        shrunk_from_bytes=room.begun_bytes if room.gone_bytes else None,
        state_bytes=runs.state_bytes if ended.best is None else None,
    ).model_copy(update={"samples": samples})
    if known is None or not confirmed:
        return fit
    return fit.model_copy(update={"from_store": True, "stored_age_s": known.age_s})


def _traceable(work: Workload, place: Device) -> bool:
    """Whether a trace can say something about this device: real CUDA memory, state known."""
    own = getattr(place, "is_torchs_own", True)  # only torch's own allocator is known well enough to replay
    return place.name.startswith("cuda") and own and work.declared


def _foreseen(trying: SearchDriver) -> Search:
    """The search with what is predicted, after a look whether the prediction is right."""
    search, runs = trying.search, trying.runs
    if search.ask() is None or not (isinstance(runs, InProcess) and _traceable(runs.work, runs.device)):
        return search
    # A look must leave two trials: the last one is the soak of what has run, which would be the look.
    few = search.max_trials is not None and search.max_trials - len(search.observations) < 3
    brief = runs.work._brief(_GLIMPSE)
    if few and brief is None:
        return search
    sight = Foresight.of(runs.work, budget_bytes=search.budget_bytes or 0)
    if sight is None:
        return search
    look = sight.look_first()
    if (
        look is not None
        and look in search.sizes
        and all(one.fits or look < one.size for one in search.observations)
    ):
        seen = None
        if brief is not None and trying.may_begin():
            seen = _glimpsed(sight, runs, brief, look)
        if seen is None:
            learned = None if few else trying.attempt(Request(look, False))
            if learned is None:
                return search
            search = search.tell(learned)
            if not learned.fits or learned.allocated_bytes is None:
                return search
            seen = sight.corrected(look, learned.allocated_bytes)
            if seen is None:
                return search
        sight = seen
    found = sight.largest(search.max_size)
    return search if found is None or found < search.sizes.first else replace(search, predicted=found)


def _glimpsed(sight: Foresight, runs: InProcess, brief: Workload, look: int) -> Foresight | None:
    """A prediction of generation, compared with a real run of a few tokens; None where that tells nothing.

    A small trial would make every token, and the first call of `generate` at a size is slow, however small:
    on an H200 it was a third of the search. What is wrong with a step comes out of a trial, not of a glimpse,
    but for what leaves no device to try on.
    """
    short = Foresight.of(brief, budget_bytes=sight.budget_bytes, name="glimpse")
    if short is None:
        return None
    try:
        trial = runs.run_shortened(brief, look)
    except Exception as error:
        if oom.classify(error) == "fatal":
            raise
        log.info("no glimpse of %d tokens: %s: %s", _GLIMPSE, type(error).__name__, str(error))
        return None
    seen = short.corrected(look, trial.peak_bytes) if trial.fits and trial.peak_bytes is not None else None
    if seen is None:
        return None
    log.info("batch size %d: %d tokens were made, and needed about what was predicted", look, _GLIMPSE)
    return sight.as_corrected(seen)


def check_steps(
    steps: int, soak_steps: int | None, time_limit_s: float | None, on_trial: OnTrial | None = None
) -> None:
    """Refuse wrong settings that the search itself does not know."""
    check_whole("steps", steps, at_least=2, at_most=MOST_STEPS)
    if soak_steps is not None and (type(soak_steps) is not int or 0 != soak_steps < steps):
        raise ValueError(f"soak_steps must be 0 or at least steps ({steps}), not {soak_steps!r}")
    check_whole("soak_steps", soak_steps or 0, at_least=0, at_most=MOST_STEPS)
    if time_limit_s is not None and (type(time_limit_s) not in (int, float) or not time_limit_s > 0):
        raise ValueError(f"time_limit_s must be a positive number of seconds, not {time_limit_s!r}")
    check_callback("on_trial", on_trial, "trial", "budget_bytes")


def check_isolation(isolate: bool, timeout_s: float | None, resume: object = None) -> None:
    """Refuse wrong settings of where trials run and where the search is kept."""
    if not isinstance(isolate, bool):
        raise TypeError(f"isolate must be True or False, not {isolate!r}")
    if timeout_s is not None and (type(timeout_s) not in (int, float) or not 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s must be a positive number of seconds, not {timeout_s!r}")
    if timeout_s is not None and not isolate:
        raise ValueError(f"timeout_s must be None without isolate=True, not {timeout_s!r}: see time_limit_s")
    if resume is not None:
        checked_file("resume", resume)


def _with_less(search: Search, budget_bytes: int, device: str) -> Search:
    """The search of an earlier run; where that had much more memory, it goes on within what is there.

    One that has ended has its answer, and runs nothing.
    """
    begun_bytes = search.budget_bytes or 0
    if search.ask() is None or not SharedBudget(begun_bytes, begun_bytes).lacks(budget_bytes):
        return search
    log.warning(
        "%s are free on %s now, and %s were when the search was begun; searching on within what is free",
        *(format_bytes(budget_bytes), device, format_bytes(begun_bytes)),
    )
    return replace(search, budget_bytes=budget_bytes, predicted=None)
