"""Taking microbatches out of a padded batch: chosen rows, trimmed to a length, and the way back.

Rules:
- A dimension is trimmed only where the batch says that it is the padded one: its size is what the batch is
  padded to. Where two answers are possible the error names the part and what to pass.
- Nothing but padding is cut: lengths that a mask contradicts, and masks with holes, are errors.
- Parts come back as their own kind. Rows that are neighbours, and the trimming, are views; other rows are
  copied once, after the trimming.
- Whatever is read from the batch (lengths, a mask) is read once: on a GPU that waits for the device, so hand
  over the batch as the loader gives it.
- An attention back-end that plans per shape is off inside our calls only. The switch is the process's, not
  the thread's: autograd's threads see it, and so does any other thread meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch

from batchfit._decide.pack import Pack
from batchfit._torch.structure import children, has_rows, is_array, is_samples, rebuilt

log = logging.getLogger("batchfit")

Side = Literal["left", "right"]
Lengths = str | Sequence[int] | torch.Tensor | Callable[[Any], Any]
Layout = Mapping[str, tuple[int, ...]]  # which dimensions of which part are padded

_KEEPS = ("attention_mask", "mask")  # 1 where there is a token
_DROPS = ("padding_mask", "key_padding_mask", "src_key_padding_mask")  # True where there is none


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
    ) -> Trimmer:
        """Where the padding of `batch` is.

        `lengths`: the length of each sample, a callable that takes the batch, or the name of a part (of two
        dimensions: a mask; of one: the lengths). `pad_keys` names the padded parts and `pad_dim` their padded
        dimension, where shapes do not tell. `layout` is that of an earlier batch of the same kind: a
        dimension that has the padded length by chance is not taken for the padded one.
        """
        check_padding(pad_keys, pad_dim, padding_side)
        leaves = dict(_leaves(batch))
        found, mask = _read_lengths(batch, lengths, leaves)
        rows = {path: len(leaf) for path, leaf in leaves.items()} or {"batch": _sample_count(batch)}
        for path, count in rows.items():
            if count != len(found):
                raise ValueError(
                    f"lengths must be one for each sample: there are {len(found)}, and {path} has {count} "
                    "rows. Where a part has no row a sample, pass `split`, not `lengths`"
                )
        padded = _padded_length(leaves, found, mask, pad_keys, pad_dim)
        side = _side(mask, found, padded, padding_side)
        return cls(batch, found, padded, side, _layout(leaves, padded, pad_keys, pad_dim, layout))

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
        if is_samples(node):
            return [node[index] for index in indices] if len(node) == len(self.lengths) else node
        if _is_text(node):
            return tuple(node[index] for index in indices) if len(node) == len(self.lengths) else node
        items = children(node)
        if items is None:
            return node
        return rebuilt(node, [self._taken(value, path + label, indices, length) for label, value in items])


def _is_text(node: Any) -> bool:
    """A text a sample, as `default_collate` leaves them."""
    return type(node) is tuple and len(node) > 0 and all(isinstance(one, str) for one in node)


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
    packs: Sequence[Pack],
    *,
    padded_length: int | None = None,
    padding_side: Side = "right",
    path: str = "output",
) -> Any:
    """One output for the batch, in its order, from those of its microbatches.

    A dimension that follows the microbatches' lengths (one value a token) is filled with zeros up to
    `padded_length`. Where all microbatches have one length, nothing tells it from a dimension that has that
    size by chance: it stays as long as it is.
    """
    if len(outputs) != len(packs) or not packs:
        raise ValueError(f"outputs must be one for each of {len(packs)} microbatches, not {len(outputs)}")
    return _joined(outputs, packs, padded_length or max(one.length for one in packs), padding_side, path)


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


# --- reading a batch --------------------------------------------------------------------------------------


def _leaves(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays with rows, with where they are; what cannot be cut by rows is an error."""
    if isinstance(node, torch.Tensor) and (node.layout is not torch.strided or node.is_nested):
        raise TypeError(f"{path} must be a dense tensor, not {node.layout}: pass `split`, not `lengths`")
    if has_rows(node):
        yield path, node
    elif not is_samples(node):
        items = children(node)
        if items is None and not isinstance(node, torch.Tensor) and hasattr(node, "to"):
            raise TypeError(
                f"{path} must be made of tensors, not {type(node).__name__}: pass `split`, not `lengths`"
            )
        for label, value in items or ():
            yield from _leaves(value, path + label)


def _sample_count(batch: Any) -> int:
    """The items of the first list of samples in a batch without tensors."""
    if is_samples(batch):
        return len(batch)
    return max((_sample_count(value) for _, value in children(batch) or ()), default=0)


