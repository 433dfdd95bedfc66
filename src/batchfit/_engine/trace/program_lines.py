"""Lines of the program: which one is running, for an error or a block to name.

Rules: no line of torch or batchfit is named; a library's line is followed by the program's own.
"""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch

import batchfit


def _folder(file: str, up: int) -> tuple[str, str]:
    """The folder as it is imported from and as it really is: an environment may be a link."""
    path = Path(file)
    return str(path.absolute().parents[up]), str(path.resolve().parents[up])


HERE = _folder(batchfit.__file__, 0)
TORCH = _folder(torch.__file__, 0)


def named(places: Iterable[tuple[str, int]]) -> str:
    """The innermost line outside torch; where it is a library's, the program's own line beside it."""
    library = ""
    for filename, number in places:
        if filename.startswith((*TORCH, *HERE, "<")):
            continue
        line = f"{Path(filename).name}:{number}"
        if "site-packages" not in filename and "dist-packages" not in filename:
            return f"{library}, called from {line}" if library else line
        library = library or line
    return library


def calling_frame() -> FrameType | None:
    """The innermost frame outside torch and batchfit."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*TORCH, *HERE)):
        frame = frame.f_back
    return frame


# A value that the line asks for by name: then that is what cannot be traced.
_READS = re.compile(r"\.item\(|\.tolist\(|\b(float|int|bool)\(")


def reading() -> str:
    """What the program does at the line that is running, where it asks for a value: for an error to name."""
    for frame, number in traceback.walk_stack(sys._getframe(2)):
        filename = frame.f_code.co_filename
        if filename.startswith((*TORCH, *HERE, "<")):
            continue
        line = linecache.getline(filename, number, frame.f_globals).strip()
        is_branch = re.search(r"(^|\s)(if|elif|while|assert)\b", line) and not re.search(_READS, line)
        return f"data-dependent branch `{line}`" if is_branch else ".item()"
    return ".item()"


def calling_line() -> str:
    """The line that is running, for an error: a library's is followed by the program's own."""
    return named(
        (frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(sys._getframe(2))
    )
