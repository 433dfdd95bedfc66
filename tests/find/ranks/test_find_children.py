"""find_batch_size(isolate=True) on several ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import child_targets
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks

import batchfit
from batchfit._engine.torch_private import fsdp2

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
runs_fsdp2 = pytest.mark.skipif(
    not (fsdp2.runs_on_cpu() and fsdp2.can_reset()),
    reason=f"FSDP2 of torch {torch.__version__} cannot run on a CPU, or cannot be reset",
)


def apart(rank: int, how: str, timeout_s: float | None) -> Any:
    os.environ["BATCHFIT_TEST_HOW"] = how
    try:
        fit = batchfit.find_batch_size(
            child_targets.make,
            isolate=True,
            budget="1GiB",
            strategy="bisect",
            max_size=4,
            steps=2,
            soak_steps=0,
            timeout_s=timeout_s,
        )
        told = [fit.batch_size, fit.to_json()]
    except Exception as error:  # noqa: BLE001
        told = [type(error).__name__, str(error)]
    dist.barrier()  # whatever happened to the children, the group of the ranks is whole
    assert Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text() == "", "a child is left"
    return told


@gloo
@pytest.mark.parametrize(
    ("how", "timeout_s"),
    [
        ("oom", None),
        ("killed", None),
        pytest.param("hangs", 8.0, marks=pytest.mark.slow),
        pytest.param("fsdp2", None, marks=[pytest.mark.slow, runs_fsdp2]),
    ],
)
@pytest.mark.slow
def test_what_happens_to_one_child_is_everyones_outcome(how: str, timeout_s: float | None) -> None:
    outcomes = run_ranks(apart, world_size=2, args=(how, timeout_s), timeout_s=200)
    for outcome in outcomes:
        assert outcome.error is None, outcome.trace
        assert outcome.value[0] == 2, outcome.value[1]
    assert outcomes[0].value == outcomes[1].value
    trials = batchfit.FitResult.from_json(outcomes[0].value[1]).trials
    failed = {trial.outcome for trial in trials if not trial.fits}
    assert failed == {{"oom": "oom", "killed": "killed", "hangs": "timeout", "fsdp2": "oom"}[how]}


@gloo
@pytest.mark.parametrize("how", ["raises", pytest.param("load", marks=pytest.mark.slow)])
def test_an_error_in_one_child_is_reported_on_all_ranks(how: str) -> None:
    main, failed = (
        outcome.value for outcome in run_ranks(apart, world_size=2, args=(how, None), timeout_s=120)
    )
    assert (failed[0], main[0]) == ("ValueError", "RankMissingError")
    assert "no such column" in main[1]
