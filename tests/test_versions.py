"""The page of tested versions says what is stored, and reports of pytest are read as they are meant."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import environments
import versions
import versions_page

ROOT = Path(__file__).parent.parent
REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" time="61.4">
<testcase classname="tests.a" name="test_one"/>
<testcase classname="tests.a" name="test_two[x]">
  <failure message="AttributeError: no such&#10;more"/>
  <error message="left open"/>
</testcase>
<testcase classname="" name="tests.c"><error message="collection failure"/></testcase>
<testcase classname="" name="tests.b">
  <skipped message="Skipped: could not import 'torchtune': No module named 'torchtune'"/>
</testcase>
<testcase classname="tests.a" name="test_gpu"><skipped message="needs gpu"/></testcase>
<testcase classname="tests.a" name="test_gpu_2"><skipped message="needs gpu"/></testcase>
</testsuite></testsuites>
"""
READ = {
    "passed": 1,
    "failed": [
        {"test": "tests.a::test_two[x]", "why": "AttributeError: no such"},
        {"test": "tests.c", "why": "collection failure"},
    ],
    "skipped": {"needs gpu": 2, "needs torchtune": 1},
}
DOCTOR = {
    "versions": {"python": "3.11.7", "torch": "2.11.0+cu130", "typer": "0.29.0"},
    "extras": {"numpy": "2.4.6", "ray": None},
    "features": [
        {"name": "trials", "state": "works", "detail": ""},
        {"name": "trials on an NVIDIA or AMD GPU", "state": "not here", "detail": "built without"},
        {
            "name": "a retry",
            "state": "not here",
            "detail": "needs torch 2.13 or later, and this is 2.11.0+cu130: x",
        },
    ],
}


def result(torch: str, **more: object) -> versions.Results:
    part = {"passed": 2, "failed": [], "skipped": {"needs gpu": 3}, "seconds": 60, **more}
    return {
        "torch": torch,
        "date": "2026-11-18",
        "python": "3.11.7",
        "source": "0123456789",
        "machine": "2 cores, no GPU",
        "libraries": {"transformers": "5.23.0"},
        "limits": [],
        "parts": {"pure": part, "torch": part},
    }


def test_the_page_is_what_the_stored_results_give() -> None:
    if versions.stored():
        assert versions.PAGE.read_text(encoding="utf-8") == versions_page.page(versions.stored())
    else:
        assert not versions.PAGE.exists()


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert versions.read(report) == READ


def test_every_skip_and_every_failure_is_on_the_page() -> None:
    failed = [{"test": "tests.a::test_two", "why": "a < b | c"}]
    found = {"2.6": result("2.6.0"), "2.15": result("2.15.0", failed=failed, skipped={"needs torchtune": 4})}
    page = versions_page.page(found)
    assert "| 2.6 | 4 | 0 | 6 | nothing |" in page
    assert "| 2.15 | 4 | 2 | 8 | nothing |" in page
    assert "| needs gpu | 6 |  |" in page
    assert "| FSDP2 of that torch has none | 2 | 2 |" in versions_page.page(
        {
            name: result(name, skipped={f"FSDP2 of torch {name} has none": 1})
            for name in ("2.6.0", "2.8.0+cpu")
        }
    )
    assert "| needs torchtune |  | 8 |" in page
    assert page.count(r"- `tests.a::test_two`: a \< b \| c") == 2
    assert "Failed with torch 2.15" in page
    assert "Failed with torch 2.6" not in page


def test_what_is_refused_has_one_line_with_its_versions() -> None:
    limits = [
        [
            {
                "name": "a retry",
                "state": "not here",
                "detail": f"needs torch 2.13 or later, and this is {torch}: x",
            }
        ]
        for torch in ("2.6.0", "2.8.0+cu126")
    ]
    found = {"2.6": result("2.6.0"), "2.8": result("2.8.0+cu126")}
    for one, there in zip(found.values(), limits, strict=True):
        one["limits"] = there
    page = versions_page.page(found)
    assert "| a retry | 2.6, 2.8 | refused | needs torch 2.13 or later: x |" in page
    assert "| 2.6 | 4 | 0 | 6 | 1 refused |" in page


