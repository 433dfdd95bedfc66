"""`run_largest`: a whole program, run at the largest batch size at which it reaches its end.

Rules
- The program (`function(batch_size)`) is run again from its start after an OOM;
  `_rerun.pure.rerun` says at which size. One that has reached its end is never run again.
- Before it is run again, its memory is given back: outside of `except`, with the frames of its traceback
  cleared, garbage collected and caches emptied.
- A program that was stopped has not reached its end, whatever it makes of that: caught, wrapped, or exited.
- Random numbers, and what `state` names, are as before the first run each time.
- Ranks agree after every run: one rank's out-of-memory is everyone's. An error that is not memory comes out
  unchanged where it was raised, and ends the others.
- Only texts of errors are kept.
- A program that is run again in this process (the same function, start and device) begins with the size at
  which it ended before. A function that is made for each call is another program: what it closes over
  may be another model.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar, final
from weakref import WeakKeyDictionary

import torch

from batchfit._arguments import MOST_STEPS, check_callback, check_flag, check_whole
from batchfit._engine.device import oom
from batchfit._engine.device.device import Device
from batchfit._engine.device.living import living_holders
from batchfit._engine.device.resolve import DeviceSpec, resolve_device
from batchfit._engine.distributed.collectives import is_lost_connection
from batchfit._engine.distributed.ranks import Ranks, telling_others
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.store.key import digest_of
from batchfit._rerun.pure.rerun import Ending, Rerun, RunObservation, RunRequest
from batchfit._rerun.step_counter import EnoughSeen, counted
from batchfit.errors import CollectivesError, NothingFitsError
from batchfit.results import FitResult, Trial
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

T = TypeVar("T")
# By function, or by the object whose method it is, for as long as that lives: sizes by what else decides.
_ended: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
_calls = itertools.count()  # ranks count alike; flags of an earlier call must not be taken for this one's


@final
@dataclass(frozen=True, slots=True)
class LargestRun(Generic[T]):
    """What `run_largest` answers: what the program returned, at which batch size, and all runs that it took.

    Attributes:
        value: what the function returned.
        batch_size: the size that it ran to its end with.
        trials: all runs and probes, in order.
    """

    value: T
    batch_size: int
    trials: tuple[Trial, ...]


class _Ended(NamedTuple):
    ending: Ending | Literal["broken"]  # a collective broke off, since another rank had an OOM
    value: Any
    steps: int
    elapsed_s: float
    message: str
    holders: tuple[tuple[str, int], ...] = ()  # at an OOM of the smallest size


def run_largest(
    function: Callable[[int], T],
    *,
    start: int,
    probe_steps: int = 3,
    tolerance: float = 0.05,
    reduce: Callable[[], int] | None = None,
    state: object = (),
    key: str | None = None,
    fresh: bool = False,
    device: DeviceSpec | Device | None = None,
    before_retry: Callable[[], object] | None = None,
    on_run: Callable[[Trial], object] | None = None,
) -> LargestRun[T]:
    """Run `function(batch_size)` to its end, at `start` or at the largest size below it that fits.

    ```python
    ran = batchfit.run_largest(train, start=512)
    print(ran.batch_size, ran.value)
    ```

    `train` is a whole program that starts over when it is called: it makes its loader, trains, returns. The
    first run is at `start`, or at the size with which the same function ended before in this process. Where
    that is out of memory, smaller sizes are probed: the program runs until
    its optimizers have stepped `probe_steps` times and is stopped there. The largest size that survives is
    then run to its end, and what that run returns is the answer. For a single step use `find_batch_size`,
    which measures, and for an out-of-memory that must not lose the training so far a `Microbatcher`.

    Args:
        function: the program; gets the size of a batch as its one argument.
        start: the largest size to run.
        probe_steps: optimizer steps of a probe (or three times as many forward passes, in a program that only
            evaluates); 0: no probes, the size is halved until the program reaches its end.
        tolerance: probes end when about this share could still be gained.
        reduce: says the next size instead, after each out-of-memory; no probes then.
        state: modules, optimizers and the like that were made outside of the program: restored before each
            further run, from copies in host memory.
        key: a name under which the size is kept for later programs on such a device, which begin with it.
        fresh: begin with `start`, whatever was kept under `key` or found before in this process.
        device: whose memory it is; default: the current accelerator.
        before_retry: called before each further run, when the memory of the last one is to be given back.
        on_run: called on rank 0 with each run, as a `Trial`; one that was stopped by us has fitted so far.

    Returns:
        A `LargestRun` with what `function` returned and the size that it ran with.

    Raises:
        NothingFitsError: the program was out of memory at size 1.
        CollectivesError: a rank was out of memory alone, while others were inside a collective with it.
    """
    _check(function, start, probe_steps, tolerance, reduce, key, fresh, before_retry, on_run)
    ranks = Ranks.current()
    own = resolve_device(_own_device(ranks) if device is None else device, near=(state,))
    begun_s, call = time.perf_counter(), next(_calls)
    with telling_others(ranks) as everyone:
        everyone.meet()
        ranks.same(
            [start, probe_steps, tolerance, key, fresh, reduce is None], doing="the settings of the run"
        )
        kept = _Kept.of(key, None if reduce is not None else function, start, own, ranks)
        known = None if fresh else kept.size()
        runs = Rerun(start=known or start, probe_steps=probe_steps, tolerance=tolerance)
        snapshot = Snapshot.take(Workload(function, state=state).state)
        program = _Program(function, own, ranks, snapshot, reduce, before_retry, on_run, call)
        found = program.run_to_end(runs)
        kept.keep(list(found.trials), time.perf_counter() - begun_s)
        ranks.settle()
        return found


@final
@dataclass(frozen=True, slots=True)
class _Program(Generic[T]):
    """A program, and what it needs to be run from its start again."""

    function: Callable[[int], T]
    device: Device
    ranks: Ranks
    snapshot: Snapshot
    reduce: Callable[[], int] | None
    before_retry: Callable[[], object] | None
    on_run: Callable[[Trial], object] | None
    call: int  # which call of `run_largest` in this process

    def run_to_end(self, runs: Rerun) -> LargestRun[T]:
        """Run the program at the sizes that `runs` asks for, until it reaches its end."""
        ranks = self.ranks
        trials: list[Trial] = []
        while (request := _next(runs, self.reduce, ranks)) is not None:
            if trials:
                if self.before_retry is not None:
                    self.before_retry()
                _release(self.device)
                self.snapshot.restore()
            flag = f"{self.call}: {len(trials)} out of memory"
            ended = _agreed(_run(self.function, request, ranks, flag), request, ranks)
            trials.append(_as_trial(request, ended))
            assert ended.ending != "broken"  # all ranks have raised by then
            runs = runs.tell(RunObservation(request, ended.ending, ended.steps))
            if self.on_run is not None and ranks.is_main:
                self.on_run(trials[-1])
            if ended.ending == "done":
                return LargestRun(ended.value, request.size, tuple(trials))
            if ranks.is_main:
                _report(request, ended, None if self.reduce is not None else runs.ask())
            holders = ended.holders
            del ended
        _release(self.device)
        raise NothingFitsError(
            trials[-1].size,
            device=self.device.name,
            budget_bytes=self.device.total_bytes(),
            detail=trials[-1].message,
            holders=holders,
        )


def _run(function: Callable[[int], Any], request: RunRequest, ranks: Ranks, flag: str) -> _Ended:
    """One run; running out of memory is a value, and the frames that held the tensors are cleared.

    `flag` is raised by a rank with an OOM, for those whose collectives break off because of it.
    """
    ambient = sys.exception()
    begun = time.perf_counter()
    ending: Ending | Literal["broken"] = "done"
    value, message = None, ""
    holders: tuple[tuple[str, int], ...] = ()
    with counted(request.steps, forwards=request.forwards) as steps:
        try:
            value = function(request.size)
        except EnoughSeen as enough:
            if enough.by is not steps:  # a probe around this whole call
                raise
            _clear(enough)
        except SystemExit as error:  # a program's own `except BaseException` may end in it
            if not steps.raised:
                raise
            _clear(error)
        except Exception as error:
            verdict = oom.classify(error, ambient=ambient)
            lost = is_lost_connection(error)
            if any(isinstance(link, EnoughSeen) and link.by is steps for link in _links(error)):
                pass  # a program may wrap whatever it catches
            elif lost and ranks.flagged(flag):
                ending = "broken"
            elif verdict == "error" and steps.raised and not lost:
                pass  # it caught ours, and stumbled over what it had not done
            # An ambiguous error counts as too big only where a smaller size can prove it.
            elif verdict in ("error", "fatal") or (verdict == "ambiguous" and request.size == 1):
                error.add_note(f"batchfit: raised at batch size {request.size}")
                raise
            else:
                ending = "oom"
                message = oom.describe(error, ambient=ambient)
                holders = living_holders(message) if request.size == 1 else ()
            _clear(error)
            if ending == "oom":
                ranks.flag(flag)
    if ending == "done" and steps.raised:  # however it ended: it was stopped
        ending, value = "cut", None
    return _Ended(ending, value, steps.count, time.perf_counter() - begun, message, holders)


def _clear(error: BaseException) -> None:
    """Let go of what the frames behind an error hold, whoever keeps the error itself."""
    for link in _links(error):
        traceback.clear_frames(link.__traceback__)


def _links(error: BaseException) -> list[BaseException]:
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not one for one in links):
        links.append(link)
        link = link.__cause__ or link.__context__
    return links


def _agreed(mine: _Ended, request: RunRequest, ranks: Ranks) -> _Ended:
    """How the run ended on all ranks together."""
    reports = ranks.gather([mine.ending, mine.steps, mine.message], doing="how the run ended")
    endings = {one[0] for one in reports}
    failed = [(one[1], rank, one[2]) for rank, one in enumerate(reports) if one[0] == "oom"]
    if "broken" in endings:
        _, rank, message = min(failed, default=(0, None, ""))
        raise CollectivesError(
            f"rank {rank} ran out of memory at batch size {request.size} while others were inside a "
            f"collective with it, which broke off: the process group is lost ({message}). Begin again with a "
            "smaller size, find one by a workload before, or train with a Microbatcher."
        )
    if ranks.world_size == 1:
        return mine
    if failed:
        steps, rank, message = min(failed)  # the others may have gone on meanwhile
        return _Ended("oom", None, steps, mine.elapsed_s, f"rank {rank}: {message}", mine.holders)
    if "cut" in endings:
        return _Ended("cut", None, max(one[1] for one in reports), mine.elapsed_s, "")
    return mine


def _next(runs: Rerun, reduce: Callable[[], int] | None, ranks: Ranks) -> RunRequest | None:
    failed = runs.failed
    if reduce is None or failed is None:
        return runs.ask()
    size = reduce()
    if type(size) is not int or not 0 <= size < failed:
        raise ValueError(
            f"reduce must return an integer from 0 up to below the {failed} that was out of memory, "
            f"not {size!r}"
        )
    ranks.same(size, doing="the size that reduce returned")
    return RunRequest(size) if size else None


def _own_device(ranks: Ranks) -> str | None:
    """The current GPU; of several ranks that have not chosen theirs yet, the one that the launcher means."""
    if not torch.cuda.is_available():
        return None
    local = os.environ.get("LOCAL_RANK", "")
    if ranks.world_size > 1 and local.isdecimal() and int(local) < torch.cuda.device_count():
        return f"cuda:{local}"
    return "cuda"


def _release(device: Device) -> None:
    torch.clear_autocast_cache()
    gc.collect()
    if device.name != "cpu":
        device.reset()


def _as_trial(request: RunRequest, ended: _Ended) -> Trial:
    return Trial(
        size=request.size,
        outcome="oom" if ended.ending == "oom" else "fits",
        steps_run=ended.steps,
        elapsed_s=ended.elapsed_s,
        soak=ended.ending == "done",
        message=ended.message if ended.ending == "oom" else "",
    )


def _report(request: RunRequest, ended: _Ended, follows: RunRequest | None) -> None:
    what = "before its first optimizer step"
    if ended.steps:
        what = f"after {ended.steps} optimizer step{'s' * (ended.steps > 1)}"
    then = ""
    if follows is not None:
        how = "running it from the start" if follows.steps is None else "probing"
        then = f"; {how} with {follows.size}"
    if ended.ending == "cut":
        log.info("batch size %d has run for long enough%s", request.size, then)
        return
    why = ended.message.partition(". ")[0]
    log.warning("batch size %d ran out of memory %s%s (%s)", request.size, what, then, why)


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """The size that an earlier program ended with; rank 0 reads and writes."""

    digest: str
    named: bool  # by a key: on disk too
    here: dict[str, int] | None  # of this function in this process; None where it cannot be remembered
    device: Device
    ranks: Ranks

    @classmethod
    def of(
        cls, key: str | None, function: Callable[[int], Any] | None, start: int, device: Device, ranks: Ranks
    ) -> _Kept:
        kind = device.name.partition(":")[0]
        method = getattr(getattr(function, "__func__", None), "__qualname__", "")
        about = ["run_largest", 1, key, start, kind, device.total_bytes(), ranks.world_size]
        here = None if function is None or key is not None else _remembered(function)
        return cls(
            digest_of([*about, method] if key is None else about), key is not None, here, device, ranks
        )

    def size(self) -> int | None:
        """What was kept, on all ranks; None where nothing was."""
        if not self.named and self.here is None and self.ranks.world_size == 1:
            return None
        found = None if self.here is None else self.here.get(self.digest)
        if self.named and self.ranks.is_main:
            from batchfit._engine.store.sqlite import Store

            answers = Store().get(self.digest)
            found = answers[0].fit.batch_size if answers else None
        size: int | None = self.ranks.gather(found, doing="the size that was kept")[0]
        return size

    def keep(self, trials: list[Trial], elapsed_s: float) -> None:
        if self.here is not None:
            self.here[self.digest] = trials[-1].size
        if not self.named or not self.ranks.is_main:
            return
        from batchfit._engine.store.sqlite import Store

        last = trials[-1]
        fit = FitResult(
            batch_size=last.size,
            trials=tuple(trials),
            survived_steps=last.steps_run,
            stopped_because="strategy",
            budget_bytes=self.device.total_bytes(),
            peak_bytes=None,
            device=self.device.name,
            strategy="rerun",
            elapsed_s=elapsed_s,
        )
        Store().put(self.digest, fit, alone=True)


def _remembered(function: Callable[[int], Any]) -> dict[str, int] | None:
    """The sizes with which a function has ended; None for one that cannot be distinguished from others."""
    try:
        return _ended.setdefault(getattr(function, "__self__", function), {})
    except TypeError:  # neither hashed nor referred to weakly
        return None


def _check(
    function: object,
    start: int,
    probe_steps: int,
    tolerance: float,
    reduce: object,
    key: object,
    fresh: bool,
    before_retry: object,
    on_run: object,
) -> None:
    """Refuse wrong arguments before anything is run."""
    if not callable(function):
        raise TypeError(f"function must be a callable function(batch_size), not {function!r}")
    check_whole("start", start)
    check_whole("probe_steps", probe_steps, at_least=0, at_most=MOST_STEPS)
    if type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a number from 0 up to below 1, not {tolerance!r}")
    if key is not None and (not isinstance(key, str) or not key.strip()):
        raise ValueError(f"key must be a name or None, not {key!r}")
    check_flag("fresh", fresh)
    for name, value in (("reduce", reduce), ("before_retry", before_retry)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a callable or None, not {value!r}")
    check_callback("on_run", on_run, "trial")
