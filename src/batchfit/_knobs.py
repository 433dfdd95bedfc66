"""One configuration of a sweep (knob names and values) as text: a key for files, a label for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Configuration = Mapping[str, Any]
LONGEST_CELL = 40  # a list of a thousand numbers is for the file


def short(value: object) -> str:
    """A value as a table shows it."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else str(value).lower()
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_CELL else text[: LONGEST_CELL - 3] + "..."


def key_of(configuration: Configuration) -> str:
    """What a configuration is known by, in any order of its knobs and whether or not it was in a file.

    >>> key_of({"top_k": 2, "max_crops": 12.0}) == key_of({"max_crops": 12, "top_k": 2})
    True
    """
    return value_text(dict(configuration))


def label(configuration: Configuration) -> str:
    """`max_crops=12, top_k=2`, as lines and tables call a configuration."""
    return ", ".join(f"{name}={value}" for name, value in configuration.items())


def value_text(value: Any) -> str:
    """What values are compared by: in Python True would be 1."""
    return json.dumps(plain_value(value), sort_keys=True, separators=(",", ":"))


def plain_value(value: Any) -> Any:
    """As a file gives it back: a tuple is a list; and 2.0 is 2."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    if isinstance(value, dict):
        return {name: plain_value(one) for name, one in value.items()}
    return value
