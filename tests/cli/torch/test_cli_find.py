"""The command line as a person or a script meets it: real processes, real exit codes, real signals."""

from __future__ import annotations

import errno
import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from child_path import CHILD_PATH
from cli_runner import runner
from typer.testing import Result
from warm import run_python

import batchfit
from batchfit._cli.commands.find import find_target, options_of
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import TargetCall
from batchfit._engine.workload.target import load_target, make_workload, parse_target
from batchfit._find.pure.options import FindOptions
from batchfit._options import flags_in
from batchfit.errors import TargetError
from batchfit.results import FitResult

COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]")

# A sample is 256 KiB and a step holds two such tensors: 16 fit into 8 MiB, less the little that is held.
TRAIN = """
import os, subprocess, sys, time
import torch
import batchfit

def make():
    weight = torch.ones(8, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    def step(batch_size):
        batch = torch.ones(batch_size, 2**16)
        doubled = batch * 2
        optimizer.zero_grad()
        (weight.sum() * doubled[0, 0]).backward()
        optimizer.step()
    return batchfit.Workload(step, state=[weight, optimizer])

def noisy():
    print("the factory prints")
    work = make()
    def step(batch_size):
        print("a step prints")
        os.write(1, b"and writes\\n")
        work.step(batch_size)
    subprocess.run(["echo", "a child prints"], check=True)
    return batchfit.Workload(step, state=work.state)

def greedy():
    return batchfit.Workload(lambda size: torch.ones(size, 2**24), state=[])

def broken_factory():
    raise LookupError("no [data] here")

def broken_step():
    def step(batch_size):
        return torch.ones(2, 3) @ torch.ones(2, 3)
    return batchfit.Workload(step, state=[])

def slow_after(steps):
    work, ran = make(), []
    def step(batch_size):
        ran.append(batch_size)
        if len(ran) > steps:
            open("waiting", "w").close()
            time.sleep(60)
        work.step(batch_size)
    return batchfit.Workload(step, state=work.state)

def slow():
    return slow_after(3)

def stuck():
    return slow_after(0)

def plain():
    return make().step

if __name__ == "__main__":
    raise SystemExit("the main part ran")
"""


META = """
import batchfit, torch

def make():
    with torch.device("meta"):
        model = torch.nn.Linear(4096, 4096)
    return batchfit.training(model, None, lambda m, x: m(x).sum(), lambda n: torch.zeros(n, 4096))
"""


