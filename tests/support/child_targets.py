"""Factories that a child process, or torchrun, can import: a DDP model whose rank 1 goes wrong above 2."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from parallel_models import make as make_world

import batchfit
from batchfit.testing import simulated_oom


def make() -> batchfit.Workload:
    how = os.environ.get("BATCHFIT_TEST_HOW", "oom")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    if how == "load" and rank == 1:
        raise ValueError("no such column")
    world = make_world("fsdp2" if how == "fsdp2" else "ddp")

    def step(n: int) -> None:
        if n > 2 and rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hangs":
                time.sleep(1000)
            if how == "raises":
                raise ValueError("no such column")
            raise simulated_oom()
        world.step(n)

    return batchfit.Workload(step, state=[world.model, world.optimizer])
