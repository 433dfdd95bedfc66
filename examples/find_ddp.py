"""The largest batch of a data-parallel model, found on all ranks together.

    torchrun --nproc-per-node 2 examples/find_ddp.py
    torchrun --nproc-per-node 2 -m batchfit find examples/find_ddp.py:make --budget 64MiB

Every rank runs the same trials, with DDP's collectives. Rank 1 has longer samples here, so it runs out first
and alone; its limit is everyone's, and nobody waits for it. On a CPU the budget is virtual memory.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import batchfit

WIDTH, LENGTH = 64, 32


def join() -> torch.device:
    """This rank's device, with the process group made; once a process."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo")
    return device


def make() -> batchfit.Workload:
    """What one training step is: also for `batchfit find`, and for `isolate=True`."""
    device = join()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    length = LENGTH * (1 + dist.get_rank())

    def make_batch(n: int) -> torch.Tensor:
        return torch.randn(n, length, WIDTH, device=device)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - batch).square().mean()

    return batchfit.training(model, optimizer, loss_fn, make_batch)


def main() -> None:
    """Search, and say what was found: the same on all ranks, told by one."""
    workload = make()
    budget = None if torch.cuda.is_available() else "16MiB"
    fit = batchfit.find_batch_size(workload, budget=budget, soak_steps=5)
    if dist.get_rank() == 0:
        print(fit)
        print(f"a local batch of {fit.batch_size}, a batch of {fit.batch_size * dist.get_world_size()}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
