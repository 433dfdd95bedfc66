"""`sweep`: the right batch size for every configuration, and a measurement at that size.

Rules:
- Arguments are checked before any device work and before the factory is called: knobs, start, estimate,
  settings, files, and that the factory takes the knobs.
- Each record goes to disk as soon as it is there, and the file is whole at every moment. A sweep that was
  stopped goes on where it was, with the settings that it was begun with.
- Nothing is written over without `overwrite` or `resume`.
- Which configurations are run is decided in `_decide.grid`; running one is `_sweep_run`'s; this file drives.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import torch

import batchfit
from batchfit._decide.estimates import EstimateFunction, estimate_of
from batchfit._decide.grid import Entry, GridError, did_you_mean, key_of, plan, without_done
from batchfit._decide.search import Search
from batchfit._decide.units import parse_bytes
from batchfit._files import write_whole
from batchfit._find import check_steps
from batchfit._sweep_log import OnEvent, SweepEvent
from batchfit._sweep_result import (
    OWN_COLUMNS,
    SkippedConfiguration,
    SweepRecord,
    SweepResult,
    in_order,
)
from batchfit._sweep_run import Engine, Job, Measure, Settings, here
from batchfit._target import load_function, parse_target, source_line
from batchfit._torch.device import resolve_device
from batchfit._torch.lock import used_alone
from batchfit.errors import ResultFileError, SettingsDifferError
from batchfit.workload import Workload

EstimateSpec = Literal["predict"] | Mapping[str, Any] | EstimateFunction


def sweep(
    factory: Callable[..., Workload] | Callable[..., Callable[[int], object]] | str,
    knobs: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    mode: Literal["grid", "zip"] = "grid",
    batch_size: int | None = 64,
    auto: bool = True,
    estimate: EstimateSpec | None = None,
    measure: Measure | str | None = None,
    strategy: str = "guided",
    attempts: int = 5,
    tolerance: float = 0.02,
    steps: int = 3,
    soak_steps: int = 25,
    budget: int | str | None = None,
    device: str | int | None = None,
    start_from: object = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    overwrite: bool = False,
    on_record: Callable[[SweepRecord], object] | None = None,
    on_event: OnEvent | None = None,
) -> SweepResult:
    """Find the largest batch size of every configuration, and measure there.

    ```python
    result = batchfit.sweep(make, {"max_crops": [2, 4, 8, 12]}, batch_size=64, measure=accuracy)
    print(result)
    result.to_dataframe()
    ```

    Args:
        factory: `factory(**knobs)` returns the workload of a configuration, or a step; or its name as
            "file.py:function" or "package.module:function".
        knobs: the values of each knob, all of them combined; or a list of configurations.
        mode: "zip" takes the first value of each knob, then the second, and so on.
        batch_size: the largest size to use, and with `auto=False` the one to use; None: as many as fit.
        auto: find a size for each configuration; False: use `batch_size` for all, confirmed by one trial.
        estimate: where a search begins: `estimate(configuration, batch_size) -> int`, or for each knob a
            table or a formula (`{"max_crops": "crops", "active": {"blocks": 24}}`); None or "predict": what a
            prediction says, where the step can be traced.
        measure: `measure(workload, size)` returns what is to be recorded, as a dict, at the size found; where
            it runs out of memory it is called again at a smaller one. Knobs that its further arguments are
            named after are passed too. Or its name, as for `factory`.
        strategy: "guided" (default); "grow": from the estimate, x1.5 while it runs, bisection once it does
            not, at most `attempts` sizes; or another of `find_batch_size`.
        attempts, tolerance, steps, soak_steps, budget, device: as in `find_batch_size`.
        start_from: leave out what stands before this value of a knob: `{"max_crops": 12}`, or 12 where there
            is one knob.
        output: a file that holds the result after each configuration.
        resume: go on with the sweep in `output`; without such a file, begin.
        retry_failed: with `resume`, run configurations again that failed.
        overwrite: replace what is in `output`.
        on_record: called with each record when it is in the file. on_event: called with all that happens.

    Raises:
        SettingsDifferError: the file to resume from holds a sweep with other settings.
        ResultFileError: `output` is there already, holds something else, or is in use.

    A configuration that fails is a record with its `error`, and the sweep goes on.
    """
    settings = Settings(
        batch_size=batch_size,
        auto=auto,
        strategy=strategy,
        attempts=attempts,
        budget=budget,
        tolerance=tolerance,
        steps=steps,
        soak_steps=soak_steps,
        device=device,
        measure=measure,
    )
    asked = Asked.of(factory, knobs, settings, mode=mode, start_from=start_from, estimate=estimate)
    for name, function in (("on_record", on_record), ("on_event", on_event)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be a callable or None, not {function!r}")
    with contextlib.ExitStack() as stack:
        keeper = Keeper.of(
            asked, output, resume=resume, retry_failed=retry_failed, overwrite=overwrite, stack=stack
        )
        return run_sweep(asked, keeper, on_record=on_record, on_event=on_event)


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
        settings: Settings,
        *,
        mode: str = "grid",
        start_from: object = None,
        estimate: Any = None,
        named: Mapping[str, str] | None = None,
    ) -> Asked:
        """Refuse whatever can be told wrong before anything is run.

        `named`: what a file is to call functions, where their targets depend on the current folder.
        """
        entries = plan(knobs, mode=mode, start_from=start_from)
        names = tuple(entries[0].configuration)
        for name in names:
            if name in OWN_COLUMNS:
                raise GridError(
                    f"a knob must not be called {name!r}, which is a column of the result", "knobs", name
                )
        settings = replace(settings, estimate=_estimate(estimate, names, settings.batch_size))
        _check_settings(settings)
        _check_functions(factory, names, settings.measure)
        said = {
            "factory": _name(factory),
            "knobs": _plain(knobs),
            "mode": mode,
            "start_from": _plain(start_from),
            "estimate": None if estimate == "predict" else _plain(estimate),
            "measure": None if settings.measure is None else _name(settings.measure),
            "budget": None if settings.budget is None else parse_bytes(settings.budget),
        }
        plain = ("batch_size", "auto", "strategy", "attempts", "tolerance", "steps", "soak_steps")
        said.update({name: getattr(settings, name) for name in plain})
        said.update(named or {})
        return cls(Job(factory, settings), entries, said)

    @property
    def wanted(self) -> tuple[Entry, ...]:
        """The configurations that are to be run, whether or not they have been."""
        return tuple(entry for entry in self.entries if not entry.why_not)


def _estimate(spec: Any, names: tuple[str, ...], batch_size: int | None) -> EstimateFunction | None:
    if spec is None or spec == "predict":
        return None
    if batch_size is None:
        raise ValueError(f"estimate must be None where batch_size is None, not {spec!r:.80}: it is a share")
    if isinstance(spec, Mapping):
        return estimate_of(spec, names)
    if isinstance(spec, str):
        return _NamedEstimate(spec)
    if not callable(spec):
        raise TypeError(
            "estimate must be a callable estimate(configuration, batch_size), a mapping of knobs, 'predict' "
            f"or None, not {spec!r:.80}"
        )
    function: EstimateFunction = spec
    return function


@final
@dataclass(frozen=True, slots=True)
class _NamedEstimate:
    """A user's function by its target."""

    text: str

    def __call__(self, configuration: Mapping[str, Any], batch_size: int) -> int:
        function: Any = load_function(parse_target(self.text))
        size: int = function(configuration, batch_size)
        return size


