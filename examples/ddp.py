"""Several ranks with DistributedDataParallel, unequal batches, and a batch that does not fit on one of them.

    torchrun --nproc-per-node 2 examples/ddp.py

Each rank gives its local batch to `Microbatcher`; gradients are those of one process with the joined batch. A
rank that runs out of memory does its batch again in smaller pieces while the others wait for its vote, and no
rank hangs. On a CPU every rank has a virtual memory of its own, and rank 1 has less than the others.
"""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import batchfit

FEATURES, CLASSES, BATCH, STEPS = 64, 10, 2048, 10


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 512), nn.GELU(), nn.Linear(512, CLASSES))


def local_batch(rank: int, step: int) -> dict[str, torch.Tensor] | None:
    """Ranks have unequal batches, and rank 1 has none left in the last step."""
    if rank == 1 and step == STEPS - 1:
        return None
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(BATCH - 256 * rank, FEATURES, generator=generator)
    return {"x": x, "y": x[:, :CLASSES].argmax(dim=1)}


def train(rank: int) -> list[Any]:
    """Train on this rank; the reports of all steps."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) if cuda else 0) if cuda else None
    inner = make_model().to(device or "cpu")
    model = DistributedDataParallel(inner, device_ids=None if device is None else [device])
    optimizer = torch.optim.AdamW(inner.parameters(), lr=3e-3)

    def loss_fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(micro["x"]), micro["y"])

    reports = []
    mb = batchfit.Microbatcher(model, timeout_s=120)
    limit = contextlib.nullcontext() if cuda else batchfit.virtual_memory("24MiB" if rank != 1 else "8MiB")
    with limit:
        for step in range(STEPS):
            optimizer.zero_grad()
            reports.append(mb.backward(loss_fn, local_batch(rank, step)))
            mb.step(optimizer, clip_norm=1.0)
    # The same parameters everywhere: the largest difference to rank 0's.
    apart = torch.zeros(1)
    for parameter in inner.parameters():
        first = parameter.detach().cpu().clone()
        dist.broadcast(first, 0)
        apart = torch.maximum(apart, (first - parameter.detach().cpu()).abs().max())
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    assert apart.item() == 0, "ranks have become different"
    return reports


def main() -> None:
    dist.init_process_group("gloo" if not torch.cuda.is_available() else "cpu:gloo,cuda:nccl")
    rank = dist.get_rank()
    reports = train(rank)
    for turn in range(dist.get_world_size()):
        dist.barrier()
        if rank != turn:
            continue
        for step in (0, 1, STEPS - 1):
            report = reports[step]
            sizes = " + ".join(map(str, report.microbatch_sizes)) or "no samples"
            line = f"rank {rank}, step {step}: {sizes}, out of memory {report.retries} times"
            print(f"{line}, loss {float(report.loss):.3f}" if report.microbatch_sizes else line, flush=True)
    dist.barrier()  # or a rank that is done takes its connection from under one that still prints
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