def _named(name: str | int, leaves: Mapping[str, Any]) -> Any | None:
    """The part that ends in this key or field."""
    return next((leaf for path, leaf in leaves.items() if _ends_in(path, name)), None)


def _ends_in(path: str, name: str | int) -> bool:
    return path.endswith((f"[{name!r}]", f".{name}"))


def _read_lengths(
    batch: Any, lengths: Lengths, leaves: Mapping[str, Any]
) -> tuple[tuple[int, ...], torch.Tensor | None]:
    """The samples' lengths, and a mask [samples, padded] of what is not padding, if there is one."""
    mask = None
    for name in (*_KEEPS, *_DROPS):
        leaf = _named(name, leaves)
        if (
            mask is None
            and isinstance(leaf, torch.Tensor)
            and leaf.dim() == 2
            and not leaf.is_floating_point()
        ):
            mask = (leaf != 0) if name in _KEEPS else (leaf == 0)
    if isinstance(lengths, str):
        part = _named(lengths, leaves)
        if part is None:
            raise ValueError(f"lengths must name a part of the batch ({', '.join(leaves)}), not {lengths!r}")
        part = torch.as_tensor(part)
        if part.dim() == 2:
            mask = (part == 0) if lengths in _DROPS else (part != 0)
            return tuple(mask.sum(dim=1).tolist()), mask
        lengths = part
    elif callable(lengths) and not isinstance(lengths, torch.Tensor):
        lengths = lengths(batch)
    given = torch.as_tensor(lengths)
    if given.dim() != 1 or given.is_floating_point() or given.is_complex():
        raise ValueError(
            "lengths must be one integer for each sample (or a mask of two dimensions, by name), "
            f"not {given.dtype} of shape {tuple(given.shape)}"
        )
    found = tuple(int(one) for one in given.tolist())
    if found and min(found) < 0:
        raise ValueError(f"lengths must not be negative, not {min(found)}")
    if mask is not None and mask.shape[0] != len(found):
        mask = None
    return found, mask


def _padded_length(
    leaves: Mapping[str, Any],
    lengths: Sequence[int],
    mask: torch.Tensor | None,
    keys: Sequence[str | int] | None,
    dim: int | None,
) -> int:
    """What the batch is padded to; samples that were not collated yet, the longest of them."""
    longest = max(lengths, default=0)
    if not leaves:
        return max(longest, 1)
    if keys is not None:
        sizes = {}
        for key in keys:
            leaf = _named(key, leaves)
            if leaf is None:
                raise ValueError(f"pad_keys must name parts of the batch ({', '.join(leaves)}), not {key!r}")
            if len(leaf.shape) <= (dim or 1):
                raise ValueError(f"pad_keys must name parts with the dimension {dim or 1}, not {key!r}")
            sizes[key] = int(leaf.shape[dim or 1])
    elif mask is not None:
        sizes = {"the mask": int(mask.shape[1])}
    else:
        sizes = {
            path: int(leaf.shape[dim or 1]) for path, leaf in leaves.items() if len(leaf.shape) > (dim or 1)
        }
        # A part that is as wide as the longest sample says what the others are.
        exact = {path: size for path, size in sizes.items() if size == longest}
        sizes = exact or {path: size for path, size in sizes.items() if size >= longest}
    if not sizes or min(sizes.values()) < longest:
        seen = ", ".join(f"{path} {tuple(leaf.shape)}" for path, leaf in leaves.items())
        raise ValueError(
            f"lengths must not exceed what the batch is padded to: {longest} is the longest, and the parts "
            f"are {seen}. Pass `pad_keys` and `pad_dim` if the padded dimension is another one"
        )
    if len(set(sizes.values())) > 1:
        named = ", ".join(f"{path} has {size}" for path, size in sizes.items())
        raise ValueError(
            f"the padded dimension is not clear: {named}. Pass `pad_keys`, the names of the padded parts"
        )
    return next(iter(sizes.values()))


def _layout(
    leaves: Mapping[str, Any],
    padded: int,
    keys: Sequence[str | int] | None,
    dim: int | None,
    earlier: Layout | None,
) -> dict[str, tuple[int, ...]]:
    """The padded dimensions of each part that has some."""
    found = {}
    for path, leaf in leaves.items():
        named = keys is None or any(_ends_in(path, key) for key in keys)
        dims = [at for at in range(1, len(leaf.shape)) if leaf.shape[at] == padded] if named else []
        if dim is not None:
            dims = [at for at in dims if at == dim]
        elif earlier is not None:
            dims = [at for at in dims if at in earlier.get(path, ())]
        elif len(dims) > 1 and not _is_mask(path, leaf):
            raise ValueError(
                f"the padded dimension of {path} is not clear: {tuple(leaf.shape)} has {padded} more than "
                "once. Pass `pad_dim`, the padded one, or `pad_keys`, the names of the padded parts"
            )
        if dims:
            found[path] = tuple(dims)
    return found


