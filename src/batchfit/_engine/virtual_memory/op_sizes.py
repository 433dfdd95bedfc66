"""How many bytes an operation will take, known before it runs.

Rules that this module keeps:
- Nothing here touches the data, a buffer or a random generator: an operation is sized by running it
  on the meta device, where tensors have a shape and no memory.
- A size that a real run has shown replaces the computed one (`SIZES`): the same call is never sized twice.
- Operations whose result depends on the data (a boolean index, `nonzero`, `repeat_interleave`, ...) are
  sized by counting the data; those that cannot be counted answer None, and are counted after they ran.
- Bytes are the blocks that the CUDA caching allocator returns, not the bytes that were asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor

from batchfit._engine.torch_private.dispatch import (
    NO_DISPATCH,
    OpOverload,
    has_cpu_kernel,
    is_composite,
    modes_disabled,
    plain_functions,
    schema_of,
)
from batchfit._engine.torch_private.storage import storage_address

# What kind of call an operation is. From 1, so that `PLANS.get(id(op)) or plan_of(op)` works.
VIEW: Final = 1  # returns what it was given, in another shape: nothing to count
INPLACE: Final = 2  # writes into its arguments or returns no tensor: nothing new
NEW: Final = 3  # returns new tensors
NEW_BY_SHAPE: Final = 4  # the same, and no number among its arguments has a say in the size
DATA: Final = 5  # returns new tensors whose size depends on the data
RESIZE: Final = 6  # may give an argument another or a longer storage (`out=`, `resize_`, `set_`)
COMPOSITE: Final = 7  # made of other operations (seen whole in inference mode only)
OPAQUE: Final = 8  # a higher-order operator: seen from outside only

# Kinds of arguments. SILENT ones have no say in a size; any other type is OTHER and makes a call unsizable.
TENSOR, SEQUENCE, VALUE, SILENT, OTHER = 1, 2, 3, 4, 5

_BLOCK = 512
_SMALL = 1 << 20
_SEGMENT = 2 << 20
_LARGE = 10 << 20

_RESIZERS = frozenset(
    {"resize_", "resize_as_", "resize_as_sparse_", "_resize_output_", "set_", "resize_storage_bytes_"}
)
_CACHE_LIMIT = 1 << 16

# By the identity of the operation, which `_KEPT` keeps: its own hash is a function in Python.
PLANS: dict[int, int] = {}
_KEPT: list[Any] = []
# (operation, argument metadata) -> bytes of new storage that a real run took; -1: cannot be known before
SIZES: dict[tuple[Any, ...], int] = {}
KINDS: dict[type, int] = {
    Tensor: TENSOR,
    torch.nn.Parameter: TENSOR,
    list: SEQUENCE,
    tuple: SEQUENCE,
    torch.Size: SEQUENCE,
    torch.Generator: SILENT,
    **dict.fromkeys(
        (
            *(type(None), bool, int, float, complex, str),
            *(torch.dtype, torch.device, torch.layout, torch.memory_format),
        ),
        VALUE,
    ),
}
# Sparse tensors and functorch's wrappers have no storage; a lazy parameter refuses every question.
_NO_STORAGE = (NotImplementedError, RuntimeError, ValueError)
_torch: Any = torch  # for what has no annotations there
_UntypedStorage: Any = torch.UntypedStorage


class Unsizable(Exception):
    """This call cannot be sized before it runs."""


def block_bytes(requested: int) -> int:
    """The block that the CUDA caching allocator takes from fresh memory for a request.

    Multiples of 512 bytes; from 10 MiB up the segment is a multiple of 2 MiB, and a rest of up to
    1 MiB is not split off but counted with the block (kMinBlockSize, kRoundLarge, kSmallSize in
    CUDACachingAllocator.cpp). A block that is used again can be larger by up to 1 MiB: not modelled.
    """
    if requested <= 0:
        return 0
    size = (requested + _BLOCK - 1) // _BLOCK * _BLOCK
    if size >= _LARGE:
        segment = (size + _SEGMENT - 1) // _SEGMENT * _SEGMENT
        if segment - size <= _SMALL:
            return segment
    return size


def plan_of(op: Any) -> int:
    """Which of the kinds above `op` is; remembered."""
    plan = _plan(op) if isinstance(op, OpOverload) else OPAQUE
    _KEPT.append(op)
    PLANS[id(op)] = plan
    return plan


def _plan(op: Any) -> int:
    if is_composite(op) and not has_cpu_kernel(op):  # silu's gradient is one kernel, not five operations
        return COMPOSITE
    schema = schema_of(op)
    name = schema.name.rpartition("::")[2]
    if name in _RESIZERS or any(argument.is_out for argument in schema.arguments):
        return RESIZE
    tensors = [result for result in schema.returns if "Tensor" in str(result.type)]
    if any(result.alias_info is None for result in tensors):
        if torch.Tag.dynamic_output_shape in op.tags:
            return DATA
        # Adam's bias corrections change with each step: sized by value they would never be found again.
        return NEW_BY_SHAPE if torch.Tag.pointwise in op.tags or name.startswith("_foreach_") else NEW
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments
    )
    # `lift_fresh` is how torch.tensor() hands over what it built: the first sight of a new tensor.
    return VIEW if tensors and not writes and name not in ("lift_fresh", "lift") else INPLACE


def kind_of(kind: type) -> int:
    """Which kind of argument a value of this type is; remembered."""
    found = TENSOR if issubclass(kind, Tensor) else SEQUENCE if issubclass(kind, list | tuple) else OTHER
    KINDS[kind] = found
    return found


def describe(
    key: list[Any], values: Iterable[Any], known: dict[int, Any], unknown: list[Any], by_shape: bool
) -> None:
    """Append to `key` what decides the size of a call, and to `unknown` each storage not in `known`."""
    add = key.append
    for value in values:
        kind = type(value)
        code = KINDS.get(kind) or kind_of(kind)
        if code == TENSOR:
            storage = value.untyped_storage()
            if storage_address(storage) not in known:
                if not value.is_cpu:
                    raise Unsizable
                unknown.append(storage)
            add(value.shape)
            add(value.stride())
            add(value.dtype)
        elif code == VALUE:
            add(kind)
            # 2 and 2.0 are equal and hash alike, hence the type; a number's value has no say by shape.
            if not by_shape or kind is torch.dtype or kind is torch.memory_format:
                add(value)
        elif code == SEQUENCE:
            add(len(value))
            if value and type(value[0]) is int and not by_shape:
                add(tuple(value))
            else:
                describe(key, value, known, unknown, by_shape)
        elif code == SILENT:
            add(kind)
        else:
            raise Unsizable


def unknown_storages(values: Iterable[Any], known: dict[int, Any], unknown: list[Any]) -> None:
    """Append to `unknown` each CPU storage among `values` that is not in `known`."""
    for value in values:
        kind = type(value)
        if kind is Tensor:  # most of them: worth a path of its own
            try:
                storage = value.untyped_storage()
            except _NO_STORAGE:
                continue
            if storage_address(storage) not in known and value.is_cpu:
                unknown.append(storage)
            continue
        code = KINDS.get(kind) or kind_of(kind)
        if code == TENSOR:
            held = storage_of(value)
            if held is not None and storage_address(held) not in known:
                unknown.append(held)
        elif code == SEQUENCE:
            unknown_storages(value, known, unknown)
        elif kind is not torch.UntypedStorage or value.device.type != "cpu":
            continue
        elif storage_address(value) not in known:
            unknown.append(value)


def is_plain(kind: type) -> bool:
    """Whether tensors of this type hold their own memory: a subclass with a dispatch of its own may not."""
    dispatch: object = getattr(kind, "__torch_dispatch__", None)
    return dispatch is NO_DISPATCH


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's own CPU memory; None for meta, sparse, wrapped and other tensors that have none."""
    if not is_plain(type(tensor)) or not tensor.is_cpu:
        return None
    try:
        with plain_functions():
            return tensor.untyped_storage()
    except _NO_STORAGE:
        return None


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a result or an argument list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def remember(key: tuple[Any, ...], size: int) -> None:
    if len(SIZES) >= _CACHE_LIMIT:
        SIZES.clear()
    SIZES[key] = size


