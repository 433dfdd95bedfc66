"""One configuration of a sweep: its workload made, its size found, the measurement run, all of it recorded.

Rules:
- A configuration stands for itself: nothing that another one found changes what this one answers, so the
  record is the same wherever and in whatever order configurations are run.
- Whatever the user's code raises is text in the record, and the sweep goes on. Only Ctrl-C comes out, and a
  device that is dead, on which nothing more can run.
- So do its random numbers: each configuration begins with generators seeded from its knobs alone (`SEED`),
  and the program's own are restored after it.
- A listener (`on_event`) that raises ends the sweep with its error, and the configuration has no record.
- Where several ranks run a configuration together, they begin with the same size and go down together; the
  search between is theirs already. A rank that raises comes to no agreement: who runs it ends the others.
- When a record is there, the memory of its configuration is not: workload dropped, garbage collected, cache
  emptied, outside any `except`.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch

from batchfit import errors
from batchfit._engine.device import oom
from batchfit._engine.device.device import Device, usable_bytes
from batchfit._engine.device.gpu import CudaDevice, XpuDevice
from batchfit._engine.device.oom import recover
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.device.tensors import ram_bytes
from batchfit._engine.distributed.ranks import Ranks, join_launched
from batchfit._engine.snapshot.rng import global_states
from batchfit._engine.workload.target import LoadedTarget, loaded, make_workload, parse_target, source_line
from batchfit._engine.workload.user_errors import NOTE, last_users_line
from batchfit._find.find import find_batch_size
from batchfit._knobs import Configuration, key_of, label
from batchfit._predict.predict import predict_batch_size
from batchfit._sweep.measure import run_measure
from batchfit._sweep.own_configuration import OwnConfiguration, run_own
from batchfit._sweep.pure.events import OnEvent, SweepEvent
from batchfit._sweep.pure.options import Measure
from batchfit._sweep.run_state import ConfigurationRun, ListenerRaised, SweepSettings
from batchfit.results import FitResult, SweepRecord
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")

DEAD = "device_died"  # why a search stopped, in a process that can run nothing more
_LONGEST_ERROR = 500
SEED = 0  # of every sweep, with the digest of a configuration's key; a result file records it
RANKS_TIMEOUT_S = 86400.0  # ranks may take their time over a model or a measurement


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
        for _, restore in before:
            # A device that has died cannot be restored: its record says so already.
            with suppress(RuntimeError):
                restore()


def run_configuration(
    factory: Callable[..., object] | str,
    configuration: Configuration,
    settings: SweepSettings,
    *,
    on_event: OnEvent | None = None,
) -> SweepRecord:
    """Make the workload, find its size, measure; the record of it, errors included."""
    begun = time.perf_counter()
    run = ConfigurationRun(configuration, on_event)
    ambient = sys.exception()
    try:
        run.report("begin")
        # Before the search: a measure that cannot be found must not cost one. And before random numbers are
        # the configuration's own: what a module draws when it is loaded is drawn once in a process.
        make, measure = loaded(factory), loaded(settings.measure)
        loaded(settings.estimate)
        with _own_random(configuration):
            _run(partial(_made, factory, make, configuration), measure, settings, run)
    except ListenerRaised:
        pass
    except (Exception, SystemExit) as error:  # noqa: BLE001  the user's code may raise anything
        run.known.update(_error_fields(error, run, ambient))
    # Outside the `except`: only now the frames that hold the workload are gone.
    if run.known.get("stopped_because") != DEAD:
        if run.device is not None:
            recover(run.device)
        else:  # the factory raised: what it had made may be on any device
            gc.collect()
            torch.cuda.empty_cache()  # does nothing where CUDA is not in use
    if run.listener_error is not None:
        raise run.listener_error
    record = SweepRecord(
        knobs=json.loads(json.dumps(dict(configuration))),  # as a file gives them back: tuples are lists
        trials=tuple(run.trials),
        elapsed_s=time.perf_counter() - begun,
        **run.known,
    )
    if on_event is not None:
        on_event(SweepEvent(kind="record", knobs=configuration, record=record))
    return record


def _error_fields(
    error: BaseException, run: ConfigurationRun, ambient: BaseException | None
) -> dict[str, Any]:
    """An error as fields of a record: its text, never itself."""
    text = str(error)
    if isinstance(error, errors.NothingFitsError) and error.detail:
        text = text.removesuffix(f" ({error.detail})")  # which is the message of its last trial
    text = " ".join(text.split())
    name = type(error).__name__
    said = f"{name}: {text}" if text else name
    for note in getattr(error, "__notes__", ()):
        if str(note).startswith(NOTE):  # a step that fails at some sizes only: at which
            said += f" ({str(note).removeprefix('batchfit: ')})"
    dead = oom.classify(error, ambient=ambient) == "fatal"
    return {
        "error": said if len(said) <= _LONGEST_ERROR else said[: _LONGEST_ERROR - 3] + "...",
        "error_at": last_users_line(error),
        "failed_in": run.stage,
        **({"stopped_because": DEAD} if dead else {}),
    }


def _run(
    make: Callable[[], Workload | OwnConfiguration],
    measure: Measure | None,
    settings: SweepSettings,
    run: ConfigurationRun,
) -> None:
    work = make()
    if isinstance(work, OwnConfiguration):
        return run_own(work, settings, run)
    join_launched()  # under a launcher whose ranks have no group yet; the factory had its chance to make one
    ranks = Ranks.current(timeout_s=RANKS_TIMEOUT_S)
    run.stage = "search"
    run.device = device_to_run(work._held, settings.device)
    run.known.update(
        device=run.device.name,
        device_model=_model(run.device),
        device_bytes=run.device.total_bytes(),
    )
    estimate, start = _start(work, settings, run)
    if start is not None:
        start = ranks.minimum(start, doing=f"where to begin with {label(run.configuration)}")
    run.known.update(estimate=estimate, start=start)
    run.report("search", estimate=estimate, start=start)
    begun = time.perf_counter()
    fit = _found(work, settings, run, start)
    run.keep_fit(fit, find_s=time.perf_counter() - begun)
    if measure is None:
        return
    run.stage = "measure"
    begun = time.perf_counter()
    try:
        run_measure(measure, work, fit, settings, run, ranks)
    finally:
        run.known["measure_s"] = time.perf_counter() - begun


def _model(device: Device) -> str:
    """What kind of device it is, without its number: `cpu`, `NVIDIA H200`."""
    if isinstance(device, CudaDevice | XpuDevice):
        return str(device.backend.get_device_name(device.index))
    return device.name.partition(":")[0]


def _made(
    given: Callable[..., object] | str, make: Any, configuration: Configuration
) -> Workload | OwnConfiguration:
    if isinstance(given, str):
        named = LoadedTarget(partial(make, **configuration), source_line(make))
        return make_workload(parse_target(given), named)
    if isinstance(made := make(**configuration), OwnConfiguration):
        return made
    return as_workload(made)


def _start(work: Workload, settings: SweepSettings, run: ConfigurationRun) -> tuple[int | None, int | None]:
    """The estimate, and the size that the search begins with; None: as the strategy does."""
    most = settings.batch_size
    if not settings.auto:
        return None, most
    if settings.estimate is not None:
        estimate = run.estimate(settings)
        return estimate, max(settings.min_size, min(estimate, most or estimate))
    if settings.strategy not in ("grow", "halve"):
        return None, None  # guided predicts for itself, where it can
    predicted = _predicted(work, settings)
    return predicted, max(settings.min_size, predicted) if predicted else most


def _predicted(work: Workload, settings: SweepSettings) -> int | None:
    """What a trace says; None where there is none to be had, since a search can do without."""
    try:
        device = device_to_run(work._held, settings.device)
        budget: int | str | None = settings.budget
        if budget is None:
            budget = usable_bytes(device, None, None, held_bytes=ram_bytes(work._held), says=False)
        return predict_batch_size(work, budget=budget, max_size=settings.batch_size).batch_size
    except Exception as error:  # noqa: BLE001  what is wrong with the step comes out of the first trial
        log.info("no prediction: %s: %s", type(error).__name__, error)
        return None


def _found(work: Workload, settings: SweepSettings, run: ConfigurationRun, start: int | None) -> FitResult:
    def watched(batch_size: int) -> object:
        run.stepping(batch_size)
        return work.step(batch_size)

    options = {**settings.of_search(start), "device": run.device, "on_trial": run.on_trial}
    return find_batch_size(work._watched(watched), **options)
