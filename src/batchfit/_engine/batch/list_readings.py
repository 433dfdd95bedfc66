"""Whether each list of a batch holds samples or parts of one sample: possible readings, and the certain one.

Rules
- A number of samples is tried with the whole batch: every tensor has as many rows, or is in an item of a list
  of as many. Lists without tensors have one item per sample where they have as many, and else go to all.
- A rule decides between two readings only where the other one is hardly ever meant; anything else is the
  user's to say. A wrong reading would train on parts of samples, silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, final

import torch
from torch.nn.utils.rnn import PackedSequence

from batchfit._engine.batch.structure import children, holds_rows, is_sequence, rows_of, signature

# Lists of more parts are hardly ever made; nor are so many tasks trained at once.
_FEW = 8
# `[input]`, `[input, target]` and `[anchor, positive, negative]`.
_TUPLE_LIKE = 3
_CHANNELS = 4


class Role(NamedTuple):
    """What a list or tuple of the batch holds."""

    kind: Literal["parts", "samples", "common"]
    items: int  # as many as there were


Roles = Mapping[str, Role]


def holds_parts(node: Any, path: str) -> bool:
    """The tuple that is the batch holds parts, unless it is nothing but text."""
    return path == "batch" and type(node) is tuple and not _are_texts(node)


def candidates(batch: Any) -> list[int]:
    """The numbers of samples that the first thing with rows allows: its rows, or the items around it.

    Where nothing has rows: the items of lists, and of texts in them.
    """
    found: list[int] = []

    def visit(node: Any, path: str, around: tuple[int, ...]) -> bool:
        rows = rows_of(node)
        if rows is not None:
            found.extend((rows, *around))
            return True
        if is_sequence(node) and not holds_parts(node, path):
            around = (*around, len(node))
        return any(visit(value, path + label, around) for label, value in children(node) or ())

    def visit_plain(node: Any) -> None:
        if (isinstance(node, list) and node) or _are_texts(node):
            found.append(len(node))
            found.extend(len(item) for item in node[:1] if _are_texts(item))
            return
        for _, value in children(node) or ():
            visit_plain(value)

    if not visit(batch, "batch", ()):
        visit_plain(batch)
    return list(dict.fromkeys(found))


class _FoundList(NamedTuple):
    """A list or tuple, and the path of what holds it."""

    path: str
    parent: str
    node: Any


@final
class CandidateReading:
    """A batch read as one of `count` samples."""

    def __init__(self, batch: Any, count: int) -> None:
        self.count = count
        self._is_plain = not holds_rows(batch)
        self.roles: dict[str, Role] = {}
        self.lists: list[_FoundList] = []  # of samples, with rows in them
        self.both: list[_FoundList] = []  # as many items as rows
        self.plain: list[_FoundList] = []  # without rows
        self.rows: list[str] = []  # tensors with one row per sample, outside of lists of samples
        self.supported = False  # a list without tensors has as many items
        self.is_consistent = self._visit(batch, "batch", "")
        if self.is_consistent:
            self._decide_beside()
            self._decide_plain()

    def _visit(self, node: Any, path: str, parent: str) -> bool:
        if isinstance(node, PackedSequence):
            return False
        rows = rows_of(node)
        if rows is not None:
            self.rows.append(path)
            return rows == self.count
        if not is_sequence(node) or holds_parts(node, path):
            return all(self._visit(value, path + label, path) for label, value in children(node) or ())
        if self._is_plain:
            return self._visit_plain(node, path)
        if not holds_rows(node):
            self.plain.append(_FoundList(path, parent, node))
            return True
        before = (dict(self.roles), list(self.lists), list(self.both), list(self.plain), list(self.rows))
        self.roles[path] = Role("parts", len(node))
        is_parts = all(self._visit(value, path + label, path) for label, value in children(node) or ())
        if len(node) != self.count or (not is_parts and _are_parts(node)):
            return is_parts
        if is_parts:
            if _are_alike(node):
                self.both.append(_FoundList(path, parent, node))
            return True
        self.roles, self.lists, self.both, self.plain, self.rows = before
        self.roles[path] = Role("samples", len(node))
        self.lists.append(_FoundList(path, parent, node))
        return True

    def _visit_plain(self, node: Any, path: str) -> bool:
        """A list where nothing has rows: of text, numbers, or objects that nobody knows."""
        if type(node) is tuple and not _are_texts(node):
            self.roles[path] = Role("parts", len(node))
            return all(self._visit(value, path + label, path) for label, value in children(node) or ())
        columns = all(_are_texts(item) and len(item) == self.count for item in node)
        if len(node) != self.count and not columns:
            return False
        self.roles[path] = Role("samples", len(node))
        if columns:
            self.roles[path] = Role("parts", len(node))
            self.roles |= {f"{path}[{i}]": Role("samples", self.count) for i in range(len(node))}
        else:
            self.lists.append(_FoundList(path, "", node))
        is_open = any(isinstance(item, torch.Tensor) for item in node) or (
            columns and len(node) == self.count
        )
        if is_open:
            self.both.append(_FoundList(path, "", node))
        return True

    def _decide_beside(self) -> None:
        """What stands beside a list of samples, with as many items, holds samples too: images and targets."""
        beside = {found.parent for found in self.lists}
        for found in [one for one in self.both if one.parent in beside]:
            self.roles[found.path] = Role("samples", len(found.node))
            self.lists.append(found)
            within = f"{found.path}["
            self.both = [one for one in self.both if not f"{one.path}[".startswith(within)]
            self.plain = [one for one in self.plain if not one.path.startswith(within)]
            self.rows = [path for path in self.rows if not path.startswith(within)]

    def _decide_plain(self) -> None:
        """Lists without tensors have one item per sample where they have as many."""
        beside = {found.parent for found in self.lists}
        for found in self.plain:
            self._decide_list(found, beside)

    def _decide_list(self, found: _FoundList, beside: Set[str]) -> None:
        path, parent, node = found
        has_values = any(isinstance(one, torch.Tensor) for one in node)
        is_common, is_text = _is_common(node), all(isinstance(one, str) for one in node)
        if len(node) == self.count and (
            isinstance(node, list) or is_text or parent in beside or not is_common
        ):
            self.roles[path] = Role("samples", len(node))
            is_column = parent in beside and path.endswith(tuple(f"[{i}]" for i in range(_FEW)))
            # Not numbers alone: they may be a size, or the mean of each channel.
            self.supported |= is_text or not is_common or (is_column and self.count > _TUPLE_LIKE)
            if has_values and parent not in beside:  # 0-dim tensors: one per sample, or all for each
                self.both.append(found)
            return
        self.roles[path] = Role("common" if children(node) is None else "parts", len(node))
        for inside in _sequences_in(node, path):
            self._decide_list(inside, beside)

    def doubt(self, choose: str, *, is_counted: bool) -> str | None:
        """Why this reading, the only one that is left, is not certain."""
        if self.both and not (is_counted and self._is_plain):
            path, _, node = self.both[0]
            return (
                f"{path} can be read in two ways: its {len(node)} items are parts with a row for each of "
                f"{self.count} samples, or they are the {self.count} samples. Pass parts as a dict or a "
                "named tuple, and samples as one tensor, or with split= and count="
            )
        if is_counted or not self.lists or self.rows or self.supported or self.count > _FEW:
            return None
        if self._is_plain and not any(_may_be_batch(item) for found in self.lists for item in found.node):
            return None
        if _are_no_batches([found.node for found in self.lists]):
            return None
        path, _, node = self.lists[0]
        rows = ", ".join(str(one[0]) if one else "no" for one in _rows_of_each([node]))
        return (
            f"{path} can be read in two ways: its {len(node)} items are {len(node)} samples, or parts "
            f"(tasks) of {rows} samples, which cannot be cut together. {choose}"
        )


def _sequences_in(node: Any, path: str) -> Iterator[_FoundList]:
    """The outermost lists and tuples in a container."""
    for label, value in children(node) or ():
        if is_sequence(value):
            yield _FoundList(path + label, path, value)
        else:
            yield from _sequences_in(value, path + label)


def _may_be_batch(node: Any) -> bool:
    """An object that can go to a device: a batch of graphs, say."""
    if children(node) is None:
        return callable(getattr(node, "to", None))
    return any(_may_be_batch(value) for _, value in children(node) or ())


def _are_no_batches(lists: Sequence[Any]) -> bool:
    """Whether the items of these lists cannot be batches of their own, nor can the lists."""
    each = [_rows_of_each([node]) for node in lists]
    if any(len(set(rows)) > 1 for items in each for rows in items):
        return True
    if all(len(set(rows)) <= 1 for rows in _rows_of_each(lists)):
        return False
    # Images and targets, say; `((x, y), (x, y))` may be two tasks.
    are_columns = len({isinstance(node[0], torch.Tensor) for node in lists}) > 1
    return are_columns or any(len({rows for item in items for rows in item}) > 1 for items in each)


def _rows_of_each(lists: Sequence[Any]) -> list[list[int]]:
    """For each sample, the rows of what it holds in all lists."""

    def rows_in(node: Any) -> Iterator[int]:
        rows = rows_of(node)
        if rows is not None:
            yield rows
            return
        for _, value in children(node) or ():
            yield from rows_in(value)

    return [[rows for item in items for rows in rows_in(item)] for items in zip(*lists, strict=True)]


def _are_parts(node: Any) -> bool:
    """Tensors of several kinds, or beside anything else, are no samples."""
    return any(isinstance(item, torch.Tensor) for item in node) and not _are_alike(node)


def _are_alike(node: Any) -> bool:
    kinds = [signature(item) for item in node]
    return all(kind == kinds[0] for kind in kinds)


def _is_common(node: Any) -> bool:
    """Nothing but text, numbers and the like."""
    items = children(node)
    if items is None:
        return isinstance(node, str | bytes | int | float | complex | list | tuple | None)
    return all(_is_common(value) for _, value in items)


def settled(readings: Sequence[CandidateReading]) -> CandidateReading | None:
    """Which of several readings is certain."""
    # Samples are alike; the parts of a batch mostly are not.
    alike = [one for one in readings if one.both or all(_are_alike(found.node) for found in one.lists)]
    if len(alike) == 1:
        return alike[0]
    # Text or labels with one item per sample.
    supported = [one for one in alike if one.supported]
    if len(supported) == 1:
        return supported[0]
    parts = [one for one in alike if not one.lists]
    others = [one for one in alike if one.lists]
    doubtful = [found.node for one in others for found in (*one.lists, *one.both)]
    if len(parts) == 1 and all(_is_tuple_like(node, parts[0].count) for node in doubtful):
        return parts[0]
    is_pair = len(parts) == len(others) == 1
    if is_pair and all(_are_raw(found.node, parts[0].count) for found in others[0].lists):
        return others[0]
    return None


def _is_tuple_like(node: Any, rows: int) -> bool:
    """One to three tensors, or lists of them, whose rows are hardly channels: `[inputs, targets]`."""
    if rows == 0:
        return True
    if len(node) > _TUPLE_LIKE or rows < len(node):
        return False
    if _are_texts(node[0]):
        return rows > _TUPLE_LIKE
    dims = [item.dim() for item in node if isinstance(item, torch.Tensor)]
    most = _CHANNELS if max(dims, default=0) > 2 else 2 if max(dims, default=0) == 2 else 1
    others = [item for item in node if not isinstance(item, torch.Tensor)]
    return rows > most and all(type(item) is list and _is_tuple_like(item, rows) for item in others)


def _are_raw(node: Any, rows: int) -> bool:
    """Many samples as a dataset gives them: tuples, with plain numbers, or more of them than rows."""
    first = node[0]
    if _are_texts(first):
        return len(first) <= _TUPLE_LIKE < len(node)
    if len(node) <= _FEW or rows_of(first) is not None:
        return False
    plain = any(_is_common(value) for _, value in children(first) or ())
    return type(first) is tuple or plain or len(node) > rows


def two_readings(readings: Sequence[CandidateReading], choose: str) -> str:
    """What to say where a batch can be read in several ways."""

    def said(one: CandidateReading) -> str:
        if not one.lists:
            return f"{one.count} samples, which are the rows of its tensors"
        path, _, node = one.lists[0]
        return f"{one.count} samples, which are the items of {path}, a {type(node).__name__}"

    return f"batch can be read in two ways: {'; or '.join(said(one) for one in readings)}. {choose}"


def _are_texts(node: Any) -> bool:
    """A tuple of text, as `default_collate` makes it."""
    return type(node) is tuple and len(node) > 0 and all(isinstance(one, str) for one in node)