def test_a_version_with_a_result_is_run_again_only_when_it_is_named(tmp_path: Path) -> None:
    store = tmp_path / "versions.json"
    assert [row.name for row in versions.chosen([], versions.stored(store))] == [
        row.name for row in versions.ROWS
    ]
    versions.store("2.15", result("2.15.0"), store)
    found = versions.store("2.6", result("2.6.0"), store)
    assert list(found) == ["2.6", "2.15"]
    assert {"2.6", "2.15"}.isdisjoint(row.name for row in versions.chosen([], found))
    assert [row.name for row in versions.chosen(["2.15"], found)] == ["2.15"]
    assert len(versions.chosen([], found, again=True)) == len(versions.ROWS)
    with pytest.raises(SystemExit, match=r"--torch must be one of 2\.6, .*, not 2\.3"):
        versions.chosen(["2.3"], found)


def test_the_parts_of_a_run_that_was_cut_off_are_stored_and_the_others_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "FOLDER", tmp_path)
    monkeypatch.setattr(versions, "doctor", lambda *_: DOCTOR)
    monkeypatch.setattr(versions, "installed", lambda _: {"peft": "0.21.2"})
    row = versions.ROWS[2]
    with pytest.raises(SystemExit, match=rf"has ended with torch {re.escape(row.name)}:"):
        versions.ended(row)
    parts = {name: READ | {"seconds": 60} for name in ("pure", "torch, a to l")}
    (tmp_path / row.name).mkdir()
    (tmp_path / row.name / "parts.json").write_text(json.dumps({"source": "abc", "parts": parts}))
    found = {row.name: versions.ended(row)}
    assert (found[row.name]["source"], found[row.name]["parts"]) == ("abc", parts)
    assert "**not run: ranks, integrations, torch, m to z**" in versions_page.page(found)
    assert row in versions.chosen([], found)


def test_the_parts_are_all_of_make_test() -> None:
    """Every file of tests is in one part, the pure ones with torch blocked."""
    parts = versions.parts(ROOT)
    assert tuple(parts) == versions_page.PARTS
    every = {path.relative_to(ROOT) for path in ROOT.glob("tests/**/test_*.py")}
    seen: list[Path] = []
    for asked in parts.values():
        folders = [Path(one) for one in asked if not one.startswith("--")]
        left_out = {one.removeprefix("--ignore-glob=*/") for one in asked if one.startswith("--")}
        inside = [path for path in every for folder in folders if path.is_relative_to(folder)]
        seen += [path for path in inside if not left_out & set(path.parts)]
    assert sorted(seen) == sorted(every)
    assert all("pure" in Path(one).parts for one in parts["pure"])


def test_a_test_of_a_report_can_be_run_again(tmp_path: Path) -> None:
    (tmp_path / "tests" / "find").mkdir(parents=True)
    (tmp_path / "tests" / "find" / "test_a.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('x', ['1.5', 'a::b'])\ndef test_x(x): assert 0\n"
        "class TestOf:\n    def test_y(self): assert 0\n",
        encoding="utf-8",
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    command += ["--rootdir", str(tmp_path)]
    quiet = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "env": dict(os.environ), "timeout": 120}
    subprocess.run([*command, "tests"], **quiet)  # type: ignore[call-overload]
    failed = versions.read(report)["failed"]
    assert len(failed) == 3
    report.unlink()
    subprocess.run([*command, *(versions.address(one["test"], tmp_path) for one in failed)], **quiet)  # type: ignore[call-overload]
    assert versions.read(report)["failed"] == failed
    assert versions.address("tests.find.test_a", tmp_path) == str(Path("tests/find/test_a.py"))
    with pytest.raises(SystemExit, match="not among the tests of this commit"):
        versions.address("tests.find.test_gone::test_x", tmp_path)


