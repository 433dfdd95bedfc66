"""The allocator of a snapshot, replayed under other settings: would the request have been granted?

Rules:
- The replay must first reproduce what happened: every request up to the OOM granted, and that one refused.
  Where it does not, no setting is tried, and a caveat says so.
- What was live before the first entry is allocated first, in the order of its addresses.
- A history of millions is replayed from where its last part begins (`_MOST_ENTRIES`).
- Only the request that failed is judged: what the step would have asked for next is in no file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from batchfit._engine.allocator.caching import (
    MIB,
    OWN_SEGMENT,
    SEGMENT_GRAIN,
    SMALL_REQUEST,
    SMALL_SEGMENT,
    AllocatorSettings,
    Block,
    CachingAllocator,
)
from batchfit._why.pure.lifetimes import Lifetimes
from batchfit._why.pure.snapshot import ALLOC, FREE, FREE_REQUESTED

_MOST_ENTRIES = 200_000


@final
@dataclass(frozen=True, slots=True)
class SettingOutcome:
    """What one change of the allocator's settings would have done."""

    setting: str
    fits: bool
    reserved_bytes: int


@final
@dataclass(frozen=True, slots=True)
class ReplayedSettings:
    """The settings that were tried; `reproduced` is False where the OOM itself could not be."""

    reproduced: bool
    outcomes: tuple[SettingOutcome, ...] = ()


def segment_bytes(asked: int, settings: AllocatorSettings = AllocatorSettings()) -> int:  # noqa: B008  frozen
    """What the driver is asked for when no block is free: a segment for a request."""
    if settings.expandable_segments:
        page = SMALL_SEGMENT if asked <= SMALL_REQUEST else 20 * MIB
        return -(-asked // page) * page
    if asked <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if asked < OWN_SEGMENT:
        return settings.large_segment_bytes
    return -(-asked // SEGMENT_GRAIN) * SEGMENT_GRAIN


def settings_of(found: dict[str, Any]) -> AllocatorSettings:
    """The allocator's settings as a snapshot has them; the defaults where it has none."""
    text = found.get("PYTORCH_CUDA_ALLOC_CONF")
    try:
        read = AllocatorSettings.from_environment(text if isinstance(text, str) else "")
    except ValueError:
        read = AllocatorSettings()
    if found.get("expandable_segments") is True:  # it may have been set in the program
        read = replace(read, expandable_segments=True)
    return read


def replay_settings(
    lives: Lifetimes, asked: int, capacity: int, slack: int, settings: AllocatorSettings
) -> ReplayedSettings:
    """Replay a history under its own settings and under others.

    `capacity` is what the process is known to have had, `slack` how much more it may have had at most: a
    cap is in no snapshot, and lies between what was reserved and what the request would have added.
    """
    run = _Replay(lives, asked)
    known = next((at for at in (capacity, capacity + slack) if run.is_oom(at, settings)), None)
    if known is None:
        return ReplayedSettings(reproduced=False)
    outcomes = []
    for text, other in _others(settings):
        fits, reserved = run.outcome(known, other)
        outcomes.append(SettingOutcome(text, fits, reserved))
    return ReplayedSettings(True, tuple(outcomes))


def _others(now: AllocatorSettings) -> list[tuple[str, AllocatorSettings]]:
    """Settings that may help, the one that costs least first."""
    found = []
    if not now.expandable_segments:
        found.append(("expandable_segments:True", replace(now, expandable_segments=True)))
        if now.max_split_size_bytes is None:
            for mib in (128, 512):
                changed = replace(now, max_split_size_bytes=mib * MIB)
                found.append((f"max_split_size_mb:{mib}", changed))
    if not now.roundup_power2_divisions:
        found.append(("roundup_power2_divisions:8", replace(now, roundup_power2_divisions=(8,))))
    return found


@final
class _Replay:
    """A history with what was live before it, ready to run at any capacity."""

    def __init__(self, lives: Lifetimes, asked: int) -> None:
        history, end = lives.history, lives.end
        self.asked = asked
        self.begin = max(0, end - _MOST_ENTRIES)
        self.end = end
        self.freeing = FREE if FREE in history.actions else FREE_REQUESTED
        self.history = history
        held = [(one.address, one.size) for one in lives.earlier_after(self.begin - 1)]
        if self.begin:
            held += [(history.addresses[n], history.sizes[n]) for n in lives.live_after(self.begin - 1)]
        self.held = sorted(held)

    def is_oom(self, capacity: int, settings: AllocatorSettings) -> bool:
        """Whether all is granted up to the request that failed, and that one is refused."""
        device = CachingAllocator(capacity, settings)
        return self._run(device) and device.allocate(self.asked) is None

    def outcome(self, capacity: int, settings: AllocatorSettings) -> tuple[bool, int]:
        """Whether all is granted, the last request included; what is reserved then."""
        device = CachingAllocator(capacity, settings)
        fits = self._run(device) and device.allocate(self.asked) is not None
        return fits, device.reserved_bytes

    def _run(self, device: CachingAllocator) -> bool:
        blocks: dict[int, Block] = {}
        for address, size in self.held:
            block = device.allocate(size)
            if block is None:
                return False
            blocks[address] = block
        history, freeing, cut = self.history, self.freeing, slice(self.begin, self.end)
        entries = zip(history.actions[cut], history.addresses[cut], history.sizes[cut], strict=True)
        for action, address, size in entries:
            if action == ALLOC:
                block = device.allocate(size)
                if block is None:
                    return False
                blocks[address] = block
            elif action == freeing and address in blocks:
                device.free(blocks.pop(address))
        return True
