"""Finders beside each other on one GPU: the same step, the same cap, each in a fresh process.

    python benchmarks/find_gpu.py --out results.json                 # all models and finders, resumes
    python benchmarks/find_gpu.py --models gpt2 --finders batchfit bisection

For each finder: its answer, sizes tried, out-of-memory errors, seconds (soak included, model building
and CUDA start-up not). Then, in fresh processes, whether the answer survives 200 steps, and what the truth
is: the largest size that survives 25 steps in a fresh process, found by stepping from our answer.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 2**30
MODELS = ("gpt2", "resnet50", "vit", "llama110m")
FINDERS = ("batchfit", "bisection", "accelerate", "accelerate_4096")
LASTING = ("batchfit",)  # whose answers are run for 200 steps; the truth tells of the others


class Counted:
    """Three steps at a size, as the peers' trial; counts what was tried and what ran out."""

    def __init__(self, step: Callable[[int], object]) -> None:
        self.step, self.sizes, self.ooms = step, [], 0

    def __call__(self, size: int) -> None:
        import torch

        self.sizes.append(size)
        try:
            for _ in range(3):
                self.step(size)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            self.ooms += 1
            raise

    def fits(self, size: int) -> bool:
        import torch

        fits = True
        try:
            self(size)
        except torch.OutOfMemoryError:
            fits = False
        gc.collect()
        torch.cuda.empty_cache()
        return fits


def bisection(trial: Counted) -> int:
    low, high = 0, 1
    while trial.fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if trial.fits(middle) else (low, middle)
    return low


def accelerate(trial: Counted, start: int) -> int:
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=start)
    def attempt(batch_size: int) -> int:
        trial(batch_size)
        return batch_size

    return int(attempt())


def run_finder(model: str, finder: str) -> dict[str, Any]:
    import torch

    import batchfit
    import zoo

    workload = zoo.make(model, "bf16")
    torch.cuda.synchronize()
    begun = time.perf_counter()
    if finder == "batchfit":
        fit = batchfit.find_batch_size(workload)
        sizes = [trial.size for trial in fit.trials]
        ooms = sum(not trial.fits for trial in fit.trials)
        answer, trials = fit.batch_size, [trial.model_dump() for trial in fit.trials]
        print(fit, file=sys.stderr)
    else:
        trial = Counted(workload.step)
        start = {"accelerate": 128, "accelerate_4096": 4096}.get(finder)
        answer = bisection(trial) if start is None else accelerate(trial, start)
        sizes, ooms, trials = trial.sizes, trial.ooms, []
    seconds = time.perf_counter() - begun
    return {"answer": answer, "sizes": sizes, "ooms": ooms, "seconds": seconds, "trials": trials}


def run_survival(model: str, size: int, steps: int) -> dict[str, Any]:
    import torch

    import zoo

    workload = zoo.make(model, "bf16")
    survived = 0
    try:
        for _ in range(steps):
            workload.step(size)
            torch.cuda.synchronize()
            survived += 1
    except torch.OutOfMemoryError:
        pass
    return {
        "size": size,
        "survived": survived,
        "of": steps,
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }


def child(arguments: list[str], cap_gib: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--cap-gib", str(cap_gib), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": "ignore"}
    )
    if done.returncode != 0:
        return {"error": done.stderr[-800:]}
    print(done.stderr[-1500:] if "batchfit" in arguments else "", end="")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def truth(model: str, guess: int, cap_gib: float) -> dict[str, Any]:
    """The largest size that survives 25 steps in a fresh process, in steps of 1 % (at least one sample)."""
    stride = max(1, guess // 100)
    tried: dict[int, int] = {}

    def survives(size: int) -> bool:
        answer = child(["--survive", model, str(size), "25"], cap_gib)
        tried[size] = int(answer.get("survived", -1))
        return tried[size] == 25

    size = guess
    if survives(size):
        while survives(size + stride):
            size += stride
    else:
        while size > stride and not survives(size - stride):
            size -= stride
        size -= stride
    return {"sustained": size, "fails": size + stride, "tried": tried}


def page(results: dict[str, Any]) -> str:
    """The dated page: every figure comes from the JSON."""
    about = results["about"]
    lines = [
        f"# Find on a {about['gpu']}, capped at {about['cap_gib']} GiB",
        "",
        f"Made by `{about['command']}`; torch {about['torch']}, python {about['python']}. Training in bf16",
        "autocast with AdamW, random weights, each finder in a fresh process, the same step. Seconds count",
        "everything after the model is built, our soak of 25 steps included.",
        "",
        "| model | finder | answer | of the sustained maximum | sizes tried | OOMs | seconds | 200 steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in (name for name in results if name != "about"):
        row = results[model]
        best = row.get("truth", {}).get("sustained")
        for finder in (name for name in row if name != "truth"):
            one = row[finder]
            share = f"{one['answer'] / best:.1%}" if best else "-"
            lasting = one.get("200 steps")
            survived = f"{lasting['survived']} of {lasting['of']}" if lasting else "-"
            lines.append(
                f"| {model} | {finder} | {one['answer']} | {share} | {len(set(one['sizes']))} "
                f"| {one['ooms']} | {one['seconds']:.1f} | {survived} |"
            )
    lines += [
        "",
        "The sustained maximum survives 25 steps in a fresh process; the size after it was tried and fails:",
    ]
    for model in (name for name in results if name != "about"):
        found = results[model].get("truth")
        if found:
            lines.append(f"{model} {found['sustained']} (fails: {found['fails']}).")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("find_gpu.json"))
    parser.add_argument("--models", nargs="+", default=["gpt2", "resnet50"], choices=MODELS)
    parser.add_argument("--finders", nargs="+", default=list(FINDERS), choices=FINDERS)
    parser.add_argument("--cap-gib", type=float, default=23.8)
    parser.add_argument("--no-truth", action="store_true")
    parser.add_argument("--page", type=Path, help="write the page of --out there, and run nothing")
    parser.add_argument("--find", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--survive", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()

    if given.page:
        given.page.write_text(page(json.loads(given.out.read_text())))
        return
    if given.find or given.survive:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(given.cap_gib * GIB / total)
        if given.find:
            answer = run_finder(*given.find)
        else:
            model, size, steps = given.survive
            answer = run_survival(model, int(size), int(steps))
        print(json.dumps(answer))
        return

    import torch

    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    results["about"] = {
        "command": " ".join(
            ["python benchmarks/find_gpu.py --models", *given.models, "--finders", *given.finders]
        ),
        "gpu": torch.cuda.get_device_name(0),
        "cap_gib": given.cap_gib,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for model in given.models:
        row = results.setdefault(model, {})
        for finder in given.finders:
            if finder not in row:
                row[finder] = child(["--find", model, finder], given.cap_gib)
                answer = row[finder].get("answer")
                if answer and finder in LASTING:
                    row[finder]["200 steps"] = child(["--survive", model, str(answer), "200"], given.cap_gib)
                given.out.write_text(json.dumps(results, indent=1))
            shown = {key: value for key, value in row[finder].items() if key != "trials"}
            print(model, finder, json.dumps(shown), flush=True)
        if not given.no_truth and "truth" not in row and row.get("batchfit", {}).get("answer"):
            row["truth"] = truth(model, row["batchfit"]["answer"], given.cap_gib)
            given.out.write_text(json.dumps(results, indent=1))
        print(model, "truth", row.get("truth"), flush=True)


if __name__ == "__main__":
    main()
