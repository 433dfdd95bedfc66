"""What a trace costs: seconds and host memory against parameters and batch size. No GPU, nothing is run.

    python benchmarks/trace_cost.py                # JSON and a dated page in benchmarks/results

Each figure is a process of its own: the second trace of two (the first one also loads what torch loads late),
two steps of training in bf16 with AdamW, the model built on the meta device.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = ("mlp", "resnet50", "gpt2", "qwen05b", "llama1b", "llama7b", "llama70b")
SIZES = (2, 32, 1024)
RESULT = Path(__file__).parent / "results" / "trace_cost_cpu_202611.json"


def measure(model: str, size: int) -> dict[str, Any]:
    import zoo
    from batchfit._engine.trace.trace import trace
    from batchfit._engine.trace.workload import rules_for

    workload = zoo.make(model, "bf16_params", build_on="meta")
    rules = rules_for(workload)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace(workload, 2, rules=rules, steps=1)
    begun = time.perf_counter()
    found = trace(workload, size, rules=rules)
    return {
        "seconds": time.perf_counter() - begun,
        "parameters": sum(one.numel() for one in workload.model.parameters()),
        "events": len(found.events),
        "peak_bytes": found.peak_bytes,
        "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "host_bytes_of_the_trace": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) * 1024,
    }


def page(results: dict[str, Any]) -> str:
    about = results["about"]
    lines = [
        "# What a trace costs",
        "",
        f"Made by `python benchmarks/trace_cost.py`; {about['cpu_count']} CPU cores, no GPU, torch "
        f"{about['torch']}, python {about['python']}. Two training steps in bf16 with AdamW.",
        "",
        "| model | parameters | events | "
        + " | ".join(f"s at size {size}" for size in SIZES)
        + " | host memory |",
        "|---" * (4 + len(SIZES)) + "|",
    ]
    for model in MODELS:
        found = [results.get(f"{model}/{size}") for size in SIZES]
        if not all(found):
            continue
        times = " | ".join(f"{one['seconds']:.2f}" for one in found)
        most = max(one["host_bytes"] for one in found)
        extra = max(one["host_bytes_of_the_trace"] for one in found)
        lines.append(
            f"| {model} | {found[0]['parameters'] / 1e6:,.0f} M | {found[0]['events']:,} | {times} "
            f"| {most / 2**30:.2f} GiB, {extra / 2**20:.0f} MiB of it by the trace |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.child[0], int(given.child[1]))))
        return
    import torch

    results: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    results["about"] = {
        "cpu_count": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for model in given.models:
        for size in SIZES:
            command = [sys.executable, __file__, "--child", model, str(size)]
            done = subprocess.run(
                command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
            )
            if done.returncode != 0:
                print(model, size, done.stderr[-500:])
                continue
            results[f"{model}/{size}"] = json.loads(done.stdout.splitlines()[-1])
            print(model, size, results[f"{model}/{size}"], flush=True)
            RESULT.write_text(json.dumps(results, indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
