"""What a profile answers: throughput by size, the size to use, the bottleneck.

Rules: every figure has its interval or says that it is not steady; a bottleneck has its evidence in it.
"""

from __future__ import annotations

import html
from typing import Literal

from pydantic import Field

from batchfit._charts.text_charts import as_text
from batchfit._charts.throughput_page import throughput_lines
from batchfit.results._base import SCHEMA_VERSION, Result


class ThroughputPoint(Result):
    """What was measured at one batch size per process.

    Attributes:
        size: samples of one forward and backward in one process.
        step_s: median seconds of a step, once the times had settled.
        step_s_low: lower end of its 95 % confidence interval.
        step_s_high: upper end of that interval.
        samples_per_s: samples per second of all ranks together.
        tokens_per_s: tokens per second of all ranks together; None where the tokens of a sample are not
            known.
        peak_bytes: peak of live bytes; None without a reading.
        reserved_bytes: peak of what the caching allocator reserved; None without a reading.
        alloc_retries: how often the allocator released its cache and tried again.
        flops_per_s: floating-point operations per second; None where they cannot be counted.
        flops_share: that as a share of the device's peak for the precision used; None where it is not known.
        steps_timed: steps that the median is of.
        steps_warmed: steps before them.
        steady: the interval is as narrow as was asked for, and the times show no trend.
        first_step_s: seconds of the first step at this size, which pays for plans, compilation and
            autotuning.
        host_s: seconds that the host took to issue a step; None on a CPU.
        recompilations: how often torch.compile compiled at this size.
        gain: throughput over that at half the size: 2 is a doubling that pays in full, 1 one that pays
            nothing. Interpolated where half the size was not timed; tables then say "~".
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
    """One thing that limits throughput, with its evidence and what to change.

    "compute-bound" is what a healthy program is once the batch is large enough.

    Attributes:
        kind: "data-bound", "host-bound", "memory-bound", "shape-bound", "sync-bound" or "compute-bound".
        share: the part of a step's time that goes there; None where it is no part of the time.
        evidence: the figures that say so.
        advice: what to change.
        size: the batch size per process at which it was seen; None where it holds for all.
    """

    kind: BottleneckKind
    share: float | None = None
    evidence: str
    advice: str
    size: int | None = None  # the batch size at which it was seen


class Accumulation(Result):
    """How a target batch that does not fit is made of microbatches. It adds no throughput.

    Attributes:
        target_batch_size: the global batch that was asked for.
        microbatch_size: samples of one forward and backward in one process.
        microbatches: how many per optimizer step and rank; the last one may be smaller.
        samples_per_s: throughput at that microbatch size; the target batch runs no faster.
        advice: what to write.
    """

    target_batch_size: int
    microbatch_size: int
    microbatches: int  # per optimizer step and rank; the last one may be smaller
    samples_per_s: float  # what the microbatch runs at: the target batch runs no faster
    advice: str


class ThroughputProfile(Result):
    """What `profile_throughput` answers: throughput by batch size, the size to use, and the bottleneck.

    Attributes:
        kind: "throughput": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        points: what was measured, by size.
        recommended: the smallest measured size per process within `within` of the best throughput.
        largest: the largest size that was measured.
        limit: about the largest size that memory allows; None where that is not known.
        within: how far from the best throughput the recommended size may be, as a share.
        reason: why that size is recommended, as a sentence.
        diagnosis: what limits throughput there, the most important first.
        accumulation: how to reach the target batch; None where none was asked for, or it fits.
        too_large: sizes that were out of memory.
        stopped_because: "measured", or what ended the profile early.
        budget_bytes: bytes that the program could use.
        device: where it ran ("cuda:0", "cpu").
        device_model: what the device is ("NVIDIA H200"); empty on a CPU.
        world_size: ranks that ran together.
        notes: caveats, each as a sentence.
        elapsed_s: seconds that it took.
        batchfit_version: version of batchfit that measured.
        torch_version: version of torch that ran.
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
        """The point measured at that size.

        Args:
            size: a batch size per process that was measured.

        Returns:
            Its point.

        Raises:
            ValueError: that size was not measured.
        """
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
    def doubt(self) -> str:
        """Why one can have little confidence in the answer; empty where its times are known well enough.

        They are where those of the recommended size and of the best one vary by at most `within`.
        """
        here = next((point for point in self.points if point.size == self.recommended), None)
        if here is None:  # a file that was changed by hand
            return ""
        best = self.best
        widest = max((here, best), key=lambda point: point.spread)
        if widest.spread > self.within:
            return f"the times at {widest.size} vary by {widest.spread:.0%}"
        if here.samples_per_s < (1 - self.within) * best.samples_per_s:
            return f"{best.size} was timed as faster by more than {self.within:.0%}"
        return ""

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        found = ", ".join(one.kind for one in self.diagnosis)
        text = f"{self.reason}{f' ({found})' if found else ''}"
        return f"{text}; low confidence: {self.doubt}" if self.doubt else text

    def __str__(self) -> str:
        return as_text(throughput_lines(self))

    def _repr_html_(self) -> str:
        from batchfit._charts.figures import as_cell, throughput_chart

        text = as_text(throughput_lines(self, width=100))
        picture = as_cell(throughput_chart([("", self)]))
        return f"<pre style='line-height:1.2'>{html.escape(text)}</pre>{picture}"

    def _sizes(self) -> str:
        return ", ".join(str(point.size) for point in self.points)