def computed_bytes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Bytes that `op(*args, **kwargs)` will take, by a run on the meta device; None: cannot be known."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return 0
    if op in _FACTORIES:  # the one thing that a meta run (which may import sympy) would do
        dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return block_bytes(math.prod(args[0]) * dtype.itemsize)
    try:
        with modes_disabled():
            given: dict[int, torch.UntypedStorage] = {}
            meta_args = [_to_meta(value, given) for value in args]
            meta_kwargs = {name: _to_meta(value, given) for name, value in kwargs.items()}
            before = {key: storage.nbytes() for key, storage in given.items()}
            made = op(*meta_args, **meta_kwargs)
            if op in _NORMS and not (op is _BATCH_NORM and args[5]):
                made = made[:1]
            results = [tensor.untyped_storage() for tensor in tensors_in(made)]
            after = given | {storage_address(storage): storage for storage in results}
            # A storage that an argument lent and that is longer now was allocated again.
            grown = (s.nbytes() for key, s in after.items() if s.nbytes() > before.get(key, 0))
            return sum(block_bytes(size) for size in grown)
    except Exception:  # noqa: BLE001 - whatever a missing or failing meta kernel raises, the real run will show
        return None


_FACTORIES = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.zeros.default,
        torch.ops.aten.ones.default,
        torch.ops.aten.rand.default,
        torch.ops.aten.rand.generator,
        torch.ops.aten.randn.default,
        torch.ops.aten.randn.generator,
    }
)
# The meta kernels of these answer for CUDA, whose statistics are longer than the CPU's (in fp32 beside bf16,
# not empty in eval mode). Only the main result is sized; the rest is counted when it is there. None of them
# writes anything but its results then, so nothing has moved if that little rest is refused.
_BATCH_NORM = torch.ops.aten.native_batch_norm.default
_NORMS = frozenset(
    {
        _BATCH_NORM,
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten._embedding_bag.default,
        torch.ops.aten._embedding_bag_forward_only.default,
    }
)


