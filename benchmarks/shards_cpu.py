"""The peak of each rank in real FSDP2, DDP and ZeRO 1 on gloo processes, beside what one process predicts.

    python benchmarks/shards_cpu.py run --out FILE.json [--limit-s 240] [--model NAME] [--ranks N]
    python benchmarks/shards_cpu.py page FILE.json --to FILE.md

Rules: models and ways are those of `tests/support/shard_cases.py`, which the tests compare too. All ways of
a model train in one launch of that many processes under `virtual_memory`; the peak is the highest of all
ranks, of the steps after the third. One process predicts each way with a fake process group. A model on a
number of ranks is kept as soon as it is there, and a second call goes on with the others.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

Results = dict[str, Any]
MODELS = ("mlp", "gpt2", "llama", "vit", "resnet")
RANKS = (2, 4)
GRIDS = ("fsdp2-int", "hsdp", "hsdp-bf16")  # for four ranks
LEFT_OUT = {("resnet", "fsdp2-bf16"), ("resnet", "hsdp-bf16")}  # BatchNorm refuses bf16 on a CPU
PACKAGES = ("batchfit", "torch", "transformers")
MEANS = {
    "fsdp2": "`fully_shard` of each block and of the model",
    "fsdp2-root": "`fully_shard` of the model alone",
    "fsdp2-pairs": "`fully_shard` of two blocks at a time",
    "fsdp2-keep": "`reshard_after_forward=False` (ZeRO 2)",
    "fsdp2-int": "`reshard_after_forward=2`",
    "fsdp2-bf16": "`MixedPrecisionPolicy(bfloat16, float32)`",
    "fsdp2-prefetch": "explicit prefetch of two blocks, forward and backward",
    "fsdp2-checkpoint": "activation checkpointing of each block inside",
    "fsdp2-accumulate": "two microbatches, `set_requires_gradient_sync(False)` for the first",
    "fsdp2-offload": "`CPUOffloadPolicy`: what is on the device, in forward and backward",
    "hsdp": "a mesh of 2 x 2: shards and copies",
    "hsdp-bf16": "the same with mixed precision",
    "ddp": "`DistributedDataParallel`",
    "ddp-views": "`gradient_as_bucket_view=True`",
    "ddp-small": "`bucket_cap_mb=1`",
    "ddp-static": "`static_graph=True`",
    "ddp-checkpoint": "activation checkpointing of each block inside",
    "ddp-accumulate": "two microbatches, `no_sync()` for the first",
    "zero1": "DDP with `ZeroRedundancyOptimizer`",
}


def ways_of(model: str, ranks: int) -> list[str]:
    """The ways that a model can be had in on so many ranks."""
    fitting = [way for way in MEANS if ranks == 4 or way not in GRIDS]
    return [way for way in fitting if (model, way) not in LEFT_OUT]


def compared(model: str, ranks: int) -> list[Results]:
    """Each way of a model on so many ranks, measured and predicted."""
    from launch import run_ranks, values
    from shard_cases import predicted_here, truth

    chosen = ways_of(model, ranks)
    preload = "" if model == "mlp" else "transformers.modeling_utils"
    cases = [(model, way) for way in chosen]
    measured = values(run_ranks(truth, world_size=ranks, args=(cases,), timeout_s=1500, preload=preload))
    found = []
    for at, way in enumerate(chosen):
        expected = predicted_here(model, way, ranks)
        found.append(
            {
                "way": way,
                "peak_bytes": max(of_rank[at][0] for of_rank in measured),
                "held_bytes": max(of_rank[at][1] for of_rank in measured),
                "predicted_peak_bytes": expected.peak,
                "predicted_held_bytes": expected.held,
            }
        )
    return found


def run(out: Path, models: list[str], counts: list[int], limit_s: float | None) -> bool:
    """Compare what is not there yet; whether all is."""
    found: Results = json.loads(out.read_text()) if out.exists() else {}
    found["command"] = f"python benchmarks/shards_cpu.py run --out results/{out.name}"
    found["python"] = platform.python_version()
    versions = {one: importlib.metadata.version(one) for one in PACKAGES}
    if found.setdefault("versions", versions) != versions:
        raise SystemExit(f"{out} was begun with {found['versions']}, and this is {versions}")
    found["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = found.setdefault("compared", {})
    begun = time.monotonic()
    for ranks in counts:
        for model in models:
            name = f"{model} x{ranks}"
            if name in kept:
                continue
            if limit_s is not None and time.monotonic() - begun > limit_s:
                return False
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
                kept[name] = compared(model, ranks)
            keep(out, found)
            print(f"{name}: {max(abs(error(one)) for one in kept[name]):.3%} at most", flush=True)
    return True


def error(row: Results) -> float:
    """How far the predicted peak is off."""
    return float(row["predicted_peak_bytes"] / row["peak_bytes"] - 1)


def held_error(row: Results) -> float:
    """How far what is held between steps is off; nothing may be held on the device."""
    return abs(float(row["predicted_held_bytes"] - row["held_bytes"])) / max(1.0, row["held_bytes"])


def page(found: Results) -> str:
    """The page, from what is stored."""
    names = [
        f"{model} x{ranks}" for model in MODELS for ranks in RANKS if f"{model} x{ranks}" in found["compared"]
    ]
    rows = {name: {row["way"]: row for row in found["compared"][name]} for name in names}
    every = [row for of_name in rows.values() for row in of_name.values()]
    errors = [abs(error(row)) for row in every]
    packages = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        "# Sharded predictions beside real ranks on a CPU",
        "",
        f"{len(errors)} comparisons: the peak of a rank that one process predicts is at most "
        f"{max(errors):.2%} off, and {sorted(errors)[len(errors) // 2]:.3%} at the median. Kernels are this "
        "CPU's in both; what CUDA does otherwise (streams, NCCL) is not seen here.",
        "",
        "What is held between steps is off by at most "
        f"{max(map(held_error, every)):.2%} (of offloaded models, that is the host's).",
        "",
        "A column is a model on so many gloo processes under `virtual_memory`; a cell is how far the "
        "predicted peak is off the highest measured one of all ranks. `-`: only for four ranks, or bf16 "
        "beside BatchNorm, which a CPU refuses.",
        "",
        f"| way | | {' | '.join(names)} |",
        "|---|---|" + "---:|" * len(names),
    ]
    for way, text in MEANS.items():
        cells = (f"{error(rows[name][way]):+.3%}" if way in rows[name] else "-" for name in names)
        lines.append(f"| {way} | {text} | {' | '.join(cells)} |")
    lines += [
        "",
        "With CPU offload, a CPU is host and device at once, and FSDP2 copies nothing between them. In the "
        "real ranks these copies are made as for a GPU, a copy to the host is not counted, and the shards "
        "and the optimizer's state are subtracted; the step of the optimizer, which runs on the host, is "
        "left out. Pinned memory and the overlap of copies with kernels are not seen.",
        "",
        f"Made by `{found['command']}` on {found['date']}; Python {found['python']}, {packages}, 2 CPU cores "
        "shared with other programs (memory does not depend on that).",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--model", action="append", choices=MODELS)
    running.add_argument("--ranks", action="append", type=int, choices=RANKS)
    running.add_argument("--limit-s", type=float, help="begin nothing further after so many seconds")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    done = run(given.out, given.model or list(MODELS), given.ranks or list(RANKS), given.limit_s)
    raise SystemExit(0 if done else 3)


if __name__ == "__main__":
    main()
