"""Does a size fit? A footprint's steps, replayed through the caching allocator under a capacity.

Rules:
- Steps are repeated until the allocator settles: a size that gets through two steps may die in the eighth
  (ResNet-50 on an H200: 562 passes 2 steps, 556 dies in a soak of 25, 549 survives).
- A workspace that cuDNN finds no room for is not the end: it takes another plan, and remembers it. What such
  a plan needs is not known; it is taken for nothing.
- "Sustained" means what it means in a trial: no retry once settled. The answer is the largest size that is
  sustained, and every size that is answered has been replayed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from batchfit._decide.allocator import Block, CachingAllocator, Rules
from batchfit._decide.footprint import Footprint

STEPS = 12
_SETTLED = 2  # steps in a row without a retry


@final
@dataclass(frozen=True, slots=True)
class Simulation:
    """How a size fared."""

    size: int
    fits: bool
    sustained: bool
    retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    failed_at: int | None = None  # the event that found no room


def simulate(
    footprint: Footprint,
    size: int,
    *,
    capacity_bytes: int | None,
    rules: Rules = Rules(),  # noqa: B008  frozen
    steps: int = STEPS,
    extra_bytes: float = 0.0,
) -> Simulation:
    """Run `steps` steps of `size` samples; `extra_bytes` are taken first and held throughout."""
    device = CachingAllocator(capacity_bytes, rules)
    sizes = footprint.sizes_at(size)
    optional = footprint.optional
    blocks: dict[int, Block] = {}

    def ended(*, fits: bool, sustained: bool, failed_at: int | None = None) -> Simulation:
        return Simulation(
            size,
            fits,
            sustained,
            device.retries,
            device.peak_allocated_bytes,
            device.peak_reserved_bytes,
            failed_at,
        )

    if extra_bytes > 0 and device.allocate(round(extra_bytes)) is None:
        return ended(fits=False, sustained=False, failed_at=0)
    ends = footprint.step_ends
    failed = _play(footprint.events, 0, ends[-1], sizes, device, blocks, optional)
    if failed is not None:
        return ended(fits=False, sustained=False, failed_at=failed)
    pairs = footprint.carried
    if pairs is None or len(ends) < 2:
        return ended(fits=True, sustained=device.retries == 0)
    quiet, before = 0, device.retries
    for _ in range(len(ends), steps):
        for old, new in pairs:
            blocks[old] = blocks.pop(new)
        failed = _play(footprint.events, ends[-2], ends[-1], sizes, device, blocks, optional)
        if failed is not None:
            return ended(fits=False, sustained=False, failed_at=failed)
        quiet = quiet + 1 if device.retries == before else 0
        before = device.retries
        if quiet == _SETTLED:
            return ended(fits=True, sustained=True)
    return ended(fits=True, sustained=quiet > 0 or device.retries == 0)


def _play(
    events: tuple[int, ...],
    begin: int,
    end: int,
    sizes: list[int],
    device: CachingAllocator,
    blocks: dict[int, Block],
    optional: Mapping[int, tuple[int, ...]],
) -> int | None:
    allocate, free = device.allocate, device.free
    for position in range(begin, end):
        event = events[position]
        if event >= 0:
            block = allocate(sizes[event])
            if block is None:
                alike = optional.get(event)
                if alike is None:
                    return position
                for one in alike:
                    sizes[one] = 0
                block = allocate(0)
                assert block is not None
            blocks[event] = block
        else:
            free(blocks.pop(~event))
    return None


def largest(
    footprint: Footprint,
    *,
    capacity_bytes: int,
    rules: Rules = Rules(),  # noqa: B008
    extra: tuple[float, float] = (0.0, 0.0),
    most: int | None = None,
) -> Simulation | None:
    """The largest size that is sustained, up to `most`; None where not even one sample is.

    `extra` is what the footprint does not show: fixed bytes, and bytes a sample.
    """

    def run(size: int) -> Simulation:
        extra_bytes = max(0.0, extra[0] + extra[1] * size)
        return simulate(footprint, size, capacity_bytes=capacity_bytes, rules=rules, extra_bytes=extra_bytes)

    high = upper_bound(footprint, capacity_bytes, extra, most)
    if high < 1:
        return None
    best: Simulation | None = None
    low, top = 0, high + 1
    # Fragmentation costs a few per cent as a rule: begin there, and close in from both sides.
    probe = max(1, round(high * 0.97))
    while top - low > 1:
        found = run(probe)
        if found.sustained:
            low, best = probe, found
        else:
            top = probe
        step = max(1, round(high * 0.03))
        probe = min(top - 1, low + step) if low and top == high + 1 else (low + top) // 2
        if low == 0 and top - 1 > 2 * step:
            probe = max(1, top - 2 * step)
    # A size that fails between others that run (seen once in 57 cases) must not cost the rest.
    for size in range(min(high, low + max(2, low // 50)), low, -1) if low < 200 else ():
        found = run(size)
        if found.sustained:
            return found
    return best


def upper_bound(
    footprint: Footprint,
    capacity_bytes: float,
    extra: tuple[float, float] = (0.0, 0.0),
    most: int | None = None,
) -> int:
    """The largest size whose live bytes alone are within the capacity; 0 where none is."""
    bound = float("inf") if most is None else float(most)
    for piece in footprint.pieces():
        fixed, slope = piece.line.fixed + extra[0], piece.line.per_sample + extra[1]
        if slope > 0:
            bound = min(bound, (capacity_bytes - fixed) / slope)
        elif fixed > capacity_bytes:
            return 0
    return int(min(max(bound, 0.0), 2**30))