def _to_meta(value: Any, given: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, Tensor):
        storage = _to_meta(value.untyped_storage(), given)
        empty = torch.empty(0, dtype=value.dtype, device="meta")
        return empty.set_(storage, value.storage_offset(), value.shape, value.stride())
    if isinstance(value, torch.UntypedStorage):
        storage = _UntypedStorage(value.nbytes(), device="meta")
        given[storage_address(storage)] = storage
        return storage
    if isinstance(value, list | tuple):
        return [_to_meta(part, given) for part in value]
    if isinstance(value, torch.device):
        return torch.device("meta")
    return None if isinstance(value, torch.Generator) else value


def counted_bytes(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Bytes that a data-dependent operation will take, by counting its data; None: cannot be counted."""
    count = _COUNTERS.get(op)
    if count is None:
        return None
    try:
        with modes_disabled():
            return count(*args, **kwargs)
    except Exception:  # noqa: BLE001 - odd arguments: the operation itself will say what is wrong with them
        return None


def _nonzero(tensor: Tensor) -> int:
    return block_bytes(int(torch.count_nonzero(tensor)) * tensor.dim() * 8)


def _masked_select(tensor: Tensor, mask: Tensor) -> int:
    whole = math.prod(_torch.broadcast_shapes(tensor.shape, mask.shape))
    chosen = int(torch.count_nonzero(mask)) * (whole // max(mask.numel(), 1))
    return block_bytes(chosen * tensor.element_size())


def _index(tensor: Tensor, indices: list[Tensor | None]) -> int | None:
    # A boolean mask of k dimensions is worth k integer indices, each as long as the mask has ones.
    plain: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            ones = int(torch.count_nonzero(index))
            plain += [torch.empty(ones, dtype=torch.int64, device="meta") for _ in range(index.dim())]
        else:
            plain.append(index)
    return computed_bytes(torch.ops.aten.index.Tensor, (tensor, plain), {})


def _repeat_interleave(repeats: Tensor, output_size: int | None = None) -> int:
    total = int(repeats.sum()) if output_size is None else output_size
    return block_bytes(total * repeats.element_size())


def _bincount(tensor: Tensor, weights: Tensor | None = None, minlength: int = 0) -> int:
    length = max(minlength, int(tensor.max()) + 1 if tensor.numel() else 0)
    return block_bytes(length * (4 if weights is not None and weights.dtype is torch.float32 else 8))


def depends_on_data(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether this call of a DATA operation really depends on the data: an integer index does not."""
    if op is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


_COUNTERS: dict[Any, Callable[..., int | None]] = {
    torch.ops.aten.nonzero.default: _nonzero,
    torch.ops.aten.masked_select.default: _masked_select,
    torch.ops.aten.index.Tensor: _index,
    torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
    torch.ops.aten.bincount.default: _bincount,
}
