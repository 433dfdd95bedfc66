"""`sweep`: the right batch size for every configuration, and a measurement at that size.

Rules:
- Arguments are checked before any device work and before the factory is called: knobs, start, estimate,
  settings, files, and that the factory takes the knobs.
- Each record goes to disk as soon as it is there, and the file is whole at every moment. A sweep that was
  stopped goes on where it was, with the settings that it was begun with.
- Nothing is written over without `overwrite` or `resume`.
- Which configurations are run is decided in `_sweep.pure.grid`; running one is `_sweep.configuration`'s; this
  file drives.
"""

from __future__ import annotations

import contextlib
import os
import platform
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch

import batchfit
from batchfit._arguments import checked_file
from batchfit._engine.distributed.ranks import Ranks, telling_others
from batchfit._files import locked, write_atomically
from batchfit._knobs import key_of
from batchfit._sweep.engines import all_ranks, engine_of, over_ranks
from batchfit._sweep.job import Engine, here
from batchfit._sweep.pure.events import OnEvent, SweepEvent, report_event
from batchfit._sweep.pure.grid import Entry, without_done
from batchfit._sweep.pure.options import EstimateSpec, Measure, OnRecord, SweepOptions
from batchfit._sweep.request import Asked
from batchfit._units import format_bytes
from batchfit.errors import ResultFileError, SettingsDifferError
from batchfit.results._sweep import (
    SkippedConfiguration,
    SweepRecord,
    SweepResult,
    in_order,
)
from batchfit.workload import Workload


def sweep(
    factory: Callable[..., Workload] | Callable[..., Callable[[int], object]] | str,
    knobs: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    *,
    mode: Literal["grid", "zip"] = "grid",
    batch_size: int | None = 64,
    min_size: int = 1,
    auto: bool = True,
    estimate: EstimateSpec | None = None,
    measure: Measure | str | None = None,
    strategy: str = "guided",
    attempts: int = 5,
    tolerance: float = 0.02,
    steps: int = 3,
    soak_steps: int | None = None,
    budget: int | str | None = None,
    device: str | int | None = None,
    start_from: object = None,
    devices: Sequence[str | int] | str | None = None,
    engine: Engine | str | None = None,
    ray_address: str | None = None,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    max_retries: int | None = None,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    retry_failed: bool = False,
    overwrite: bool = False,
    on_record: OnRecord | None = None,
    on_event: OnEvent | None = None,
) -> SweepResult:
    """Find the largest batch size of every configuration, and measure there.

    ```python
    result = batchfit.sweep(make, {"max_crops": [2, 4, 8, 12]}, batch_size=64, measure=accuracy)
    print(result)
    result.to_dataframe()
    ```

    A configuration that fails is a record with its `error`, and the sweep goes on.

    Args:
        factory: `factory(**knobs)` returns the workload of a configuration, or a step; or its name as
            "file.py:function" or "package.module:function".
        knobs: the values of each knob, all of them combined; or a list of configurations.
        mode: "zip" takes the first value of each knob, then the second, and so on.
        batch_size: the largest size to use, and with `auto=False` the one to use; None: as many as fit.
        min_size: the smallest size to try, in a search and in a measurement that goes down: 2 for a model
            that cannot train on one sample (BatchNorm over samples alone).
        auto: find a size for each configuration; False: use `batch_size` for all, confirmed by one trial.
        estimate: where a search begins: `estimate(configuration, batch_size) -> int` or its name, or for each
            knob a table or a formula (`{"max_crops": "crops", "active": {"blocks": 24}}`); None or "predict":
            what a prediction says, where the step can be traced.
        measure: `measure(workload, size)`, or its name: returns what to record, as a dict, at the size found.
            After an OOM it is called again at a smaller size. It may take knobs as further arguments.
        strategy: "guided" (default); "grow": from the estimate, x1.5 while it runs, bisection once it does
            not, at most `attempts` sizes; or another of `find_batch_size`.
        attempts: how many sizes "grow" may try.
        tolerance: "guided" stops when about this share could still be gained; 0 is exact.
        steps: steps in a trial, at least 2.
        soak_steps: steps of the stability check (soak); 0 for none. Default: as in `find_batch_size`.
        budget: bytes the program may use ("24GiB"); default: as in `find_batch_size`.
        device: where workloads run ("cuda:1", 1); default: where their state is.
        start_from: leave out what stands before this value of a knob: `{"max_crops": 12}`; of one knob, 12.
        devices: run on these, a child process each: `["cuda:0", "cuda:1"]`. Factory, measure and estimate
            must then be functions at the top of a module. None: in this process, or under torchrun each
            configuration over all ranks.
        engine: "ray" runs configurations as tasks of a Ray cluster; or a callable `engine(job, waiting,
            on_event)` that yields records.
        ray_address: the cluster; None: the one that there is, or one on this machine.
        num_gpus: GPUs that a task of Ray's takes; default: one where there are any.
        num_cpus: CPUs that a task of Ray's takes; default: one.
        max_retries: how often Ray tries a configuration again whose worker or node has died.
        output: a file that holds the result after each configuration.
        resume: go on with the sweep in `output`, if there is one.
        retry_failed: with `resume`, run configurations again that failed.
        overwrite: replace what is in `output`.
        on_record: called with each record when it is in the file.
        on_event: called with each `SweepEvent`.

    Returns:
        A `SweepResult` with a record per configuration.

    Raises:
        SettingsDifferError: the file to resume from holds a sweep with other settings.
        ResultFileError: `output` is there already, holds something else, or is in use.
    """
    keywords = {**locals()}  # every argument, by its name
    factory, knobs = keywords.pop("factory"), keywords.pop("knobs")
    return sweep_with(factory, knobs, SweepOptions(**keywords))