def of_eight() -> FitResult:
    trial = batchfit.Trial(size=8, outcome="fits", steps_run=25, soak=True)
    return FitResult(
        batch_size=8, trials=(trial,), survived_steps=25, stopped_because="bracketed",
        budget_bytes=20 * 2**30, peak_bytes=None, device="cuda:0", strategy="guided", elapsed_s=1.0,
    )  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    known = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "NO_COLOR", "FORCE_COLOR")
    }
    return {**known, "PYTHONPATH": CHILD_PATH, "OMP_NUM_THREADS": "1", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batchfit", *arguments]


def run(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "batchfit", *arguments, folder=project, environment=environment(**variables))


def run_here(*arguments: str) -> Result:
    """Without a process of its own: starting one takes seconds."""
    from batchfit._cli.app import app

    return runner().invoke(app, arguments)


QUICK = ("--budget", "8MiB", "--soak-steps", "3")


class TestFlags:
    def test_flags_are_the_keywords_of_find_batch_size(self) -> None:
        from batchfit._cli.app import find

        own = {"context", "target", "json", "output", "traceback", "env", "set_"}
        flags = {n: p.default for n, p in inspect.signature(find).parameters.items() if n not in own}
        keywords = {
            name: parameter.default
            for name, parameter in inspect.signature(batchfit.find_batch_size).parameters.items()
            if name not in ("workload", "on_trial")
        }
        assert flags == {**keywords, "store": True}  # off in a program, on at the command line: `_cli/app.py`
        assert {name for name, *_ in flags_in(FindOptions)} == set(keywords)

    def test_every_flag_is_spelled_like_its_keyword_and_reaches_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._cli.app import app
        from batchfit._cli.commands import find

        given: dict[str, object] = {
            "budget": "24GiB", "max_size": 64, "min_size": 2, "strategy": "grow", "multiple_of": 2,
            "power_of_two": True, "tolerance": 0.5, "start": 4, "attempts": 7, "steps": 4, "soak_steps": 9,
            "max_trials": 11, "time_limit_s": 2.5, "predict": False, "device": "cpu",
            "isolate": True, "timeout_s": 1.5, "resume": "search.json", "store": True, "fresh": True,
            "key": "mine",
        }  # fmt: skip
        assert set(given) == {name for name, *_ in flags_in(FindOptions)}
        arguments = ["find", "train.py:make"]
        for name, value in given.items():
            flag = f"--{'no-' if value is False else ''}{name.replace('_', '-')}"
            arguments += [flag] if isinstance(value, bool) else [flag, str(value)]
        seen: list[Mapping[str, Any]] = []

        def catch(call: TargetCall, **rest: object) -> Code:
            seen.append(call.flags)
            return Code.FOUND

        monkeypatch.setattr(find, "find_target", catch)
        ran = runner().invoke(app, arguments)
        assert ran.exit_code == 0, ran.output
        assert seen == [given]

    def test_a_store_that_is_asked_for_is_distinguished_from_the_default(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._cli.app import app
        from batchfit._cli.commands import find

        seen: list[object] = []

        def catch(call: TargetCall, *, store_asked: bool) -> Code:
            seen.append((call.flags["store"], store_asked))
            return Code.FOUND

        monkeypatch.setattr(find, "find_target", catch)
        for flags in ([], ["--store"], ["--no-store"]):
            assert runner().invoke(app, ["find", "train.py:make", *flags]).exit_code == 0
        assert seen == [(True, False), (True, True), (False, False)]

    def test_a_key_without_a_store_is_refused(self) -> None:
        with pytest.raises(CommandFailed, match=r"key must be left out with --no-store, not 'x'"):
            options_of({"store": False, "key": "x"})

    def test_memory_that_went_is_reported_with_the_answer(self) -> None:
        from batchfit._cli.commands.find_answer import facts

        fit = of_eight()
        assert "gone" not in dict(facts(fit, saved=None))
        shrunk = fit.model_copy(update={"shrunk_from_bytes": 24 * 2**30})
        assert dict(facts(shrunk, saved=None))["gone"] == (
            "4.00 GiB went to other programs meanwhile; the size is for what is left"
        )

    def test_a_batch_larger_than_the_dataset_and_an_interrupted_search_are_not_to_be_used(self) -> None:
        from batchfit._cli.commands.find_answer import facts

        fit = of_eight()
        assert dict(facts(fit, saved=None))["use it"] == "DataLoader(dataset, batch_size=8)"
        reported = dict(facts(fit.model_copy(update={"samples": 5}), saved=None))
        assert reported["use it"] == "DataLoader(dataset, batch_size=5)"
        assert reported["dataset"] == "it has 5 samples: no batch of it is larger"
        assert "dataset" not in dict(facts(fit.model_copy(update={"samples": 8}), saved=None))
        stopped = fit.model_copy(update={"stopped_because": "interrupted"})
        assert "use it" not in dict(facts(stopped, saved=None))
        assert dict(facts(stopped, saved=None, kept="s.json"))["go on"].endswith("the search is in s.json")


class TestFind:
    def test_a_search_that_cannot_be_kept_is_not_begun(
        self, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._cli import main
        from batchfit._cli.signals import SIGNALS
        from batchfit._find import resume

        def full(path: Path, text: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.chdir(project)
        monkeypatch.setattr(resume, "write_atomically", full)
        monkeypatch.setattr(sys, "argv", ["batchfit", "find", "train.py:make", *QUICK, "--resume", "s.json"])
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            SIGNALS.uninstall()  # `main` keeps them to the end of its process
        assert ended.value.code == Code.BROKEN
        assert "the search cannot be kept in s.json: No space left on device" in capsys.readouterr().err

    def test_finds_and_says_so_in_plain_text(self, project: Path) -> None:
        ran = run(project, "find", "train.py:make", *QUICK, "--output", "fit.json")
        assert ran.returncode == Code.FOUND, ran.stderr
        fit = FitResult.from_json((project / "fit.json").read_text())
        assert fit.batch_size in (15, 16)
        assert fit.sustained
        assert f"batch size {fit.batch_size} survived 3 steps" in ran.stdout
        assert "device   cpu, virtual memory of 8.00 MiB" in ran.stdout
        assert f"use it   DataLoader(dataset, batch_size={fit.batch_size})" in ran.stdout
        assert f"because {fit.reason}" in ran.stdout
        assert "saved    fit.json" in ran.stdout
        assert str(fit).rpartition("\n")[0] in ran.stdout
        lines = ran.stderr.splitlines()
        assert lines[0] == "train.py:make on cpu, virtual memory of 8.00 MiB, strategy guided"
        assert [line.partition(":")[0] for line in lines[1:]] == [
            f"trial {number + 1}" for number in range(len(fit.trials))
        ]
        assert "\x1b" not in ran.stdout + ran.stderr
        assert sorted(file.name for file in project.iterdir() if file.is_file()) == ["fit.json", "train.py"]

    def test_json_is_alone_on_stdout_whatever_else_prints(self, project: Path) -> None:
        ran = run(project, "find", "train:noisy", *QUICK, "--json")
        assert ran.returncode == Code.FOUND, ran.stderr
        fit = FitResult.from_json(ran.stdout)
        assert fit.batch_size in (15, 16)
        assert json.loads(ran.stdout)["batch_size"] == fit.batch_size
        for words in (
            "the factory prints",
            "a step prints",
            "and writes",
            "a child prints",
            "survived 3 steps",
        ):
            assert words in ran.stderr


class TestFindHere:
    """The same without a process of its own, where the exit code is a value."""

    @pytest.fixture(autouse=True)
    def _in_the_project(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.chdir(project)
        path = list(sys.path)
        yield
        sys.path[:] = path
        sys.modules.pop("train", None)

    def find(self, target: str, *, full_traceback: bool = False, **changes: object) -> Code:
        quick = {"budget": "8MiB", "soak_steps": 3, "device": "cpu"}
        return find_target(TargetCall(target, {**quick, **changes}, full_traceback=full_traceback))

    @pytest.mark.parametrize("name", ["find", "profile"])
    def test_a_model_without_memory_cannot_be_run(self, project: Path, name: str) -> None:
        (project / "train.py").write_text(META)
        ran = run_here(name, "train.py:make", "--budget", "8MiB")
        assert ran.exit_code == Code.USAGE
        assert "not on the meta device: predict and explain answer" in ran.stderr
        assert "Traceback" not in ran.stderr

    def test_nothing_fits(self, project: Path) -> None:
        ran = run_here("find", "train.py:greedy", *QUICK, "--json", "--output", "fit.json")
        assert ran.exit_code == Code.NOTHING_FITS
        assert ran.stdout == ""
        assert "error: a batch of 1 does not fit on cpu" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not (project / "fit.json").exists()

    def test_stopped_before_any_size_ran(self, project: Path) -> None:
        flags = ("--strategy", "halve", "--start", "4096", "--max-trials", "1")
        ran = run_here("find", "train.py:make", *QUICK, *flags)
        assert ran.exit_code == Code.STOPPED, ran.stderr
        assert "max_trials" in ran.stderr
        assert "Traceback" not in ran.stderr

    def test_a_factory_that_raises(self, project: Path) -> None:
        ran = run_here("find", "train.py:broken_factory", *QUICK)
        assert ran.exit_code == Code.RAISED
        line = TRAIN.splitlines().index('    raise LookupError("no [data] here")') + 1
        assert f"error: train.py:broken_factory raised LookupError at train.py:{line}" in ran.stderr
        assert "LookupError: no [data] here" in ran.stderr
        assert "_cli" not in ran.stderr

    def test_a_step_that_raises(self, project: Path) -> None:
        ran = run_here("find", "train.py:broken_step", *QUICK)
        assert ran.exit_code == Code.RAISED
        line = TRAIN.splitlines().index("        return torch.ones(2, 3) @ torch.ones(2, 3)") + 1
        assert (
            f"error: a step of train.py:broken_step raised RuntimeError at train.py:{line} (in step)"
            in ran.stderr
        )
        assert re.search(r"RuntimeError: .*mat1 and mat2", ran.stderr)
        assert "batchfit: raised while trying batch size" in ran.stderr  # the note that the trial added
        assert "_find/find.py" not in ran.stderr
        assert ran.stdout == ""

    def test_a_rank_that_is_not_the_first_is_silent(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        ran = run_here("find", "train.py:make", *QUICK, "--output", "fit.json")
        assert (ran.exit_code, ran.stdout, ran.stderr) == (Code.FOUND, "", "")
        assert not (project / "fit.json").exists()

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"device": "cuda:99"}, "device must be .* not 'cuda:99'"),
            ({"device": "toaster"}, "device must be .* not 'toaster'"),
            ({"budget": "900000GiB"}, r"budget must not exceed .* not '900000GiB'"),
            ({"steps": 1}, "steps must be .* not 1"),
            ({"soak_steps": 2}, "soak_steps must be .* not 2"),
            ({"time_limit_s": -1.0}, r"time_limit_s must be .* not -1.0"),
        ],
    )
    def test_wrong_flags_are_usage_and_run_no_step(self, changes: dict[str, object], words: str) -> None:
        with pytest.raises(CommandFailed, match=words) as caught:
            self.find("train.py:stuck", **changes)
        assert caught.value.code == Code.USAGE
        assert caught.value.details == ""
        assert not Path("waiting").exists()

    @pytest.mark.parametrize("changes", [{"device": "cuda:99"}, {"steps": 1}, {"time_limit_s": -1.0}])
    def test_wrong_flags_are_reported_before_the_target_is_loaded(self, changes: dict[str, object]) -> None:
        Path("loaded.py").write_text("open('loaded', 'w').close()\ndef make(): ...\n")
        with pytest.raises(CommandFailed):
            self.find("loaded.py:make", **changes)
        assert not Path("loaded").exists()

    def test_a_value_error_of_the_users_step_is_no_usage_error(self) -> None:
        Path("mine.py").write_text(
            "import batchfit\ndef step(n):\n    raise ValueError('mine')\n"
            "def make():\n    return batchfit.Workload(step, state=[])\n"
        )
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make")
        assert caught.value.code == Code.RAISED
        assert "ValueError at mine.py:3 (in step)" in caught.value.text
        assert "ValueError: mine" in caught.value.details
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make", full_traceback=True)
        assert "_find/find.py" in caught.value.details

    def test_a_step_that_ends_the_program_is_an_error_of_the_step(self) -> None:
        Path("mine.py").write_text(
            "import batchfit, sys\ndef make():\n"
            "    return batchfit.Workload(lambda n: sys.exit(0), state=[])\n"
        )
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make")
        assert caught.value.code == Code.RAISED
        assert "raised SystemExit at mine.py:3" in caught.value.text

    def test_an_error_of_ours_in_the_users_step_names_where_it_was_made(self) -> None:
        Path("mine.py").write_text(
            "import batchfit, torch\n\ndef make():\n    model = torch.nn.Linear(2, 2)\n"
            "    return batchfit.training(model, None, lambda m, b: None, torch.ones(1, 2))\n"
        )
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make")
        assert caught.value.code == Code.RAISED
        assert "raised TypeError" in caught.value.text
        assert "mine.py:" in caught.value.text
        assert "loss_fn must return" in caught.value.details

    def test_a_bug_of_ours_is_not_blamed_on_the_user(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from batchfit._find import find as _find

        def fail(*_: object, **__: object) -> None:
            raise ZeroDivisionError("ours")

        monkeypatch.setattr(_find, "fit_result", fail)
        with pytest.raises(ZeroDivisionError, match="ours"):
            self.find("train.py:make", max_size=1)

    @pytest.mark.filterwarnings("default:the step's state")
    def test_undeclared_state_is_a_note(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.find("train.py:plain", max_size=2) == Code.FOUND
        err = capsys.readouterr().err
        assert "warning: the step's state is not declared" in err
        assert "UserWarning" not in err

    def test_a_result_that_cannot_be_saved_is_shown(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._cli.commands import find

        def full(path: Path, text: str) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(find, "write_atomically", full)
        settings = {"budget": "8MiB", "soak_steps": 3, "max_size": 2}
        with pytest.raises(CommandFailed, match=r"could not be saved to fit.json: No space left") as caught:
            find_target(TargetCall("train.py:make", settings, Delivery(output=Path("fit.json"))))
        assert caught.value.code == Code.BROKEN
        out = capsys.readouterr().out
        assert "batch size 2 survived 3 steps" in out
        assert "saved" not in out


class TestInterrupt:
    def interrupted(
        self, project: Path, target: str, number: signal.Signals, *flags: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a target until its step waits, then send a signal."""
        arguments = command("find", target, *QUICK, "--json", "--output", "fit.json", *flags)
        process = subprocess.Popen(
            arguments,
            cwd=project,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 60
            while not (project / "waiting").exists():
                assert time.monotonic() < deadline, "the step was never reached"
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)

    @pytest.mark.parametrize(
        ("number", "code"),
        [
            (signal.SIGINT, Code.INTERRUPTED),
            pytest.param(signal.SIGTERM, Code.TERMINATED, marks=pytest.mark.slow),
        ],
    )
    def test_what_was_found_is_kept(self, number: signal.Signals, code: Code, project: Path) -> None:
        ran = self.interrupted(project, "train.py:slow", number)
        assert ran.returncode == code, ran.stderr
        fit = FitResult.from_json((project / "fit.json").read_text())
        assert fit.stopped_because == "interrupted"
        assert len(fit.trials) == 1
        assert fit.trials[0].fits
        assert fit.batch_size == fit.trials[0].size
        assert fit.survived_steps == 3
        assert fit.budget_bytes == 8 * 2**20
        assert fit.device == "cpu"
        assert FitResult.from_json(ran.stdout) == fit
        assert "Traceback" not in ran.stderr
        assert f"interrupted: {fit.batch_size} is the largest batch size that ran so far" in ran.stderr

    def test_before_a_search_that_is_resumed_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("stops.py").write_text(
            "import batchfit, torch\n"
            "def step(size): torch.ones(size, 2**16)\n"
            "def make():\n"
            "    if stop: raise KeyboardInterrupt\n"
            "    return batchfit.Workload(step, state=[])\n"
            "stop = False\n"
        )
        monkeypatch.setattr(sys, "path", [*sys.path])
        settings = {"budget": "8MiB", "max_size": 2, "resume": "s.json", "store": False}
        assert find_target(TargetCall("stops.py:make", settings)) == Code.FOUND
        monkeypatch.setattr(sys.modules["stops"], "stop", True)
        with pytest.raises(
            CommandFailed, match=r"interrupted before a trial; the search so far is in s.json"
        ):
            find_target(TargetCall("stops.py:make", settings))
        sys.modules.pop("stops")

    @pytest.mark.slow
    def test_nothing_had_run(self, project: Path) -> None:
        ran = self.interrupted(project, "train.py:stuck", signal.SIGINT)
        assert ran.returncode == Code.INTERRUPTED
        assert ran.stdout == ""
        assert "before any size ran" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not (project / "fit.json").exists()


class TestTerminal:
    def shown(self, project: Path, *arguments: str, **variables: str) -> tuple[int, str]:
        """Exit code and output of a command whose stdout and stderr are one terminal."""
        parent, child = pty.openpty()
        process = subprocess.Popen(
            command(*arguments),
            cwd=project,
            env=environment(**{"TERM": "xterm-256color", "COLUMNS": "100", **variables}),
            stdin=subprocess.DEVNULL,
            stdout=child,
            stderr=child,
        )
        os.close(child)
        parts: list[bytes] = []
        try:
            while part := os.read(parent, 4096):
                parts.append(part)
        except OSError:
            pass  # how a terminal says that nobody writes to it any more
        finally:
            os.close(parent)
        return process.wait(timeout=60), b"".join(parts).decode()

    @pytest.mark.parametrize("no_colour", [False, pytest.param(True, marks=pytest.mark.slow)])
    @pytest.mark.slow
    def test_rows_are_live_and_colour_is_optional(self, no_colour: bool, project: Path) -> None:
        variables = {"NO_COLOR": "1"} if no_colour else {}
        code, text = self.shown(project, "find", "train.py:make", *QUICK, **variables)
        assert code == Code.FOUND, text
        assert bool(COLOUR.search(text)) is not no_colour
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
        assert re.search(r"size  verdict +steps +memory  of budget", plain)
        assert re.search(r"1[56]  sustained +3  █+", plain)
        assert plain.count("verdict") == 1  # the rows stand there already: no second table
        assert "\x1b[?25h" in text  # the cursor is back


RETURNS: list[tuple[str, str]] = [
    ("def make(): pass", "returned None"),
    ("import torch\ndef make(): return torch.nn.Linear(2, 2)", "the model Linear"),
    ("def make(): return 7", "not 7"),
    ("def make(): return lambda: 0", "positional argument"),
    ("def make(): return [len]", "built-in function len"),
    ("async def make(): ...", "coroutine"),
    ("class Step: ...\ndef make(): return Step", "Step"),
]


class TestCommandLine:
    @pytest.mark.slow
    def test_a_reader_of_stderr_that_goes_away_ends_nothing(self, project: Path) -> None:
        gone, ours = os.pipe()
        os.close(gone)
        ran = subprocess.run(
            command("find", "train.py:make", *QUICK, "--json"),
            cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=ours, timeout=240,
        )  # fmt: skip
        os.close(ours)
        assert ran.returncode == Code.FOUND
        assert FitResult.from_json(ran.stdout).batch_size == 15

    def test_what_stands_after_two_dashes_is_the_scripts(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, object] = {}

        def keep(call: TargetCall, **_: object) -> Code:
            seen[call.target] = call.arguments
            return Code.FOUND

        for verb in ("find", "predict", "explain", "profile"):
            monkeypatch.setattr(f"batchfit._cli.commands.{verb}.{verb}_target", keep)
            more = ("--batch-size", "2") if verb == "explain" else ()
            ran = run_here(verb, f"{verb}.py:make", *more, "--", "--lr", "0.1", "--json")
            assert ran.exit_code == Code.FOUND, ran.output
            assert "[-- ARGS...]" in run_here(verb, "--help").output
        assert seen == {
            f"{verb}.py:make": ("--lr", "0.1", "--json") for verb in ("find", "predict", "explain", "profile")
        }
        assert run_here("find", "train.py:make", "--lr").exit_code == Code.USAGE
        assert run_here("find", "train.py:make", "more").exit_code == Code.USAGE

    @pytest.mark.parametrize(
        "flags",
        [("--sizes", "4,16,64"), ("--sizes", "4", "--sizes", "16, 64"), ("--sizes=4", "--sizes=16,64")],
    )
    def test_a_list_may_have_commas(self, flags: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        monkeypatch.setattr(
            "batchfit._cli.commands.profile.profile_target",
            lambda call: seen.append(call.flags) or Code.FOUND,
        )
        ran = run_here("profile", "train.py:make", *flags)
        assert ran.exit_code == Code.FOUND, ran.output
        assert seen[0]["sizes"] == [4, 16, 64]

    def test_a_list_of_something_else_is_usage(self) -> None:
        ran = run_here("profile", "train.py:make", "--sizes", "4,x")
        assert ran.exit_code == Code.USAGE
        assert "sizes must be whole numbers such as 4,16,64, not '4,x'" in ran.stderr

    def test_gpus_and_budgets_may_have_commas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen = []
        monkeypatch.setattr(
            "batchfit._cli.commands.predict.predict_target",
            lambda call: seen.append(call.flags) or Code.FOUND,
        )
        ran = run_here("predict", "train.py:make", "--gpu", "h100,t4", "--budget", "1GiB,2GiB")
        assert ran.exit_code == Code.FOUND, ran.output
        assert (seen[0]["gpu"], seen[0]["budget"]) == (["h100", "t4"], ["1GiB", "2GiB"])


class TestReturned:
    @pytest.fixture(autouse=True)
    def _clean_imports(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
        monkeypatch.chdir(tmp_path)
        path = list(sys.path)
        yield
        sys.path[:] = path
        sys.modules.pop("returns", None)

    @pytest.mark.parametrize(("source", "words"), RETURNS)
    def test_what_is_no_workload_is_named_with_file_and_line(self, source: str, words: str) -> None:
        Path("returns.py").write_text(source + "\n")
        target = parse_target("returns.py:make")
        with pytest.raises(TargetError) as caught:
            make_workload(target, load_target(target))
        line = next(n for n, text in enumerate(source.splitlines(), 1) if "make" in text)
        assert f"returns.py:{line}" in str(caught.value)
        assert words in str(caught.value)

    @pytest.mark.parametrize("source", ["def make(): return lambda size: None", "make = lambda: print"])
    def test_a_step_is_enough(self, source: str) -> None:
        Path("returns.py").write_text(source + "\n")
        target = parse_target("returns.py:make")
        assert isinstance(make_workload(target, load_target(target)), batchfit.Workload)


class TestWatch:
    def test_a_watched_workload_is_the_same_workload(self) -> None:
        from batchfit._cli.progress import ProgressDisplay
        from batchfit._cli.search_watch import SearchWatch

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        work = batchfit.training(model, optimizer, lambda m, b: m(b).mean(), torch.ones(1, 2))
        watch = SearchWatch(ProgressDisplay())
        twin = watch.over(work)
        for name in ("state", "declared", "kind", "model", "optimizer"):
            assert getattr(twin, name) is getattr(work, name) or getattr(twin, name) == getattr(work, name)
        assert not watch.started
        twin.step(2)
        assert watch.started
        assert not SearchWatch(ProgressDisplay()).over(batchfit.Workload(len)).declared  # type: ignore[arg-type]

    def test_whose_error_it_is(self) -> None:
        """Told by the trial's note, so that an asynchronous device error is the user's too."""
        from batchfit._engine.device.device import CpuDevice
        from batchfit._engine.workload.user_errors import raised_by_step

        def broken(self: CpuDevice) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CpuDevice, "synchronize", broken)
            with pytest.raises(RuntimeError, match="assert") as caught:
                batchfit.find_batch_size(
                    batchfit.Workload(lambda n: None, state=[]), budget="4MiB", device="cpu"
                )
        assert raised_by_step(caught.value)
        assert not raised_by_step(ValueError("ours"))


class TestDoctor:
    def test_says_what_is_here_and_tests_it(self, capfd: pytest.CaptureFixture[str]) -> None:
        ran = run_here("doctor", "--json")
        assert ran.exit_code == Code.FOUND, ran.output
        found = json.loads(capfd.readouterr().out)
        assert found["ok"] is True
        assert found["broken"] == []
        assert found["versions"]["torch"] == torch.__version__
        assert found["versions"]["batchfit"] == batchfit.__version__
        assert {"name": "trials and snapshots", "state": "works", "detail": ""} in found["features"]
        assert "cpu" in [resolve["name"] for resolve in found["devices"]]
        assert found["self_test"]["passed"] is True

    def test_each_feature_works_or_says_why_not(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from batchfit._cli.torch_features import known_features

        found = {feature.name: feature for feature in known_features()}
        assert len(found) >= 18
        assert {"works"} <= {one.state for one in found.values()} <= {"works", "caveat", "not here"}
        assert all((one.state == "works") == (not one.detail) for one in found.values())
        assert found["autocast in predictions"].state == "works"
        assert found["trials and snapshots"].state == "works"

    def test_what_is_missing_in_torch_is_named_with_what_is_lost(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._cli.commands import doctor
        from batchfit._cli.torch_features import known_features
        from batchfit._engine.cuda_model import autocast_check
        from batchfit._engine.torch_private import fake, optimizers, process_groups

        def broken() -> bool:
            raise KeyError("moved")

        monkeypatch.setattr(process_groups, "can_count", lambda: False)  # refused without it
        monkeypatch.setattr(optimizers, "reads_scale", lambda: False)  # poorer without it
        monkeypatch.setattr(optimizers, "can_read_states", broken)
        monkeypatch.setattr(fake, "missing", lambda: ("FakeTensor.gone",))
        monkeypatch.setattr(
            autocast_check, "check_autocast", lambda: autocast_check.AutocastAnswer(1, ("mm is in no list",))
        )
        found = {feature.name: (feature.state, feature.detail) for feature in known_features()}
        state, detail = found["a step with collectives on several ranks"]
        assert state == "not here"
        assert detail.startswith(
            f"needs what torch 2.6 to 2.15 has, and {torch.__version__} has not: how many"
        )
        assert found["gradient noise beside a GradScaler"][0] == "caveat"
        assert found["an optimizer step with a GradScaler"] == (
            "caveat",
            "the check itself failed: KeyError: 'moved'",
        )
        assert found["fake tensors in a trace"] == ("not here", "this torch has no FakeTensor.gone")
        state, detail = found["autocast in predictions"]
        assert state == "caveat"
        assert detail.endswith("in another dtype: mm is in no list")
        monkeypatch.setattr(doctor, "_small_search", lambda: (doctor.EXPECTED_SIZES[0], True))
        assert doctor.examine(as_json=False) == Code.FOUND  # no break: what works, works
        out = capsys.readouterr().out
        assert "  not here" in out
        assert "not here: fake tensors in a trace: this torch has no FakeTensor.gone\n" in out
        findings = doctor.Findings()
        doctor.look_at_features(findings)
        assert {"name", "state", "detail"} == set(findings.features[0])

    def test_a_setting_that_this_torch_does_not_read_is_a_caveat(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from batchfit._cli.torch_features import known_features

        def state() -> str:
            name = "allocator settings in PYTORCH_ALLOC_CONF"
            return next(one.state for one in known_features() if one.name == name)

        monkeypatch.setattr(torch, "__version__", "2.8.0")
        monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
        assert state() == "works"
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        assert state() == "caveat"

    def test_a_torch_without_ranks_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from batchfit._cli.torch_features import known_features

        monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
        found = {one.name: one for one in known_features()}
        assert found["several ranks"].state == found["a model under FSDP2"].state == "not here"
        assert "built without torch.distributed" in found["several ranks"].detail

    def test_plain_text_has_no_codes(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._cli.commands import doctor

        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
        monkeypatch.setattr(doctor, "_small_search", lambda: (doctor.EXPECTED_SIZES[0], True))
        assert doctor.examine(as_json=False) == Code.FOUND
        out = capsys.readouterr().out
        assert "batchfit works here." in out
        assert "backend:cudaMallocAsync" in out
        assert "note: with cudaMallocAsync" in out
        assert "\x1b" not in out

    def test_what_is_broken_is_said_and_is_1(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._cli.commands import doctor

        def search_badly() -> tuple[int, bool]:
            return 29, True

        monkeypatch.setattr(doctor, "_small_search", search_badly)
        assert doctor.examine(as_json=False) == Code.BROKEN
        assert "broken: the self-test failed: found a batch size of 29" in capsys.readouterr().out

        def leak() -> tuple[int, bool]:
            return doctor.EXPECTED_SIZES[0], False

        monkeypatch.setattr(doctor, "_small_search", leak)
        assert doctor.examine(as_json=False) == Code.BROKEN
        assert "was not restored" in capsys.readouterr().out

        def explode() -> tuple[int, bool]:
            raise RuntimeError("no kernel image")

        monkeypatch.setattr(doctor, "_small_search", explode)
        monkeypatch.setattr(doctor, "OPTIONAL", ("not-a-package-of-anyone",))
        monkeypatch.setattr(doctor, "REQUIRED", ("torch", "also-not-a-package"))
        assert doctor.examine(as_json=False) == Code.BROKEN
        out = capsys.readouterr().out
        assert "RuntimeError: no kernel image" in out
        assert "also-not-a-package is not installed" in out

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({}, []),
            ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8"}, []),
            ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:5"}, ["PYTORCH_ALLOC_CONF: allocator settings must"]),
            (
                {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
                ["with cudaMallocAsync a budget counts live"],
            ),
            (
                {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
                ["PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF differ, and torch reads one of them only"],
            ),
        ],
    )
    def test_settings_of_the_allocator_that_matter_are_noted(
        self, settings: dict[str, str], words: list[str]
    ) -> None:
        from batchfit._cli.commands.doctor import allocator_notes

        notes = allocator_notes(settings)
        assert len(notes) == len(words)
        assert all(note.startswith(start) for note, start in zip(notes, words, strict=True))

    def test_a_device_is_shown_with_its_uuid_and_a_driver_that_spills_is_noted(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from batchfit._cli.commands import doctor
        from batchfit._engine.device import gpu, resolve

        known = resolve.KnownDevice("cuda:0", "NVIDIA H200", 2**37, 2**36, True, uuid="GPU-8932f937-d72c")
        monkeypatch.setattr(resolve, "known_devices", lambda: [known])
        monkeypatch.setattr(gpu, "spills_to_ram", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(doctor, "_small_search", lambda: (doctor.EXPECTED_SIZES[0], True))
        doctor.examine(as_json=False)
        out = capsys.readouterr().out
        assert "NVIDIA H200, 128.0 GiB, 64.0 GiB free, GPU-8932f937-d72c\n" in out
        assert "note: the GPU driver of Windows and WSL takes RAM" in out

    def test_the_driver_is_read_from_its_file(self) -> None:
        from batchfit._cli.commands.doctor import _driver_version

        text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version:  12.2.0\n"
        assert _driver_version(text) == "550.54.15"
        assert _driver_version("") == "unknown"


# As `batchfit demo`, in a quarter of its memory and of its time.
SMALL_DEMO = """
import sys
from batchfit._cli import main
from batchfit._cli.commands import demo

demo.CPU_BUDGET, demo.PROFILE_S = "32MiB", 2
sys.argv = ["batchfit", "demo"]
main()
"""


def small_demo(project: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-c", SMALL_DEMO, folder=project, environment=environment())


@pytest.mark.parametrize("is_small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_demo_ends_with_size_table_and_file(is_small: bool, project: Path) -> None:
    ran = run(project, "demo") if not is_small else small_demo(project)
    assert ran.returncode == Code.FOUND, ran.stderr
    fit = FitResult.from_json((project / "out" / "demo.json").read_text())
    assert fit.sustained
    assert (2 if is_small else 10) <= fit.batch_size <= 999
    assert "small GPT" in ran.stderr.splitlines()[0]
    assert str(fit).rpartition("\n")[0] in ran.stdout
    assert f"batch size {fit.batch_size} survived 25 steps" in ran.stdout
    assert "saved    out/demo.json" in ran.stdout
    for gpu in ("rtx4090", "h100"):
        size = re.search(rf"{gpu} +[0-9.]+ GiB +([0-9]+) ", ran.stdout)
        assert size is not None, ran.stdout
        assert int(size.group(1)) > 10 * fit.batch_size  # a GPU has far more than the demo's memory
    assert f"Timing sizes up to {fit.batch_size}" in ran.stderr
    assert re.search(r"batch size \d+ is recommended", ran.stdout)
    assert "Predicting it for GPUs that are not here" in ran.stderr
    assert "next       batchfit predict your_file.py:your_function --gpu h100\n" in ran.stdout
    # Nobody asked for a file here: the report is in a temporary folder, and its path is the last word.
    report = Path(ran.stdout.splitlines()[-1].removeprefix("  report     "))
    assert report.name == "batchfit-demo.html"
    page = report.read_text(encoding="utf-8")
    assert f"Batch size {fit.batch_size} is the largest that lasts on cpu" in page
    assert "recommended batch size" in page
    assert not list(project.glob("**/*.html"))
    report.unlink()
    report.parent.rmdir()
