"""Turns the error that ended a traced step into an `UntraceableError` that says what to change."""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import torch

from batchfit._engine.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from batchfit._engine.trace.program_lines import HERE, TORCH, named
from batchfit._engine.trace.values import Unread
from batchfit.errors import UntraceableError

_ABOUT_FAKES = ("fake", "meta tensor", "data pointer", "have storage")
_FLEX = str(Path("nn") / "attention" / "flex_attention.py")
_STANDARD = sysconfig.get_paths()["stdlib"]


def explained(error: Exception, running: Any, device: torch.device) -> UntraceableError:
    """The error with the program's own line; `running` is the operation, on `device` of the trace."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # A value that json or statistics cannot take was given to them by a line of the program.
    where = named((file, line) for file, line in reversed(places) if not _is_standard(file))
    # An error that the program itself raises has nothing to do with the operation before it.
    in_torch = places[-1][0].startswith((*TORCH, *HERE))
    operation = str(getattr(error, "func", "") or (running if in_torch else ""))
    operation = "" if operation.startswith("profiler.") else operation  # torch's notes about itself
    if isinstance(error, DynamicOutputShapeException):
        return UntraceableError(operation, where, "the shape of its result depends on the data")
    if isinstance(error, DataDependentOutputException):
        return UntraceableError(operation, where, "its result is read by the program and depends on the data")
    if any(file.endswith(_FLEX) for file, _ in places):
        return UntraceableError(
            "flex_attention", where, "on a GPU it is a compiled kernel, whose memory a trace does not know"
        )
    if isinstance(error, UnsupportedOperatorException) or _lacks_kernel(error, in_torch=in_torch):
        why = "torch has no fake kernel for it"
        if not operation.startswith(("aten.", "prims.")):
            why = "it has no fake kernel (torch.library.register_fake)"
        return UntraceableError(operation, where, why)
    if ".numpy() is not supported for tensor subclasses" in str(error):
        return UntraceableError(".numpy()", where, "the program reads values that depend on the data")
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Unread.__name__ in first:  # a number that nobody knows went where a real one is needed
        return UntraceableError(".item()", where, "the program works with a value that depends on the data")
    # Nothing has run, so that nobody knows whether the error would come without fakes, unless it names them.
    fakes = in_torch and isinstance(error, RuntimeError)
    fakes = fakes and any(word in str(error).lower() for word in _ABOUT_FAKES)
    # The device is named as the program will know it.
    first = first.replace(str(device), "cuda")
    why = f"{type(error).__name__}: {first.rstrip('.')}"
    return UntraceableError(operation, where, why, raised=not fakes)


def _lacks_kernel(error: Exception, *, in_torch: bool) -> bool:
    """Not what the program has yet to write: a model without `forward`, or a method that says so itself.

    Nor what torch's own Python refuses, with reasons of its own: a kernel that is missing is missed in C++,
    or where an operation is called.
    """
    if not isinstance(error, NotImplementedError) or not in_torch or '"forward"' in str(error):
        return False
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    source = linecache.getline(frame.f_code.co_filename, line).lstrip()
    return not source.startswith("raise ") or "_ops" in frame.f_code.co_filename


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD) and "site-packages" not in file