def sweep_with(factory: Any, knobs: Any, options: SweepOptions) -> SweepResult:
    """Run every configuration on the engine that the options name, or over all ranks."""
    asked = Asked.of(factory, knobs, options)
    alone = engine_of(options)
    with all_ranks() as ranks, telling_others(ranks), contextlib.ExitStack() as stack:
        main = ranks.is_main
        keeper = SweepRecords.of(
            asked,
            options.output if main else None,
            resume=options.resume and main,
            retry_failed=options.retry_failed and main,
            overwrite=options.overwrite and main,
            stack=stack,
        )
        keeper.share(ranks)
        return run_sweep(
            asked,
            keeper,
            engine=over_ranks(ranks, alone),
            on_record=options.on_record if main else None,
            on_event=options.on_event if main else None,
        )


@final
class SweepRecords:
    """The file of a sweep while it runs, and the records in it; without a path, the records alone."""

    def __init__(
        self, asked: Asked, path: Path | None, records: Sequence[SweepRecord] = (), *, stale: bool = False
    ) -> None:
        self.asked = asked
        self.path = path
        self.stale = stale  # the file still holds what this sweep replaces
        self.records = list(records)
        self.resumed = len(self.records)
        self._warned_of_device = False

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
    ) -> SweepRecords:
        """Open the file, or refuse it; `stack` closes it."""
        flags = {"resume": resume, "retry_failed": retry_failed, "overwrite": overwrite}
        for name, flag in flags.items():
            if flag and output is None:
                raise ValueError(f"{name} must be False without output, not True")
        if resume and overwrite:
            raise ValueError("overwrite must be False with resume, not True")
        if retry_failed and not resume:
            raise ValueError("retry_failed must be False without resume, not True")
        if output is None:
            return cls(asked, None)
        path = checked_file("output", output)
        stack.enter_context(locked(path))
        if not path.exists() or overwrite:
            return cls(asked, path, stale=path.exists())
        if not resume:
            raise ResultFileError(
                f"{path} is there already, and nothing was run. Go on with it (resume), replace it "
                "(overwrite), or name another file"
            )
        before = _kept(path, asked)
        kept = [record for record in before if not (retry_failed and record.error is not None)]
        return cls(asked, path, kept, stale=len(kept) < len(before))

    def share(self, ranks: Ranks) -> None:
        """All ranks hold what rank 0 has found in the file; in one process there is nothing to do."""
        if ranks.world_size == 1:
            return
        ranks.same(self.asked.said, doing="the settings of the sweep")
        mine = [record.model_dump(mode="json") for record in self.records]
        kept = ranks.gather(mine, doing="what has been run before")[0]
        if not ranks.is_main:
            self.records = [SweepRecord.model_validate(one) for one in kept]
            self.resumed = len(self.records)

    def waiting(self) -> tuple[Entry, ...]:
        """The configurations that have no record yet."""
        return tuple(entry for entry in self.entries() if not entry.why_not)

    def entries(self) -> tuple[Entry, ...]:
        """All configurations; those that have their record are not to be run again."""
        return without_done(self.asked.entries, (record.key for record in self.records))

    def keep(self, record: SweepRecord) -> None:
        """One more record, on disk when this returns."""
        if record.key not in {entry.key for entry in self.asked.wanted}:
            raise RuntimeError(f"the engine gave a record that was not asked for: {record.label}")
        if any(one.key == record.key for one in self.records):
            raise RuntimeError(f"the configuration {record.label} has been run twice")
        if self.resumed and not self._warned_of_device:
            self._warn_of_device(record)
        self.records.append(record)
        self.save()

    def _warn_of_device(self, record: SweepRecord) -> None:
        """Warn, once, where a record is of another device than all those that the file had."""
        own_budget = self.asked.said["budget"] is not None

        def what(one: SweepRecord) -> tuple[str, int | None]:
            return one.device_model, one.budget_bytes if own_budget else one.device_bytes

        before = {what(one) for one in self.records[: self.resumed] if all(what(one))}
        if not before or not all(what(record)) or what(record) in before:
            return
        self._warned_of_device = True
        then = ", ".join(f"{model} with {format_bytes(size or 0)}" for model, size in sorted(before, key=str))
        model, size = what(record)
        warnings.warn(
            f"{self.path} goes on with another device, and its sizes are not those of one: {then} before, "
            f"{model} with {format_bytes(size or 0)} now ({record.label})",
            stacklevel=3,
        )

    def begun(self) -> None:
        """Something runs: from now on the file is this sweep's, and a resume goes on with that."""
        if self.stale:
            self.save()

    def save(self) -> None:
        """Write the file, whole."""
        if self.path is not None:
            write_atomically(self.path, self.result().to_json() + "\n")
        self.stale = False

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


