"""Cutting a batch of any structure into microbatches, and joining their outputs.

Rules
- Tensors, arrays, lists of samples and tensor dicts are cut along their first dimension; whatever has no
  samples (numbers, text, None, 0-dim tensors) goes to every microbatch. All parts with samples must agree.
- An object of a kind that is not known may have samples: a batch with one is run whole, and cutting it is an
  error. FlexAttention's BlockMask is known: its tables are cut, and its `mask_mod` gets the batch's rows.
- Containers keep their kind and are always new: a microbatch may be emptied or rebound by who gets it. Its
  tensors are views of the batch's wherever torch can make views.
- Lists follow `structure`: one that holds tensors directly is a container (`default_collate`'s
  `[inputs, labels]`), any other has one item a sample. A list that looks like one tensor a sample all the
  same (alike tensors, more than they have rows or more than a batch has parts) is an error, unless an earlier
  batch or the other parts show that it is none. A tuple is always a container.
"""

from __future__ import annotations

import copy
import enum
import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time, timedelta
from pathlib import PurePath
from typing import Any, NamedTuple, final

import torch
from torch.nn.utils.rnn import PackedSequence

from batchfit._decide.pack import Pack
from batchfit._decide.split import Piece, Shape, pieces
from batchfit._torch.ragged import Trimmer, renewed, restored
from batchfit._torch.structure import children, is_array, rebuilt

Split = Callable[[Any, list[int]], Sequence[Any]]


# A list of more alike tensors than this is hardly made of a batch's parts.
_MOST_PARTS = 8

# What is the same for all samples.
_COMMON = (
    *(numbers.Number, str, bytes, type(None), type, slice, range, set, frozenset, list, tuple),
    *(PurePath, enum.Enum, date, time, timedelta),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator),
)
_MASK_TABLES = tuple(
    f"{full}{side}_{what}"
    for full in ("", "full_")
    for side in ("kv", "q")
    for what in ("num_blocks", "indices")
)


class _Doubt(NamedTuple):
    """A list of tensors that may be a container or samples."""

    path: str
    items: int
    rows: int  # of each item, taken as a container; 0: they have no dimension
    shape: tuple[int, ...]


class _Rows(NamedTuple):
    path: str
    length: int
    plain: bool  # without tensors: perhaps not one item a sample


def _is_table(node: Any) -> bool:
    """A TensorDict or what looks like one: it knows its batch dimensions and can be indexed."""
    extent = getattr(node, "batch_size", None)
    return isinstance(extent, torch.Size) and len(extent) > 0 and hasattr(node, "__getitem__")


def _is_block_mask(node: Any) -> bool:
    """FlexAttention's mask, with a dimension for the batch; told without importing it."""
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    return flex is not None and isinstance(node, flex.BlockMask) and node.kv_num_blocks.dim() == 3


def _mask_rows(mask: Any, rows: torch.Tensor) -> Any:
    """The mask of those rows of the batch. `mask[i:j]` alone would ask `mask_mod` about the first rows."""
    mask_mod = mask.mask_mod
    part = copy.copy(mask)
    if mask.kv_num_blocks.size(0) > 1:  # otherwise one table is for all of them
        for name in _MASK_TABLES:
            table = getattr(mask, name)
            setattr(part, name, None if table is None else table[rows])
    # A tensor, since a number would be compiled in, anew for each part.
    part.mask_mod = lambda b, h, q, kv: mask_mod(rows[b], h, q, kv)
    return part


def _check_known(node: Any, path: str, *, trimmed: bool) -> None:
    """Refuse to cut a batch that holds what may have samples, and cannot be cut."""
    if isinstance(node, torch.Tensor) or is_array(node) or _is_table(node) or _is_list(node):
        return
    if _is_block_mask(node) and getattr(node, "dq_write_order", None) is None and not trimmed:
        return
    items = children(node)
    if items is None and not isinstance(node, _COMMON) and type(node).__module__ != "numpy":
        raise TypeError(
            f"batch must be made of what can be cut by samples where it does not fit whole, and {path} is a "
            f"{type(node).__name__}: pass split= to cut it yourself, or take it out of the batch"
        )
    for label, value in items or ():
        _check_known(value, path + label, trimmed=trimmed)


def _is_list(node: Any) -> bool:
    """One item a sample: a list without tensors directly in it, or a tuple of text."""
    if isinstance(node, list):
        return len(node) > 0 and not any(isinstance(item, torch.Tensor) for item in node)
    return type(node) is tuple and len(node) > 0 and all(isinstance(item, str) for item in node)


def _doubt(node: list[Any], path: str) -> _Doubt | None:
    """Whether each of its items may be one sample."""
    first = node[0]
    if len(node) < 2 or not isinstance(first, torch.Tensor) or first.is_nested:
        return None
    if any(
        not isinstance(one, torch.Tensor) or one.dtype != first.dtype or one.dim() != first.dim()
        for one in node
    ):
        return None
    return _Doubt(path, len(node), int(first.size(0)) if first.dim() else 0, tuple(first.shape))


