"""Milestones as people write them: text, a mapping or pairs, in order.

Rules: "0:256 20:512" is one milestone a word, count and size; a last word may be the unit. A count with a
suffix ("250B") needs a unit: nobody trains for 250 billion epochs. Out of order is an error, not sorted away.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from batchfit._schedule.pure.bound_plan import UNITS
from batchfit._units import parse_count

FORM = "text or a mapping such as '0:256 20:512' or {0: 256, 20: 512}"
_SUFFIXED = re.compile(r"[0-9.]+[kmbgt]", re.IGNORECASE)


def looks_like_milestones(text: str) -> bool:
    """Whether a text is meant to be milestones, right or wrong."""
    return re.match(r"\s*[0-9][^\s:/\\]*:\s*[0-9]", text) is not None


def parse_milestones(given: Any, *, most: Any = None) -> tuple[tuple[int, int], ...]:
    """Pairs (count, size), checked."""
    pairs = []
    for entry in _entries(given):
        count, size = entry
        pairs.append(
            (
                parse_count(count, name="the count of a milestone"),
                parse_count(size, name="the size of a milestone", at_least=1),
            )
        )
    if not pairs:
        raise ValueError(f"milestones must hold at least one, such as '0:256', not {given!r}")
    for (before, _), (after, _) in itertools.pairwise(pairs):
        if after <= before:
            raise ValueError(f"milestones must be in increasing order, not {after} after {before}")
    if isinstance(most, int):
        for count, size in pairs:
            if size > most:
                raise ValueError(f"milestones must be at most max_batch_size {most}, not {size} at {count}")
    return tuple(pairs)


def unit_of(given: Any, unit: Any) -> str | None:
    """The unit that a text ends with, or the one that was given; None: neither."""
    words = given.split() if isinstance(given, str) else []
    named = words[-1] if words and words[-1].isalpha() else None
    if named is not None and named not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(map(repr, UNITS))}, not {named!r}")
    if named is not None and unit is not None and named != unit:
        raise ValueError(f"unit must be {named!r}, which milestones ends with, not {unit!r}")
    if named is None and unit is None and _has_suffix(given):
        raise ValueError(f"unit must be given ('samples' or 'tokens') for milestones such as {given!r}")
    return named or unit


def _entries(given: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(given, str):
        words = given.replace(",", " ").split()
        words = words[:-1] if words and words[-1].isalpha() else words
        pairs = [tuple(word.split(":")) for word in words]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        try:
            pairs = [tuple(pair) for pair in given]
        except TypeError:
            raise ValueError(f"milestones must be {FORM}, not {given!r}") from None
    for pair in pairs:
        if len(pair) != 2:
            raise ValueError(f"milestones must be {FORM}, not {given!r}")
    return pairs  # type: ignore[return-value]


def _has_suffix(given: Any) -> bool:
    counts: list[Any] = []
    if isinstance(given, str):
        counts = [word.partition(":")[0] for word in given.split()]
    elif isinstance(given, Mapping):
        counts = list(given)
    elif isinstance(given, tuple | list):
        counts = [pair[0] for pair in given if isinstance(pair, tuple | list) and len(pair) > 0]
    return any(isinstance(count, str) and _SUFFIXED.match(count) for count in counts)
