"""Loops as people write them, on a real CUDA device: the predicted peak is the measured one.

The GPU's own trace must be within what a case says (2 %), the trace without it within one hundredth more.
`python tests/gpu/gallery.py --out FILE.json` tells the same of all loops without asserting anything.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gallery import (
    CASES,
    LIMIT_S,
    Case,
    cleaned,
    differences,
    frozen,
    held_by,
    left_behind,
    let_go,
    limited,
    measured,
    predicted,
    seeded,
    sizes_for,
)

import batchfit
from batchfit.errors import UntraceableError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _alone_on_the_gpu() -> Iterator[None]:
    cleaned()
    seeded()
    yield
    cleaned()


def cases(expected: str) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in CASES.values() if case.expected == expected]


@pytest.mark.parametrize("case", cases("traced"))
def test_the_predicted_peak_of_a_loop_is_the_measured_one(case: Case, request: pytest.FixtureRequest) -> None:
    workload = case.make("cuda")
    request.addfinalizer(lambda: let_go(workload))
    told = told_and_unchanged(case, workload, gpu=None)
    assert told.based_on == "GPU, not run"
    without = told_without_a_gpu(case)
    for size in sizes_for(told):
        truth = measured(workload, size)
        assert told.peak_bytes_at(size) == pytest.approx(truth, rel=case.exactly)
        if not case.uncounted:
            assert without.peak_bytes_at(size) == pytest.approx(truth, rel=case.exactly + 0.01)
    assert not left_behind(held_by(workload))


def told_without_a_gpu(case: Case) -> batchfit.Prediction:
    seeded()
    workload = case.make("cpu")
    told = told_and_unchanged(case, workload, gpu="h200")
    assert told.based_on == "no GPU"
    let_go(workload)
    return told


def told_and_unchanged(case: Case, workload: batchfit.Workload, *, gpu: str | None) -> batchfit.Prediction:
    before = frozen(held_by(workload))
    with limited(LIMIT_S):
        told = predicted(case, workload, gpu=gpu)
    after = held_by(workload)
    assert not left_behind(after)
    assert not differences(before, frozen(after))
    return told


@pytest.mark.parametrize("case", cases("refused"))
def test_a_loop_that_decides_by_its_data_is_refused(case: Case) -> None:
    workload = case.make("cuda")
    before = frozen(held_by(workload))
    with pytest.raises(UntraceableError, match=r"gallery_\w+\.py:\d+"):
        predicted(case, workload, gpu=None)
    gc.collect()
    after = held_by(workload)
    assert not left_behind(after)
    assert not differences(before, frozen(after))
    workload.step(4)
    torch.cuda.synchronize()