def _rows(
    node: Any, path: str, leaves: list[tuple[str, torch.Tensor]], doubts: list[_Doubt]
) -> Iterator[_Rows]:
    if isinstance(node, torch.Tensor):
        if node.dim() > 0:
            leaves.append((path, node))
            yield _Rows(path, int(node.size(0)), False)
    elif is_array(node):
        yield _Rows(path, int(node.shape[0]), False)
    elif _is_table(node):
        yield _Rows(path, int(node.batch_size[0]), False)
    elif _is_block_mask(node):
        if node.kv_num_blocks.size(0) > 1:
            yield _Rows(path, int(node.kv_num_blocks.size(0)), False)
    elif isinstance(node, PackedSequence):
        raise TypeError(f"{path} is a PackedSequence, which cannot be cut by samples: pass split=")
    elif _is_list(node):
        inner: list[tuple[str, torch.Tensor]] = []
        for item in node:
            for _ in _rows(item, path, inner, []):
                pass
        # Of samples only the first says what shape they have; all of them may need a gradient.
        leaves.extend((f"{path}[]", tensor) for _, tensor in inner)
        yield _Rows(path, len(node), not inner)
    else:
        if isinstance(node, list) and node:
            doubt = _doubt(node, path)
            if doubt is not None:
                doubts.append(doubt)
        for label, value in children(node) or ():
            yield from _rows(value, path + label, leaves, doubts)


def _check_lists(doubts: Sequence[_Doubt], found: Sequence[_Rows], known: set[str]) -> None:
    """Refuse a list of tensors that may be samples; `known`: those that were seen to be containers."""
    for doubt in doubts:
        others = {part.length for part in found if not part.path.startswith(f"{doubt.path}[")}
        is_large = doubt.items > _MOST_PARTS or doubt.items > doubt.rows
        told = doubt.items not in others and bool(others) and (not doubt.rows or others == {doubt.rows})
        if is_large and not told and doubt.path not in known:
            raise ValueError(
                f"{doubt.path} must be a tensor, a tuple of parts or a list of samples, not a list of "
                f"{doubt.items} tensors of shape {doubt.shape}: is each of them one sample, or have they one "
                "row a sample? "
                "Stack samples, or pass split=; pass parts as a tuple"
            )
        known.add(doubt.path)


