"""Cuts a batch of any structure into microbatches, and joins their outputs.

Rules
- `reading` says how many samples a batch has, and which lists hold one item per sample. Tensors, arrays, such
  lists and tensor dicts are cut along their first dimension; whatever has no samples (numbers, text, None,
  0-dim tensors) goes to every microbatch.
- A plain batch (a tensor, or a tuple or dict of tensors with as many rows) is read and cut here, without a
  walk. Of any other one the first cut of each structure is checked: its microbatches are the batch.
- An object of a kind that is not known may have samples: a batch with one is run whole, and cutting it is an
  error. FlexAttention's BlockMask is known: its tables are cut, and its `mask_mod` gets the batch's rows.
- Containers keep their kind and are always new: a microbatch may be emptied or rebound by who gets it. Its
  tensors are views of the batch's wherever torch can make views.
"""

from __future__ import annotations

import copy
import enum
import numbers
import sys
from collections.abc import Iterable, Sequence, Set
from datetime import date, time, timedelta
from itertools import accumulate
from pathlib import PurePath
from typing import Any, final

import torch

from batchfit._engine.batch.pure.microbatch import Microbatch, Shape
from batchfit._engine.batch.sample_count import BatchReading
from batchfit._engine.batch.structure import (
    children,
    is_array,
    is_block_mask,
    is_sequence,
    is_table,
    rebuilt,
    rows_of,
)
from batchfit._engine.batch.transfer import feed
from batchfit._engine.batch.trim import Trimmer, renewed, restored
from batchfit._engine.batch.user_split import Cutter

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


def microbatches(sizes: Sequence[int], start: int = 0) -> tuple[Microbatch, ...]:
    """A plan that cuts a batch in its own order, from the sample `start` on."""
    ends = list(accumulate(sizes, initial=start))[1:]
    return tuple(Microbatch(slice(end - size, end), size) for size, end in zip(sizes, ends, strict=True))


def _mask_rows(mask: Any, rows: torch.Tensor) -> Any:
    """The mask of those rows of the batch. `mask[i:j]` alone would ask `mask_mod` about the first rows."""
    mask_mod = mask.mask_mod
    part = copy.copy(mask)
    if mask.kv_num_blocks.size(0) > 1:  # otherwise one table is for all of them
        for name in _MASK_TABLES:
            table = getattr(mask, name)
            setattr(part, name, None if table is None else table[rows])
    # A tensor, since a number would be compiled in, again for each part.
    part.mask_mod = lambda b, h, q, kv: mask_mod(rows[b], h, q, kv)
    return part


def _check_known(node: Any, path: str, samples: Set[str], *, trimmed: bool) -> None:
    """Refuse to cut a batch that holds what may have samples, and cannot be cut."""
    if isinstance(node, torch.Tensor) or is_array(node) or is_table(node) or path in samples:
        return
    if is_block_mask(node) and getattr(node, "dq_write_order", None) is None and not trimmed:
        return
    items = children(node)
    if items is None and not isinstance(node, _COMMON) and type(node).__module__ != "numpy":
        raise TypeError(
            f"batch must be made of what can be cut by samples where it does not fit whole, and {path} is a "
            f"{type(node).__name__}: pass split= to cut it yourself, or take it out of the batch"
        )
    for label, value in items or ():
        _check_known(value, path + label, samples, trimmed=trimmed)


