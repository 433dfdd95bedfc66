"""The summary of the benchmarks: README and docs say what the committed JSON says, and no more."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not (FOLDER / "summary.py").exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(FOLDER))
    import summary

    yield summary
    for name in (
        "summary",
        "brief",
        "hero",
        "goals",
        "plots",
        "floors",
        "turns",
        "pages",
        "rows",
        "find_gpu",
        "ranks_gpu",
    ):
        sys.modules.pop(name, None)


def test_readme_and_docs_say_what_the_results_say(summary: ModuleType) -> None:
    for page, text in summary.pages(ROOT).items():
        told = "run python benchmarks/summary.py write"
        assert page.read_text(encoding="utf-8") == text, f"{page.name} disagrees with the JSON: {told}"
    assert 1 <= len(list(summary.rows(FOLDER / "results"))) <= 5
    stale = summary.plots.stale(FOLDER / "results")
    assert not stale, f"{stale} are of other figures: run python benchmarks/plots.py write"


def found(answer: int | None, seconds: float, ooms: int, sizes: list[int]) -> dict[str, Any]:
    return {"answer": answer, "seconds": seconds, "ooms": ooms, "sizes": sizes}


def planted(folder: Path) -> Path:
    """Results of all five subjects, with an older month of one that must not count."""
    run = {"survived": 200, "of": 200, "settled_retries": 0}
    trials = [{"steps_run": steps, "soak": steps > 3} for steps in (3, 3, 12)]
    case = {
        "find": {
            "batchfit_predict": {**found(31, 4.2, 0, [9, 31, 31]), "trials": trials},
            "accelerate": found(28, 4.98, 13, [128, 28]),
            "bisection": found(33, 5.6, 2, [33]),
            "toma": found(None, 1.0, 9, [512]),
            "torch_max_mem": {"error": "exit 1"},
        },
        "survive": {"31": run, "33": {**run, "survived": 7}},
        "truth": {"sustained": 31, "fails": 32},
    }
    about = {"device": "NVIDIA H200"}

    def curve(trials: float, name: str = "x", unsafe: float = 0.0) -> dict[str, Any]:
        return {"name": name, "trials_mean": trials, "ooms_mean": 0.25, "share_of_max_mean": 0.985,
                "unsafe": unsafe, "trials_max": 2 * trials}  # fmt: skip

    def phase(speed: float, lost: int) -> dict[str, Any]:
        return {"tokens_per_s": speed, "lost_steps": lost}

    kept: dict[str, Any] = {
        "find_h200_202611": {"about": about, "cases": {"gpt2/24": case}},
        "find_h200_202509": {"about": about, "cases": {}},
        "prediction_h200_202611": {
            "truth": {
                "a/bf16/24": {"sustained": 100},
                "b/bf16/24": {"sustained": 4},
                "c/bf16/24": {"sustained": 50},
                "c@short/bf16/24": {"sustained": 50},
                "d/bf16/24": {"error": "no"},
            },
            "none": {
                "a/bf16/24": {"raw": 97},
                "b/bf16/24": {"raw": 5},  # 25 %, and one sample
                "c/bf16/24": {"raw": 50},
                "c@short/bf16/24": {"raw": 10},
                "d/bf16/24": {"raw": 1},
            },
            "calibrated": {"a/bf16/24": {"error": "no"}},
        },
        "microbatch_h200_202611": {
            "about": about,
            "overhead/eager": {"pairs_s": [[0.2, 0.201], [0.2, 0.202], [0.2, 0.2]]},
            "overhead/compiled": {"error": "no compiler"},
            "overhead/compiled, 32": {"pairs_s": [[0.4, 0.4], [0.4, 0.4]]},
        },
        "ragged_h200_202611": {
            "about": {"gpu": "NVIDIA H200"},
            "ours/default": {"cold": phase(96_400, 0), "warm": phase(121_000, 0)},
            "fixed_8/default": {"cold": phase(14_000, 0), "warm": phase(48_000, 1)},
            "by_hand/default": {"error": "no"},
            "ours/no_cudnn_attention": {"cold": phase(98_000, 0), "warm": phase(122_000, 0)},
            "fixed_8/no_cudnn_attention": {"cold": phase(46_000, 0), "warm": phase(47_000, 0)},
        },
        "search_simulated": {
            "maxima": [1, 2, 3],
            "groups": {
                "default": [curve(4.0), curve(5.0)],
                "default, held known": [curve(4.0)],
                "exact": [curve(6.0), curve(7.0)],
                "exact, held known": [curve(7.2)],
                "beside": [curve(11.0, "NeMo OOMptimizer [port]", 0.07), curve(2.0, "Accelerate 1, start 8")],
            },
        },
    }
    for name, content in kept.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "find_h200_202611.md").write_text("")
    return folder


def test_each_row_says_what_was_measured(summary: ModuleType, tmp_path: Path) -> None:
    rows = list(summary.rows(planted(tmp_path)))
    assert [(row.ours, row.others) for row in rows] == [
        (
            "**31** of 31 that last, 0 OOMs, 2 sizes tried, 4.2 s with its stability check of 12 steps",
            "bisection 33, and dies later (2 OOMs, 5.6 s); Accelerate 28 (13 OOMs, 5.0 s); toma finds none",
        ),
        (
            "no GPU 3.0%, 3.0% (3 cases)",
            "xMem publishes 3.6 % of the memory (median); nobody an error of the size",
        ),
        (
            "compiled, microbatches of 32: +0.0% (95 % interval +0.0% to +0.0%); "
            "eager, microbatches of 8: +0.5% (95 % interval +0.0% to +1.0%)",
            "a loop by hand: 0 %, and it dies when a batch does not fit",
        ),
        (
            "**96k cold, 121k warm** (cuDNN's attention off: 98k cold, 122k warm)",
            "fixed microbatch of 8 14k cold, 48k warm, 1 steps lost "
            "(cuDNN's attention off: 46k cold, 47k warm)",
        ),
        (
            "**4.5 trials, 0.2 OOMs, 98.5% of the maximum**; exact in 6.5 trials",
            "NeMo (port) 11.0 trials, 0.2 OOMs, 98.5% of the maximum, 7% of the answers too large",
        ),
    ]
    assert [row.page for row in rows[:2]] == ["find_h200_202611.md", "prediction_h200_202611.json"]


def test_what_was_not_measured_has_no_row(summary: ModuleType, tmp_path: Path) -> None:
    planted(tmp_path)
    for name, content in (
        ("find_h200_202611", {"cases": {"gpt2/24": {"find": {"accelerate": found(28, 1, 1, [28])}}}}),
        ("prediction_h200_202611", {"truth": {"a/bf16/24": {"error": "no"}}, "none": {}}),
        ("microbatch_h200_202611", {"curve/free": {}}),
        ("ragged_h200_202611", {"fixed_8/default": {}}),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    assert [row.what.split()[0] for row in summary.rows(tmp_path)] == ["search"]
    (tmp_path / "search_simulated.json").unlink()
    assert list(summary.rows(tmp_path)) == []


def test_a_page_that_says_something_else_is_named_and_corrected(
    summary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "project").mkdir(parents=True)
    planted(tmp_path / "benchmarks" / "results")
    empty = f"before\n{summary.BEGIN}\n{summary.END}\nafter\n"
    readme, docs = tmp_path / "README.md", tmp_path / "docs" / "project" / "benchmarks.md"
    goals = docs.with_name("goals.md")
    readme.write_text(empty)
    for page in set(summary.PAGES.values()):
        blocks = [summary.PARTS[name] for name, there in summary.PAGES.items() if there == page]
        text = "".join(f"{begin}\n{end}\n" for begin, end in blocks)
        docs.with_name(page).write_text((empty if page == docs.name else "") + text)

    def call(command: str) -> int:
        monkeypatch.setattr(sys, "argv", ["summary.py", command, "--root", str(tmp_path)])
        try:
            summary.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    assert call("check") == 1
    assert "README.md and benchmarks.md and goals.md and" in capsys.readouterr().out
    assert call("write") == 0
    assert call("check") == 1  # no picture is drawn yet
    assert "plot_find.svg, plot_prediction.svg" in capsys.readouterr().out
    results = tmp_path / "benchmarks" / "results"
    for plot, kept, _ in summary.plots.wanted(results):
        plot.file(results).write_text(f"<svg/>{summary.plots.digest(kept)}")
    assert call("check") == 0
    assert 'plot_ragged.svg" width="900" alt="Tokens per second' in docs.read_text()
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert (
        "| [OOMs in those 1 searches](benchmarks/results/find_h200_202611.md) | **0** | 2 (double, then"
        in text
    )
    assert "| **96k** | 14k (microbatches of 8) |" in text
    assert "| goal |" in docs.read_text()
    readme.write_text(text.replace("**96k**", "**95k**"))
    assert call("check") == 1
    assert call("write") == 0
    goals.write_text(
        goals.read_text().replace("| loader with 4 workers | all | **not measured** | | |\n", "")
    )
    assert call("check") == 1  # a row of the goals was taken out
    assert "goals.md: not what the JSON says" in capsys.readouterr().out
    readme.write_text("no comments")
    with pytest.raises(ValueError, match="once, in this order"):
        call("check")


def test_every_row_of_the_design_is_measured_or_named_as_missing(summary: ModuleType, tmp_path: Path) -> None:
    goals = summary.goals
    assert [goal.what for goal, _ in goals.measured(tmp_path) if not goal.only_missed] == [
        "GPT-2 small: find",
        "ResNet-50: find",
        "400 maxima, simulated",
        "prediction",
        "microbatching",
        "ragged lengths",
        "loader with 4 workers",
        "any program",
    ]
    assert goals.table(tmp_path, links="").count("**not measured**") == 8
    planted(tmp_path)
    ragged = json.loads((tmp_path / "ragged_h200_202611.json").read_text())
    ragged["ours/default"]["warm"]["lost_steps"] = 1
    (tmp_path / "ragged_h200_202611.json").write_text(json.dumps(ragged))
    found = {goal.what: {one.name: one.met for one in checks} for goal, checks in goals.measured(tmp_path)}
    assert found["GPT-2 small: find"] == {
        "of the maximum": True,
        "OOMs": True,
        "sizes tried": True,
        "seconds to the fastest peer": None,  # none within 5 % whose answer lasts
        "200 steps": True,
    }
    assert found["ResNet-50: find"] == found["loader with 4 workers"] == {}
    assert found["400 maxima, simulated"]["exact, mean of all curves"] is True
    assert found["400 maxima, simulated"]["exact, every curve"] is False
    assert found["prediction"] == {
        "size, calibrated": None,
        "size, GPU there, not run": None,
        "size, no GPU": True,
        "no OOM as a cap, no GPU": True,
    }
    both = {"compiled, microbatches of 32": True, "eager, microbatches of 8": True}
    assert found["microbatching"] == both
    assert found["ragged lengths"] == {"tokens/s, cold": True, "tokens/s, warm": True, "lost steps": False}
    with pytest.raises(ValueError, match=r"must say why .'ragged lengths', 'lost steps'. was missed"):
        goals.table(tmp_path, links="")


def test_what_other_cases_miss_is_a_row_and_what_they_meet_is_none(summary: ModuleType) -> None:
    table = summary.goals.table(ROOT / "benchmarks" / "results", links="")
    for row in ("T5-small: find", "T5-small: find, no prediction", "ResNet-50, 80 GiB: find, no prediction"):
        shown = [line for line in table.splitlines() if line.startswith(f"| [{row}](")]
        assert len(shown) == 1
        assert shown[0].endswith("| **no** |")


@pytest.mark.parametrize(
    ("low", "high", "met"), [(0.97, 1.0, True), (0.98, 1.04, None), (1.02, 1.03, False), (1.0, 1.01, True)]
)
def test_a_ratio_is_met_or_missed_only_where_its_interval_says_so(
    low: float, high: float, met: bool | None, summary: ModuleType
) -> None:
    assert summary.goals.by_interval("x", (low + high) / 2, low, high).met is met


def test_a_picture_is_reported_that_is_missing_old_or_of_nothing(summary: ModuleType, tmp_path: Path) -> None:
    plots = summary.plots
    planted(tmp_path)
    names = ["plot_find.svg", "plot_prediction.svg", "plot_ragged.svg", "plot_search.svg"]
    assert plots.stale(tmp_path) == names  # of a profile there is nothing to draw
    for plot, kept, _ in plots.wanted(tmp_path):
        plot.file(tmp_path).write_text(plots.digest(kept))
    assert plots.stale(tmp_path) == []
    (tmp_path / "plot_profile.svg").write_text("")
    newer = (tmp_path / "ragged_h200_202611.json").read_text().replace("96400", "96500")
    (tmp_path / "ragged_h200_202612.json").write_text(newer)
    assert plots.stale(tmp_path) == ["plot_profile.svg", "plot_ragged.svg"]
    (tmp_path / "profile_h200_202612.json").write_text(json.dumps({"about": {}}))  # no sweep in it yet
    assert plots.stale(tmp_path) == ["plot_profile.svg", "plot_ragged.svg"]


def test_both_ways_over_ranks_are_reported_beside_ddp(summary: ModuleType) -> None:
    names = {"ddp": 1.0, "late": 1.2, "safe": 1.2, "overlap": 1.005}
    rounds = {name: [times] * 9 for name, times in names.items()}
    part = {"seconds": rounds, "vote_s": [0.1], "in_votes_s": {name: [0.0] for name in names}}
    checks = summary.goals.microbatch_checks({}, {"about": {}, "many": part})
    assert [(one.name, one.met) for one in checks] == [
        ("DDP, sync=overlap, many microbatches", True),
        ("DDP, sync=safe, many microbatches", False),
    ]


def test_a_loader_that_stalls_is_reported(summary: ModuleType) -> None:
    def case(planned: float, larger: float) -> dict[str, Any]:
        waits = {"no change": 0.01, "planned": planned, "set, larger": larger, "set, smaller": 0.01}
        changes = {way: [[wait, 0.0]] for way, wait in {**waits, "re-created": 1.0}.items()}
        steady = {"cpu_ms_a_batch": {"dataloader": [1.0], "ours": [1.02]}}
        return {"name": "n", "steady": steady, "changes": changes, "making_s": 0.02}

    def met(**waits: float) -> list[bool | None]:
        return [one.met for one in summary.goals.loader_checks({"cases": [case(**waits)]})]

    assert met(planned=0.02, larger=0.09) == [True, True, True]
    assert met(planned=0.05, larger=0.09) == [True, False, True]
    assert met(planned=0.02, larger=0.11) == [True, True, False]


def test_floors_and_growth_follow_their_json(summary: ModuleType, tmp_path: Path) -> None:
    assert summary.floors.own_time(tmp_path) == summary.floors.growth(tmp_path) == []
    for subject in ("own_cost_cpu", "cost_cpu", "import_time_cpu", "growth_cpu"):
        name = f"{subject}_202611.json"
        (tmp_path / name).write_bytes((FOLDER / "results" / name).read_bytes())
    before = summary.floors.own_time(tmp_path) + summary.floors.growth(tmp_path)
    cost = json.loads((tmp_path / "cost_cpu_202611.json").read_text())
    cost["microbatch"]["cpu_ms"] |= {"step, tiny, by hand": 8.0, "step, tiny, ours": 24.0}
    (tmp_path / "cost_cpu_202612.json").write_text(json.dumps(cost))  # a later month counts
    grown = json.loads((tmp_path / "growth_cpu_202611.json").read_text())
    grown["votes"]["4"]["vote"] = 0.0777
    (tmp_path / "growth_cpu_202611.json").write_text(json.dumps(grown))
    after = summary.floors.own_time(tmp_path) + summary.floors.growth(tmp_path)
    changed = [line for line, old in zip(after, before, strict=True) if line != old]
    assert len(changed) == 2
    assert "where it takes 1.0 ms | 2.0 ms per microbatch" in changed[0]
    assert changed[1].startswith("- A vote of 4 ranks takes 77.7 ms")


def test_answers_of_programs_count_as_their_workloads_within_one_or_by_exact_searches(
    summary: ModuleType, tmp_path: Path
) -> None:
    def row(by_command: int, as_workload: int, **more: object) -> dict[str, object]:
        return {"by_command": {"answer": by_command}, "as_workload": {"answer": as_workload}, **more}

    ways = {"batchfit": {"starts": 6}, "batchfit --strategy bisect": {"starts": 12}, "Accelerate": {}}
    found = {
        "programs": {"one": row(30, 31), "two": row(653, 647, exact=[656, 656]), "three": row(383, 381)},
        "step": {"ratio": {"probe": 1.02}},
        "start": {"more_ms": {"import torch": 27.0}},
        "search": {"ways": ways},
    }
    checks = summary.goals.program_checks(found)
    assert [one.met for one in checks] == [False, False, True, True]
    assert [one.measured for one in checks] == [
        "2 of 3 as their workloads", "+2.00%", "0.03 s", "6, bisection 12"
    ]  # fmt: skip
