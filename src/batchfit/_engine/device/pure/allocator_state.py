"""The caching allocator's state after a step, as a value that can be compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

_ROOM_FOR_SMALL = 20 * 2**20  # bytes: ten segments of small blocks


@final
@dataclass(frozen=True, slots=True)
class AllocatorState:
    """The allocator at the end of a step: where its blocks are, and its counts since it began.

    `updates` counts, for each optimizer, what it has done to its parameters.
    """

    layout: int
    retries: int
    requests: int
    requested_bytes: int
    updates: tuple[int, ...] = ()


def layout_of(
    large: Iterable[object],
    small: Iterable[object],
    *,
    small_bytes: int,
    held_bytes: int,
    room_bytes: int,
) -> int:
    """Where the blocks of a device are, as one number; `room_bytes` is what the allocator may still take.

    Small blocks have segments of their own, of 2 MiB, and where each of them lies changes for much longer.
    All that they can do to large ones is to need another segment: while there is room for a few, it does not
    matter where they lie, only that they do not become more.
    """
    counted = frozenset(small) if room_bytes < _ROOM_FOR_SMALL else frozenset()
    return hash((small_bytes, held_bytes, frozenset(large), counted))
