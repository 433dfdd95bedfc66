"""What a trace answers: memory at any size (predict), and what holds the peak (explain). Nothing was run.

Rules: what the trace could not see is in the result (`unseen`), beside the figures that lack it; a size of 0
says that not even one sample fits.
"""

from __future__ import annotations

import html
import math
from typing import Literal

from pydantic import Field

from batchfit._charts.memory_page import headline, memory_lines
from batchfit._charts.tables import html_table, text_table
from batchfit._charts.text import as_text
from batchfit._units import format_bytes
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._fit import Trial, few_samples

ANSWER_COLUMNS = ("budget", "batch size", "peak", "of budget")


class Point(Result):
    """Predicted memory at one size, without a limit: live blocks, and what the allocator would take."""

    size: int
    peak_bytes: int
    reserved_bytes: int


class Answer(Result):
    """The predicted largest size under one budget; 0 where not even one sample fits.

    `reason` says why no larger size is answered, where much of the budget is left.
    """

    budget_bytes: int
    batch_size: int
    peak_bytes: int
    name: str = ""  # the card's, where the budget is a card's
    reason: str = ""


class Prediction(Result):
    """What `predict_batch_size` answers: the largest size, and memory at any size. Nothing was run.

    `based_on` says how: "no GPU", "GPU, not run" or "calibrated" (two small sizes were run). `margin` is
    the share of the budget that was left free. `unseen` names what the trace could not see. `samples`: how
    many samples the dataset has, where the workload was made with one; of several ranks the smallest one.
    """

    kind: Literal["prediction"] = "prediction"
    schema_version: int = SCHEMA_VERSION
    batch_size: int
    budget_bytes: int
    peak_bytes: int
    peak_phase: str
    peak_operation: str = ""
    margin: float
    based_on: Literal["no GPU", "GPU, not run", "calibrated"]
    card: str
    card_measured: bool = False
    answers: tuple[Answer, ...] = ()
    curve: tuple[Point, ...] = ()
    knees: tuple[float, ...] = ()
    unseen: tuple[str, ...] = ()
    check: float = 0.0
    trace_sizes: tuple[int, ...] = ()
    trials: tuple[Trial, ...] = ()
    trace_s: float = 0.0
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""
    samples: int | None = None

    def peak_bytes_at(self, size: float) -> int:
        """Predicted peak of live bytes at any size: between the points of `curve`, and on from the last."""
        if type(size) not in (int, float) or not 0 < size < math.inf:
            raise ValueError(f"size must be a positive number, not {size!r}")
        points = self.curve
        if not points:
            raise ValueError("this prediction has no curve")
        if len(points) == 1:
            return points[0].peak_bytes
        index = next((i for i in range(1, len(points) - 1) if points[i].size >= size), len(points) - 1)
        one, two = points[index - 1], points[index]
        slope = (two.peak_bytes - one.peak_bytes) / (two.size - one.size)
        return round(one.peak_bytes + slope * (size - one.size))

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        share = f"{self.margin:.1%} left free" if self.margin else "no margin"
        if self.batch_size == 0:
            return (
                f"not even a batch of 1 fits in {format_bytes(self.budget_bytes)} on {self.card} "
                f"({self.based_on}, {share})"
            )
        return (
            f"batch size {self.batch_size} on {self.card}, predicted peak {format_bytes(self.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)} in {self.peak_phase}; {self.based_on}, {share}; "
            f"{self.elapsed_s:.1f} s{self._reason}{few_samples(self.batch_size, self.samples)}"
        )

    @property
    def _reason(self) -> str:
        reason = self.answers[0].reason if self.answers else ""
        return f"; {reason}" if reason else ""

    def __str__(self) -> str:
        table = text_table(ANSWER_COLUMNS, self._rows()) + "\n" if len(self.answers) > 1 else ""
        notes = "".join(f"\nnot seen: {one}" for one in self.unseen)
        return f"{table}{self.summary}{notes}"

    def _repr_html_(self) -> str:
        from batchfit._charts.figures import Memory, as_cell, memory_chart

        table = html_table(ANSWER_COLUMNS, self._rows(), caption=self.summary)
        return table + as_cell(memory_chart(Memory(predictions=(("", self),))))

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                format_bytes(one.budget_bytes),
                str(one.batch_size) if one.batch_size else "none",
                format_bytes(one.peak_bytes) if one.batch_size else "-",
                f"{one.peak_bytes / one.budget_bytes:.1%}" if one.batch_size else "-",
            )
            for one in self.answers
        ]


class Holder(Result):
    """What holds a part of the peak: a kind of memory, a module, or a source line."""

    name: str
    peak_bytes: int
    share: float
    count: int = 1  # blocks
    kinds: dict[str, int] = Field(default_factory=dict)  # its bytes by kind
    repeats: int = 1  # alike modules that share a row ("transformer.h.*")
    operations: tuple[str, ...] = ()  # those that made the most of it, the most first
    parts: tuple[Holder, ...] = ()  # what it consists of, where that says more


class WhatIf(Result):
    """One change, and the largest batch with it: traced, not guessed."""

    change: str  # "activation checkpointing of each of 12 GPT2Block"
    how: str  # what to write
    largest_before: int | None  # None where no budget is known
    largest_after: int | None
    peak_bytes_before: int
    peak_bytes_after: int
    cost: str = ""  # what it costs besides ("one more forward pass")

    @property
    def gain(self) -> float:
        """How many times as many samples; without a budget, how many times less memory.

        Where not even one sample fits as things are, it is one more than the number that then does: any is a
        gain.
        """
        if self.largest_before is None or self.largest_after is None:
            return self.peak_bytes_before / max(self.peak_bytes_after, 1)
        return self.largest_after / self.largest_before if self.largest_before else 1.0 + self.largest_after


class Moment(Result):
    """Live bytes at one moment of a step, by kind."""

    at: int  # the number of the event in the step
    phase: str
    kinds: dict[str, int]


class MemoryExplanation(Result):
    """What `explain_memory` answers: what holds the peak of a step, and what would change it."""

    kind: Literal["memory"] = "memory"
    schema_version: int = SCHEMA_VERSION
    batch_size: int
    budget_bytes: int | None
    largest: int | None  # the largest batch within the budget, as things are
    peak_bytes: int
    reserved_bytes: int
    peak_phase: str
    peak_operation: str
    peak_source: str
    card: str
    based_on: str
    kinds: tuple[Holder, ...]
    modules: tuple[Holder, ...]
    lines: tuple[Holder, ...]
    what_ifs: tuple[WhatIf, ...]
    timeline: tuple[Moment, ...] = ()
    unseen: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        return headline(self)

    def __str__(self) -> str:
        return as_text(memory_lines(self))

    def _repr_html_(self) -> str:
        # A notebook has room: the same screen, wider, in letters of one width.
        from batchfit._charts.figures import as_cell, timeline_chart

        text = as_text(memory_lines(self, width=100))
        return f"<pre style='line-height:1.2'>{html.escape(text)}</pre>{as_cell(timeline_chart(self))}"
