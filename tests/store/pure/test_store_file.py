"""The store's file without torch: many writers, kills, damage, newer files, folders that cannot be used."""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import batchfit
from batchfit._engine.store import sqlite
from batchfit._engine.store.sqlite import FILE_NAME, Store, cache_folder
from batchfit.results import FitResult, Trial

SOURCE = str(Path(batchfit.__file__).parents[1])


def fit(size: int = 8, *, budget_bytes: int = 1000) -> FitResult:
    return FitResult(
        batch_size=size,
        trials=(Trial(size=size, outcome="fits", steps_run=25, peak_bytes=900, soak=True),),
        survived_steps=25,
        stopped_because="bracketed",
        budget_bytes=budget_bytes,
        peak_bytes=900,
        device="cpu",
        strategy="guided",
        elapsed_s=1.0,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def sizes(store: Store, key: str) -> list[int]:
    return [answer.fit.batch_size for answer in store.get(key)]


class TestFolder:
    def test_of_each_system(self) -> None:
        home = Path("~").expanduser()
        assert cache_folder({}, "linux") == home / ".cache" / "batchfit"
        assert cache_folder({"XDG_CACHE_HOME": "/big/cache"}, "linux") == Path("/big/cache/batchfit")
        assert cache_folder({"XDG_CACHE_HOME": "not/absolute"}, "linux") == home / ".cache" / "batchfit"
        assert cache_folder({}, "darwin") == home / "Library" / "Caches" / "batchfit"
        assert cache_folder({"LOCALAPPDATA": "/local"}, "win32") == Path("/local/batchfit/Cache")

    @pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
    def test_the_variable_decides(self, platform: str) -> None:
        given = {"BATCHFIT_CACHE": "/mine", "XDG_CACHE_HOME": "/x", "LOCALAPPDATA": "/l"}
        assert cache_folder(given, platform) == Path("/mine")
        assert cache_folder({"BATCHFIT_CACHE": ""}, "linux") == Path("~/.cache/batchfit").expanduser()

    def test_tests_use_a_folder_of_their_own(self) -> None:
        assert Store().path.parent == Path(os.environ["BATCHFIT_CACHE"])
        assert not Store().path.is_relative_to(Path("~").expanduser() / ".cache")


class TestAnswers:
    def test_what_is_put_comes_back(self, folder: Path) -> None:
        store = Store(folder)
        assert store.get("a") == []
        assert not folder.exists()  # looking makes nothing
        assert store.put("a", fit(8))
        (answer,) = Store(folder).get("a")
        assert answer.fit == fit(8)
        assert 0 <= answer.age_s < 60
        assert store.get("b") == []

    def test_a_folder_may_be_relative(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As it is where HOME is; SQLite's addresses are not."""
        monkeypatch.chdir(tmp_path)
        assert Store(Path("cache")).put("key", fit(8))
        assert sizes(Store(tmp_path / "cache"), "key") == [8]

    def test_one_answer_a_budget_the_newest_first(self, folder: Path) -> None:
        store = Store(folder)
        for size, budget in ((8, 1000), (9, 1100), (7, 1000)):
            store.put("a", fit(size, budget_bytes=budget))
        assert sizes(store, "a") == [7, 9]
        store.put("a", fit(5, budget_bytes=500), alone=True)
        assert sizes(store, "a") == [5]

    def test_the_least_recently_used_is_removed(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(folder)
        monkeypatch.setattr(sqlite, "MOST_ANSWERS", 3)
        for name in ("a", "b", "c"):
            store.put(name, fit(8))
        store.mark_used("a")
        store.mark_used("never stored")
        store.put("d", fit(8))
        assert [name for name in "abcd" if sizes(store, name)] == ["a", "c", "d"]
        store.put("e", fit(8))
        store.put("f", fit(8))  # by now all others were found after "a" was used
        assert [name for name in "acdef" if sizes(store, name)] == ["d", "e", "f"]
        with sqlite3.connect(store.path) as db:
            assert db.execute("SELECT count(*) FROM uses").fetchone() == (0,)
        db.close()

    def test_a_use_that_cannot_be_written_is_no_error(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = Store(folder)
        store.mark_used("a")
        assert not folder.exists() or not list(folder.iterdir())
        store.put("a", fit(8))
        store.path.write_text("damage " * 1000)
        store.mark_used("a")
        assert caplog.text == ""

    def test_it_stays_bounded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(folder)
        for number in range(12):
            store.put("a", fit(number + 1, budget_bytes=1000 + number))
        assert sizes(store, "a") == [12, 11, 10, 9, 8, 7, 6, 5]
        monkeypatch.setattr(sqlite, "MOST_ANSWERS", 3)
        store.put("b", fit(1))
        assert sizes(store, "a") == [12, 11]
        assert sizes(store, "b") == [1]

    def test_a_file_that_something_else_has_filled_becomes_small_again(self, folder: Path) -> None:
        store = Store(folder)
        store.put("a", fit(8))
        text = fit(9).to_json(indent=None) + " " * 4000
        with sqlite3.connect(store.path) as db:
            rows = ((f"{number:064}", 1000, float(number), text) for number in range(6000))
            db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?)", rows)
        db.close()
        before = store.path.stat().st_size
        left = []
        for number in range(10):
            assert store.put(f"new {number}", fit(number + 1))
            left.append(store.state().answers)
        # One write removes a few; ten remove all that is too much, the oldest first: nothing was used.
        assert all(one - two <= 500 for one, two in itertools.pairwise(left))
        assert left[0] > 5400
        assert left[-1] == 2000
        assert store.path.stat().st_size < before / 2
        assert sizes(store, "a") == [8]
        assert sizes(store, f"{5999:064}") == [9]
        assert sizes(store, f"{0:064}") == []

    def test_a_row_that_is_no_result_is_no_answer(self, folder: Path) -> None:
        store = Store(folder)
        store.put("a", fit(8))
        with sqlite3.connect(store.path) as db:
            db.execute("UPDATE answers SET result = '{\"schema_version\": 99}'")
        db.close()
        assert store.get("a") == []
        store.put("a", fit(9))
        assert sizes(store, "a") == [9]

    def test_an_age_is_never_negative(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = Store(folder)
        store.put("a", fit())
        (answer,) = store.get("a")
        monkeypatch.setattr(time, "time", lambda: answer.found_at - 1000)
        assert answer.age_s == 0


class TestFilesThatAreNotOurs:
    def test_a_damaged_file_is_set_aside_and_kept(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder.mkdir()
        (folder / FILE_NAME).write_bytes(b"this was a store once" * 400)
        store = Store(folder)
        assert store.get("a") == []
        assert "was damaged" in caplog.text
        (aside,) = folder.iterdir()
        assert aside.read_bytes() == b"this was a store once" * 400
        caplog.clear()
        assert store.put("a", fit(8))
        assert sizes(store, "a") == [8]
        assert caplog.text == ""
        assert len(list(folder.iterdir())) == 2

    def test_damage_met_while_writing(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = Store(folder)
        for number in range(50):
            store.put(f"key {number}", fit())
        data = bytearray(store.path.read_bytes())
        data[4096:] = random.Random(0).randbytes(len(data) - 4096)
        store.path.write_bytes(data)
        assert not store.put("a", fit(8))
        assert "was damaged" in caplog.text
        (aside,) = folder.glob("*.damaged-*")
        assert aside.read_bytes() == data
        assert store.put("a", fit(8))

    def test_a_table_of_another_shape_is_damage(self, folder: Path) -> None:
        folder.mkdir()
        with sqlite3.connect(folder / FILE_NAME) as db:
            db.execute("CREATE TABLE answers (question TEXT)")
            db.execute(f"PRAGMA application_id = {sqlite.APPLICATION_ID}")
            db.execute("PRAGMA user_version = 1")
        db.close()
        assert Store(folder).get("a") == []
        assert len(list(folder.glob("*.damaged-*"))) == 1

    @pytest.mark.parametrize(
        ("pragma", "words"),
        [("user_version = 2", "of a newer batchfit"), ("application_id = 7", "belongs to another program")],
    )
    def test_a_newer_or_foreign_file_is_left_alone(
        self, folder: Path, caplog: pytest.LogCaptureFixture, pragma: str, words: str
    ) -> None:
        store = Store(folder)
        store.put("a", fit(8))
        with sqlite3.connect(store.path) as db:
            db.execute(f"PRAGMA {pragma}")
        db.close()
        before = store.path.read_bytes()
        assert store.get("a") == []
        assert not store.put("a", fit(9))
        assert caplog.text.count(words) == 2
        assert words in store.state().note
        assert store.path.read_bytes() == before
        assert list(folder.iterdir()) == [store.path]

    def test_an_empty_file_is_a_store_in_the_making(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder.mkdir()
        (folder / FILE_NAME).touch()
        store = Store(folder)
        assert store.get("a") == []
        assert store.state().answers == 0
        assert store.put("a", fit(8))
        assert sizes(store, "a") == [8]
        assert caplog.text == ""

    def test_a_use_leaves_an_empty_file_empty(self, folder: Path) -> None:
        """Such as one that took the place of a damaged file, between an answer and its use."""
        folder.mkdir()
        (folder / FILE_NAME).touch()
        store = Store(folder)
        store.mark_used("a")
        assert store.put("a", fit())
        assert sizes(store, "a") == [8]

    def test_a_sound_file_that_came_in_between_is_not_set_aside(self, folder: Path) -> None:
        store = Store(folder)
        store.put("a", fit(8))
        sqlite.set_aside(store.path, (0, 0), "seen in a file that another process has renamed")
        assert sizes(store, "a") == [8]


READ_ONLY = """
import json, logging, os, sys
from pathlib import Path
from batchfit._engine.store.sqlite import Store
from batchfit.results import FitResult

logging.basicConfig()
if os.geteuid() == 0:
    os.setuid(65534)  # root may write anywhere
folder, fit = Path(sys.argv[1]), FitResult.from_json(sys.argv[2])
store = Store(folder)
assert store.put("a", fit)
store.path.chmod(0o400)
folder.chmod(0o500)
try:
    found = len(store.get("a"))  # a shared store may be read
    print(json.dumps([found, store.put("a", fit), store.state().note]))
finally:
    folder.chmod(0o700)
"""


class TestFoldersThatCannotBeUsed:
    def test_a_file_in_the_way_is_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "file").write_text("here")
        store = Store(tmp_path / "file" / "cache")
        assert store.get("a") == []
        assert not store.put("a", fit())
        assert "cannot be written" in caplog.text

    def test_a_folder_without_the_right_to_write(self) -> None:
        with tempfile.TemporaryDirectory() as name:  # not tmp_path, which nobody but its owner may enter
            os.chmod(name, 0o777)
            done = subprocess.run(
                [sys.executable, "-c", READ_ONLY, f"{name}/cache", fit().to_json()],
                env={**os.environ, "PYTHONPATH": SOURCE},
                capture_output=True,
                text=True,
                timeout=60,
            )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [1, False, f"the store's folder cannot be written: {name}/cache"]
        assert "found sizes cannot be written" in done.stderr
        assert "(BATCHFIT_CACHE names another folder)" in done.stderr

    def test_no_home(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        def nowhere() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(sqlite, "cache_folder", nowhere)
        assert Store().get("a") == []
        assert not Store().put("a", fit())
        assert "home directory" in caplog.text
        assert "home directory" in Store().state().note

    def test_a_lock_that_is_held_is_waited_for_and_then_a_warning(
        self, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sqlite, "BUSY_S", 0.2)
        store = Store(folder)
        store.put("a", fit(8))
        other = sqlite3.connect(store.path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        begun = time.monotonic()
        assert not store.put("a", fit(9))
        assert time.monotonic() - begun >= 0.15
        other.execute("ROLLBACK")
        other.close()
        assert "locked" in caplog.text
        assert sizes(store, "a") == [8]

    def test_nothing_is_left_open(self, folder: Path) -> None:
        store = Store(folder)
        store.put("a", fit(8))
        before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        for _ in range(5):
            store.put("a", fit(8))
            store.get("a")
        store.path.write_bytes(b"damage " * 1000)
        store.get("a")
        after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        assert after == before
        assert list(folder.glob(f"{FILE_NAME}-*")) == []


class TestState:
    def test_for_doctor(self, folder: Path) -> None:
        store = Store(folder)
        assert (store.state().answers, store.state().file_bytes, store.state().note) == (0, 0, "")
        store.put("a", fit())
        state = store.state()
        assert state.path == str(folder / FILE_NAME)
        assert (state.answers, state.note) == (1, "")
        assert state.file_bytes == store.path.stat().st_size > 0


# --- many processes ------------------------------------------------------------------------------

WRITER = """
import json, sys
from pathlib import Path
from batchfit._engine.store.sqlite import Store
from batchfit.results import FitResult

store, number, count = Store(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
base = FitResult.from_json(sys.argv[4])
print("ready", flush=True)
kept = 0
for turn in range(count):
    one = base.model_copy(update={"batch_size": turn + 1, "budget_bytes": 1000 + number})
    kept += store.put(f"mine {number}", one, alone=True)
    kept += store.put("shared", one)
    found = store.get("shared")
    assert all(answer.fit.peak_bytes == base.peak_bytes for answer in found)
    print(turn, flush=True)
print(json.dumps({"kept": kept}), flush=True)
"""


def writer(folder: Path, number: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(number), str(count), fit().to_json()],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def sound(path: Path) -> bool:
    db = sqlite3.connect(path)
    (verdict,) = db.execute("PRAGMA integrity_check").fetchone()
    db.close()
    return bool(verdict == "ok")


def test_eight_writers_and_one_killed_in_the_middle(folder: Path) -> None:
    turns = 15
    writers = [writer(folder, number, turns) for number in range(8)]
    victim = writer(folder, 99, 10_000)
    try:
        assert victim.stdout is not None
        for line in victim.stdout:  # it is in the middle of its work, and of everyone else's
            if line.strip() == "3":
                break
        os.kill(victim.pid, signal.SIGKILL)
        victim.communicate(timeout=60)
        for process in writers:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert err == ""  # not one warning: no lock was given up on, nothing was set aside
            assert json.loads(out.splitlines()[-1]) == {"kept": 2 * turns}
    finally:
        for process in (*writers, victim):
            process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
    store = Store(folder)
    for number in range(8):
        assert sizes(store, f"mine {number}") == [turns]
    assert sound(store.path)
    assert list(folder.glob("*.damaged-*")) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from batchfit._engine.store import sqlite
from batchfit.results import FitResult

store, fit = sqlite.Store(Path(sys.argv[1])), FitResult.from_json(sys.argv[2])
with sqlite._opened(store.path, make=True) as db:
    db.execute("PRAGMA cache_size = 2")
    db.execute("DELETE FROM answers")  # more pages than the cache holds: some are in the file already
    for number in range(400):
        db.execute("INSERT INTO answers VALUES (?, 1, 1.0, ?)", (f"half {number}", "x" * 4000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_transaction_leaves_what_was_there(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(folder)
    for number in range(30):
        store.put(f"key {number}", fit(number + 1))
    before = store.path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), fit().to_json()],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert store.path.stat().st_size > before  # half of it reached the file
    assert (folder / f"{FILE_NAME}-journal").exists()
    with caplog.at_level(logging.WARNING):
        assert [sizes(store, f"key {number}") for number in range(30)] == [[n + 1] for n in range(30)]
        assert store.get("half 0") == []
        assert store.put("after", fit(3))
    assert caplog.text == ""
    assert sound(store.path)


def test_the_journal_of_a_file_that_was_set_aside_is_not_played_back(folder: Path) -> None:
    store = Store(folder)
    for number in range(30):
        store.put(f"key {number}", fit(number + 1))
    subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), fit().to_json()],
        env={**os.environ, "PYTHONPATH": SOURCE},
        timeout=60,
    )
    journal = folder / f"{FILE_NAME}-journal"
    assert journal.stat().st_size > 0
    sqlite.set_aside(store.path, sqlite.identity_of(store.path), "as if it were damaged")
    assert journal.exists()
    assert not store.path.exists()
    assert store.put("a", fit(8))
    assert sizes(store, "a") == [8]
    assert store.get("key 3") == []
    assert sound(store.path)


def test_many_processes_meet_a_damaged_file(folder: Path) -> None:
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(b"damage " * 1000)
    writers = [writer(folder, number, 3) for number in range(6)]
    for process in writers:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    store = Store(folder)
    assert all(sizes(store, f"mine {number}") == [3] for number in range(6))
    assert sound(store.path)
    (aside,) = folder.glob("*.damaged-*")
    assert aside.read_bytes() == b"damage " * 1000
