"""One microbatch of a plan: the samples that it holds, and the shape that decides its memory."""

from __future__ import annotations

from typing import NamedTuple

PaddedShape = tuple[int, int]  # (samples, padded length)


class Microbatch(NamedTuple):
    """One microbatch of a plan: which samples, and the padded length they are trimmed to, if any."""

    samples: slice | tuple[int, ...]
    size: int
    length: int | None = None

    @property
    def padded_shape(self) -> PaddedShape:
        return self.size, self.length or 1

    def indices(self, total: int) -> range | tuple[int, ...]:
        """The samples by their numbers, of a batch of `total`."""
        return range(total)[self.samples] if isinstance(self.samples, slice) else self.samples


class Shape(NamedTuple):
    """What decides how much memory a sample takes."""

    key: str
    family: str  # the same for shapes that differ in their extents only
    elements: int  # of one sample
