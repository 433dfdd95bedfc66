"""Which line of the program is running: for errors that name it, and for what torch itself asks.

Rules: torch and batchfit are never blamed; a library's line is followed by the program's own.
"""

from __future__ import annotations

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


def calling_line() -> str:
    return named(
        (frame.f_code.co_filename, number) for frame, number in traceback.walk_stack(sys._getframe(2))
    )


def library_caller() -> str:
    """Who asks for a value: torch's optimizers, its scaler or distributions, `generate`, or none of them."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if name.startswith(TORCH):
            if "/optim/" in name.replace("\\", "/"):
                return "optim"
            if name.endswith("grad_scaler.py"):
                return "grad_scaler"
            if name.endswith("distribution.py"):
                return "distributions"
        elif not name.startswith(HERE):
            return "generate" if "/transformers/generation/" in name.replace("\\", "/") else ""
        frame = frame.f_back
    return ""
