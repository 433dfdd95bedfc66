"""How the samples of a ragged batch are packed into microbatches.

Rules:
- Every sample goes to exactly one microbatch, whose padded length is at least the sample's own and never
  more than the batch is padded to already.
- A plan is a pure function of its arguments. Padded lengths come from a grid that is the same for every
  batch (multiples of `multiple`), sample counts from a ladder: shapes recur from batch to batch.
- What is minimised is time, in padded elements: a microbatch costs its elements, or what the host needs to
  launch one where that is more, and a shape that was never run costs its kernels, plans and blocks once.
  A new shape is an investment: it is charged the less, the more batches there were (as many are likely to
  follow).
- Sorted, samples of about one length are neighbours, so that the best plan is a path through the sorted
  samples (dynamic programming); the longest come first: an OOM comes early.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from batchfit._engine.batch.pure.microbatch import Microbatch, PaddedShape

# Lengths are rounded up to this: kernels work in tiles of 64; finer steps cost more shapes than they save.
MULTIPLE: Final = 64
# Shapes remembered; enough for 64 lengths and every count of the ladder that a batch of 1000 uses.
REMEMBERED: Final = 1024
# After so many batches a new shape is charged half. Sooner, and a short run ends while shapes are still
# new; never, and a long one keeps padding that a few more shapes would save (benchmarks/ragged_gpu.py).
_PATIENCE: Final = 50
# What is run where nothing is known, in launches: less is slower, and the shapes of the first batch stay.
_UNKNOWN: Final = 2.0


@final
@dataclass(frozen=True, slots=True)
class Costs:
    """What a microbatch costs besides its elements, in padded elements (tokens).

    `launch`: the least that a microbatch costs, for the host has to launch its kernels; `each`: what one
    costs on top of its elements; `new_shape`: what the first run of a shape costs on top of a later one.
    """

    launch: float
    each: float
    new_shape: float

    def __post_init__(self) -> None:
        for name in ("launch", "each", "new_shape"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number that is not negative, not {value!r}")

    @classmethod
    def usual(cls, longest: int, capacity: float = math.inf) -> Costs:
        """What to expect where nothing was measured: GPT-2 small on an H200 (22, 5 and 9 ms).

        Lengths need not be tokens (audio frames): a launch is worth no less than four of the longest
        samples, and no more than half of what fits (`capacity`, in elements).
        """
        launch = min(max(3600.0, 4.0 * longest), max(capacity / 2, 1.0))
        return cls(launch=launch, each=launch * 2 / 9, new_shape=launch * 5 / 12)


@final
@dataclass(frozen=True, slots=True)
class SeenShapes:
    """The shapes that have run, oldest first, and how many batches there were."""

    seen: tuple[PaddedShape, ...] = ()
    batches: int = 0

    def ran(self, packs: Iterable[Microbatch]) -> SeenShapes:
        """With the shapes of one more batch."""
        seen = dict.fromkeys(self.seen)
        for one in packs:
            seen.setdefault(one.padded_shape)
        return SeenShapes(tuple(seen)[-REMEMBERED:], self.batches + 1)

    def to_dict(self) -> dict[str, Any]:
        return {"seen": [list(shape) for shape in self.seen], "batches": self.batches}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> SeenShapes:
        return cls(tuple((int(n), int(length)) for n, length in stored["seen"]), int(stored["batches"]))


def ladder(at_most: int) -> tuple[int, ...]:
    """The sample counts that are used, ascending: all up to 4, then four to each doubling.

    >>> ladder(40)
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
    """
    counts = [1, 2, 3]
    step = 1
    while counts[-1] < at_most:
        counts += [4 * step, 5 * step, 6 * step, 7 * step]
        step *= 2
    return tuple(count for count in counts if count <= at_most)


def pack(
    lengths: Sequence[int],
    *,
    most_samples: int | Callable[[int], int | None] | None,
    at_most: int | None = None,
    multiple: int = MULTIPLE,
    padded_length: int | None = None,
    shapes: SeenShapes | None = None,
    costs: Costs | None = None,
) -> tuple[Microbatch, ...]:
    """Microbatches for samples of these lengths, the longest first.

    `most_samples` is how many samples fit (None: any number), or a function of the padded length that says
    so; where it returns None, nothing is known yet, and no more is run than two launches are worth. Less
    than one counts as one. No more than `at_most` samples are taken, however many fit. `padded_length` is
    what the batch is padded to (its longest sample, where not given), `shapes` what has run before.

    >>> [(one.samples, one.length) for one in pack([500, 60, 30, 490], most_samples=2, multiple=64)]
    [((0, 3), 500), ((1, 2), 64)]
    """
    lengths = tuple(lengths)
    limit = _checked(lengths, multiple, padded_length, at_most)
    if not lengths:
        return ()
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    grid = [min(limit, -(-max(lengths[index], 1) // multiple) * multiple) for index in order]
    shapes = SeenShapes() if shapes is None else shapes
    # Known shapes that are too long for this batch, or do not fit any more, are no use.
    useful = [shape for shape in shapes.seen if shape[1] <= limit]
    most, capacity = _limits(most_samples, {*grid, *(length for _, length in useful)}, max(lengths))
    if at_most is not None:
        most = {length: min(found, at_most) for length, found in most.items()}
    known = {shape for shape in useful if shape[0] <= most[shape[1]]}
    costs = Costs.usual(max(lengths), capacity) if costs is None else costs
    fee = costs.new_shape / (1 + shapes.batches / _PATIENCE)
    packs, start = [], 0
    for count, length in _cheapest_path(grid, most, known, fee, costs):
        packs.append(Microbatch(tuple(order[start : start + count]), count, length))
        start += count
    return tuple(packs)


def _run_cost(shape: PaddedShape, costs: Costs) -> float:
    return max(costs.launch, costs.each + shape[0] * shape[1])


def _cheapest_path(
    grid: Sequence[int], most: Mapping[int, float], known: set[PaddedShape], fee: float, costs: Costs
) -> list[PaddedShape]:
    """The shapes, in the samples' order, that serve all of them at the least cost."""
    total = len(grid)
    by_count: dict[int, list[int]] = {}
    for count, length in sorted(known):
        by_count.setdefault(count, []).append(length)
    counts = sorted(set(ladder(total)) | {count for count in by_count if count <= total})
    price = [0.0] * (total + 1)
    choice: list[PaddedShape] = [(0, 0)] * (total + 1)
    options: dict[int, list[tuple[int, int, float]]] = {}
    for start in range(total - 1, -1, -1):
        length = grid[start]
        if length not in options:
            options[length] = list(_options(length, counts, most[length], by_count, fee, costs))
        best, shape = math.inf, (1, length)
        for count, used, cost in options[length]:
            if start + count > total:
                break
            candidate = cost + price[start + count]
            if candidate < best:
                best, shape = candidate, (count, used)
        price[start], choice[start] = best, shape
    path, start = [], 0
    while start < total:
        path.append(choice[start])
        start += choice[start][0]
    return path