@final
class Batch:
    """A batch, how many samples it has, its shape, and its microbatches.

    >>> whole = Batch.of({"x": torch.zeros(5, 2), "scale": 0.1})
    >>> [micro["x"].shape[0] for micro in whole.cut([3, 2])]
    [3, 2]
    """

    __slots__ = ("_cutter", "_is_plain", "_key", "batch", "leaves", "length", "samples", "shape", "trimmer")

    def __init__(self, batch: Any, reading: BatchReading, cutter: Cutter, mode: str) -> None:
        self.batch = batch
        _, self.length = reading.rows[0]
        self.leaves = reading.leaves
        self.samples: Set[str] = reading.samples  # lists and tuples with one item per sample
        self._cutter = cutter
        self._key = reading.key
        self._is_plain = reading.is_plain
        self.shape = _shape(reading.leaves, self.length, mode)
        self.trimmer: Trimmer | None = None  # where samples of different lengths are to be packed

    @classmethod
    def of(
        cls, batch: Any, *, cutter: Cutter | None = None, mode: str = "", known_count: int | None = None
    ) -> Batch:
        """The batch as it is read; a `ValueError` names parts that disagree."""
        cutter = Cutter() if cutter is None else cutter
        is_asked = cutter.split is not None or cutter.count is not None or known_count is not None
        reading = None if is_asked else _plain(batch)
        return cls(batch, cutter.read(batch, known_count) if reading is None else reading, cutter, mode)

    @property
    def can_take(self) -> bool:
        """Samples can be picked one by one: a user's `split` cuts in order only."""
        return self._cutter.split is None

    def take(self, samples: Sequence[int], length: int | None = None) -> Any:
        """The microbatch of those samples, trimmed to `length` where samples differ."""
        if length is not None and self.trimmer is not None:
            return self.trimmer.take(samples, length)
        return _taken(self.batch, samples, self)

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

    def micros(self, plan: Sequence[Microbatch], done: Sequence[Microbatch] = ()) -> list[Any]:
        """The microbatches of a plan for what `done` has left."""
        if self._cutter.split is not None:
            return self._cutter.cut(self.batch, [microbatch.size for microbatch in (*done, *plan)])[
                len(done) :
            ]
        if len(plan) + len(done) > 1 and not self._is_plain:
            _check_known(self.batch, "batch", self.samples, trimmed=self.trimmer is not None)
        if self.trimmer is not None:
            return [self.take(microbatch.indices(self.length), microbatch.length) for microbatch in plan]
        parts = [_taken(self.batch, microbatch.samples, self) for microbatch in plan]
        if len(plan) > 1 and not done and not self._is_plain:
            sizes = [microbatch.size for microbatch in plan]
            self._cutter.check(self.batch, parts, sizes, self.samples, self._key)
        return parts

    def fed(self, micros: Sequence[Any], device: torch.device | None) -> Iterable[Any]:
        """The microbatches in turn, each on `device`."""
        if self._is_plain and (device is None or all(leaf.device == device for _, leaf in self.leaves)):
            return micros  # they are there
        return feed(micros, device)

    def cut(self, sizes: Sequence[int]) -> list[Any]:
        """Microbatches of those sizes, in the batch's order."""
        return self.micros(microbatches(sizes))

    def joined(
        self,
        outputs: Sequence[Any],
        plan: Sequence[Microbatch],
        path: str = "output",
        *,
        is_ours: bool = False,
    ) -> Any:
        """What the microbatches of a plan returned, as the whole batch would have returned it.

        `is_ours`: it goes to a function that gets all of it, so that rows need not be those of samples.
        """
        if self.trimmer is None:
            return joined(outputs, [microbatch.size for microbatch in plan], path, is_ours=is_ours)
        width, side = self.trimmer.padded_length, self.trimmer.padding_side
        return restored(outputs, plan, padded_length=width, padding_side=side, path=path)


def _plain(batch: Any) -> BatchReading | None:
    """What most batches are, a tensor or a tuple or dict of tensors, without a walk; None for any other."""
    parts: list[tuple[str, Any]]
    if isinstance(batch, torch.Tensor):
        parts = [("batch", batch)]
    elif type(batch) is tuple:
        parts = [(f"batch[{index}]", value) for index, value in enumerate(batch)]
    elif type(batch) is dict:
        parts = [(f"batch[{key!r}]", value) for key, value in batch.items()]
    else:
        return None
    if not parts or not all(type(value) is torch.Tensor and value.dim() for _, value in parts):
        return None
    rows = [(path, value.size(0)) for path, value in parts]
    if any(count != rows[0][1] for _, count in rows):
        return None
    return BatchReading(rows=rows, leaves=parts, is_plain=True)


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


def _taken(node: Any, samples: slice | Sequence[int], whole: Batch, path: str = "batch") -> Any:
    if isinstance(node, torch.Tensor):
        return _tensor_rows(node, samples) if node.dim() > 0 else node
    if type(node) is dict:  # as below, without the labels
        if not whole.samples:
            return {key: _taken(value, samples, whole) for key, value in node.items()}
        return {key: _taken(value, samples, whole, f"{path}[{key!r}]") for key, value in node.items()}
    if type(node) in (tuple, list) and not whole.samples:
        return type(node)([_taken(value, samples, whole) for value in node])
    if is_sequence(node) and path in whole.samples:
        picked = node[samples] if isinstance(samples, slice) else [node[i] for i in samples]
        return rebuilt(node, [renewed(one) for one in picked])
    if is_block_mask(node):
        rows = list(range(whole.length)[samples] if isinstance(samples, slice) else samples)
        if rows == list(range(whole.length)):
            return node
        return _mask_rows(node, torch.tensor(rows, device=node.kv_num_blocks.device))
    if is_array(node) or is_table(node):
        return node[samples if isinstance(samples, slice) else list(samples)]
    items = children(node)
    if items is None:
        return renewed(node)
    return rebuilt(node, [_taken(value, samples, whole, path + label) for label, value in items])


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


