"""A memory snapshot as columns: every entry of the allocator's history, every block, every stack.

PyTorch writes a dict for each entry of the history; here an entry is a row of numbers (45 bytes), and a stack
a number. `read_snapshot` reads a file so; nothing of it stays an object.

Rules:
- What the reader needs of a file is checked; what it does not know (keys of later versions) is passed over.
- A file says what it lacks in one line (`SnapshotRefused`): it is a stranger's.
- Sizes in the history are what was asked for; sizes of blocks are what the allocator took for it.
"""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import IO, Any, final

from batchfit._why.pure.pickle_reader import PickleReader, PickleRefused

# What an entry says; the order is that of `ACTIONS`.
ALLOC, FREE_REQUESTED, FREE, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OOM, SNAPSHOT, OTHER = range(10)
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
_CODES = {name: code for code, name in enumerate(ACTIONS)}
ACTIVE, AWAITING, INACTIVE = range(3)
_STATES = {
    "active_allocated": ACTIVE,
    "active_awaiting_free": AWAITING,
    "active_pending_free": AWAITING,
    "inactive": INACTIVE,
}
# The key under which `record_oom` puts what the allocator does not know.
NOTES_KEY = "batchfit"


class SnapshotRefused(PickleRefused):
    """A file that is no snapshot, or a damaged one; says why, in one line."""


@final
@dataclass(frozen=True, slots=True, eq=False)  # one object for equal ones: identity is enough, and quick
class StackFrame:
    """One line of a stack."""

    filename: str
    line: int
    name: str


@final
@dataclass(frozen=True, slots=True)
class InternedStack:
    """A stack, the innermost frame first; `number` is its place in `Snapshot.stacks`."""

    number: int
    frames: tuple[StackFrame, ...]


@final
@dataclass(frozen=True, slots=True)
class AllocatorHistory:
    """The recorded entries of one device, a column for each thing that they say."""

    actions: array[int] = field(default_factory=lambda: array("B"))
    addresses: array[int] = field(default_factory=lambda: array("Q"))  # of an OOM: what the GPU had free
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    stacks: array[int] = field(default_factory=lambda: array("I"))  # 0: none was recorded
    streams: array[int] = field(default_factory=lambda: array("q"))
    times_us: array[int] = field(default_factory=lambda: array("q"))
    pools: array[int] = field(default_factory=lambda: array("I"))  # 0: the ordinary one

    def __len__(self) -> int:
        return len(self.actions)

    def part(self, begin: int, end: int) -> AllocatorHistory:
        """The entries from `begin` to `end`."""
        cut = slice(begin, end)
        return AllocatorHistory(
            self.actions[cut],
            self.addresses[cut],
            self.sizes[cut],
            self.stacks[cut],
            self.streams[cut],
            self.times_us[cut],
            self.pools[cut],
        )


@final
@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block of a segment."""

    address: int
    size: int
    requested: int
    state: int
    stack: int


@final
@dataclass(frozen=True, slots=True)
class ReservedSegment:
    """Memory that the allocator has reserved, contiguous, and the blocks that it is cut into."""

    device: int
    address: int
    size: int
    stream: int
    is_expandable: bool
    is_private: bool  # of a pool of its own, such as a CUDA graph's
    blocks: tuple[BlockRow, ...]


@final
@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """What one file holds: a history and segments for each device, and the stacks that both number."""

    histories: tuple[AllocatorHistory, ...]
    segments: tuple[ReservedSegment, ...]
    stacks: tuple[tuple[StackFrame, ...], ...]
    settings: dict[str, Any]
    notes: dict[str, Any]  # what `record_oom` wrote beside it

    def segments_of(self, device: int) -> list[ReservedSegment]:
        return [one for one in self.segments if one.device == device]

    @property
    def devices(self) -> list[int]:
        """Devices of which anything is known."""
        found = {one.device for one in self.segments}
        found |= {number for number, history in enumerate(self.histories) if len(history)}
        return sorted(found)


@final
class _Placed:
    """What stands in the place of a row, a block or a segment that was folded away."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what


_ROW, _BLOCK = _Placed("an entry"), _Placed("a block")
# Where an entry's values are among its keys, in the order of the columns.
_Layout = Callable[[list[Any]], tuple[Any, ...]]
_MOST_LAYOUTS = 64
_MOST_DEVICES = 1024
_LARGEST = 2**48


