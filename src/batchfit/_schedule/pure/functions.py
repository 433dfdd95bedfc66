"""A user's function in a schedule: found by its import path, called, and what it returns checked.

Rules: a path is "package.module:function" and is imported when it is first asked; an error of the function's
own comes out unchanged, with a note that says where the schedule was; a result that is no whole number is an
error that names the function and the value.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from batchfit._units import whole

FORM = "a callable or an import path 'package.module:function'"


def checked_function(value: object, *, name: str) -> Callable[..., Any] | str:
    """A callable, or text that may be an import path."""
    if isinstance(value, str):
        module, colon, function = value.partition(":")
        parts = [*module.split("."), *function.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            raise ValueError(f"{name} must be {FORM}, not {value!r}")
        return value
    if not callable(value):
        raise ValueError(f"{name} must be {FORM}, not {value!r}")
    return value


def resolve(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """The function itself."""
    return _imported(function) if isinstance(function, str) else function


@lru_cache(maxsize=64)
def _imported(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found = operator.attrgetter(name)(importlib.import_module(module))
    except ModuleNotFoundError as error:
        # Only a module of this very name is a wrong path; any other is missing to the user's own code.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"function must be importable, not {path!r}: there is no module {error.name!r}"
        ) from None
    except AttributeError:
        raise ValueError(f"function must be importable, not {path!r}: {module!r} has no {name!r}") from None
    if not callable(found):
        raise ValueError(f"function must be {FORM}, not {path!r}, which is a {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def as_path(function: Callable[..., Any] | str) -> str:
    """The import path of a function; a lambda or a closure has none, and cannot be written to a file."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    path = f"{module}:{name}"
    try:
        if "<" not in name and operator.attrgetter(name)(sys.modules[str(module)]) is function:
            return path
    except (AttributeError, KeyError):
        pass
    raise ValueError(
        f"function must be importable to be written to a file, not {function!r}: "
        "define it at the top of a module"
    )


def call(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, returns: str, at: str, at_least: int
) -> int:
    """Call it; what it returned as an int of at least `at_least`."""
    try:
        value = function(*arguments)
    except Exception as error:
        error.add_note(f"batchfit: raised by the schedule's function at {at}")
        raise
    name = f"the {returns} that function returns at {at}"
    if at_least < 1:  # an increase: the total must stay positive
        count = whole(value, name=name)
        if count < at_least:
            total = count + 1 - at_least
            raise ValueError(f"{name} must leave a positive batch size, not {count!r} (a total of {total})")
        return count
    return whole(value, name=name, at_least=at_least)
