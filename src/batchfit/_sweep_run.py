"""One configuration of a sweep: its workload made, its size found, the measurement run, all of it recorded.

Rules:
- A configuration stands for itself: nothing that another one found changes what this one answers, so the
  record is the same wherever and in whatever order configurations are run.
- Whatever the user's code raises is text in the record, and the sweep goes on. Only Ctrl-C comes out, and a
  device that is dead, on which nothing more can run.
- So do its random numbers: each configuration begins with generators seeded from its knobs alone (`SEED`),
  and the program's own are put back after it.
- A listener (`on_event`) that raises is not the user's configuration failing: the sweep ends with that error,
  and the configuration has no record.
- A measurement that runs out of memory is tried again at a smaller size, with state and random numbers as the
  first call had them, and the record names the sizes. An error that may mean something else counts as that
  only if a smaller size runs.
- Where several ranks run a configuration together, they begin with the same size and go down together; the
  search between is theirs already. A rank that raises comes to no agreement: who runs it ends the others.
- When a record is there, the memory of its configuration is not: workload dropped, garbage collected, cache
  emptied, outside any `except`.

An engine maps configurations that wait to records as they end (`Engine`); `here` is the one of this process.
A `Job` can be pickled where its functions can, so another process may run it.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import inspect
import json
import logging
import math
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, final

import torch

from batchfit import errors
from batchfit._decide.estimates import EstimateFunction
from batchfit._decide.grid import Configuration, Entry, key_of, label
from batchfit._failure import last_users_line
from batchfit._find import find_batch_size
from batchfit._predict import predict_batch_size
from batchfit._sweep_log import OnEvent, SweepEvent
from batchfit._sweep_named import in_full, loaded
from batchfit._sweep_result import OWN_COLUMNS, Stage, SweepRecord
from batchfit._target import make_workload, parse_target
from batchfit._torch import oom
from batchfit._torch.attempt import recover
from batchfit._torch.device import CudaDevice, Device, XpuDevice, resolve_device
from batchfit._torch.ranks import Ranks, join_launched
from batchfit._torch.rng import global_states
from batchfit._torch.snapshot import Snapshot
from batchfit._torch.trial import NOTE
from batchfit.results import FitResult, Trial
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")

# measure(workload, size), or with knobs by name besides: measure(workload, size, max_crops)
Measure = Callable[..., Mapping[str, Any]]

# Of a size at which the measurement ran out of memory; or a size that ran, where one lies between.
_LOWER = 0.8
_LONGEST_ERROR = 500
SEED = 0  # of every sweep, with the digest of a configuration's key; a result file records it
_A_DAY_S = 86400.0  # ranks may take their time over a model or a measurement


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How every configuration of a sweep is run; `estimate` None: what a prediction says."""

    batch_size: int | None
    min_size: int = 1
    auto: bool = True
    strategy: str = "guided"
    attempts: int = 5
    budget: int | str | None = None
    tolerance: float = 0.02
    steps: int = 3
    soak_steps: int = 25
    device: str | int | None = None
    estimate: EstimateFunction | None = None
    measure: Measure | str | None = None


@final
@dataclass(frozen=True, slots=True)
class Job:
    """What is run for each configuration; `factory` is a function of the knobs, or a target's text."""

    factory: Callable[..., object] | str
    settings: Settings

    def run(self, configuration: Configuration, on_event: OnEvent | None = None) -> SweepRecord:
        """The record of one configuration."""
        return run_configuration(self.factory, configuration, self.settings, on_event=on_event)

    def in_full(self) -> Job:
        """The same job for a process with another current folder."""
        settings = self.settings
        named = {name: in_full(getattr(settings, name)) for name in ("measure", "estimate")}
        return Job(in_full(self.factory), replace(settings, **named))


class Engine(Protocol):
    """Runs the configurations that wait, and yields each record as soon as it is there, in any order."""

    def __call__(
        self, job: Job, waiting: Sequence[Entry], on_event: OnEvent
    ) -> Generator[SweepRecord, None, None]: ...


def here(job: Job, waiting: Sequence[Entry], on_event: OnEvent) -> Generator[SweepRecord, None, None]:
    """The engine of this process: one after the other."""
    for entry in waiting:
        record = job.run(entry.configuration, on_event)
        yield record
        if record.stopped_because == DEAD:
            raise errors.SearchStoppedError(
                f"the device died in {entry.label}, and nothing more can run in this process "
                f"({record.error}). Start the sweep again with resume."
            )


