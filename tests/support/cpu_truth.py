"""The peak of a real step on this CPU, and the one that a trace predicts with this CPU's kernels.

A prediction has two parts: what the step allocates and for how long (the trace), and what CUDA's kernels and
dtypes make of it. A CPU can check the first. So for the time of these traces the second is put aside: torch's
own dispatch and autocast lists stay, kernels take nothing for themselves, and blocks are rounded as
`virtual_memory` rounds them. Under its dispatch mode torch adds no gradient in place, so neither does the
trace.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import batchfit
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.cuda_model import dispatch, quantised_kernels
from batchfit._engine.cuda_model.workspaces import Extra
from batchfit._engine.trace import blocks, recorder
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._engine.virtual_memory.op_sizes import block_bytes

STEPS = 3


def _copy_of_gloo(args: Any, _: Any) -> Extra:
    """Gloo reduces a copy of what it is given; NCCL needs none."""
    return Extra(together=(args[1].numel() * args[1].element_size(),))


GLOO: dict[Any, Any] = {torch.ops.c10d._reduce_scatter_base_.default: _copy_of_gloo}
Make = Callable[[], batchfit.Workload]


class Peaks(NamedTuple):
    """Bytes at the highest moment of a step, and bytes that are held between steps."""

    peak: int
    held: int


@contextlib.contextmanager
def kernels_of_a_cpu() -> Iterator[None]:
    """Inside, a trace without a GPU is one of this CPU under `virtual_memory`."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    with (
        mock.patch.object(dispatch.CudaRules, "_ways", return_value={}),
        mock.patch.object(dispatch.sequences, "LOSSES", {}),
        mock.patch.object(dispatch, "cuda_autocast", return_value=contextlib.nullcontext()),
        mock.patch.object(recorder, "RULES", GLOO),
        mock.patch.object(recorder, "GEMMS", frozenset()),
        mock.patch.object(quantised_kernels, "RULES", {}),
        mock.patch.object(quantised_kernels, "STAND_INS", {}),
        mock.patch.object(quantised_kernels, "way_of_cuda", contextlib.nullcontext),
        mock.patch.object(blocks.InPlace, "written_into", nothing),
    ):
        yield


def predicted(workload: batchfit.Workload, size: int, *, changes: tuple[Any, ...] = ()) -> Peaks:
    """What a trace says of the last of several steps."""
    rules = rules_for(workload, gpu_named("h200"))
    with kernels_of_a_cpu():
        found = trace(workload, size, rules=rules, steps=STEPS, changes=changes)
    return peaks_of(found)


def peaks_of(found: Trace) -> Peaks:
    """The highest moment of a trace's last step, in the blocks that virtual memory counts."""
    sizes = [block_bytes(one) for one in found.sizes]
    begins = found.step_ends[-2]
    now = sum(sizes[event] if event >= 0 else -sizes[~event] for event in found.events[:begins])
    peak = now
    for event in found.events[begins:]:
        now += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, now)
    return Peaks(peak, now)


def measured(make: Make, size: int) -> tuple[batchfit.Workload, Peaks]:
    """The last of several real steps under virtual memory; only what the workload holds is counted."""
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        beside = memory.allocated_bytes
    workload = make()
    gc.collect()
    with batchfit.virtual_memory("64GiB") as memory:
        for step in range(STEPS):
            if step == STEPS - 1:
                memory.reset_peak()
            workload.step(size)
        return workload, Peaks(memory.peak_bytes - beside, memory.allocated_bytes - beside)
