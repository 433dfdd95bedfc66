"""The command line under torchrun, and the example of DDP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from child_path import CHILD_PATH

gloo = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo: torch.distributed without it"
)
SUPPORT = Path(__file__).parents[2] / "support"


def torchrun(*args: str, how: str = "oom") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BATCHFIT_TEST_HOW": how, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), CHILD_PATH])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, *args], capture_output=True, text=True, timeout=100, env=environment, cwd=SUPPORT
    )


FIND = ("-m", "batchfit", "find", "child_targets.py:make", "--strategy=bisect", "--max-size=4", "--steps=2")


@gloo
@pytest.mark.parametrize("more", [(), pytest.param(("--isolate",), marks=pytest.mark.slow)])
def test_the_command_under_torchrun_says_everything_once(more: tuple[str, ...], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = torchrun(
        *FIND, "--soak-steps=0", "--budget=1GiB", "--no-store", "--json", f"--output={found}", *more
    )
    assert done.returncode == 0, done.stderr
    fit = json.loads(done.stdout)
    assert fit["batch_size"] == 2
    assert json.loads(found.read_text()) == fit
    lines = [line for line in done.stderr.splitlines() if line.startswith("trial ")]
    assert len(lines) == len(fit["trials"])


@gloo
@pytest.mark.slow
def test_the_command_under_torchrun_fails_alike_on_all_ranks() -> None:
    done = torchrun(*FIND, "--soak-steps=0", "--budget=1GiB", "--no-store", how="raises")
    assert done.returncode != 0
    assert "rank 1: error: " in done.stderr
    assert "no such column" in done.stderr
    codes = set(re.findall(r"exitcode  : (-?[0-9]+)", done.stderr))
    assert "4" in codes, done.stderr[-3000:]
    assert codes <= {"4", "-15", "143"}, "torchrun ends the others as soon as one has failed"


@gloo
@pytest.mark.slow
def test_the_example_finds_one_size_for_both_ranks() -> None:
    example = SUPPORT.parents[1] / "examples" / "find_ddp.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) <= 100
    done = torchrun(str(example))
    assert done.returncode == 0, done.stderr
    told = re.findall(r"a local batch of (\d+), a batch of (\d+)", done.stdout)
    assert len(told) == 1
    local, whole = map(int, told[0])
    assert whole == 2 * local > 2
