"""What a check allows: more memory than the baseline, as a share or in bytes, and a highest peak."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

from batchfit._units import format_bytes, format_change, parse_bytes

_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*\Z")


@final
@dataclass(frozen=True, slots=True)
class Allowance:
    """How much more is allowed: a share of the baseline, or bytes."""

    share: float = 0.0
    size: int = 0

    def of(self, baseline: int) -> int:
        """In bytes, for that baseline."""
        return self.size + math.floor(self.share * baseline)

    def __str__(self) -> str:
        return f"{100 * self.share:g} %" if not self.size else format_bytes(self.size)


def parse_allowance(value: object, *, name: str) -> Allowance:
    """`"2%"`, `"500MiB"`, or 0.

    >>> parse_allowance("2%", name="max_increase").of(1000)
    20
    """
    if value == 0 and type(value) is int:
        return Allowance()
    if isinstance(value, str):
        share = _SHARE.match(value)
        if share is not None:
            return Allowance(share=float(share[1]) / 100)
        if value.strip() == "0":
            return Allowance()
    if type(value) not in (int, str):
        raise TypeError(f"{name} must be text such as '2%' or '500MiB', or bytes, not {value!r}")
    try:
        return Allowance(size=parse_bytes(value, name=name))  # type: ignore[arg-type]
    except ValueError:
        raise ValueError(f"{name} must be text such as '2%' or '500MiB', or bytes, not {value!r}") from None


def failures(
    *,
    peak_bytes: int,
    baseline_bytes: int | None,
    allowance: Allowance,
    max_peak_bytes: int | None,
    largest: int | None = None,
    baseline_largest: int | None = None,
) -> tuple[str, ...]:
    """Why a check fails, each as a sentence; nothing where it passes."""
    found = []
    if baseline_bytes is not None and peak_bytes - baseline_bytes > allowance.of(baseline_bytes):
        more = format_change(peak_bytes - baseline_bytes, baseline_bytes)
        found.append(f"the peak is {more} above the baseline, and {allowance} more is allowed")
    if max_peak_bytes is not None and peak_bytes > max_peak_bytes:
        found.append(
            f"the peak is {format_bytes(peak_bytes)}, and {format_bytes(max_peak_bytes)} is the most that is "
            "allowed"
        )
    if largest is not None and baseline_largest is not None:
        least = baseline_largest - math.floor(allowance.share * baseline_largest)
        if largest < least:
            found.append(f"the largest batch is {largest}, and was {baseline_largest}")
    return tuple(found)
