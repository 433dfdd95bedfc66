"""Trials in child processes: real children are killed, hang and crash, and the search still ends right."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import faulty_targets
import pytest
from child_path import CHILD_PATH

import batchfit
from batchfit._cli.commands.find import find_target
from batchfit._cli.delivery import Delivery
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.target import TargetCall
from batchfit._engine.trial import child_process
from batchfit._engine.trial.factory import Factory
from batchfit._engine.trial.in_children import InChildren, _ending
from batchfit._engine.trial.trial import TrialRequest
from batchfit._engine.workload.target import parse_target
from batchfit._engine.workload.user_errors import ChildTraceback
from batchfit._files import locked
from batchfit.errors import ChildDiedError, ChildRaisedError, NothingFitsError, TargetError
from batchfit.results import FitResult, Trial

SUPPORT = str(Path(__file__).parents[2] / "support")
TARGET = f"{faulty_targets.FILE}:faulty"

# Two trials at most: 8 goes wrong, 4 does not.
QUICK: dict[str, Any] = {
    "isolate": True, "budget": "8MiB", "steps": 2, "soak_steps": 0, "strategy": "halve", "start": 8,
}  # fmt: skip


def children_of_this_process() -> set[str]:
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No child, living or dead, no thread and no file handle survives a search."""
    processes, threads = children_of_this_process(), threading.active_count()
    handles = len(os.listdir("/proc/self/fd"))
    yield
    assert children_of_this_process() == processes
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == handles


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def choose(name: str, *, above: int = 4) -> None:
        monkeypatch.setenv("FAULT", name)
        monkeypatch.setenv("ABOVE", str(above))

    return choose


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """What children have done: a line `pid what` for each thing."""
    path = tmp_path / "diary"
    path.touch()
    monkeypatch.setenv("DIARY", str(path))
    return path


@pytest.fixture
def time_flies(monkeypatch: pytest.MonkeyPatch, diary: Path) -> None:
    """Ten minutes pass at once when a step hangs, so that no machine is too slow to reach it in time."""

    def monotonic() -> float:
        return time.monotonic() + 600 * len(pids(diary, "hangs"))

    monkeypatch.setattr(child_process, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))


def pids(diary: Path, what: str) -> list[int]:
    return [int(line.split()[0]) for line in diary.read_text().splitlines() if line.split()[1] == what]


