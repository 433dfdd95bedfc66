"""The user's measurement at the size that was found, and what of it goes into the record.

Rules:
- One that is out of memory is tried again at a smaller size, with state and random numbers as the first
  call had them, and the record names the sizes. An error that may mean something else counts as that only if
  a smaller size runs.
- It has the budget that the trials had, and what a failed call held is gone before the next.
- Where several ranks measure together they go down together.
- What it returns is checked to be what a file can hold, under names of its own.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from batchfit._engine.device import oom
from batchfit._engine.device.oom import recover
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.workload import loop
from batchfit._knobs import Configuration
from batchfit._sweep.pure.options import Measure
from batchfit._sweep.run_state import ConfigurationRun, SweepSettings
from batchfit.results import FitResult
from batchfit.results._sweep import OWN_COLUMNS
from batchfit.workload import Workload

# Of a size at which the measurement was out of memory; or a size that ran, where one lies between.
_LOWER = 0.8


def run_measure(
    measure: Measure,
    work: Workload,
    fit: FitResult,
    settings: SweepSettings,
    run: ConfigurationRun,
    ranks: Ranks,
) -> None:
    """Measure at the size found; where that is out of memory, lower."""
    device = run.device
    assert device is not None
    asking = partial(measure, **wanted_knobs(measure, run.configuration))
    before = Snapshot.take(work.state)
    verdicts = set[str]()

    def attempt(size: int, last: bool) -> Mapping[str, Any] | None:
        limit: AbstractContextManager[None] = nullcontext()
        if settings.budget is not None:
            limit = device.limit(min(fit.budget_bytes, device.total_bytes()))
        with limit:
            try:
                measured = _attempt(asking, work, size, verdicts, last=last)
            except Exception:
                if verdicts == {"ambiguous"}:  # at every size: it was never the memory
                    run.known.update(batch_size_used=fit.batch_size, measure_sizes=(fit.batch_size,))
                raise
            # Inside the limit, which counts what is cached; outside any `except`.
            recover(device)
        out_of_memory = ranks.any(measured is None, doing=f"the measurement at {size}")
        return None if out_of_memory else measured

    def undo() -> None:
        # What ran before the OOM is undone: the next call measures what the factory made, too.
        before.restore()
        recover(device)

    measure_downwards(attempt, fit, settings, run, undo=undo)


def measure_downwards(
    attempt: Callable[[int, bool], Mapping[str, Any] | None],
    fit: FitResult,
    settings: SweepSettings,
    run: ConfigurationRun,
    *,
    undo: Callable[[], None] = lambda: None,
) -> None:
    """Measure at the size found, and lower as long as `attempt(size, last)` is out of memory (None)."""
    size, sizes = fit.batch_size, list[int]()
    ran = [trial.size for trial in fit.trials if trial.fits]
    while True:
        sizes.append(size)
        run.known.update(batch_size_used=size, measure_sizes=tuple(sizes))
        run.report("measure", size=size)
        measured = attempt(size, size <= settings.min_size)
        if measured is not None:
            run.known["measures"] = _checked(measured, run.configuration)
            return
        undo()
        lower = max(
            [
                settings.min_size,
                math.floor(size * _LOWER),
                *(one for one in ran if one <= size - max(1, size // 10)),
            ]
        )
        run.report("measure_oom", size=lower, before=size)
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
    """What it measured; None where it was out of memory and a smaller size is left. `verdicts`: why not."""
    ambient = sys.exception()
    try:
        with loop.running():
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