@final
class Whole:
    """A batch, how many samples it has, its shape, and its microbatches.

    >>> whole = Whole.of({"x": torch.zeros(5, 2), "scale": 0.1})
    >>> [micro["x"].shape[0] for micro in whole.cut([3, 2])]
    [3, 2]
    """

    __slots__ = ("_split", "batch", "leaves", "length", "shape", "trimmer")

    def __init__(
        self,
        batch: Any,
        length: int,
        leaves: list[tuple[str, torch.Tensor]],
        split: Split | None,
        mode: str,
    ) -> None:
        self.batch = batch
        self.length = length
        self.leaves = leaves
        self._split = split
        self.shape = _shape(leaves, length, mode)
        self.trimmer: Trimmer | None = None  # where samples of different lengths are to be packed

    @classmethod
    def of(
        cls, batch: Any, *, split: Split | None = None, mode: str = "", containers: set[str] | None = None
    ) -> Whole:
        """Look at a batch; a `ValueError` names parts that disagree. `containers`: lists known to be such."""
        leaves: list[tuple[str, torch.Tensor]] = []
        doubts: list[_Doubt] = []
        found = list(_rows(batch, "batch", leaves, doubts))
        if doubts and split is None:
            _check_lists(doubts, found, set() if containers is None else containers)
        found = [part for part in found if not part.plain] or found
        lengths = {part.length for part in found}
        if split is not None and len(lengths) != 1:
            try:
                return cls(batch, len(batch), leaves, split, mode)
            except TypeError:
                raise TypeError(
                    "batch must tell how many samples it has where split is given, not be a "
                    f"{type(batch).__name__} without a length: give it __len__"
                ) from None
        if not found:
            raise TypeError(
                f"batch must hold tensors or lists with one row a sample, not {type(batch).__name__}: "
                "pass split= to cut it yourself"
            )
        if len(lengths) > 1:
            first = {part.length: part for part in reversed(found)}
            named = ", ".join(
                f"{part.path} has {part.length}" for part in found if first[part.length] is part
            )
            raise ValueError(
                f"batch must have one number of samples in all its parts: {named}. "
                "Pass split= to cut it yourself"
            )
        return cls(batch, lengths.pop(), leaves, split, mode)

    @property
    def can_take(self) -> bool:
        """Samples can be picked one by one: a user's `split` cuts in order only."""
        return self._split is None

    def take(self, samples: Sequence[int], length: int | None = None) -> Any:
        """The microbatch of those samples, trimmed to `length` where samples differ."""
        if length is not None and self.trimmer is not None:
            return self.trimmer.take(samples, length)
        return _taken(self.batch, samples, self.length)

    def gradient_leaves(self) -> list[torch.Tensor]:
        """Tensors of the batch that get gradients themselves (adversarial examples, saliency)."""
        found = {id(tensor): (path, tensor) for path, tensor in self.leaves if tensor.requires_grad}
        for path, tensor in found.values():
            if not tensor.is_leaf:
                raise ValueError(
                    f"batch must not carry a graph, and {path} requires grad and was computed: every "
                    "microbatch would run through that graph again. Detach it, or compute it in fn"
                )
        return [tensor for _, tensor in found.values()]

    def versions(self) -> list[int]:
        """Counts of in-place writes: a batch that was written into cannot be tried again."""
        return [tensor._version for _, tensor in self.leaves if not tensor.is_inference()]

    def micros(self, plan: Sequence[Piece], done: Sequence[Piece] = ()) -> list[Any]:
        """The microbatches of a plan for what `done` has left."""
        if self._split is not None:
            sizes = [piece.size for piece in (*done, *plan)]
            parts = list(self._split(self.batch, sizes))
            if len(parts) != len(sizes):
                raise ValueError(
                    f"split must return one microbatch for each of {len(sizes)} sizes, not {len(parts)}"
                )
            return parts[len(done) :]
        if len(plan) + len(done) > 1:
            _check_known(self.batch, "batch", trimmed=self.trimmer is not None)
        if self.trimmer is not None:
            return [self.trimmer.take(piece.samples, piece.length) for piece in plan]  # type: ignore[arg-type]
        return [_taken(self.batch, piece.samples, self.length) for piece in plan]

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Microbatches of those sizes, in the batch's order."""
        return self.micros(pieces(tuple(sizes)))

    def joined(self, outputs: Sequence[Any], plan: Sequence[Piece], path: str = "output") -> Any:
        """What the microbatches of a plan returned, as the whole batch would have returned it."""
        if self.trimmer is None:
            return joined(outputs, [piece.size for piece in plan], path)
        packs = [Pack(piece.samples, piece.length) for piece in plan]  # type: ignore[arg-type]
        width, side = self.trimmer.padded_length, self.trimmer.padding_side
        return restored(outputs, packs, padded_length=width, padding_side=side, path=path)


