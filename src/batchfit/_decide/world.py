"""One global batch on any number of ranks: how it is dealt out, and what is kept when that number changes.

Rules:
- A batch is samples per optimizer step over all ranks, and stays what it is when ranks come or go: each rank
  gets a part, parts differ by one sample at most, and the first ranks have the larger ones.
- What was learned about memory holds for one rank, whatever its number: a microbatch size is carried over,
  never above a rank's part.
- Samples that were seen are counted over all ranks, so a run that goes on with another number of them takes
  neither the same sample twice nor leaves one out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


def local_batch(batch_size: int, *, rank: int, world_size: int) -> int:
    """A rank's part of a batch.

    >>> [local_batch(10, rank=rank, world_size=4) for rank in range(4)]
    [3, 3, 2, 2]
    """
    _check(batch_size, world_size)
    if type(rank) is not int or not 0 <= rank < world_size:
        raise ValueError(f"rank must be an integer from 0 to {world_size - 1}, not {rank!r}")
    part, more = divmod(batch_size, world_size)
    return part + (rank < more)


def local_span(batch_size: int, *, rank: int, world_size: int) -> range:
    """Which of the samples of a batch are a rank's: the spans of all ranks are the batch, in order."""
    before = sum(local_batch(batch_size, rank=one, world_size=world_size) for one in range(rank))
    return range(before, before + local_batch(batch_size, rank=rank, world_size=world_size))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is, in words that do not depend on how many ranks it has."""

    batch_size: int
    samples_seen: int = 0
    microbatch_size: int | None = None

    def __post_init__(self) -> None:
        _check(self.batch_size, 1)
        if type(self.samples_seen) is not int or self.samples_seen < 0:
            raise ValueError(f"samples_seen must be an integer of at least 0, not {self.samples_seen!r}")
        size = self.microbatch_size
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"microbatch_size must be a positive integer or None, not {size!r}")

    def after_step(self) -> Progress:
        """Where it is after one more optimizer step."""
        return Progress(
            batch_size=self.batch_size,
            samples_seen=self.samples_seen + self.batch_size,
            microbatch_size=self.microbatch_size,
        )

    def span(self, *, rank: int, world_size: int) -> range:
        """The samples of the next step that are a rank's, counted from the start of the run."""
        local = local_span(self.batch_size, rank=rank, world_size=world_size)
        return range(self.samples_seen + local.start, self.samples_seen + local.stop)

    def microbatches(self, *, rank: int, world_size: int) -> list[int]:
        """A rank's part of the next step in microbatches: few, and as equal as can be."""
        part = local_batch(self.batch_size, rank=rank, world_size=world_size)
        if part == 0:
            return []
        count = -(-part // min(part, self.microbatch_size or part))
        return [local_batch(part, rank=one, world_size=count) for one in range(count)]


def _check(batch_size: int, world_size: int) -> None:
    for name, value in (("batch_size", batch_size), ("world_size", world_size)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
