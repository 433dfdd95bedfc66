"""The soak: a short one here, and that what it counts would be told."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import FOLDER, imported


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported("soak", monkeypatch)


@pytest.mark.parametrize("seed", [6, 36])  # tight and failing; a size set by hand, and a restart
@pytest.mark.slow
def test_a_program_ends_as_the_plain_loop(seed: int, soak: Any, recwarn: pytest.WarningsRecorder) -> None:
    row = soak.run_program(soak.Program.of(seed))
    clean = dict.fromkeys(("tensor_bytes", "tensors", "files", "threads", "processes"), 1)
    assert soak.faults({"base": clean, "end": clean, "rows": [row]}) == []
    assert row["training_steps"] > 10
    assert row["cut"] > 0


def test_what_must_be_zero_is_reported(soak: Any) -> None:
    kept = json.loads((FOLDER / "results" / "soak_cpu_202611.json").read_text())
    assert soak.faults(kept) == []
    assert sum(row["steps"] for row in kept["rows"]) >= 10_000
    spoilt = copy.deepcopy(kept)
    spoilt["end"]["files"] += 1
    first, second, third, fourth = spoilt["rows"][:4]
    first["find_changed_state"], second["difference"] = True, 1e-6
    third["wrong_epochs"], fourth["training_steps"] = 1, fourth["by_hand_steps"] - 1
    told = soak.faults(spoilt)
    assert len(told) == 5
    assert told[0].startswith("files: ")
    assert told[1] == "seed 0: find changed the state"


@pytest.mark.slow
def test_a_short_soak_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, str(FOLDER / "soak.py"), "run", "--steps", "1200", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "| threads more than after the first 6 programs | 0 |" in done.stdout
