"""The knee on one GPU, beside a full sweep: the same size again and again, at a third of the time.

    python benchmarks/profile_gpu.py run --out run.json --deadline-s 300   # again: goes on where it was
    python benchmarks/profile_gpu.py page run.json --to page.md            # every figure is in the JSON
    python benchmarks/profile_gpu.py run --smoke --out smoke.json          # a tiny model, no GPU

Rows, each in a fresh process: a model (GPT-2 small, ResNet-50, ViT-B/16; bf16 autocast, AdamW) without a cap
or under one of 24 GiB. `sweep` times every power of two and midpoint that fits, from 1 up, finely (`sizes=`:
the same clock, no diagnosis; where times vary it takes up to ten seconds a size, and a profile less for its
answer). `ours/1` to `ours/3` are `profile_throughput` with its diagnosis, which finds out itself what fits.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import Ahead, Results, my_turn, run_rows

MODELS = {"gpt2": "GPT-2 small", "resnet50": "ResNet-50", "vit": "ViT-B/16"}
IMPORTED = {  # by a model, which takes longer than to build it
    "gpt2": ("transformers.models.gpt2.modeling_gpt2",),
    "resnet50": ("transformers.models.resnet.modeling_resnet",),
    "vit": ("transformers.models.vit.modeling_vit",),
}
CAPS = {"uncapped": None, "24GiB": "24GiB"}
WAYS = ("sweep", "ours/1", "ours/2", "ours/3")


def rows(smoke: bool) -> list[str]:
    models = ["tiny"] if smoke else list(MODELS)
    caps = ["24MiB"] if smoke else list(CAPS)
    return [f"{model}/{cap}/{way}" for model in models for cap in caps for way in WAYS]


def workload(model: str, smoke: bool) -> Any:
    if not smoke:
        import zoo

        return zoo.make(model, "bf16", device="cuda")
    import torch
    from torch import nn

    import batchfit

    torch.manual_seed(0)
    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return batchfit.training(
        net, optimizer, lambda model, batch: model(batch).square().mean(), torch.ones(2, 256)
    )


def sweep(work: Any, budget: str | None, smoke: bool) -> Results:
    """Every grid size up to the first that runs out, timed by the same clock."""
    import batchfit
    from batchfit._profile.pure.knee import grid

    sizes = grid(1, 64 if smoke else 2**14)
    profile = batchfit.profile_throughput(work, sizes=sizes, budget=budget, diagnose=False)
    answer: Results = json.loads(profile.to_json())
    return {"points": answer["points"], "best": profile.best.size, "elapsed_s": profile.elapsed_s}


def ours(work: Any, budget: str | None, smoke: bool) -> Results:
    import batchfit

    begun, told_s = time.perf_counter(), [0.0]
    profile = batchfit.profile_throughput(
        work,
        budget=budget,
        largest=64 if smoke else None,
        on_point=lambda point: told_s.append(time.perf_counter() - begun),
    )
    answer: Results = json.loads(profile.to_json())
    return {**answer, "answer_s": told_s[-1]}


def one(row: str, given: argparse.Namespace) -> Results:
    model, cap, way, *_ = row.split("/")
    my_turn("batchfit._profile.profile", "zoo", *IMPORTED.get(model, ()))
    work = workload(model, given.smoke)
    run = sweep if way == "sweep" else ours
    return run(work, None if cap == "uncapped" else cap, given.smoke)


def about(given: argparse.Namespace) -> Results:
    import torch

    on_gpu = torch.cuda.is_available() and not given.smoke
    return {
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (a tiny model)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/profile_gpu.py run" + (" --smoke" if given.smoke else ""),
    }


def run_all(given: argparse.Namespace) -> None:
    keys = ("error", "best", "recommended", "answer_s", "elapsed_s")
    ahead = Ahead(__file__, smoke=given.smoke)
    run_rows(
        given.out,
        about(given),
        given.rows or rows(given.smoke),
        deadline_s=given.deadline_s,
        run=lambda row, _: ahead.run(row),
        shown=lambda found: {key: found[key] for key in keys if key in found},
        prepare=ahead.prepare,
    )
    ahead.close()


def compared(swept: Results, run: Results) -> Results:
    """How far a recommendation is from the sweep's best, by the sweep's own times, and at what cost."""
    rates = {point["size"]: point["samples_per_s"] for point in swept["points"]}
    best = rates[swept["best"]]
    size = run["recommended"]
    own = next(point["samples_per_s"] for point in run["points"] if point["size"] == size)
    return {
        "size": size,
        "share": rates.get(size, own) / best,
        "time": run["elapsed_s"] / swept["elapsed_s"],
        "answer": run["answer_s"] / swept["elapsed_s"] if "answer_s" in run else None,
        "sizes": len(run["points"]),
        "kinds": [found["kind"] for found in run["diagnosis"]],
    }


def of_its_time(one: Results) -> str:
    whole = f"{one['time']:.0%}"
    return whole if one["answer"] is None else f"{one['answer']:.0%} ({whole})"


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    told = results["about"]
    lines = [
        f"# Throughput profiles on a {told['device']}",
        "",
        f"Made by `{told['command']}`; torch {told['torch']}, python {told['python']}.",
        "",
        "The sweep times every power of two and midpoint that fits. `of the best` is the sweep's throughput",
        "at the recommended size over its best. `of its time`: until the size was known, over the sweep,",
        "and with the diagnosis, which a sweep does not make.",
        "",
        "| model | memory | sweep: best size, samples/s, time | recommended, 3 runs | of the best "
        "| of its time | sizes | diagnosis |",
        "|---|---|---|---|---|---|---|---|",
    ]
    found = [row for row in results if row.endswith("/sweep") and "error" not in results[row]]
    for row in found:
        model, cap, _ = row.split("/")
        swept = results[row]
        runs = [results.get(f"{model}/{cap}/ours/{number}", {}) for number in (1, 2, 3)]
        told_of = [compared(swept, run) for run in runs if "points" in run]
        if not told_of:
            continue
        best = next(point for point in swept["points"] if point["size"] == swept["best"])
        kinds = sorted({kind for one in told_of for kind in one["kinds"]})
        lines.append(
            f"| {MODELS.get(model, model)} | {cap} "
            f"| {swept['best']}, {best['samples_per_s']:.0f}, {swept['elapsed_s']:.0f} s "
            f"| {', '.join(str(one['size']) for one in told_of)} "
            f"| {', '.join(format(one['share'], '.1%') for one in told_of)} "
            f"| {', '.join(of_its_time(one) for one in told_of)} "
            f"| {', '.join(str(one['sizes']) for one in told_of)} "
            f"| {', '.join(kinds) or 'none'} |"
        )
    lines += [
        f"\n{row}: {results[row]['error'].splitlines()[-1]}" for row in results if "error" in results[row]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--rows", nargs="*")
    running.add_argument("--deadline-s", type=float, default=float("inf"))
    single = commands.add_parser("one")
    single.add_argument("row")
    for command in (running, single):
        command.add_argument("--smoke", action="store_true")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
    elif given.command == "one":
        print(json.dumps(one(given.row, given)))
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
