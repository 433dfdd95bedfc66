"""The evidence in one device's part of a snapshot: totals, breakdowns, leaks, fragmentation.

Rules: what the file does not say stays unknown. How much the process could have is one of: given, written by
`record_oom`, what was reserved and free (the GPU itself was full), or only bounded (a cap).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from batchfit._engine.allocator.gpus import GPUS
from batchfit._units import format_bytes
from batchfit._why.pure.causes import OomEvidence
from batchfit._why.pure.holders import LiveMemory, TimedMemory, timeline
from batchfit._why.pure.lifetimes import FreeMemory, Lifetimes, follow, free_memory
from batchfit._why.pure.options import WhyOptions
from batchfit._why.pure.replayed_settings import (
    ReplayedSettings,
    replay_settings,
    segment_bytes,
    settings_of,
)
from batchfit._why.pure.snapshot import AllocatorHistory, MemorySnapshot
from batchfit._why.pure.stacks import PHASES, StackTable, printable
from batchfit._why.pure.steps import LeakingLine, StepLoop, find_steps, last_step, leaks

MIB = 2**20
# The driver keeps a little: 65.6 MiB were free on an H200 when 64 MiB were refused.
_FULL_WITHIN = 64 * MIB
_MOST_SHAPES, _LONGEST_TEXT = 32, 120
_NEARLY_ALL = 0.75  # of the smallest GPU there is


@final
@dataclass(frozen=True, slots=True)
class OomNotes:
    """What `record_oom` wrote beside the snapshot, as far as it is what it must be."""

    rank: int | None
    step: int | None
    batch: dict[str, str]
    batch_size: int | None
    limit: int | None  # bytes that the process could use
    torch: str
    is_virtual: bool  # live tensors of a CPU, without an allocator

    @classmethod
    def of(cls, found: dict[str, Any]) -> OomNotes:
        batch, torch = found.get("batch"), found.get("torch")
        shapes = batch if type(batch) is dict else {}
        return cls(
            _whole(found.get("rank")),
            _whole(found.get("step")),
            {
                printable(key[:_LONGEST_TEXT]): printable(one[:_LONGEST_TEXT])
                for key, one in list(shapes.items())[:_MOST_SHAPES]
                if type(one) is str
            },
            _whole(found.get("batch_size")) or None,
            _whole(found.get("limit_bytes")) or None,
            printable(torch[:_LONGEST_TEXT]) if type(torch) is str else "",
            found.get("is_virtual") is True,
        )


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFindings:
    """What was found out about one device."""

    device: int
    notes: OomNotes
    lives: Lifetimes
    evidence: OomEvidence
    free: FreeMemory
    phase: str
    stack: tuple[str, ...]
    batch_size: int | None
    peak_bytes: int
    end: LiveMemory
    at_peak: LiveMemory | None  # None where the peak is the end, or nearly
    loop: StepLoop
    timeline: list[TimedMemory]
    caveats: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class _Room:
    """How much memory the process had, as far as that is known."""

    capacity: int  # that it is known to have had
    slack: int  # that it may have had beside it
    left: int  # of it, for the request that failed
    total: int | None
    outside: int | None
    outside_is_least: bool


def examine(snapshot: MemorySnapshot, device: int, options: WhyOptions) -> DeviceFindings:
    """Everything about one device of a snapshot."""
    histories = snapshot.histories
    history = histories[device] if device < len(histories) else AllocatorHistory()
    segments = snapshot.segments_of(device)
    notes = OomNotes.of(snapshot.notes)
    table = StackTable(snapshot.stacks, has_stacks=any(history.stacks))
    lives = follow(history, segments)
    free = free_memory(lives, segments)
    loop = find_steps(snapshot, lives)
    end = LiveMemory.after(lives, lives.end - 1, table)
    peak_bytes = max(lives.begin_bytes, max(lives.totals, default=0))
    settings = settings_of(snapshot.settings)
    asked = history.sizes[lives.end] if lives.has_oom else 0
    stack = history.stacks[lives.end] if lives.has_oom else 0
    needed = asked if notes.is_virtual else segment_bytes(asked, settings)
    room = _room(lives, free, needed, options.total_bytes or notes.limit, is_virtual=notes.is_virtual)
    replayed = ReplayedSettings(reproduced=True)
    if options.what_if and lives.has_oom and not notes.is_virtual:
        replayed = replay_settings(lives, asked, room.capacity, room.slack, settings)
    short = max(needed - room.left, 0)
    batch_size = options.batch_size or notes.batch_size
    kind = table.kinds[stack]
    evidence = OomEvidence(
        asked=asked,
        live=end.size,
        reserved=free.reserved,
        split=free.split,
        largest_free=free.largest,
        free=history.addresses[lives.end] if lives.has_oom else 0,
        outside=room.outside,
        outside_is_least=room.outside_is_least,
        total=room.total,
        kind=kind if stack else -1,
        line=table.line(stack),
        short=short,
        short_is_most=room.slack > 0,
        fewer_samples=_fewer(lives, loop, short, batch_size) if lives.has_oom else None,
        leaks=_leaks(lives, loop, table),
        long=last_step(lives, loop, asked, table.line) if lives.has_oom else None,
        settings=replayed,
    )
    return DeviceFindings(
        device=device,
        notes=notes,
        lives=lives,
        evidence=evidence,
        free=free,
        phase=PHASES.get(kind, "") if lives.has_oom else "",
        stack=table.text(stack) if lives.has_oom else (),
        batch_size=batch_size,
        peak_bytes=peak_bytes,
        end=end,
        at_peak=LiveMemory.after(lives, lives.peak, table) if peak_bytes > 1.02 * end.size else None,
        loop=loop,
        timeline=timeline(lives, table),
        caveats=tuple(_caveats(snapshot, lives, table, room, replayed, is_virtual=notes.is_virtual)),
    )


def _leaks(lives: Lifetimes, loop: StepLoop, table: StackTable) -> list[LeakingLine]:
    """Those that matter: a line that leaves behind a thousandth of what is live is none."""
    return [one for one in leaks(lives, loop, table.line, table.kinds) if one.size * 1000 >= lives.end_bytes]


def _room(lives: Lifetimes, free: FreeMemory, needed: int, total: int | None, *, is_virtual: bool) -> _Room:
    """How much memory the process had when the request failed."""
    most = max(free.reserved, max(lives.reserved, default=0))
    left = lives.history.addresses[lives.end] if lives.has_oom else 0
    if is_virtual:
        return _Room(free.reserved + left, 0, left, total, None, False)
    is_full = lives.has_oom and left < needed + _FULL_WITHIN
    if not is_full:
        # A cap, which lies between what was reserved and what the request would have added to it.
        capacity = max(most, min(total, most + needed - 1)) if total is not None else most
        more = max(free.reserved + needed - 1 - capacity, 0)
        return _Room(capacity, more, max(capacity - free.reserved, 0), total, None, False)
    had = free.reserved + min(left, max(needed - 1, 0))
    if total is not None:
        return _Room(had, 0, left, total, max(total - free.reserved - left, 0), False)
    smallest = min(one.usable_bytes for one in GPUS.values())
    if free.reserved + left < _NEARLY_ALL * smallest:  # no GPU has so little
        return _Room(had, 0, left, None, smallest - free.reserved - left, True)
    return _Room(had, 0, left, None, None, False)


def _fewer(lives: Lifetimes, loop: StepLoop, short: int, batch_size: int | None) -> int | None:
    """By how many samples a smaller batch has room for the request: of what its step holds by then."""
    if batch_size is None or batch_size < 2 or not short:
        return None
    begin = loop.steps[-1].begin if loop.steps else 0
    history = lives.history
    held = sum(history.sizes[n] for n in lives.live_after(lives.end - 1) if n >= begin)
    if not held:
        return None
    fewer = -(-short * batch_size // (held + short))
    return fewer if fewer < batch_size else None


def _caveats(
    snapshot: MemorySnapshot,
    lives: Lifetimes,
    table: StackTable,
    room: _Room,
    replayed: ReplayedSettings,
    *,
    is_virtual: bool,
) -> list[str]:
    history, found = lives.history, []
    if is_virtual:
        found.append("virtual memory on a CPU: live tensors, without segments, cache or fragmentation")
    if not len(history):
        found.append("no history: it was not recorded, so that only what was live at the end is known")
    elif not lives.has_oom:
        found.append("no OOM in the history: this is what was live at the end")
    if len(history) and not table.has_stacks:
        found.append("no stacks in the history: record with context='all', so that lines are named")
    if lives.end + 1 < len(history):
        later = len(history) - lives.end - 1
        found.append(f"the history has {later:,} entries after the OOM: what was live then is rebuilt")
    before = lives.begin_bytes
    if before > 0.02 * max(lives.end_bytes, 1) and len(history):
        found.append(f"{format_bytes(before)} were live before the history began, mostly without a stack")
    if lives.has_oom and room.total is None:
        what = "the cap of the process" if room.slack else "the memory of the GPU"
        more = "" if room.slack else ", and what other processes held follows from it"
        found.append(f"{what} is in no snapshot: --budget says it{more}")
    if not replayed.reproduced:
        found.append("the replay does not reproduce this OOM, so no other settings were tried")
    if len(set(history.streams)) > 1:
        found.append("several streams: the replay counts them as one")
    if any(history.pools) or any(one.is_private for one in snapshot.segments):
        found.append("private memory pools (CUDA graphs): the replay counts them as one with the others")
    return found
