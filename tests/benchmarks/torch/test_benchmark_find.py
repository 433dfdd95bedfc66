"""The benchmark of finders, as far as a CPU can run it: its finders, its processes, its page."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import imported, run

import batchfit

LEAVES_BYTES = 2**22  # toma remembers what it ran

PACKAGES = {
    "accelerate": "accelerate",
    "lightning_power": "lightning.pytorch",
    "lightning_binsearch": "lightning.pytorch",
    "toma": "toma",
    "torch_max_mem": "torch_max_mem",
    "batch_finder": "batch_finder",
}


@pytest.fixture
def find_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("find_gpu", monkeypatch)


@pytest.fixture
def peers(find_gpu: ModuleType) -> ModuleType:
    import peers

    return peers


@pytest.mark.slow
def test_smoke_runs_finders_soaks_and_long_runs_and_a_second_call_finds_all_of_it_there(
    tmp_path: Path, find_gpu: ModuleType
) -> None:
    out = tmp_path / "smoke.json"
    smoke = ("run", "--smoke", "--finders", "batchfit", "bisection", "--out", str(out))
    assert "0 runs left" in run("find_gpu", *smoke)
    first = json.loads(out.read_text())
    [case] = first["cases"].values()
    ours, exact = case["find"]["batchfit"], case["find"]["bisection"]
    assert ours["answer"] <= exact["answer"] <= ours["answer"] * 1.03 + 1
    assert ours["ooms"] == 0 < exact["ooms"] < len(exact["sizes"])
    # Virtual memory has no fragments: what fits for three steps lasts, and the next size fails.
    assert {int(size) for size in case["survive"]} == {ours["answer"], exact["answer"]}
    assert all(one["survived"] == one["of"] for one in case["survive"].values())
    assert case["truth"]["sustained"] <= exact["answer"] < case["truth"]["fails"]
    assert str(tmp_path) not in out.read_text()
    run("find_gpu", *smoke)
    assert json.loads(out.read_text())["cases"] == first["cases"]
    assert f"| bisection | {exact['answer']} | 100.0% | yes |" in find_gpu.page(first)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of the peers
@pytest.mark.parametrize("name", PACKAGES)
def test_a_peer_answers_with_a_size_that_ran(name: str, find_gpu: ModuleType, peers: ModuleType) -> None:
    pytest.importorskip(PACKAGES[name])
    cap = round(find_gpu.TINY_GIB * 2**30)
    with batchfit.virtual_memory(cap):
        program = peers.Program(find_gpu.tiny(), cap_bytes=cap)
        answer = peers.FINDERS[name].prepare(program)()
    assert answer in program.sizes or name == "lightning_binsearch"  # takes off 5 % in the end
    assert len(set(program.sizes)) == len(program.sizes) > program.ooms > 0


def sample() -> dict[str, Any]:
    """Ours is right, bisection too high, one peer slow, one found nothing, one could not be imported."""

    def found(answer: int | None, seconds: float, ooms: int, sizes: list[int]) -> dict[str, Any]:
        one = {"answer": answer, "seconds": seconds, "ooms": ooms, "sizes": sizes}
        return {**one, "reason": "" if answer else "MemoryError: not even 1", "version": "1.2", "trials": []}

    def ran(survived: int, late: int | None = 0) -> dict[str, Any]:
        return {
            "survived": survived,
            "of": 200,
            "retries": 3,
            "settled_retries": late,
            "seconds": 9,
            "message": "",
        }

    soaks = [{"size": 556, "outcome": "oom", "verdict": "oom, step 7"}]
    case = {
        "find": {
            "batchfit_predict": found(545, 6.0, 0, [9, 545, 545]),
            "batchfit": found(540, 8.0, 0, [1, 5, 40, 300, 540]),
            "bisection": found(562, 4.0, 6, list(range(543, 563))),
            "lightning_binsearch": found(530, 7.0, 5, [2, 4, 530]),
            "accelerate": found(128, 0.5, 0, [128]),
            "torch_max_mem": found(None, 1.0, 13, [4096, 2048]),
            "toma": {"error": "exit 1: ModuleNotFoundError: No module named 'toma'"},
        },
        "survive": {"545": ran(200), "562": ran(37, None)},
        "truth": {"sustained": 545, "fails": 556, "soaks": soaks},
    }
    about = {"device": "a card", "torch": "2.11", "python": "3.12", "cuda": "13", "allocator": "default"}
    calls = [{"command": "python benchmarks/find_gpu.py run", "seconds": 500.0}]
    return {"about": about, "calls": calls, "cases": {"resnet50/24": case}}


def test_page_says_what_the_run_says(
    find_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(sample()))
    told = ["find_gpu.py", "page", str(tmp_path / "run.json"), "--to", str(tmp_path / "kept.json")]
    monkeypatch.setattr(sys, "argv", told)
    find_gpu.main()
    assert json.loads((tmp_path / "kept.json").read_text()) == sample()
    text = (tmp_path / "kept.md").read_text()
    for line in (
        # The fastest peer within 5 % is Lightning: bisection was faster, and its answer dies.
        "| batchfit_predict | 545 | 100.0% | yes | 2 | 0 | 6.0 | 0.86 |",
        "| bisection | 562 | 103.1% | **dies at step 38** | 20 | 6 | 4.0 | 0.57 |",
        "| lightning_binsearch | 530 | 97.2% | not run, 545 does | 3 | 5 | 7.0 | 1.00 |",
        "| torch_max_mem | none | - | - | 2 | 13 | 1.0 | 0.14 |",
        "| toma | none | - | - | - | - | - | - |",
        "torch_max_mem: MemoryError: not even 1",
        "toma: exit 1: ModuleNotFoundError: No module named 'toma'",
        "Sustained maximum 545. Soaks of the bracket, in order: 556 oom, step 7.",
        "| resnet50/24 | batchfit_predict | 100.0% | 0 | 2 | 0.86 | yes | yes |",
        "| resnet50/24 | batchfit | 99.1% | 0 | 5, **missed** | 1.14, **missed** | not run, 545 does | no |",
        "- lightning_binsearch (lightning 1.2): ",
    ):
        assert line in text, line


def test_a_long_run_between_the_bracket_raises_the_maximum_unless_it_retries(find_gpu: ModuleType) -> None:
    case = sample()["cases"]["resnet50/24"]
    case["survive"]["550"] = {"survived": 200, "of": 200, "settled_retries": 0}
    assert find_gpu.sustained(case) == 550
    case["survive"]["550"]["settled_retries"] = 1
    assert find_gpu.sustained(case) == 545
    case["survive"]["560"] = {"survived": 200, "of": 200, "settled_retries": 0}
    assert find_gpu.sustained(case) == 545  # 556 has failed
    assert find_gpu.sustained({**case, "truth": None}) is None
    case["survive"]["545"]["survived"] = 199  # our own answer dies: then nothing is known
    assert find_gpu.sustained(case) is None


def test_what_a_soak_of_the_bracket_kills_does_not_last(find_gpu: ModuleType) -> None:
    case = sample()["cases"]["resnet50/24"]
    case["survive"] = {"545": case["survive"]["545"]}
    assert find_gpu.lasts(case, 555) == (None, "not run")
    assert find_gpu.lasts(case, 556) == (False, "not run, 556 dies in a soak of 25")


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (545, (True, "yes")),
        (540, (True, "not run, 545 does")),
        (550, (None, "not run")),  # between one that lasts and one that dies nobody knows
        (562, (False, "**dies at step 38**")),
        (600, (False, "not run, 562 dies")),
    ],
)
def test_a_size_that_was_not_run_is_named_by_others_only_where_they_can(
    size: int, expected: tuple[bool | None, str], find_gpu: ModuleType
) -> None:
    assert find_gpu.lasts(sample()["cases"]["resnet50/24"], size) == expected


def test_only_what_is_missing_or_broke_is_run_again(find_gpu: ModuleType) -> None:
    results = sample()
    pairs = [("resnet50", 24), ("resnet50", 80)]
    jobs = find_gpu.timed_jobs(results, pairs, ["batchfit", "toma", "accelerate_4096"])
    wanted = [("batchfit", 80), ("toma", 24), ("accelerate_4096", 24)]  # peers at the common cap only
    assert [(job["finder"], job["cap_gib"]) for job in jobs] == wanted
    rounds = [[job["size"] for job in one] for one in find_gpu.untimed_jobs(results, pairs)]
    assert rounds == [[], []]  # those below ours are as good as told
    bare = copy.deepcopy(results)
    bare["cases"]["resnet50/24"].update(survive={}, truth=None)
    rounds = [[(job["kind"], job["size"]) for job in one] for one in find_gpu.untimed_jobs(bare, pairs)]
    assert rounds[0] == [("bracket", 545), ("survive", 545)]
    assert rounds[1] == [("survive", 562)]
