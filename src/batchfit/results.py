"""What batchfit answers: frozen values that print as a table and travel as JSON.

Rules: a field's name carries its unit (`peak_bytes`, `elapsed_s`); a file carries its schema version
and is readable by later versions; a file that cannot be read says which field and why.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchfit._decide.units import format_bytes
from batchfit._draw import as_text
from batchfit._screen import headline, memory_lines
from batchfit._throughput_screen import throughput_lines
from batchfit.errors import ResultFileError

Outcome = Literal["fits", "oom", "too_large", "killed", "timeout"]

SCHEMA_VERSION = 1

REASONS = {
    "within_tolerance": "the memory left is too little for a size worth trying",
    "predicted": "it is the largest size by the prediction, and it ran",
    "bracketed": "the next larger size was tried and does not fit",
    "max_size": "max_size was reached",
    "largest": "no batch is larger than this, and the memory has not ended",
    "attempts": "the strategy's attempts are used up",
    "strategy": "the strategy tries no larger size",
    "max_trials": "max_trials was reached",
    "time_limit": "time_limit_s was reached",
    "interrupted": "the search was interrupted",
    "stored": "a stored answer was confirmed by one trial",
}


class Result(BaseModel):
    """Base of all results: JSON both ways."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    def to_json(self, *, indent: int | None = 2) -> str:
        """This result as JSON text; a whole result carries its schema version."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The result that `to_json` wrote, by this version of batchfit or an earlier one."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ResultFileError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ResultFileError(f"a {cls.__name__} must be a JSON object, not {type(data).__name__}")
        version = data.get("schema_version", SCHEMA_VERSION)
        if not isinstance(version, int) or version > SCHEMA_VERSION:
            raise ResultFileError(
                f"schema_version is {version!r}, and this batchfit reads up to {SCHEMA_VERSION}. "
                "Upgrade batchfit to read this file."
            )
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"])) or cls.__name__
            raise ResultFileError(
                f"field {field!r} of {cls.__name__}: {first['msg']} (found {first['input']!r:.80})"
            ) from None


class Trial(Result):
    """One measured attempt at one size.

    `peak_bytes` is the peak of live tensor bytes, `reserved_bytes` that of what the caching allocator
    took from the device, `split_bytes` that of cached remainders it could not have given back, and
    `held_bytes` what was live between steps, gradients apart; None where there is no reading.
    `settled_retries` counts allocation retries in the second half of a soak. `step_s` is the median of
    the steps after the first, synchronised. `phase` is the phase that failed ("batch", "forward",
    "backward", "optimizer"), where the workload names its phases.
    """

    size: int = Field(ge=1)
    outcome: Outcome
    steps_run: int = Field(ge=0)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    held_bytes: int | None = None
    alloc_retries: int = 0
    settled_retries: int = 0
    step_s: float | None = None
    elapsed_s: float = 0.0
    soak: bool = False
    ambiguous: bool = False
    phase: str | None = None
    message: str = ""

    @property
    def fits(self) -> bool:
        """The trial ended without running out of memory."""
        return self.outcome == "fits"

    @property
    def sustained(self) -> bool:
        """It was a soak, it fits, and no allocation was retried once it had settled."""
        return self.fits and self.soak and self.settled_retries == 0

    @property
    def verdict(self) -> str:
        """The outcome in two words at most, as tables show it."""
        if self.fits and self.soak:
            return "sustained" if self.sustained else "retries"
        if self.soak and self.outcome == "oom":
            return f"oom, step {self.steps_run + 1}"
        return self.outcome

    def __str__(self) -> str:
        return text_table(TRIAL_COLUMNS, [trial_row(self, None)])


class FitResult(Result):
    """What `find_batch_size` answers: the largest size of one forward/backward in one process.

    `from_store`: the size was found `stored_age_s` seconds ago and confirmed now by one trial.
    `shrunk_from_bytes`: the budget when the search began, where other programs took memory of the device
    meanwhile; `budget_bytes` is then what was left, and the answer is for that.
    """

    kind: Literal["fit"] = "fit"
    schema_version: int = SCHEMA_VERSION
    batch_size: int = Field(ge=1)
    trials: tuple[Trial, ...]
    survived_steps: int
    stopped_because: str
    budget_bytes: int
    peak_bytes: int | None
    device: str
    strategy: str
    elapsed_s: float
    trials_resumed: int = 0
    batchfit_version: str = ""
    torch_version: str = ""
    from_store: bool = False
    stored_age_s: float | None = None
    shrunk_from_bytes: int | None = None

    @property
    def sustained(self) -> bool:
        """The size also survived the soak, with no allocation retry once settled."""
        return any(trial.sustained for trial in self.trials if trial.size == self.batch_size)

    @property
    def reason(self) -> str:
        """Why the search stopped, as a sentence."""
        return REASONS.get(self.stopped_because, self.stopped_because)

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes is not None else ""
        return (
            f"batch size {self.batch_size} on {self.device}{peak} of {format_bytes(self.budget_bytes)}, "
            f"survived {self.survived_steps} steps; {len(self.trials)} trials in {self.elapsed_s:.1f} s"
            f"{self.resumed}; "
            f"stopped because {self.reason}"
        )

    @property
    def resumed(self) -> str:
        """How many of the trials were taken from the file of an earlier run; empty where none were."""
        if not self.trials_resumed:
            return ""
        count = "all" if self.trials_resumed == len(self.trials) else str(self.trials_resumed)
        return f" ({count} of them in an earlier run)"

    def __str__(self) -> str:
        rows = [trial_row(trial, self.budget_bytes) for trial in self.trials]
        return f"{text_table(TRIAL_COLUMNS, rows)}\n{self.summary}"

    def _repr_html_(self) -> str:
        rows = [trial_row(trial, self.budget_bytes) for trial in self.trials]
        from batchfit._pictures import Memory, as_cell, memory_chart

        table = html_table(TRIAL_COLUMNS, rows, caption=self.summary)
        return table + as_cell(memory_chart(Memory(fits=(("", self),))))


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Microbatcher.backward` did.

    `loss` is the loss of the full batch as a detached tensor on the device: reading it waits for the device.
    `retries` counts tries that ran out of memory. `peak_bytes` is the most that was live when a size of this
    shape ran for the first time (measured then, remembered after); None where there is no reading. `skipped`:
    the batch had no weight, so nothing was run and no gradient changed.
    """

    loss: Any
    microbatch_sizes: tuple[int, ...]
    retries: int = 0
    peak_bytes: int | None = None
    skipped: bool = False

    def __str__(self) -> str:
        """One line; reads the loss."""
        if self.skipped:
            return "skipped: the batch has no weight"
        runs = [f"{len(list(run))} x {size}" for size, run in groupby(self.microbatch_sizes)]
        parts = [f"loss {float(self.loss):.4g}", f"microbatches {' + '.join(runs)}"]
        if self.retries:
            parts.append(f"ran out {self.retries} time{'s' if self.retries > 1 else ''}")
        if self.peak_bytes is not None:
            parts.append(f"peak {format_bytes(self.peak_bytes)}")
        return ", ".join(parts)