@final
class _Folder:
    """Turns what the reader has read into rows, as it is read."""

    def __init__(self) -> None:
        self.rows = AllocatorHistory()
        self.blocks: list[BlockRow] = []
        self.segments: list[ReservedSegment] = []
        self._frames: dict[tuple[str, int, str], StackFrame] = {}
        self._stacks: dict[tuple[StackFrame, ...], InternedStack] = {(): InternedStack(0, ())}
        self._pools: dict[tuple[int, ...], int] = {(0, 0): 0}
        self._layouts: dict[tuple[str, ...], _Layout | None] = {}

    @property
    def stacks(self) -> tuple[tuple[StackFrame, ...], ...]:
        return tuple(self._stacks)

    def fold_items(self, items: list[Any]) -> Any:
        """An entry of the history out of its keys and values in turn; None where it is none."""
        keys = tuple(items[::2])
        try:
            layout = self._layouts[keys]
        except KeyError:
            layout = self._layout(keys)
        except TypeError:  # a key that is no string: the reader says so
            return None
        if layout is None:
            return None
        action, address, size, frames, stream, time_us, pool = layout([*items[1::2], None])
        code = _CODES.get(action, OTHER) if type(action) is str else OTHER
        if size is None or not 0 <= size <= _LARGEST:
            raise SnapshotRefused("an entry of a size that no memory has")
        rows = self.rows
        rows.addresses.append(address or 0)
        rows.sizes.append(size)
        rows.stacks.append(self._stack(frames))
        rows.streams.append(stream or 0)
        rows.times_us.append(time_us or 0)
        rows.pools.append(0 if pool is None else self._pool(pool))
        rows.actions.append(code)
        return _ROW

    def _layout(self, keys: tuple[str, ...]) -> _Layout | None:
        """Where the columns are among these keys; None of what is no entry."""
        made: _Layout | None = None
        if "action" in keys and "size" in keys and all(type(key) is str for key in keys):
            at = {key: number for number, key in enumerate(keys)}
            missing = len(keys)  # a None behind the values
            address = at.get("addr", at.get("device_free", missing))
            names = ("size", "frames", "stream", "time_us", "pool_id")
            made = itemgetter(at["action"], address, *(at.get(name, missing) for name in names))
        if len(self._layouts) < _MOST_LAYOUTS:
            self._layouts[keys] = made
        return made

    def fold_dict(self, held: dict[str, Any]) -> Any:
        """What stands for a dict: a frame, a block, a segment, or the dict itself."""
        if "filename" in held and "line" in held:
            return self._frame(held)
        if "state" in held and "size" in held:
            return self._fold_block(held)
        if "blocks" in held and "total_size" in held:
            return self._fold_segment(held)
        if "action" in held and "size" in held:  # one whose items came in several parts
            return self.fold_items([part for item in held.items() for part in item])
        return held

    def fold_list(self, items: tuple[Any, ...]) -> InternedStack | None:
        """A stack out of its frames; None where it is another list."""
        return self._interned(items) if all(type(one) is StackFrame for one in items) else None

    def _frame(self, held: dict[str, Any]) -> StackFrame:
        name, line, function = held["filename"], held["line"], held.get("name", "")
        if type(name) is not str or type(line) is not int or type(function) is not str:
            raise SnapshotRefused("a frame whose file, line or name is none")
        key = name, line, function
        found = self._frames.get(key)
        if found is None:
            found = self._frames[key] = StackFrame(*key)
        return found

    def _interned(self, frames: tuple[StackFrame, ...]) -> InternedStack:
        found = self._stacks.get(frames)
        if found is None:
            found = self._stacks[frames] = InternedStack(len(self._stacks), frames)
        return found

    def _stack(self, frames: object) -> int:
        """The number of what an entry or a block gives as its stack."""
        if type(frames) is InternedStack:
            return frames.number
        if not frames:
            return 0
        if type(frames) is list and all(type(one) is StackFrame for one in frames):
            return self._interned(tuple(frames)).number
        raise SnapshotRefused("a stack that is no list of frames")

    def _pool(self, pool: object) -> int:
        key = tuple(pool) if isinstance(pool, tuple | list) else ()
        if not key or not all(type(one) is int for one in key):
            raise SnapshotRefused("a pool that is no pair of numbers")
        if key not in self._pools and len(self._pools) > 2**16:
            raise SnapshotRefused("more memory pools than a GPU has")
        return self._pools.setdefault(key, len(self._pools))

    def _fold_block(self, held: dict[str, Any]) -> _Placed:
        size: Any = held["size"]
        requested, frames = held.get("requested_size"), held.get("frames")
        history = held.get("history")  # torch before 2.1 has it in place of both
        if requested is None and type(history) is list and history and type(history[0]) is dict:
            requested, frames = history[0].get("real_size"), history[0].get("frames")
        requested = size if requested is None else requested
        state = _STATES.get(held["state"]) if type(held["state"]) is str else None
        if state is None:
            raise SnapshotRefused("a block in a state that no allocator has")
        address = held.get("address", -1)
        if not _are_sizes(size, requested) or type(address) is not int:
            raise SnapshotRefused("a block whose size or address is no number")
        self.blocks.append(BlockRow(address, size, requested, state, self._stack(frames)))
        return _BLOCK

    def _fold_segment(self, held: dict[str, Any]) -> ReservedSegment:
        placed: Any = held["blocks"]
        address: Any = held.get("address")
        size: Any = held["total_size"]
        device, stream = held.get("device", 0), held.get("stream", 0)
        if not _are_sizes(address, size, device) or type(stream) is not int:
            raise SnapshotRefused("a segment whose address, size or device is no number")
        if type(placed) is not list or any(one is not _BLOCK for one in placed):
            raise SnapshotRefused("a segment whose blocks are none")
        if len(placed) != len(self.blocks):
            raise SnapshotRefused("blocks that belong to no segment")
        at = address
        blocks = []
        for one in self.blocks:  # their addresses were added in torch 2.1
            where = at if one.address < 0 else one.address
            blocks.append(BlockRow(where, one.size, one.requested, one.state, one.stack))
            at = where + one.size
        if sum(one.size for one in blocks) != size:
            raise SnapshotRefused("a segment that is not the sum of its blocks")
        pool = held.get("segment_pool_id", (0, 0))
        self.blocks.clear()
        segment = ReservedSegment(
            device,
            address,
            size,
            stream,
            bool(held.get("is_expandable")),
            pool not in ((0, 0), [0, 0]),
            tuple(blocks),
        )
        self.segments.append(segment)
        return segment


