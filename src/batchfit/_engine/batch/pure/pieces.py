"""How a batch is cut into microbatches: sizes that add up, and which samples each one holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, final


class Piece(NamedTuple):
    """One microbatch of a plan: which samples, and the padded length they are trimmed to, if any."""

    samples: slice | tuple[int, ...]
    size: int
    length: int | None = None


class Shape(NamedTuple):
    """What decides how much memory a sample takes."""

    key: str
    family: str  # the same for shapes that differ in their extents only
    elements: int  # of one sample


def balanced(total: int, at_most: int) -> tuple[int, ...]:
    """Near-equal sizes of at most `at_most` that add up to `total`, the larger ones first.

    >>> balanced(17, 16)
    (9, 8)
    """
    count = -(-total // at_most)
    small, larger = divmod(total, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def equal(total: int, at_most: int) -> tuple[int, ...]:
    """Sizes of exactly `at_most`, and one remainder.

    >>> equal(17, 8)
    (8, 8, 1)
    """
    whole, rest = divmod(total, at_most)
    return (at_most,) * whole + ((rest,) if rest else ())


def rung(size: int) -> int:
    """The largest power of two that is no larger."""
    return 1 << (size.bit_length() - 1)


def pieces(sizes: tuple[int, ...], start: int = 0) -> tuple[Piece, ...]:
    """A plan that cuts a batch in its own order, from the sample `start` on."""
    ends = accumulate(sizes, initial=start)
    next(ends)
    return tuple(Piece(slice(end - size, end), size) for size, end in zip(sizes, ends, strict=True))


PaddedShape = tuple[int, int]  # (samples, padded length)


@final
@dataclass(frozen=True, slots=True)
class Pack:
    """One microbatch: which samples, and the length that they are trimmed to."""

    indices: tuple[int, ...]
    length: int

    @property
    def shape(self) -> PaddedShape:
        return len(self.indices), self.length
