"""Replaces an attribute of torch (a class, a module or an object) for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a class, a module or this one instance has another attribute of that name."""
    had, before = name in vars(owner), vars(owner).get(name)

    def put(value: Any) -> None:
        # Past the `__setattr__` of an instance: a compiled module would set it on what it wraps.
        setattr(owner, name, value) if isinstance(owner, type) else vars(owner).update({name: value})

    put(value)
    try:
        yield
    finally:
        if had:
            put(before)
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]
