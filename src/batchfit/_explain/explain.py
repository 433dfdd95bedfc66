"""`explain_memory`: what holds the peak of a step, and what would change it.

Rules:
- The answer is read off a trace with fake tensors at the size that was asked for: what is live at its highest
  moment, by kind, module and source line. Each list adds up to the peak.
- What-ifs come from traces of the changed step (`replayed_changes.py`).
- The user's objects are as they were afterwards; what cannot be traced is an `UntraceableError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

import batchfit
from batchfit._engine.allocator.caching import AllocatorSettings
from batchfit._engine.allocator.footprint import Footprint, Trace
from batchfit._engine.allocator.replay import simulate
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.sharding.sharding import Sharding, on_ranks, rules_on_ranks
from batchfit._engine.trace.oracle import Basis, default_budget
from batchfit._engine.trace.trace import module_classes, trace_caveats
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._explain.pure.holders import Peak, PeakPart, by_kind, by_line, by_module, timeline
from batchfit._explain.pure.options import ExplainOptions
from batchfit._explain.replayed_changes import Study
from batchfit.results import Holder, MemoryExplanation, Moment, WhatIf
from batchfit.workload import Workload, as_workload


def explain_memory(
    workload: Workload | Callable[[int], object],
    *,
    batch_size: int,
    budget: int | str | None = None,
    gpu: str | None = None,
    what_if: bool = True,
    ranks: int | None = None,
    shard: str | None = None,
    offload: bool = False,
) -> MemoryExplanation:
    """Explain the memory of a step at its highest moment, and what would change it.

    ```python
    why = batchfit.explain_memory(workload, batch_size=32, budget="80GiB")
    print(why)
    print(why.modules[0].name, why.what_ifs[0].change, why.what_ifs[0].largest_after)
    ```

    Args:
        workload: what one step is. Its state must be declared: the trace works on fakes of it.
        batch_size: the size to explain.
        budget: bytes the program may use ("80GiB"), for the largest batch as things are and with each change.
            Default: what is free on the GPU, or all of `gpu`; without any of them, what-ifs are compared by
            their peak alone.
        gpu: the GPU to explain for ("h100", "rtx4090"): its memory and its choice of kernels.
        what_if: also trace what checkpointing, bf16 and the like would change.
        ranks: how many processes (GPUs) the program is to run on: one of them is explained, without a GPU.
            Default: 1, or those of `fake_ranks`.
        shard: how a model that the program does not wrap itself is spread over them, as in
            `predict_batch_size`.
        offload: FSDP2 keeps shards, their gradients and the optimizer's state on the host.

    Returns:
        A `MemoryExplanation` with kinds, modules and lines that hold the peak, and the gain of each change.

    Raises:
        UntraceableError: the step cannot be traced; names the operation and the line.
    """
    keywords = {**locals()}  # every argument, by its name
    return explain_with(keywords.pop("workload"), ExplainOptions(**keywords))


def explain_with(workload: Workload | Callable[[int], object], options: ExplainOptions) -> MemoryExplanation:
    """Explain the memory of a step as the options say."""
    begun = time.perf_counter()
    work = as_workload(workload)
    work._check_by_samples("explain_memory")
    reach = reach_of(work)
    with on_ranks(reach, options.ranks, options.layout) as sharding:
        return _explained(work, reach, sharding, options, begun)


def _explained(
    work: Workload, reach: StepReach, sharding: Sharding, options: ExplainOptions, begun: float
) -> MemoryExplanation:
    target = options.target
    several = sharding.ranks > 1
    rules = rules_on_ranks(reach, target) if several else rules_for(work, target, reach)
    here = rules.device.type == "cuda"
    budget_bytes = options.budget_bytes
    if budget_bytes is None:
        budget_bytes = default_budget(target, work if here else None)
    basis: Basis = "GPU, not run" if here else "no GPU"
    study = Study(reach, rules, options.batch_size, budget_bytes, basis, sharding.changes)
    now = study.base
    found = study.what_ifs() if options.what_if else ()
    return explanation(
        now.at_size,
        budget_bytes=budget_bytes,
        largest=now.largest,
        settings=study.settings,
        rules=rules,
        basis=basis,
        classes=module_classes(reach.parts),
        outside=_outside(work),
        what_ifs=tuple(found),
        caveats=(*trace_caveats(reach.parts), *sharding.notes, *study.notes),
        begun=begun,
    )


def explanation(
    at_size: Trace,
    *,
    budget_bytes: int | None,
    largest: int | None,
    settings: AllocatorSettings,
    rules: CudaRules,
    basis: Basis,
    classes: dict[str, str],
    outside: str,
    what_ifs: tuple[WhatIf, ...],
    caveats: tuple[str, ...],
    begun: float,
) -> MemoryExplanation:
    """The explanation of a trace; `outside` names what no module made."""
    peak = Peak.of(at_size)
    held = _reserved(Footprint.of(at_size), at_size.size, budget_bytes, settings)
    return MemoryExplanation(
        batch_size=at_size.size,
        budget_bytes=budget_bytes,
        largest=largest,
        peak_bytes=peak.size,
        reserved_bytes=held,
        peak_phase=peak.origin.phase,
        peak_operation=peak.origin.operation,
        peak_source=peak.origin.source,
        card=rules.gpu.name,
        based_on=basis,
        kinds=_holders(by_kind(peak), peak.size),
        modules=_holders(by_module(peak, classes, outside=outside), peak.size),
        lines=_holders(by_line(peak), peak.size),
        what_ifs=what_ifs,
        timeline=tuple(Moment(at=at, phase=phase, kinds=kinds) for at, phase, kinds in timeline(at_size)),
        unseen=(*caveats, *rules.gpu.caveats),
        elapsed_s=time.perf_counter() - begun,
        batchfit_version=batchfit.__version__,
        torch_version=torch.__version__,
    )


def _holders(held: Sequence[PeakPart], peak_bytes: int) -> tuple[Holder, ...]:
    return tuple(
        Holder(
            name=one.name,
            peak_bytes=one.size,
            share=one.size / max(peak_bytes, 1),
            count=one.blocks,
            kinds=one.kinds,
            repeats=one.repeats,
            operations=one.operations,
            parts=_holders(one.parts, peak_bytes),
        )
        for one in held
        if one.size
    )


def _reserved(footprint: Footprint, size: int, budget_bytes: int | None, rules: AllocatorSettings) -> int:
    """What the allocator takes for a size: where it fits, what it takes within the budget.

    It takes more where there is more: without a capacity, unused segments are never released.
    """
    free = simulate(footprint, size, capacity_bytes=None, rules=rules).peak_reserved_bytes
    if budget_bytes is None or free <= budget_bytes:
        return free
    held = simulate(footprint, size, capacity_bytes=budget_bytes, rules=rules)
    return held.peak_reserved_bytes if held.fits else free


def _outside(workload: Workload) -> str:
    return "loss" if workload.kind == "training" else "outside modules"
