"""What a batch is made of: tensors and arrays inside nested containers.

Rules: dicts, tuples, named tuples, lists, dataclasses and mappings with `.data` (Hugging Face's
BatchEncoding) are containers, and come back as their own kind; anything else is one opaque leaf and is
left alone; a container in which nothing changed is the same object. Whether a list holds parts or samples
is for `reading` to say; where that is not certain, a list that holds tensors directly is a container, as
`default_collate` makes it (`[inputs, labels]`), and any other list has one item per sample.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

# Sequences of these alone are data, not structure: nothing in them can be moved or resized.
_PLAIN = {int, float, bool, complex, str, bytes, type(None)}


class Part(NamedTuple):
    """A part of a batch that has one row (or item) a sample."""

    path: str
    length: int
    sequence_first: int | None  # the second dimension, where an (L, N, ...) layout keeps its samples
    plain: bool  # a list without tensors: perhaps not one item a sample


def is_array(node: object) -> bool:
    """A NumPy array with at least one dimension; NumPy is not imported for it."""
    return type(node).__module__ == "numpy" and getattr(node, "ndim", 0) > 0


def has_rows(node: object) -> bool:
    """A tensor or array with a leading dimension."""
    return (isinstance(node, torch.Tensor) and node.dim() > 0) or is_array(node)


def is_table(node: Any) -> bool:
    """A TensorDict or what looks like one: it knows its batch dimensions and can be indexed."""
    extent = getattr(node, "batch_size", None)
    return isinstance(extent, torch.Size) and len(extent) > 0 and hasattr(node, "__getitem__")


def is_block_mask(node: Any) -> bool:
    """FlexAttention's mask, with a dimension for the batch; recognized without importing it."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(node, flex.BlockMask) and node.kv_num_blocks.dim() == 3


