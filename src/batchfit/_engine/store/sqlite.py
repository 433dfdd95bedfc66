"""The file of found sizes: SQLite under the user's cache folder.

Rules:
- It is a cache. Whatever is wrong with it is a warning in the log, never an error, and the search is run.
- No file that we cannot read is written to. A damaged one is renamed and left for its owner; one of a newer
  batchfit, or of another program, is left where it is and not used.
- Many processes may use it at once, and any of them may be killed at any point: each call is one transaction
  on a connection of its own, with a time-out for the lock.
- No write-ahead log: it needs memory shared between processes, which network file systems do not have, and
  cache folders of clusters are often on one. The rollback journal needs file locks only.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, final

from batchfit.errors import ResultFileError
from batchfit.results import FitResult

log = logging.getLogger("batchfit")

_T = TypeVar("_T")

FILE_NAME: Final = "store.sqlite3"
SCHEMA_VERSION: Final = 1
APPLICATION_ID: Final = 0x62666974  # "bfit": in the header of the file, so that it is known as ours
BUSY_S: Final = 10.0
MOST_ANSWERS: Final = 2000  # a few megabytes; beyond it the least recently used are removed
MOST_BUDGETS: Final = 8  # kept for one key: where the budget is "what is free", it differs from run to run

_TABLE: Final = """
CREATE TABLE answers (
    key TEXT NOT NULL,
    budget_bytes INTEGER NOT NULL,
    found_at REAL NOT NULL,
    result TEXT NOT NULL,
    PRIMARY KEY (key, budget_bytes)
) WITHOUT ROWID
"""
# The ages of answers and how many there are, without reading the results themselves; when an answer was last
# used. Neither is made with the table: files of before have none, and an older batchfit ignores both.
_INDEX: Final = "CREATE INDEX IF NOT EXISTS answers_by_age ON answers (found_at)"
_USES: Final = (
    "CREATE TABLE IF NOT EXISTS uses (key TEXT NOT NULL PRIMARY KEY, used_at REAL NOT NULL) WITHOUT ROWID"
)
_MOST_AT_ONCE: Final = 500  # removed by one write, however many a file holds
_SPARE_BYTES: Final = 4 * 2**20  # a file with more than that unused, and most of it, is made smaller ...
_COPIED_BYTES: Final = 64 * 2**20  # ... once no more than this has to be copied for it
_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def cache_folder(variables: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """Where found sizes are kept: `BATCHFIT_CACHE`, else batchfit's folder in the user's cache folder."""
    if variables.get("BATCHFIT_CACHE"):
        return Path(variables["BATCHFIT_CACHE"]).expanduser().absolute()
    if platform == "win32" and variables.get("LOCALAPPDATA"):
        return Path(variables["LOCALAPPDATA"], "batchfit", "Cache")
    if platform == "darwin":
        return Path("~/Library/Caches/batchfit").expanduser()
    base = variables.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()) / "batchfit"


@final
@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A result that was found before, and when (seconds since 1970)."""

    fit: FitResult
    found_at: float

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.found_at)  # clocks of two machines may differ


@final
@dataclass(frozen=True, slots=True)
class StoreState:
    """What `batchfit doctor` shows; `note` says why the store cannot be used."""

    path: str
    answers: int
    file_bytes: int
    note: str = ""


class _UnusableError(Exception):
    """The file is not for us; the text says why."""


