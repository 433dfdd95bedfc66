"""However a search in a program ends: no process of it is left, no file of ours, and what ran is said."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from short_temp import short_temp

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a process table in /proc")

# Trains with small sizes; with larger ones it takes two steps and hangs. It has a child in a session of its
# own, which ignores signals, and one of a shell's.
PROGRAM = """
import os, subprocess, sys, time
import torch
size = int(sys.argv[1])
stubborn = "import signal as s, time; s.signal(15, s.SIG_IGN); s.signal(1, s.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True)
subprocess.Popen("sleep 600 & sleep 601", shell=True)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1000):
    model(torch.randn(size, 64)).sum().backward()
    optimizer.step()
    if size > 8 and step == 1:
        open("hangs", "w").close()
        print("waiting", flush=True)
        time.sleep(600)
open("finished", "w").close()
"""
FIND = ["find", "--json", "--budget", "4MiB", "--start", "8", "--steps", "3"]


class Search:
    """`batchfit find` in a process of its own, in a folder of its own."""

    def __init__(self, folder: Path, temp: Path) -> None:
        self.folder, self.temp, self.mark = folder, temp, uuid.uuid4().hex
        (folder / "train.py").write_text(PROGRAM)
        self.process: subprocess.Popen[str] | None = None

    def start(
        self, *flags: str, within: Sequence[str] = (), before: Callable[[], None] | None = None
    ) -> subprocess.Popen[str]:
        find = [sys.executable, "-m", "batchfit", *FIND, *flags, "--", sys.executable, "train.py", "{}"]
        words = [*within, *find]
        own = {
            "MARK": self.mark,
            "TMPDIR": str(self.temp),
            "TORCHINDUCTOR_CACHE_DIR": f"{self.folder}/compiled",  # torch's own, and it stays
            "PYTHONDONTWRITEBYTECODE": "1",  # Python 3.11 writes files cut short where there is no room
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            words,
            cwd=self.folder,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )
        return self.process

    def await_hang(self) -> None:
        """Wait until the second size hangs: then the first has run."""
        deadline = time.monotonic() + 120
        while not (self.folder / "hangs").exists():
            assert self.process is not None
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(self.living()) > 4

    def living(self) -> list[int]:
        """The processes of this search, by the environment that all of them have."""
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    environment = Path(f"/proc/{name}/environ").read_bytes()
                except OSError:
                    continue
                if f"MARK={self.mark}".encode() in environment:
                    found.append(int(name))
        return found

    def check_all_gone(self) -> None:
        """Nothing is left of it, soon after its end."""
        deadline = time.monotonic() + 15
        while (self.living() or any(self.temp.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.living() == []
        assert list(self.temp.iterdir()) == []
        assert not (self.folder / "finished").exists()


@pytest.fixture
def temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the search has its files."""
    with short_temp(monkeypatch) as folder:
        yield folder


@pytest.fixture
def search(tmp_path: Path, temp: Path) -> Iterator[Search]:
    """A search that nothing is left of, whatever the test does."""
    search = Search(tmp_path, temp)
    yield search
    for pid in search.living():
        os.kill(pid, signal.SIGKILL)
    if search.process is not None:
        search.process.communicate()


