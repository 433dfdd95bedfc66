"""An error of the user's code, shown so that the user finds it.

Rules: the headline names file and line of the user's own last frame; the traceback shows the user's
frames and counts the others; `--traceback` shows all of them. Only text leaves this module: an
exception holds the frames that hold the tensors.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import batchfit

_OURS = str(Path(batchfit.__file__).resolve().parent)
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True, slots=True)
class ChildTraceback:
    """An error of a child process, as text: the frames themselves have stayed there.

    `stage` is "load" while the workload was made, "place" where device or budget were wrong, else "step".
    """

    stage: str
    headline: str
    short: str
    full: str

    def put_on(self, error: BaseException) -> None:
        """Keep this with the error."""
        error.batchfit_child_traceback = self  # type: ignore[attr-defined]

    @classmethod
    def of(cls, error: BaseException) -> ChildTraceback | None:
        """The one that was put on an error; None for an error of this process."""
        return getattr(error, "batchfit_child_traceback", None)


def raised_by_step(error: BaseException) -> bool:
    """Whether a step of the user's raised the error, under a trial that added its note, or in a child."""
    from_child = ChildTraceback.of(error)
    if from_child is not None:
        return from_child.stage != "place"

    return any(note.startswith(NOTE) for note in getattr(error, "__notes__", ()))


def headline(error: BaseException, *, what: str, home: str | None, made_at: str = "") -> str:
    """`train.py:make raised ValueError at train.py:17 (in step)`.

    `made_at` is said where the error went through no line of the user's, such as one about their loss.
    """
    name = type(error).__name__
    from_child = ChildTraceback.of(error)
    if from_child is not None:
        return f"{what} {from_child.headline}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{what} cannot be read: {name} at {shown_path(error.filename)}:{error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename, home=home)]
    if not frames:
        return f"{what} raised {name}" + (f" (the workload is made at {made_at})" if made_at else "")
    last = frames[-1]
    return f"{what} raised {name} at {shown_path(last.filename)}:{last.lineno} (in {last.name})"


def details(error: BaseException, *, home: str | None, full: bool) -> str:
    """The traceback, of the user's frames only unless `full`; notes and causes included."""
    from_child = ChildTraceback.of(error)
    if from_child is not None:
        return from_child.full if full else from_child.short
    shown = traceback.TracebackException.from_exception(error, compact=True)
    if full:
        return "".join(shown.format()).rstrip()
    hidden = _keep_users_frames(shown, home=home, seen=set())
    text = "".join(shown.format()).rstrip()
    return f"{text}\n({hidden} frames of libraries not shown; --traceback shows all)" if hidden else text


def last_users_line(error: BaseException) -> str | None:
    """`train.py:17`, the last line of the user's own code that the error went through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename, home=None)]
    return f"{shown_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def shown_path(path: str | None) -> str:
    """A path as a person wants to read it: relative to the current folder where it lies below it."""
    if path is None:
        return "?"
    try:
        return str(Path(path).resolve().relative_to(Path.cwd().resolve()))
    except (ValueError, OSError):
        return path


def is_users(filename: str, *, home: str | None) -> bool:
    """Whether a frame's file is the user's own: no library's, not ours, not made up on the fly.

    `home` is the folder of the target's code: a package that is installed is the user's if it is the target.
    """
    return not filename.startswith("<") and _is_users_file(os.path.abspath(filename), home)


@lru_cache(maxsize=2**14)  # a program has thousands of files, of which each check asks again
def _is_users_file(path: str, home: str | None) -> bool:
    path = os.path.realpath(path)
    at_home = home is not None and _below(path, home)
    parts = Path(path).relative_to(home).parts if home is not None and at_home else Path(path).parts
    if _INSTALLED.intersection(parts) or _below(path, _OURS):
        return False
    if at_home and _INSTALLED.intersection(Path(path).parts):
        return True
    return not any(_below(path, folder) for folder in _standard_library())


def _keep_users_frames(shown: traceback.TracebackException, *, home: str | None, seen: set[int]) -> int:
    """Drop the other frames from an exception and from all that led to it; how many were dropped."""
    if id(shown) in seen:
        return 0
    seen.add(id(shown))
    kept = [frame for frame in shown.stack if is_users(frame.filename, home=home)] or list(shown.stack)[-1:]
    hidden = len(shown.stack) - len(kept)
    shown.stack = traceback.StackSummary.from_list(kept)
    linked: Iterable[traceback.TracebackException | None] = (
        shown.__cause__,
        shown.__context__ if not shown.__suppress_context__ else None,
        *(shown.exceptions or ()),
    )
    return hidden + sum(_keep_users_frames(other, home=home, seen=seen) for other in linked if other)


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


@cache
def _standard_library() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib")})


# How a note on an error of the user's begins: the command line distinguishes such errors from its own by it.
NOTE = "batchfit: raised while trying batch size"
