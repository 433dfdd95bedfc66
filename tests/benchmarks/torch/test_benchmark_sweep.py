"""The benchmark of sweeps, as far as a CPU can run it: its rows, its processes, its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import imported, run


@pytest.fixture
def sweep_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("sweep_gpu", monkeypatch)


@pytest.mark.slow
def test_smoke_and_a_second_call_finds_all_of_it_there(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("accelerate", reason="needs accelerate")
    out = tmp_path / "smoke.json"
    assert "truth/8: after guided, grow, accelerate" in run(
        "sweep_gpu", "run", "--smoke", "--out", str(out), "--rows", "truth/8"
    )
    assert "0 rows left" in run("sweep_gpu", "run", "--smoke", "--out", str(out))
    found = json.loads(out.read_text())
    for prompt in ("8", "32"):
        true, ours = found[f"truth/{prompt}"], found[f"guided/{prompt}"]
        assert ours["ooms"] == ours["measure_retries"] == 0
        assert 0.95 * true["fits"] - 1 <= ours["size"] <= true["fits"]
    assert str(tmp_path) not in out.read_text()
    assert run("sweep_gpu", "run", "--smoke", "--out", str(out)) == "0 rows left\n"
    assert "| 32 | " in run("sweep_gpu", "page", str(out))


def test_the_bracket_is_what_the_sweeps_have_shown(sweep_gpu: ModuleType) -> None:
    def row(*sizes: tuple[int, bool]) -> dict[str, object]:
        return {"sizes": [list(one) for one in sizes]}

    results = {
        "guided/512": row((1, True), (40, True)),
        "grow/512": row((64, False), (42, True), (50, False)),
        "accelerate/512": row((64, False), (30, True)),
    }
    assert sweep_gpu.bracket(results, "512") == (42, 50)
    results["grow/512"] = row((64, False), (42, True), (50, True), (50, False))
    assert sweep_gpu.bracket(results, "512") == (42, 50), "it ran out once"
    results["grow/512"] = results["accelerate/512"] = row((30, True))
    assert sweep_gpu.bracket(results, "512") == (40, None)


def test_the_page_says_what_the_runs_say(sweep_gpu: ModuleType) -> None:
    def ran(size: int, *sizes: int) -> dict[str, object]:
        tried = [[one, one <= size] for one in sizes]
        return {"size": size, "sizes": tried, "ooms": sum(one > size for one in sizes), "find_s": 2.0}

    told = {
        "device": "GPU", "torch": "2", "transformers": "5", "python": "3", "command": "c",
        "prompts": [128, 512], "new_tokens": 256, "budget": "24GiB", "batch_size": 64,
    }  # fmt: skip
    page = sweep_gpu.page(
        {
            "about": told,
            "guided/128": {**ran(64, 1, 64), "tokens_per_s": 1000.0, "measure_retries": 0},
            "guided/512": {**ran(49, 1, 48, 49), "tokens_per_s": 500.0, "measure_retries": 0},
            "grow/128": ran(64, 64),
            "grow/512": ran(32, 64, 32),
            "accelerate/512": {"error": "Traceback\nImportError: none"},
            "truth/512": {"fits": 50, "does_not": 51},
        }
    )
    assert "| 128 | - | 64, -, 2, 0, 2.0 | 64, -, 1, 0, 2.0 | not run |" in page
    assert "| 512 | 50 (not 51) | 49, 98.0%, 3, 0, 2.0 | 32, 64.0%, 2, 1, 2.0 | ImportError: none |" in page
    assert "| all | | 5 sizes, 0 OOMs, 4 s | 3 sizes, 1 OOMs, 4 s | - |" in page
    assert "by prompt: 128: 1000, 512: 500; 0 OOMs." in page
