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
    Case,
    cleaned,
    differences,
    frozen,
    held_by,
    left_behind,
    predicted,
    rows_of,
    seeded,
)

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
def test_the_predicted_peak_of_a_loop_is_the_measured_one(case: Case) -> None:
    """Only figures come here: what a test that fails would keep alive is counted in those after it."""
    rows = list(rows_of(case))
    assert len(rows) == 2
    for row in rows:
        wrong = {
            key: value
            for key, value in row.items()
            if key.startswith(("error", "left", "changed", "refused")) and value
        }
        if case.uncounted:
            wrong.pop("refused_cpu", None)
        assert not wrong
        assert abs(row["off_gpu"]) < case.exactly
        assert case.uncounted or abs(row["off_cpu"]) < case.exactly + 0.01


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
