"""The record of a step's peak, as a baseline stores it: what holds it, by source line, module and kind.

Rules:
- A line goes by its file, its function and its code text, never by its number: numbers shift when lines are
  added above. Files are relative to the project, so that a record is the same wherever the project lies.
- A record has several high moments: the highest of each phase (forward, backward, optimizer), and those of
  other lines. A change may move the peak, and what it changed is seen where like is compared with like.
- Rows are a partition of a moment: their bytes add up to it. A line that makes much and holds nothing then
  has a row of 0 bytes: it may be why another one holds more.
- What no line made (weights, optimizer state) goes by the line that declares it, where there is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from batchfit._explain.pure.holders import Peak

_MADE = re.compile(r"(?:(\S+) )?(\w+)(\[[\d, ]*\])")
_PLACE = re.compile(r"([^:]+):([^:\s]+): (.*)", re.DOTALL)


@final
class SourcePlace(NamedTuple):
    """A line of a program, as a record names it; without a file it is a name in `code` ("cuBLAS")."""

    file: str
    function: str
    code: str

    @property
    def text(self) -> str:
        """`src/losses.py:cross_entropy: logits = logits.float()`."""
        return f"{self.file}:{self.function}: {self.code}" if self.file else self.code

    @classmethod
    def parsed(cls, text: str) -> SourcePlace:
        """What `text` has written."""
        found = _PLACE.fullmatch(text)
        return cls("", "", text) if found is None else cls(*found.groups())


@final
class TensorMade(NamedTuple):
    """What `HeldRow.of` says: the operation (none for weights and the like), dtype and shape."""

    operation: str
    dtype: str
    shape: str

    @classmethod
    def parsed(cls, text: str) -> TensorMade:
        """What stands in a record; a workspace is no tensor."""
        found = _MADE.fullmatch(text)
        return cls(text, "", "") if found is None else cls(*(part or "" for part in found.groups()))

    @property
    def kind(self) -> tuple[str, str]:
        """All but its shape."""
        return self.operation, self.dtype


@final
class HeldRow(NamedTuple):
    """Bytes of one kind that are live at a moment, and what made them.

    `chain`: texts of the lines that led there, the innermost last; for modules, the parts of a path. `of` is
    the largest of its blocks at any moment of the record: "to_copy float32[8, 512]".
    """

    chain: tuple[str, ...]
    kind: str
    size: int
    of: str = ""


@final
@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """The optimizers of a step: their classes, where they are made, and how much state they keep."""

    name: str = ""
    place: str = ""  # text of a line; empty where it is not known
    state_per_weight: float = 0.0  # bytes of state per byte of trained weights


@final
@dataclass(frozen=True, slots=True)
class PhaseMoment:
    """The highest moment of a line in a phase, and what holds it."""

    phase: str
    operation: str  # that made it the highest
    line: str  # the text of the line that made it so; empty where there is none
    size: int
    lines: tuple[HeldRow, ...]
    modules: tuple[HeldRow, ...]

    @property
    def kinds(self) -> tuple[HeldRow, ...]:
        """What holds it by kind."""
        sizes: Counter[str] = Counter()
        for row in self.lines:
            sizes[row.kind] += row.size
        return tuple(HeldRow((kind,), kind, sizes[kind]) for kind in sorted(sizes))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRecord:
    """What a baseline keeps of a step: its high moments, the highest first."""

    batch_size: int
    card: str
    versions: Mapping[str, str]
    moments: tuple[PhaseMoment, ...]
    batch: tuple[str, ...] = ()  # its tensors: "int64[8, 512]"
    optimizer: OptimizerRecord = field(default_factory=OptimizerRecord)
    budget_bytes: int | None = None
    largest: int | None = None  # within the budget

    @property
    def peak(self) -> PhaseMoment:
        """The highest of all."""
        return max(self.moments, key=lambda one: one.size)

    def like(self, moment: PhaseMoment, line: str) -> PhaseMoment:
        """The moment that is most like another one, of another record, which `line` has made so.

        That of the same phase and line; else the highest of the phase; else the highest of all.
        """
        same = [one for one in self.moments if one.phase == moment.phase]
        return next((one for one in same if one.line == line), same[0] if same else self.peak)


def other_versions(before: PeakRecord, now: PeakRecord) -> list[str]:
    """What has another version now; a library that only one of them uses is a change of the program."""
    shared = before.versions.keys() & now.versions.keys()
    return sorted(name for name in shared if before.versions[name] != now.versions[name])


@final
@dataclass(frozen=True, slots=True)
class TracedRecord:
    """A record, the peak of its trace, and the numbers that its lines have now."""

    record: PeakRecord
    peak: Peak
    numbers: Mapping[str, tuple[int, ...]]  # by the text of a place
