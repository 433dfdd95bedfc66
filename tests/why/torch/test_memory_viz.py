"""PyTorch's own viewer reads the same files, and agrees on totals and on what is live at each point."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from snapshot_cases import PLANTED, RECORDED, expanding, h200_value
from torch.cuda import _memory_viz

from batchfit._why.pure.lifetimes import NEVER, follow
from batchfit._why.pure.snapshot import ALLOC, FREE, MemorySnapshot, read_snapshot

VALUES = {
    **{f"h200 {cause}": (lambda cause=cause: h200_value(cause)) for cause in RECORDED},
    **{f"model {cause}": (lambda make=make: make().snapshot()) for cause, make in PLANTED.items()},
    "model expandable": lambda: expanding().snapshot(),
}
ALLOCATED = re.compile(r"^(\w+) = \S+\[\d+:")
FREED = re.compile(r"^# free completed for (\S+) ")
MALLOCED = re.compile(r"^(\w+) = cudaMalloc\(")


def ours(value: dict[str, Any], path: Path) -> MemorySnapshot:
    path.write_bytes(pickle.dumps(value))
    with path.open("rb") as file:
        return read_snapshot(file)


@pytest.mark.parametrize("name", VALUES)
def test_the_viewer_counts_the_same_totals(name: str, tmp_path: Path) -> None:
    value = VALUES[name]()
    snapshot = ours(value, tmp_path / "one.pickle")
    lives = follow(snapshot.histories[0], snapshot.segments)
    reserved = sum(one.size for one in snapshot.segments)
    allocated = sum(b.requested for one in snapshot.segments for b in one.blocks if b.state == 0)
    text = _memory_viz.segsum(value)
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}\n" in text
    assert f"total_allocated: {_memory_viz.Bytes(allocated)}\n" in text
    assert f"segments: {len(snapshot.segments)}\n" in text
    awaiting = sum(b.requested for one in snapshot.segments for b in one.blocks if b.state == 1)
    assert lives.end_bytes == allocated + awaiting
    assert lives.reserved[-1] == reserved


@pytest.mark.parametrize("name", VALUES)
def test_the_viewer_has_the_same_blocks_live_at_each_point(name: str, tmp_path: Path) -> None:
    """Its text gives each block a name when it is allocated and takes it back when it is freed."""
    value = VALUES[name]()
    snapshot = ours(value, tmp_path / "one.pickle")
    history = snapshot.histories[0]
    lives = follow(history, snapshot.segments)
    entries = iter(n for n in range(len(history)) if history.actions[n] in (ALLOC, FREE))
    named: dict[str, int] = {}
    live: set[int] = set()
    seen = 0
    for line in _memory_viz.trace(value).splitlines():
        if MALLOCED.match(line):
            continue
        allocated, freed = ALLOCATED.match(line), FREED.match(line)
        if allocated:
            entry = next(entries)
            assert history.actions[entry] == ALLOC
            named[allocated[1]] = entry
            live.add(entry)
        elif freed:
            entry = next(entries)
            assert history.actions[entry] == FREE
            if freed[1] in named:
                one = named.pop(freed[1])
                assert lives.freed[one] == entry
                live.discard(one)
        else:
            continue
        seen += 1
        if seen % 97 == 0 or seen < 200:
            assert live == set(lives.live_after(entry))
    assert next(entries, None) is None
    assert live == {n for n in range(lives.end) if history.actions[n] == ALLOC and lives.freed[n] == NEVER}
