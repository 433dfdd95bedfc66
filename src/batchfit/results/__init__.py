"""What batchfit answers: frozen values that print as a table and travel as JSON.

Rules: a field's name carries its unit (`peak_bytes`, `elapsed_s`); a file carries its schema version
and is readable by later versions; a file that cannot be read says which field and why. This is the one place
to import results from: each verb's stand in a module of their own (`results._fit`, `results._memory`,
`results._check`, `results._throughput`, `results._sweep`, `results._run`), on what `results._base` says about
all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

from batchfit._charts.tables import html_table, text_table
from batchfit._units import format_bytes
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._check import MemoryChange, MemoryCheck
from batchfit.results._fit import REASONS, TRIAL_COLUMNS, FitResult, Outcome, Trial, trial_row
from batchfit.results._memory import (
    ANSWER_COLUMNS,
    Answer,
    Holder,
    MemoryExplanation,
    Moment,
    Point,
    Prediction,
    RankPeak,
    WhatIf,
)
from batchfit.results._oom import (
    LastStep,
    MemoryGrowth,
    OomCause,
    OomExplanation,
    RankMemory,
    SettingReplay,
)
from batchfit.results._plan import Plan, PlanCell, PlanColumn, PlanRow, PlanRun
from batchfit.results._run import ProgramRun, ProgramStart
from batchfit.results._sweep import SkippedConfiguration, SweepRecord, SweepResult
from batchfit.results._throughput import (
    Accumulation,
    Bottleneck,
    BottleneckKind,
    ThroughputPoint,
    ThroughputProfile,
)

__all__ = [
    "ANSWER_COLUMNS",
    "REASONS",
    "SCHEMA_VERSION",
    "TRIAL_COLUMNS",
    "Accumulation",
    "Answer",
    "Bottleneck",
    "BottleneckKind",
    "FitResult",
    "Holder",
    "LastStep",
    "MemoryChange",
    "MemoryCheck",
    "MemoryExplanation",
    "MemoryGrowth",
    "Moment",
    "OomCause",
    "OomExplanation",
    "Outcome",
    "Plan",
    "PlanCell",
    "PlanColumn",
    "PlanRow",
    "PlanRun",
    "Point",
    "Prediction",
    "ProgramRun",
    "ProgramStart",
    "RankMemory",
    "RankPeak",
    "Result",
    "SettingReplay",
    "SkippedConfiguration",
    "StepReport",
    "SweepRecord",
    "SweepResult",
    "ThroughputPoint",
    "ThroughputProfile",
    "Trial",
    "WhatIf",
    "html_table",
    "text_table",
    "trial_row",
]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one call of `Microbatcher.backward` or `backward_cached` did.

    Attributes:
        loss: loss of the full batch, a detached tensor on the device: reading it forces a synchronization.
        microbatch_sizes: samples of each microbatch of the pass that counted.
        retries: OOM retries of this call.
        peak_bytes: peak of live bytes when a size of this shape first ran, remembered after; None without a
            reading.
        skipped: the batch had no weight: nothing was run, and no gradient changed.
        outputs: what `fn` returned beside its losses, detached, joined in the batch's order; None without
            any.
    """

    loss: Any
    microbatch_sizes: tuple[int, ...]
    retries: int = 0
    peak_bytes: int | None = None
    skipped: bool = False
    outputs: Any = None

    def __str__(self) -> str:
        """One line; reads the loss."""
        if self.skipped:
            return "skipped: the batch has no weight"
        runs = [f"{len(list(run))} x {size}" for size, run in groupby(self.microbatch_sizes)]
        parts = [f"loss {float(self.loss):.4g}", f"microbatches {' + '.join(runs)}"]
        if self.retries:
            parts.append(f"{self.retries} OOM {'retries' if self.retries > 1 else 'retry'}")
        if self.peak_bytes is not None:
            parts.append(f"peak {format_bytes(self.peak_bytes)}")
        return ", ".join(parts)
