"""predict_batch_size on several ranks: each traces alone, and all have one answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchfit
from batchfit.errors import BatchfitError

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
UNEQUAL = """
import os
import torch
from torch import nn
import batchfit

def make():
    length = 64 * (1 + int(os.environ["RANK"]))
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_batch = lambda n: torch.randn(n, length, 32)
    return batchfit.training(model, optimizer, lambda m, x: m(x).square().mean(), make_batch)
"""


def workload(length: int, *, wrapped: bool = False) -> batchfit.Workload:
    model: nn.Module = nn.Linear(32, 32)
    if wrapped:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return batchfit.training(
        model, optimizer, lambda m, x: m(x).square().mean(), lambda n: torch.zeros(n, length, 32)
    )


def told(act: Any) -> list[Any]:
    try:
        return ["value", act()]
    except (BatchfitError, ValueError) as error:
        return [type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])]


def predictions(rank: int) -> Any:
    """Rank 1 has samples twice as long; then ones of which none fits, or a step that cannot be traced."""
    own = batchfit.predict_batch_size
    budgets = ["256MiB", "1GiB"]

    def broken(n: int) -> None:
        raise RuntimeError("no such column")

    work, nothing = workload(64 * (1 + rank)), workload(64 if rank == 0 else 1 << 20)
    untraceable = batchfit.Workload(broken, state=[]) if rank == 1 else work
    return {
        "both": told(lambda: own(work, budget=budgets).to_json()),
        "nothing": told(lambda: own(nothing, budget="256MiB").batch_size),
        "untraceable": told(lambda: own(untraceable, budget="256MiB").batch_size),
        "wrapped": told(lambda: own(workload(64, wrapped=True), budget="256MiB").batch_size),
        "budgets": told(lambda: own(work, budget=budgets[: 1 + rank]).batch_size),
        "argument": told(lambda: own(work, budget="256MiB", margin=2.0 if rank == 1 else 0.1).batch_size),
        "after": told(lambda: own(work, budget="256MiB").batch_size),
    }


@gloo
def test_all_ranks_have_the_answer_of_the_one_on_which_the_fewest_fit() -> None:
    outcomes = run_ranks(predictions, world_size=2, timeout_s=90)
    assert [outcome.error for outcome in outcomes] == [None, None], outcomes[0].trace + outcomes[1].trace
    first, second = (outcome.value for outcome in outcomes)
    assert first["both"] == second["both"]
    found = batchfit.Prediction.from_json(first["both"][1])
    long = batchfit.predict_batch_size(workload(128), budget=["256MiB", "1GiB"])
    assert found.answers == long.answers
    assert found.batch_size == long.batch_size
    assert found.batch_size < batchfit.predict_batch_size(workload(64), budget="256MiB").batch_size
    for one in (first, second):
        assert one["nothing"][0] == "NothingFitsError"
        assert "predicted on rank 1" in one["nothing"][1]
        assert one["wrapped"][0] == "UntraceableError"
        assert one["budgets"][0] == "RanksDisagreeError"
        assert one["after"] == ["value", found.batch_size]
    assert first["untraceable"][0] == "RankFailedError"
    assert "rank 1 raised" in first["untraceable"][1]
    assert second["untraceable"][0] != "RankFailedError"
    assert second["argument"][0] == "ValueError"
    assert first["argument"][0] == "RankFailedError", "no rank waits for one that was called wrongly"
    assert "margin must be" in first["argument"][1]


@gloo
@pytest.mark.slow
def test_the_command_prints_the_answer_of_all_ranks_once(tmp_path: Path) -> None:
    (tmp_path / "unequal.py").write_text(UNEQUAL)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "batchfit", "predict", f"{tmp_path / 'unequal.py'}:make", "--budget", "256MiB", "--json"]
    done = subprocess.run(
        [sys.executable, *launcher, *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "BATCHFIT_CACHE": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["batch_size"] == batchfit.predict_batch_size(workload(128), budget="256MiB").batch_size
