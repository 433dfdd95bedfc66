"""The golden record, its quick part: answers are those that `benchmarks/golden.py write` kept.

In a process of its own: what other tests leave live would count in the plans of the Microbatcher.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import need

FOLDER = Path(__file__).parents[1] / "benchmarks"
RECORD = FOLDER / "results" / "golden.json.gz"
need("benchmarks", present=RECORD.exists())  # they are not in the distribution
need("transformers", present=importlib.util.find_spec("transformers") is not None)


def test_the_quick_part_of_the_golden_record() -> None:
    made_with = json.loads(gzip.decompress(RECORD.read_bytes()))["made_with"]
    here = {name: importlib.metadata.version(name) for name in made_with}
    if here != made_with:
        pytest.skip(f"the record was made with {made_with}, and here are {here}")
    command = [sys.executable, str(FOLDER / "golden.py"), "check", "--quick"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"^(\d+) answers, 0 differences$", done.stdout, re.MULTILINE)
    assert counted is not None, done.stdout
    assert int(counted[1]) >= 880
