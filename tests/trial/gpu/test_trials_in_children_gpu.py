"""Isolated trials on a real CUDA device: a poisoned context is an outcome, and memory comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import gpu_targets
import pytest
import torch

import batchfit

pytestmark = pytest.mark.gpu

MIB = 2**20
QUICK: dict[str, Any] = {"isolate": True, "budget": "2GiB", "steps": 2, "soak_steps": 0}


@pytest.mark.parametrize(
    ("factory", "outcome", "timeout_s"),
    [(gpu_targets.poisoned_above_16, "killed", 120), (gpu_targets.hung_above_16, "timeout", 20)],
)
def test_the_search_goes_on_after_a_dead_or_hung_device(
    factory: Callable[[], batchfit.Workload], outcome: str, timeout_s: float
) -> None:
    fit = batchfit.find_batch_size(factory, strategy="halve", start=32, timeout_s=timeout_s, **QUICK)
    assert [(trial.size, trial.outcome) for trial in fit.trials] == [(32, outcome), (16, "fits")]
    assert float(torch.ones(4, device="cuda").sum()) == 4  # this process' own context is alive


def test_the_answer_is_that_of_a_search_in_this_process_and_memory_is_back() -> None:
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    apart = batchfit.find_batch_size(gpu_targets.small_net, isolate=True, budget="2GiB")
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] < free - 64 * MIB:
        assert time.monotonic() < deadline, "the memory of a child is still taken"
        time.sleep(0.05)
    # Nothing is predicted for a child, and a search that begins with a prediction ends up to 3 % higher.
    here = batchfit.find_batch_size(gpu_targets.small_net(), budget="2GiB", predict=False)
    assert apart.device == here.device
    assert apart.sustained
    assert abs(apart.batch_size - here.batch_size) <= 0.03 * here.batch_size
