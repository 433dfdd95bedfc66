"""Memory snapshots in PyTorch's format, out of our model of the allocator: programs with a planted cause.

`Recording` is a device that writes down what it does as `torch.cuda.memory._snapshot()` would: every action
of the history, and the segments with their blocks at the end.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchfit._engine.allocator.caching import MIB, AllocatorSettings, CachingAllocator
from batchfit._engine.allocator.segments import Block, Pool

H200 = Path(__file__).parent.parent / "data" / "snapshots"
BASE = 0x7F00_0000_0000
Where = tuple[tuple[str, int, str], ...]  # frames, the innermost first


class OutOfMemory(Exception):
    """The device refused a request; the snapshot holds everything up to it."""


class Recording:
    """A device with a capacity, and the history of what it did."""

    def __init__(
        self,
        capacity: int,
        settings: AllocatorSettings | None = None,
        *,
        total: int = 140 * 2**30,
        outside: int = 0,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = CachingAllocator(capacity, self.settings)
        self.total, self.outside = total, outside
        self.trace: list[dict[str, Any]] = []
        self.live: dict[int, tuple[Block, int, list[dict[str, Any]]]] = {}
        self.waiting: dict[int, tuple[Block, int, list[dict[str, Any]]]] = {}
        self.segments: dict[int, int] = {}
        self.clock = 1_795_000_000_000_000
        self._frames: dict[tuple[str, int, str], dict[str, Any]] = {}
        self._where: list[dict[str, Any]] = []
        self._watch()

    # -- what a program does

    def alloc(self, size: int, where: Where = (), stream: int = 0) -> int:
        """The address of a new block; the history ends with an OOM where there is no room."""
        self._where = self._stack(where)
        block = self.device.allocate(size)
        if block is None:
            free = self.total - self.outside - self.device.reserved_bytes
            rounded = -(-size // 512) * 512
            self.entry("oom", device_free=free, size=rounded, stream=stream)
            raise OutOfMemory(f"{size} bytes")
        address = BASE + block.address
        self.live[address] = block, size, self._where
        self.entry("alloc", addr=address, size=size, stream=stream)
        return address

    def free(self, address: int, *, later: bool = False) -> None:
        """Free a block; `later`: another stream still uses it, until `complete`."""
        held = self.live.pop(address)
        self._where = []
        self.entry("free_requested", addr=address, size=held[1], stream=0)
        self.waiting[address] = held
        if not later:
            self.complete(address)

    def complete(self, address: int) -> None:
        block, size, _ = self.waiting.pop(address)
        self._where = []
        self.device.free(block)
        self.entry("free_completed", addr=address, size=size, stream=0)

    def snapshot_taken(self) -> None:
        self._where = []
        self.entry("snapshot", addr=0, size=0, stream=0)

    # -- what PyTorch would write

    def entry(self, action: str, **values: int) -> None:
        self.clock += 7
        entry: dict[str, Any] = {"action": action}
        entry |= {key: values[key] for key in ("addr", "device_free") if key in values}
        entry |= {"size": values["size"], "stream": values["stream"], "time_us": self.clock}
        entry |= {"compile_context": "N/A", "user_metadata": "", "frames": self._where}
        self.trace.append(entry)

    def snapshot(self) -> dict[str, Any]:
        blocks: dict[int, dict[str, Any]] = {}
        for held, state in ((self.live, "active_allocated"), (self.waiting, "active_awaiting_free")):
            for address, (block, size, frames) in held.items():
                if block.size:
                    blocks[address] = self._block(address, block.size, size, state, frames)
        for pool in (self.device.small, self.device.large):
            for block in pool.blocks.values():
                address = BASE + block.address
                blocks[address] = self._block(address, block.size, 0, "inactive", [])
        ordered = sorted(blocks)
        segments = []
        for address, size in sorted(self._merged().items()):
            inside = [blocks[one] for one in ordered if address <= one < address + size]
            live = [one for one in inside if one["state"] == "active_allocated"]
            segments.append(
                {
                    "device": 0,
                    "address": address,
                    "total_size": size,
                    "allocated_size": sum(one["size"] for one in live),
                    "active_size": sum(one["size"] for one in inside if one["state"] != "inactive"),
                    "requested_size": sum(one["requested_size"] for one in live),
                    "stream": 0,
                    "segment_type": "large" if size > 2 * MIB else "small",
                    "segment_pool_id": (0, 0),
                    "is_expandable": self.settings.expandable_segments,
                    "frames": [],
                    "blocks": inside,
                }
            )
        settings = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True" * self.settings.expandable_segments,
            "expandable_segments": self.settings.expandable_segments,
        }
        return {
            "segments": segments,
            "device_traces": [self.trace],
            "allocator_settings": settings,
            "external_annotations": [],
        }

    def write(self, path: Path, **more: Any) -> Path:
        path.write_bytes(pickle.dumps({**self.snapshot(), **more}))
        return path

    def _merged(self) -> dict[int, int]:
        """An expandable range is one segment for each stretch that is mapped."""
        if not self.settings.expandable_segments:
            return self.segments
        found: dict[int, int] = {}
        end = -1
        for address, size in sorted(self.segments.items()):
            if address == end:
                first = max(found)
                found[first] += size
            else:
                found[address] = size
            end = address + size
        return found

    def _block(
        self, address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
    ) -> dict[str, Any]:
        requested = requested or size
        block = {"address": address, "size": size, "requested_size": requested, "state": state}
        return {**block, "frames": frames} if frames else block

    def _stack(self, where: Where) -> list[dict[str, Any]]:
        """As PyTorch makes them: one dict for each frame, shared by all stacks."""
        return [
            self._frames.setdefault(one, {"name": one[2], "filename": one[0], "line": one[1]})
            for one in where
        ]

    # -- segments, as the model reserves and releases them

    def _watch(self) -> None:
        device = self.device
        take, release, map_pages, unmap = (
            device._take_segment,
            device._release,
            device._map,
            device._unmap,
        )

        def taking(pool: Pool, size: int) -> Block | None:
            before = device.reserved_bytes
            block = take(pool, size)
            if block is not None and not self.settings.expandable_segments:
                self._reserved("segment_alloc", block.address, device.reserved_bytes - before)
            return block

        def releasing(pool: Pool, block: Block) -> None:
            self._given_back("segment_free", block.address, block.size)
            release(pool, block)

        def mapping(pool: Pool, block: Block, size: int) -> bool:
            address, before = block.address, device.reserved_bytes
            done = map_pages(pool, block, size)
            if done:
                self._reserved("segment_map", address, device.reserved_bytes - before)
            return done

        def unmapping(pool: Pool, block: Block) -> None:
            first = -(-block.address // pool.page) * pool.page
            before = device.reserved_bytes
            unmap(pool, block)
            if device.reserved_bytes < before:
                self._given_back("segment_unmap", first, before - device.reserved_bytes)

        vars(device).update(_take_segment=taking, _release=releasing, _map=mapping, _unmap=unmapping)

    def _reserved(self, action: str, address: int, size: int) -> None:
        self.segments[BASE + address] = size
        self.entry(action, addr=BASE + address, size=size, stream=0)

    def _given_back(self, action: str, address: int, size: int) -> None:
        at = BASE + address
        for begin, length in list(self.segments.items()):
            if begin < at + size and at < begin + length:
                del self.segments[begin]
                if begin < at:
                    self.segments[begin] = at - begin
                if begin + length > at + size:
                    self.segments[at + size] = begin + length - at - size
        self.entry(action, addr=at, size=size, stream=0)


# -- a small program, as stacks

LIBRARY = "/usr/lib/python3.12/site-packages/torch"
CALL = ((f"{LIBRARY}/nn/modules/module.py", 1790, "_call_impl"),)
MAIN: Where = (("/home/me/train.py", 90, "<module>"),)


def at(line: int, function: str = "train", file: str = "/home/me/train.py") -> Where:
    """A stack of the training loop, at a line of its function."""
    return ((file, line, function), *MAIN)


def in_model(line: int, layer: int = 21) -> Where:
    """A stack inside the model, called from a line of the training loop."""
    linear = (f"{LIBRARY}/nn/modules/linear.py", 134, "forward")
    return (linear, *CALL, ("/home/me/model.py", layer, "forward"), *CALL, *at(line))


def in_optimizer(line: int, function: str = "_init_group") -> Where:
    frames = ((f"{LIBRARY}/optim/adamw.py", 120, function), (f"{LIBRARY}/optim/adamw.py", 220, "step"))
    return (*frames, *at(line))


WEIGHTS = ((f"{LIBRARY}/nn/modules/module.py", 950, "_apply"), *at(40, "make", "/home/me/model.py"))
LOSS: Where = ((f"{LIBRARY}/nn/functional.py", 3479, "cross_entropy"), *at(53))


def train(
    device: Recording,
    *,
    steps: int = 8,
    activations: Sequence[int] = (12 * MIB, 8 * MIB, 4 * MIB),
    keeps: int = 0,
    scale: Callable[[int], float] = lambda step: 1.0,
    state: int = 6 * MIB,
) -> None:
    """A training loop: weights, then per step a batch, forward, backward (no stacks), the optimizer.

    `keeps` bytes of each step's loss stay; `scale` makes a step longer; `state` is the optimizer's.
    """
    for _ in range(4):
        device.alloc(3 * MIB, WEIGHTS)
    gradients: list[int] = []
    for step in range(steps):
        size = scale(step)
        held = [device.alloc(int(MIB * size), at(52, "make_batch", "/home/me/data.py")[:1] + at(52))]
        held += [
            device.alloc(int(one * size), in_model(53, 21 + number)) for number, one in enumerate(activations)
        ]
        held.append(device.alloc(int(2 * MIB * size), LOSS))
        if keeps:
            device.alloc(keeps, LOSS)
        fresh = [device.alloc(3 * MIB) for _ in range(4)]
        while held:
            device.free(held.pop())
        for one in gradients:
            device.free(one)
        gradients = fresh
        if step == 0:
            for _ in range(2):
                device.alloc(state, in_optimizer(56))
        device.free(device.alloc(3 * MIB, in_optimizer(56, "_multi_tensor_adamw")))
    device.snapshot_taken()


def leaking() -> Recording:
    return _run(Recording(160 * MIB), lambda device: train(device, steps=40, keeps=5 * MIB))


def with_a_long_batch() -> Recording:
    return _run(
        Recording(160 * MIB),
        lambda device: train(device, steps=12, scale=lambda step: 6.0 if step == 7 else 1.0),
    )


def fragmented(settings: AllocatorSettings | None = None) -> Recording:
    """Blocks of 12 MiB in one large segment, every second freed; then one of 60 is asked for."""

    def run(device: Recording) -> None:
        device.free(device.alloc(400 * MIB, at(50)))
        kept = [device.alloc(12 * MIB, at(51)) for _ in range(33)]
        for one in kept[::2]:
            device.free(one)
        device.alloc(60 * MIB, at(54))

    return _run(Recording(410 * MIB, settings), run)


def without_room_for_state() -> Recording:
    return _run(Recording(84 * MIB), lambda device: train(device, state=40 * MIB))


def beside_another_process() -> Recording:
    """60 MiB are left of an 80 GiB GPU."""
    total = 80 * 2**30
    room = 60 * MIB
    device = Recording(room, total=total, outside=total - room)
    return _run(device, train)


def too_large() -> Recording:
    return _run(Recording(40 * MIB), train)


def expanding() -> Recording:
    """All of it in expandable segments: maps and unmaps."""
    settings = AllocatorSettings(expandable_segments=True)

    def run(device: Recording) -> None:
        blocks = [device.alloc(30 * MIB, at(50)) for _ in range(4)]
        small = [device.alloc(100_000, at(51)) for _ in range(40)]
        device.free(blocks[1])
        device.free(blocks[2])
        for one in small[::2]:
            device.free(one)
        device.free(blocks[3], later=True)
        device.alloc(110 * MIB, at(55))

    return _run(Recording(180 * MIB, settings), run)


def _run(device: Recording, program: Callable[[Recording], None]) -> Recording:
    try:
        program(device)
    except OutOfMemory:
        return device
    raise AssertionError("the program fits: no OOM was planted")


PLANTED: dict[str, Callable[[], Recording]] = {
    "leak": leaking,
    "long batch": with_a_long_batch,
    "fragmentation": fragmented,
    "optimizer state": without_room_for_state,
    "other process": beside_another_process,
    "too large": too_large,
}
RECORDED = {
    "leak": "leak",
    "long batch": "long_batch",
    "fragmentation": "fragmentation",
    "optimizer state": "optimizer_state",
    "other process": "other_process",
    "too large": "too_large",
}


def h200(cause: str) -> Path:
    """What an H200 wrote when it was out of memory for this cause."""
    return H200 / f"{RECORDED[cause]}.pickle.gz"


def h200_value(cause: str) -> dict[str, Any]:
    with gzip.open(h200(cause)) as file:
        value: dict[str, Any] = pickle.load(file)  # our own file
    return value
