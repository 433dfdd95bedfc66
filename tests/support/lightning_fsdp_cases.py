"""What real ranks run in the tests of Lightning's callbacks under FSDP2, all of it in one launch."""

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
from torchmetrics import SumMetric

import batchfit.integrations.lightning as ours
from batchfit.errors import BatchfitError


class Sharded(cases.Net):
    """Each layer is sharded, and the whole; only some ranks are out of memory above `limit` samples."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(dropout=0.0, width=8, limit=limit)
        self.seen = SumMetric()
        self.double()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.update(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


class Single(Sharded):
    """In single precision."""

    def __init__(self, limit: int | None) -> None:
        super().__init__(limit)
        self.float()


class NoMean(Sharded):
    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self.log("odd", self.loss(batch).sqrt() * len(batch[0]) ** 0.5)


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
        "schedule": lambda: ours.BatchSizeSchedule("0:32 1:80", lr="sqrt"),
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
    kind, tunes = options.pop("kind", Sharded), options.pop("tunes", False)
    run = cases.trainer(*callbacks, strategy=strategy, devices=world_size, **options)
    module = cases.seeded(lambda: kind(limit))
    dtype = torch.float32 if kind is Single else torch.float64
    loader = DataLoader(cases.data(320, dtype=dtype), batch_size=size)
    if tunes:
        return module, run, ours.Tuner(run).scale_batch_size(module, loader, tolerance=0.0, soak_steps=4)
    evaluated = None if val is None else DataLoader(loader.dataset, batch_size=val)
    run.fit(module, loader, evaluated, ckpt_path=resume)
    return module, run, callbacks


def numbers(module: Any) -> list[float]:
    parts: list[Any] = list(module.parameters())
    return torch.cat([one.full_tensor().detach().flatten() for one in parts]).tolist()


def train(rank: int, less: int | None) -> dict[str, Any]:
    """Plain, with an OOM on some ranks, and with a forced split."""
    found: dict[str, Any] = {}
    options = {"accumulate_grad_batches": 2, "max_epochs": 2, "gradient_clip_val": 0.1}
    for name, names, limit in (("plain", (), None), ("oom", ("oom",), less), ("split", ("split",), None)):
        module, run, callbacks = fit(rank, *names, limit=limit, **options)
        retries = callbacks[0].retries if callbacks else 0
        found[name] = [numbers(module), run.global_step, retries, float(module.seen.sum_value)]
    for name in ((), ("split",)):
        module, *_ = fit(rank, *name, kind=Single, **{**options, "max_epochs": 1})
        found["/".join(("single", *name))] = numbers(module)
    return found


def resume(rank: int, less: int | None, folder: Path) -> dict[str, Any]:
    """A checkpoint after one of two epochs, of each kind, with OOMs, a schedule and its learning rates."""
    found: dict[str, Any] = {}
    for name in ("folder", "file"):
        given = {"limit": less, "distributed": name == "folder", "size": 16}
        module, run, _ = fit(rank, "oom", "schedule", max_epochs=3, **given)
        whole = [numbers(module), run.global_step]
        _, run, _ = fit(rank, "oom", "schedule", max_epochs=2, **given)
        run.save_checkpoint(folder / name)
        module, run, _ = fit(rank, "oom", "schedule", max_epochs=3, resume=folder / name, **given)
        found[name] = [whole, [numbers(module), run.global_step]]
    return found


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All cases one after the other: most of their time is that of importing Lightning."""
    is_less = rank % 2 == 1
    less = 40 if is_less else None  # samples that some ranks can take
    found = {**train(rank, less), **resume(rank, 10 if is_less else None, Path(folder))}
    module, run, (finder,) = fit(rank, "find", limit=60 if is_less else 100)
    found["find"] = [finder.optimal_batch_size, module.sizes, run.global_step, numbers(module)]
    for name, names, limit in (("whole", (), None), ("cut", ("oom",), less)):
        module, run, _ = fit(rank, *names, limit=limit, size=32, val=64, max_epochs=2)
        found[f"validation {name}"] = [float(run.callback_metrics["val_loss"]), *numbers(module)]
    module, run, size = fit(rank, limit=60 if is_less else 100, tunes=True)
    found["tuner"] = [size, run.global_step]
    try:
        fit(rank, "oom", limit=less, size=32, val=64, kind=NoMean)
    except BatchfitError as error:
        found["no mean"] = str(error)
    try:
        fit(rank, "oom", shards=1, tensor_parallel=dist.get_world_size())
    except BatchfitError as error:
        found["tensor parallel"] = str(error)
    return found
