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
from batchfit._charts.text_charts import as_text
from batchfit._units import format_bytes
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._fit import Trial, few_samples

ANSWER_COLUMNS = ("budget", "batch size", "peak", "of budget")


class Point(Result):
    """Predicted memory at one batch size, without a limit.

    Attributes:
        size: samples of one forward and backward.
        peak_bytes: peak of live bytes.
        reserved_bytes: what the caching allocator would reserve.
    """

    size: int
    peak_bytes: int
    reserved_bytes: int


class Answer(Result):
    """The predicted largest batch size under one budget.

    Attributes:
        budget_bytes: the budget.
        batch_size: the largest size per process; 0 where not even one sample fits.
        peak_bytes: predicted peak of live bytes at that size.
        name: the GPU's name, where the budget is a GPU's.
        reason: why no larger size fits, where much of the budget is left; else empty.
    """

    budget_bytes: int
    batch_size: int
    peak_bytes: int
    name: str = ""  # the GPU's, where the budget is a GPU's
    reason: str = ""


class RankPeak(Result):
    """What each rank holds at the predicted peak, by kind of memory.

    Attributes:
        weights_bytes: parameters and buffers; under FSDP2 this rank's shards.
        gradients_bytes: gradients; under FSDP2 this rank's shards of them.
        optimizer_bytes: state of the optimizer.
        activations_bytes: what backward needs of forward.
        communication_bytes: gathered weights, buffers of all-gather and reduce-scatter, DDP's buckets.
        other_bytes: the batch, workspaces of kernels, temporaries.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    communication_bytes: int
    other_bytes: int

    @property
    def summary(self) -> str:
        """The parts that are there, the largest first."""
        named = [(name.removesuffix("_bytes"), size) for name, size in self if size]
        return ", ".join(
            f"{name} {format_bytes(size)}" for name, size in sorted(named, key=lambda one: -one[1])
        )


class Prediction(Result):
    """What `predict_batch_size` answers: the largest batch size, and memory at any size. Nothing was run.

    Attributes:
        kind: "prediction": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        batch_size: the largest size per process under the first budget; 0 where not even one sample fits.
        budget_bytes: the first budget.
        peak_bytes: predicted peak of live bytes at that size.
        peak_phase: the phase of that peak ("forward", "backward", "optimizer", ...).
        peak_operation: the operation at that peak; empty where it is not known.
        margin: the share of the budget that was left free.
        based_on: "no GPU", "GPU, not run", or "calibrated" (two small sizes were run).
        card: the GPU whose kernels were assumed.
        card_measured: whether batchfit's figures for that GPU were measured on one, not taken from its data
            sheet.
        answers: one entry per budget, in the order in which they were given.
        curve: memory at some sizes, for charts and for `peak_bytes_at`.
        knees: sizes from which another moment of the step is the peak.
        unseen: caveats: what the trace could not see, each as a sentence.
        check: how far the fitted lines were from a trace that checks them, as a share of the peak.
        trace_sizes: batch sizes that were traced.
        trials: the small runs of a calibration; empty where nothing was run.
        trace_s: seconds of tracing.
        elapsed_s: seconds of the whole prediction.
        batchfit_version: version of batchfit that predicted.
        torch_version: version of torch that was traced.
        samples: samples in the workload's dataset, of several ranks in the smallest one; None without a
            dataset.
        ranks: processes that the program was predicted for; sizes are those of one of them.
        shard: how the model was spread over them, as it was asked for; empty where the program does it.
        offload: whether shards were kept on the host, as it was asked for.
        per_rank: what each of several ranks holds at the peak; None for a single process.
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
    ranks: int = 1
    shard: str = ""
    offload: bool = False
    per_rank: RankPeak | None = None

    def peak_bytes_at(self, size: float) -> int:
        """Predicted peak of live bytes at any size: between the points of `curve`, and on from the last.

        Args:
            size: a batch size per process; it need not be whole.

        Returns:
            Bytes, between the points of `curve` and along its last line beyond them.

        Raises:
            ValueError: `size` is no positive number, or the prediction has no curve.
        """
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
            f"batch size {self.batch_size}{self._of_ranks} on {self.card}, predicted peak "
            f"{format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} in {self.peak_phase}; "
            f"{self.based_on}, {share}; {self.elapsed_s:.1f} s{self._reason}"
            f"{few_samples(self.batch_size, self.samples)}"
        )

    @property
    def _of_ranks(self) -> str:
        """The global batch, where there are several ranks."""
        if self.ranks == 1:
            return ""
        return f" per GPU (x {self.ranks} ranks = global batch {self.batch_size * self.ranks})"

    @property
    def _reason(self) -> str:
        reason = self.answers[0].reason if self.answers else ""
        return f"; {reason}" if reason else ""

    def __str__(self) -> str:
        table = text_table(ANSWER_COLUMNS, self._rows()) + "\n" if len(self.answers) > 1 else ""
        notes = "".join(f"\ncaveat: {one}" for one in self.unseen)
        parts = f"\nper rank: {self.per_rank.summary}" if self.per_rank is not None else ""
        return f"{table}{self.summary}{parts}{notes}"

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
    """What holds a part of the peak: a kind of memory, a module, or a source line.

    Attributes:
        name: the kind, the module's path, or "file.py:line".
        peak_bytes: bytes that it holds at the peak.
        share: those bytes as a share of the peak.
        count: blocks that these bytes are made of.
        kinds: its bytes by kind ("weights", "gradients", "optimizer", "activations", "batch", "workspaces",
            "temporaries").
        repeats: alike modules that share this entry ("transformer.h.*").
        operations: the operations that made the most of it, the most first.
        parts: what it consists of, where that says more.
    """

    name: str
    peak_bytes: int
    share: float
    count: int = 1  # blocks
    kinds: dict[str, int] = Field(default_factory=dict)  # its bytes by kind
    repeats: int = 1  # alike modules that share a row ("transformer.h.*")
    operations: tuple[str, ...] = ()  # those that made the most of it, the most first
    parts: tuple[Holder, ...] = ()  # what it consists of, where that says more


