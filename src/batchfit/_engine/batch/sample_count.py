"""How many samples a batch has, and which of its lists hold one item per sample.

Rules
- Dicts, dataclasses, named tuples and the tuple that is the batch hold parts. Any other list or tuple holds
  parts (`default_collate`'s `[inputs, labels]`) or samples (detection's images), and its type does not say
  which. A reading is a number of samples with which every tensor has one row per sample, or is in such an
  item.
- Where one reading is left it is taken. Where two are left, an earlier batch of the same structure or the
  user's `count` decides, or one of the rules of `list_readings`; otherwise both are named in an error.
- A list that alone says how many samples there are may be a list of batches (tasks), whose parts are of any
  sizes: a short one is an error as well, unless its items cannot be batches.
- What was decided for a structure is kept; later batches cost one walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.nn.utils.rnn import PackedSequence

from batchfit._engine.batch.list_readings import (
    CandidateReading,
    Roles,
    candidates,
    holds_parts,
    settled,
    two_readings,
)
from batchfit._engine.batch.structure import children, holds_rows, is_sequence, rows_of, signature

Count = Callable[[Any], int]

_CHOOSE = (
    "Pass count=, a callable that takes the batch and returns its number of samples (count=len where the "
    "items of the batch are the samples), or pass parts as a dict"
)


class AmbiguousBatchError(ValueError):
    """A batch that can be read in two ways."""


@final
@dataclass(slots=True)
class BatchReading:
    """A batch as it was read."""

    rows: list[tuple[str, int]] = field(default_factory=list)  # what has a number of samples
    samples: set[str] = field(default_factory=set)  # lists and tuples with one item per sample
    leaves: list[tuple[str, torch.Tensor]] = field(default_factory=list)  # `path[]` for a tensor of a sample
    key: object = None  # the signature, where it was needed
    is_plain: bool = False  # a tensor, or a tuple or dict of tensors

    @property
    def length(self) -> int:
        return self.rows[0][1]

    @property
    def agrees(self) -> bool:
        return len({rows for _, rows in self.rows}) == 1


@final
class BatchReader:
    """Reads batches; what it found out about a structure holds for later batches of it."""

    def __init__(self, count: Count | None = None, *, choose: str = _CHOOSE) -> None:
        self._count = count
        self._choose = choose
        self._known: dict[object, Roles] = {}

    def read(self, batch: Any, known_count: int | None = None) -> BatchReading:
        """The number of samples, the lists of samples and the tensors; an error names what disagrees."""
        known_count = known_count if self._count is None else counted(self._count, batch)
        reading = _walked(batch, {})
        if reading is None or not reading.agrees:  # there are lists to decide about
            key = signature(batch)
            reading = _walked(batch, self._known.get(key, {}))
            if reading is None or not reading.agrees or known_count not in (None, reading.length):
                roles = self._known[key] = self._decided(batch, known_count)
                reading = _walked(batch, roles)
                assert reading is not None
            reading.key = key
        if known_count is not None and reading.length != known_count:
            raise ValueError(
                f"count must return the number of samples, not {known_count}: {reading.rows[0][0]} has "
                f"{reading.length} rows. Pass split= too where samples are not rows"
            )
        return reading

    def _decided(self, batch: Any, known_count: int | None) -> Roles:
        readings = [CandidateReading(batch, count) for count in candidates(batch)]
        readings = [one for one in readings if one.is_consistent]
        if known_count is not None and readings:
            fitting = [one for one in readings if one.count == known_count]
            if not fitting:
                possible = " or ".join(str(one.count) for one in readings)
                raise ValueError(f"count must return the number of samples ({possible}), not {known_count}")
            readings = fitting
        if not readings:
            raise _disagreement(batch)
        chosen = readings[0] if len(readings) == 1 else settled(readings)
        if chosen is None:
            raise AmbiguousBatchError(two_readings(readings, self._choose))
        doubt = chosen.doubt(self._choose, is_counted=known_count is not None)
        if doubt is not None:
            raise AmbiguousBatchError(doubt)
        return chosen.roles


def counted(count: Count, batch: Any) -> int:
    """What the user's `count` says about a batch."""
    found: Any = count(batch)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise TypeError(f"count must return a number of samples, not {found!r:.80}")
    return found


def _walked(batch: Any, roles: Roles) -> BatchReading | None:
    """The batch, read with these roles; None where they are not those of this batch."""
    reading = BatchReading()

    def visit(node: Any, path: str) -> bool:
        if isinstance(node, PackedSequence):
            raise _packed(path)
        rows = rows_of(node)
        if rows is not None:
            reading.rows.append((path, rows))
            if isinstance(node, torch.Tensor):
                reading.leaves.append((path, node))
            return True
        if is_sequence(node) and not holds_parts(node, path):
            role = roles.get(path)
            if role is None or (role.kind == "parts" and role.items != len(node)):
                return False
            if role.kind == "common":
                return True
            if role.kind == "samples":
                reading.rows.append((path, len(node)))
                reading.samples.add(path)
                reading.leaves.extend((f"{path}[]", tensor) for tensor in _tensors(node))
                return True
        if type(node) is dict:
            return all(visit(value, f"{path}[{key!r}]") for key, value in node.items())
        return all(visit(value, path + label) for label, value in children(node) or ())

    return reading if visit(batch, "batch") and reading.rows else None


def _tensors(node: Any) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        if node.dim():
            yield node
        return
    for _, value in children(node) or ():
        yield from _tensors(value)


def _packed(path: str) -> TypeError:
    return TypeError(f"{path} is a PackedSequence, which cannot be cut by samples: pass split=")


def _disagreement(batch: Any) -> Exception:
    """What to raise where no number of samples fits all of a batch."""
    found: list[tuple[str, int]] = []

    def visit(node: Any, path: str) -> None:
        if isinstance(node, PackedSequence):
            raise _packed(path)
        rows = rows_of(node)
        if rows is not None:
            found.append((path, rows))
        elif isinstance(node, list) and node and not holds_rows(node) and not any_rows:
            found.append((path, len(node)))
        else:
            for label, value in children(node) or ():
                visit(value, path + label)

    any_rows = holds_rows(batch)
    visit(batch, "batch")
    if not found:
        return TypeError(
            f"batch must hold tensors or lists with one row per sample, not {type(batch).__name__}: "
            "pass split= to cut it yourself"
        )
    first = {rows: path for path, rows in reversed(found)}
    named = ", ".join(f"{path} has {rows}" for path, rows in found if first[rows] == path)
    return ValueError(
        f"batch must have one number of samples in all its parts: {named}. Pass split= to cut it yourself, "
        "or count= where the items of a list are the samples"
    )
