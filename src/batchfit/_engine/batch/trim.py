"""Takes microbatches out of a padded batch (chosen rows, trimmed to a length), and pads their outputs again.

Rules:
- Nothing but padding is cut (`ragged_padding` says where it is).
- Parts come back as their own kind. Rows that are neighbours, and the trimming, are views; other rows are
  copied once, after the trimming.
- An attention back-end that plans per shape is off inside our calls only. The switch is the process's, not
  the thread's: autograd's threads see it, and so does any other thread meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, final

import torch

from batchfit._engine.batch.padding import Layout, Lengths, Side, find_padding
from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.structure import children, has_rows, is_array, rebuilt

log = logging.getLogger("batchfit")


@final
@dataclass(frozen=True, slots=True)
class Trimmer:
    """A padded batch, and where its padding is.

    >>> batch = {"input_ids": torch.tensor([[5, 6, 7], [8, 0, 0]]), "lengths": torch.tensor([3, 1])}
    >>> Trimmer.of(batch, "lengths").take((1,), 2)
    {'input_ids': tensor([[8, 0]]), 'lengths': tensor([1])}

    Left-padded rows lose their first columns: models that take position ids from the mask, as Hugging Face's
    generation does, see what they saw; one that counts positions from the first column does not.
    """

    batch: Any
    lengths: tuple[int, ...]
    padded_length: int
    padding_side: Side
    layout: Layout
    samples: Set[str] = frozenset()  # lists and tuples with one item per sample

    @classmethod
    def of(
        cls,
        batch: Any,
        lengths: Lengths,
        *,
        pad_keys: Sequence[str | int] | None = None,
        pad_dim: int | None = None,
        padding_side: Side | None = None,
        layout: Layout | None = None,
        samples: Set[str] = frozenset(),
    ) -> Trimmer:
        """Where the padding of `batch` is.

        `lengths`: the length of each sample, a callable that takes the batch, or the name of a part (of two
        dimensions: a mask; of one: the lengths). `pad_keys` names the padded parts and `pad_dim` their padded
        dimension, where shapes do not say it. `layout` is that of an earlier batch of the same kind: a
        dimension that has the padded length by chance is not taken for the padded one. `samples`: the lists
        with one item per sample, as `reading` found them.
        """
        check_padding(pad_keys, pad_dim, padding_side)
        found = find_padding(
            batch,
            lengths,
            pad_keys=pad_keys,
            pad_dim=pad_dim,
            padding_side=padding_side,
            layout=layout,
            samples=samples,
        )
        return cls(batch, *found, samples)

    def take(self, indices: Sequence[int], length: int) -> Any:
        """The samples `indices`, trimmed to `length`."""
        if not indices:
            raise ValueError("indices must name at least one sample, not ()")
        longest = max(self.lengths[index] for index in indices)
        if not longest <= length <= self.padded_length:
            raise ValueError(f"length must be from {longest} to {self.padded_length}, not {length!r}")
        return self._taken(self.batch, "batch", indices, length)

    def _taken(self, node: Any, path: str, indices: Sequence[int], length: int) -> Any:
        if has_rows(node):
            for dim in self.layout.get(path, ()):
                begin = node.shape[dim] - length if self.padding_side == "left" else 0
                node = node[(slice(None),) * dim + (slice(begin, begin + length),)]
            return _rows(node, indices)
        if path in self.samples:
            return rebuilt(node, [renewed(node[index]) for index in indices])
        items = children(node)
        if items is None:
            return renewed(node)
        return rebuilt(node, [self._taken(value, path + label, indices, length) for label, value in items])


def renewed(node: Any) -> Any:
    """A sample whose containers are its own: who gets it may take things out, and it can be had again."""
    items = children(node)
    if items is None:
        return list(node) if type(node) is list else node
    return rebuilt(node, [renewed(value) for _, value in items])


def check_padding(pad_keys: Any, pad_dim: Any, padding_side: Any) -> None:
    """Refuse what says nothing about where padding is."""
    if padding_side not in (None, "left", "right"):
        raise ValueError(f"padding_side must be 'left', 'right' or None, not {padding_side!r}")
    if pad_keys is not None and (isinstance(pad_keys, str) or not isinstance(pad_keys, Sequence)):
        raise TypeError(f"pad_keys must be a list of names of parts or None, not {pad_keys!r}")
    if pad_dim is not None and (isinstance(pad_dim, bool) or not isinstance(pad_dim, int)):
        raise TypeError(f"pad_dim must be an integer or None, not {pad_dim!r}")
    if pad_dim is not None and pad_dim < 1:
        raise ValueError(f"pad_dim must be at least 1, for samples are rows, not {pad_dim!r}")


def restored(
    outputs: Sequence[Any],
    plan: Sequence[Microbatch],
    *,
    padded_length: int | None = None,
    padding_side: Side = "right",
    path: str = "output",
) -> Any:
    """One output for the batch, in its order, from those of its microbatches.

    A dimension that follows the microbatches' lengths (one value per token) is filled with zeros up to
    `padded_length`. Where all microbatches have one length, a dimension may have that size by chance:
    it stays as long as it is.
    """
    if len(outputs) != len(plan) or not plan:
        raise ValueError(f"outputs must be one for each of {len(plan)} microbatches, not {len(outputs)}")
    padded = padded_length or max(one.padded_shape[1] for one in plan)
    return _joined(outputs, plan, padded, padding_side, path)


_told = False


@contextlib.contextmanager
def attention_without_plans(device: torch.device | None) -> Iterator[None]:
    """cuDNN's attention, which builds a plan for each new shape (150 ms on an H200), off for the time being.

    Enter it around forward *and* backward: which back-end ran in forward also runs backward, but activation
    checkpointing runs forward again there. A compiled region keeps the back-end that it was compiled with, in
    or out of here. A user who allows cuDNN's attention alone gets it; a CPU has none of this.
    """
    global _told
    flags: Any = torch.backends.cuda  # its readers are untyped
    others = flags.flash_sdp_enabled() or flags.mem_efficient_sdp_enabled() or flags.math_sdp_enabled()
    if device is None or device.type != "cuda" or not flags.cudnn_sdp_enabled() or not others:
        yield
        return
    if not _told:
        _told = True
        log.info(
            "cuDNN's attention is off inside batchfit's calls on ragged batches, for it builds a plan for "
            "each new shape. Other calls keep it"
        )
    flags.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        flags.enable_cudnn_sdp(True)


def _rows(rows: Any, indices: Sequence[int]) -> Any:
    """Neighbours as a view, others as a copy."""
    first = indices[0]
    if all(index == first + offset for offset, index in enumerate(indices)):
        return rows[first : first + len(indices)]
    if isinstance(rows, torch.Tensor):
        return rows.index_select(0, torch.tensor(indices, device=rows.device))
    return rows[list(indices)]


def _joined(outputs: Sequence[Any], plan: Sequence[Microbatch], padded: int, side: Side, path: str) -> Any:
    first = outputs[0]
    counts = [one.size for one in plan]
    if isinstance(first, torch.Tensor):
        for output, count in zip(outputs, counts, strict=True):
            if output.dim() == 0 or output.shape[0] != count:
                raise TypeError(
                    f"{path} must have one row for each of {count} samples, not shape {tuple(output.shape)}"
                )
        return _joined_tensors(outputs, plan, padded, side, path)
    if is_array(first):
        tensors = [torch.from_numpy(output) for output in outputs]
        return _joined(tensors, plan, padded, side, path).numpy()
    if isinstance(first, list) and all(
        len(output) == count for output, count in zip(outputs, counts, strict=True)
    ):
        placed = {
            index: item
            for output, one in zip(outputs, plan, strict=True)
            for index, item in zip(one.indices(sum(counts)), output, strict=True)
        }
        return [placed[index] for index in range(len(placed))]
    items = children(first)
    if items is None:
        if all(one is first or (type(one) is type(first) and one == first) for one in outputs):
            return first
        raise TypeError(
            f"{path} must be tensors or lists with one row a sample, or the same in all microbatches, not "
            f"{type(first).__name__}"
        )
    columns = [[value for _, value in children(output) or ()] for output in outputs]
    return rebuilt(
        first,
        [
            _joined([column[at] for column in columns], plan, padded, side, path + label)
            for at, (label, _) in enumerate(items)
        ],
    )


def _joined_tensors(
    outputs: Sequence[torch.Tensor], plan: Sequence[Microbatch], padded: int, side: Side, path: str
) -> torch.Tensor:
    """All rows in one new tensor: each output is copied once."""
    first = outputs[0]
    total = sum(one.size for one in plan)
    shape = [total, *first.shape[1:]]
    grown = [
        dim
        for dim in range(1, first.dim())
        if any(output.shape[dim : dim + 1] != first.shape[dim : dim + 1] for output in outputs)
    ]
    for dim in grown:
        lengths = [tuple(output.shape[dim : dim + 1]) for output in outputs]
        if lengths != [(one.length,) for one in plan]:
            raise ValueError(
                f"{path} must have one shape, or that of the microbatch: dimension {dim} differs"
            )
        shape[dim] = padded
    out = first.new_zeros(shape) if grown else first.new_empty(shape)
    for output, one in zip(outputs, plan, strict=True):
        rows = torch.tensor(one.indices(total), device=out.device)
        target, length = out, one.padded_shape[1]
        for dim in grown:
            target = target.narrow(dim, padded - length if side == "left" else 0, length)
        target.index_copy_(0, rows, output)
    return out