def _is_mask(path: str, leaf: Any) -> bool:
    """[samples, padded, padded] is a mask by its type or its name."""
    return getattr(leaf, "dtype", None) is torch.bool or "mask" in path.rsplit("[", 1)[-1].rsplit(".", 1)[-1]


def _side(mask: torch.Tensor | None, lengths: Sequence[int], padded: int, asked: Side | None) -> Side:
    """Which side is padded, as far as a mask tells; it must not contradict."""
    if mask is None or mask.shape[1] != padded:
        return asked or "right"
    counts = torch.tensor(lengths, device=mask.device).unsqueeze(1)
    place = torch.arange(padded, device=mask.device).unsqueeze(0)
    sides: dict[Side, bool] = {
        "right": not bool((mask & (place >= counts)).any()),
        "left": not bool((mask & (place < padded - counts)).any()),
    }
    if asked is not None:
        if not sides[asked]:
            raise ValueError(
                f"padding_side must be what the mask says, not {asked!r}: it would cut off tokens"
            )
        return asked
    for side in ("right", "left"):
        if sides[side]:
            return side
    raise ValueError(
        "the mask must be padded on one side, without holes, and agree with the lengths: trimming would cut "
        "off tokens. Pass `lengths` as numbers, the index behind each sample's last token"
    )


# --- cutting and joining ----------------------------------------------------------------------------------


def _rows(rows: Any, indices: Sequence[int]) -> Any:
    """Neighbours as a view, others as a copy."""
    first = indices[0]
    if all(index == first + offset for offset, index in enumerate(indices)):
        return rows[first : first + len(indices)]
    if isinstance(rows, torch.Tensor):
        return rows.index_select(0, torch.tensor(indices, device=rows.device))
    return rows[list(indices)]


def _joined(pieces: Sequence[Any], packs: Sequence[Pack], padded: int, side: Side, path: str) -> Any:
    first = pieces[0]
    counts = [len(one.indices) for one in packs]
    if isinstance(first, torch.Tensor):
        for piece, count in zip(pieces, counts, strict=True):
            if piece.dim() == 0 or piece.shape[0] != count:
                raise TypeError(
                    f"{path} must have one row for each of {count} samples, not shape {tuple(piece.shape)}"
                )
        return _joined_tensors(pieces, packs, padded, side, path)
    if is_array(first):
        tensors = [torch.from_numpy(piece) for piece in pieces]
        return _joined(tensors, packs, padded, side, path).numpy()
    if isinstance(first, list) and all(
        len(piece) == count for piece, count in zip(pieces, counts, strict=True)
    ):
        placed = {
            index: item
            for piece, one in zip(pieces, packs, strict=True)
            for index, item in zip(one.indices, piece, strict=True)
        }
        return [placed[index] for index in range(len(placed))]
    items = children(first)
    if items is None:
        if all(one is first or (type(one) is type(first) and one == first) for one in pieces):
            return first
        raise TypeError(
            f"{path} must be tensors or lists with one row a sample, or the same in all microbatches, not "
            f"{type(first).__name__}"
        )
    columns = [[value for _, value in children(piece) or ()] for piece in pieces]
    return rebuilt(
        first,
        [
            _joined([column[at] for column in columns], packs, padded, side, path + label)
            for at, (label, _) in enumerate(items)
        ],
    )


def _joined_tensors(
    pieces: Sequence[torch.Tensor], packs: Sequence[Pack], padded: int, side: Side, path: str
) -> torch.Tensor:
    """All rows in one new tensor: each piece is copied once."""
    first = pieces[0]
    shape = [sum(len(one.indices) for one in packs), *first.shape[1:]]
    grown = [
        dim
        for dim in range(1, first.dim())
        if any(piece.shape[dim : dim + 1] != first.shape[dim : dim + 1] for piece in pieces)
    ]
    for dim in grown:
        lengths = [tuple(piece.shape[dim : dim + 1]) for piece in pieces]
        if lengths != [(one.length,) for one in packs]:
            raise ValueError(
                f"{path} must have one shape, or that of the microbatch: dimension {dim} differs"
            )
        shape[dim] = padded
    out = first.new_zeros(shape) if grown else first.new_empty(shape)
    for piece, one in zip(pieces, packs, strict=True):
        rows = torch.tensor(one.indices, device=out.device)
        target = out
        for dim in grown:
            target = target.narrow(dim, padded - one.length if side == "left" else 0, one.length)
        target.index_copy_(0, rows, piece)
    return out
