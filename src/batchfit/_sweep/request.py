"""The arguments of a sweep, checked before anything is run.

Rules: arguments are refused with their names (`batch_size must ...`), and knobs with their place among the
knobs; the factory is inspected, never called. What is asked is kept as plain values (`Asked.said`): a file
compares them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from batchfit._engine.device.resolve import resolve_device
from batchfit._engine.workload.target import NamedFunction, loaded, source_line
from batchfit._find.pure.options import check_steps
from batchfit._find.pure.search import Search
from batchfit._sweep.configuration import SEED
from batchfit._sweep.job import Job
from batchfit._sweep.measure import wanted_knobs
from batchfit._sweep.pure.estimates import EstimateFunction, estimate_of
from batchfit._sweep.pure.grid import Entry, GridError, did_you_mean, plan
from batchfit._sweep.pure.options import SweepOptions
from batchfit._sweep.run_state import SweepSettings
from batchfit._units import parse_bytes
from batchfit.results._sweep import OWN_COLUMNS
from batchfit.workload import Workload


@final
@dataclass(frozen=True, slots=True)
class Asked:
    """A sweep as it was asked for, checked."""

    job: Job
    entries: tuple[Entry, ...]
    said: Mapping[str, Any]  # the settings as a file keeps them, and compares them

    @classmethod
    def of(
        cls,
        factory: Any,
        knobs: Any,
        options: SweepOptions,
        *,
        named: Mapping[str, str] | None = None,
    ) -> Asked:
        """Refuse what can be refused before anything is run.

        `named`: what a file is to call functions, where their targets depend on the current folder.
        """
        start_from, estimate = options.start_from, options.estimate
        said_start = _plain("start_from", start_from)
        start_from = list(start_from) if isinstance(start_from, range) else start_from
        entries = plan(knobs, mode=options.mode, start_from=start_from)
        names = tuple(entries[0].configuration)
        for name in names:
            if name in OWN_COLUMNS:
                raise GridError(
                    f"a knob must not be called {name!r}, which is a column of the result", "knobs", name
                )
        settings = SweepSettings(
            **{**options.part(SweepSettings), "estimate": _estimate(estimate, entries, options.batch_size)}
        )
        _check_settings(settings)
        _check_functions(factory, names, settings.measure)
        said = {
            "factory": _name(factory),
            "knobs": _plain("knobs", knobs),
            "mode": options.mode,
            "seed": SEED,
            "start_from": said_start,
            "estimate": None if estimate == "predict" else _plain("estimate", estimate),
            "measure": None if settings.measure is None else _name(settings.measure),
            "budget": None if settings.budget is None else parse_bytes(settings.budget),
        }
        plain = ("batch_size", "min_size", "auto", "strategy", "attempts", "tolerance", "steps", "soak_steps")
        said.update({name: getattr(settings, name) for name in plain})
        said.update(named or {})
        return cls(Job(factory, settings), entries, said)

    @property
    def wanted(self) -> tuple[Entry, ...]:
        """The configurations that are to be run, whether or not they have been."""
        return tuple(entry for entry in self.entries if not entry.why_not)


def _estimate(spec: Any, entries: Sequence[Entry], batch_size: int | None) -> EstimateFunction | None:
    if spec is None or spec == "predict":
        return None
    if batch_size is None:
        raise ValueError(f"estimate must be None where batch_size is None, not {spec!r:.80}: it is a share")
    if isinstance(spec, Mapping):
        wanted = [entry.configuration for entry in entries if not entry.why_not]
        return estimate_of(spec, tuple(entries[0].configuration), wanted)
    if isinstance(spec, str):
        return NamedFunction(spec)
    if not callable(spec):
        raise TypeError(
            "estimate must be a callable estimate(configuration, batch_size), a mapping of knobs, 'predict' "
            f"or None, not {spec!r:.80}"
        )
    function: EstimateFunction = spec
    return function


def _check_settings(settings: SweepSettings) -> None:
    size: Any = settings.batch_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"batch_size must be a positive integer or None, not {size!r}")
    if type(settings.auto) is not bool:
        raise TypeError(f"auto must be True or False, not {settings.auto!r}")
    if size is None and not settings.auto:
        raise ValueError("batch_size must be given with auto=False, not None")
    if size is None and settings.strategy in ("grow", "halve"):
        raise ValueError(f"batch_size must be given with strategy {settings.strategy!r}, not None")
    if type(settings.min_size) is int and size is not None and settings.min_size > size:
        raise ValueError(f"min_size must be at most batch_size ({size}), not {settings.min_size!r}")
    check_steps(settings.steps, settings.soak_steps)
    if settings.device is not None:
        resolve_device(settings.device)
    Search(
        strategy=settings.strategy,
        min_size=settings.min_size,
        max_size=size,
        start=size,
        attempts=settings.attempts,
        tolerance=settings.tolerance,
        budget_bytes=None if settings.budget is None else parse_bytes(settings.budget),
    )


def _check_functions(factory: Any, names: tuple[str, ...], measure: Any) -> None:
    function: Any = loaded(factory)
    if not callable(function) or isinstance(function, Workload):
        raise TypeError(
            "factory must be a callable factory(**knobs) that returns a workload, or a target that names "
            f"one, not {factory!r}"
        )
    check_takes(function, names)
    measure = loaded(measure)
    if measure is None:
        return
    if not callable(measure):
        raise TypeError(f"measure must be a callable measure(workload, size) or None, not {measure!r}")
    try:
        signature = inspect.signature(measure)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call will show it
    try:
        signature.bind(None, 1, **wanted_knobs(measure, dict.fromkeys(names)))
    except TypeError as error:
        raise TypeError(
            f"measure must take (workload, size) and knobs ({', '.join(names)}) only, not "
            f"{signature}: {error}"
        ) from None


def check_takes(function: Callable[..., object], names: Sequence[str]) -> None:
    """Refuse knobs that a factory does not take, and a factory that wants more than the knobs."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call will show it
    kinds = inspect.Parameter
    by_name = [
        name
        for name, one in parameters.items()
        if one.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    ]
    takes_all = any(one.kind is kinds.VAR_KEYWORD for one in parameters.values())
    where = source_line(function)
    for name in names:
        if name not in by_name and not takes_all:
            takes = ", ".join(by_name) or "none"
            raise GridError(
                f"the knob {name!r} must be an argument of the factory at {where}, which takes {takes}"
                f"{did_you_mean(name, by_name)}",
                *("knobs", name),
            )
    missing = [name for name in by_name if name not in names and parameters[name].default is kinds.empty]
    if missing:
        raise GridError(
            f"knobs must name all that the factory at {where} needs: {', '.join(missing)} is missing", "knobs"
        )


def _name(function: Any) -> str:
    if isinstance(function, str):
        return function
    if isinstance(function, partial):  # with other arguments it is another function
        given = [*map(_argument, function.args)]
        given += [f"{name}={_argument(one)}" for name, one in function.keywords.items()]
        return f"{_name(function.func)}({', '.join(given)})"
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{getattr(function, '__module__', '?')}:{name}"


def _argument(value: object) -> str:
    """A value by what it says, where that is the same in every process; else by its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_argument(name)}: {_argument(one)}' for name, one in value.items())}}}"
    return _name(value) if callable(value) else type(value).__qualname__


def _plain(name: str, value: Any) -> Any:
    """A setting as a file can hold it: functions by name. What it cannot say it could not compare either."""
    if isinstance(value, Mapping):
        return {str(key): _plain(name, one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(name, one) for one in value]
    if callable(value):
        return _name(value)
    raise TypeError(f"{name} must hold numbers, text, lists, mappings and functions only, not {value!r:.80}")