def rows_of(node: Any) -> int | None:
    """The rows of a tensor, an array, a table or a mask; None for anything else and for 0-dim tensors."""
    if isinstance(node, torch.Tensor):
        return int(node.size(0)) if node.dim() else None
    if is_array(node):
        return int(node.shape[0])
    if is_table(node):
        return int(node.batch_size[0])
    if is_block_mask(node):
        rows = int(node.kv_num_blocks.size(0))
        return rows if rows > 1 else None  # one table for all
    return None


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The items of a container, each with its label (`['x']`, `[0]`, `.x`); None for a leaf."""
    if isinstance(node, dict | UserDict) or (isinstance(node, Mapping) and not hasattr(node, "to")):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if isinstance(node, PackedSequence):  # a named tuple, but its `batch_sizes` must stay on the host
        return None
    if isinstance(node, list | tuple):
        if set(map(type, node)) <= _PLAIN:
            return None
        fields = getattr(node, "_fields", None)
        if fields is not None:
            return [(f".{name}", value) for name, value in zip(fields, node, strict=True)]
        return [(f"[{index}]", value) for index, value in enumerate(node)]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [
            (f".{f.name}", getattr(node, f.name)) for f in dataclasses.fields(node) if hasattr(node, f.name)
        ]
    return None


def rebuilt(node: Any, values: Sequence[Any]) -> Any:
    """A container of the kind of `node`, holding `values` in the order of `children(node)`."""
    if isinstance(node, Mapping | UserDict):
        items = dict(zip(node.keys(), values, strict=True))
        if type(node) is dict or not hasattr(node, "__setitem__"):
            return items
        twin = copy.copy(node)  # keeps a default factory, an encoding's own attributes, ...
        for key, value in items.items():
            twin[key] = value
        return twin
    if isinstance(node, list):
        return list(values) if type(node) is list else type(node)(values)
    if isinstance(node, tuple):
        return type(node)(*values) if hasattr(node, "_fields") else type(node)(values)
    twin = copy.copy(node)
    for (label, _), value in zip(children(node) or (), values, strict=True):
        object.__setattr__(twin, label.removeprefix("."), value)  # frozen dataclasses too
    return twin


def mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """`node` with `change` applied to each leaf."""
    items = children(node)
    if items is None:
        return change(node)
    values = [mapped(value, change) for _, value in items]
    if all(new is old for new, (_, old) in zip(values, items, strict=True)):
        return node
    return rebuilt(node, values)


def leaves(node: Any) -> Iterator[Any]:
    """What containers hold in the end, in order."""
    items = children(node)
    if items is None:
        yield node
    else:
        for _, value in items:
            yield from leaves(value)


def to_device(batch: Any, device: torch.device | None) -> Any:
    """The batch with everything that can move on `device`; what is there already is left as it is."""
    if device is None:
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
            return leaf
        moved = leaf.to(device)
        return leaf if moved is None else moved

    return mapped(batch, move)


def is_sequence(node: Any) -> bool:
    """A list or a tuple, not empty, that may hold parts or samples."""
    return (isinstance(node, list) or type(node) is tuple) and len(node) > 0


def holds_rows(node: Any) -> bool:
    """There is something with rows in it."""
    if rows_of(node) is not None:
        return True
    return any(holds_rows(value) for _, value in children(node) or ())


def signature(node: Any) -> object:
    """The structure without sizes; a list of items that are alike is the same with more of them."""
    if isinstance(node, torch.Tensor):
        return (node.dtype, node.dim())
    if type(node) is dict:
        return (dict, *[(key, signature(value)) for key, value in node.items()])
    items = children(node)
    if items is None:
        return type(node)
    if is_sequence(node):
        kinds = [signature(value) for _, value in items]
        if all(kind == kinds[0] for kind in kinds):
            return (type(node), ..., kinds[0])
        return (type(node), *kinds)
    return (type(node), *[(label, signature(value)) for label, value in items])


def is_samples(node: Any) -> bool:
    """A list with one item a sample: not empty, and no tensor directly in it."""
    return (
        isinstance(node, list) and len(node) > 0 and not any(isinstance(item, torch.Tensor) for item in node)
    )


def parts(node: Any, path: str = "batch") -> Iterator[Part]:
    """The parts of a batch that have a length, with where they are."""
    if has_rows(node):
        shape = node.shape
        yield Part(path, int(shape[0]), int(shape[1]) if len(shape) > 1 else None, plain=False)
    elif is_samples(node):
        yield Part(path, len(node), None, plain=not holds_rows(node))
    else:
        for label, value in children(node) or ():
            yield from parts(value, path + label)


def sized(found: Sequence[Part]) -> list[Part]:
    """The parts that must agree: those with tensors; where there are none, the plain lists."""
    return [part for part in found if not part.plain] or list(found)


def wrong_size(batch: Any, size: int) -> int | None:
    """The number of samples that `batch` plainly has, where it is not `size`.

    Speaks only on clear evidence: all parts agree on another length, nothing in the batch has `size`
    items, and the tensors are not sequence-first with `size` in the second dimension.
    """
    found = sized(list(parts(batch)))
    lengths = {part.length for part in found}
    if len(lengths) != 1 or size in lengths or _has_items(batch, size):
        return None
    if all(part.sequence_first == size for part in found):
        return None
    return lengths.pop()


def _has_items(node: Any, size: int) -> bool:
    """Some list or tuple in `node` has exactly `size` items (a batch of images kept as a list)."""
    if isinstance(node, list | tuple) and len(node) == size:
        return True
    return any(_has_items(value, size) for _, value in children(node) or ())


def element_count(sample: Any) -> int:
    """How much a sample holds: elements of tensors and arrays, items of sequences, characters of text."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if is_array(sample):
        return int(sample.size)
    if isinstance(sample, str | bytes):
        return len(sample)
    items = children(sample)
    if items is not None:
        return sum(element_count(value) for _, value in items)
    if isinstance(sample, list | tuple):  # plain values
        return sum(len(value) if isinstance(value, str | bytes) else 1 for value in sample)
    extent = getattr(sample, "size", None)  # a PIL image says (width, height)
    if isinstance(extent, tuple) and len(extent) == 2 and all(isinstance(side, int) for side in extent):
        return int(extent[0] * extent[1])
    return 1