def test_tests_that_were_run_again_are_counted_once() -> None:
    failed = [{"test": "tests.a::test_two", "why": "x"}, {"test": "tests.a::test_three", "why": "y"}]
    before = result("2.15.0", failed=failed)
    about = {"source": "abcdef", "date": "2026-11-19", "limits": [], "libraries": {"transformers": "5.23.0"}}
    again = {"passed": 1, "failed": [], "skipped": {"needs gpu": 1}, "seconds": 5}
    after = versions.run_again(before, about, {"torch": again})
    assert after["source"] == "0123456789"
    assert after["again"] == [{"source": "abcdef", "date": "2026-11-19", "tests": 2}]
    assert after["parts"]["pure"] == before["parts"]["pure"]
    assert after["parts"]["torch"] == {"passed": 3, "failed": [], "skipped": {"needs gpu": 4}, "seconds": 65}
    assert "0123456789; 2 again at abcdef |" in versions_page.page({"2.15": after})
    after = versions.run_again(before, about, {"torch": again}, ["tests/a.py::test_two"])
    assert "2 again at abcdef, 1 of them no longer there" in versions_page.page({"2.15": after})


def test_tests_that_changed_since_are_counted_apart(tmp_path: Path) -> None:
    before = result("2.15.0")
    about = {"source": "abcdef", "date": "2026-11-20", "limits": [], "libraries": {"transformers": "5.23.0"}}
    failed = [{"test": "tests.why.test_why::test_one", "why": "x"}]
    done = {"torch": {"passed": 40, "failed": failed, "skipped": {"needs trl": 7}, "seconds": 120}}
    every = {"pure": ["tests/why/pure/test_a.py"], "torch": ["tests/why/test_b.py", "tests/test_c.py"]}
    asked = versions.within(every, ["tests/why"])
    assert asked == {"pure": ["tests/why/pure/test_a.py"], "torch": ["tests/why/test_b.py"]}
    assert versions.within(every, []) == every
    assert versions.within(every, ["tests/test_c.py"]) == {"torch": ["tests/test_c.py"]}
    after = versions.run_changed(before, about, done, asked=asked, every=every)
    assert (after["source"], after["parts"]) == (before["source"], before["parts"])
    page = versions_page.page({"2.15": after})
    assert "| 2.15 | 4 | 0 | 6 | nothing |" in page
    assert "| 2.15, changed | 40 | 1 | 7 | 2 of 3 files of tests that are new or changed since |" in page
    assert "| 2.15.0 | 2026-11-18 | 0123456789 | 3.11.7 | 2 cores, no GPU | 2 min |" in page
    assert "| 2.15.0, changed | 2026-11-20 | abcdef | 3.11.7 | 2 cores, no GPU | 2 min |" in page
    assert "| needs trl |  | 7 |" in page
    assert "Failed with torch 2.15, changed" in page
    # What failed there is run again as other failed tests are, and stays apart.
    part = {"passed": 1, "failed": [], "skipped": {}, "seconds": 5}
    again = versions.run_again(after, about, {"changed: torch": part})
    assert again["again"] == [{"source": "abcdef", "date": "2026-11-20", "tests": 1}]
    assert again["parts"] == before["parts"]
    assert again["changed"]["parts"]["torch"]["passed"] == 41
    assert again["changed"]["source"] == "abcdef"
    assert "| 2.15, changed | 41 | 0 | 7 |" in versions_page.page({"2.15": again})


def test_a_failed_test_is_run_in_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n")
    monkeypatch.setattr(versions, "gone", lambda *_, **__: [])
    part = {"passed": 1, "failed": [{"test": "test_a::test_one", "why": "x"}], "skipped": {}, "seconds": 1}
    before = result("2.15.0") | {"changed": {"files": 1, "parts": {"pure": part, "torch": part}}}
    asked: list[tuple[list[str], bool]] = []

    def run(tests: list[str], *, pure: bool) -> versions.Results:
        asked.append((tests, pure))
        return versions.NOTHING | {"passed": 1}

    known = versions.parts_of(before)
    done, left_out = versions.run_failed(run, known, venv=tmp_path, source=tmp_path)
    assert asked == [(["test_a.py::test_one"], True), (["test_a.py::test_one"], False)]
    assert (list(done), left_out) == (["changed: pure", "changed: torch"], [])