def is_gone(pid: int) -> bool:
    """It has ended. Who reaps an orphan is the system's business."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(true: Callable[[], bool], *, within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def outcomes(fit: FitResult) -> list[tuple[int, str]]:
    return [(trial.size, trial.outcome) for trial in fit.trials]


class TestFaults:
    @pytest.mark.parametrize(
        ("name", "outcome", "words"),
        [
            # TestOutput has this one too.
            pytest.param("SIGKILL", "killed", "was killed (SIGKILL", marks=pytest.mark.slow),
            pytest.param("SIGILL", "killed", "was ended by SIGILL", marks=pytest.mark.slow),
            pytest.param("exit", "killed", "exited by itself with code 3", marks=pytest.mark.slow),
            pytest.param(
                "poison",
                "killed",
                "RuntimeError: CUDA error: an illegal memory access",
                marks=pytest.mark.slow,
            ),
            ("hang", "timeout", "was stopped after 600 s without an answer"),
        ],
    )
    def test_the_search_goes_on(
        self,
        name: str,
        outcome: str,
        words: str,
        fault: Callable[..., None],
        diary: Path,
        time_flies: None,
    ) -> None:
        fault(name)
        fit = batchfit.find_batch_size(TARGET, timeout_s=600, **QUICK)
        assert outcomes(fit) == [(8, outcome), (4, "fits")]
        assert fit.batch_size == 4
        assert words in fit.trials[0].message
        assert fit.trials[0].steps_run == 0
        assert fit.trials[0].ambiguous is (name in ("SIGILL", "exit", "poison"))
        assert fit.trials[1].steps_run == 2
        assert fit.trials[1].peak_bytes

    @pytest.mark.slow
    def test_what_the_child_has_started_is_killed_with_it(
        self, fault: Callable[..., None], diary: Path, time_flies: None
    ) -> None:
        fault("program")
        fit = batchfit.find_batch_size(TARGET, timeout_s=600, **QUICK)
        assert outcomes(fit) == [(8, "timeout"), (4, "fits")]
        lines = [line.split() for line in diary.read_text().splitlines()]
        started = [int(line[2]) for line in lines if line[1] == "program"]
        assert len(started) == 1
        assert all(is_gone(pid) for pid in (*started, *pids(diary, "hangs")))

    @pytest.mark.slow
    def test_a_process_that_it_leaves_behind_does_not_hold_the_search_up(
        self, fault: Callable[..., None], diary: Path
    ) -> None:
        fault("fork")
        fit = batchfit.find_batch_size(TARGET, timeout_s=60, **QUICK)
        assert outcomes(fit) == [(8, "killed"), (4, "fits")]
        assert all(is_gone(pid) for pid in pids(diary, "left"))
        assert pids(diary, "left")

    @pytest.mark.slow
    def test_a_program_that_ignores_its_childrens_deaths(self, fault: Callable[..., None]) -> None:
        fault("exit")
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            fit = batchfit.find_batch_size(TARGET, **QUICK)
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert outcomes(fit) == [(8, "killed"), (4, "fits")]

    @pytest.mark.slow
    def test_every_size_killed_is_said(self, fault: Callable[..., None]) -> None:
        fault("SIGKILL", above=0)
        with pytest.raises(
            NothingFitsError, match=r"every size that was tried was killed; the last: .* size 1"
        ):
            batchfit.find_batch_size(TARGET, **{**QUICK, "start": 2})

    @pytest.mark.slow
    def test_a_hang_at_the_smallest_size_names_the_time_out(
        self, fault: Callable[..., None], time_flies: None
    ) -> None:
        fault("hang", above=0)
        with pytest.raises(NothingFitsError, match=r"after 600 s without an answer \(timeout_s\) in step 1"):
            batchfit.find_batch_size(TARGET, timeout_s=600, **{**QUICK, "start": 1})

    def test_a_crash_at_the_smallest_size_does_not_come_from_the_size(
        self, fault: Callable[..., None]
    ) -> None:
        fault("SIGILL", above=0)
        with pytest.raises(
            ChildDiedError, match=r"SIGILL.* in step 1 of batch size 1.*smallest size"
        ) as caught:
            batchfit.find_batch_size(TARGET, **{**QUICK, "start": 1})
        assert caught.value.exit_code == -signal.SIGILL

    @pytest.mark.slow
    def test_a_poisoned_device_at_the_smallest_size_is_the_users_error(
        self, fault: Callable[..., None]
    ) -> None:
        fault("poison", above=0)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            batchfit.find_batch_size(TARGET, **{**QUICK, "start": 1})

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("SIGKILL", "was killed .* while loading"),
            pytest.param("hang", "was still loading .* 600 s", marks=pytest.mark.slow),
        ],
    )
    def test_a_death_before_the_first_step_is_an_error(
        self, name: str, words: str, fault: Callable[..., None], time_flies: None
    ) -> None:
        fault(name)
        with pytest.raises(ChildDiedError, match=words):
            batchfit.find_batch_size(
                f"{faulty_targets.FILE}:kills_itself_while_it_loads",
                timeout_s=600,
                **QUICK,
            )


class TestSharedCard:
    """Other programs use the card as well, and every child looks before its trial and after it."""

    SETTINGS: ClassVar[dict[str, Any]] = {"isolate": True, "start": 8, "steps": 2, "soak_steps": 4}

    @pytest.fixture
    def others(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """How many MiB other programs have, as a file."""
        path = tmp_path / "others"
        path.write_text("0")
        monkeypatch.setenv("OTHERS", str(path))
        return path

    @pytest.mark.slow
    def test_memory_that_goes_lowers_the_budget(self, others: Path, caplog: pytest.LogCaptureFixture) -> None:
        def take(*_: object) -> None:
            others.write_text("600")

        fit = batchfit.find_batch_size(faulty_targets.on_a_shared_card, on_trial=take, **self.SETTINGS)
        assert 180 <= fit.batch_size <= 195
        assert not [trial for trial in fit.trials if not trial.fits], (
            "the next size was chosen for what is left"
        )
        assert fit.budget_bytes == 400 * 2**20
        assert fit.shrunk_from_bytes == 1000 * 2**20
        said = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
        assert len(said) == 1
        assert said[0].startswith("600.0 MiB of cuda:0 went to other programs")

    @pytest.mark.slow
    def test_a_trial_that_others_made_run_out_is_run_again(
        self, others: Path, monkeypatch: pytest.MonkeyPatch, diary: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        spike = others.with_name("spike")
        spike.touch()
        monkeypatch.setenv("SPIKE", str(spike))
        halving = {**self.SETTINGS, "strategy": "halve", "start": 300}
        fit = batchfit.find_batch_size(faulty_targets.on_a_shared_card, max_size=300, **halving)
        assert not spike.exists()
        assert outcomes(fit) == [(300, "fits")]
        assert fit.budget_bytes == 1000 * 2**20
        assert fit.shrunk_from_bytes is None
        assert len(set(pids(diary, "step"))) == 2, "two children have tried it"
        assert "is tried once more" in caplog.text


class TestOutput:
    @pytest.mark.slow
    def test_all_that_children_print_is_handed_over(
        self, fault: Callable[..., None], capfd: pytest.CaptureFixture[str]
    ) -> None:
        """Of one that is killed (8) as of one that ends by itself (4), with its last line ended."""
        fault("SIGKILL")
        printed: dict[bool, str] = {False: "", True: ""}

        def listen(text: str, is_error: bool) -> None:
            printed[is_error] += text

        factory = Factory(parse_target(f"{faulty_targets.FILE}:talks"), on_output=listen)
        fit = batchfit.find_batch_size(cast(Any, factory), **QUICK)
        assert outcomes(fit) == [(8, "killed"), (4, "fits")]
        assert "was killed (SIGKILL" in fit.trials[0].message
        assert not fit.trials[0].ambiguous
        line = "x" * 2**17 + "\n"
        assert printed[False] == f"{line}out 8\n{line}out 4\nout 4\ngoodbye\n"
        unended = "no end of a line: é"
        assert printed[True] == f"{unended}\n{unended}{unended}\n"
        assert capfd.readouterr() == ("", "")

    @pytest.mark.slow
    def test_without_a_listener_it_goes_where_ours_goes(
        self, fault: Callable[..., None], capfd: pytest.CaptureFixture[str]
    ) -> None:
        fault("none")
        batchfit.find_batch_size(faulty_targets.talks, **{**QUICK, "start": 4})
        assert capfd.readouterr().out.endswith("out 4\nout 4\ngoodbye")


class TestErrors:
    def test_of_a_known_type_it_comes_out_as_itself(self, fault: Callable[..., None]) -> None:
        fault("value")
        with pytest.raises(ValueError, match="mine") as caught:
            batchfit.find_batch_size(TARGET, **QUICK)
        assert str(caught.value) == "mine"
        notes = "\n".join(caught.value.__notes__)
        assert "batchfit: raised while trying batch size 8 (step 1)" in notes
        assert "in raise_value_error\n" in notes
        told = ChildTraceback.of(caught.value)
        assert told is not None
        assert told.stage == "step"
        assert "raised ValueError at" in told.headline
        assert "faulty_targets.py" in told.headline

    def test_of_an_unknown_type_it_is_reported_by_name(self, tmp_path: Path) -> None:
        (tmp_path / "odd_one.py").write_text(
            "import batchfit\nclass Odd(Exception): ...\n"
            "def step(n): raise Odd('strange')\n"
            "def make(): return batchfit.Workload(step, state=[])\n"
        )
        with pytest.raises(ChildRaisedError, match="Odd: strange") as caught:
            batchfit.find_batch_size(f"{tmp_path / 'odd_one.py'}:make", **QUICK)
        assert caught.value.type_name == "Odd"
        assert "odd_one.py" in "\n".join(caught.value.__notes__)
        assert "odd_one" not in sys.modules

    @pytest.mark.slow
    def test_an_exit_of_the_users_is_no_size_too_big(self, fault: Callable[..., None]) -> None:
        fault("sys.exit")
        with pytest.raises(SystemExit) as caught:
            batchfit.find_batch_size(TARGET, **QUICK)
        assert caught.value.code == 7

    @pytest.mark.slow
    def test_one_without_words_is_no_size_too_big(self, fault: Callable[..., None]) -> None:
        fault("own")
        with pytest.raises(faulty_targets.OwnError) as caught:
            batchfit.find_batch_size(TARGET, **QUICK)
        assert "in raise_own_error\n" in "\n".join(caught.value.__notes__)

    @pytest.mark.slow
    def test_a_target_without_the_function(self) -> None:
        with pytest.raises(TargetError, match=r"there is no 'mak' .* did you mean"):
            batchfit.find_batch_size(f"{faulty_targets.FILE}:mak", **QUICK)

    def test_a_wrong_device_is_reported_before_the_target_is_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "loaded.py").write_text("raise SystemExit('loaded')\ndef make(): ...\n")
        with pytest.raises(ValueError, match=r"device must be .* not 'cuda:99'"):
            batchfit.find_batch_size(f"{tmp_path / 'loaded.py'}:make", device="cuda:99", **QUICK)


class TestTargets:
    """What a target may name, and the arguments of its script: the same in a child as here."""

    SOURCE = """
