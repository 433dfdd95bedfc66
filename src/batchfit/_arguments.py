"""Checks of arguments that several functions have in common.

Rules: a wrong argument is a `ValueError` or `TypeError` that names the argument and its value, before
anything is run. A number that no run would live to see is wrong, too: `steps=10**30` never ends.
"""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

MOST_STEPS = 1_000_000
MOST_EPOCHS = 1_000_000
LARGEST_SIZE = 2**63 - 1  # of a dimension of a tensor


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, not {value!r}")


def check_whole(
    name: str, value: object, *, at_least: int = 1, at_most: int = LARGEST_SIZE, optional: bool = False
) -> None:
    """Refuse what is no whole number between the two, nor None where it is `optional`."""
    if value is None and optional:
        return
    if type(value) is not int or value < at_least:
        what = "a positive integer" if at_least == 1 else f"an integer of at least {at_least}"
        what += " or None" if optional else ""
        raise ValueError(f"{name} must be {what}, not {value!r}")
    if value > at_most:
        raise ValueError(f"{name} must be at most {at_most}, not {value!r}")


def check_callback(name: str, value: object, *arguments: str) -> None:
    """Refuse what is neither None nor a callable that takes these arguments."""
    if value is None:
        return
    form = f"{name}({', '.join(arguments)})"
    if not callable(value):
        raise TypeError(f"{name} must be a callable {form} or None, not {value!r}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return  # a builtin without a signature: calling it will show
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise TypeError(f"{name} must be a callable {form}, not {value!r}: {error}") from None


def checked_file(name: str, value: Any) -> Path:
    """The path of a file that could be there: no folder, in a folder that exists."""
    if not isinstance(value, str | os.PathLike) or isinstance(value, bytes):
        raise TypeError(f"{name} must be the path of a file, not {value!r}")
    try:
        path = Path(os.fsdecode(value))
        good = bool(str(value)) and not path.is_dir() and path.resolve().parent.is_dir()
        path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, or has a null byte
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{name} must be the path of a file, not {str(value)!r:.80}: {why}") from None
    if not good:
        raise ValueError(f"{name} must be a file in a folder that exists, not {str(value)!r}")
    return path
