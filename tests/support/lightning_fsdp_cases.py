"""What real ranks run in the tests of batchfit.integrations.lightning under FSDP2, all of it in one launch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning_cases as cases
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import batchfit.integrations.lightning as ours


class Sharded(cases.Net):
    """Each layer is sharded, and the whole; only some ranks are out of memory above `limit` samples."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(dropout=0.0, width=8, limit=limit)
        self.double()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def fit(rank: int, *names: str, limit: int | None = None, **options: Any) -> tuple[Any, Any, Any]:
    """A module, its Trainer and its callbacks after `fit`."""
    world_size = dist.get_world_size()
    os.environ.update(
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",
    )
    warnings.simplefilter("ignore")
    made = {
        "find": lambda: ours.BatchSizeFinder(tolerance=0.0, soak_steps=4),
        "oom": lambda: ours.OomProofTraining(timeout_s=30.0),
        "split": lambda: ours.OomProofTraining(timeout_s=30.0, microbatch_size=7),
        "schedule": lambda: ours.BatchSizeSchedule("0:32 1:80"),
    }
    callbacks = [made[name]() for name in names]
    strategy = ModelParallelStrategy(
        data_parallel_size=options.pop("shards", world_size),
        tensor_parallel_size=options.pop("tensor_parallel", 1),
        save_distributed_checkpoint=options.pop("distributed", True),
        process_group_backend="gloo",
    )
    strategy.cluster_environment = TorchElasticEnvironment()
    size, val, resume = options.pop("size", 64), options.pop("val", None), options.pop("resume", None)
    run = cases.trainer(*callbacks, strategy=strategy, devices=world_size, **options)
    module = cases.seeded(lambda: Sharded(limit))
    loader = DataLoader(cases.data(320, dtype=torch.float64), batch_size=size)
    evaluated = None if val is None else DataLoader(loader.dataset, batch_size=val)
    run.fit(module, loader, evaluated, ckpt_path=resume)
    return module, run, callbacks


def numbers(module: Any) -> list[float]:
    parts: list[Any] = list(module.parameters())
    return torch.cat([one.full_tensor().detach().flatten() for one in parts]).tolist()


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All cases one after the other: most of their time is that of importing Lightning."""
    found: dict[str, Any] = {}
    less = None if rank == 0 else 40  # samples that rank 1 can take
    for accumulate in (1, 2):
        options = {"accumulate_grad_batches": accumulate, "max_epochs": 2, "gradient_clip_val": 0.1}
        module, run, _ = fit(rank, **options)
        found[f"plain {accumulate}"] = [numbers(module), run.global_step]
        module, run, (proof,) = fit(rank, "oom", limit=less, **options)
        found[f"oom {accumulate}"] = [numbers(module), run.global_step, proof.retries]
        module, run, (proof,) = fit(rank, "split", **options)
        found[f"split {accumulate}"] = [numbers(module), run.global_step, proof.retries]
    return found
