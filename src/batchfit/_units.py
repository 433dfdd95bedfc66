"""Bytes, and counts of samples, steps and tokens, as people write them.

Rules: a number with a unit is read exactly ("24GiB" is 24 * 2**30, "24GB" is 24 * 10**9, "250B" samples are
250 * 10**9); a bare integer is bytes; a count is a whole number; anything else is a `ValueError` that names
the argument and the value. A size is rounded to a multiple, in the direction that was asked for.
"""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal
from typing import Literal

_UNITS = {
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# Text of fewer bytes than this has lost its unit.
_LEAST_WITHOUT_UNIT = 1024
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b|[kmgt])?\s*\Z", re.IGNORECASE)


def parse_bytes(value: int | str, *, name: str = "budget") -> int:
    """Bytes from `24 * 2**30`, `"24GiB"`, `"24 GB"` or `"1024"`.

    `"24G"` is 24 GiB, as in SLURM and Docker. Text of a small number without a unit is a mistake: nobody
    has 32 bytes.

    >>> parse_bytes("1.5GiB")
    1610612736
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"{name} must be bytes or text such as '24GiB', not {value!r}")
    if isinstance(value, int):
        count = value
    else:
        match = _TEXT.match(value)
        unit = match.group(2) if match else None
        if match is None or (unit is None and "." in match.group(1)):
            raise ValueError(f"{name} must be bytes or text such as '24GiB' or '800MiB', not {value!r}")
        if unit is None and 0 < int(match.group(1)) < _LEAST_WITHOUT_UNIT:
            number = match.group(1)
            raise ValueError(f"{name} {number!r} is {number} bytes: did you mean '{number}GiB'?")
        count = round(float(match.group(1)) * _UNITS[unit.lower()]) if unit else int(match.group(1))
    if count <= 0:
        raise ValueError(f"{name} must be positive, not {value!r}")
    return count


def format_bytes(count: int) -> str:
    """`23.8 GiB`, `512 B`: binary units, about three digits.

    >>> format_bytes(25555555555)
    '23.8 GiB'
    """
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            break
        value /= 1024
    if unit == "B":
        return f"{count} B"
    return f"{value:.2f} {unit}" if abs(value) < 10 else f"{value:.1f} {unit}"


def format_change(change: int, of: int) -> str:
    """Bytes with a sign, and their share of what was there before.

    >>> format_change(-(2**20), 2**22)
    '-1.00 MiB (-25.0 %)'
    """
    share = f" ({change / of:+.1%})".replace("%", " %") if of else ""
    return f"{'+' if change >= 0 else '-'}{format_bytes(abs(change))}{share}"


_REQUEST = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
# What virtual memory says: what is in use is the rest.
_FREE = re.compile(
    r"virtual memory .*total capacity of ([0-9.]+ [KMGT]?i?B) of which ([0-9.]+ [KMGT]?i?B) is free"
)


def requested_bytes(message: str) -> int | None:
    """What an OOM's text says was requested.

    >>> requested_bytes("CUDA out of memory. Tried to allocate 2.00 KiB. ...")
    2048
    """
    found = _REQUEST.search(message)
    return parse_bytes(found[1]) if found else None


def in_use_bytes(message: str) -> int | None:
    """What was in use when a request failed, where virtual memory's text says so."""
    found = _FREE.search(message)
    if found is None:
        return None
    free = 0 if found[2].startswith("0 ") else parse_bytes(found[2])
    return parse_bytes(found[1]) - free


Rounding = Literal["down", "up", "nearest"]


# Sizes beyond this are a mistake in a schedule, not a batch; powers of two would otherwise fill the memory.
MOST = 2**48


_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


_COUNT_TEXT = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([kmbgt]?)\s*\Z", re.IGNORECASE
)


def parse_count(value: object, *, name: str, at_least: int = 0) -> int:
    """A whole number from `20`, `"20"`, `"10k"`, `"1.5M"`, `"250B"` or `"1e9"`.

    >>> parse_count("1.5M", name="over")
    1500000
    """
    if isinstance(value, str):
        match = _COUNT_TEXT.match(value)
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
