"""`--fits` of `batchfit schedule show`: the largest batch and memory by size, from a number or a result file.

Rules: memory between sizes that were run or predicted is a line between them, and goes on beyond the last;
where a result knows one size only, it says nothing about others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchfit._units import parse_count
from batchfit.errors import ResultFileError


@dataclass(frozen=True, slots=True)
class ScheduleLimit:
    """The largest batch of one process, and the memory that sizes take."""

    largest: int
    budget_bytes: int | None = None
    points: tuple[tuple[int, int], ...] = ()  # (size, peak bytes), by size

    @classmethod
    def of(cls, fits: str) -> ScheduleLimit:
        """From what was given as `--fits`."""
        path = Path(fits)
        if not path.is_file():
            if path.suffix == ".json":
                raise ValueError(f"fits must be a number or a result file, not {fits!r}: no such file")
            return cls(parse_count(fits, name="fits", at_least=1))
        try:
            return cls.from_file(path)
        except ResultFileError as error:
            raise ValueError(f"fits must be a result of find, predict or profile: {error}") from None

    @classmethod
    def from_file(cls, path: Path) -> ScheduleLimit:
        """From the first result in a file."""
        from batchfit._report.files import read_file
        from batchfit.results import FitResult, Prediction, ThroughputProfile

        result = read_file(path)[0].result
        if isinstance(result, FitResult):
            found = [(t.size, t.peak_bytes) for t in result.trials if t.fits and t.peak_bytes]
            return cls(result.batch_size, result.budget_bytes, _by_size(found))
        if isinstance(result, Prediction) and result.batch_size > 0:
            found = [(point.size, point.peak_bytes) for point in result.curve]
            return cls(result.batch_size, result.budget_bytes, _by_size(found))
        if isinstance(result, ThroughputProfile) and result.largest:
            found = [(point.size, point.peak_bytes) for point in result.points if point.peak_bytes]
            fits = max(result.largest, result.limit or 0)  # the largest that was timed may be less
            return cls(fits, result.budget_bytes, _by_size(found))
        raise ValueError(f"fits must be a result of find, predict or profile with a size, not {path}")

    def peak_bytes_at(self, size: int) -> int | None:
        """The memory of one forward/backward of `size` samples."""
        points = self.points
        if len(points) < 2:
            return dict(points).get(size)
        index = next((i for i in range(1, len(points) - 1) if points[i][0] >= size), len(points) - 1)
        (low, low_bytes), (high, high_bytes) = points[index - 1], points[index]
        return round(low_bytes + (high_bytes - low_bytes) / (high - low) * (size - low))


def _by_size(found: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    highest: dict[int, int] = {}
    for size, peak_bytes in found:
        highest[size] = max(peak_bytes, highest.get(size, 0))
    return tuple(sorted(highest.items()))
