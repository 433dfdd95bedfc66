"""The benchmark of Trainers, as far as a CPU can run it: its rows, its processes, its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import imported, run


@pytest.fixture
def integrations_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("integrations_gpu", monkeypatch)


@pytest.mark.slow
def test_smoke_and_a_second_call_finds_all_of_it_there(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    pytest.importorskip("transformers", reason="needs transformers")
    out = tmp_path / "smoke.json"
    rows = ("lightning/ours/find", "lightning/plain/too_large", "lightning/ours/too_large")
    for _ in range(2):
        told = run("integrations_gpu", "run", "--smoke", "--out", str(out), "--rows", *rows)
        assert told.endswith("0 rows left\n")
    found = json.loads(out.read_text())
    assert found[rows[0]]["batch_size"] > 128
    assert found[rows[0]]["batches"] == 6 == found[rows[2]]["batches"]
    assert found[rows[1]]["batches"] == 0
    assert "out of memory" in found[rows[1]]["died"]
    assert found[rows[2]]["retries"] >= 1
    assert str(tmp_path) not in out.read_text()


def test_the_page_says_what_the_runs_say(integrations_gpu: ModuleType) -> None:
    row = {
        "batch_size": 44,
        "find_s": 8.25,
        "batches": 30,
        "samples_per_s": 101.0,
        "peak_gib": 23.1,
        "died": "",
    }
    results = {
        "about": {
            "device": "card",
            "cap": "24 GiB",
            "torch": "2",
            "python": "3",
            "command": "c",
            "frameworks": {"lightning": "2.6"},
        },
        "lightning/ours/find": {**row, "trials": 5},
        "lightning/plain/too_large": {**row, "batches": 0, "samples_per_s": None, "died": "no memory"},
        "lightning/ours/too_large": {**row, "batch_size": 512, "retries": 2},
        "lightning/ours/fits": {"error": "first\nlast"},
    }
    text = integrations_gpu.page(results)
    assert "| batchfit's BatchSizeFinder | 44 | 8.2 s (5 trials) | 101.0 | 23.1 GiB | 30 |" in text
    assert "| - | 23.1 GiB | 0, then: no memory |" in text
    assert "| 512 | 8.2 s | 101.0 | 23.1 GiB | 30, 2 retries |" in text
    assert "lightning/ours/fits: last" in text
    assert "lightning 2.6" in text