def _options(
    length: int,
    counts: Sequence[int],
    most: float,
    by_count: Mapping[int, list[int]],
    fee: float,
    costs: Costs,
) -> Iterator[tuple[int, int, float]]:
    """(samples, padded length, cost) for samples of which the longest has this length."""
    for count in counts:
        lengths = by_count.get(count, [])
        at = bisect_left(lengths, length)
        longer = lengths[at] if at < len(lengths) else None  # the shortest known shape that is long enough
        old = math.inf if longer is None else _run_cost((count, longer), costs)
        new = _run_cost((count, length), costs) + fee if count <= most else math.inf
        if longer is not None and old <= new:
            yield count, longer, old
        elif count <= most:
            yield count, length, new


def _limits(
    most_samples: int | Callable[[int], int | None] | None, lengths: Iterable[int], longest: int
) -> tuple[dict[int, float], float]:
    """The most samples of each length, and the most elements of a microbatch, infinite where not known."""
    most: dict[int, float] = {}
    capacity = 0.0
    for length in lengths:
        found = most_samples(length) if callable(most_samples) else most_samples
        capacity = max(capacity, math.inf if found is None else max(1, found) * length)
        if found is None and most_samples is not None:
            found = int(_UNKNOWN * Costs.usual(longest).launch // length)
        most[length] = math.inf if found is None else max(1, found)
    return most, capacity


def _checked(
    lengths: tuple[int, ...],
    multiple: int,
    padded: int | None,
    at_most: int | None,
) -> int:
    """The arguments make sense; the length that nothing may exceed."""
    if lengths and min(lengths) < 0:
        raise ValueError(f"lengths must not be negative, not {min(lengths)!r}")
    for name, value in (
        ("multiple", multiple),
        ("padded_length", padded),
        ("at_most", at_most),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be positive, not {value!r}")
    longest = max(lengths, default=1)
    if padded is not None and padded < longest:
        raise ValueError(f"padded_length must be at least the longest sample's {longest}, not {padded!r}")
    return max(longest, 1) if padded is None else padded