import sys
import torch
import batchfit

SAMPLE = int(sys.argv[1]) if len(sys.argv) > 1 else 2**18  # bytes

def step(batch_size):
    torch.ones(batch_size, SAMPLE // 4)

workload = batchfit.Workload(step, state=[])
"""

    @pytest.mark.filterwarnings("ignore:the step's state is not declared")
    @pytest.mark.parametrize(
        ("name", "isolate"),
        [
            ("step", False),
            ("workload", False),
            pytest.param("step", True, marks=pytest.mark.slow),
            pytest.param("workload", True, marks=pytest.mark.slow),
        ],
    )
    def test_a_workload_and_a_step_are_targets(
        self, name: str, isolate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "named", raising=False)
        monkeypatch.setattr(sys, "path", [*sys.path])
        Path("named.py").write_text(self.SOURCE)
        found = {}
        for arguments in ((), ("524288",)):
            sys.modules.pop("named", None)
            settings = {
                **QUICK,
                "start": 32,  # and halved: a trial in a child costs an import of torch
                "isolate": isolate,
            }
            delivery = Delivery(output=Path("fit.json"))
            code = find_target(TargetCall(f"named.py:{name}", settings, delivery, arguments=arguments))
            assert code == Code.FOUND
            found[arguments] = FitResult.from_json(Path("fit.json").read_text()).batch_size
        assert found == {(): 32, ("524288",): 16}

    def test_a_step_is_run_in_a_child_from_python_too(self) -> None:
        fit = batchfit.find_batch_size(faulty_targets.plain_step, **{**QUICK, "start": 4})
        assert fit.batch_size == 4


class TestFactory:
    """What can be made again in a child, and what cannot: told before any process is started."""

    @pytest.mark.parametrize(
        ("given", "words"),
        [
            (faulty_targets.make(), "lives in this process"),
            (lambda: faulty_targets.make(), "<lambda>.* which no other process can import"),
            (functools.partial(faulty_targets.make), "functools.partial"),
            (faulty_targets.two_arguments, r"needs arguments \(batch_size, more\)"),
            (faulty_targets.OwnError, "OwnError"),
            (7, "not 7|Not 7"),
        ],
    )
    def test_what_cannot_be_named_is_refused(
        self, given: Any, words: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
        with pytest.raises(TypeError, match=f"(?s)workload must be, with isolate=True.*{words}"):
            batchfit.find_batch_size(given, **QUICK)

    def test_a_closure_is_refused(self) -> None:
        work = faulty_targets.make()

        def make() -> batchfit.Workload:
            return work

        with pytest.raises(TypeError, match="move it to the top of its module"):
            Factory.of(make)

    def test_a_function_that_is_not_what_its_name_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = faulty_targets.make
        monkeypatch.setattr(faulty_targets, "make", faulty_targets.faulty)
        with pytest.raises(TypeError, match="faulty_targets:make is something else"):
            Factory.of(before)

    @pytest.mark.parametrize("name", ["__main__", "no_such_module"])
    def test_of_code_that_was_executed(self, name: str) -> None:
        space: dict[str, Any] = {"__name__": name}
        exec("def make_it(): ...", space)
        with pytest.raises(TypeError, match="'make_it', which is in no module that a child could import"):
            Factory.of(space["make_it"])

    def test_of_an_interactive_session(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = sys.modules["__main__"]
        monkeypatch.setattr(main, "__spec__", None)
        monkeypatch.delattr(main, "__file__", raising=False)
        monkeypatch.setattr(main, "make", faulty_targets.make, raising=False)
        monkeypatch.setattr(faulty_targets.make, "__module__", "__main__")
        with pytest.raises(TypeError, match="interactive session: put it into a file"):
            Factory.of(faulty_targets.make)

    def test_of_a_script_it_is_found_by_its_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main = sys.modules["__main__"]
        monkeypatch.setattr(main, "__file__", faulty_targets.FILE, raising=False)
        monkeypatch.setattr(main, "make", faulty_targets.make, raising=False)
        monkeypatch.setattr(faulty_targets.make, "__module__", "__main__")
        monkeypatch.setattr(main, "__spec__", None)
        assert Factory.of(faulty_targets.make).target.text == f"{faulty_targets.FILE}:make"
        spec = faulty_targets.__spec__
        monkeypatch.setattr(main, "__spec__", spec)  # python -m
        target = Factory.of(faulty_targets.make).target
        assert (target.source, target.is_imported) == ("faulty_targets", True)

    def test_wrong_settings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
        for changes, words in (
            ({"timeout_s": 0}, "timeout_s must be a positive"),
            ({"timeout_s": True}, "timeout_s must be a positive"),
            ({"timeout_s": float("nan")}, "timeout_s must be a positive"),
            ({"isolate": False, "timeout_s": 3}, "timeout_s must be None without isolate"),
            ({"isolate": 1}, "isolate must be True or False, not 1"),
            ({"steps": 1}, "steps must be"),
            ({"device": batchfit.testing.FakeDevice(2**30)}, "device must be text"),
        ):
            with pytest.raises((ValueError, TypeError), match=words):
                batchfit.find_batch_size(TARGET, **{**QUICK, **changes})
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ValueError, match=r"isolate must be False under torch.distributed"):
            batchfit.find_batch_size(TARGET, **QUICK)


class TestAnswer:
    def test_it_is_that_of_a_search_in_this_process(self, diary: Path, living_bytes: int) -> None:
        seen: list[Trial] = []
        settings: dict[str, Any] = {"budget": "8MiB", "soak_steps": 4, "strategy": "halve", "start": 16}
        apart = batchfit.find_batch_size(
            faulty_targets.make, isolate=True, on_trial=lambda trial, _: seen.append(trial), **settings
        )
        processes = {int(line.split()[0]) for line in diary.read_text().splitlines()}
        assert os.getpid() not in processes
        assert len(processes) == len(apart.trials)
        settings["budget"] = living_bytes + (8 << 20)
        here = batchfit.find_batch_size(faulty_targets.make(), **settings)
        assert apart.batch_size == here.batch_size
        assert outcomes(apart) == outcomes(here)
        for one, other in zip(apart.trials, here.trials, strict=True):
            # This process holds a few small tensors more, those of other tests' workloads.
            assert 0 <= (other.peak_bytes or 0) - (one.peak_bytes or 0) <= living_bytes + 4096
        assert apart.device == "cpu"
        assert apart.sustained
        assert apart.survived_steps == 4
        assert seen == list(apart.trials)
        # The process' start counts, also that of the first, which began before its trial.
        assert apart.elapsed_s > sum(trial.elapsed_s for trial in apart.trials)

    @pytest.mark.slow
    def test_a_virtual_memory_around_it_holds(self) -> None:
        with batchfit.virtual_memory("8MiB"):
            fit = batchfit.find_batch_size(faulty_targets.make, isolate=True, max_size=1, soak_steps=0)
        assert fit.budget_bytes == 8 * 2**20

    @pytest.mark.slow
    def test_the_next_child_starts_while_a_trial_runs_and_loads_nothing(self, diary: Path) -> None:
        before = children_of_this_process()  # a fork server, for one, of another file's tests
        with InChildren(Factory.of(faulty_targets.make), device=None, timeout_s=60) as children:
            with children.trying(2**23) as run_one:
                trial = run_one(TrialRequest(2, steps=2))
            assert trial.fits
            # Each child has a shell beside it, which waits for this process' end.
            new = children_of_this_process() - before
            commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in new}
            (spare,) = [pid for pid, command in commands.items() if b"/bin/sh" not in command]
            assert len(commands) == 2
            os.kill(spare, signal.SIGKILL)
            assert len(set(pids(diary, "step"))) == 1
            wait_until(lambda: is_gone(spare), within_s=60, what="the spare child lives")
            with children.trying(2**23) as run_one:  # one that is gone is no harm
                assert run_one(TrialRequest(3, steps=2, soak=True)).sustained
        assert children_of_this_process() <= before

    def test_endings_have_words(self) -> None:
        assert _ending(-9)[::2] == ("killed", False)
        assert "SIGSEGV (Segmentation fault)" in _ending(-11).text
        assert "signal 63" in _ending(-63).text
        assert _ending(0)[::2] == ("killed", True)


class TestParent:
    """The process that searches, in a process of its own: it is killed, interrupted, or calls itself."""

    def start(self, folder: Path, code: str, **variables: str) -> subprocess.Popen[str]:
        (folder / "search.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": f"{CHILD_PATH}{os.pathsep}{SUPPORT}", **variables}
        return subprocess.Popen(
            [sys.executable, "search.py"], cwd=folder, env=environment, text=True, stderr=subprocess.PIPE
        )

    @pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
    def test_its_end_is_the_childs_and_that_of_all_the_child_has_started(
        self, number: signal.Signals, tmp_path: Path, diary: Path
    ) -> None:
        code = (
            "import batchfit\n"
            f"batchfit.find_batch_size({TARGET!r}, isolate=True, budget='8MiB', max_size=1)\n"
        )
        with self.start(tmp_path, code, FAULT="program", ABOVE="0") as process:
            wait_until(lambda: pids(diary, "hangs") != [], within_s=60, what="the step was never reached")
            child = pids(diary, "hangs")[0]
            lines = [line.split() for line in diary.read_text().splitlines()]
            program = next(int(line[2]) for line in lines if line[1] == "program")
            assert child != process.pid
            assert not is_gone(child)
            assert not is_gone(program)
            process.send_signal(number)
            stderr = process.communicate(timeout=60)[1]
        assert process.returncode == -number
        wait_until(lambda: is_gone(child), within_s=60, what="the child outlives its parent")
        wait_until(lambda: is_gone(program), within_s=60, what="a program outlives its search")
        assert ("KeyboardInterrupt" in stderr) is (number == signal.SIGINT)

    @pytest.mark.slow
    def test_a_script_that_calls_itself_is_reported(self, tmp_path: Path) -> None:
        code = (
            "import batchfit\nfrom faulty_targets import make as made\n"
            "def make(): return made()\n"
            "batchfit.find_batch_size(make, isolate=True, budget='8MiB', max_size=1)\n"
        )
        with self.start(tmp_path, code) as process:
            stderr = process.communicate(timeout=60)[1]
        assert process.returncode == 1
        assert 'Put the call under if __name__ == "__main__"' in stderr

    @pytest.mark.slow
    def test_a_script_that_guards_its_call(self, tmp_path: Path) -> None:
        code = (
            "import batchfit\nfrom faulty_targets import make as made\n"
            "def make(): return made()\n"
            "if __name__ == '__main__':\n"
            "    fit = batchfit.find_batch_size(make, isolate=True, budget='8MiB', max_size=1)\n"
            "    assert fit.batch_size == 1\n"
        )
        with self.start(tmp_path, code) as process:
            stderr = process.communicate(timeout=60)[1]
        assert (process.returncode, stderr) == (0, "")


class TestCommand:
    """`batchfit find --isolate`, in this process but for the children."""

    def find(self, target: str, *, full_traceback: bool = False, **changes: Any) -> Code:
        settings = {**QUICK, "start": 2, **changes}
        return find_target(TargetCall(target, settings, full_traceback=full_traceback))

    @pytest.fixture(autouse=True)
    def _in_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def test_finds_and_shows_each_trial(
        self, fault: Callable[..., None], capsys: pytest.CaptureFixture[str]
    ) -> None:
        fault("SIGKILL", above=1)
        assert self.find(TARGET, resume="search.json") == Code.FOUND
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert lines[0] == f"{TARGET} on cpu, virtual memory of 8.00 MiB, strategy halve"
        assert lines[1].startswith("trial 1: size 2: killed, 0 steps, no memory reading")
        assert lines[2].startswith("trial 2: size 1: fits, 2 steps, 514.5 KiB of 8.00 MiB")
        assert "none ran out of memory, 1 killed" in out
        assert self.find(TARGET, resume="search.json") == Code.FOUND
        out, err = capsys.readouterr()
        assert "the search in search.json had ended before: nothing was run" in err
        assert "(all of them in an earlier run)" in out
        with pytest.raises(CommandFailed, match=r"steps: 2 then, 3 now") as caught:
            self.find(TARGET, resume="search.json", steps=3)
        assert caught.value.code == Code.USAGE

    def test_a_file_in_use_is_bad_usage(self) -> None:
        with (
            locked(Path("search.json")),
            pytest.raises(CommandFailed, match="in use by another") as caught,
        ):
            self.find(TARGET, resume="search.json")
        assert caught.value.code == Code.USAGE

    @pytest.mark.slow
    def test_a_device_may_be_an_index(self) -> None:
        with pytest.raises(ValueError, match=r"device must be .* not 'cuda:7'"):
            batchfit.find_batch_size(faulty_targets.make, device=7, **QUICK)

    @pytest.mark.slow
    def test_an_error_of_a_step_names_its_line(self) -> None:
        Path("mine.py").write_text(
            "import batchfit\nclass Odd(Exception): ...\ndef step(n):\n    raise Odd('strange')\n"
            "def make():\n    return batchfit.Workload(step, state=[])\n"
        )
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make")
        assert caught.value.code == Code.RAISED
        assert caught.value.text == "a step of mine.py:make raised Odd at mine.py:4 (in step)"
        assert "mine.Odd: strange" in caught.value.details
        assert "raised while trying batch size 2 (step 1)" in caught.value.details
        assert "child_main.py" not in caught.value.details
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make", full_traceback=True)
        assert "child_main.py" in caught.value.details

    def test_an_error_of_the_factory_names_its_line(self) -> None:
        Path("mine.py").write_text("def make():\n    raise LookupError('no data')\n")
        with pytest.raises(CommandFailed) as caught:
            self.find("mine.py:make")
        assert caught.value.code == Code.RAISED
        assert caught.value.text == "mine.py:make raised LookupError at mine.py:2 (in make)"

    @pytest.mark.parametrize(
        ("target", "changes", "words"),
        [
            ("mine.py:mak", {}, "there is no 'mak' in mine.py"),
            pytest.param(
                "mine.py:make", {}, "mine.py:make at mine.py:1 returned None", marks=pytest.mark.slow
            ),
            pytest.param(
                "mine.py:make",
                {"device": "cuda:99"},
                "device must be .* not 'cuda:99'",
                marks=pytest.mark.slow,
            ),
            ("mine.py:make", {"isolate": False, "timeout_s": 1.0}, "timeout_s must be None without isolate"),
            ("mine.py:make", {"resume": "no/search.json"}, "resume must be a file that can be written"),
            ("mine.py:make", {"resume": "mine.py"}, "mine.py cannot be resumed from: not JSON"),
        ],
    )
    def test_wrong_usage(self, target: str, changes: dict[str, Any], words: str) -> None:
        Path("mine.py").write_text("def make(): pass\n")
        with pytest.raises(CommandFailed, match=words) as caught:
            self.find(target, **changes)
        assert caught.value.code == Code.USAGE
