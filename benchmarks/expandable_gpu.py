"""Expandable segments on one GPU: the largest size and the reserved memory, beside what predict says.

    python benchmarks/expandable_gpu.py --out expandable.json      # about six minutes on an H200, resumes
    python benchmarks/expandable_gpu.py --out expandable.json --show

Each case is a process of its own, on 16 GiB: either a cap (`set_per_process_memory_fraction`) or all that is
free on the GPU, where the process first takes the rest from the driver, outside torch's allocator. The two
ends differ: under a cap torch asks for room for a whole request, on a full GPU only for missing pages.
The truth is a bracket: the size survives a soak, the next (0.5 %, at least one sample) does not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prediction_gpu import GIB, about, capped
from rows import keep

MODELS = (
    ("unet", "fp32"),
    ("t5_small", "fp32"),
    ("gpt2", "fp32"),
    ("mobilenetv2", "bf16"),
    ("llama110m", "fp32"),
)
ENDS = (("cap", "expandable"), ("gpu", "expandable"), ("gpu", "fixed"))
CAP_GIB = 16.0
SOAK = 20
MOST_SOAKS = 8


def bracket(start: int, survives: Callable[[int], bool], most: int = MOST_SOAKS) -> tuple[int, int | None]:
    """The largest size that survives and the smallest that does not, searched from `start` on.

    The second is None where `most` runs were too few to meet it; the first is 0 where none survived.
    """
    good, left = 0, most
    fails: int | None = None
    stride = max(1, round(start / 100))
    size = start
    while left and size >= 1 and (fails is None or fails - good > max(1, good // 200)):
        left -= 1
        if survives(size):
            good = size
        else:
            fails = size
        if fails is None:
            size = good + stride
        elif good == 0:
            size = fails - stride
            stride *= 2
        else:
            size = (good + fails) // 2
    return good, fails


def fill_up(to_leave: int) -> int:
    """Take memory from the driver until this process can have `to_leave` bytes more; how much was taken."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    taken = free + torch.cuda.memory_reserved() - to_leave
    driver, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
    status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(taken))
    if status:
        raise RuntimeError(f"cuMemAlloc of {taken} bytes: CUDA error {status}")
    return taken


def run(model: str, precision: str, end: str, segments: str) -> dict[str, Any]:
    import torch

    import batchfit
    import zoo
    from batchfit._engine.device.resolve import resolve_device
    from batchfit._engine.device.tensors import tensors_in
    from batchfit._engine.snapshot.snapshot import Snapshot
    from batchfit._engine.trial.trial import run_trial

    room = round(CAP_GIB * GIB)
    if end == "cap":
        capped(CAP_GIB)
    workload = zoo.make(model, precision)
    place = resolve_device(None, near=workload.state)
    snapshot = Snapshot.take(workload.state)
    parameters = [one for one in tensors_in(workload.state) if one.requires_grad]
    soaks: list[dict[str, Any]] = []

    def trial(size: int, steps: int) -> Any:
        return run_trial(
            workload.step,
            size,
            device=place,
            snapshot=snapshot,
            parameters=parameters,
            steps=steps,
            soak=steps == SOAK,
        )

    trial(2, 3)  # what kernels and libraries take of the GPU when they are loaded
    taken = fill_up(room) if end == "gpu" else 0
    before = place.budget_bytes()
    begun = time.perf_counter()
    prediction = batchfit.predict_batch_size(workload, margin=0.0, calibrate=False)  # of what is free here
    predict_s = time.perf_counter() - begun

    def survives(size: int) -> bool:
        done = trial(size, SOAK)
        kept = ("size", "outcome", "steps_run", "peak_bytes", "reserved_bytes", "alloc_retries")
        told = done.model_dump()
        soaks.append({name: told[name] for name in kept} | {"sustained": done.sustained})
        return bool(done.sustained)

    good, fails = bracket(prediction.batch_size, survives)
    reserved = None
    if good:
        why = batchfit.explain_memory(workload, batch_size=good, what_if=False)
        reserved = why.reserved_bytes  # without an end: what the steps would reserve if they could
    return {
        "predicted": prediction.batch_size,
        "predicted_s": predict_s,
        "caveats": list(prediction.unseen),
        "sustained": good,
        "fails": fails,
        "predicted_reserved_bytes": reserved,
        "soaks": soaks,
        "taken_bytes": taken,
        "budget_bytes": [before, place.budget_bytes()],  # what is loaded meanwhile is missing at the end
        "fraction": float(torch.cuda.get_per_process_memory_fraction()),
    }


