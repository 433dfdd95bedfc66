"""The benchmarks of microbatches, as far as a CPU can run them: their parts, their processes, their pages."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import imported, run

LEAVES_BYTES = 2**18  # toma remembers what it ran


@pytest.fixture
def microbatch_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("microbatch_gpu", monkeypatch)


@pytest.mark.slow
def test_smoke_under_a_cap_and_a_second_call_finds_all_of_it_there(
    tmp_path: Path, microbatch_gpu: ModuleType
) -> None:
    out = tmp_path / "smoke.json"
    smoke = ("run", "--smoke", "--out", str(out), "--parts", "curve/free", "curve/ours")
    assert "0 parts left" in run("microbatch_gpu", *smoke)
    first = json.loads(out.read_text())
    free, ours = first["curve/free"], first["curve/ours"]
    assert free["steps_made"] == ours["steps_made"] == 40
    assert ours["split"] > 0
    assert ours["cap_bytes"] < max(free["peaks"])
    assert microbatch_gpu.largest_difference(ours["losses"], free["losses"]) < 1e-5
    assert str(tmp_path) not in out.read_text()
    assert run("microbatch_gpu", *smoke) == "0 parts left\n"
    assert "| curve/ours | 40 of 40 |" in run("microbatch_gpu", "page", str(out))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["overhead/eager, 32", "overhead/compiled"])
def test_smoke_of_the_overhead(tmp_path: Path, part: str) -> None:
    out = tmp_path / "smoke.json"
    assert "0 parts left" in run("microbatch_gpu", "run", "--smoke", "--out", str(out), "--parts", part)
    assert len(json.loads(out.read_text())[part]["pairs_s"]) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the peers
@pytest.mark.parametrize("way", ["ours", "toma", "torch_max_mem"])
def test_a_peer_runs_every_batch_under_the_cap(way: str, microbatch_gpu: ModuleType) -> None:
    if way != "ours":
        pytest.importorskip(way)
    free = microbatch_gpu.curve("free", 12, None, True)
    cap = microbatch_gpu.cap_of({"curve/free": free})
    found = microbatch_gpu.curve(way, 12, cap, True)
    assert (found["steps_made"], found["failed"]) == (12, "")


@pytest.mark.slow
def test_ragged_smoke_runs_ours(tmp_path: Path) -> None:
    out = tmp_path / "ragged.json"
    smoke = ("run", "--smoke", "--out", str(out), "--ways", "by_hand", "ours", "--flags", "default")
    assert "0 rows left" in run("ragged_gpu", *smoke)
    ours = json.loads(out.read_text())["ours/default"]
    assert (ours["cold"]["lost_steps"], ours["warm"]["lost_steps"]) == (0, 0)
    run("ragged_gpu", "page", str(out), "--to", str(tmp_path / "page.md"))
    assert "| ours | default |" in (tmp_path / "page.md").read_text()


def sample() -> dict[str, Any]:
    overhead = {
        "pairs_s": [[0.2, 0.202], [0.2, 0.201], [0.2, 0.203]],
        "by_hand_twice_s": [[0.2, 0.2], [0.2, 0.201]],
        "host_us": {"by_hand": 90_000.0, "ours": 90_450.0},
    }

    def curve(losses: list[float], **more: Any) -> dict[str, Any]:
        made = {"losses": losses, "steps_made": len(losses), "of": 4, "split": 1, "retried": 1}
        return {**made, "seconds": 2.0, "failed": "", "cap_bytes": 100, **more}

    about = dict.fromkeys(
        ("device", "torch", "python", "command", "transformers", "toma", "torch-max-mem"), "x"
    )
    mib = 2**20
    return {
        "about": about,
        "overhead/eager": overhead,
        "overhead/compiled": {"error": "Traceback\nRuntimeError: no compiler"},
        "curve/free": curve([4.0, 3.0, 2.0, 1.0], peaks=[10 * mib, 20 * mib, 30 * mib, 40 * mib]),
        "curve/ours": curve([4.0, 3.0, 2.0, 1.001]),
        "peer/toma": curve([4.0, 3.3], failed="step 2: RuntimeError: cuda"),
    }


def test_the_page_says_what_the_run_says(microbatch_gpu: ModuleType) -> None:
    text = microbatch_gpu.page(sample())
    for line in (
        "| eager | 8 | 200.0 ms | 202.0 ms | 1.0100 (1.0050 to 1.0150) |",
        "| 450 us |",
        "| compiled | failed: RuntimeError: no compiler |",
        "the cap of 32 MiB 1 of 4 full batches have no room",
        "| curve/ours | 4 of 4 | 1 | 1 | 2.0 | 1.0e-03 |",
        "| peer/toma | 2 of 4 | 1 | 1 | 2.0 | 1.0e-01 |",
        "peer/toma: step 2: RuntimeError: cuda",
    ):
        assert line in text, line


def test_the_cap_is_what_one_batch_in_ten_exceeds(microbatch_gpu: ModuleType) -> None:
    peaks = list(range(1000, 2000))
    cap = microbatch_gpu.cap_of({"curve/free": {"peaks": peaks}})
    assert cap == round(1899 * microbatch_gpu.RESTS)