DEAD = "device_died"


class _ListenerRaised(BaseException):
    """Out of the configuration, past whatever takes errors of the user's code for its own."""


@final
@dataclass(slots=True)
class _Course:
    """A configuration on its way."""

    configuration: Configuration
    on_event: OnEvent | None
    trials: list[Trial] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)  # fields of the record, as they become known
    stage: Stage = "factory"
    device: Device | None = None
    last_size: int | None = None
    begun_trial: bool = False
    listener_error: BaseException | None = None

    def tell(self, kind: Any, **more: Any) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(SweepEvent(kind=kind, knobs=self.configuration, **more))
        except (Exception, SystemExit) as error:  # noqa: BLE001  it is raised again, outside the configuration
            self.listener_error = error
            raise _ListenerRaised from None

    def stepping(self, size: int) -> None:
        """A step begins: the first one of a trial is told."""
        if not self.begun_trial:
            again = any(one.size == size and one.fits for one in self.trials)
            self.tell("trying", size=size, before=self.last_size, again=again)
            self.begun_trial, self.last_size = True, size

    def on_trial(self, trial: Trial, budget_bytes: int) -> None:
        self.begun_trial = False
        self.trials.append(trial)
        self.known["budget_bytes"] = budget_bytes
        self.tell("trial", trial=trial, budget_bytes=budget_bytes)


@contextmanager
def _own_random(configuration: Configuration) -> Iterator[None]:
    """Inside, the random numbers of this configuration; afterwards those of the program go on."""
    if "numpy" in sys.modules:
        # `numpy.random` is loaded when it is first looked at. Looked at only by the user's code, it would be
        # seeded by the clock, and the first configuration of every process would have numbers of its own.
        importlib.import_module("numpy.random")
    before = global_states()
    digest = hashlib.sha256(f"{SEED}:{key_of(configuration)}".encode()).digest()
    seed = int.from_bytes(digest[:4], "big")  # NumPy takes 32 bits
    try:
        random.seed(seed)
        torch.manual_seed(seed)  # devices included; one that is not in use yet is not woken
        numpy_random: Any = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed(seed)
        yield
    finally:
        for _, put_back in before:
            # A device that has died cannot be put back: its record says so already.
            with suppress(RuntimeError):
                put_back()


def run_configuration(
    factory: Callable[..., object] | str,
    configuration: Configuration,
    settings: Settings,
    *,
    on_event: OnEvent | None = None,
) -> SweepRecord:
    """Make the workload, find its size, measure; the record of it, errors included."""
    begun = time.perf_counter()
    course = _Course(configuration, on_event)
    ambient = sys.exception()
    try:
        course.tell("begin")
        # Before the search: a measure that cannot be found must not cost one. And before random numbers are
        # the configuration's own: what a module draws when it is loaded is drawn once in a process.
        make, measure = loaded(factory), loaded(settings.measure)
        loaded(settings.estimate)
        with _own_random(configuration):
            _run(partial(_made, factory, make, configuration), measure, settings, course)
    except _ListenerRaised:
        pass
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        course.known.update(_told(error, course, ambient))
    # Outside the `except`: only now the frames that hold the workload are gone.
    if course.known.get("stopped_because") != DEAD:
        if course.device is not None:
            recover(course.device)
        else:  # the factory raised: what it had made may be on any device
            gc.collect()
            torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    if course.listener_error is not None:
        raise course.listener_error
    record = SweepRecord(
        knobs=json.loads(json.dumps(dict(configuration))),  # as a file gives them back: tuples are lists
        trials=tuple(course.trials),
        elapsed_s=time.perf_counter() - begun,
        **course.known,
    )
    if on_event is not None:
        on_event(SweepEvent(kind="record", knobs=configuration, record=record))
    return record


