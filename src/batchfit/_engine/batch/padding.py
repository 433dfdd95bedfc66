"""Where the padding of a batch is: how long its samples are, which dimensions follow, and on which side.

Rules:
- A dimension is padding's only where the batch says so: its size is what the batch is padded to. Where two
  answers are possible the error names the part and what to pass.
- Nothing but padding is cut: lengths that a mask contradicts, and masks with gaps, are errors. What a mask
  means (1 for a token, or for padding) follows from its name. It must not leave a sample without tokens where
  the other reading leaves every one with some.
- Targets, a decoder's inputs, and features beside tokens (an image's) may be as wide as the tokens by chance:
  where they hold more than a filling behind the lengths, these are not theirs, and they are left whole.
- Whatever is read from the batch (lengths, a mask, targets) is read once: each read synchronizes a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

import torch

from batchfit._engine.batch.structure import children, has_rows

Side = Literal["left", "right"]
Lengths = str | Sequence[int] | torch.Tensor | Callable[[Any], Any]
Layout = Mapping[str, tuple[int, ...]]  # which dimensions of which part are padded

_KEEPS = ("attention_mask", "mask")  # 1 where there is a token
_DROPS = ("padding_mask", "key_padding_mask", "src_key_padding_mask")  # True where there is none
# Parts that may be sequences of their own.
_TARGETS = re.compile(r"label|target|tgt|decoder", re.IGNORECASE)


class Padding(NamedTuple):
    """What was found of a batch."""

    lengths: tuple[int, ...]  # of its samples
    padded_length: int
    side: Side
    layout: Layout


def find_padding(
    batch: Any,
    lengths: Lengths,
    *,
    pad_keys: Sequence[str | int] | None,
    pad_dim: int | None,
    padding_side: Side | None,
    layout: Layout | None,
    samples: Set[str],
) -> Padding:
    """Where the padding of `batch` is; `layout` is that of an earlier batch of the same kind."""
    leaves = dict(_leaves(batch, samples))
    found, mask = _read_lengths(batch, lengths, leaves)
    rows = {path: len(leaf) for path, leaf in leaves.items()} or {"batch": _sample_count(batch, samples)}
    for path, count in rows.items():
        if count != len(found):
            raise ValueError(
                f"lengths must be one for each sample: there are {len(found)}, and {path} has {count} "
                "rows. Where a part has no row a sample, pass `split`, not `lengths`"
            )
    padded = _padded_length(leaves, found, mask, pad_keys, pad_dim)
    side = _side(mask, found, padded, padding_side)
    dims = _layout(leaves, padded, pad_keys, pad_dim, layout)
    if pad_keys is None:
        _leave_whole(dims, leaves, _behind(found, padded, side))
    return Padding(found, padded, side, dims)


def _leaves(node: Any, samples: Set[str], path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Tensors and arrays with rows, with where they are; what cannot be cut by rows is an error."""
    if isinstance(node, torch.Tensor) and (node.layout is not torch.strided or node.is_nested):
        raise TypeError(f"{path} must be a dense tensor, not {node.layout}: pass `split`, not `lengths`")
    if has_rows(node):
        yield path, node
    elif path not in samples:
        items = children(node)
        if items is None and not isinstance(node, torch.Tensor) and hasattr(node, "to"):
            raise TypeError(
                f"{path} must be made of tensors, not {type(node).__name__}: pass `split`, not `lengths`"
            )
        for label, value in items or ():
            yield from _leaves(value, samples, path + label)


def _sample_count(batch: Any, samples: Set[str], path: str = "batch") -> int:
    """The items of the lists of samples in a batch without tensors."""
    if path in samples:
        return len(batch)
    inside = (_sample_count(value, samples, path + label) for label, value in children(batch) or ())
    return max(inside, default=0)


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
            mask = _tokens(part, lengths)
            return tuple(mask.sum(dim=1).tolist()), mask
        lengths = part
    elif callable(lengths) and not isinstance(lengths, torch.Tensor):
        lengths = lengths(batch)
    try:
        given = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"lengths must be one integer for each sample, not {lengths!r:.80}") from None
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
    if mask is not None and _agrees(~mask, found) and not _agrees(mask, found):
        mask = ~mask  # true for padding, whatever its name
    return found, mask


def _agrees(mask: torch.Tensor, lengths: tuple[int, ...]) -> bool:
    return tuple(mask.sum(dim=1).tolist()) == lengths


def _tokens(part: torch.Tensor, name: str) -> torch.Tensor:
    """Where the mask of that name has a token."""
    if part.is_floating_point() and bool((part < 0).any()):  # what is added to scores: minus infinity, or 0
        return part == 0
    if name == "attention_mask":
        return part != 0
    drops = name in _DROPS or "pad" in name.lower()
    mask = (part == 0) if drops else (part != 0)
    if not bool(mask.any(dim=1).all()) and not bool(mask.all(dim=1).any()):
        sample = int(mask.any(dim=1).logical_not().nonzero()[0])
        means = "padding" if drops else "tokens"
        raise ValueError(
            f"lengths must name a mask whose meaning is clear, not {name!r}: by its name it is true for "
            f"{means}, which leaves sample {sample} without any, and read the other way all have some. Pass "
            f"lengths=lambda batch: (batch[{name!r}] == 0).sum(1) where it is true for padding, and != where "
            "it is true for tokens"
        )
    return mask


def _behind(lengths: Sequence[int], padded: int, side: Side) -> torch.Tensor:
    """Which places of [samples, padded] are not a sample's own."""
    place = torch.arange(padded).unsqueeze(0)
    counts = torch.tensor(lengths).unsqueeze(1)
    return place >= counts if side == "right" else place < padded - counts


def _leave_whole(layout: dict[str, tuple[int, ...]], leaves: Mapping[str, Any], behind: torch.Tensor) -> None:
    """Take out of `layout` what goes on where the samples of these lengths end: all targets, or features."""
    targets, features, has_ids = [], [], False
    for path, dims in layout.items():
        part = torch.as_tensor(leaves[path])
        if part.is_floating_point():
            features += [path] if len(dims) == 1 else []
        elif _TARGETS.search(path):
            targets += [path] if dims == (1,) else []
        elif dims == (1,) and part.dim() == 2 and not _is_mask(path, part):
            has_ids = True
    wide = [path for path in targets if _goes_on(leaves[path], 1, behind)] and targets
    if has_ids:  # otherwise it is the features that have these lengths
        wide = [*wide, *(path for path in features if _goes_on(leaves[path], layout[path][0], behind))]
    for path in wide:
        del layout[path]


def _goes_on(leaf: Any, dim: int, behind: torch.Tensor) -> bool:
    """Whether there is more than one filling behind the samples' lengths."""
    part = torch.as_tensor(leaf).movedim(dim, 1)
    filling = part[behind.to(part.device)]
    return len(filling) > 0 and bool((filling != filling[0]).any())


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
    """Which side is padded, as far as a mask says; it must not contradict."""
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
        "the mask must be padded on one side, without gaps, and agree with the lengths: trimming would cut "
        "off tokens. Pass `lengths` as numbers, the index behind each sample's last token"
    )
