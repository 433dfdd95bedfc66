"""Files that are there whole or not at all, and files that one search at a time may use.

Rules: a lock goes when its process does, however that ends; a second search gets an error at once, unless it
says how long it can wait; a file system that cannot lock is used without.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from batchfit.errors import ResultFileError

if sys.platform != "win32":
    import fcntl

_POLL_S = 0.02  # how often a lock that others have is asked for


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    with atomic_stream(path) as stream:
        stream.write(text.encode("utf-8"))


@contextlib.contextmanager
def atomic_stream(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes are the file when it is closed, whole; after an error the file is the old one."""
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:  # a pipe or a device: nothing to put in its place
            yield stream
        return
    real = path.resolve()
    draft = real.with_name(f".{real.name}.{os.getpid()}.part")
    try:
        with draft.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(real)
    finally:
        draft.unlink(missing_ok=True)


def why_not_writable(path: Path) -> str:
    """Why no file can be written there, as far as one can see; empty where one can."""
    folder = path.resolve().parent
    if path.is_dir():
        return "it is a folder"
    if not folder.is_dir():
        return f"the folder {str(folder)!r} does not exist"
    if not os.access(path if path.exists() and not path.is_file() else folder, os.W_OK):
        return "permission denied"
    return ""


@contextlib.contextmanager
def locked(path: Path, *, wait_s: float = 0.0) -> Iterator[None]:
    """Inside, no other search, here or in another process, is inside with the same path.

    Where it is in use, this waits up to `wait_s` until it is free.
    """
    # Beside the file, since that one is replaced each time it is written.
    real = path.resolve()
    beside = real.with_name(f".{real.name}.lock")
    descriptor = _locked(beside, path, time.monotonic() + wait_s)
    try:
        yield
    finally:
        if descriptor is not None:
            beside.unlink(missing_ok=True)  # while it is ours: whoever opens it later opens another
            os.close(descriptor)


def _locked(beside: Path, path: Path, until: float) -> int | None:
    if sys.platform == "win32":
        return None
    while True:
        try:
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a folder that cannot be written to: saving will say so
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(descriptor, beside):
                return descriptor
            os.close(descriptor)  # its owner took it away after we had opened it
        except BlockingIOError:
            os.close(descriptor)
            if time.monotonic() < until:
                time.sleep(_POLL_S)
                continue
            raise ResultFileError(
                f"{path} is in use by another search. Wait for that one, or name another file to resume from"
            ) from None
        except OSError:  # no locks on this file system
            os.close(descriptor)
            return None


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), there)