def _shape(leaves: list[tuple[str, torch.Tensor]], length: int, mode: str) -> Shape:
    keys, family, elements = [mode], [mode], 0
    of_samples: set[str] = set()
    for path, tensor in leaves:
        if path.endswith("[]"):
            elements += tensor.numel()
            if path in of_samples:
                continue
            of_samples.add(path)
            keys.append(f"{path}:{tensor.dtype}")
        else:
            extent = () if tensor.is_nested else tuple(tensor.shape[1:])
            elements += tensor.numel()
            keys.append(f"{path}:{tensor.dtype}{extent}")
        family.append(f"{path}:{tensor.dtype}:{tensor.dim()}")
    per_sample = -(-elements // max(length, 1))
    if of_samples:
        # Samples of any size: batches whose means are near are one shape.
        per_sample = 1 << max(per_sample - 1, 0).bit_length()
        keys.append(str(per_sample))
    return Shape("|".join(keys), "|".join(family), per_sample)


def _taken(node: Any, samples: slice | Sequence[int], length: int) -> Any:
    if isinstance(node, torch.Tensor):
        return _tensor_rows(node, samples) if node.dim() > 0 else node
    if type(node) is dict:  # as below, without the labels
        return {key: _taken(value, samples, length) for key, value in node.items()}
    if type(node) in (tuple, list) and node and isinstance(node[0], torch.Tensor):
        return type(node)([_taken(value, samples, length) for value in node])
    if _is_block_mask(node):
        rows = list(range(length)[samples] if isinstance(samples, slice) else samples)
        if rows == list(range(length)):
            return node
        return _mask_rows(node, torch.tensor(rows, device=node.kv_num_blocks.device))
    if is_array(node) or _is_table(node):
        return node[samples if isinstance(samples, slice) else list(samples)]
    if _is_list(node):
        if len(node) != length:  # a plain list of another length is no list of samples
            return renewed(node)
        picked = node[samples] if isinstance(samples, slice) else [node[i] for i in samples]
        return [renewed(one) for one in picked] if isinstance(node, list) else tuple(picked)
    items = children(node)
    return node if items is None else rebuilt(node, [_taken(value, samples, length) for _, value in items])


def _tensor_rows(tensor: torch.Tensor, samples: slice | Sequence[int]) -> torch.Tensor:
    if tensor.is_nested:
        rows = tensor.unbind()
        picked = rows[samples] if isinstance(samples, slice) else [rows[i] for i in samples]
        nested: torch.Tensor = torch.nested.as_nested_tensor(list(picked), layout=tensor.layout)
        return nested
    if isinstance(samples, slice) and tensor.layout is torch.strided:
        return tensor[samples]
    indices = list(range(*samples.indices(tensor.size(0)))) if isinstance(samples, slice) else list(samples)
    try:
        return tensor.index_select(0, torch.tensor(indices, device=tensor.device))
    except (NotImplementedError, RuntimeError) as error:
        if tensor.layout is torch.strided:
            raise
        raise TypeError(
            f"batch must hold tensors that can be cut by rows, not one of layout {tensor.layout} "
            f"({type(error).__name__}): pass split="
        ) from None


def joined(outputs: Sequence[Any], counts: Sequence[int], path: str = "output") -> Any:
    """What microbatches of `counts` samples returned, as the whole batch would have returned it."""
    first = outputs[0]
    if any(type(one) is not type(first) for one in outputs):
        kinds = ", ".join(sorted({type(one).__name__ for one in outputs}))
        raise TypeError(f"{path} must have one type in all microbatches, not {kinds}")
    if isinstance(first, torch.Tensor):
        _check_rows(outputs, counts, path)
        return _joined_tensors(outputs, path)
    if is_array(first):
        _check_rows(outputs, counts, path)
        numpy: Any = sys.modules["numpy"]
        return numpy.concatenate(outputs)
    if _is_table(first):
        return torch.cat(list(outputs))
    if isinstance(first, list):
        return _joined_lists(outputs, counts, path)
    items = children(first)
    if items is None:
        if any(_differs(one, first) for one in outputs):
            raise TypeError(
                f"{path} must be tensors, lists with one item a sample, or the same in all microbatches, "
                f"not {type(first).__name__} values that differ"
            )
        return first
    tables = [children(one) or [] for one in outputs]
    if any([label for label, _ in table] != [label for label, _ in items] for table in tables):
        raise ValueError(f"{path} must have the same items in all microbatches")
    return rebuilt(
        first,
        [
            joined([table[i][1] for table in tables], counts, path + label)
            for i, (label, _) in enumerate(items)
        ],
    )


def _differs(one: Any, other: Any) -> bool:
    try:
        return one is not other and not bool(one == other)
    except Exception:  # noqa: BLE001 - an == of the user's own
        return True


def _check_rows(outputs: Sequence[Any], counts: Sequence[int], path: str) -> None:
    """Refuse one value a microbatch. Other numbers of rows than samples may be meant: beams, boxes."""
    if len(outputs) == 1:
        return
    if outputs[0].ndim == 0:
        found = "be a 0-dim tensor"
    elif (
        max(counts) > 1
        and not getattr(outputs[0], "is_nested", False)
        and all(one.shape[0] == 1 for one in outputs)
    ):
        found = f"one for all {max(counts)} of a microbatch"
    else:
        return
    raise ValueError(
        f"{path} must have one row a sample, not {found}: a value of the whole batch cannot be put together "
        "from microbatches. Return one value a sample (reduction='none')"
    )


def _joined_tensors(outputs: Sequence[Any], path: str) -> torch.Tensor:
    if outputs[0].dim() == 0:
        return outputs[0]  # type: ignore[no-any-return]
    if outputs[0].is_nested:
        return torch.nested.as_nested_tensor(
            [row for one in outputs for row in one.unbind()], layout=outputs[0].layout
        )
    try:
        return torch.cat(list(outputs))
    except RuntimeError:
        shapes = {tuple(one.shape[1:]) for one in outputs}
        if len(shapes) == 1:
            raise
        raise ValueError(
            f"{path} must have rows of one shape in all microbatches, not {sorted(shapes)}: pad them in fn, "
            "or return a list with one item a sample"
        ) from None


def _joined_lists(outputs: Sequence[Any], counts: Sequence[int], path: str) -> list[Any]:
    def is_container(one: list[Any], count: int) -> bool:
        return bool(one) and all(
            isinstance(item, torch.Tensor) and item.dim() > 0 and item.size(0) == count for item in one
        )

    containers = all(is_container(one, count) for one, count in zip(outputs, counts, strict=True))
    if containers and len({len(one) for one in outputs}) == 1:
        columns = zip(*outputs, strict=True)
        return [joined(column, counts, f"{path}[{i}]") for i, column in enumerate(columns)]
    if all(len(one) == count for one, count in zip(outputs, counts, strict=True)):
        return [item for one in outputs for item in one]
    lengths = [len(one) for one in outputs]
    raise ValueError(f"{path} must be a list with one item a sample ({list(counts)}), not of {lengths}")
