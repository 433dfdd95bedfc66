"""The user's own ways to count the samples of a batch and to cut it, and the check of any cut.

Rules
- With `split` the number of samples is what `count` returns. Without `count` it is found by trial cuts: the
  one number for which `split` divides every tensor (in some dimension) or list of that size as it was asked,
  or the `len` of an object of the user's own, whose microbatches must have the lengths that were asked for.
  The length of a tuple, list or dict is never taken for it. What is not certain is an error before anything
  runs.
- The first cut of each structure is checked: the microbatches together are the batch, each sample once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple, final

import torch

from batchfit._engine.batch.sample_count import BatchReader, BatchReading, Count, counted
from batchfit._engine.batch.structure import (
    children,
    is_array,
    is_block_mask,
    is_sequence,
    is_table,
    rows_of,
    signature,
)
from batchfit._engine.device.oom import is_oom
from batchfit.errors import BatchfitError

Split = Callable[[Any, list[int]], Sequence[Any]]

_PASS_COUNT = "Pass count=, a callable that takes the batch and returns its number of samples"


class _CountRule(NamedTuple):
    """Where the number of samples of a structure stands."""

    path: str | None  # None: the `len` of the batch
    dim: int | None  # of a tensor; None: the items of a list


@final
class Cutter:
    """How one Microbatcher's batches are counted and cut; what it found holds for later batches."""

    def __init__(self, split: Split | None = None, count: Count | None = None) -> None:
        self.split = split
        self.count = count
        self._reader = BatchReader(None if split is not None else count)
        self._rules: dict[object, _CountRule] = {}
        self._checked: set[object] = set()

    def read(self, batch: Any, known_count: int | None = None) -> BatchReading:
        """The number of samples of a batch, and its tensors; `known_count`: as many as its user says."""
        if self.split is None:
            return self._reader.read(batch, known_count)
        reading = BatchReading()
        reading.leaves.extend((path, node) for path, node in _nodes(batch) if isinstance(node, torch.Tensor))
        reading.rows.append(("batch", self._length(batch)))
        return reading

    def cut(self, batch: Any, sizes: list[int]) -> list[Any]:
        """What the user's `split` makes of a batch."""
        parts = self._split(batch, sizes)
        key = (signature(batch), len(sizes) > 1)
        if key not in self._checked:
            self._check_counts(batch, parts, sizes)
            _check_tensors(batch, parts, sizes)
            self._checked.add(key)
        return parts

    def check(
        self, batch: Any, parts: Sequence[Any], sizes: Sequence[int], samples: Set[str], key: object = None
    ) -> None:
        """Once for each structure: these microbatches, cut by rows, are the batch. `key`: its signature."""
        key = signature(batch) if key is None else key
        if key not in self._checked:
            _check_rows(batch, parts, sizes, samples, "batch")
            self._checked.add(key)

    def _split(self, batch: Any, sizes: list[int]) -> list[Any]:
        assert self.split is not None
        parts = list(self.split(batch, list(sizes)))
        if len(parts) != len(sizes):
            raise ValueError(
                f"split must return one microbatch for each of {len(sizes)} sizes, not {len(parts)}"
            )
        return parts

    def _length(self, batch: Any) -> int:
        if self.count is not None:
            return counted(self.count, batch)
        key = signature(batch)
        rule = self._rules.get(key)
        found = None if rule is None else _measured(batch, rule)
        if found is None:
            self._rules[key] = rule = self._rule(batch)
            found = _measured(batch, rule)
        assert found is not None
        return found

    def _rule(self, batch: Any) -> _CountRule:
        """Where the number of samples is, found by trial cuts."""
        if _is_own(batch):
            count = _own_length(batch)
            parts = self._split(batch, [count] if count < 2 else [1, count - 1])
            self._check_counts(batch, parts, [count] if count < 2 else [1, count - 1])
            return _CountRule(None, None)
        found = {}
        for count in sorted(_sizes_in(batch)):
            sizes = [count] if count < 2 else [1, count - 1]
            try:
                parts = self._split(batch, sizes)
            except Exception as error:  # a size that is not the batch's: `split` may well refuse it
                if is_oom(error):
                    raise
                continue
            rule = _divided(batch, parts, sizes)
            if rule is not None:
                found[count] = rule
        if len(found) != 1:
            what = f"{' or '.join(map(str, found))} samples" if found else f"a {type(batch).__name__}"
            raise ValueError(
                f"batch must say how many samples it has where split is given, not be {what}, by what split "
                f"returns for trial sizes. {_PASS_COUNT}"
            )
        return next(iter(found.values()))

    def _check_counts(self, batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
        """Each microbatch has as many samples as were asked for."""
        if self.count is not None:
            counts = [counted(self.count, part) for part in parts]
        elif _is_own(batch) and all(hasattr(part, "__len__") for part in parts):
            counts = [len(part) for part in parts]
        elif _is_own(batch):
            raise TypeError(
                "split must return microbatches that have a length where count is not given, not "
                f"{type(parts[0]).__name__}. {_PASS_COUNT}"
            )
        elif _divided(batch, parts, sizes) is None:
            raise ValueError(
                f"split must return microbatches of {list(sizes)} samples that are the batch together. "
                f"{_PASS_COUNT}, where they hold other things than the batch"
            )
        else:
            return
        if counts != list(sizes):
            raise ValueError(
                f"split must return microbatches of {list(sizes)} samples, not of {counts}. {_PASS_COUNT}"
                if self.count is None
                else f"split must return microbatches of {list(sizes)} samples, and count says {counts}"
            )


def _is_own(batch: Any) -> bool:
    """An object of the user's own, of which only its length is known."""
    if isinstance(batch, torch.Tensor | list | tuple) or rows_of(batch) is not None:
        return False
    return children(batch) is None


def _own_length(batch: Any) -> int:
    try:
        return len(batch)
    except TypeError:
        raise TypeError(
            "batch must say how many samples it has where split is given, not be a "
            f"{type(batch).__name__} without a length. {_PASS_COUNT}"
        ) from None


def _nodes(node: Any, path: str = "batch") -> Iterator[tuple[str, Any]]:
    """Tensors, arrays and lists, with where they are."""
    if isinstance(node, torch.Tensor) or is_array(node) or is_table(node):
        yield path, node
        return
    if is_sequence(node):
        yield path, node
    for label, value in children(node) or ():
        yield from _nodes(value, path + label)


def _extents(node: Any) -> tuple[int, ...]:
    if isinstance(node, list | tuple):
        return (len(node),)
    return tuple(node.batch_size if is_table(node) else node.shape)


def _sizes_in(batch: Any) -> set[int]:
    """Every size of a dimension or list: one of them is the number of samples."""
    return {size for _, node in _nodes(batch) for size in _extents(node)}


def _measured(batch: Any, rule: _CountRule) -> int | None:
    """The number of samples, from where it stood in an earlier batch of the structure."""
    if rule.path is None:
        return _own_length(batch)
    for path, node in _nodes(batch):
        if path == rule.path:
            extents = _extents(node)
            return extents[rule.dim or 0] if len(extents) > (rule.dim or 0) else None
    return None


def _divided(batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> _CountRule | None:
    """Where `parts` divide the batch in these sizes; None where they leave something out or differ."""
    found: list[_CountRule] = []

    def visit(node: Any, parts: Sequence[Any], path: str) -> bool:
        if any(type(part) is not type(node) for part in parts):
            return False
        if isinstance(node, torch.Tensor) or is_array(node) or is_table(node):
            dim = _cut_dim(_extents(node), [_extents(part) for part in parts], sizes)
            if dim is not None:
                found.append(_CountRule(path, dim))
            return dim is not None or all(_extents(part) == _extents(node) for part in parts)
        if is_sequence(node):
            counts = [len(part) for part in parts]
            if len(node) == sum(sizes) and counts == list(sizes):
                found.append(_CountRule(path, None))
                return True
            if any(count != len(node) for count in counts):
                return False
        tables = [children(part) or [] for part in parts]
        labels = [label for label, _ in children(node) or []]
        if any([label for label, _ in table] != labels for table in tables):
            return False
        return all(
            visit(value, [table[i][1] for table in tables], path + label)
            for i, (label, value) in enumerate(children(node) or [])
        )

    return found[0] if visit(batch, parts, "batch") and found else None


def _cut_dim(extents: tuple[int, ...], parts: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> int | None:
    """The dimension in which a tensor was cut in these sizes."""
    for dim, extent in enumerate(extents):
        wanted = [(*extents[:dim], size, *extents[dim + 1 :]) for size in sizes]
        if extent == sum(sizes) and wanted == list(parts):
            return dim
    return None


def _check_tensors(batch: Any, parts: Sequence[Any], sizes: Sequence[int]) -> None:
    """Where a user's microbatches hold parts of the batch's tensors, every row of them is there once."""
    by_path = [dict(_nodes(part)) for part in parts]
    for path, node in _nodes(batch):
        if not isinstance(node, torch.Tensor) or node.layout is not torch.strided or node.is_nested:
            continue
        same = [found.get(path) for found in by_path]
        if not all(isinstance(one, torch.Tensor) and not one.is_nested for one in same):
            continue
        dim = _cut_dim(_extents(node), [_extents(one) for one in same], sizes)
        # Sums do not depend on the order: a `split` may sort its samples.
        if dim is not None and not _same_sums(node, same, dim):
            raise ValueError(
                f"split must return each sample once, and {path} of all microbatches is not that of the batch"
            )


def _same_sums(node: torch.Tensor, parts: Sequence[Any], dim: int) -> bool:
    with torch.no_grad():
        if not node.is_floating_point() and not node.is_complex():
            whole = node.sum(dim)
            return bool(sum(part.sum(dim).to(whole.device) for part in parts).eq(whole).all())
        wide = torch.complex128 if node.is_complex() else torch.float64
        whole = node.sum(dim, dtype=wide)
        total: Any = sum(part.sum(dim, dtype=wide).to(whole.device) for part in parts)
        scale = node.abs().sum(dim, dtype=torch.float64)
        differs = (total - whole).abs() > 1e-9 * scale
        return not bool((differs & scale.isfinite()).any())


def _check_rows(node: Any, parts: Sequence[Any], sizes: Sequence[int], samples: Set[str], path: str) -> None:
    """Every row and every item is in one microbatch; what has none is in all of them."""
    rows = len(node) if path in samples else rows_of(node)
    if rows is not None:
        found = [len(part) if path in samples else rows_of(part) for part in parts]
        is_mask = is_block_mask(node)  # its tables may be shared
        if not is_mask and (rows != sum(sizes) or found != list(sizes)):
            raise BatchfitError(f"{path} of {rows} samples was cut into {found}, not {list(sizes)}")
        return
    tables = [children(part) or [] for part in parts]
    for i, (label, value) in enumerate(children(node) or []):
        _check_rows(value, [table[i][1] for table in tables], sizes, samples, path + label)