class Point(Result):
    """Predicted memory at one size, without a limit: live blocks, and what the allocator would take."""

    size: int
    peak_bytes: int
    reserved_bytes: int


class Answer(Result):
    """The predicted largest size under one budget; 0 where not even one sample fits."""

    budget_bytes: int
    batch_size: int
    peak_bytes: int
    name: str = ""  # the card's, where the budget is a card's


class Prediction(Result):
    """What `predict_batch_size` answers: the largest size, and memory at any size. Nothing was run.

    `based_on` says how: "no GPU", "GPU, not run" or "calibrated" (two small sizes were run). `margin` is
    the share of the budget that was left free. `unseen` names what the trace could not see.
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

    def peak_bytes_at(self, size: float) -> int:
        """Predicted peak of live bytes at any size: between the points of `curve`, and on from the last."""
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
            f"{self.elapsed_s:.1f} s"
        )

    def __str__(self) -> str:
        table = text_table(ANSWER_COLUMNS, self._rows()) + "\n" if len(self.answers) > 1 else ""
        notes = "".join(f"\nnot seen: {one}" for one in self.unseen)
        return f"{table}{self.summary}{notes}"

    def _repr_html_(self) -> str:
        from batchfit._pictures import Memory, as_cell, memory_chart

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
    kinds: dict[str, int] = {}  # its bytes by kind
    repeats: int = 1  # alike modules that are told together ("transformer.h.*")
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
        """How many times as many samples; without a budget, how many times less memory."""
        if self.largest_before is None or self.largest_after is None:
            return self.peak_bytes_before / max(self.peak_bytes_after, 1)
        return self.largest_after / max(self.largest_before, 1)


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
        from batchfit._pictures import as_cell, timeline_chart

        text = as_text(memory_lines(self, width=100))
        return f"<pre style='line-height:1.2'>{html.escape(text)}</pre>{as_cell(timeline_chart(self))}"


class ThroughputPoint(Result):
    """What was measured at one size.

    `step_s` is the median of `steps_timed` steps once the times had settled, and `step_s_low` to
    `step_s_high` its 95 % confidence interval. `steady`: that interval is as narrow as was asked for, and the
    times show no trend. `first_step_s` is the first step at this size, which pays for plans, compilation and
    autotuning. `host_s` is how long the host took to issue a step (None on a CPU, where host and device are
    one). `gain` is how many times as many samples per second as at half the size, read off the points
    measured: 2 is a doubling that pays in full, 1 one that pays nothing. `flops_share` is the share of the
    device's peak for the precision used. With several ranks `samples_per_s` is that of all of them.
    """

    size: int = Field(ge=1)
    step_s: float = Field(gt=0)
    step_s_low: float
    step_s_high: float
    samples_per_s: float
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    alloc_retries: int = 0
    flops_per_s: float | None = None
    flops_share: float | None = None
    steps_timed: int = 0
    steps_warmed: int = 0
    steady: bool = True
    first_step_s: float = 0.0
    host_s: float | None = None
    recompilations: int = 0
    gain: float | None = None

    @property
    def spread(self) -> float:
        """Half the width of the confidence interval, as a share of the step time."""
        return (self.step_s_high - self.step_s_low) / 2 / self.step_s


BottleneckKind = Literal[
    "data-bound", "host-bound", "memory-bound", "shape-bound", "sync-bound", "compute-bound"
]


class Bottleneck(Result):
    """One thing that limits throughput, with the figures that say so and what to change.

    `share` is the part of a step's time that goes there, where it is a part of the time. "compute-bound" is
    what a healthy program is once the batch is large enough: the device is busy with arithmetic.
    """

    kind: BottleneckKind
    share: float | None = None
    evidence: str
    advice: str
    size: int | None = None  # the batch size at which it was seen


class Accumulation(Result):
    """How a target batch that does not fit is made of microbatches. It adds no throughput."""

    target_batch_size: int
    microbatch_size: int
    microbatches: int  # per optimizer step and rank; the last one may be smaller
    samples_per_s: float  # what the microbatch runs at: the target batch runs no faster
    advice: str


class ThroughputProfile(Result):
    """What `profile_throughput` answers: throughput by size, the size to use, and what holds it back.

    `recommended` is the smallest measured size within `within` of the best throughput, `largest` the largest
    size that was measured and `limit` about the largest that memory allows, where that is known. `too_large`
    are sizes that ran out of memory.
    """

    kind: Literal["throughput"] = "throughput"
    schema_version: int = SCHEMA_VERSION
    points: tuple[ThroughputPoint, ...]
    recommended: int
    largest: int
    limit: int | None = None
    within: float
    reason: str
    diagnosis: tuple[Bottleneck, ...] = ()
    accumulation: Accumulation | None = None
    too_large: tuple[int, ...] = ()
    stopped_because: str = "measured"
    budget_bytes: int
    device: str
    device_model: str = ""  # "NVIDIA H200"; empty on a CPU
    world_size: int = 1
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    batchfit_version: str = ""
    torch_version: str = ""

    def at(self, size: int) -> ThroughputPoint:
        """The point measured at that size."""
        for point in self.points:
            if point.size == size:
                return point
        raise ValueError(f"size must be one that was measured ({self._sizes()}), not {size!r}")

    @property
    def best(self) -> ThroughputPoint:
        """The point of the highest throughput."""
        return max(self.points, key=lambda point: point.samples_per_s)

    @property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """What is worth changing: the diagnosis without "compute-bound"."""
        return tuple(one for one in self.diagnosis if one.kind != "compute-bound")

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        found = ", ".join(one.kind for one in self.diagnosis)
        return f"{self.reason}{f' ({found})' if found else ''}"

    def __str__(self) -> str:
        return as_text(throughput_lines(self))

    def _repr_html_(self) -> str:
        from batchfit._pictures import as_cell, throughput_chart

        text = as_text(throughput_lines(self, width=100))
        picture = as_cell(throughput_chart([("", self)]))
        return f"<pre style='line-height:1.2'>{html.escape(text)}</pre>{picture}"

    def _sizes(self) -> str:
        return ", ".join(str(point.size) for point in self.points)


ANSWER_COLUMNS = ("budget", "batch size", "peak", "of budget")
TRIAL_COLUMNS = ("size", "outcome", "steps", "peak", "reserved", "of budget", "s/step")


def trial_row(trial: Trial, budget_bytes: int | None) -> tuple[str, ...]:
    """A trial as the cells of one table row (shared by text, HTML and the live progress)."""

    def amount(count: int | None) -> str:
        return "-" if count is None else format_bytes(count)

    used = trial.reserved_bytes if trial.reserved_bytes is not None else trial.peak_bytes
    share = "-" if used is None or not budget_bytes else f"{used / budget_bytes:.1%}"
    return (
        str(trial.size),
        trial.verdict,
        str(trial.steps_run),
        amount(trial.peak_bytes),
        amount(trial.reserved_bytes),
        share,
        "-" if trial.step_s is None else f"{trial.step_s:.3g}",
    )


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns under their names."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (columns, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str) -> str:
    """The same table for a notebook."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption>"
        f"<thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"
    )


if TYPE_CHECKING:
    from batchfit._sweep_result import SweepRecord as SweepRecord
    from batchfit._sweep_result import SweepResult as SweepResult
else:

    def __getattr__(name: str) -> object:
        # These are results too; their module is made of what stands above, so it is loaded when asked for.
        if name in ("SweepRecord", "SweepResult"):
            from batchfit import _sweep_result

            return getattr(_sweep_result, name)
        raise AttributeError(f"module 'batchfit.results' has no attribute {name!r}")
