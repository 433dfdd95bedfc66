"""Iterators: their position, and a new iterator at the same position.

The built-in ones say of themselves how they are made again (`__reduce__`): from what, and how far along. A
generator, an open file or a DataLoader's iterator does not, and what it has given is gone.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

from batchfit._engine.snapshot.contents import is_iterator


def twin_of(iterator: Any) -> Any:
    """Another iterator that goes on as this one would; None where there cannot be one."""
    parts = _reduced(iterator)
    if parts is None:
        return None
    make, arguments, *state = parts
    inner = [twin_of(one) if is_iterator(one) else one for one in arguments]
    if any(one is None and old is not None for one, old in zip(inner, arguments, strict=True)):
        return None
    made = make(*inner)
    if state and state[0] is not None:
        given = state[0]
        if isinstance(given, tuple):  # what a cycle has seen so far is its own list
            given = tuple(twin_of(one) if is_iterator(one) else copy.copy(one) for one in given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            made.__setstate__(given)
    return made


def position_of(iterator: Any) -> Any:
    """A value that is another once the iterator has moved; None where nobody can say."""
    parts = _reduced(iterator)
    return None if parts is None else tuple(map(_mark, parts))


def _mark(part: Any) -> Any:
    if is_iterator(part):
        return position_of(part)
    if isinstance(part, tuple):
        return tuple(map(_mark, part))
    if isinstance(part, list):
        return len(part)  # some make a list of what is left each time they are asked
    return part if isinstance(part, int | float | str | bytes | range | None) else type(part)


def _reduced(iterator: Any) -> tuple[Any, ...] | None:
    try:
        with warnings.catch_warnings():  # itertools' are on their way out (Python 3.14)
            warnings.simplefilter("ignore", DeprecationWarning)
            parts = iterator.__reduce__()
    except Exception:  # noqa: BLE001  whatever it says: it cannot be made again
        return None
    return parts if isinstance(parts, tuple) and len(parts) >= 2 else None


def warn_of(path: str, iterator: Any) -> None:
    """Say, before anything runs, that a part of the state will not be where it was."""
    warnings.warn(
        f"{path} is {type(iterator).__name__!r}, an iterator that cannot be restored: after batchfit has run "
        "or traced steps that read it, it is further along. Make it inside the step, or again afterwards.",
        stacklevel=2,
    )
