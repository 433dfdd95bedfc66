"""One value in a TOML text, changed in its place; all else stays as it is written.

Rules: the standard library reads TOML and does not write it. Every place in the text where the key stands is
tried; the one is taken whose change, read again, is the change that was meant.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Sequence
from typing import Any

_VALUE = r"""(?P<value>"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[^\s,\]}#"']+)"""


def with_toml_value(text: str, keys: Sequence[str], value: int, *, name: str) -> str:
    """The text with `value` where `keys` lead; what is wrong is a `ValueError`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{name} must be TOML, and is not: {error}") from None
    meant = copy.deepcopy(data)
    place: Any = meant
    for number, key in enumerate(keys):
        known = range(len(place)) if isinstance(place, list) else place if isinstance(place, dict) else ()
        at: Any = int(key) if isinstance(place, list) and key.isdigit() else key
        if at not in known:
            raise ValueError(f"set must name a place that is in {name}, not {'.'.join(keys[: number + 1])!r}")
        if number < len(keys) - 1:
            place = place[at]
        elif isinstance(place[at], dict | list):
            raise ValueError(f"set must name a single value in {name}, not {'.'.join(keys)!r}")
        else:
            place[at] = value
    last = re.escape(keys[-1])
    for match in re.finditer(rf"""(?:["']{last}["']|(?<![\w-]){last})\s*=\s*{_VALUE}""", text):
        changed = text[: match.start("value")] + str(value) + text[match.end("value") :]
        try:
            read = tomllib.loads(changed)
        except tomllib.TOMLDecodeError:
            continue
        if read == meant:
            return changed
    raise ValueError(f"set must name a value that stands on one line of {name}, not {'.'.join(keys)!r}")
