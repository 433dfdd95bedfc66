"""What an optimizer step allocates, and whether it can be had before the step begins.

Rules:
- What a step takes is recorded while real steps run, as the sizes of what is alive at its peak; the optimizer
  state, which the next step finds, is left out. Before the first step there is only a generous guess.
- To reserve is to allocate those blocks and free them: the caching allocator then holds them, on the stream
  that the step uses. It requests nothing that the step would not request, in the allocator's own
  segments, and is left out where the cache alone is clearly enough. No call here synchronizes.
- A device without an allocator of its own (a CPU outside `virtual_memory`) is not asked: it never refuses.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, final

import torch

from batchfit._engine.device import oom
from batchfit._engine.torch_private.dispatch import TorchDispatchMode, tracing
from batchfit._engine.torch_private.storage import storage_address
from batchfit._engine.virtual_memory import memory, op_sizes
from batchfit._engine.virtual_memory.op_sizes import PLANS, block_bytes

# CUDACachingAllocator.cpp: requests up to kSmallSize come from segments of kSmallBuffer, those below
# kMinLargeAlloc from segments of kLargeBuffer, the others from segments of their own.
_SMALL: Final = 1 << 20
_LARGE: Final = 10 << 20
_SEGMENT: Final = 20 << 20
# Copies of its group that a foreach step holds at once, and of one parameter that a single-tensor step
# does: the most of all of torch.optim's with any option are 3 (Adadelta) and 6 (RAdam from its sixth step).
# A guess may be high, not low.
FOREACH_COPIES: Final = 4
SINGLE_COPIES: Final = 7
_SCALAR: Final = 512  # the smallest block: norms, step counts, scales

Sizes = Mapping[torch.device, Sequence[int]]


@final
class Need:
    """What a step takes on each device, in the form in which it is asked for."""

    __slots__ = ("_blocks", "total_bytes")

    def __init__(self, sizes: Sizes) -> None:
        found = [DeviceBlocks(device, tuple(blocks)) for device, blocks in sizes.items()]
        self._blocks = tuple(one for one in found if one.sizes)
        self.total_bytes = sum(sum(one.sizes) for one in self._blocks)

    def merged(self, other: Need) -> Need:
        """What is enough for either of two steps."""
        sizes = {one.device: one.sizes for one in self._blocks}
        for one in other._blocks:
            if sum(one.sizes) > sum(sizes.get(one.device, ())):
                sizes[one.device] = one.sizes
        return Need(sizes)

    def reserve(self) -> bool:
        """Whether the blocks can be allocated now; where not at once, after memory was freed."""
        return all(_reserve(one) for one in self._blocks if _can_refuse(one.device))


@final
class DeviceBlocks:
    """What a step takes on one device: exactly, and as blocks of the allocator's two pools."""

    __slots__ = ("device", "large", "large_bytes", "sizes", "small", "small_bytes")

    def __init__(self, device: torch.device, sizes: tuple[int, ...]) -> None:
        self.device = device
        self.sizes = sizes
        blocks = [block_bytes(size) for size in sizes]
        self.small_bytes = sum(size for size in blocks if size <= _SMALL)
        self.large_bytes = sum(size for size in blocks if size > _SMALL)
        middle = sum(size for size in blocks if _SMALL < size < _LARGE)
        self.small = [_SMALL] * -(-self.small_bytes // _SMALL)
        self.large = [_SEGMENT] * -(-middle // _SEGMENT) + [size for size in blocks if size >= _LARGE]


def _can_refuse(device: torch.device) -> bool:
    return device.type != "meta" and (device.type != "cpu" or memory.active() is not None)


def _reserve(blocks: DeviceBlocks) -> bool:
    wanted: Sequence[int] = blocks.sizes
    if blocks.device.type == "cuda":
        wanted = blocks_not_cached(blocks)
    if _can_have(wanted, blocks.device):
        return True
    free_memory((blocks.device,))
    # Not in blocks: whole segments are more than the step asks for.
    return _can_have(blocks.sizes, blocks.device)


def blocks_not_cached(blocks: DeviceBlocks) -> Sequence[int]:
    """The blocks to ask for: none of a pool that has twice the bytes in its cache, fragments included."""
    stats: Any = torch.cuda.memory_stats_as_nested_dict(blocks.device)
    reserved, active = stats.get("reserved_bytes", {}), stats.get("active_bytes", {})

    def cached(pool: str) -> int:
        return int(reserved.get(pool, {}).get("current", 0) - active.get(pool, {}).get("current", 0))

    small = blocks.small if cached("small_pool") < 2 * blocks.small_bytes else []
    large = blocks.large if cached("large_pool") < 2 * blocks.large_bytes else []
    return [*small, *large]


def _can_have(sizes: Sequence[int], device: torch.device) -> bool:
    ambient = sys.exception()
    try:
        held = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except Exception as error:
        if oom.classify(error, ambient=ambient) != "oom":
            raise
        return False
    del held
    return True


def free_memory(devices: Iterable[torch.device]) -> None:
    """Free garbage in cycles, and release the allocators' caches."""
    gc.collect()
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        empty = getattr(torch.get_device_module(kind), "empty_cache", None)
        if empty is not None:
            empty()


def guess(optimizers: Iterable[torch.optim.Optimizer], *, small: bool) -> Need:
    """More than one step of these optimizers of torch's can take; `small`: it also unscales or clips."""
    sizes: dict[torch.device, list[int]] = {}
    scalars: dict[torch.device, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for device, taken in _guess_group(optimizer, group).items():
                if sum(taken) > sum(sizes.get(device, ())):
                    sizes[device] = taken
            for parameter in group["params"]:
                scalars[parameter.device] = scalars.get(parameter.device, 16) + (4 if small else 2)
    for device, count in scalars.items():
        sizes.setdefault(device, []).extend([_SCALAR] * count)
    return Need(sizes)


def _guess_group(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[torch.device, list[int]]:
    found: dict[torch.device, list[int]] = {}
    for parameter in group["params"]:
        if parameter.grad is not None:
            found.setdefault(parameter.device, []).append(parameter.numel() * parameter.element_size())
    # SGD makes its buffers inside the step, out of the gradients: they cannot be made before it.
    late = [p for p in group["params"] if p.grad is not None and makes_buffer_late(optimizer, group, p)]
    for device, sizes in found.items():
        if group.get("fused"):
            copied = []
        elif group.get("foreach", None) or (group.get("foreach") is None and device.type != "cpu"):
            copied = sizes * FOREACH_COPIES
        else:
            copied = [max(sizes)] * SINGLE_COPIES
        stays = [p.numel() * p.element_size() for p in late if p.device == device]
        found[device] = copied + stays
    return found


def makes_buffer_late(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> bool:
    return (
        isinstance(optimizer, torch.optim.SGD)
        and group["momentum"] != 0
        and optimizer.state.get(parameter, {}).get("momentum_buffer") is None
    )


@final
class StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, notes every storage that an operation makes, and when it is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[_MadeStorage] = []
        self._events: list[
            _MadeStorage | weakref.ref[Any]
        ] = []  # one that is there twice was freed the second time

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would put a frame of its own around ours, and that one keeps the tensors

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if tracing():  # DTensor asks with fake tensors what an operation would do
            return func(*args, **kwargs)
        if types and not all(map(op_sizes.is_plain, types)):
            return NotImplemented  # a subclass's own dispatch runs first, and we see the tensors inside
        plan = PLANS.get(id(func)) or op_sizes.plan_of(func)
        if plan == op_sizes.VIEW or plan == op_sizes.INPLACE:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        given = {
            storage_address(storage)
            for tensor in op_sizes.tensors_in([*args, *kwargs.values()])
            if (storage := _storage_of(tensor)) is not None
        }
        for tensor in op_sizes.tensors_in(result):
            storage = _storage_of(tensor)
            if storage is not None and storage_address(storage) not in given:
                given.add(storage_address(storage))
                self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        made = _MadeStorage(storage, self._events.append)
        made.size = block_bytes(storage.nbytes())  # a thousand scalars weigh more than their bytes
        made.device = storage.device
        self._made.append(made)
        self._events.append(made)

    def need(self, optimizers: Iterable[torch.optim.Optimizer]) -> Need:
        """What was alive at the peak, but for the state that these optimizers have now."""
        events = list(self._events)
        states = [state for one in optimizers for state in one.state.values() if isinstance(state, dict)]
        tensors = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        stays = {storage_address(storage) for storage in map(_storage_of, tensors) if storage is not None}
        live: dict[torch.device, dict[int, int]] = {}
        total: dict[torch.device, int] = {}
        most: dict[torch.device, int] = {}
        peak: dict[torch.device, list[int]] = {}
        for made in events:
            assert isinstance(made, _MadeStorage)
            storage = made()
            if not made.size or (storage is not None and storage_address(storage) in stays):
                continue
            alive = live.setdefault(made.device, {})
            before = total.get(made.device, 0)
            if id(made) in alive:
                total[made.device] = before - alive.pop(id(made))
                continue
            alive[id(made)] = made.size
            total[made.device] = before + made.size
            if total[made.device] > most.get(made.device, 0):
                most[made.device] = total[made.device]
                peak[made.device] = list(alive.values())
        return Need(peak)


class _MadeStorage(weakref.ref[torch.UntypedStorage]):
    """One storage that an operation has made: a weak reference that knows what it weighs, and where."""

    __slots__ = ("device", "size")
    size: int
    device: torch.device


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse: it has none
        return None
