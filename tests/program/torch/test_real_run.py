"""A program run for real: streams, signals, exit code and terminal are its own, and nothing is left of it."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from short_temp import short_temp

from batchfit._find.pure.bracket import Sizes
from batchfit._program.pure.template import CommandTemplate, FileSetting
from batchfit._program.running.real_run import RealRun, Started
from batchfit.errors import ProgramError
from batchfit.results import ProgramRun

ALL = Sizes.between(1, 2**30)
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own, and leave no file of ours."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.setenv("TMPDIR", str(temp))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.chdir(tmp_path)
        yield
        assert list(temp.iterdir()) == []


def run(*words: str, size: int = 8, restarts: int = 0, sets: tuple[str, ...] = ()) -> list[Started]:
    template = CommandTemplate(words=words, sets=tuple(FileSetting.parse(one) for one in sets))
    said: list[str] = []
    run = RealRun(template=template, sizes=ALL, restarts=restarts, out="here", say=said.append)
    starts = run.to_the_end(size)
    assert len(said) == len(starts) - (not starts[-1][1].too_large)
    return starts


def run_cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "batchfit", "run", "--size", "4", *arguments]


def wait_for(path: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path.name} did not come"
        time.sleep(0.02)
    return path.read_text()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.02)


def test_streams_and_the_exit_code_are_the_programs(capfd: pytest.CaptureFixture[str]) -> None:
    ((size, ending),) = run("sh", "-c", "printf 'a\\rb %s' {}; printf err >&2; exit 7")
    assert (size, ending.exit_code, ending.too_large) == (8, 7, "")
    assert capfd.readouterr() == ("a\rb 8", "err")


def test_nothing_of_ours_is_in_its_python_without_restarts(capfd: pytest.CaptureFixture[str]) -> None:
    run(sys.executable, "-c", "import os; print(sorted(os.environ))", "{}")
    assert capfd.readouterr().out == f"{sorted({*os.environ, 'BATCHFIT_RUN'})}\n"


def test_a_config_file_is_there_as_long_as_it_runs(capfd: pytest.CaptureFixture[str]) -> None:
    Path("c.yaml").write_text("train:\n  size: 1\n")
    run("sh", "-c", 'cat "$0"; echo {out}', "c.yaml", sets=("c.yaml:train.size",))
    assert capfd.readouterr().out == "train:\n  size: 8\nhere\n"


def test_a_command_that_is_not_found() -> None:
    with pytest.raises(ProgramError, match="could not be started: no-such-command: No such file"):
        run("no-such-command", "{}")


def test_what_is_left_after_a_signal_is_ended_and_after_an_exit_stays(tmp_path: Path) -> None:
    ((_, ending),) = run("sh", "-c", "setsid sleep 500 & echo $! > left; sleep 0.2; kill -9 $$ # {}")
    assert ending.exit_code == 137
    wait_until_gone(int(Path("left").read_text()))
    run("sh", "-c", "sleep 500 >/dev/null 2>&1 & echo $! > left # {}")
    pid = int(Path("left").read_text())
    assert is_running(pid)
    os.kill(pid, signal.SIGKILL)


OOM = """
import sys, torch
size = int(sys.argv[1])
print("at", size, flush=True)
if size > int(sys.argv[2]):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
sys.exit(int(sys.argv[3]))
"""


def test_an_oom_starts_it_again_smaller(capfd: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(OOM)
    starts = run(sys.executable, "train.py", "{}", "7", "5", size=10, restarts=3)
    assert [(size, ending.exit_code) for size, ending in starts] == [(10, 1), (8, 1), (6, 5)]
    assert "Tried to allocate" in starts[0][1].too_large
    assert capfd.readouterr().out == "at 10\nat 8\nat 6\n"


def test_another_error_starts_nothing() -> None:
    assert len(run(sys.executable, "-c", "raise ValueError('CUDA out of memory')", "{}", restarts=3)) == 1


@pytest.mark.slow  # two starts of torch
def test_restarts_end() -> None:
    Path("train.py").write_text(OOM)
    starts = run(sys.executable, "train.py", "{}", "0", "5", size=10, restarts=1)
    assert [size for size, _ in starts] == [10, 8]


def test_sigterm_is_passed_on_and_the_code_comes_back(tmp_path: Path) -> None:
    Path("t.sh").write_text("trap 'echo asked > asked; exit 9' TERM\necho $$ > begun\nsleep 500 & wait\n")
    ours = subprocess.Popen(run_cli("--restarts", "2", "--output", "r.json", "--", "sh", "t.sh", "{}"))
    wait_for(tmp_path / "begun")
    ours.terminate()
    assert ours.wait(LIMIT_S) == 9
    assert Path("asked").exists()
    result = ProgramRun.from_json(Path("r.json").read_text())
    assert (result.exit_code, result.batch_size, result.restarts) == (9, 4, 0)


def test_a_kill_of_ours_leaves_nothing(tmp_path: Path) -> None:
    Path("t.sh").write_text(
        "setsid sleep 500 & echo $! > far\nsleep 500 & echo $! > near\necho $$ > own; wait\n"
    )
    ours = subprocess.Popen(run_cli("--", "sh", "t.sh", "{}"))
    pids = [int(wait_for(tmp_path / name)) for name in ("far", "near", "own")]
    ours.kill()
    assert ours.wait(LIMIT_S) == -9
    for pid in pids:
        wait_until_gone(pid)
    deadline = time.monotonic() + LIMIT_S
    while list(Path(tempfile.gettempdir()).iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


READS = """
import sys, time
print("tty", sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty())
print("got", input("name? "))
try:
    time.sleep(500)
