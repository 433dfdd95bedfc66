"""The check of a program's memory: its steps as they run on a CPU, against the baseline of its command.

Rules: as in `check_memory`; lines are those of the run itself. A command whose size stands in it
(`--batch-size 8`, no `{}`) is checked as it is, at the samples that its passes have.
"""

from __future__ import annotations

import time
from dataclasses import replace

from batchfit._check.check import baseline_of, compared, gpu_of, root_of
from batchfit._check.pure.options import CheckOptions
from batchfit._check.pure.record import PeakRecord
from batchfit._engine.trace.oracle import MARGINS, Oracle, allocator_caveats, allocator_rules
from batchfit._engine.trace.workload import trace_source
from batchfit._program.tracing.traces import ProgramTraces, lines_from_what_there_is, whole_batches
from batchfit.errors import NothingFitsError
from batchfit.results import MemoryCheck

_NOT_AGAIN = "the program of a command is not traced again"


def check_program(traces: ProgramTraces, options: CheckOptions, *, name: str) -> MemoryCheck:
    """Check the memory of a program; `traces` are of any GPU."""
    begun = time.perf_counter()
    before = baseline_of(options, name)
    traces = traces.for_gpu(gpu_of(options, before))
    fixed = traces.template.is_fixed
    budget_bytes = options.budget_bytes
    if budget_bytes is None and before is not None and not options.update:
        budget_bytes = before.budget_bytes
    for keyword, value in (("batch_size", options.batch_size), ("budget", options.budget)):
        if fixed and value is not None:
            raise ValueError(
                f"{keyword} must be left out for a command with no place for the size, such as {{}}"
            )
    size = options.batch_size or (None if before is None else before.batch_size)
    notes = list(traces.caveats())
    budget = None
    if budget_bytes is not None:
        budget = budget_bytes, _largest(traces, budget_bytes, notes)
        size = size or budget[1]
    if size is None and not fixed:
        raise ValueError("batch_size must be given where there is neither a baseline nor a budget")
    with whole_batches(size):
        traced = traces.recorded_at(None if fixed else size, root_of(options))
    if budget is not None:
        record = replace(traced.record, budget_bytes=budget[0], largest=budget[1])
        traced = replace(traced, record=record)
    return compared(name, options, traced, before, notes, begun=begun, retrace=_not_again)


def _not_again(_: PeakRecord) -> str:
    return _NOT_AGAIN


def _largest(traces: ProgramTraces, budget_bytes: int, notes: list[str]) -> int:
    """The largest size within a budget."""
    settings = allocator_rules()
    notes += allocator_caveats(settings)
    traced = lines_from_what_there_is(traces, lambda: trace_source(traces, budget_bytes=budget_bytes))
    oracle = Oracle(traced, settings, (0.0, 0.0))
    found = oracle.largest(round(budget_bytes * (1 - MARGINS["no GPU"])), None)
    if found is None:
        raise NothingFitsError(
            1, device=traces.gpu.name, budget_bytes=budget_bytes, peak_bytes=oracle.peak(1)
        )
    return found.size