def _no_core() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what SIGQUIT leaves, and takes long to write


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param(signal.SIGQUIT, marks=pytest.mark.slow),
    ],
)
def test_a_batchfit_that_is_killed_leaves_nothing(search: Search, number: signal.Signals) -> None:
    process = search.start("--resume", "search.json", before=_no_core)
    search.await_hang()
    process.send_signal(number)
    process.communicate(timeout=30)
    search.check_all_gone()
    kept = json.loads((search.folder / "search.json").read_text())
    assert [trial["size"] for trial in kept["trials"]] == [8]


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (signal.SIGINT, 1, 130),
        pytest.param(signal.SIGINT, 2, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 1, 143, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_search_says_what_ran(
    search: Search, number: signal.Signals, times: int, code: int
) -> None:
    process = search.start()
    search.await_hang()
    for _ in range(times):
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    search.check_all_gone()
    assert json.loads(out)["batch_size"] == 8
    assert json.loads(out)["stopped_because"] == "interrupted"


@pytest.mark.slow
def test_a_process_between_that_is_killed_is_a_trial_that_was(search: Search) -> None:
    process = search.start("--max-trials", "2", "--soak-steps", "0")
    search.await_hang()
    guardians = [
        pid for pid in search.living() if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(guardians[0], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [trial["outcome"] for trial in json.loads(out)["trials"]] == ["fits", "killed"]
    search.check_all_gone()


@pytest.mark.slow  # it hangs for 25 s
def test_a_hang_is_too_large_and_the_search_goes_on(search: Search) -> None:
    process = search.start("--timeout-s", "25", "--max-trials", "2", "--soak-steps", "0")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    fit = json.loads(out)
    assert fit["batch_size"] == 8
    assert [trial["outcome"] for trial in fit["trials"]] == ["fits", "timeout"]
    search.check_all_gone()


@pytest.mark.slow  # it hangs until its time is over
def test_a_time_limit_ends_the_trial_that_runs(search: Search) -> None:
    process = search.start("--time-limit-s", "30")
    begun_s = time.monotonic()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert time.monotonic() - begun_s < 120  # it would hang for 600 s
    fit = json.loads(out)
    assert (fit["batch_size"], fit["stopped_because"]) == (8, "time_limit")
    search.check_all_gone()


# Takes its steps at every size up to 32, and has children as above.
WHOLE = PROGRAM.replace("size > 8 and step == 1", "False")
assert WHOLE != PROGRAM


def _torch_is_loaded(search: Search) -> bool:
    assert search.process is not None
    return b"libtorch" in Path(f"/proc/{search.process.pid}/maps").read_bytes()


def _a_probe_starts(search: Search) -> bool:
    return any(search.temp.iterdir())


def _a_trial_has_ended(search: Search) -> bool:
    kept = search.folder / "search.json"
    return kept.exists() and bool(json.loads(kept.read_text())["trials"])


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        (_torch_is_loaded, signal.SIGTERM),
        pytest.param(_torch_is_loaded, signal.SIGINT, marks=pytest.mark.slow),
        (_a_probe_starts, signal.SIGINT),
        pytest.param(_a_probe_starts, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(_a_trial_has_ended, signal.SIGINT, marks=pytest.mark.slow),
        (_a_trial_has_ended, signal.SIGTERM),
    ],
)
def test_a_signal_at_a_moment_that_matters(
    search: Search, moment: Callable[[Search], bool], number: signal.Signals
) -> None:
    (search.folder / "train.py").write_text(WHOLE)
    process = search.start(*ANY_MOMENT, before=_signals_as_in_a_shell)
    deadline = time.monotonic() + 100
    while not moment(search):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    _check_signalled(search, number)


@pytest.mark.slow  # 61 searches, 60 of them ended at another moment each
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_leaves_nothing(tmp_path: Path, temp: Path, number: signal.Signals) -> None:
    whole_s, moments = 0.0, 21
    for moment in range(moments):
        (tmp_path / str(moment)).mkdir()
        search = Search(tmp_path / str(moment), temp)
        (search.folder / "train.py").write_text(WHOLE)
        begun_s = time.monotonic()
        process = search.start(*ANY_MOMENT, before=_signals_as_in_a_shell)
        if moment:
            time.sleep(whole_s * moment / moments)
            _check_signalled(search, number)
            continue
        out, err = process.communicate(timeout=240)
        whole_s = time.monotonic() - begun_s
        assert json.loads(out)["batch_size"] == 32, err
        search.check_all_gone()


ANY_MOMENT = ("--resume", "search.json", "--max-size", "32", "--no-store")


def _signals_as_in_a_shell() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a test in the background would have it ignored


def _check_signalled(search: Search, number: signal.Signals) -> None:
    """Send the signal; whatever the moment is, nothing is left, and what had run is said."""
    process = search.process
    assert process is not None
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    search.check_all_gone()
    kept = search.folder / "search.json"
    trials = json.loads(kept.read_text())["trials"] if kept.exists() else []
    if process.returncode == 0:  # it may have ended before
        assert json.loads(out)["batch_size"] == 32, err
    elif number is signal.SIGKILL:
        assert process.returncode == -9
    else:
        # -number: before the first line of ours, by Python itself
        assert process.returncode in (128 + number, -number), err
        assert "Traceback" not in err or process.returncode == -number
        assert not trials or json.loads(out)["stopped_because"] == "interrupted", err


# A disk of its own: its size and how many files it takes; what is left there is written beside it.
SMALL_DISK = """mount -t tmpfs -o size=$0,nr_inodes=$1 none "$TMPDIR" || exit 99
shift; "$@"; code=$?; ls -A "$TMPDIR" > left; exit $code"""


@pytest.mark.slow  # a search each
@pytest.mark.parametrize(
    ("size", "files"),
    [("64k", 3), ("64k", 6), ("64k", 9), ("64k", 12), ("64k", 20), ("4k", 0), ("12k", 0), ("40k", 0)],
)
def test_a_full_disk_at_any_file_leaves_nothing(search: Search, size: str, files: int) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount of its own")
    (search.folder / "train.py").write_text(WHOLE)
    (search.folder / "c.yaml").write_text("size: 1\n")
    within = ["unshare", "-rm", "sh", "-c", SMALL_DISK, size, str(files)]
    _, err = search.start("--max-size", "8", "--no-store", within=within).communicate(timeout=120)
    assert search.process is not None
    code = search.process.returncode
    assert code in (0, 4), err
    if code:
        assert "Free some space" in err or "No space left on device" in err
    assert "Traceback" not in err.partition("the program raised")[0] or "train.py" in err
    assert (search.folder / "left").read_text() == ""
    search.check_all_gone()


def _no_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))


def _little_room() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1300, 1300))


def test_a_full_disk_is_said_before_anything_runs(search: Search) -> None:
    process = search.start(before=_no_room)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert "no folder for a probe could be made" in err
    assert "Free some space, or name another place with TMPDIR" in err
    search.check_all_gone()


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_costs_the_file_and_not_the_answer(search: Search) -> None:
    process = search.start("--resume", "search.json", "--max-size", "8", before=_little_room)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["batch_size"] == 8
    assert "the search could not be kept" in err
    search.check_all_gone()


@pytest.mark.slow
def test_a_program_without_room_shows_its_own_error(search: Search) -> None:
    (search.folder / "train.py").write_text("import torch\nopen('data', 'wb').write(bytes(10_000))\n")
    _, err = search.start(before=_little_room).communicate(timeout=60)
    assert "the program raised OSError: [Errno 27] File too large" in err
    assert 'File "train.py", line 2' in err.replace(f"{search.folder}/", "")
    search.check_all_gone()
