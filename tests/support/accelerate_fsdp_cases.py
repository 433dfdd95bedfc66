"""What real ranks run in the tests of Accelerate under FSDP2, all of it in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate_state import join_ranks, reset_accelerate, sharding_on_cpu
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchfit
from batchfit.integrations.accelerate import backward, find_executable_batch_size
from batchfit.testing import simulated_oom, virtual_memory

EPOCHS = 2


def new(
    *, version: int = 2, width: int = 8, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """An Accelerator, and what it has prepared: a model, an optimizer and a loader."""
    reset_accelerate()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy="size_based_wrap", min_num_params=20
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **options)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, width)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(96, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    loader = DataLoader(TensorDataset(data), batch_size=24 // dist.get_world_size())
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(
    rank: int,
    *,
    size: int | None = None,
    fails: bool = False,
    folder: Path | None = None,
    resumes: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Any]:
    """Two batches for each optimizer step; the state after an epoch is saved in `folder`, or loaded."""
    accelerator, model, optimizer, loader = new(gradient_accumulation_steps=2, dtype=dtype)
    mb = batchfit.Microbatcher(model, microbatch_size=size, timeout_s=30)
    retries, fired = 0, []

    def loss(x: torch.Tensor) -> torch.Tensor:
        if fails and rank % 2 == 1 and len(x) > 3 and optimizer.state and not fired:
            fired.append(1)
            model(x)
            raise simulated_oom()
        return (model(x) - x).square().mean()

    if resumes:
        accelerator.load_state(str(folder))
    for epoch in range(resumes, EPOCHS):
        for (x,) in loader:
            with accelerator.accumulate(model):
                if size is None and not fails:
                    accelerator.backward(loss(x))
                else:
                    retries += backward(accelerator, mb, loss, x).retries
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
        if folder is not None and not resumes and epoch == 0:
            accelerator.save_state(str(folder))
    weights = [one.full_tensor().detach().flatten() for one in model.parameters()]
    return {"weights": torch.cat(weights).tolist(), "retries": retries, "fired": len(fired)}


def find(rank: int) -> list[int]:
    """Rank 1 has half of the memory, and only the workload shows it before the training."""
    _, model, optimizer, _ = new(width=64)
    sizes: list[int] = []

    def square(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def make() -> batchfit.Workload:
        x = torch.ones(2, 64, dtype=torch.float64)
        return batchfit.training(model, optimizer, square, x, clip_norm=0.1)

    @find_executable_batch_size(starting_batch_size=4096, workload=make)
    def run(batch_size: int) -> None:
        sizes.append(batch_size)
        for _ in range(2):
            optimizer.zero_grad()
            square(model, torch.ones(batch_size, 64, dtype=torch.float64)).backward()
            optimizer.step()

    with virtual_memory("1MiB" if rank == 1 else "2MiB"):
        run()
    return sizes


def refused() -> str:
    accelerator, *_ = new()
    accelerator.state.fsdp_plugin.fsdp_version = 1
    mb = batchfit.Microbatcher(nn.Linear(2, 2))
    try:
        backward(accelerator, mb, lambda x: x.sum(), torch.ones(2, 2))
    except ValueError as error:
        return str(error)
    return ""


def everything(rank: int, folder: str) -> dict[str, Any]:
    join_ranks(rank, dist.get_world_size())
    with sharding_on_cpu():
        return {
            "plain": train(rank),
            "split": train(rank, size=2, folder=Path(folder)),
            "plain, single": train(rank, dtype=torch.float32),
            "split, single": train(rank, size=2, dtype=torch.float32),
            "resumed": train(rank, size=2, folder=Path(folder), resumes=True),
            "oom": train(rank, fails=True),
            "found": find(rank),
            "fsdp1": refused(),
        }
