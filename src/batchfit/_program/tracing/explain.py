"""The explanation of a program's memory: what is live at the highest moment of its steps.

Rule: what-ifs that change the program need a workload; those of the allocator need its trace alone.
"""

from __future__ import annotations

import time
from dataclasses import replace

from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.trace.oracle import MARGINS, Oracle, allocator_caveats, allocator_rules, default_budget
from batchfit._engine.trace.trace import STEPS
from batchfit._engine.trace.workload import trace_source
from batchfit._explain.explain import explanation
from batchfit._explain.pure.holders import Peak
from batchfit._explain.pure.options import ExplainOptions
from batchfit._explain.replayed_changes import LEAST_GAIN
from batchfit._program.tracing.traces import ProgramTraces, lines_from_what_there_is, whole_batches
from batchfit.results import MemoryExplanation, WhatIf

_NO_CHANGES = "what-ifs that change the program (checkpointing, bf16) need a workload"


def explain_program(traces: ProgramTraces, options: ExplainOptions) -> MemoryExplanation:
    """Explain the memory of a program's step, for the GPU of its traces."""
    begun = time.perf_counter()
    size = options.batch_size
    budget_bytes = options.budget_bytes or default_budget(options.target, None)
    with whole_batches(size):
        at_size = traces.trace(size, steps=STEPS)
    settings = allocator_rules()
    largest: int | None = None
    found: tuple[WhatIf, ...] = ()
    if budget_bytes is not None:
        traced = lines_from_what_there_is(traces, lambda: trace_source(traces, budget_bytes=budget_bytes))
        capacity = round(budget_bytes * (1 - MARGINS["no GPU"]))
        largest = _largest(Oracle(traced, settings, (0.0, 0.0)), capacity)
        if options.what_if and not settings.expandable_segments:
            growing = replace(settings, expandable_segments=True)
            after = _largest(Oracle(traced, growing, (0.0, 0.0)), capacity)
            found = _expandable(at_size, largest, after)
    notes = (*allocator_caveats(settings), *((_NO_CHANGES,) if options.what_if else ()))
    return explanation(
        at_size,
        budget_bytes=budget_bytes,
        largest=largest,
        settings=settings,
        rules=traces.rules,
        basis="no GPU",
        classes=traces.classes,
        outside="outside modules",
        what_ifs=found,
        caveats=(*traces.caveats(), *notes),
        begun=begun,
    )


def _largest(oracle: Oracle, capacity_bytes: int) -> int:
    found = oracle.largest(capacity_bytes, None)
    return 0 if found is None else found.size


def _expandable(at_size: Trace, before: int, after: int) -> tuple[WhatIf, ...]:
    if after < LEAST_GAIN * before:
        return ()
    peak_bytes = Peak.of(at_size).size
    change = WhatIf(
        change="expandable segments",
        how="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        largest_before=before,
        largest_after=after,
        peak_bytes_before=peak_bytes,
        peak_bytes_after=peak_bytes,
        cost="next to nothing",
    )
    return (change,)
