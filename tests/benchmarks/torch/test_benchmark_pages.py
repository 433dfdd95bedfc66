"""Every committed page of a benchmark is what its script makes of its JSON: no figure is written by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest
from benchmark_scripts import imported

# Measured before runs kept their JSON; the next run of the benchmark replaces it.
WITHOUT_JSON = {"find_h200_202611.md"}


@pytest.fixture
def pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("pages", monkeypatch)


def test_each_page_says_what_its_json_says(pages: ModuleType) -> None:
    pytest.importorskip("transformers", reason="needs transformers")
    found = {page.name: text for page, text in pages.wrong(pages.RESULTS)}
    assert {name for name, text in found.items() if text is None} <= WITHOUT_JSON
    differ = [name for name, text in found.items() if text is not None]
    assert not differ, f"{differ}: run python benchmarks/pages.py write"


def test_truths_beside_the_peers_are_those_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = imported("plan_peers", monkeypatch)
    kept = json.loads((peers.RESULTS / "plan_peers_202611.json").read_text())["cases"]
    assert {case.name: peers.truth_of(case) for case in peers.CASES} == {
        name: one["truth"] for name, one in kept.items()
    }
    # Of several answers the one that is nearest to the truth counts.
    said = [{"peak_bytes": 5}, {"peak_bytes": 9}, {"way": "states only"}]
    assert peers.nearest(said, "peak_bytes", 8) == {"peak_bytes": 9}
    assert peers.nearest(said[2:], "peak_bytes", 8) is None


def test_a_page_that_was_changed_by_hand_is_reported_and_made_again(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "import_time_cpu_202611"
    (tmp_path / f"{name}.json").write_text((pages.RESULTS / f"{name}.json").read_text())
    right = (pages.RESULTS / f"{name}.md").read_text()
    page = tmp_path / f"{name}.md"
    page.write_text(right.replace("1.22", "1.02"))
    [(told, text)] = pages.wrong(tmp_path)
    assert (told, text) == (page, right)
    (tmp_path / "soak_cpu_202611.md").write_text("no JSON")
    assert dict(pages.wrong(tmp_path))[tmp_path / "soak_cpu_202611.md"] is None

    def call(command: str) -> int:
        monkeypatch.setattr("sys.argv", ["pages.py", command, "--results", str(tmp_path)])
        try:
            pages.main()
        except SystemExit as ended:
            return int(str(ended.code or 0))
        return 0

    (tmp_path / "soak_cpu_202611.md").unlink()
    assert call("check") == 1
    assert "is not what its JSON says" in capsys.readouterr().out
    assert call("write") == call("check") == 0
    assert page.read_text() == right
    (tmp_path / "unheard_of_cpu_202611.md").write_text("")
    with pytest.raises(ValueError, match="PAGES must name the script of unheard_of"):
        list(pages.wrong(tmp_path))


def test_a_picture_is_drawn_and_linked_only_beside_a_file(
    pages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"a": 1}))
    drawn: list[Path] = []

    def draw(found: dict[str, int], to: Path) -> None:
        drawn.append(to)
        to.write_text("<svg/>")

    given = argparse.Namespace(results=tmp_path / "run.json", to=None)
    pages.write_page(given, lambda found: f"# A title\n\n{found['a']}\n", draw)
    assert capsys.readouterr().out == "# A title\n\n1\n"
    assert drawn == []
    given.to = tmp_path / "page.md"
    pages.write_page(given, lambda found: f"# A title\n\n{found['a']}\n", draw)
    assert drawn == [tmp_path / "page.svg"]
    assert given.to.read_text() == "# A title\n\n1\n\n![A title](page.svg)\n"


@pytest.mark.slow
def test_the_loader_is_measured_case_by_case_and_goes_on_where_it_was(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import loader

    out = tmp_path / "loader.json"
    cases = [loader.Case(name, (8,), 4, 6, 30, 0.001) for name in ("a", "b")]
    monkeypatch.setattr(loader, "WORKERS", 1)

    def run(rounds: int = 1, deadline_s: float = 60.0) -> str:
        loader.run(argparse.Namespace(out=out, rounds=rounds, deadline_s=deadline_s))
        return capsys.readouterr().out.splitlines()[-1]

    monkeypatch.setattr(loader, "CASES", cases[:1])
    assert run() == "0 rows left"
    first = json.loads(out.read_text())["cases"][0]
    monkeypatch.setattr(loader, "CASES", cases)
    assert run(deadline_s=-1) == "1 rows left"
    assert run() == "0 rows left"
    found = json.loads(out.read_text())
    assert [one["name"] for one in found["cases"]] == ["a", "b"]
    assert found["cases"][0] == first
    assert "| b | 4, 6 (" in loader.page(found)
    assert run(rounds=2, deadline_s=-1) == "2 rows left"  # medians of other rounds are not mixed in


def test_each_picture_shows_its_figures(
    pages: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    import plots

    for name in ("search_simulated", "prediction_h200_202611", "ragged_h200_202611"):
        (tmp_path / f"{name}.json").write_bytes((pages.RESULTS / f"{name}.json").read_bytes())
    swept = {"points": [{"size": size, "samples_per_s": 7.0 * size} for size in (1, 2, 4)]}
    ours = {"points": swept["points"][1:], "recommended": 4}
    profile = {"about": {}, "vit/24GiB/sweep": swept, "vit/24GiB/ours/1": ours, "gpt2/24GiB/sweep": swept}
    (tmp_path / "profile_h200_202611.json").write_text(json.dumps(profile))
    found = {
        "batchfit": {"answer": 31, "seconds": 4.2, "ooms": 0},
        "bisection": {"answer": 33, "seconds": 5.6, "ooms": 2},
        "toma": {"answer": None, "seconds": 1.0, "ooms": 9},
        "accelerate": {"error": "exit 1"},
    }
    ran = {"survived": 200, "of": 200, "settled_retries": 0}
    case = {"find": found, "survive": {"31": ran}, "truth": {"sustained": 31, "fails": 32}}
    (tmp_path / "find_h200_202611.json").write_text(json.dumps({"cases": {"gpt2/24": case}}))
    plots.write(tmp_path)
    assert plots.stale(tmp_path) == []
    drawn = {plot.subject: plot.file(tmp_path).read_text() for plot in plots.PLOTS}
    for subject, told in {
        "search": ("Accelerate", "batchfit", "3.9"),
        "find": ("GPT-2 small, 24 GiB", "33: 5.6 s, 2 OOMs", "31: 4.2 s<", "none: 1.0 s, 9 OOMs"),
        "prediction": ("calibrated", "within one sample"),
        "profile": ("ViT-B/16, 24 GiB", "GPT-2 small, 24 GiB", "recommended"),
        "ragged": ("packed by hand", "101k cold", "98k cold"),
    }.items():
        for words in told:
            assert words in drawn[subject], (subject, words)
    assert drawn["find"].count(" OOM") == 2, "what could not be run has said nothing"
    first = drawn["ragged"]
    plots.write(tmp_path)
    assert plots.PLOTS[-1].file(tmp_path).read_text() == first  # the same figures, the same file
