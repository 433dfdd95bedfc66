"""The plug-in of pytest, loaded by its entry point in a pytest of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from check_changes import CHANGES, PROGRAM

import batchfit
import batchfit._check.in_tests  # with torch, before pytester notes what is imported

pytest_plugins = ("pytester",)
LEAVES_BYTES = 2**22  # pytest keeps the frames of a test that has failed, of a run in this process too
ROOT = Path(__file__).parents[3]  # of the tests: batchfit may be an installed wheel
SOURCE = Path(batchfit.__file__).parents[1]
TESTS = """
import pytest
from train import make_workload

@pytest.mark.parametrize("size", [64, 128])
def test_memory(peak_memory, size):
    assert peak_memory(make_workload(), batch_size=size) < "2GiB"

def test_too_much(peak_memory):
    assert peak_memory(make_workload(), batch_size=64) < "1MiB"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with tests, and batchfit as pip would have installed it."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    info = tmp_path / "installed" / "batchfit-0.0.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: batchfit\nVersion: 0.0.0\n")
    points = "".join(f"{name} = {value}\n" for name, value in declared["pytest11"].items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{points}")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    return folder


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(project.parent / "installed"), str(SOURCE), str(project)])
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words],
        cwd=project,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=400,
    )


NAMES = ["test_it.py::test_memory[128]", "test_it.py::test_memory[64]", "test_it.py::test_too_much"]


def test_tests_are_compared_with_their_baselines(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has torch already."""
    monkeypatch.delitem(sys.modules, "train", raising=False)
    here = "batchfit" in {one.name for one in entry_points(group="pytest11")}
    plugin = () if here else ("-p", "batchfit._check.pytest_plugin")
    pytester.makepyfile(test_it=TESTS, train=PROGRAM)
    pytester.syspathinsert()
    ran = pytester.runpytest_inprocess(*plugin, "--memory-update", "-p", "no:xdist")
    ran.assert_outcomes(passed=2, failed=1)
    ran.stdout.re_match_lines([r".*assert <peak [\d.]+ MiB in forward: .*train.py:\d+.*> < '1MiB'"])
    baseline = pytester.path / "memory.json"
    text = baseline.read_text()
    assert list(json.loads(text)["targets"]) == NAMES

    pytester.makepyfile(train=CHANGES[0].text)
    words = ("-k", "test_memory", "-o", "memory_max_increase=3%", "-p", "no:xdist")
    ran = pytester.runpytest_inprocess(*plugin, *words)
    ran.assert_outcomes(failed=2)
    ran.stdout.fnmatch_lines([f"*{CHANGES[0].line}", "*3 % more is*"])
    ran.stdout.no_fnmatch_line("*Traceback*")
    assert baseline.read_text() == text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_baselines_are_written_by_several_workers(project: Path) -> None:
    (project / "test_it.py").write_text(TESTS)
    (project / "train.py").write_text(PROGRAM)
    ran = run(project, "--memory-update", "-n", "2")
    assert "1 failed, 2 passed" in ran.stdout, ran.stdout + ran.stderr
    baseline = project / "memory.json"
    text = baseline.read_text()
    assert list(json.loads(text)["targets"]) == NAMES
    assert [one.name for one in project.iterdir() if one.name.startswith(".")] == [], "no lock is left"
    ran = run(project, "-k", "test_memory", "-n", "2")
    assert "2 passed" in ran.stdout, ran.stdout + ran.stderr
    assert baseline.read_text() == text


PLAIN = """
import sys

def test_nothing(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("batchfit")
    heavy = ("torch", "pydantic", "typer", "numpy", "batchfit.results", "batchfit._check.check")
    assert [name for name in heavy if name in sys.modules] == []
    ours = {name for name in sys.modules if name.split(".")[0] == "batchfit"}
    assert ours == {"batchfit", "batchfit._check", "batchfit._check.pytest_plugin"}
"""


def test_a_run_that_does_not_use_it_imports_three_small_files(project: Path) -> None:
    (project / "test_plain.py").write_text(PLAIN)
    ran = run(project)
    assert "1 passed" in ran.stdout, ran.stdout + ran.stderr
    assert "warning" not in ran.stdout


def test_another_plug_in_keeps_its_option(project: Path) -> None:
    (project / "other.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--memory-update', dest='theirs')\n"
    )
    (project / "test_it.py").write_text(
        "def test_theirs(pytestconfig):\n    assert pytestconfig.getoption('theirs') == 'x'\n\n"
        "def test_ours(peak_memory):\n    pass\n"
    )
    ran = run(project, "-p", "other", "--memory-update", "x")
    assert "1 passed, 1 error" in ran.stdout, ran.stdout + ran.stderr
    assert "another plug-in of pytest has an option --memory-update" in ran.stdout