def joined(
    outputs: Sequence[Any], counts: Sequence[int], path: str = "output", *, is_ours: bool = False
) -> Any:
    """What microbatches of `counts` samples returned, as the whole batch would have returned it.

    What could not be joined is refused for one microbatch too, or it would fail when a batch is first cut.
    """
    first = outputs[0]
    if any(type(one) is not type(first) for one in outputs):
        kinds = ", ".join(sorted({type(one).__name__ for one in outputs}))
        raise TypeError(f"{path} must have one type in all microbatches, not {kinds}")
    if isinstance(first, torch.Tensor):
        _check_rows(outputs, counts, path, is_ours=is_ours)
        return _joined_tensors(outputs, path)
    if is_array(first):
        _check_rows(outputs, counts, path, is_ours=is_ours)
        numpy: Any = sys.modules["numpy"]
        return numpy.concatenate(outputs)
    if is_table(first):
        return torch.cat(list(outputs))
    if isinstance(first, list):
        return _joined_lists(outputs, counts, path, is_ours=is_ours)
    items = children(first)
    if items is None:
        if not is_ours:
            _check_same_for_all(first, path)
        if any(_differs(one, first) for one in outputs):
            raise TypeError(
                f"{path} must be tensors, lists with one item per sample, or the same in all microbatches, "
                f"not {type(first).__name__} values that differ"
            )
        return first
    tables = [children(one) or [] for one in outputs]
    if any([label for label, _ in table] != [label for label, _ in items] for table in tables):
        raise ValueError(f"{path} must have the same items in all microbatches")
    return rebuilt(
        first,
        [
            joined([table[i][1] for table in tables], counts, path + label, is_ours=is_ours)
            for i, (label, _) in enumerate(items)
        ],
    )


def _differs(one: Any, other: Any) -> bool:
    try:
        return one is not other and not bool(one == other)
    except Exception:  # noqa: BLE001 - an == of the user's own
        return True


def _check_same_for_all(value: Any, path: str) -> None:
    """Refuse what a batch has one of, and microbatches one each: a mean, a count, an object."""
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool)
    if is_number or (not isinstance(value, _COMMON) and type(value).__module__ != "numpy"):
        what = f"the number {value!r:.80}" if is_number else f"a {type(value).__name__}"
        raise TypeError(
            f"{path} must be tensors or lists with one item per sample, not {what}, which cannot be joined "
            "from microbatches. Return one value per sample, or leave it out"
        )


def _check_rows(outputs: Sequence[Any], counts: Sequence[int], path: str, *, is_ours: bool) -> None:
    """Refuse what is no row per sample, nor as many rows for each (beams)."""
    rows = [rows_of(one) or 0 for one in outputs]
    if outputs[0].ndim == 0:
        found = "be a 0-dim tensor"
    elif max(counts) > 1 and rows == [1] * len(rows):
        found = f"one for all {max(counts)} of a microbatch"
    elif is_ours or rows == [rows[0] // counts[0] * count for count in counts] != [0] * len(rows):
        return
    else:
        found = f"{rows} rows for {list(counts)} samples"
    raise ValueError(
        f"{path} must have one row per sample, not {found}: a value of the whole batch cannot be joined "
        "from microbatches. Return one value per sample (reduction='none'), or a list of them"
    )


def check_one(output: Any, count: int, path: str) -> None:
    """Refuse one value for all samples in what one microbatch returned, as `joined` would for several."""
    if isinstance(output, torch.Tensor) or is_array(output):
        _check_rows([output], [count], path, is_ours=True)
        return
    for label, value in children(output) or ():
        check_one(value, count, path + label)


def _joined_tensors(outputs: Sequence[Any], path: str) -> torch.Tensor:
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
            "or return a list with one item per sample"
        ) from None


def _are_samples_too(outputs: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether lists of tensors have as many items as samples, all of one kind."""
    kinds = {(item.dtype, item.shape[1:]) for one in outputs for item in one}
    return len(kinds) == 1 and all(len(one) == count for one, count in zip(outputs, counts, strict=True))


def _joined_lists(outputs: Sequence[Any], counts: Sequence[int], path: str, *, is_ours: bool) -> list[Any]:
    def is_container(one: list[Any], count: int) -> bool:
        return bool(one) and all(
            isinstance(item, torch.Tensor) and item.dim() > 0 and item.size(0) == count for item in one
        )

    containers = all(is_container(one, count) for one, count in zip(outputs, counts, strict=True))
    if containers and len({len(one) for one in outputs}) == 1:
        columns = zip(*outputs, strict=True)
        if len(outputs) > 1 and _are_samples_too(outputs, counts):
            raise ValueError(
                f"{path} can be read in two ways: a list of {len(outputs[0])} parts with one row per sample, "
                "or of samples. Return parts in a tuple or a dict, and samples as one tensor"
            )
        return [joined(column, counts, f"{path}[{i}]", is_ours=is_ours) for i, column in enumerate(columns)]
    if all(len(one) == count for one, count in zip(outputs, counts, strict=True)):
        return [item for one in outputs for item in one]
    lengths = [len(one) for one in outputs]
    raise ValueError(f"{path} must be a list with one item per sample ({list(counts)}), not of {lengths}")
