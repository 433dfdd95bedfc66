"""`sweep`: a size and a measurement for every configuration, errors and interrupts included."""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import pickle
import random
import runpy
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchfit
from batchfit import SweepEvent, SweepRecord, SweepResult, Workload
from batchfit._engine.workload.target import NamedFunction
from batchfit._knobs import key_of
from batchfit._sweep import sweep as module
from batchfit._sweep.configuration import run_configuration
from batchfit._sweep.job import Job, here
from batchfit._sweep.pure.grid import GridError
from batchfit._sweep.pure.options import SweepOptions
from batchfit._sweep.request import _plain
from batchfit._sweep.run_state import SweepSettings
from batchfit.errors import ResultFileError, SearchStoppedError, SettingsDifferError
from batchfit.testing import count_operations, fail_at, simulated_oom

KIB = 1024
# What this imports is frozen with the rest before the first test: collecting it again and again takes long.
with batchfit.virtual_memory("64MiB"):
    nn.Linear(1, 1)(torch.zeros(1, 1))
QUICK: dict[str, Any] = {"soak_steps": 0, "steps": 2}


def holding(kib: int) -> Workload:
    """Each sample holds so many KiB: under a budget of 1 MiB, 1024 // kib samples fit."""

    def step(size: int) -> None:
        torch.zeros(size, kib * KIB // 4)

    return Workload(step, state=[])


def made(kib: int) -> Workload:
    return holding(kib)


def limited(most: int, **_: object) -> Workload:
    """A step that runs up to `most` samples."""

    def step(size: int) -> None:
        if size > most:
            raise simulated_oom()

    return Workload(step, state=[])


def sizes(record: Any, *, soaks: bool = False) -> list[int]:
    return [one.size for one in record.trials if soaks or not one.soak]


def sweep(*args: Any, **kwargs: Any) -> SweepResult:
    return batchfit.sweep(*args, **{**QUICK, "budget": "64MiB", **kwargs})


def test_each_configuration_has_its_own_size() -> None:
    result = sweep(made, {"kib": [8, 16, 64, 512]}, budget="1MiB", batch_size=None, tolerance=0)
    assert [one["batch_size_used"] for one in result.summary] == [128, 64, 16, 2]
    assert [one["kib"] for one in result.summary] == [8, 16, 64, 512]
    assert result.complete
    assert not result.failed
    assert result.records[0].device == "cpu"
    assert result.records[0].budget_bytes == 2**20


def test_batch_size_is_the_upper_limit() -> None:
    assert sweep(made, {"kib": [1, 64]}, budget="1MiB", batch_size=20).summary == [
        {"kib": 1, "batch_size_used": 20, "error": None},
        {"kib": 64, "batch_size_used": 16, "error": None},
    ]


@pytest.mark.parametrize(
    ("max_crops", "most", "tried"),
    [
        (12, 64, [19, 28, 42, 63, 64]),  # the seed stops at 63, with an attempt left
        (12, 16, [19, 9, 14, 16, 17]),
        (12, 23, [19, 28, 23, 25, 24]),
        (13, 24, [16, 24, 36, 30, 27]),
    ],
)
def test_grow_is_the_seeds_procedure(max_crops: int, most: int, tried: list[int]) -> None:
    result = sweep(
        functools.partial(limited, most),
        {"max_crops": [max_crops]},
        batch_size=64,
        strategy="grow",
        estimate={"max_crops": "crops"},
    )
    (record,) = result.records
    assert sizes(record) == tried
    assert record.batch_size_used == max(size for size in tried if size <= most)
    assert record.estimate == record.start == tried[0]


def test_an_estimate_of_ones_own_and_attempts() -> None:
    seen: list[Any] = []

    def estimate(configuration: Any, batch_size: int) -> int:
        seen.append((configuration, batch_size))
        return 100

    result = sweep(limited, {"most": [50]}, batch_size=32, strategy="grow", estimate=estimate, attempts=1)
    assert seen == [({"most": 50}, 32)]
    (record,) = result.records
    assert (record.estimate, record.start, sizes(record)) == (100, 32, [32])  # never above the limit
    wrong = sweep(limited, {"most": [50]}, estimate=lambda configuration, size: 0.5)
    assert wrong.records[0].error == (
        "ValueError: estimate must return a positive integer at most=50, not 0.5"
    )


def test_a_fixed_size_is_confirmed_by_one_trial() -> None:
    result = sweep(limited, {"most": [10, 40]}, batch_size=32, auto=False, soak_steps=4)
    small, large = result.records
    assert small.error == (
        "NothingFitsError: a batch of 32 does not fit on cpu (peak 0 B of 64.0 MiB, and 2.00 GiB more "
        "requested). Allow a smaller size than 32 (min_size, multiple_of), or shrink the model."
    )
    assert (large.batch_size_used, sizes(large, soaks=True), large.survived_steps) == (32, [32], 4)


def test_the_measurement_runs_at_the_size_found() -> None:
    seen: list[tuple[Workload, int]] = []

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        seen.append((workload, size))
        return {"accuracy": torch.tensor(0.75), "worst": float("nan"), "each": (1, 2.5)}

    result = sweep(limited, {"most": [7]}, measure=measure)
    assert seen[0][1] == 7
    assert isinstance(seen[0][0], Workload)
    (record,) = result.records
    assert record.measures == {"accuracy": 0.75, "worst": "nan", "each": [1, 2.5]}
    assert (record.measure_sizes, record.measure_retries) == ((7,), 0)
    assert SweepResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(("fits", "tried"), [(40, (64, 56, 48, 38)), (1, (2, 1))])
def test_a_measurement_that_is_out_of_memory_goes_down(fits: int, tried: tuple[int, ...]) -> None:
    def measure(workload: Workload, size: int) -> dict[str, Any]:
        held = torch.zeros(1000)  # noqa: F841  what the failed try holds
        if size > fits:
            raise simulated_oom("cudnn")
        return {"size": size}

    result = sweep(functools.partial(limited, tried[0]), {"knob": [1]}, measure=measure, strategy="bisect")
    (record,) = result.records
    assert record.measure_sizes == tried
    assert record.batch_size_used == record.measures["size"] == tried[-1]
    assert record.measure_retries == len(tried) - 1
    assert record.error is None


def test_what_a_failed_measurement_held_is_gone_before_the_next() -> None:
    calls: list[int] = []

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        calls.append(size)
        held: list[Any] = [torch.zeros(600 * KIB // 4)]
        held.append(held)  # a cycle: only the collector frees it
        if len(calls) < 4:
            raise simulated_oom()
        return {"calls": len(calls)}

    gc.disable()
    try:
        (record,) = sweep(made, {"kib": [8]}, budget="1MiB", batch_size=128, measure=measure).records
    finally:
        gc.enable()
    assert (record.measures, record.measure_retries) == ({"calls": 4}, 3)
    assert calls == [*record.measure_sizes]


def test_a_measurement_that_is_called_again_has_what_the_first_call_had() -> None:
    """What it had trained, drawn and counted before its OOM is undone."""
    seen = []

    def make(width: int) -> Workload:
        model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        optimizer = torch.optim.Adam(model.parameters())
        return batchfit.training(model, optimizer, lambda m, b: m(b).square().mean(), torch.ones(4, width))

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        model: Any = workload.model
        state = [one.tolist() for one in model.state_dict().values()]
        seen.append((state, [one.grad for one in model.parameters()], model.training, torch.rand(()).item()))
        workload.step(size)
        model.eval()
        if size > 5:
            raise simulated_oom()
        return {}

    record = sweep(make, {"width": [3]}, batch_size=8, min_size=2, measure=measure).at(width=3)
    assert record.measure_sizes == (8, 6, 4)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("strategy", ["guided", "bisect", "halve", "grow", "powers"])
def test_nothing_is_tried_below_the_least_size(strategy: str) -> None:
    sizes: set[int] = set()

    def make(most: int) -> Workload:
        def step(batch_size: int) -> None:
            sizes.add(batch_size)
            if batch_size < 3:
                raise ValueError("expected more than 2 samples")
            if batch_size > most:
                raise simulated_oom()

        return Workload(step, state=[])

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        sizes.add(size)
        raise simulated_oom()

    def estimate(configuration: Any, batch_size: int) -> int:
        return 1

    how: dict[str, Any] = {"strategy": strategy, "measure": measure, "batch_size": 16}
    result = sweep(make, {"most": [2, 7, 16]}, min_size=3, estimate=estimate, **how)
    assert min(sizes) == 3
    assert [(one.error or "").partition(":")[0] for one in result.records] == [
        *("NothingFitsError", "OutOfMemoryError", "OutOfMemoryError")
    ]
    assert all(one.measure_sizes[-1] == 3 for one in result.records[1:])
    if strategy in ("guided", "powers"):  # these begin with the least size: without one, the record names it
        found = sweep(make, {"most": [7]}, strategy=strategy, batch_size=16).at(most=7)
        reported = "ValueError: expected more than 2 samples (raised while trying batch size 1 "
        assert (found.error or "").startswith(reported)


def test_a_measurement_goes_down_to_a_size_that_ran() -> None:
    """grow has run 9 and 14 before 16: 14 is tried before 0.8 x 16."""
    measure = lambda workload, size: {"ok": 1} if size <= 14 else torch.ones(2**40)  # noqa: E731
    result = sweep(
        limited, {"most": [16]}, strategy="grow", estimate=lambda *_: 19, attempts=4, measure=measure
    )
    assert result.records[0].measure_sizes == (16, 14)


def test_a_measurement_that_never_fits_is_an_error_and_keeps_the_size_it_ended_at() -> None:
    def measure(workload: Workload, size: int) -> dict[str, Any]:
        raise simulated_oom()

    (record,) = sweep(limited, {"most": [8]}, measure=measure).records
    assert record.error is not None
    assert record.error.startswith("OutOfMemoryError: CUDA out of memory")
    assert (record.failed_in, record.measure_sizes[-1], record.batch_size_used) == ("measure", 1, 1)


def test_an_ambiguous_error_at_every_size_is_one_error_and_no_oom() -> None:
    def measure(workload: Workload, size: int) -> dict[str, Any]:
        raise RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in")

    result = sweep(limited, {"most": [8]}, measure=measure)
    (record,) = result.records
    assert record.error is not None
    assert record.error.startswith("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_SUPPORTED")
    assert (record.batch_size_used, record.measure_sizes, record.measure_retries) == (8, (8,), 0)
    assert "out of memory" not in result.headline


def test_a_measure_that_cannot_be_called_is_refused_before_a_search() -> None:
    def make(most: int) -> Workload:
        raise AssertionError("called")

    def measure(workload: Workload, size: int, loader: object) -> dict[str, Any]:
        raise AssertionError("called")

    with pytest.raises(
        TypeError, match=r"measure must take \(workload, size\) and knobs \(most\) only, not "
    ):
        sweep(make, {"most": [3]}, measure=measure)
    with pytest.raises(TypeError, match=r"measure must take .* too many positional arguments"):
        sweep(make, {"most": [3]}, measure=lambda workload: {})


def test_a_knob_may_bear_the_name_of_an_argument_of_the_measure() -> None:
    def make(size: int, most: int) -> Workload:
        return limited(most)

    def measure(workload: Workload, size: int, **knobs: Any) -> dict[str, Any]:
        return {"at": size, "knobs": str(knobs)}

    (record,) = sweep(make, {"size": [224], "most": [5]}, measure=measure).records
    assert record.measures == {"at": 5, "knobs": "{'most': 5}"}


def test_the_measurement_has_the_budget_too() -> None:
    def measure(workload: Workload, size: int) -> dict[str, Any]:
        torch.zeros(size, 12 * KIB // 4)  # half as much again as a step
        return {}

    (record,) = sweep(made, {"kib": [8]}, budget="1MiB", batch_size=128, measure=measure, tolerance=0).records
    assert record.measure_sizes == (128, 102, 81)


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (None, "TypeError: measure must return a mapping of names to values, not None"),
        ({"most": 1}, "ValueError: a measure must have a name of its own "
         "(not one of most, batch_size_used, error), not 'most'"),
        ({"error": 1}, "ValueError: a measure must have a name of its own "
         "(not one of most, batch_size_used, error), not 'error'"),
        ({"a": torch.zeros(3)}, "TypeError: the measure 'a' must be a number, text, a list or a mapping, "
         "not Tensor"),
    ],
)  # fmt: skip
def test_what_a_measurement_may_return(returned: Any, text: str) -> None:
    (record,) = sweep(limited, {"most": [8]}, measure=lambda workload, size: returned).records
    assert (record.error, record.failed_in, record.batch_size_used) == (text, "measure", 8)


# Errors


def failing(where: str) -> Workload:
    if where == "factory":
        raise ValueError("no such\nmodel")
    if where == "exit":
        raise SystemExit(3)
    if where == "none":
        return None  # type: ignore[return-value]

    def step(size: int) -> None:
        if where == "step":
            raise KeyError("wrong")
        if where == "memory":
            raise simulated_oom()

    return Workload(step, state=[])


def test_a_configuration_that_fails_is_recorded_and_the_sweep_goes_on() -> None:
    def measure(workload: Workload, size: int) -> dict[str, Any]:
        raise ZeroDivisionError("in measure")

    names = ["factory", "exit", "none", "step", "memory", "measure"]
    result = sweep(failing, {"where": names}, measure=measure)
    reported = {one.knobs["where"]: one for one in result.records}
    assert list(reported) == names
    assert result.complete
    assert [one.failed_in for one in result.records] == [
        "factory", "factory", "factory", "search", "search", "measure",
    ]  # fmt: skip
    assert reported["factory"].error == "ValueError: no such model"
    assert reported["factory"].error_at is not None
    assert reported["factory"].error_at.split(":")[0].endswith("test_sweep.py")
    assert reported["exit"].error == "SystemExit: 3"
    assert reported["none"].error is not None
    assert reported["none"].error.startswith("TypeError: workload must be a Workload or a callable")
    assert reported["step"].error == "KeyError: 'wrong' (raised while trying batch size 1 (step 1))"
    assert reported["memory"].error is not None
    assert reported["memory"].error.startswith("NothingFitsError: a batch of 1 does not fit")
    assert [one.outcome for one in reported["memory"].trials][-1] == "oom"
    assert reported["measure"].error == "ZeroDivisionError: in measure"
    assert reported["measure"].batch_size_used is not None


def test_a_dead_device_ends_the_sweep_after_its_record() -> None:
    def make(number: int) -> Workload:
        def step(size: int) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return Workload(step, state=[])

    records: list[Any] = []
    with pytest.raises(SearchStoppedError, match=r"the device died in number=1, .* Start the sweep again"):
        sweep(make, {"number": [1, 2]}, on_record=records.append)
    assert [one.knobs for one in records] == [{"number": 1}]


def test_running_out_at_any_operation_is_a_value_of_its_configuration() -> None:
    """One OOM, at each operation in turn: the sweep ends, and no other configuration changes."""

    def make(width: int) -> Workload:
        model = nn.Linear(width, width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return batchfit.training(model, optimizer, lambda model, x: model(x).mean(), torch.ones(2, width))

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        workload.step(size)
        return {"done": True}

    def run() -> SweepResult:
        return sweep(make, {"width": [3, 4]}, batch_size=3, measure=measure)

    straight = run()
    with count_operations() as seen:
        run()
    outcomes = set()
    for number in range(0, seen.operations, max(1, seen.operations // 12)):
        with fail_at(number) as fault:
            result = run()
        assert fault.fired
        assert result.complete
        hit = [
            one
            for one, calm in zip(result.records, straight.records, strict=True)
            if (one.batch_size_used, one.error, one.ooms, one.measure_sizes)
            != (calm.batch_size_used, calm.error, calm.ooms, calm.measure_sizes)
        ]
        assert len(hit) <= 1
        for one in hit:
            outcomes.add(one.failed_in or ("measure" if one.measure_retries else "trial"))
            assert one.error is None or one.failed_in in ("factory", "search")
            assert one.error is not None or 1 <= (one.batch_size_used or 0) <= 3
    assert {"factory", "trial", "measure"} <= outcomes <= {"factory", "search", "trial", "measure"}


def test_knobs_may_be_tuples_and_are_lists_in_the_record() -> None:
    result = sweep(lambda shape: limited(shape[0]), {"shape": [(2, 3)]})
    assert result.summary == [{"shape": [2, 3], "batch_size_used": 2, "error": None}]
    assert SweepResult.from_json(result.to_json()) == result


def test_memory_of_one_configuration_is_gone_before_the_next() -> None:
    alive: list[weakref.ref[Any]] = []
    live_at_begin: list[int] = []

    def make(number: int) -> Workload:
        model = nn.Linear(64, 64)
        model.itself = [model]  # type: ignore[assignment]  # a cycle: only the collector frees it
        alive.append(weakref.ref(model))
        if number == 2:
            raise ValueError("with a model in its frame")
        return batchfit.inference(model, lambda n: torch.ones(n, 64))

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        if workload.model.weight is not None and size > 1 and len(alive) == 3:
            raise simulated_oom()
        return {}

    def on_event(event: SweepEvent) -> None:
        if event.kind == "begin":
            live_at_begin.append(sum(ref() is not None for ref in alive))

    gc.disable()
    try:
        sweep(make, {"number": [0, 1, 2, 3]}, batch_size=4, measure=measure, on_event=on_event)
    finally:
        gc.enable()
    assert live_at_begin == [0, 0, 0, 0]
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_a_user_who_interrupts_keeps_what_is_there(tmp_path: Path) -> None:
    def make(number: int) -> Workload:
        if number == 2:
            raise KeyboardInterrupt
        return limited(number)

    file = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        sweep(make, {"number": [1, 2, 3]}, output=file)
    kept = SweepResult.from_json(file.read_text())
    assert [one.knobs["number"] for one in kept.records] == [1]
    assert not kept.complete


KINDS = ("begin", "search", "trying", "trial", "using", "measure", "measure_oom", "record")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((kind, OSError("the tracker's disk is full")) for kind in KINDS),
        ("trial", SystemExit(3)),
        *(pytest.param(kind, SystemExit(3), marks=pytest.mark.slow) for kind in KINDS if kind != "trial"),
    ],
)
def test_a_listener_that_raises_is_not_a_failure_of_the_configuration(
    kind: str, error: BaseException, tmp_path: Path
) -> None:
    def listening(event: SweepEvent) -> None:
        if event.kind == kind and event.knobs["most"] == 5:
            raise error

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        if size > 2:
            raise simulated_oom()
        return {"size": size}

    file = tmp_path / "out.json"
    how: dict[str, Any] = {"output": file, "measure": measure, "batch_size": 8}
    with pytest.raises(type(error)) as caught:
        sweep(limited, {"most": [3, 5, 7]}, on_event=listening, **how)
    assert caught.value is error
    kept = SweepResult.from_json(file.read_text())
    # A record is reported once it is on disk: that one is whole.
    assert [one.knobs["most"] for one in kept.records] == ([3, 5] if kind == "record" else [3])
    assert not kept.failed
    resumed = sweep(limited, {"most": [3, 5, 7]}, resume=True, **how)
    assert [one["size"] for one in resumed.summary] == [2, 2, 2]


# Files


def test_the_file_is_whole_after_each_configuration(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    seen = []

    def on_record(record: Any) -> None:
        kept = SweepResult.from_json(file.read_text())
        seen.append(len(kept.records))
        assert kept.records[-1] == record

    result = sweep(limited, {"most": [3, 2, 1]}, output=file, on_record=on_record)
    assert seen == [1, 2, 3]
    assert SweepResult.from_json(file.read_text()) == result
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


@given(stop=st.integers(0, 4), fails=st.sets(st.integers(1, 5), max_size=2))
@examples(4)
def test_stopped_anywhere_and_resumed_is_the_same_file(
    tmp_path_factory: pytest.TempPathFactory, stop: int, fails: set[int]
) -> None:
    made_now: list[int] = []

    def make(most: int) -> Workload:
        made_now.append(most)
        if most in fails:
            raise ValueError(most)
        return limited(most)

    class Stop(BaseException): ...

    def stopping(event: SweepEvent) -> None:
        if event.kind == "begin" and len(made_now) == stop:
            raise Stop

    folder = tmp_path_factory.mktemp("resumed")
    knobs = {"most": [1, 2, 3, 4, 5]}
    whole = sweep(make, knobs, output=folder / "whole.json")
    made_now.clear()
    with pytest.raises(Stop):
        sweep(make, knobs, output=folder / "part.json", on_event=stopping)
    resumed = sweep(make, knobs, output=folder / "part.json", resume=True)
    assert made_now == [1, 2, 3, 4, 5]  # none twice
    assert resumed.without_timings() == whole.without_timings()
    again = json.loads((folder / "part.json").read_text())
    assert SweepResult.model_validate(again) == resumed
    assert sweep(make, knobs, output=folder / "part.json", resume=True) == resumed
    assert len(made_now) == 5


def test_failed_configurations_are_run_again_when_asked(tmp_path: Path) -> None:
    broken = True

    def make(most: int) -> Workload:
        if broken and most == 2:
            raise ValueError("not yet")
        return limited(most)

    file = tmp_path / "out.json"
    sweep(make, {"most": [1, 2, 3]}, output=file)
    broken = False
    assert [
        one.knobs["most"] for one in sweep(make, {"most": [1, 2, 3]}, output=file, resume=True).failed
    ] == [2]
    again = sweep(make, {"most": [1, 2, 3]}, output=file, resume=True, retry_failed=True)
    assert [one.batch_size_used for one in again.records] == [1, 2, 3]


def test_nothing_is_written_over_unasked(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("mine")
    calls: list[int] = []

    def make(most: int) -> Workload:
        calls.append(most)
        return limited(most)

    with pytest.raises(ResultFileError, match=r"out\.json is there already, and nothing was run"):
        sweep(make, {"most": [1]}, output=file)
    with pytest.raises(ResultFileError, match=r"out\.json cannot be resumed from: not JSON"):
        sweep(make, {"most": [1]}, output=file, resume=True)
    assert (file.read_text(), calls) == ("mine", [])
    sweep(make, {"most": [1]}, output=file, overwrite=True)
    assert SweepResult.from_json(file.read_text()).complete


def test_a_sweep_with_other_settings_is_not_resumed(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sweep(limited, {"most": [1, 2], "other": [5]}, output=file, batch_size=8)
    before = file.read_text()
    with pytest.raises(SettingsDifferError) as caught:
        sweep(limited, {"most": [1, 2, 3], "more": [5]}, output=file, batch_size=16, resume=True)
    assert caught.value.differences == (
        "knobs.most: [1, 2] then, [1, 2, 3] now",
        "knobs.other: [5] then, not given now",
        "knobs.more: not given then, [5] now",
        "batch_size: 8 then, 16 now",
    )
    assert "the sweep in" in str(caught.value)
    assert file.read_text() == before


def test_a_function_with_other_arguments_is_another_one(tmp_path: Path) -> None:
    def make(most: int, layers: int, kind: object = None) -> Workload:
        return limited(most)

    how: dict[str, Any] = {"knobs": {"most": [2]}, "output": tmp_path / "out.json"}
    sweep(functools.partial(make, layers=2, kind=object()), **how)
    sweep(functools.partial(make, layers=2, kind=object()), resume=True, **how)
    with pytest.raises(SettingsDifferError, match=r"make\(layers=2, kind=object\) then, .*layers=3.* now"):
        sweep(functools.partial(make, layers=3, kind=object()), resume=True, **how)


def test_another_range_is_another_sweep(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = sweep(limited, {"most": range(2, 5)}, output=file)
    before = file.read_text()
    with pytest.raises(SettingsDifferError, match=r"knobs.most: \[2, 3, 4\] then, \[4, 5\] now"):
        sweep(limited, {"most": range(4, 6)}, output=file, resume=True)
    assert file.read_text() == before
    assert sweep(limited, {"most": [2, 3, 4]}, output=file, resume=True) == done


def test_what_a_file_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError, match=r"knobs must hold numbers, .* and functions only, not 2j"):
        _plain("knobs", {"most": [2j]})


def test_no_record_of_a_file_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    sweep(limited, {"most": [1, 2]}, output=file)
    reported = json.loads(file.read_text())
    reported["records"][0]["knobs"] = {"most": 9}  # of an older version, or edited by hand
    file.write_text(json.dumps(reported))
    before = file.read_text()
    with pytest.raises(ResultFileError, match=r"has records that this sweep does not ask for \(most=9\)"):
        sweep(limited, {"most": [1, 2]}, output=file, resume=True)
    assert file.read_text() == before


def test_going_on_with_other_memory_is_reported_once(tmp_path: Path) -> None:
    class Stop(Exception): ...

    def stop(record: Any) -> None:
        raise Stop

    how: dict[str, Any] = {"output": tmp_path / "out.json", "budget": None, "batch_size": None}
    with batchfit.virtual_memory("1MiB"), pytest.raises(Stop):
        sweep(made, {"kib": [64, 128, 256]}, on_record=stop, **how)
    reported = r"goes on with another device, .* cpu with 1.00 MiB before, cpu with 2.00 MiB now \(kib=128\)"
    with batchfit.virtual_memory("2MiB"), pytest.warns(UserWarning, match=reported) as seen:
        result = sweep(made, {"kib": [64, 128, 256]}, resume=True, **how)
    assert len(seen) == 1
    assert [(one.device_model, one.device_bytes) for one in result.records] == [
        ("cpu", 2**20), ("cpu", 2**21), ("cpu", 2**21),
    ]  # fmt: skip


def drawn() -> list[float]:
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


def test_random_numbers_are_those_of_the_configuration_and_the_programs_go_on(tmp_path: Path) -> None:
    """Whatever was run before, and however often the sweep was stopped."""

    def make(number: int) -> Workload:
        first.append(drawn())
        torch.manual_seed(7)  # stays in its configuration
        return limited(number)

    def measure(workload: Workload, size: int) -> dict[str, Any]:
        return {"drawn": drawn()}

    class Stop(Exception): ...

    def stop(record: Any) -> None:
        drawn()
        raise Stop

    def reseed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    first: list[list[float]] = []
    reseed()
    expected = drawn()
    reseed()
    whole = sweep(make, {"number": [1, 2, 3]}, measure=measure, output=tmp_path / "whole.json")
    assert drawn() == expected
    straight, first = first, []
    how: dict[str, Any] = {"measure": measure, "output": tmp_path / "part.json"}
    with pytest.raises(Stop):
        sweep(make, {"number": [1, 2, 3]}, on_record=stop, **how)
    resumed = sweep(make, {"number": [1, 2, 3]}, resume=True, **how)
    assert first == straight
    assert len({tuple(one) for one in first}) == 3  # each has its own
    assert resumed.without_timings() == whole.without_timings()
    assert whole.settings["seed"] == 0


def test_two_sweeps_do_not_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "out.json"

    def make(most: int) -> Workload:
        sweep(limited, {"most": [1]}, output=file, resume=True)
        return limited(most)

    (record,) = sweep(make, {"most": [1]}, output=file).records
    assert record.error is not None
    assert "out.json is in use by another search" in record.error


# Arguments


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer or None, not 0"),
        ({"batch_size": True}, ValueError, "batch_size must be a positive integer or None, not True"),
        ({"min_size": 0}, ValueError, "min_size must be a positive integer, not 0"),
        ({"min_size": 9, "batch_size": 8}, ValueError, "min_size must be at most batch_size (8), not 9"),
        ({"auto": 1}, TypeError, "auto must be True or False, not 1"),
        ({"auto": False, "batch_size": None}, ValueError,
         "batch_size must be given with auto=False, not None"),
        ({"strategy": "grow", "batch_size": None}, ValueError,
         "batch_size must be given with strategy 'grow', not None"),
        ({"strategy": "luck"}, ValueError,
         "strategy must be one of guided, bisect, halve, grow, powers, not 'luck'"),
        ({"attempts": 0}, ValueError, "attempts must be a positive integer, not 0"),
        ({"steps": 1}, ValueError, "steps must be an integer of at least 2, not 1"),
        ({"budget": "much"}, ValueError,
         "budget must be bytes or text such as '24GiB' or '800MiB', not 'much'"),
        ({"estimate": 3}, TypeError,
         "estimate must be a callable estimate(configuration, batch_size), a mapping of knobs, "
         "'predict' or None, not 3"),
        ({"estimate": {"most": "crops"}, "batch_size": None}, ValueError,
         "estimate must be None where batch_size is None, not {'most': 'crops'}: it is a share"),
        ({"device": "cuda:77"}, ValueError, None),
        ({"measure": 3}, TypeError, "measure must be a callable measure(workload, size) or None, not 3"),
        ({"knobs": {"many": [1]}}, GridError, None),
        ({"knobs": {"error": [1], "most": [1]}}, GridError,
         "a knob must not be called 'error', which is a column of the result"),
        ({"resume": True}, ValueError, "resume must be False without output, not True"),
        ({"output": "x.json", "resume": True, "overwrite": True}, ValueError,
         "overwrite must be False with resume, not True"),
        ({"output": "x.json", "retry_failed": True}, ValueError,
         "retry_failed must be False without resume, not True"),
        ({"output": "no/such/x.json"}, ValueError,
         "output must be a file in a folder that exists, not 'no/such/x.json'"),
        ({"on_record": 3}, TypeError, "on_record must be a callable on_record(record) or None, not 3"),
        ({"mode": "zap"}, GridError, "mode must be one of grid, zip, not 'zap'"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_runs(
    change: dict[str, Any], error: type[Exception], text: str | None
) -> None:
    def make(most: int) -> Workload:
        raise AssertionError("called")

    arguments = {"knobs": {"most": [1, 2]}, **change}
    with pytest.raises(error) as caught:
        sweep(make, arguments.pop("knobs"), **arguments)
    if text is not None:
        assert str(caught.value) == text
    elif "device" in change:
        assert str(caught.value).startswith("device must be ")
    else:
        assert str(caught.value).startswith("the knob 'many' must be an argument of the factory at ")
        assert str(caught.value).endswith(", which takes most")


def test_a_factory_must_take_the_knobs_and_no_more() -> None:
    def make(crops: int, model: str, *, top_k: int = 2) -> Workload:
        raise AssertionError

    with pytest.raises(
        GridError, match=r"the knob 'crop' must be .*takes crops, model, top_k; did you mean crops\?"
    ):
        sweep(make, {"crop": [1]})
    with pytest.raises(
        GridError, match=r"knobs must name all that the factory at .* needs: model is missing"
    ):
        sweep(make, {"crops": [1]})
    with pytest.raises(TypeError, match=r"factory must be a callable factory\(\*\*knobs\)"):
        sweep(limited(3), {"crops": [1]})


# The seam for other engines


def test_a_job_travels_and_gives_the_same_record() -> None:
    job = Job(made, SweepSettings(batch_size=64, budget="1MiB", strategy="grow", steps=2, soak_steps=0))
    configuration = {"kib": 64}
    record = pickle.loads(pickle.dumps(job)).run(configuration)
    assert record.batch_size_used == 16
    assert pickle.loads(pickle.dumps(record)) == record
    again = run_configuration(job.factory, configuration, job.settings)
    keep = {"exclude": {"elapsed_s", "find_s", "trials"}}
    assert again.model_dump(**keep) == record.model_dump(**keep)  # type: ignore[arg-type]


def test_a_job_in_full_names_its_files_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(
        "here.py:make",
        SweepSettings(batch_size=4, measure="pkg.there:measure", estimate=NamedFunction("x/e.py:f")),
    )
    whole = job.in_full()
    assert whole.factory == f"{tmp_path.resolve()}/here.py:make"
    assert whole.settings.measure == "pkg.there:measure"
    assert whole.settings.estimate == NamedFunction(f"{tmp_path.resolve()}/x/e.py:f")
    assert whole.in_full() == whole


def test_an_engine_in_any_order_gives_the_same_result() -> None:
    def backwards(job: Job, waiting: Any, on_event: Any) -> Any:
        return here(job, list(reversed(waiting)), on_event)

    def run(engine: Any) -> SweepResult:
        settings = SweepOptions(batch_size=64, budget="1MiB", steps=2, soak_steps=0)
        asked = module.Asked.of(made, {"kib": [8, 16, 64]}, settings)
        return module.run_sweep(asked, module.SweepRecords(asked, None), engine=engine)

    assert run(backwards).without_timings() == run(here).without_timings()

    def twice(job: Job, waiting: Any, on_event: Any) -> Any:
        return here(job, [*waiting, waiting[0]], on_event)

    with pytest.raises(RuntimeError, match="kib=8 has been run twice"):
        run(twice)


def test_an_engine_that_is_none_is_refused() -> None:
    def listing(job: Job, waiting: Any, on_event: Any) -> Any:
        return [job.run(one.configuration, on_event) for one in waiting]

    def strange(job: Job, waiting: Any, on_event: Any) -> Any:
        yield SweepRecord(knobs={"most": 99})

    with pytest.raises(
        TypeError, match="engine must be a generator function that yields records, not return "
    ):
        sweep(limited, {"most": [1]}, engine=listing)
    with pytest.raises(RuntimeError, match="the engine gave a record that was not asked for: most=99"):
        sweep(limited, {"most": [1]}, engine=strange)


def test_events_and_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    events: list[SweepEvent] = []
    with caplog.at_level(logging.INFO, logger="batchfit"):
        sweep(
            functools.partial(limited, 30),
            {"max_crops": [12]},
            strategy="grow",
            estimate={"max_crops": "crops"},
            attempts=3,
            soak_steps=3,
            measure=lambda workload, size: {"accuracy": 0.5},
            on_event=events.append,
        )
    kinds = [event.kind for event in events]
    assert kinds == [
        "begin", "search", *itertools.chain(*[("trying", "trial")] * 4), "using", "measure", "record",
    ]  # fmt: skip
    lines = [one.message for one in caplog.records if not one.message.startswith("batch size")]
    assert lines == [
        "Testing max_crops=12",
        "Finding the largest batch size for max_crops=12 (estimated: 19, starting with: 19)...",
        "✓ Batch size 19 works for max_crops=12",
        "  Trying larger batch size: 28...",
        "✓ Batch size 28 works for max_crops=12",
        "  Trying larger batch size: 42...",
        "✗ Batch size 42 caused OOM for max_crops=12",
        "  Trying batch size 28 for longer...",
        "✓ Batch size 28 works for 3 steps for max_crops=12",
        "Using batch size: 28 for max_crops=12",
        "Measuring max_crops=12 at batch size 28...",
        "Measured max_crops=12 at batch size 28: accuracy=0.5",
    ]


def test_a_factory_and_a_measure_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sweepable.py").write_text(
        "import batchfit\n"
        "def make(most):\n"
        "    return batchfit.Workload(lambda size: None, state=[])\n"
        "def measure(workload, size):\n"
        "    return {'size': size}\n"
        "def half(configuration, batch_size):\n"
        "    return batch_size // 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    targets = {name: f"sweepable.py:{name}" for name in ("make", "measure", "half")}
    result = sweep(
        targets["make"], {"most": [3]}, measure=targets["measure"], estimate=targets["half"], batch_size=8
    )
    (record,) = result.records
    assert (record.measures, record.estimate) == ({"size": 8}, 4)
    assert result.settings["factory"] == "sweepable.py:make"
    assert key_of(record.knobs) == record.key


def test_the_table_in_the_docs_is_what_the_strategies_do() -> None:
    root = Path(__file__).parents[3]
    benchmark = runpy.run_path(str(root / "benchmarks" / "sweep_seed.py"))
    page = (root / "docs" / "how-to" / "sweep-details.md").read_text(encoding="utf-8")
    for line in benchmark["table"]():
        assert line in page.splitlines()
    for example in benchmark["EXAMPLES"].values():
        grown, guided = (benchmark["record_of"](example, strategy) for strategy in ("grow", "guided"))
        assert guided.batch_size_used == min(example.most, 64) >= grown.batch_size_used >= example.seed_used
        assert guided.ooms == 0
        assert len(set(sizes(guided, soaks=True))) < len(set(sizes(grown, soaks=True)))


# Last: a trace imports so much that collecting garbage takes long in every test after it.


def test_grow_without_an_estimate_begins_with_a_prediction() -> None:
    def make(width: int) -> Workload:
        model = nn.Linear(width, width)
        return batchfit.inference(model, lambda n: torch.ones(n, width))

    for estimate in (None, "predict"):
        result = sweep(
            make, {"width": [1024]}, budget="64MiB", batch_size=10**5, strategy="grow", estimate=estimate
        )
        (record,) = result.records
        assert record.estimate is not None
        assert record.estimate < 10**5
        assert sizes(record)[0] == record.estimate


def test_grow_without_a_trace_begins_with_the_full_size() -> None:
    def make(most: int) -> Callable[[int], None]:
        def step(size: int) -> None:  # a plain step: nothing is known of its state
            if size > most:
                raise simulated_oom()

        return step

    with pytest.warns(UserWarning, match="the step's state is not declared"):
        (record,) = sweep(make, {"most": [50]}, batch_size=64, strategy="grow").records
    assert (record.estimate, record.start, record.batch_size_used) == (None, 64, 48)
    assert sizes(record) == [64, 32, 48, 56, 52]