def _kept(path: Path, asked: Asked) -> Sequence[SweepRecord]:
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
    strange = [record.label for record in before.records if record.key not in wanted]
    if strange:  # going on would drop them from the file
        raise ResultFileError(
            f"{path} cannot be resumed from: it has records that this sweep does not ask for "
            f"({'; '.join(strange[:4])}{'; ...' if len(strange) > 4 else ''}). Use the same "
            "knobs, or another file"
        )
    return before.records


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differences = []
    for name, value in now.items():
        before = then.get(name)
        if key_of({name: before}) == key_of({name: value}):
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            for one in dict.fromkeys((*before, *value)):
                if key_of({one: before.get(one)}) != key_of({one: value.get(one)}):
                    differences.append(f"{name}.{one}: {_shown(before, one)} then, {_shown(value, one)} now")
        else:
            differences.append(f"{name}: {_shown(then, name)} then, {_shown(now, name)} now")
    return differences


def _shown(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name)
    text = "not given" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def run_sweep(
    asked: Asked,
    keeper: SweepRecords,
    *,
    engine: Engine = here,
    on_record: OnRecord | None = None,
    on_event: OnEvent | None = None,
) -> SweepResult:
    """Run what waits on an engine; each record is in the file before it is reported."""

    def pass_on(event: SweepEvent) -> None:
        keeper.begun()
        # A record is reported once it is saved, which the engine does not see.
        if event.kind != "record":
            report_event(event, on_event)

    records: Any = engine(asked.job, keeper.waiting(), pass_on)
    if not isinstance(records, Iterator):
        raise TypeError(
            f"engine must be a generator function that yields records, not return {records!r:.80}"
        )
    with contextlib.ExitStack() as stack:
        if isinstance(records, Generator):  # closed at once, whatever ends the loop: it may have processes
            stack.callback(records.close)
        for record in records:
            keeper.keep(record)
            report_event(SweepEvent(kind="record", knobs=record.knobs, record=record), on_event)
            if on_record is not None:
                on_record(record)
    if keeper.path is not None and not keeper.path.exists():
        keeper.save()  # nothing had to be run, and a file was asked for
    return keeper.result()
