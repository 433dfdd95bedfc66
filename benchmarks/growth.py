"""How our cost grows: trials with the maximum, a trace with the model, a vote with the ranks. No GPU.

    python benchmarks/growth.py run --out FILE.json [--parts search trace votes]   # goes on where it was
    python benchmarks/growth.py page FILE.json --to FILE.md                         # and FILE.svg beside it

- `search`: simulated (as in `search_simulated.py`), maxima of 1 to 8191 in bins of a factor of two, 32 in
  each, the mean over six memory curves. Peers are written from descriptions; they read no memory.
- `trace`: Llamas of 10 M to 7 B parameters on the meta device, two training steps in bf16 with AdamW, the
  fastest of three traces in a fresh process, after a first one.
- `votes`: one decision of all ranks (`Ranks.any`) beside a gloo all-reduce of one number, wall clock; ranks
  share the cores of one machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from plots import canvas, save
from rows import keep
from turns import about, made_by

Results = dict[str, Any]
BINS = [(2**k, 2 ** (k + 1)) for k in range(13)]  # maxima of 1 to 8191
EACH = 32
# name: (hidden, intermediate, layers, heads, vocabulary)
LLAMAS = {
    "9 M": (256, 688, 6, 4, 8_000),
    "26 M": (384, 1024, 8, 6, 16_000),
    "134 M": (768, 2048, 12, 12, 32_000),
    "374 M": (1024, 2816, 24, 16, 32_000),
    "1.3 B": (2048, 5504, 24, 16, 32_000),
    "3.1 B": (3072, 8192, 26, 24, 32_000),
    "6.7 B": (4096, 11008, 32, 32, 32_000),
}
WORLDS = (1, 2, 3, 4)
VOTES = 150


def maxima_in(low: int, high: int) -> list[int]:
    return [int(low * (high / low) ** ((i + 0.5) / EACH)) for i in range(EACH)]


def search() -> Results:
    import search_simulated as simulated

    def peer(find: Callable[[Callable[[int], bool]], int], maxima: list[int]) -> tuple[float, float]:
        logs: list[list[bool]] = []
        for maximum in maxima:
            log: list[bool] = []

            def fits(size: int, maximum: int = maximum, log: list[bool] = log) -> bool:
                log.append(size <= maximum)
                return log[-1]

            find(fits)
            logs.append(log)
        trials = statistics.mean(len(log) for log in logs)
        return trials, statistics.mean(log.count(False) for log in logs)

    found: Results = {}
    for low, high in BINS:
        maxima, row = maxima_in(low, high), {}
        for name, tolerance in (("default", 0.02), ("tolerance=0", 0.0)):
            runs = [simulated.ours(v.name, v, maxima=maxima, tolerance=tolerance) for v in simulated.VARIANTS]
            trials = statistics.mean(x for run in runs for x in run.trials)
            row[f"batchfit, {name}"] = (trials, statistics.mean(x for run in runs for x in run.ooms))
        row["NeMo OOMptimizer [port]"] = peer(simulated.nemo_oomptimizer, maxima)
        row["double, then bisect [port]"] = peer(simulated.double_and_bisect, maxima)
        found[str(low)] = row
    return found


def traced(name: str) -> Results:
    """In a process of its own."""
    import torch
    import transformers as hf

    import batchfit
    import zoo
    from batchfit._engine.trace.trace import trace
    from batchfit._engine.trace.workload import rules_for

    hidden, intermediate, layers, heads, vocabulary = LLAMAS[name]
    config = hf.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        vocab_size=vocabulary,
        use_cache=False,
    )
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(config).to(torch.bfloat16).train()
    optimizer = torch.optim.AdamW(model.parameters())
    make_batch = zoo._tokens(vocabulary, 512, "meta")
    workload = batchfit.training(model, optimizer, zoo._hf_loss, make_batch, keep_outputs=False)
    rules = rules_for(workload)
    trace(workload, 2, rules=rules, steps=1)
    times = []
    for _ in range(3):
        begun = time.process_time()
        found = trace(workload, 8, rules=rules)
        times.append(time.process_time() - begun)
    return {
        "cpu_s": min(times),  # neighbours only ever add
        "parameters": sum(one.numel() for one in model.parameters()),
        "layers": layers,
        "events": len(found.events),
    }


def vote(rank: int, world: int, where: str, out: str) -> None:
    """One rank: seconds of a vote and of an all-reduce, medians."""
    import torch
    import torch.distributed as dist

    from batchfit._engine.distributed.ranks import Ranks

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world)
    ranks, number = Ranks.current(60), torch.zeros(1)
    times: dict[str, list[float]] = {"vote": [], "all-reduce": []}
    for at in range(VOTES):
        begun = time.perf_counter()
        ranks.any(False, doing="a benchmark")
        voted = time.perf_counter()
        if world > 1:
            dist.all_reduce(number)
        if at >= VOTES // 10:  # the first of both are no measure
            times["vote"].append(voted - begun)
            times["all-reduce"].append(time.perf_counter() - voted)
    if rank == 0:
        Path(out).write_text(json.dumps({name: statistics.median(some) for name, some in times.items()}))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def votes() -> Results:
    found: Results = {}
    context = multiprocessing.get_context("spawn")
    for world in WORLDS:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/out.json"
            ranks = [
                context.Process(target=vote, args=(rank, world, f"{folder}/store", out))
                for rank in range(world)
            ]
            for one in ranks:
                one.start()
            for one in ranks:
                one.join(120)
                if one.exitcode != 0:
                    one.kill()
                    raise RuntimeError(f"a rank of {world} ended with {one.exitcode}")
            found[str(world)] = json.loads(Path(out).read_text())
    return found


def run(given: argparse.Namespace) -> None:
    found: Results = json.loads(given.out.read_text()) if given.out.exists() else {}
    found["about"] = about("python benchmarks/growth.py run")

    def keep_it() -> None:
        keep(given.out, found)

    if "search" in given.parts and "search" not in found:
        found["search"] = search()
        keep_it()
    for name in LLAMAS if "trace" in given.parts else ():
        if name in found.get("trace", {}):
            continue
        command = [sys.executable, __file__, "one", name]
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=quiet)
        found.setdefault("trace", {})[name] = json.loads(done.stdout.splitlines()[-1])
        keep_it()
    if "votes" in given.parts and "votes" not in found:
        found["votes"] = votes()
        keep_it()


def page(found: Results) -> str:
    lines = ["# How cost grows", "", f"{made_by(found['about'])}.", ""]
    if "search" in found:
        ways = list(next(iter(found["search"].values())))
        lines += [
            "## Trials and OOMs of a search against the maximum",
            "",
            f"Means over {EACH} maxima of each bin; ours over six memory curves, soak included.",
            "",
            f"| maxima | {' | '.join(ways)} |",
            "|---" * (1 + len(ways)) + "|",
        ]
        for low, row in found["search"].items():
            cells = [f"{row[way][0]:.1f}, {row[way][1]:.2f}" for way in ways]
            lines.append(f"| {low} to {2 * int(low) - 1} | {' | '.join(cells)} |")
        lines.append("")
    if "trace" in found:
        lines += [
            "## A trace against the model",
            "",
            "| Llama | parameters | layers | events | CPU s | CPU ms a thousand events |",
            "|---|---|---|---|---|---|",
        ]
        for name, one in found["trace"].items():
            lines.append(
                f"| {name} | {one['parameters'] / 1e6:,.0f} M | {one['layers']} | {one['events']:,} "
                f"| {one['cpu_s']:.2f} | {1e6 * one['cpu_s'] / one['events']:.0f} |"
            )
        lines.append("")
    if "votes" in found:
        lines += [
            "## A decision of all ranks",
            "",
            "| ranks | a vote, ms | a gloo all-reduce of one number, ms |",
            "|---|---|---|",
        ]
        for world, one in found["votes"].items():
            lines.append(f"| {world} | {1e3 * one['vote']:.3f} | {1e3 * one['all-reduce']:.3f} |")
        lines.append("")
    return "\n".join(lines)


def draw(found: Results, to: Path) -> None:
    """The three in one picture."""
    if missing := {"search", "trace", "votes"} - set(found):
        raise SystemExit(f"the picture needs all parts: run --parts {' '.join(sorted(missing))} first")
    figure, (left, middle, right) = canvas().subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    lows = [int(low) for low in found["search"]]
    for way in next(iter(found["search"].values())):
        left.plot(lows, [found["search"][str(low)][way][0] for low in lows], marker=".", label=way)
    left.set(xscale="log", xlabel="largest size that fits", ylabel="trials, mean", title="search")
    left.legend(fontsize=7)
    ordered = sorted(found["trace"].values(), key=lambda one: one["parameters"])
    middle.plot([one["parameters"] for one in ordered], [one["cpu_s"] for one in ordered], marker=".")
    for one in ordered:
        middle.annotate(f"{one['layers']} layers", (one["parameters"], one["cpu_s"]), fontsize=7)
    middle.set(xscale="log", xlabel="parameters", ylabel="CPU s", title="trace of two steps", ylim=(0, None))
    for name in ("vote", "all-reduce"):
        ms = [1e3 * one[name] for one in found["votes"].values()]
        right.plot([int(world) for world in found["votes"]], ms, marker=".", label=name)
    right.set(xlabel="ranks", ylabel="ms", title="one decision of all ranks", xticks=WORLDS)
    right.legend(fontsize=7)
    save(figure, to)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    parts = ("search", "trace", "votes")
    running.add_argument("--parts", nargs="+", default=list(parts), choices=parts)
    commands.add_parser("one").add_argument("name", choices=LLAMAS)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "one":
        print(json.dumps(traced(given.name)))
    elif given.command == "run":
        run(given)
    else:
        write_page(given, page, draw)


if __name__ == "__main__":
    main()
