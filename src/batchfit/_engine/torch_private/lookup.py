"""Looks a private name of torch up; an error says which feature is lost where this torch lacks it.

Rules:
- A name is asked for once, when the module that needs it is loaded. What is found is torch's own object: to
  call it costs no more than before.
- In the place of one that is missing stands a function that refuses, with torch's version and what to do;
  or None, where the caller has another answer.
- A torch below the oldest that is supported is an error when the first feature that uses torch is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Never

import torch

from batchfit.errors import BatchfitError, UntraceableError

_OLDEST, _NEWEST = (2, 6), (2, 15)  # the versions of torch that the tests have run on
TESTED = "2.6 to 2.15"


def _running() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_tested() -> bool:
    """Whether the tests have run on this version, or on one before and one after it."""
    return _OLDEST <= _running() <= _NEWEST


if _running() < _OLDEST:
    raise ImportError(
        "batchfit needs torch {0}.{1} or later, and this is {2}: install a newer one "
        '(pip install --upgrade "torch>={0}.{1}")'.format(*_OLDEST, torch.__version__)
    )


def optional(path: str) -> Any:
    """What torch has under a dotted path that begins with "torch"; None where it has no such name."""
    found: Any = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def lost(path: str) -> BatchfitError:
    """The refusal of all that needs this name."""
    return BatchfitError(
        f"torch {torch.__version__} has no {path}, which batchfit needs for this: use a torch that it is "
        f"tested with ({TESTED})"
    )


def lost_to_traces(path: str) -> UntraceableError:
    """The refusal of a trace that needs this name."""
    return UntraceableError("", "", f"torch {torch.__version__} has no {path} (tested with torch {TESTED})")


def refusing(path: str, refusal: Callable[[str], BatchfitError] = lost) -> Any:
    """A function that stands in the place of a missing one: it raises `refusal`."""

    def refuse(*_: Any, **__: Any) -> Never:
        raise refusal(path)

    return refuse


def needed(path: str, refusal: Callable[[str], BatchfitError] = lost) -> Any:
    """What torch has under a dotted path; else a function that raises `refusal`."""
    found = optional(path)
    return refusing(path, refusal) if found is None else found


def attribute(sample: object, name: str, refusal: Callable[[str], BatchfitError] = lost) -> Any:
    """A function that reads an attribute of objects such as `sample`; refuses where `sample` has none."""
    if getattr(sample, name, None) is not None:
        return attrgetter(name)
    kind = sample if isinstance(sample, type) else type(sample)
    return refusing(f"{kind.__module__}.{kind.__qualname__}.{name}", refusal)