except KeyboardInterrupt:
    print("saved")
    sys.exit(6)
"""


def test_the_terminal_is_the_programs_with_its_keys(tmp_path: Path) -> None:
    Path("train.py").write_text(READS)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(sys.executable, run_cli("--", sys.executable, "train.py", "{}"))
    text = ""

    def until(wanted: str) -> None:
        nonlocal text
        deadline = time.monotonic() + LIMIT_S
        while wanted not in text:
            assert time.monotonic() < deadline, text
            if select.select([terminal], [], [], 0.1)[0]:
                text += os.read(terminal, 4096).decode()

    until("name? ")
    os.write(terminal, b"Ada\n")
    until("got Ada")
    os.write(terminal, b"\x03")
    until("saved")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 6
    assert "tty True True True" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "4", "--", "python", "{}", "{out}"], "out must be given where the command has {out}"),
        (["--json", "--size", "4", "--", "python", "{}"], "json must be left out without --dry-run"),
        (["--size", "4", "--min-size", "8", "--", "python", "{}"], "size must be at least min_size"),
        (["--size", "4", "--", "python", "train.py"], "no place for the batch size"),
        (["--fresh", "--no-store", "--", "python", "{}"], "fresh must be False"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_run(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli_runner import runner

    from batchfit._cli.app import app

    ran = runner().invoke(app, ["run", *arguments])
    assert ran.exit_code == 2
    assert message in ran.stderr


def test_a_dry_run_shows_the_command(tmp_path: Path) -> None:
    from cli_runner import runner

    from batchfit._cli.app import app

    words = ["--dry-run", "--env", "SIZE", "--size", "4", "--", "python", "a b.py", "--n={}"]
    plain = runner().invoke(app, ["run", *words])
    assert (plain.exit_code, plain.stdout) == (0, "SIZE=4 python 'a b.py' --n=4\n")
    shown = json.loads(runner().invoke(app, ["run", "--json", *words]).stdout)
    assert shown["command"] == ["python", "a b.py", "--n=4"]
    assert shown["environment"] == {"SIZE": "4"}


WITHOUT_A_PLACE = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.randn(8192 if step else 8, 64)).sum().backward()  # a later step needs more
    optimizer.step()
print("trained")
"""


def run_without_a_place(*flags: str, program: str = "train.py") -> subprocess.CompletedProcess[str]:
    Path("train.py").write_text(WITHOUT_A_PLACE)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(Path("compiled").resolve())}  # torch's own
    Path("starts.sh").write_text(f"{sys.executable} train.py\n")
    words = [sys.executable, program] if program.endswith(".py") else ["sh", program]
    command = [sys.executable, "-m", "batchfit", "run", *flags, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_a_command_without_a_place_for_a_size_runs_within_a_budget() -> None:
    small = run_without_a_place("--budget", "4MiB", program="starts.sh")
    assert small.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB" in small.stderr
    assert small.stdout == ""
    large = run_without_a_place("--budget", "64MiB")
    assert (large.returncode, large.stdout) == (0, "trained\n")
    assert "each process may use 64.0 MiB, on a CPU as virtual memory" in large.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), "With --budget 2GiB it is run as it is"),
        (("--budget", "4MiB", "--restarts", "2"), "restarts must be left out where the command has no place"),
        (("--budget", "4MiB", "--max-size", "8"), "max_size must be left out where the command has no place"),
        (("--budget", "32"), "did you mean '32GiB'"),
    ],
)
def test_what_a_command_without_a_place_needs(flags: tuple[str, ...], says: str) -> None:
    ran = run_without_a_place(*flags)
    assert ran.returncode == 2
    assert says in ran.stderr.replace("\n", " ")
    assert "trained" not in ran.stdout