def _told(error: BaseException, course: _Course, ambient: BaseException | None) -> dict[str, Any]:
    """An error as fields of a record: its text, never itself."""
    text = str(error)
    if isinstance(error, errors.NothingFitsError) and error.detail:
        text = text.removesuffix(f" ({error.detail})")  # which is the message of its last trial
    text = " ".join(text.split())
    name = type(error).__name__
    told = f"{name}: {text}" if text else name
    for note in getattr(error, "__notes__", ()):
        if str(note).startswith(NOTE):  # a step that fails at some sizes only: at which
            told += f" ({str(note).removeprefix('batchfit: ')})"
    dead = oom.classify(error, ambient=ambient) == "fatal"
    return {
        "error": told if len(told) <= _LONGEST_ERROR else told[: _LONGEST_ERROR - 3] + "...",
        "error_at": last_users_line(error),
        "failed_in": course.stage,
        **({"stopped_because": DEAD} if dead else {}),
    }


def _run(make: Callable[[], Workload], measure: Measure | None, settings: Settings, course: _Course) -> None:
    work = make()
    join_launched()  # under a launcher whose ranks have no group yet; the factory had its chance to make one
    ranks = Ranks.current(timeout_s=_A_DAY_S)
    course.stage = "search"
    course.device = resolve_device(settings.device, near=(*work.state, work.model))
    course.known.update(
        device=course.device.name,
        device_model=_model(course.device),
        device_bytes=course.device.total_bytes(),
    )
    estimate, start = _start(work, settings, course)
    if start is not None:
        start = ranks.minimum(start, doing=f"where to begin with {label(course.configuration)}")
    course.known.update(estimate=estimate, start=start)
    course.tell("search", estimate=estimate, start=start)
    begun = time.perf_counter()
    fit = _found(work, settings, course, start)
    course.known.update(
        batch_size_used=fit.batch_size,
        survived_steps=fit.survived_steps,
        stopped_because=fit.stopped_because,
        peak_bytes=fit.peak_bytes,
        budget_bytes=fit.budget_bytes,
        find_s=time.perf_counter() - begun,
    )
    course.tell("using", size=fit.batch_size)
    if measure is None:
        return
    course.stage = "measure"
    begun = time.perf_counter()
    try:
        _measure(measure, work, fit, settings, course, ranks)
    finally:
        course.known["measure_s"] = time.perf_counter() - begun


def _model(device: Device) -> str:
    """What kind of device it is, without its number: `cpu`, `NVIDIA H200`."""
    if isinstance(device, CudaDevice | XpuDevice):
        return str(device.backend.get_device_name(device.index))
    return device.name.partition(":")[0]


def _made(given: Callable[..., object] | str, make: Any, configuration: Configuration) -> Workload:
    if isinstance(given, str):
        return make_workload(parse_target(given), partial(make, **configuration))
    return as_workload(make(**configuration))


def _start(work: Workload, settings: Settings, course: _Course) -> tuple[int | None, int | None]:
    """The estimate, and the size that the search begins with; None: as the strategy does."""
    most = settings.batch_size
    if not settings.auto:
        return None, most
    if settings.estimate is not None:
        assert most is not None
        estimate: Any = settings.estimate(dict(course.configuration), most)
        if isinstance(estimate, bool) or not isinstance(estimate, int) or estimate < 1:
            raise ValueError(
                f"estimate must return a positive integer at {label(course.configuration)}, not {estimate!r}"
            )
        return estimate, max(settings.min_size, min(estimate, most))
    if settings.strategy not in ("grow", "halve"):
        return None, None  # guided predicts for itself, where it can
    predicted = _predicted(work, settings)
    return predicted, max(settings.min_size, predicted) if predicted else most


def _predicted(work: Workload, settings: Settings) -> int | None:
    """What a trace says; None where there is none to be had, since a search can do without."""
    try:
        device = resolve_device(settings.device, near=(*work.state, work.model))
        budget = device.budget_bytes() if settings.budget is None else settings.budget
        return predict_batch_size(work, budget=budget, max_size=settings.batch_size).batch_size
    except Exception as error:  # noqa: BLE001  what is wrong with the step comes out of the first trial
        log.info("no prediction: %s: %s", type(error).__name__, error)
        return None


def _found(work: Workload, settings: Settings, course: _Course, start: int | None) -> FitResult:
    def watched(batch_size: int) -> object:
        course.stepping(batch_size)
        return work.step(batch_size)

    fixed = None if settings.auto else settings.batch_size
    return find_batch_size(
        work._watched(watched),
        budget=settings.budget,
        min_size=fixed or settings.min_size,
        max_size=settings.batch_size,
        strategy=settings.strategy if fixed is None else "bisect",
        start=start if fixed is None else None,
        attempts=settings.attempts,
        tolerance=settings.tolerance,
        steps=settings.steps,
        soak_steps=settings.soak_steps,
        device=course.device,
        on_trial=course.on_trial,
    )


