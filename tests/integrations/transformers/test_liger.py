"""Liger's kernels under `adapt`, on a CPU in Triton's interpreter; skipped where one of them is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = ("torch", "transformers", "trl", "liger_kernel", "triton")
MISSING = [name for name in NEEDS if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]
CASES = Path(__file__).parents[2] / "support" / "liger_cases.py"


@pytest.mark.parametrize("name", ["Trainer", "SFT"])
def test_a_cut_batch_has_the_gradients_of_the_whole(name: str) -> None:
    """In float32, as its kernels compute; rows are ragged, the batch is odd."""
    paths = [str(CASES.parent), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, str(CASES), name], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["replaced"]
    assert found["differs"]
    assert found["from plain"] < 1e-5
    assert found["off"] < 1e-5
