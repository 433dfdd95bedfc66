"""`torchrun -m batchfit sweep`: each configuration over all ranks, one file, and nobody waits without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child_path import CHILD_PATH

from batchfit import SweepResult

TARGETS = Path(__file__).parents[2] / "support"
TOGETHER = {
    "factory": "sweep_targets:on_one_rank_only",
    "measure": "sweep_targets:measured_together",
    "batch_size": 8,
    "budget": "16MiB",
    "steps": 2,
    "soak_steps": 0,
}


def torchrun(folder: Path, asked: dict[str, Any], *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "sweep.json").write_text(json.dumps(asked))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{CHILD_PATH}:{TARGETS}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, *launcher, sys.executable, "-m", "batchfit", "sweep", "sweep.json", *more]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def kept(folder: Path) -> SweepResult:
    return SweepResult.from_json((folder / "sweep-results.json").read_text())


@pytest.mark.slow
def test_all_ranks_agree_and_one_that_fails_alone_holds_nobody_up(tmp_path: Path) -> None:
    """Rank 1 has room for one sample less; its factory raises while rank 0 waits in a collective."""
    knobs = [{"number": 5, "where": where} for where in ("nowhere", "factory", "smaller")]
    done = torchrun(tmp_path, {**TOGETHER, "knobs": knobs})
    fine, broken, smaller = kept(tmp_path).records
    assert (fine.batch_size_used, fine.measures) == (4, {"rank": 0, "size": 4})
    assert (broken.error, broken.failed_in) == ("ValueError: only on this rank (on rank 1)", "factory")
    assert (smaller.batch_size_used, smaller.measure_sizes) == (3, (4, 3))
    assert done.stdout.count("3 of 3 configurations in") == 1  # rank 0 alone speaks
    assert done.stderr.count("Testing number=5, where=smaller") == 1


@pytest.mark.slow
def test_a_rank_that_fails_alone_in_a_step_or_a_measurement_or_dies(tmp_path: Path) -> None:
    knobs = [{"number": 5, "where": where} for where in ("step", "measure", "death", "nowhere")]
    torchrun(tmp_path, {**TOGETHER, "knobs": knobs})
    step, measure, death, fine = kept(tmp_path).records
    assert step.error is not None
    assert (step.error.startswith("KeyError: 'only in this step'"), step.failed_in) == (True, "search")
    assert measure.error == "ZeroDivisionError: only in this measurement (on rank 1)"
    assert death.error is not None
    assert death.error.startswith("ChildDiedError: the process that ran it on rank 1 was killed (SIGKILL")
    assert (fine.batch_size_used, fine.error) == (4, None)
    again = torchrun(tmp_path, {**TOGETHER, "knobs": knobs})
    assert again.stderr.count("sweep-results.json is there already") == 1
    done = torchrun(tmp_path, {**TOGETHER, "knobs": knobs}, "--resume")
    assert "Testing" not in done.stderr
    assert len(kept(tmp_path).records) == 4
