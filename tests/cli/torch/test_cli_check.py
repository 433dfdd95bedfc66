"""`batchfit check` as a person or a script meets it."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from check_changes import CHANGES, PROGRAM
from cli_runner import runner
from typer.testing import Result

import batchfit
from batchfit._check.pure.options import CheckOptions
from batchfit._cli.commands import check
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code
from batchfit._cli.target import TargetCall
from batchfit._options import flags_in
from batchfit.results import MemoryCheck

TARGET = "train.py:make_workload"
SMALL = (TARGET, "--batch-size", "64")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield tmp_path
    sys.path[:] = path
    sys.modules.pop("train", None)


def run(*arguments: str) -> Result:
    from batchfit._cli.app import app

    sys.modules.pop("train", None)
    return runner().invoke(app, ["check", *arguments])


def test_flags_are_the_keywords_of_the_function() -> None:
    from batchfit._cli import app

    own = {"context", "target", "json", "output", "markdown", "traceback", "env", "set_"}
    flags = {n: p.default for n, p in inspect.signature(app.check).parameters.items() if n not in own}
    keywords = inspect.signature(batchfit.check_memory).parameters
    assert set(flags) == {name for name, *_ in flags_in(CheckOptions)} == {*keywords} - {"workload", "name"}
    same = {name for name in flags if flags[name] == keywords[name].default}
    assert same == {*flags} - {"baseline"}, "whose default depends on whether the file is there"


def test_every_flag_reaches_its_keyword(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "baseline": "b.json", "update": True, "batch_size": 8, "budget": "1GiB", "max_increase": "3%",
        "max_peak": "2GiB", "gpu": "h100",
    }  # fmt: skip
    seen: list[TargetCall] = []
    monkeypatch.setattr(check, "check_targets", lambda call: seen.append(call) or Code.FOUND)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not True]
    ran = run(TARGET, *words, "--update", "--json", "--output=o.json", "--markdown=m.md", "--", "--lr", "1")
    assert ran.exit_code == 0, ran.stderr
    delivery = Delivery(as_json=True, output=Path("o.json"), markdown=Path("m.md"))
    assert seen == [TargetCall(TARGET, given, delivery, False, ("--lr", "1"))]


def test_a_baseline_is_written_kept_and_exceeded(project: Path) -> None:
    ran = run(*SMALL, "--update")
    assert ran.exit_code == Code.FOUND, ran.stderr
    assert "UPDATED: this is the baseline now" in ran.stdout
    text = Path("memory.json").read_text()
    assert "\n".join(PROGRAM.splitlines()[48:49]).strip() in text

    ran = run(TARGET)
    assert ran.exit_code == Code.FOUND, ran.stderr
    assert ran.stdout.startswith("PASSED\n")
    assert "as in the baseline" in ran.stdout

    Path("train.py").write_text(CHANGES[0].text)
    ran = run(TARGET, "--markdown", "comment.md", "--output", "check.json")
    assert ran.exit_code == Code.MORE_MEMORY, ran.stderr
    assert ran.stdout.startswith("FAILED\n")
    assert f"{CHANGES[0].line}\n" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
    assert Path("memory.json").read_text() == text, "a check writes no baseline"
    found = MemoryCheck.from_json(Path("check.json").read_text())
    assert (found.name, found.passed) == (TARGET, False)
    comment = Path("comment.md").read_text()
    assert comment.startswith("### ⚠️ Peak memory: train.py:make\\_workload needs ")
    assert f"| `` {CHANGES[0].line} `` |" in comment

    ran = run(TARGET, "--max-increase", "50%")
    assert ran.exit_code == Code.FOUND


def test_several_targets_of_a_project(project: Path) -> None:
    Path("pyproject.toml").write_text(
        '[tool.batchfit.check]\nbatch-size = 64\ntargets = ["train.py:make_workload", '
        '{ target = "other.py:make_workload", max-peak = "1MiB" }]\n'
    )
    Path("other.py").write_text(PROGRAM)
    ran = run("--update")
    assert ran.exit_code == Code.MORE_MEMORY, "the second has a highest peak"
    assert list(json.loads(Path("memory.json").read_text())["targets"]) == ["other.py:make_workload", TARGET]
    ran = run("--output", "checks.json")
    assert ran.exit_code == Code.MORE_MEMORY
    assert [one["passed"] for one in json.loads(Path("checks.json").read_text())] == [True, False]
    assert run(TARGET).exit_code == Code.FOUND
    sys.modules.pop("other", None)


def test_a_target_that_cannot_be_checked_does_not_keep_the_others_from_it(project: Path) -> None:
    Path("pyproject.toml").write_text(
        '[tool.batchfit.check]\nbatch-size = 4\ntargets = ["train.py:nowhere", "train.py:make_workload"]\n'
    )
    ran = run("--update", "--output", "checks.json", "--markdown", "comment.md")
    assert ran.exit_code == Code.USAGE
    assert ran.stdout.startswith("UPDATED: ")
    assert "\n\nNOT CHECKED\ntrain.py:nowhere: there is no 'nowhere' in train.py" in ran.stdout
    assert list(json.loads(Path("memory.json").read_text())["targets"]) == [TARGET]
    checked, broken = json.loads(Path("checks.json").read_text())
    assert (checked["kind"], broken["kind"], broken["name"]) == ("check", "check_error", "train.py:nowhere")
    assert "### ❌ Peak memory: train.py:nowhere was not checked" in Path("comment.md").read_text()


def test_a_gpu_of_a_newer_batchfit_in_the_baseline_is_named(project: Path) -> None:
    assert run(*SMALL, "--update").exit_code == Code.FOUND
    path = Path("memory.json")
    path.write_text(path.read_text().replace('"gpu": "h200"', '"gpu": "h900"'))
    ran = run(TARGET)
    assert ran.exit_code == Code.USAGE
    assert "memory.json: its gpu is 'h900', which this batchfit does not know" in ran.stderr


def test_a_highest_peak_needs_no_baseline(project: Path) -> None:
    assert run(*SMALL, "--max-peak", "1GiB").exit_code == Code.FOUND
    ran = run(*SMALL, "--max-peak", "1MiB")
    assert ran.exit_code == Code.MORE_MEMORY
    assert "1.00 MiB is the most that is" in ran.stdout
    assert "source lines that hold the most" in ran.stdout
    assert not Path("memory.json").exists()


@pytest.mark.slow
def test_the_largest_size_within_a_budget(project: Path) -> None:
    assert run(TARGET, "--budget", "200MiB", "--update").exit_code == Code.FOUND
    entry = json.loads(Path("memory.json").read_text())["targets"][TARGET]
    assert entry["batch_size"] == entry["largest"] > 64
    Path("train.py").write_text(CHANGES[0].text)
    ran = run(TARGET)
    assert ran.exit_code == Code.MORE_MEMORY
    assert f", was {entry['largest']}" in ran.stdout
    Path("train.py").write_text(PROGRAM)
    ran = run(TARGET, "--budget", "60MiB", "--update")
    assert ran.exit_code == Code.NOTHING_FITS
    assert "does not fit" in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give a TARGET (file.py:name), or name targets under [tool.batchfit.check]"),
        ((TARGET, "--max-increase", "much"), "max_increase must be text such as '2%'"),
        ((TARGET, "--gpu", "h1000"), "gpu must be"),
        ((TARGET, "--max-peak", "1GiB"), "batch_size must be given where there is no baseline"),
        (("nowhere.py:make",), "the file nowhere.py of the target nowhere.py:make does not exist"),
        ((TARGET, "--markdown", "no/such/m.md"), "markdown must be a file that can be written"),
    ],
)
def test_bad_usage_is_said_before_torch_is_loaded(
    words: tuple[str, ...], message: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchfit._cli import delivery

    monkeypatch.setattr(delivery, "load_torch", lambda: pytest.fail("torch is loaded"))
    ran = run(*words)
    assert ran.exit_code == Code.USAGE
    assert message in ran.stderr


def test_what_is_wrong_with_the_baseline_is_said(project: Path) -> None:
    ran = run(TARGET)
    assert ran.exit_code == Code.USAGE
    assert "memory.json has no baseline of train.py:make_workload (there is no such file)" in ran.stderr
    assert "--update" in ran.stderr
    assert run(*SMALL, "--update").exit_code == Code.FOUND
    ran = run(TARGET, "--batch-size", "32")
    assert ran.exit_code == Code.USAGE
    assert "batch_size must be 64, as in the baseline, not 32" in ran.stderr
    ran = run(TARGET, "--gpu", "a100-80gb")
    assert ran.exit_code == Code.USAGE
    assert "gpu must be h200, as in the baseline" in ran.stderr
    Path("memory.json").write_text("{}")
    ran = run(TARGET)
    assert ran.exit_code == Code.USAGE
    assert "memory.json: no baseline of batchfit check" in ran.stderr


def test_a_step_that_cannot_be_traced_ends_with_its_code(project: Path) -> None:
    text = PROGRAM.replace(
        "    return x + self.down(y)\n", "    return x + self.down(y) * (x.sum().item() > 0)\n"
    )
    assert text != PROGRAM
    Path("train.py").write_text(text)
    ran = run(*SMALL, "--update")
    assert ran.exit_code == Code.UNTRACEABLE
    assert "train.py:30" in ran.stderr