def test_what_changed_since_a_commit_is_asked_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com"]

    def commit() -> str:
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-qm", "x"], check=True)
        said = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
        return said.stdout.strip()

    subprocess.run([*git, "init", "-q"], check=True)
    for name in (
        "tests/why/pure/test_a.py",
        "tests/why/test_b.py",
        "tests/why/test_same.py",
        "tests/help.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n")
    first = commit()
    for name in ("tests/why/pure/test_a.py", "tests/test_new.py", "tests/help.py"):
        (tmp_path / name).write_text("2\n")
    (tmp_path / "tests" / "why" / "test_b.py").unlink()
    commit()
    assert versions.changed_since(first) == {
        "pure": ["tests/why/pure/test_a.py"],
        "torch": ["tests/test_new.py"],
    }
    with pytest.raises(SystemExit, match="--changed needs a stored result of a commit that is here"):
        versions.changed_since("0123456789")


def test_a_failed_test_that_a_later_commit_lacks_is_known(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n")
    (tmp_path / "test_b.py").write_text("import none_such\n")
    asked = ["test_a.py::test_one", "test_a.py::test_two", "test_a.py", "test_b.py::test_one", "test_b.py"]
    found = versions.gone(asked, pure=False, venv=Path(sys.executable).parents[1], source=tmp_path)
    assert found == ["test_a.py::test_two"]


def test_a_run_that_was_cut_off_goes_on_with_the_next_part(tmp_path: Path) -> None:
    begun, asked = tmp_path / "parts.json", {"pure": ["a"], "ranks": ["b"], "torch": ["c"]}
    ran: list[str] = []

    def run(tests: list[str], *, pure: bool) -> versions.Results:
        ran.extend(tests)
        if ran == ["a", "b"]:
            raise KeyboardInterrupt
        return {"passed": 1, "failed": [], "skipped": {}, "seconds": 1, "was_pure": pure}

    with pytest.raises(KeyboardInterrupt):
        versions.run_parts(run, asked, commit="one", begun=begun)
    done = versions.run_parts(run, asked, commit="one", begun=begun)
    assert ran == ["a", "b", "b", "c"]
    assert [part["was_pure"] for part in done.values()] == [True, False, False]
    versions.run_parts(run, asked, commit="another", begun=begun)
    assert ran == ["a", "b", "b", "c", "a", "b", "c"]


def test_a_report_from_another_machine_is_a_row_that_names_it(tmp_path: Path) -> None:
    report, said = tmp_path / "torch.xml", tmp_path / "doctor.json"
    report.write_text(REPORT, encoding="utf-8")
    said.write_text(json.dumps(DOCTOR), encoding="utf-8")
    found = versions.from_elsewhere([report], DOCTOR, commit="abc", machine="one H200", date="2026-11-18")
    assert found["parts"] == {"torch": {**READ, "seconds": 61}}
    assert found["libraries"] == {"typer": "0.29.0", "numpy": "2.4.6"}
    assert [one["name"] for one in found["limits"]] == ["a retry"]
    page = versions_page.page({"2.11": found})
    assert "| 2.11.0+cu130 | 2026-11-18 | abc | 3.11.7 | one H200 | 1 min |" in page


def test_the_oldest_and_the_newest_of_each_library_are_in_it() -> None:
    newest, oldest = versions.ROWS[-1], versions.ROWS[0]
    assert not newest.libraries
    stated = "\n".join(
        re.findall(r'^    "(.+)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert f"torch>={oldest.name}\n" in stated
    for name, version in versions.OLDEST.items():
        assert re.search(rf"^{name}>=({version}|{version.removesuffix('.0')})$", stated, re.MULTILINE), name


@pytest.mark.slow
def test_an_environment_that_was_cut_off_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(venv: Path, *_: str) -> None:
        assert venv.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(versions, "install", cut_off)
    with pytest.raises(KeyboardInterrupt):
        versions.make(versions.ROWS[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_environment_has_the_tools_of_the_tests() -> None:
    packages = versions.Row("2.99.0", {"ray": "2.40.0"}, without=("typer",)).packages()
    assert {*environments.TOOLS, "ray==2.40.0", "transformers"} <= set(packages)
    assert "typer" not in packages
    assert not any(package.startswith("torchtune") for package in packages)
