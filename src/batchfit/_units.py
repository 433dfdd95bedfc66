"""Bytes as people write them.

Rules: a number with a unit is read exactly ("24GiB" is 24 * 2**30, "24GB" is 24 * 10**9); a bare
integer is bytes; anything else is a `ValueError` that names the argument and the value.
"""

from __future__ import annotations

import re

_UNITS = {
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
_TEXT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b)?\s*\Z", re.IGNORECASE)


def parse_bytes(value: int | str, *, name: str = "budget") -> int:
    """Bytes from `24 * 2**30`, `"24GiB"`, `"24 GB"` or `"1024"`.

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