@final
class Store:
    """Answers by key, in one file.

    store = Store()
    store.put(key, fit)
    store.get(key)      # every answer for that key, the newest first
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    @property
    def path(self) -> Path:
        """The file, whether or not it is there yet. A user without a home folder raises RuntimeError."""
        return (self._folder or cache_folder()).absolute() / FILE_NAME

    def get(self, key: str) -> list[StoredAnswer]:
        """The answers for `key`, one per budget, the newest first. Makes no file and no folder."""

        def read(path: Path) -> list[tuple[float, str]]:
            if not path.exists():
                return []
            with _opened(path) as db:
                return db.execute(
                    "SELECT found_at, result FROM answers WHERE key = ? ORDER BY found_at DESC", (key,)
                ).fetchall()

        rows = self._safely(read, "read") or []
        found = []
        for found_at, text in rows:
            with suppress(ResultFileError, TypeError):  # a row of a later version, or garbage: not an answer
                found.append(StoredAnswer(FitResult.from_json(text), float(found_at)))
        return found

    def put(self, key: str, fit: FitResult, *, alone: bool = False) -> bool:
        """Keep `fit`; `alone`: in place of whatever is there for `key`. Whether it was kept."""
        row = (key, fit.budget_bytes, time.time(), fit.to_json(indent=None))

        def write(path: Path) -> bool:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _opened(path, make=True) as db:
                if alone:
                    db.execute("DELETE FROM answers WHERE key = ?", (key,))
                db.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
                _prune(db, key)
            _shrink(path)
            return True

        return self._safely(write, "written") or False

    def mark_used(self, key: str) -> None:
        """Count a confirmed answer of `key` as used now; where that cannot be written, nothing happens."""
        with (
            suppress(sqlite3.Error, OSError, RuntimeError, UnicodeError, _UnusableError),
            _opened(self.path) as db,
        ):
            # A table in a file that has no marks of ours yet would make it a foreign one.
            if db.execute("SELECT 1 FROM answers WHERE key = ?", (key,)).fetchone():
                db.execute(_USES)
                db.execute("INSERT OR REPLACE INTO uses VALUES (?, ?)", (key, time.time()))

    def state(self) -> StoreState:
        """Where the store is and what it holds."""
        try:
            path = self.path
        except RuntimeError as error:
            return StoreState("", 0, 0, str(error))
        try:
            if not path.exists():
                return StoreState(str(path), 0, 0, _unwritable(path.parent))
            with _opened(path) as db:
                (count,) = db.execute("SELECT count(*) FROM answers").fetchone()
            return StoreState(str(path), count, path.stat().st_size, _unwritable(path.parent))
        except (sqlite3.Error, OSError, UnicodeError, _UnusableError) as error:
            return StoreState(str(path), 0, 0, f"the store cannot be used: {error}")

    def _safely(self, work: Callable[[Path], _T], done: str) -> _T | None:
        """What `work` returns; whatever goes wrong is a warning, and a damaged file is renamed."""
        path: Path | None = None
        identity: tuple[int, int] | None = None
        try:
            path = self.path
            identity = identity_of(path)
            return work(path)
        except (sqlite3.Error, OSError, RuntimeError, UnicodeError, _UnusableError) as error:
            why = str(error)
            # A text that is no UTF-8 is of nobody's batchfit either.
            damaged = isinstance(error, UnicodeError) or (
                isinstance(error, sqlite3.Error) and _is_damage(error)
            )
        if damaged and path is not None:
            set_aside(path, identity, why)
        else:
            log.warning(
                "found sizes cannot be %s at %s: %s (BATCHFIT_CACHE names another folder)",
                done,
                path or "a cache folder",
                why,
            )
        return None


@contextmanager
def _opened(path: Path, *, make: bool = False) -> Iterator[sqlite3.Connection]:
    """One transaction on the file; all of it or, after an error or a kill, nothing."""
    address = f"{path.as_uri()}?mode={'rwc' if make else 'rw'}"
    with closing(sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE" if make else "BEGIN")
        _check(db, path, make=make)
        yield db
        db.execute("COMMIT")


def _prune(db: sqlite3.Connection, key: str) -> None:
    db.execute(
        "DELETE FROM answers WHERE key = ? AND budget_bytes NOT IN "
        "(SELECT budget_bytes FROM answers WHERE key = ? ORDER BY found_at DESC LIMIT ?)",
        (key, key, MOST_BUDGETS),
    )
    db.execute(_INDEX)
    (count,) = db.execute("SELECT count(found_at) FROM answers INDEXED BY answers_by_age").fetchone()
    if count > MOST_ANSWERS:
        db.execute(_USES)
        db.execute(
            "DELETE FROM answers WHERE (key, budget_bytes) IN "
            "(SELECT key, budget_bytes FROM answers INDEXED BY answers_by_age LEFT JOIN uses USING (key) "
            "ORDER BY max(found_at, ifnull(used_at, 0)) LIMIT ?)",
            (min(count - MOST_ANSWERS, _MOST_AT_ONCE),),
        )
        db.execute("DELETE FROM uses WHERE key NOT IN (SELECT key FROM answers)")


def _shrink(path: Path) -> None:
    """Shrink a file that is mostly unused; one that another process uses now is left for a later write."""
    address = f"{path.as_uri()}?mode=rw"
    with (
        suppress(sqlite3.OperationalError),  # another process has it, or the disk is full
        closing(sqlite3.connect(address, uri=True, timeout=0, isolation_level=None)) as db,
    ):
        (page_bytes,) = db.execute("PRAGMA page_size").fetchone()
        (pages,) = db.execute("PRAGMA page_count").fetchone()
        (unused,) = db.execute("PRAGMA freelist_count").fetchone()
        used = pages - unused
        if unused * page_bytes > _SPARE_BYTES and used < unused and used * page_bytes < _COPIED_BYTES:
            db.execute("VACUUM")


def _check(db: sqlite3.Connection, path: Path, *, make: bool) -> None:
    """Nothing if the file is ours and of this version; a blank one becomes so with `make`."""
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if (application, version, tables) == (0, 0, 0):
        if not make:
            # Another process is making it at this moment, or was killed while it did.
            db.execute(
                "CREATE TEMP TABLE answers (key TEXT, budget_bytes INTEGER, found_at REAL, result TEXT)"
            )
            return
        db.execute(_TABLE)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return
    if application != APPLICATION_ID:
        raise _UnusableError(f"{path.name} belongs to another program and is left alone")
    if version > SCHEMA_VERSION:
        raise _UnusableError(
            f"{path.name} is of a newer batchfit (schema {version}, and this one knows {SCHEMA_VERSION}) "
            "and is left alone. Upgrade batchfit to use it"
        )


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    # A file with our marks and without our table was written by nobody's batchfit.
    return code in _DAMAGED or (code == sqlite3.SQLITE_ERROR and "no such" in str(error))


def identity_of(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def set_aside(path: Path, identity: tuple[int, int] | None, why: str) -> None:
    """Rename a damaged file, unless another process has done so already and made a new one."""
    if identity is None or identity_of(path) != identity:
        return
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns():x}-{os.getpid()}")
    try:
        # Its journal, if any, stays: whoever makes the next file here deletes it (SQLite's own rule for an
        # empty file), and by now it may as well be that of a new file.
        path.rename(aside)
    except OSError as error:
        log.warning("the store of found sizes %s is damaged (%s) and cannot be renamed: %s", path, why, error)
        return
    if identity_of(aside) != identity:  # in between, another process was quicker: this one is sound
        with suppress(OSError):
            os.link(aside, path)  # unlike a rename, never over a file that is there
            aside.unlink()
        return
    log.warning("the store of found sizes was damaged (%s) and is now %s; a new one is begun", why, aside)


def _unwritable(folder: Path) -> str:
    """Why nothing can be written to `folder`; empty where it can be, or could be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return "" if os.access(folder, os.W_OK | os.X_OK) else f"the store's folder cannot be written: {folder}"
