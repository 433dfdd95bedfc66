"""`plan --apply`: runs the planned step on this machine, and compares its peak with the planned one.

Rules:
- Only the step as it is can be run: other rows are changes that the user has not made.
- The GPU that is here must be the planned one: the same capability, as many multiprocessors, as much memory.
  Anything else is refused before a step is run.
- `--gpu cpu=2GiB` stands for this machine's CPU under virtual memory, and only without a GPU.
"""

from __future__ import annotations

from typing import Final

import torch

from batchfit._engine.trace.workload import gpu_of
from batchfit._find.find import find_batch_size
from batchfit._plan.pure.options import PlanGpu, PlanOptions
from batchfit._profile.profile import profile_throughput
from batchfit._units import format_bytes
from batchfit.results import Plan, PlanRun
from batchfit.workload import Workload

CPU: Final = "cpu"
_ON_CPU: Final = (
    "run on a CPU under virtual memory, without cuBLAS' workspaces and with other kernels: only a GPU says "
    "what is true there"
)
_SAME_MEMORY: Final = 0.06  # what a driver and a context take differs


class OtherGpuError(ValueError):
    """This machine has not the GPU that was planned."""


def check_machine(options: PlanOptions) -> PlanGpu:
    """The one GPU that is planned and here; an error says what is here instead."""
    if len(options.columns) != 1 or options.columns[0].count != 1:
        raise OtherGpuError("--apply needs one GPU, the one that is here, such as --gpu h100")
    (column,) = options.columns
    planned = column.gpu
    if not torch.cuda.is_available():
        if planned.name == CPU:
            return column
        raise OtherGpuError(
            f"--apply needs the planned GPU ({planned.name}), and this machine has none; --gpu cpu=2GiB runs "
            "the step on its CPU, under virtual memory"
        )
    here = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    like = (here.capability, here.multiprocessors) == (planned.capability, planned.multiprocessors)
    enough = here.usable_bytes >= (1 - _SAME_MEMORY) * planned.usable_bytes
    if not like or not enough:
        raise OtherGpuError(
            f"--apply needs the planned GPU ({planned.name}, {format_bytes(planned.usable_bytes)}), and this "
            f"machine has a {here.name} ({format_bytes(here.usable_bytes)})"
        )
    return column


def applied(workload: Workload, plan: Plan, options: PlanOptions) -> Plan:
    """The plan with what the step as it is really took here."""
    column = check_machine(options)
    row = plan.rows[0]
    if not row.cells or not row.cells[0].batch_size:
        return plan  # nothing fits, as the table says
    cell, budget = row.cells[0], column.gpu.usable_bytes
    fit = find_batch_size(workload, budget=budget)
    profile = profile_throughput(workload, budget=budget, largest=fit.batch_size, diagnose=False)
    best = next((one for one in profile.points if one.size == profile.recommended), profile.best)
    caveats = (_ON_CPU,) if column.gpu.name == CPU else ()
    return plan.model_copy(
        update={
            "unseen": (*plan.unseen, *caveats),
            "run": PlanRun(
                setting=row.setting,
                gpu=column.gpu.name,
                device=fit.device,
                planned_batch_size=cell.batch_size,
                planned_peak_bytes=cell.peak_bytes,
                batch_size=fit.batch_size,
                peak_bytes=fit.peak_bytes,
                fastest=profile.recommended,
                samples_per_s=best.samples_per_s,
            ),
        }
    )