def _measure(
    measure: Measure, work: Workload, fit: FitResult, settings: Settings, course: _Course, ranks: Ranks
) -> None:
    """Measure at the size found; where that runs out of memory, lower."""
    size, sizes = fit.batch_size, list[int]()
    ran = [trial.size for trial in fit.trials if trial.fits]
    device = course.device
    assert device is not None
    asking = partial(measure, **wanted_knobs(measure, course.configuration))
    before = Snapshot.take(work.state)
    verdicts = set[str]()
    while True:
        sizes.append(size)
        course.known.update(batch_size_used=size, measure_sizes=tuple(sizes))
        course.tell("measure", size=size)
        limit: AbstractContextManager[None] = nullcontext()
        if settings.budget is not None:
            limit = device.limit(min(fit.budget_bytes, device.total_bytes()))
        with limit:
            try:
                measured = _attempt(asking, work, size, verdicts, last=size <= settings.min_size)
            except Exception:
                if verdicts == {
                    "ambiguous"
                }:  # at every size: it was never the memory, and the size found stands
                    course.known.update(batch_size_used=fit.batch_size, measure_sizes=(fit.batch_size,))
                raise
            # Inside the limit, which counts what is cached; outside any `except`.
            recover(device)
        if not ranks.any(measured is None, doing=f"the measurement at {size}"):
            assert measured is not None
            course.known["measures"] = _checked(measured, course.configuration)
            return
        # What ran before it ran out is undone: the next call measures what the factory made, too.
        before.restore()
        recover(device)
        lower = max(
            [
                settings.min_size,
                math.floor(size * _LOWER),
                *(one for one in ran if one <= size - max(1, size // 10)),
            ]
        )
        course.tell("measure_oom", size=lower, before=size)
        size = lower


def wanted_knobs(measure: Measure, configuration: Configuration) -> dict[str, Any]:
    """The knobs that a measure asks for, by the names of its arguments after the first two."""
    try:
        parameters = list(inspect.signature(measure).parameters.values())
    except (TypeError, ValueError):
        return {}  # a builtin without a signature
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        taken = {one.name for one in parameters[:2] if one.kind is one.POSITIONAL_OR_KEYWORD}
        return {name: value for name, value in configuration.items() if name not in taken}
    return {one.name: configuration[one.name] for one in parameters[2:] if one.name in configuration}


def _attempt(
    measure: Measure, work: Workload, size: int, verdicts: set[str], *, last: bool
) -> Mapping[str, Any] | None:
    """What it measured; None where it ran out of memory and a smaller size is left. `verdicts`: why not."""
    ambient = sys.exception()
    try:
        measured: Any = measure(work, size)
    except Exception as error:
        verdict = oom.classify(error, ambient=ambient)
        verdicts.add(verdict)
        if last or verdict not in ("oom", "too_large", "ambiguous"):
            raise
        return None
    if inspect.iscoroutine(measured):
        measured.close()  # it will never be awaited; without this Python warns about it
    if not isinstance(measured, Mapping):
        raise TypeError(f"measure must return a mapping of names to values, not {measured!r:.80}")
    return measured


def _checked(measured: Mapping[str, Any], configuration: Configuration) -> dict[str, Any]:
    """The measures as a file can hold them."""
    checked = {}
    for name, value in measured.items():
        if name in configuration or name in OWN_COLUMNS or type(name) is not str:
            taken = ", ".join((*configuration, *OWN_COLUMNS))
            raise ValueError(f"a measure must have a name of its own (not one of {taken}), not {name!r}")
        checked[name] = _as_json(name, value)
    return checked


def _as_json(name: str, value: Any) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "numel", lambda: getattr(value, "size", 1))() == 1:
        value = item()  # a tensor or a NumPy number
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_as_json(name, one) for one in value]
    if isinstance(value, Mapping) and all(isinstance(one, str) for one in value):
        return {key: _as_json(name, one) for key, one in value.items()}
    raise TypeError(
        f"the measure {name!r} must be a number, text, a list or a mapping, not {type(value).__name__}"
    )
