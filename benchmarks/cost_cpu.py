"""What our own code costs beside the plain way, as far as a CPU tells: a step, a loader, a find, a trace.

    python benchmarks/cost_cpu.py run --out FILE.json [--parts NAME ...]   # each part in a fresh process
    python benchmarks/cost_cpu.py page FILE.json --to FILE.md

Parts
- `microbatch`: a training step of 8 microbatches, `Microbatcher` and a loop by hand. `tiny` is an MLP whose
  operations take microseconds, so that our own code shows; `small` is a GPT of 0.4 M parameters.
- `noise`: the microbatched step with `GradientNoise` and without, for both.
- `loader`: an epoch of `ResizableLoader` and of `DataLoader`, no workers and two of them; and an epoch with
  planned changes of the size against one without.
- `find`: a whole `find_batch_size` over the time of the steps that it ran, in virtual memory.
- `trace`: a trace of two training steps over the same two steps run, and milliseconds a thousand operations.
- `virtual`: a training step under `virtual_memory` and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from turns import IN_TURN, about, all_cpu_s, in_turn, made_by, median_ms, own_cpu_s, ratio

Results = dict[str, Any]
COUNT = 8  # microbatches a step


@dataclass(frozen=True)
class Program:
    """A model, how its batches are made, and the loss of one."""

    model: Any
    size: int  # of a microbatch
    make_batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]


def tiny() -> Program:
    """An MLP, and 8 x 8 samples."""
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    return Program(
        torch.nn.Sequential(*layers, torch.nn.Linear(64, 10)),
        size=8,
        make_batch=lambda n: (torch.randn(n, 64), torch.randint(10, (n,))),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )


def small() -> Program:
    """A GPT of 2 layers, and 8 x 2 x 64 tokens."""
    import torch

    from virtual_vs_gpu import GPT, next_token_loss

    def make_batch(n: int) -> tuple[Any, Any]:
        text = torch.randint(512, (n, 65))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    torch.manual_seed(0)
    return Program(GPT(vocabulary=512, width=128, layers=2, context=64), 2, make_batch, next_token_loss)


def stepping(made: Program) -> dict[str, Callable[[], None]]:
    """A training step by hand, and with `Microbatcher`."""
    import torch

    import batchfit

    model, size = made.model, made.size
    batch = made.make_batch(size * COUNT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    microbatcher = batchfit.Microbatcher(model, microbatch_size=size)

    def loss(micro: Any) -> Any:
        return made.loss(model, micro)

    def by_hand() -> None:
        optimizer.zero_grad()
        for begin in range(0, size * COUNT, size):
            micro = tuple(part[begin : begin + size] for part in batch)
            (loss(micro) * (1 / COUNT)).backward()
        optimizer.step()

    def ours() -> None:
        optimizer.zero_grad()
        microbatcher.backward(loss, batch)
        microbatcher.step(optimizer)

    for _ in range(9):  # the atomic step records its first eight
        ours()
    return {"by hand": by_hand, "ours": ours}


def microbatch(rounds: int) -> Results:
    found: Results = {"ratios": {}, "cpu_ms": {}}
    for name, made, times in (("tiny", tiny(), 12), ("small", small(), 3)):
        times_of = in_turn(stepping(made), rounds * times)
        found["ratios"][f"microbatched step / by hand, {name}"] = ratio(times_of, "ours", "by hand")
        found["cpu_ms"] |= {f"step, {name}, {way}": ms for way, ms in median_ms(times_of).items()}
    return found


def noise(rounds: int) -> Results:
    """The same microbatched step, with and without measuring the noise scale."""
    import torch

    import batchfit

    found: Results = {"ratios": {}, "cpu_ms": {}}
    for name, made, times in (("tiny", tiny(), 12), ("small", small(), 3)):
        model, batch = made.model, made.make_batch(made.size * COUNT)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

        def stepping_with(
            microbatcher: Any, made: Any = made, batch: Any = batch, optimizer: Any = optimizer
        ) -> Callable[[], None]:
            def step() -> None:
                optimizer.zero_grad()
                microbatcher.backward(lambda micro: made.loss(made.model, micro), batch)
                optimizer.step()

            return step

        ways = {
            "without": stepping_with(batchfit.Microbatcher(model, microbatch_size=made.size)),
            "with": stepping_with(
                batchfit.Microbatcher(model, microbatch_size=made.size, noise=batchfit.GradientNoise(model))
            ),
        }
        times_of = in_turn(ways, rounds * times)
        found["ratios"][f"step with the noise scale / without, {name}"] = ratio(times_of, "with", "without")
        found["cpu_ms"] |= {f"step, {name}, {way} noise": ms for way, ms in median_ms(times_of).items()}
    return found


def loader(rounds: int) -> Results:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import batchfit

    warnings.filterwarnings("ignore", message="This DataLoader will create")
    dataset = TensorDataset(torch.randn(8192, 128))

    def epoch(make: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in make():
                pass

        return run

    def pair(workers: int, rounds: int) -> tuple[Any, Any]:
        ways = {
            "DataLoader": epoch(lambda: DataLoader(dataset, 32, shuffle=True, num_workers=workers)),
            "ours": epoch(lambda: batchfit.ResizableLoader(dataset, 32, shuffle=True, num_workers=workers)),
        }
        seconds = all_cpu_s if workers else own_cpu_s
        return in_turn(ways, rounds, seconds=seconds, warm_up=1), f"{workers or 'no'} workers"

    found: Results = {"ratios": {}, "cpu_ms": {}}
    for times, name in (pair(0, rounds * 2), pair(2, rounds)):
        found["ratios"][f"ResizableLoader / DataLoader, {name}"] = ratio(times, "ours", "DataLoader")
        found["cpu_ms"] |= {f"epoch, {name}, {way}": ms for way, ms in median_ms(times).items()}
    ways = {
        "one size": epoch(lambda: batchfit.ResizableLoader(dataset, 40, shuffle=True)),
        "planned": epoch(lambda: batchfit.ResizableLoader(dataset, schedule=alternating(), shuffle=True)),
    }
    times = in_turn(ways, rounds * 2)
    found["ratios"]["ResizableLoader, planned changes / one size"] = ratio(times, "planned", "one size")
    found["cpu_ms"] |= {f"epoch, {way}": ms for way, ms in median_ms(times).items()}
    return found


def alternating() -> Any:
    """A size of 32 or 48, another every ten batches: 40 on average."""

    class Alternating:
        def size_at(self, progress: Any) -> int:
            return 48 if progress.step // 10 % 2 else 32

    return Alternating()


def find(rounds: int) -> Results:
    shares, searches = [], []
    for _ in range(rounds):
        spent, search = searching()
        began = time.process_time()
        search()
        searches.append(time.process_time() - began)
        shares.append(searches[-1] / sum(spent))
    return {
        "ratios": {"find / the steps that it ran": statistics.median(shares)},
        "cpu_ms": {"find": round(1e3 * statistics.median(searches), 1)},
    }


def searching() -> tuple[list[float], Callable[[], Any]]:
    """A find of a small GPT, and where it notes the time of each of its steps."""
    import torch

    import batchfit

    made, spent = small(), []
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)

    def step(n: int) -> None:
        begun = time.process_time()
        optimizer.zero_grad()
        made.loss(made.model, made.make_batch(n)).backward()
        optimizer.step()
        spent.append(time.process_time() - begun)

    workload = batchfit.Workload(step, state=[made.model, optimizer])
    return spent, lambda: batchfit.find_batch_size(workload, budget="48MiB", max_size=24)


def tracing() -> tuple[Callable[[], Any], Callable[[], None]]:
    """Two steps of a small GPT: traced, and run."""
    import torch

    import batchfit
    from batchfit._engine.trace.trace import trace as traced
    from batchfit._engine.trace.workload import rules_for

    made = small()
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-4)
    workload = batchfit.training(made.model, optimizer, made.loss, made.make_batch)
    rules = rules_for(workload)

    def run_it() -> None:
        for _ in range(2):
            workload.step(16)

    return lambda: traced(workload, 16, rules=rules), run_it


def trace(rounds: int) -> Results:
    trace_it, run_it = tracing()
    times = in_turn({"traced": trace_it, "run": run_it}, rounds)
    cost = median_ms(times)
    return {
        "ratios": {"two steps traced / run": ratio(times, "traced", "run")},
        "cpu_ms": {
            **{f"two steps, {way}": ms for way, ms in cost.items()},
            "a thousand events of a trace": round(1e3 * cost["traced"] / len(trace_it().events), 2),
        },
    }


def virtual(rounds: int) -> Results:
    import virtual_overhead

    found: Results = {"ratios": {}, "cpu_ms": {}}
    for batch_size, tokens, times in ((1, 32, 4), (2, 256, 1)):
        one = virtual_overhead.measure(batch_size, tokens, rounds * times)
        name = f"{batch_size} x {tokens} tokens"
        found["ratios"][f"step in virtual memory / without, {name}"] = one["ratio_virtual"]
        found["cpu_ms"] |= {f"step, {name}, {way}": 1e3 * s for way, s in one["step_s"].items()}
    return found


PARTS: dict[str, tuple[Callable[[int], Results], int]] = {
    "microbatch": (microbatch, 15),
    "noise": (noise, 8),
    "loader": (loader, 8),
    "find": (find, 5),
    "trace": (trace, 7),
    "virtual": (virtual, 8),
}


def child(part: str, rounds: int | None) -> Results:
    """A part in a fresh process, on one thread."""
    command = [sys.executable, __file__, "one", part]
    command += [] if rounds is None else ["--rounds", str(rounds)]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    if done.returncode != 0:
        raise RuntimeError(f"{part} failed: {done.stderr[-1500:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def page(found: Results) -> str:
    lines = ["# What our own code costs", "", f"{made_by(found['about'])}. {IN_TURN}", ""]
    lines += ["| what | ratio |", "|---|---|"]
    parts = {name: one for name, one in found.items() if name != "about"}
    for one in parts.values():
        lines += [f"| {name} | {value:.3f} |" for name, value in one["ratios"].items()]
    lines += ["", "| what | CPU ms, median |", "|---|---|"]
    for one in parts.values():
        lines += [f"| {name} | {value:.3f} |" for name, value in one["cpu_ms"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    single = commands.add_parser("one")
    single.add_argument("part", choices=PARTS)
    for command in (running, single):
        command.add_argument("--rounds", type=int)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
    elif given.command == "one":
        import torch

        torch.set_num_threads(1)
        measure, rounds = PARTS[given.part]
        print(json.dumps(measure(given.rounds or rounds)))
    else:
        told = about("python benchmarks/cost_cpu.py run")
        found = {"about": told, **{part: child(part, given.rounds) for part in given.parts}}
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(page(found))


if __name__ == "__main__":
    main()
