"""Counts of samples, steps and tokens as people write them, and sizes as they are rounded.

Rules: "250B" is 250 * 10**9 exactly; a count is a whole number; anything else is a `ValueError` that names
the argument and the value. A size is rounded to a multiple, in the direction that was asked for, never to 0.
"""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal
from typing import Literal

Rounding = Literal["down", "up", "nearest"]

# Sizes beyond this are a mistake in a schedule, not a batch; powers of two would otherwise fill the memory.
MOST = 2**48
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_TEXT = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbgt]?)\s*\Z", re.IGNORECASE)


def parse_count(value: object, *, name: str, at_least: int = 0) -> int:
    """A whole number from `20`, `"20"`, `"10k"`, `"1.5M"`, `"250B"` or `"1e9"`.

    >>> parse_count("1.5M", name="over")
    1500000
    """
    if isinstance(value, str):
        match = _TEXT.match(value)
        exact = Decimal(match.group(1)) * _SUFFIXES[match.group(2).lower()] if match else Decimal("0.5")
        if exact != exact.to_integral_value():
            raise ValueError(f"{name} must be a whole number or text such as '10k' or '250B', not {value!r}")
        count = int(exact)
    else:
        count = whole(value, name=name)
    if count < at_least:
        raise ValueError(f"{name} must be {_least(at_least)}, not {value!r}")
    return count


def whole(value: object, *, name: str, at_least: int | None = None) -> int:
    """A whole number (of numpy too), no bool and no float."""
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        kind = "a positive integer" if at_least == 1 else "an integer"
        raise ValueError(f"{name} must be {kind}, not {value!r}")
    if at_least is not None and count < at_least:
        raise ValueError(f"{name} must be {_least(at_least)}, not {count!r}")
    return count


def _least(at_least: int) -> str:
    return {0: "0 or more", 1: "a positive integer"}.get(at_least, f"at least {at_least}")


def round_size(value: float, *, multiple_of: int = 1, rounding: Rounding = "down") -> int:
    """`value` as a multiple of `multiple_of`, at least one of them.

    >>> round_size(900, multiple_of=64), round_size(900, multiple_of=64, rounding="up")
    (896, 960)
    """
    if isinstance(value, int):  # exact, at any size
        steps, rest = divmod(value, multiple_of)
        share = rest / multiple_of
    else:
        exact = value / multiple_of
        steps = math.floor(exact)
        share = exact - steps
        # 511.9999999 is 512 by a formula in floats.
        if share > 1 - 1e-9 * max(exact, 1.0):
            steps, share = steps + 1, 0.0
        elif share < 1e-9 * max(exact, 1.0):
            share = 0.0
    more = (rounding == "up" and share > 0) or (rounding == "nearest" and share >= 0.5)
    return max(steps + more, 1) * multiple_of
