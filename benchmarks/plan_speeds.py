"""The speed model of `plan` beside recorded profiles of an H200: no GPU is needed.

    python benchmarks/plan_speeds.py run --out benchmarks/results/plan_speeds_h200_202611.json
    python benchmarks/plan_speeds.py page benchmarks/results/plan_speeds_h200_202611.json

`profile_h200_202611.json` has samples per second at each size of three models (bf16 autocast, AdamW). The
model of `_plan/pure/speed.py` predicts shares only: each size beside the size that was the fastest. Said of
each model: the rank correlation of sizes, and how far the predicted share is from the measured one, over all
sizes, and over those of at least a quarter of the best throughput, where the host hardly limits the step.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from pages import add_page, write_page

HERE = Path(__file__).parent
RECORDED = HERE / "results" / "profile_h200_202611.json"
MODELS = ("gpt2", "resnet50", "vit")
GPU_BOUND = 0.25


def predicted(model: str, sizes: list[int]) -> list[float]:
    """Samples per unit of time at each size."""
    import torch

    import zoo
    from batchfit._engine.allocator.gpus import gpu_named
    from batchfit._engine.cuda_model.dispatch import CudaRules
    from batchfit._engine.trace.workload import trace_workload
    from batchfit._plan.flops import flops_per_sample
    from batchfit._plan.pure.speed import StepCost

    work, gpu = zoo.make(model, "bf16", device="cpu"), gpu_named("h200")
    rules = CudaRules(gpu, torch.device("cpu", 1))
    traced = trace_workload(work, rules=rules, budget_bytes=gpu.usable_bytes)
    cost = StepCost.of(traced.at(sizes[-1]), flops_per_sample(work))
    return [cost.samples_per_unit("h200", size) for size in sizes]


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(at) for at in range(len(values))]


def rank_correlation(one: list[float], two: list[float]) -> float:
    """Spearman's."""
    first, second, count = ranks(one), ranks(two), len(one)
    apart = sum((a - b) ** 2 for a, b in zip(first, second, strict=True))
    return 1 - 6 * apart / (count * (count**2 - 1))


def compared(model: str, recorded: dict[str, Any]) -> dict[str, Any]:
    points = recorded[f"{model}/uncapped/sweep"]["points"]
    sizes = [int(one["size"]) for one in points]
    measured = [float(one["samples_per_s"]) for one in points]
    guessed = predicted(model, sizes)
    best = max(range(len(sizes)), key=measured.__getitem__)
    rows = [
        (size, true / measured[best], rate / guessed[best])
        for size, true, rate in zip(sizes, measured, guessed, strict=True)
    ]
    return {"model": model, "rows": rows, "ranks": rank_correlation(measured, guessed)}


def off(rows: list[tuple[int, float, float]]) -> tuple[float, float]:
    """Median and largest factor between the shares."""
    factors = [max(true / share, share / true) for _, true, share in rows]
    return median(factors), max(factors)


def page(found: list[dict[str, Any]]) -> str:
    lines = [
        "# The speed model of `plan` beside profiles of an H200",
        "",
        "Made by `python benchmarks/plan_speeds.py`; measured: `profile_h200_202611.json` (torch 2.11, "
        "bf16 autocast, AdamW, no cap). Shares are of the fastest size that was measured.",
        "",
        "| model | sizes | rank correlation of sizes | share off by: median, worst | from a quarter of the "
        "best on: median, worst |",
        "|---|---|---|---|---|",
    ]
    for one in found:
        rows = one["rows"]
        whole, bound = off(rows), off([row for row in rows if row[1] >= GPU_BOUND])
        lines.append(
            f"| {one['model']} | {len(rows)} | {one['ranks']:.2f} | x{whole[0]:.2f}, x{whole[1]:.1f} | "
            f"x{bound[0]:.2f}, x{bound[1]:.1f} |"
        )
    for one in found:
        lines += [
            "",
            f"## {one['model']}",
            "",
            "| size | measured share | predicted share |",
            "|---|---|---|",
        ]
        lines += [f"| {size} | {true:.0%} | {share:.0%} |" for size, true, share in one["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--models", nargs="+", default=list(MODELS))
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    found = [compared(model, recorded) for model in given.models]
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