class WhatIf(Result):
    """One change, and the largest batch with it: traced, not guessed.

    Attributes:
        change: what is changed ("activation checkpointing of each of 12 GPT2Block").
        how: the code to write for it.
        largest_before: the largest batch size per process without it; None where no budget is known.
        largest_after: the largest batch size per process with it; None where no budget is known.
        peak_bytes_before: peak of live bytes without it, at the explained size.
        peak_bytes_after: the same with it.
        cost: what it costs besides ("one more forward pass"); empty where that is nothing.
    """

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
    """Live bytes at one moment of a step, by kind.

    Attributes:
        at: the number of the event in the step.
        phase: the phase it is in.
        kinds: live bytes by kind.
    """

    at: int  # the number of the event in the step
    phase: str
    kinds: dict[str, int]


class MemoryExplanation(Result):
    """What `explain_memory` answers: the memory breakdown at the peak of a step, and what would change it.

    Attributes:
        kind: "memory": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        batch_size: the size per process that is explained.
        budget_bytes: bytes that the program may use; None where none is known.
        largest: the largest size per process within the budget, as things are; None without a budget.
        peak_bytes: peak of live bytes.
        reserved_bytes: what the caching allocator would reserve.
        peak_phase: the phase of the peak.
        peak_operation: the operation at the peak.
        peak_source: its source line.
        card: the GPU whose kernels were assumed.
        based_on: how it was predicted, as in `Prediction.based_on`.
        kinds: the peak by kind of memory ("weights", "gradients", "optimizer", "activations", ...).
        modules: the peak by module, the largest first.
        lines: the peak by source line, the largest first.
        what_ifs: changes that were traced, the largest gain first.
        timeline: live bytes over one step, for a chart.
        unseen: caveats: what the trace could not see, each as a sentence.
        elapsed_s: seconds that it took.
        batchfit_version: version of batchfit that traced.
        torch_version: version of torch that was traced.
    """

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
