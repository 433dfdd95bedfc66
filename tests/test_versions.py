"""The page of tested versions says what is stored, and reports of pytest are read as they are meant."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import environments
import versions

ROOT = Path(__file__).parent.parent
REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
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


def result(torch: str, **more: object) -> versions.Results:
    part = {"passed": 2, "failed": [], "skipped": {"needs gpu": 3}, "seconds": 60, **more}
    return {
        "torch": torch,
        "date": "2026-11-18",
        "python": "3.11.7",
        "source": "0123456789",
        "libraries": {"transformers": "5.23.0"},
        "install_s": 100,
        "install_mib": 2048,
        "parts": {"pure": part, "torch": part},
    }


def test_the_page_is_what_the_stored_results_give() -> None:
    if versions.stored():
        assert versions.PAGE.read_text(encoding="utf-8") == versions.page(versions.stored())
    else:
        assert not versions.PAGE.exists()


def test_a_report_of_pytest_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT, encoding="utf-8")
    assert versions.read(report) == {
        "passed": 1,
        "failed": [
            {"test": "tests.a::test_two[x]", "why": "AttributeError: no such"},
            {"test": "tests.c", "why": "collection failure"},
        ],
        "skipped": {"needs gpu": 2, "needs torchtune": 1},
    }


def test_every_skip_and_every_failure_is_on_the_page() -> None:
    failed = [{"test": "tests.a::test_two", "why": "a < b | c"}]
    found = {"2.6": result("2.6.0"), "2.15": result("2.15.0", failed=failed, skipped={"needs torchtune": 4})}
    page = versions.page(found)
    assert "| 2.6.0 | 4 | 0 | 6 |" in page
    assert "| 2.15.0 | 4 | 2 | 8 |" in page
    assert "| needs gpu | 6 |  |" in page
    assert "| needs torchtune |  | 8 |" in page
    assert page.count(r"- `tests.a::test_two`: a \< b \| c") == 2
    assert "What fails beside torch 2.6.0" not in page


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


def test_the_oldest_and_the_newest_of_each_library_are_in_it() -> None:
    newest, oldest = versions.ROWS[-1], versions.ROWS[0]
    assert not newest.libraries
    stated = "\n".join(
        re.findall(r'^    "(.+)",$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert f"torch>={oldest.name}\n" in stated
    for name, version in versions.OLDEST.items():
        assert re.search(rf"^{name}>=({version}|{version.removesuffix('.0')})$", stated, re.MULTILINE), name


def test_an_environment_has_the_tools_of_the_tests() -> None:
    packages = versions.Row("2.99.0", {"ray": "2.40.0"}, without=("typer",)).packages()
    assert {*environments.TOOLS, "ray==2.40.0", "transformers"} <= set(packages)
    assert "typer" not in packages
    assert not any(package.startswith("torchtune") for package in packages)