def child(case: tuple[str, str, str, str], timeout_s: float) -> dict[str, Any]:
    expandable = case[3] == "expandable"
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{expandable}",
    }
    environment.pop("PYTORCH_ALLOC_CONF", None)
    command = [sys.executable, __file__, "--one", *case]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def table(results: dict[str, Any]) -> list[str]:
    gib = 2**30
    lines = ["| case | predicted | sustained, fails | reserved: predicted, measured (GiB) | retries |"]
    lines.append("|---" * 5 + "|")
    for key, one in results.items():
        if "error" in one:
            lines.append(f"| {key} | {one['error'].strip().splitlines()[-1][:80]} | | | |")
            continue
        at = [soak for soak in one["soaks"] if soak["size"] == one["sustained"]]
        measured = f"{(at[-1]['reserved_bytes'] or 0) / gib:.2f}" if at else "-"
        said = f"{(one['predicted_reserved_bytes'] or 0) / gib:.2f}"
        retries = at[-1]["alloc_retries"] if at else "-"
        ends = f"{one['sustained']}, {one['fails']}"
        lines.append(f"| {key} | {one['predicted']} | {ends} | {said}, {measured} | {retries} |")
    return lines


def show(results: dict[str, Any]) -> None:
    print("\n".join(table(results)))


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    about_ = found["about"]
    lines = [
        "# Expandable segments against an H200",
        "",
        f"{about_.get('hardware', about_)}.",
        "Made by `python benchmarks/expandable_gpu.py --out expandable.json`.",
        "16 GiB: a cap (`set_per_process_memory_fraction`), or the GPU's own memory, of which the process",
        "took the rest from the driver first. The first size survives a soak of 20 steps, the second (0.5 %",
        "more, at least one sample) does not. Predicted: on this GPU, not calibrated, without a margin.",
        "Loops that keep nothing from step to step.",
        "",
        *table(found["cases"]),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("expandable.json"))
    parser.add_argument("--deadline-s", type=float, default=360, help="no case begins after it")
    parser.add_argument("--show", action="store_true", help="print the table of what is there")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(*given.one)))
        return
    kept: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    results: dict[str, Any] = kept.get("cases", {})
    if given.show:
        show(results)
        return
    ends = time.monotonic() + given.deadline_s
    hardware, lock = about(), threading.Lock()

    def one(case: tuple[str, str, str, str]) -> None:
        key = "/".join(case)
        left = ends - time.monotonic()
        if left < 20 or "error" not in results.get(key, {"error": None}):
            return
        begun = time.monotonic()
        answer = child(case, left)
        with lock:
            results[key] = {**answer, "seconds": time.monotonic() - begun}
            keep(given.out, {"about": hardware, "cases": results})
        shown = {name: answer.get(name) for name in ("predicted", "sustained", "fails", "error")}
        print(key, round(results[key]["seconds"]), shown, flush=True)

    for end, segments in ENDS:
        # Under caps several share the GPU; one that fills it is alone.
        with ThreadPoolExecutor(4 if end == "cap" else 1) as executor:
            list(executor.map(one, [(model, precision, end, segments) for model, precision in MODELS]))
    show(results)


if __name__ == "__main__":
    main()
