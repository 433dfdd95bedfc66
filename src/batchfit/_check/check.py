"""`check_memory`: the peak of a step against its baseline, and which lines changed it.

Rules:
- The peak is that of a trace, for a GPU by its name: the same on every machine, with a GPU or without.
- With other versions of torch (or batchfit, or a library whose lines hold memory) than the baseline's, a
  change may be theirs. Where the baseline's program can be traced again with these versions
  (`old_program.py`), their part is subtracted; else it is a caveat.
- The user's objects are as they were afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

import batchfit
from batchfit._check.baseline_file import put_record, records_in
from batchfit._check.optimizer_lines import OptimizerLines
from batchfit._check.pure.answer import answered
from batchfit._check.pure.options import BASELINE, NAME, CheckOptions
from batchfit._check.pure.record import PeakRecord, TracedRecord, other_versions
from batchfit._check.record import project_root, record_of
from batchfit._engine.allocator.gpus import DEFAULT, Gpu, gpu_named
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.oracle import Oracle, allocator_caveats, allocator_rules, margin_of
from batchfit._engine.trace.trace import trace_caveats
from batchfit._engine.trace.workload import rules_for, trace_workload
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._explain.shortage import for_error
from batchfit.errors import NothingFitsError, ResultFileError
from batchfit.results import MemoryCheck
from batchfit.workload import Workload, as_workload

_OR_UPDATE = ": update=True (--update, pytest --memory-update) writes another"
# The record of the baseline's program with the versions that are here, or why there is none.
Retrace = Callable[[PeakRecord], PeakRecord | str]


def check_memory(
    workload: Workload | Callable[[int], object],
    *,
    baseline: str | Path | None = BASELINE,
    name: str = NAME,
    update: bool = False,
    batch_size: int | None = None,
    budget: int | str | None = None,
    max_increase: int | str | None = None,
    max_peak: int | str | None = None,
    gpu: str | None = None,
) -> MemoryCheck:
    """Check whether a step needs more memory than its baseline, and say which lines changed it.

    ```python
    batchfit.check_memory(workload, batch_size=8, update=True)   # once: writes memory.json
    check = batchfit.check_memory(workload)                      # after a change of the program
    print(check.passed, check)
    ```

    Args:
        workload: what one step is. Its state must be declared: the trace works on fakes of it.
        baseline: the file with the baselines; it belongs into git. None: compared with nothing, for
            `max_peak` alone.
        name: the name of this workload in that file.
        update: write the baseline, in place of failing where it is exceeded.
        batch_size: the size to check, per process. Default: the baseline's.
        budget: bytes ("24GiB"): check the largest size within them, too.
        max_increase: how much more than the baseline is allowed: a share ("2%", the default) or bytes
            ("500MiB"). The same share is allowed of the largest size.
        max_peak: the highest peak that is allowed, with or without a baseline.
        gpu: the GPU whose choice of kernels counts. Default: the baseline's, or an H200. It need not be here.

    Returns:
        A `MemoryCheck`: whether it passed, and what changed by source line, module and kind.

    Raises:
        UntraceableError: the step cannot be traced; names the operation and the line.
        ResultFileError: the baseline cannot be read, or has no record of that name.
        NothingFitsError: not even one sample fits the budget.
    """
    options = CheckOptions(
        baseline=baseline,
        update=update,
        batch_size=batch_size,
        budget=budget,
        max_increase=max_increase,
        max_peak=max_peak,
        gpu=gpu,
    )
    return check_with(workload, options, name=name)


def check_with(
    workload: Workload | Callable[[int], object],
    options: CheckOptions,
    *,
    name: str,
    retrace: Retrace | None = None,
    made: OptimizerLines | None = None,
) -> MemoryCheck:
    """Check the memory of a step as the options say; `retrace` traces the baseline's program again.

    `made` has noted the lines that made the optimizers.
    """
    begun = time.perf_counter()
    work = as_workload(workload)
    work._check_by_samples("check_memory")
    before = baseline_of(options, name)
    reach = reach_of(work)
    rules = rules_for(work, gpu_of(options, before), reach)
    notes = list(trace_caveats(reach.parts))
    traced = traced_as(reach, rules, options, before, root_of(options), notes, made)
    return compared(name, options, traced, before, notes, begun=begun, retrace=retrace)


def baseline_of(options: CheckOptions, name: str) -> PeakRecord | None:
    """The record to compare with; None where there is none, or none yet."""
    return None if options.baseline is None else _before(Path(options.baseline), name, options)


def gpu_of(options: CheckOptions, before: PeakRecord | None) -> Gpu:
    """The GPU to trace for."""
    if options.target is not None or before is None:
        return options.target or DEFAULT
    try:
        return gpu_named(before.card)
    except ValueError:
        raise ResultFileError(
            f"{options.baseline}: its gpu is {before.card!r}, which this batchfit does not know. Upgrade "
            "batchfit, or name another: --gpu h200 --update"
        ) from None


def root_of(options: CheckOptions) -> Path:
    """The folder that files are named from."""
    path = options.baseline
    return project_root(Path.cwd() if path is None else Path(path).resolve().parent)


def compared(
    name: str,
    options: CheckOptions,
    traced: TracedRecord,
    before: PeakRecord | None,
    notes: list[str],
    *,
    begun: float,
    retrace: Retrace | None = None,
) -> MemoryCheck:
    """What a record says beside its baseline, which is written where that is asked for."""
    again: PeakRecord | str | None = None
    if before is not None and other_versions(before, traced.record):
        again = "the program of the baseline is not known here" if retrace is None else retrace(before)
    found = answered(name, options, traced, before, again, notes)
    if options.update and options.baseline is not None:
        put_record(Path(options.baseline), name, traced.record)
    return found.model_copy(
        update={
            "elapsed_s": time.perf_counter() - begun,
            "batchfit_version": batchfit.__version__,
            "torch_version": torch.__version__,
        }
    )


def traced_as(
    reach: StepReach,
    rules: CudaRules,
    options: CheckOptions,
    before: PeakRecord | None,
    root: Path,
    notes: list[str],
    made: OptimizerLines | None = None,
) -> TracedRecord:
    """The record of a step at the size that is asked for; what else is to be said goes to `notes`."""
    budget_bytes = options.budget_bytes
    if budget_bytes is None and before is not None and not options.update:
        budget_bytes = before.budget_bytes
    size = options.batch_size or (None if before is None else before.batch_size)
    if budget_bytes is None:
        if size is None:
            raise ValueError("batch_size must be given where there is neither a baseline nor a budget")
        return record_of(reach, rules, size, root, made=made)
    settings = allocator_rules()
    notes += allocator_caveats(settings)
    traced = trace_workload(reach.workload, rules=rules, budget_bytes=budget_bytes, reach=reach)
    capacity = round(budget_bytes * (1 - margin_of(traced, "no GPU")))
    found = Oracle(traced, settings, (0.0, 0.0)).largest(capacity, None)
    if found is None:
        peak = Oracle(traced, settings, (0.0, 0.0)).peak(1)
        why = for_error(
            reach.workload, size=1, budget_bytes=budget_bytes, rules=rules, settings=settings, beside_bytes=0
        )
        raise NothingFitsError(
            1, device=rules.gpu.name, budget_bytes=budget_bytes, peak_bytes=peak, **(why or {})
        )
    return record_of(reach, rules, size or found.size, root, budget=(budget_bytes, found.size), made=made)


def _before(path: Path, name: str, options: CheckOptions) -> PeakRecord | None:
    """The record to compare with; None where there is none yet and one is being written."""
    records = records_in(path)
    before = records.get(name)
    if options.update:
        return before
    if before is None:
        known = f"it has {', '.join(records)}" if records else "there is no such file"
        raise ResultFileError(
            f"{path} has no baseline of {name} ({known}): batchfit check --update (update=True) writes it"
        )
    asked = {"batch_size": options.batch_size, "budget": options.budget_bytes}
    held = {"batch_size": before.batch_size, "budget": before.budget_bytes}
    for keyword, value in asked.items():
        if value is not None and value != held[keyword]:
            raise ValueError(
                f"{keyword} must be {held[keyword]}, as in the baseline, not {value}{_OR_UPDATE}"
            )
    if options.target is not None and options.target.name != before.card:
        raise ValueError(f"gpu must be {before.card}, as in the baseline, not {options.gpu!r}{_OR_UPDATE}")
    return before
