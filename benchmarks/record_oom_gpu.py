"""`record_oom` on a GPU: what it costs a training step, and what `why` reads of an OOM that it wrote.

    python benchmarks/record_oom_gpu.py run --out record_oom.json      # under a minute on an H200
    python benchmarks/record_oom_gpu.py page record_oom.json --to results/record_oom_h200_202611.md

GPT-2 small (512 tokens, bf16 autocast, AdamW). Cost: blocks of 20 steps with and without, in turn, in one
process; the ratio of each pair. OOM: the same step under a cap of 8 GiB, at a batch that is too large for it,
in a process of its own; then `batchfit why` of the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep

STEPS, PAIRS, SIZES = 20, 8, (1, 16)
CAP_GIB, TOO_MANY = 8, 64
GIB = 2**30


def dies(path: str) -> None:
    """A training step that is out of memory, with `record_oom` on."""
    import torch

    import batchfit
    import zoo

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(CAP_GIB * GIB / total)
    batchfit.record_oom(path)
    workload = zoo.make("gpt2", "bf16", loop="kept")
    for step in (2, TOO_MANY):
        workload.step(step)


def cost(size: int) -> dict[str, Any]:
    import tempfile

    import torch

    import batchfit
    import zoo

    workload = zoo.make("gpt2", "bf16", loop="kept")

    def block() -> float:
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            workload.step(size)
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / STEPS

    block()
    ratios, plain = [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(PAIRS):
            seconds = {}
            for recorded in (True, False) if turn % 2 else (False, True):
                if recorded:
                    with batchfit.record_oom(Path(folder) / "oom.pickle"):
                        seconds[True] = block()
                else:
                    seconds[False] = block()
            ratios.append(seconds[True] / seconds[False])
            plain.append(seconds[False])
    return {
        "size": size,
        "step_ms": statistics.median(plain) * 1000,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def run(out: Path) -> None:
    import torch

    found: dict[str, Any] = {"about": f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "oom.pickle"
        ended = subprocess.run(
            [sys.executable, __file__, "dies", str(path)], capture_output=True, text=True, check=False
        )
        found["error"] = ended.stderr.strip().splitlines()[-12:]
        found["bytes"] = path.stat().st_size
        begun = time.perf_counter()
        why = subprocess.run(
            [sys.executable, "-m", "batchfit", "why", str(path)], capture_output=True, text=True, check=False
        )
        found["why_s"] = time.perf_counter() - begun
        found["why"] = why.stdout.splitlines() + why.stderr.splitlines()
    keep(out, found)
    print("\n".join([*found["error"], *found["why"]]), flush=True)
    found["cost"] = [cost(size) for size in SIZES]
    keep(out, found)
    print(json.dumps(found["cost"]))


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    lines = [
        "# `record_oom` on an H200: what it costs, and what `why` reads",
        "",
        f"{found['about']}. Made by `python benchmarks/record_oom_gpu.py run`, then `page`. GPT-2 small, 512 "
        f"tokens, bf16 autocast, AdamW; {PAIRS} pairs of {STEPS} steps with and without, in turn.",
        "",
        "| batch size | ms a step | with `record_oom` |",
        "|---|---|---|",
    ]
    for one in found["cost"]:
        span = f"{min(one['ratios']) - 1:+.1%} to {max(one['ratios']) - 1:+.1%}"
        lines.append(f"| {one['size']} | {one['step_ms']:.1f} | {one['ratio'] - 1:+.1%} ({span}) |")
    lines += [
        "",
        f"Under a cap of {CAP_GIB} GiB a batch of {TOO_MANY} ends with the error below. Its snapshot has "
        f"{found['bytes'] / 2**20:.1f} MiB; `batchfit why` takes {found['why_s']:.1f} s with its start.",
        "",
        "```text",
        *found["error"],
        "```",
        "",
        "```text",
        *found["why"],
        "```",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("record_oom_gpu.json"))
    commands.add_parser("dies").add_argument("path")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    elif given.command == "dies":
        dies(given.path)
    else:
        run(given.out)


if __name__ == "__main__":
    main()
