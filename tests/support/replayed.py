"""Events run through the model of the caching allocator, each checked: what tests compare a replay with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchfit._engine.allocator.caching import AllocatorSettings, Block, CachingAllocator


@dataclass(frozen=True, slots=True)
class Replay:
    """What a device did under a list of events: the peaks count up to the event that failed."""

    fits: bool
    failed_at: int | None
    retries: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    peak_requested_bytes: int
    peak_split_bytes: int


def replay(
    sizes: Sequence[int],
    events: Sequence[int],
    *,
    capacity_bytes: int | None,
    rules: AllocatorSettings = AllocatorSettings(),  # noqa: B008 (frozen)
) -> Replay:
    """Run events through a fresh device: n >= 0 allocates block n of `sizes[n]` bytes, ~n frees block n."""
    device = CachingAllocator(capacity_bytes, rules)
    allocate, free = device.allocate, device.free
    held: dict[int, Block] = {}
    failed_at = None
    for index, event in enumerate(events):
        if event < 0:
            if ~event not in held:
                raise ValueError(f"events must free only what is allocated, not block {~event} at {index}")
            free(held.pop(~event))
            continue
        if event in held:
            raise ValueError(f"events must not allocate block {event} again at {index} while it is held")
        block = allocate(sizes[event])
        if block is None:
            failed_at = index
            break
        held[event] = block
    return Replay(
        fits=failed_at is None,
        failed_at=failed_at,
        retries=device.retries,
        peak_allocated_bytes=device.peak_allocated_bytes,
        peak_reserved_bytes=device.peak_reserved_bytes,
        peak_requested_bytes=device.peak_requested_bytes,
        peak_split_bytes=device.peak_split_bytes,
    )
