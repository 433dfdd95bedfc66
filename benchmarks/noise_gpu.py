"""What measuring the noise scale costs: a training step with and without it, on one GPU.

    python benchmarks/noise_gpu.py run --out noise_gpu.json --deadline-s 240   # again: goes on where it was
    python benchmarks/noise_gpu.py page noise_gpu.json --to page.md            # every figure is in the JSON
    python benchmarks/noise_gpu.py run --smoke --out smoke.json                # a tiny model, no GPU

GPT-2 small, bf16 autocast, AdamW, 8 microbatches of 8 x 512 tokens with `Microbatcher`: plain steps against
plain steps, against cheap mode, and against exact mode (a norm a microbatch), in alternating pairs in one
process; two microbatches of 8, where the same two norms weigh four times as much; and microbatches of 32,
where the GPU is what a step waits for. Also: what the host spends until a step is queued, calls that wait
for the device, and the peak of memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from microbatch_gpu import COUNT, LENGTH, SIZE, gpt2
from pages import add_page, write_page
from rows import keep
from turns import interval

PARTS = ("cheap, microbatches of 32", "plain", "cheap", "exact", "cheap, 2 microbatches")
PAIRS = 40
PAIRS_LARGE = 16  # steps of a second that hardly differ
LARGE = 32  # samples of a microbatch that keeps the GPU busy: the host's own noise does not show
Results = dict[str, Any]


def measure(part: str, smoke: bool) -> Results:
    """Pairs of steps: plain, and as `part` says."""
    import torch

    import batchfit

    size = LARGE if part.endswith(f"of {LARGE}") else SIZE
    model, optimizer, loss, batch, _ = gpt2(size * COUNT, smoke)
    if "2 microbatches" in part:
        batch = {name: rows[: 2 * size] for name, rows in batch.items()}
    mode = part.split(",")[0]
    noise = None if mode == "plain" else batchfit.GradientNoise(model, mode=mode)
    wait = (lambda: None) if smoke else torch.cuda.synchronize
    microbatchers = {
        "plain": batchfit.Microbatcher(model, microbatch_size=size),
        "other": batchfit.Microbatcher(model, microbatch_size=size, noise=noise),
    }

    def step(way: str) -> None:
        optimizer.zero_grad()
        microbatchers[way].backward(lambda micro: loss(model, micro), batch)
        microbatchers[way].step(optimizer, clip_norm=1.0)

    def seconds(way: str) -> tuple[float, float]:
        """(until it is queued, until it is done)"""
        wait()
        begun = time.perf_counter()
        step(way)
        queued = time.perf_counter() - begun
        wait()
        return queued, time.perf_counter() - begun

    for _ in range(1 if smoke else 9):  # the atomic step records its first eight
        step("plain")
        step("other")
    found: dict[str, list[tuple[float, float]]] = {"plain": [], "other": []}
    pairs = PAIRS_LARGE if size == LARGE else PAIRS
    for number in range(3 if smoke else pairs):
        for way in ("plain", "other") if number % 2 else ("other", "plain"):
            found[way].append(seconds(way))
    answer: Results = {
        "pairs_s": [(one[1], two[1]) for one, two in zip(found["plain"], found["other"], strict=True)],
        "queued_s": [(one[0], two[0]) for one, two in zip(found["plain"], found["other"], strict=True)],
    }
    if noise is not None:
        answer["steps_seen"] = noise.reading().steps
    if not smoke:
        answer["waits"] = {way: waits(lambda way=way: step(way)) for way in found}
        answer["peak_bytes"] = {way: peak(lambda way=way: step(way)) for way in found}
    return answer


def waits(work: Callable[[], None]) -> int:
    """How many calls of one step wait for the device, by torch's own count."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in caught)


def peak(work: Callable[[], None]) -> int:
    import torch

    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run_all(given: argparse.Namespace) -> None:
    import torch

    results: Results = json.loads(given.out.read_text()) if given.out.exists() else {}
    on_gpu = torch.cuda.is_available() and not given.smoke
    results["about"] = {
        "date": str(datetime.datetime.now(datetime.UTC).date()),
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU (a tiny model)",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/noise_gpu.py run" + (" --smoke" if given.smoke else ""),
    }
    begun = time.perf_counter()
    for part in given.parts:
        if part in results:
            continue
        if time.perf_counter() - begun > given.deadline_s:
            print(f"{part}: left for another call", flush=True)
            continue
        results[part] = measure(part, given.smoke)
        keep(given.out, results)
        print(f"{part}: x{statistics.median(ratios(results[part]['pairs_s'])):.4f}", flush=True)
    print(f"{sum(part not in results for part in given.parts)} parts left")


def ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [other / plain for plain, other in pairs]


def page(results: Results) -> str:
    told = results["about"]
    lines = [
        f"# What measuring the noise scale costs on a {told['device']}: {told['date']}",
        "",
        f"Made by `{told['command']}`; torch {told['torch']}, python {told['python']}.",
        "",
        f"GPT-2 small, bf16 autocast, AdamW, clipped, {COUNT} microbatches of {SIZE} x {LENGTH} tokens with",
        "`Microbatcher`; alternating pairs of a plain step and the one named. In brackets the 95 % interval",
        "of the median. `host`: until the step is queued. `waits`: calls of a step that wait for the device.",
        "Goal: cheap mode under 1 % of a step.",
        "",
        "| step | plain | this | this / plain | host, plain | host, this | waits, plain / this | more peak |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in (part for part in PARTS if part in results):
        one = results[part]
        plain, this = (statistics.median(pair[at] for pair in one["pairs_s"]) for at in (0, 1))
        host = [statistics.median(pair[at] for pair in one["queued_s"]) for at in (0, 1)]
        found = ratios(one["pairs_s"])
        middle, (low, high) = statistics.median(found), interval(found)
        waited, peaks = one.get("waits"), one.get("peak_bytes")
        more = None if peaks is None else (peaks["other"] - peaks["plain"]) / 2**20
        lines.append(
            f"| {part} | {1e3 * plain:.2f} ms | {1e3 * this:.2f} ms | {middle:.4f} ({low:.4f} to {high:.4f}) "
            f"| {1e3 * host[0]:.2f} ms | {1e3 * host[1]:.2f} ms "
            f"| {'-' if waited is None else '{plain} / {other}'.format(**waited)} "
            f"| {'-' if more is None else f'{more:.0f} MiB'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=Path("noise_gpu.json"))
    running.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    running.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, few steps")
    running.add_argument("--deadline-s", type=float, default=1e9, help="no part starts later than this")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run_all(given)
        return
    write_page(given, page)


if __name__ == "__main__":
    main()
