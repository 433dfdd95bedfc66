"""One setting on every GPU of a plan: traced once for GPUs whose kernels are alike, replayed for each.

Rules:
- GPUs are alike where torch takes the same attention kernels there; what cuBLAS keeps is put in for each.
  Staging buffers of reductions are those of the GPU that was traced (kilobytes).
- A cell is `predict_batch_size`'s answer, with the same margin and the same allocator.
- Several GPUs are DDP: each holds the whole model, and buckets with a copy of every gradient; or FSDP2, where
  a row says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, final

import torch
from torch import nn

from batchfit._engine.allocator.footprint import Footprint, Trace
from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.oracle import Oracle, Oracles, allocator_rules, margin_of
from batchfit._engine.trace.trace import STEPS, TraceSource, WorkloadTraces, trace
from batchfit._engine.trace.workload import TracedWorkload, trace_source
from batchfit._engine.workload.reachable import StepReach
from batchfit._plan.pure.options import PlanGpu
from batchfit._plan.pure.speed import Cell, StepCost

_BLAS = "cuBLAS"


class PlanSource(TraceSource, Protocol):
    """Traces for one GPU, which can go on for another with the same kernels."""

    def for_rules(self, rules: CudaRules) -> PlanSource:
        """The same for that GPU."""


@final
@dataclass(frozen=True, slots=True)
class ChangedTraces:
    """Traces of a workload with changes that last as long as each trace."""

    plain: WorkloadTraces
    changes: tuple[Any, ...] = ()

    @property
    def rules(self) -> CudaRules:
        return self.plain.rules

    @property
    def steps(self) -> int:
        return self.plain.steps

    @property
    def may_retry(self) -> bool:
        return self.plain.may_retry

    @property
    def samples(self) -> int | None:
        return self.plain.samples

    @property
    def made_of(self) -> str:
        return self.plain.made_of

    @property
    def most_size(self) -> None:
        """As of the plain ones."""

    def for_rules(self, rules: CudaRules) -> Self:
        return replace(self, plain=replace(self.plain, rules=rules))

    def trace(self, size: int, *, steps: int = STEPS, limit_s: float | None = None) -> Trace:
        reach = self.plain.reach
        return trace(
            reach.workload,
            size,
            rules=self.rules,
            steps=steps,
            changes=self.changes,
            limit_s=limit_s,
            reach=reach,
        )

    def caveats(self) -> tuple[str, ...]:
        return self.plain.caveats()


def cells_of(
    source_for: Callable[[CudaRules], PlanSource],
    columns: Sequence[PlanGpu],
    *,
    margin: float,
    flops_per_sample: float,
    bucket_bytes: int,
) -> tuple[dict[int, Cell], tuple[str, ...]]:
    """The cell of each column, by its index, and what the traces could not see."""
    found: dict[int, Cell] = {}
    notes: dict[str, None] = {}
    for alike in _alike(columns):
        largest = max((columns[at].gpu for at in alike), key=lambda gpu: gpu.usable_bytes)
        source = source_for(CudaRules(largest, torch.device("cpu", 1)))
        traced = trace_source(source, budget_bytes=largest.usable_bytes)
        notes |= dict.fromkeys(traced.caveats)
        for at in alike:
            beside = bucket_bytes if columns[at].count > 1 else 0
            found[at] = _cell(traced, columns[at].gpu, margin, flops_per_sample, beside)
    return found, tuple(notes)


def _alike(columns: Sequence[PlanGpu]) -> Iterator[list[int]]:
    """Indices of columns whose kernels make the same blocks."""
    groups: dict[tuple[bool, bool], list[int]] = defaultdict(list)
    for at, column in enumerate(columns):
        gpu = column.gpu
        groups[gpu.prefers_cudnn_attention, gpu.capability >= (8, 0)].append(at)
    yield from groups.values()


def bucket_bytes(reach: StepReach) -> int:
    """What DDP's reducer holds: as much as all gradients."""
    models = [part for part in reach.parts if isinstance(part, nn.Module)]
    parameters = {id(one): one for model in models for one in model.parameters() if one.requires_grad}
    return sum(one.numel() * one.element_size() for one in parameters.values())


def _cell(
    traced: TracedWorkload, gpu: Gpu, margin: float, flops_per_sample: float, beside_bytes: int
) -> Cell:
    own = traced if gpu == traced.rules.gpu else _for(traced, gpu)
    share = max(margin, margin_of(own, "no GPU"))
    oracles = Oracles([Oracle(own, allocator_rules(), (float(beside_bytes), 0.0))])
    found = oracles.largest(gpu.usable_bytes, share, None)
    if found is None:
        return Cell(0, oracles.of(1).peak(1))
    footprint = own.at(found.size)
    return Cell(found.size, found.peak_allocated_bytes, StepCost.of(footprint, flops_per_sample))


def _for(traced: TracedWorkload, gpu: Gpu) -> TracedWorkload:
    """The same traces with what cuBLAS keeps on another GPU of the kind."""
    before = traced.rules.gpu

    def moved(footprint: Footprint) -> Footprint:
        sizes = {float(before.blas_bytes): float(gpu.blas_bytes)}
        fixed = tuple(
            sizes.get(size, size) if origin.operation == _BLAS else size
            for size, origin in zip(footprint.fixed, footprint.origins, strict=True)
        )
        return replace(footprint, fixed=fixed)

    source: Any = traced.source
    return replace(
        traced,
        source=source.for_rules(CudaRules(gpu, traced.rules.device)),
        footprint=None if traced.footprint is None else moved(traced.footprint),
        single={size: moved(one) for size, one in traced.single.items()},
    )