def _are_sizes(*numbers: Any) -> bool:
    return all(type(one) is int and 0 <= one < 2**62 for one in numbers)


def read_snapshot(stream: IO[bytes]) -> MemorySnapshot:
    """The snapshot in a stream: a pickle, or one that was packed with gzip."""
    folder = _Folder()
    try:
        reader = PickleReader(
            _unpacked(stream),
            fold_items=folder.fold_items,
            fold_dict=folder.fold_dict,
            fold_list=folder.fold_list,
        )
        value = reader.load()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise PickleRefused(f"it is damaged ({error})") from None
    return _assembled(value, folder)


def _unpacked(stream: IO[bytes]) -> IO[bytes]:
    first = stream.read(2)
    stream.seek(0)
    return gzip.open(stream) if first == b"\x1f\x8b" else stream  # type: ignore[return-value]


def _assembled(value: Any, folder: _Folder) -> MemorySnapshot:
    """The parts of a snapshot, where PyTorch puts them."""
    if type(value) is list:  # `torch.cuda.memory_snapshot()`: segments alone
        value = {"segments": value, "device_traces": []}
    if type(value) is not dict or "segments" not in value:
        raise SnapshotRefused("no memory snapshot: it has no 'segments'")
    traces, segments = value.get("device_traces", []), value["segments"]
    if type(segments) is not list or [*map(id, segments)] != [*map(id, folder.segments)] or folder.blocks:
        raise SnapshotRefused("segments that are not where PyTorch writes them")
    if (
        type(traces) is not list
        or len(traces) > _MOST_DEVICES
        or not all(type(one) is list for one in traces)
    ):
        raise SnapshotRefused("'device_traces' is no list of lists")
    histories, begin = [], 0
    for trace in traces:
        if any(one is not _ROW for one in trace):
            raise SnapshotRefused("a history with what is no entry of one")
        histories.append(folder.rows.part(begin, begin + len(trace)))
        begin += len(trace)
    if begin != len(folder.rows):
        raise SnapshotRefused("entries that are not where PyTorch writes them")
    settings, notes = value.get("allocator_settings"), value.get(NOTES_KEY)
    return MemorySnapshot(
        tuple(histories),
        tuple(folder.segments),
        folder.stacks,
        settings if type(settings) is dict else {},
        notes if type(notes) is dict else {},
    )
