"""The benchmark of profiles, as far as a CPU can run it: its rows, its processes, its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import imported, run


@pytest.fixture
def profile_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("profile_gpu", monkeypatch)


@pytest.mark.slow
def test_smoke_and_a_second_call_finds_all_of_it_there(tmp_path: Path) -> None:
    out = tmp_path / "smoke.json"
    smoke = ("run", "--smoke", "--out", str(out), "--rows", "tiny/24MiB/sweep", "tiny/24MiB/ours/1")
    assert "0 rows left" in run("profile_gpu", *smoke)
    found = json.loads(out.read_text())
    swept, ours = found["tiny/24MiB/sweep"], found["tiny/24MiB/ours/1"]
    assert [point["size"] for point in swept["points"]] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert ours["recommended"] in {point["size"] for point in ours["points"]}
    assert str(tmp_path) not in out.read_text()
    assert run("profile_gpu", *smoke) == "0 rows left\n"
    assert "| tiny | 24MiB |" in run("profile_gpu", "page", str(out))


def test_the_page_says_what_the_runs_say(profile_gpu: ModuleType) -> None:
    swept = {
        "points": [{"size": 8, "samples_per_s": 90.0}, {"size": 16, "samples_per_s": 100.0}],
        "best": 16,
        "elapsed_s": 60.0,
    }
    ours = {
        "points": [{"size": 8, "samples_per_s": 97.0}],
        "recommended": 8,
        "elapsed_s": 15.0,
        "diagnosis": [{"kind": "compute-bound"}],
    }
    results = {
        "about": dict.fromkeys(("device", "torch", "python", "command"), "x"),
        "gpt2/24GiB/sweep": swept,
        "gpt2/24GiB/ours/1": ours,
        "gpt2/24GiB/ours/2": {"error": "Traceback\nRuntimeError: no"},
    }
    text = profile_gpu.page(results)
    assert "| GPT-2 small | 24GiB | 16, 100, 60 s | 8 | 90.0% | 25% | 1 | compute-bound |" in text
    assert "gpt2/24GiB/ours/2: RuntimeError: no" in text


def test_there_are_three_models_two_caps_and_three_repeats(profile_gpu: ModuleType) -> None:
    rows = profile_gpu.rows(smoke=False)
    assert len(rows) == 3 * 2 * 4
    assert "resnet50/uncapped/ours/3" in rows