def _check_settings(settings: Settings) -> None:
    size: Any = settings.batch_size
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ValueError(f"batch_size must be a positive integer or None, not {size!r}")
    if type(settings.auto) is not bool:
        raise TypeError(f"auto must be True or False, not {settings.auto!r}")
    if size is None and not settings.auto:
        raise ValueError("batch_size must be given with auto=False, not None")
    if size is None and settings.strategy in ("grow", "halve"):
        raise ValueError(f"batch_size must be given with strategy {settings.strategy!r}, not None")
    check_steps(settings.steps, settings.soak_steps, None)
    if settings.device is not None:
        resolve_device(settings.device)
    Search(
        strategy=settings.strategy,
        max_size=size,
        start=size,
        attempts=settings.attempts,
        tolerance=settings.tolerance,
        budget_bytes=None if settings.budget is None else parse_bytes(settings.budget),
    )


def _check_functions(factory: Any, names: tuple[str, ...], measure: Any) -> None:
    function: Any = load_function(parse_target(factory)) if isinstance(factory, str) else factory
    if not callable(function) or isinstance(function, Workload):
        raise TypeError(
            "factory must be a callable factory(**knobs) that returns a workload, or a target that names "
            f"one, not {factory!r}"
        )
    check_takes(function, names)
    if isinstance(measure, str):
        parse_target(measure)
    elif measure is not None and not callable(measure):
        raise TypeError(f"measure must be a callable measure(workload, size) or None, not {measure!r}")


def check_takes(function: Callable[..., object], names: Sequence[str]) -> None:
    """Refuse knobs that a factory does not take, and a factory that wants more than the knobs."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will tell
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
    inner = getattr(function, "func", function)  # functools.partial
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return f"{getattr(inner, '__module__', '?')}:{name}"


def _plain(value: Any) -> Any:
    """A setting as a file can hold it: functions by name."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return _name(value)


