"""Real peaks of FSDP2, DDP and ZeRO 1 on the GPUs of one machine, beside what one process predicts.

    torchrun --nproc-per-node 2 benchmarks/shards_gpu.py --shard fsdp2 --out fsdp2.json

Rules: each rank trains a GPT of 350M parameters for a few steps and reads torch's own figures; rank 0
predicts in a process of its own, without the GPU (`--predict`). Without GPUs, `--device cpu --small` shows
that the script runs; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import batchfit

STEPS, LENGTH = 6, 512


def model_of(small: bool) -> nn.Module:
    wide, deep = (128, 2) if small else (1024, 28)
    layer = nn.TransformerEncoderLayer(wide, wide // 64, 4 * wide, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, deep, enable_nested_tensor=False)


def workload(model: Any, optimizer: Any, *, small: bool, device: str) -> batchfit.Workload:
    wide = 128 if small else 1024
    return batchfit.training(
        model,
        optimizer,
        lambda model, batch: model(batch).square().mean(),
        lambda n: torch.zeros(n, 64 if small else LENGTH, wide, device=device),
        autocast=torch.bfloat16,
    )


def spread(model: Any, shard: str, device: str, ranks: int) -> tuple[Any, Any]:
    """The model and its optimizer as a program would write it."""
    if shard == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = DistributedDataParallel(model)
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    if shard == "ddp":
        model = DistributedDataParallel(model)
        return model, torch.optim.AdamW(model.parameters())
    how: dict[str, Any] = {"mesh": init_device_mesh(device, (ranks,))}
    how["reshard_after_forward"] = not shard.startswith("zero2")
    if shard.endswith("bf16"):
        how["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return model, torch.optim.AdamW(model.parameters())


def measured(options: Any) -> dict[str, int]:
    """The peaks of this rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    with torch.device(options.device):
        model = model_of(options.small)
    model, optimizer = spread(model, options.shard, options.device, ranks)
    work = workload(model, optimizer, small=options.small, device=options.device)
    for _ in range(STEPS):
        work.step(options.batch_size)
    if options.device == "cpu":
        return {"rank": rank}
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {
        "rank": rank,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "beside_bytes": total - free - reserved,  # context, NCCL
    }


def predicted(options: Any) -> dict[str, Any]:
    """What one process predicts, without a GPU."""
    model = model_of(options.small)
    work = workload(model, torch.optim.AdamW(model.parameters()), small=options.small, device="cpu")
    why = batchfit.explain_memory(
        work, batch_size=options.batch_size, gpu=options.gpu, ranks=options.ranks, shard=options.shard,
        what_if=False,
    )  # fmt: skip
    kinds = {one.name: one.peak_bytes for one in why.kinds}
    return {"peak_bytes": why.peak_bytes, "reserved_bytes": why.reserved_bytes, "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard", default="fsdp2")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if options.predict:
        print(json.dumps(predicted(options)))
        return
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, measured(options))
    if dist.get_rank() == 0:
        own = [word for word in sys.argv[1:] if word != "--predict"]
        command = [sys.executable, __file__, *own, "--predict", "--ranks", str(len(found))]
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in launcher}
        environment["CUDA_VISIBLE_DEVICES"] = ""
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answer = json.loads(done.stdout.splitlines()[-1])
        page = {"shard": options.shard, "torch": torch.__version__, "ranks": found, "predicted": answer}
        options.out.write_text(json.dumps(page, indent=2))
        print(options.out.read_text())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
