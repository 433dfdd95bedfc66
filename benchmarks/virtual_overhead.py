"""What virtual memory costs: training steps of a small GPT with it and without it, alternating in one run.

    python benchmarks/virtual_overhead.py [--out FILE.json]

A ratio of 1.03 says that a step under `virtual_memory` takes 3 % longer. The cost is a few microseconds an
operation, so it vanishes in large steps; the smallest size is there to show the worst of it. `noop` is the
same under a dispatch mode that does nothing: the part that torch takes. Medians over pairs of steps, in CPU
time on one thread; the ratio of the fastest steps is what is left when neighbours disturb the machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import batchfit
from virtual_vs_gpu import GPT, next_token_loss

# batch size, tokens, rounds (each a step of every kind)
SIZES = [(2, 256, 12), (1, 32, 40)]


class Noop(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counter(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def measure(batch_size: int, tokens: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    text = torch.randint(8192, (batch_size, tokens + 1))
    batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    def step() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def timed(inside: AbstractContextManager[Any]) -> float:
        with inside:
            started = time.process_time()
            step()
            return time.process_time() - started

    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "plain": nullcontext,
        "noop": Noop,
        "virtual": lambda: batchfit.virtual_memory("64GiB"),
    }
    counter = Counter()
    with counter:
        step()
    for make in ways.values():  # warm-up: allocator, AdamW's state, the cache of sizes
        timed(make())
        timed(make())
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, make in ways.items():
            times[name].append(timed(make()))
    plain = times["plain"]

    def ratio(name: str) -> float:
        return round(statistics.median(b / a for a, b in zip(plain, times[name], strict=True)), 4)

    def ratio_of_fastest(name: str) -> float:
        return round(min(times[name]) / min(plain), 4)

    extra = statistics.median(b - a for a, b in zip(plain, times["virtual"], strict=True))
    return {
        "batch_size": batch_size,
        "tokens": tokens,
        "operations_a_step": counter.calls,
        "rounds": rounds,
        "step_s": {name: round(statistics.median(values), 6) for name, values in times.items()},
        "ratio_virtual": ratio("virtual"),
        "ratio_noop": ratio("noop"),
        "ratio_of_fastest_virtual": ratio_of_fastest("virtual"),
        "ratio_of_fastest_noop": ratio_of_fastest("noop"),
        "microseconds_an_operation": round(extra / counter.calls * 1e6, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "rows": [measure(*size) for size in SIZES],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
