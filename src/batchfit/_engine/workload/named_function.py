"""The functions of a sweep by name: as a file writes them, and as another process finds them.

Rules:
- A function is named by its target, "file.py:function" or "package.module:function", and loaded where it is
  used; loading one again costs a look into what is loaded.
- Whoever runs a configuration loads its functions first (`loaded`): what a module does when it is loaded is
  no part of any configuration.
- A name of a file stands for the same file in another current folder once it is written in full (`in_full`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from batchfit._engine.workload.target import load_function, parse_target


@final
@dataclass(frozen=True, slots=True)
class Named:
    """A function by its target, called like the function itself."""

    text: str

    def load(self) -> Any:
        """The function."""
        return load_function(parse_target(self.text))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.load()(*arguments, **keywords)


def loaded(function: Any) -> Any:
    """What is called in the end: the function that a target or a `Named` stands for, else what is given."""
    if isinstance(function, str):
        function = Named(function)
    return function.load() if isinstance(function, Named) else function


def in_full(function: Any) -> Any:
    """The same function wherever the current folder is; what is no name of a file, as it is."""
    if isinstance(function, Named):
        return Named(in_full(function.text))
    if not isinstance(function, str):
        return function
    place, colon, name = function.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    return f"{Path(place).resolve()}{colon}{name}" if is_file else function
