"""What a plan costs: wall time, CPU seconds and peak memory of `batchfit plan`, with a cold and a warm cache.

    python benchmarks/plan_time.py run --times 3     # adds to benchmarks/results/plan_time_cpu_202611.json
    python benchmarks/plan_time.py page benchmarks/results/plan_time_cpu_202611.json --to ...

The command plans Llama 3.1 8B, 2048 tokens, an RTX 4090, an 80 GB A100 and eight H100: 12 settings,
and 3 more under FSDP2. Each run is a process of its own; cold ones have an empty cache folder. The load
average of the machine stands beside each run: others lengthen its wall time, and its CPU seconds less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from pages import RESULTS, add_page, write_page
from rows import keep

COMMAND = ["plan", "llama-3.1-8b", "--gpu", "rtx4090,a100-80gb,h100x8", "--seq-len", "2048"]
GOALS = {"cold": 60.0, "warm": 5.0}  # seconds on two cores
GOAL_GIB = 4.0
GIB = 2**30


def measured(cache: Path) -> dict[str, Any]:
    """One run of the command with that cache."""
    load = os.getloadavg()[0]
    begun = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "batchfit", *COMMAND, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
    )
    assert child.stdout is not None
    said = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"batchfit {' '.join(COMMAND)} ended with {child.returncode}")
    rows = json.loads(said)["rows"]
    return {
        "wall_s": time.perf_counter() - begun,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "rows": len(rows),
        "cells": sum(len(row["cells"]) for row in rows),
    }


def run(out: Path, times: int) -> None:
    import torch

    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"cold": [], "warm": []}
    found["about"] = {
        "command": f"batchfit {' '.join(COMMAND)}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for _ in range(times):
        with tempfile.TemporaryDirectory() as folder:
            for kind in ("cold", "warm"):
                found[kind].append(measured(Path(folder)))
                print(kind, json.dumps(found[kind][-1]), flush=True)
                keep(out, found)


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    about = found["about"]
    first = found["cold"][0]
    lines = [
        "# What a plan costs",
        "",
        f"Made by `python benchmarks/plan_time.py run`: `{about['command']}`, {first['rows']} settings and "
        f"{first['cells']} cells; {about['cores']} CPU cores, no GPU, torch {about['torch']}, python "
        f"{about['python']}.",
        "",
        "The load average is that of the whole machine, before and after the run: above "
        "the number of cores a run waits for its turn, and shared caches make its CPU seconds longer, too.",
        "",
        "| cache | runs | wall s, median | least | CPU s, median | least | peak memory, GiB | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, goal in GOALS.items():
        runs = found[kind]
        wall, used = ([one[key] for one in runs] for key in ("wall_s", "cpu_s"))
        most = max(one["peak_bytes"] for one in runs) / GIB
        lines.append(
            f"| {kind} | {len(runs)} | {median(wall):.1f} | {min(wall):.1f} | {median(used):.1f} "
            f"| {min(used):.1f} | {most:.2f} | {goal:.0f} s, {GOAL_GIB:.0f} GiB |"
        )
    lines += ["", "| cache | wall s | CPU s | load before | after |", "|---|---|---|---|---|"]
    for kind in GOALS:
        lines += [
            f"| {kind} | {one['wall_s']:.1f} | {one['cpu_s']:.1f} | {one['load_before']:.1f} "
            f"| {one['load_after']:.1f} |"
            for one in found[kind]
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, default=RESULTS / "plan_time_cpu_202611.json")
    running.add_argument("--times", type=int, default=3)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run(given.out, given.times)
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