@final
class Keeper:
    """The file of a sweep while it runs, and the records in it; without a path, the records alone."""

    def __init__(self, asked: Asked, path: Path | None, records: Sequence[SweepRecord] = ()) -> None:
        self.asked = asked
        self.path = path
        self.records = list(records)
        self.resumed = len(self.records)

    @classmethod
    def of(
        cls,
        asked: Asked,
        output: str | os.PathLike[str] | None,
        *,
        resume: bool,
        retry_failed: bool,
        overwrite: bool,
        stack: contextlib.ExitStack,
    ) -> Keeper:
        """Open the file, or refuse it; `stack` closes it."""
        flags = {"resume": resume, "retry_failed": retry_failed, "overwrite": overwrite}
        for name, flag in flags.items():
            if type(flag) is not bool:
                raise TypeError(f"{name} must be True or False, not {flag!r}")
            if flag and output is None:
                raise ValueError(f"{name} must be False without output, not True")
        if resume and overwrite:
            raise ValueError("overwrite must be False with resume, not True")
        if retry_failed and not resume:
            raise ValueError("retry_failed must be False without resume, not True")
        if output is None:
            return cls(asked, None)
        path = Path(output)
        if path.is_dir() or not path.resolve().parent.is_dir():
            raise ValueError(f"output must be a file in a folder that exists, not {str(path)!r}")
        stack.enter_context(used_alone(path))
        if not path.exists() or overwrite:
            return cls(asked, path)
        if not resume:
            raise ResultFileError(
                f"{path} is there already, and nothing was run. Go on with it (resume), replace it "
                "(overwrite), or name another file"
            )
        return cls(asked, path, _kept(path, asked, retry_failed=retry_failed))

    def waiting(self) -> tuple[Entry, ...]:
        """The configurations that have no record yet."""
        return tuple(entry for entry in self.entries() if not entry.why_not)

    def entries(self) -> tuple[Entry, ...]:
        """All configurations; those that have their record are not to be run again."""
        return without_done(self.asked.entries, (record.key for record in self.records))

    def keep(self, record: SweepRecord) -> None:
        """One more record, on disk when this returns."""
        if any(one.key == record.key for one in self.records):
            raise RuntimeError(f"the configuration {record.label} has been run twice")
        self.records.append(record)
        self.save()

    def save(self) -> None:
        """Write the file, whole."""
        if self.path is not None:
            write_whole(self.path, self.result().to_json() + "\n")

    def result(self) -> SweepResult:
        """The sweep as it is now."""
        left_out = (entry for entry in self.asked.entries if entry.why_not)
        return SweepResult(
            planned=len(self.asked.wanted),
            records=in_order(self.records, (entry.key for entry in self.asked.entries)),
            skipped=tuple(
                SkippedConfiguration(knobs=dict(entry.configuration), reason=entry.why_not)
                for entry in left_out
            ),
            settings=dict(self.asked.said),
            environment=environment(),
        )


def environment() -> dict[str, str]:
    """What a size depends on besides the settings."""
    return {
        "batchfit_version": batchfit.__version__,
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
    }


def _kept(path: Path, asked: Asked, *, retry_failed: bool) -> list[SweepRecord]:
    """The records of an earlier run of the same sweep."""
    try:
        before = SweepResult.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ResultFileError) as error:
        raise ResultFileError(f"{path} cannot be resumed from: {error}") from None
    differing = _differences(before.settings, asked.said)
    version = environment()["torch_version"]
    if before.environment.get("torch_version") != version:
        differing.append(f"torch: {before.environment.get('torch_version')} then, {version} now")
    if differing:
        raise SettingsDifferError(str(path), differing, what="sweep")
    wanted = {entry.key for entry in asked.wanted}
    kept = [record for record in before.records if record.key in wanted]
    return [record for record in kept if not (retry_failed and record.error is not None)]


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    told = []
    for name, value in now.items():
        before = then.get(name)
        if key_of({name: before}) == key_of({name: value}):
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            for one in dict.fromkeys((*before, *value)):
                if key_of({one: before.get(one)}) != key_of({one: value.get(one)}):
                    told.append(f"{name}.{one}: {_shown(before, one)} then, {_shown(value, one)} now")
        else:
            told.append(f"{name}: {_shown(then, name)} then, {_shown(now, name)} now")
    return told


def _shown(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    text = "not given" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def run_sweep(
    asked: Asked,
    keeper: Keeper,
    *,
    engine: Engine = here,
    on_record: Callable[[SweepRecord], object] | None = None,
    on_event: OnEvent | None = None,
) -> SweepResult:
    """Run what waits on an engine; each record is in the file before anyone is told of it."""

    def pass_on(event: SweepEvent) -> None:
        # A record is told once it is kept, which the engine does not see.
        if on_event is not None and event.kind != "record":
            on_event(event)

    for record in engine(asked.job, keeper.waiting(), pass_on):
        keeper.keep(record)
        if on_event is not None:
            on_event(SweepEvent(kind="record", knobs=record.knobs, record=record))
        if on_record is not None:
            on_record(record)
    if keeper.path is not None and not keeper.path.exists():
        keeper.save()  # nothing had to be run, and a file was asked for
    return keeper.result()
