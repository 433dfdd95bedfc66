"""Training and evaluation loops as people write them: what a trace predicts of each, and what a GPU does.

    python tests/support/gallery.py --out gallery.json               # all of them, nothing asserted
    python tests/support/gallery.py --out gallery.json --only moco maml

A row for each loop and size: the peaks that were predicted with the GPU and without it, and the measured
one; for a loop that was refused or failed, why.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import signal
import sys
import time
import traceback
import types
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gallery_language  # noqa: F401  the loops hang themselves up
import gallery_refused  # noqa: F401
import gallery_training  # noqa: F401
import gallery_vision  # noqa: F401
import numpy as np
import torch
from gallery_case import CASES, Case
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch_private import C, gradient_hooks

import batchfit
from batchfit import errors
from batchfit._engine.trace.values import Unread

BUDGET = 5 * 2**29  # 2.5 GiB
LIMIT_S = 20  # of one loop
MAX_SIZE = 8192  # more samples take the host too long to make


def seeded() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def cleaned() -> int:
    """Nothing of the loop before is on the GPU, what cuBLAS keeps included; answers what still is."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def let_go(workload: batchfit.Workload) -> None:
    """Take off the hooks of parameters: torch keeps what they close over for good."""
    for one in held_by(workload).values():
        if isinstance(one, Tensor) and gradient_hooks(one):
            gradient_hooks(one).clear()


# ---------------------------------------------------------------- predicted and measured


def predicted(case: Case, workload: batchfit.Workload, *, gpu: str | None) -> batchfit.Prediction:
    """With the GPU that is here and nothing run on it, or as if there were none."""
    most = case.most or MAX_SIZE
    calibrate = False if gpu is None else None
    return batchfit.predict_batch_size(
        workload, budget=BUDGET, gpu=gpu, max_size=most, margin=0.0, calibrate=calibrate
    )


def sizes_for(prediction: batchfit.Prediction) -> tuple[int, int]:
    """About half of the budget, and all of it."""
    return max(2, prediction.batch_size // 4 * 2), max(4, prediction.batch_size // 2 * 2)


def measured(workload: batchfit.Workload, size: int, *, steps: int = 3) -> int:
    """The peak of three real steps.

    cuDNN takes room that it would do without on a smaller card: up to twice of all else, in a few loops.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        workload.step(size)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


# ---------------------------------------------------------------- nothing is changed


def held_by(workload: batchfit.Workload) -> dict[str, Any]:
    """Every tensor, number and text that a loop can reach, by the way to it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    places: list[tuple[str, Any]] = [("step", workload.step), ("state", list(workload.state))]
    while places:
        path, value = places.pop()
        if isinstance(value, int | float | str | bytes | None):
            found[path] = value
            continue
        if isinstance(value, Tensor):
            found[path] = value
            if type(value) is not FakeTensor and value.is_leaf and value.grad is not None:
                found[f"{path}.grad"] = value.grad
            continue
        if isinstance(value, Unread):
            found[path] = value
        if id(value) in seen or isinstance(value, type | types.ModuleType):
            continue
        seen.add(id(value))
        places += [(f"{path}{name}", one) for name, one in _inside(value)]
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        yield from ((".func", value.__func__), (".self", value.__self__))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                yield f".{name}", cell.cell_contents
    elif isinstance(value, dict):
        for number, (key, one) in enumerate(value.items()):
            yield f"[{key!r}]" if isinstance(key, str | int) else f"[{number}]", one
            if isinstance(key, Tensor):
                yield f"[key {number}]", key
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{number}]", one) for number, one in enumerate(value))
    elif isinstance(value, nn.Module | torch.optim.Optimizer | torch.amp.GradScaler) or (
        type(value).__module__.startswith(("gallery", "torch.optim"))
    ):
        yield from ((f".{name}", one) for name, one in vars(value).items())


def frozen(held: dict[str, Any]) -> dict[str, Any]:
    """The same with values that stay: which object a tensor is, and its bits."""
    return {path: _facts(one) if isinstance(one, Tensor) else one for path, one in held.items()}


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor), tensor.shape, tensor.layout
    return id(tensor), tensor.shape, tensor.requires_grad, tensor.detach().cpu().clone()


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Where two of them differ."""
    found = sorted(before.keys() ^ after.keys())
    for path in before.keys() & after.keys():
        one, two = before[path], after[path]
        if isinstance(one, tuple) and isinstance(two, tuple):
            same = one[:3] == two[:3] and all(
                torch.equal(a, b) or torch.equal(a.isnan(), b.isnan())
                for a, b in zip(one[3:], two[3:], strict=True)
            )
        else:
            same = type(one) is type(two) and (one == two or one != one)
        if not same:
            found.append(path)
    return found


def left_behind(held: dict[str, Any]) -> list[str]:
    """Where a loop holds something that has no value."""
    return [path for path, one in held.items() if isinstance(one, FakeTensor | Unread)]


# ---------------------------------------------------------------- all of them, into a file


class _TooLongError(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Inside, a loop that takes longer is given up."""

    def stop(*_: object) -> None:
        raise _TooLongError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rows_of(case: Case) -> Iterator[dict[str, Any]]:
    """What there is to say of a loop; a failure of one part leaves the others."""
    begun = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "expected": case.expected, "held_before": cleaned()}
    here = torch.cuda.is_available()
    predictions: dict[str, batchfit.Prediction] = {}
    seeded()
    for kind, device, gpu in (("gpu", "cuda", None), ("cpu", "cpu", "h200")):
        if kind == "gpu" and not here:
            continue
        row[f"outcome_{kind}"] = "failed"
        began = time.perf_counter()
        with noted(row, f"error_{kind}"):
            work = case.make(device)
            before = frozen(held_by(work))
            try:
                predictions[kind] = predicted(case, work, gpu=gpu)
                row[f"outcome_{kind}"] = "traced"
                row[f"check_{kind}"] = predictions[kind].check
            except errors.UntraceableError as error:
                row |= {f"outcome_{kind}": "refused", f"refused_{kind}": str(error)}
            after = held_by(work)
            row[f"left_{kind}"] = left_behind(after)[:8]
            row[f"changed_{kind}"] = differences(before, frozen(after))[:8]
            let_go(work)
        work = before = after = None
        gc.collect()
        row[f"predict_s_{kind}"] = round(time.perf_counter() - began, 2)
    if not predictions:
        yield row | {"seconds": round(time.perf_counter() - begun, 2)}
        return
    sizes = sizes_for(predictions.get("gpu") or predictions["cpu"])
    row["held_before_steps"] = cleaned()
    seeded()
    with noted(row, "error_make"):
        work = case.make("cuda") if here else None
    for size in sizes:
        one = {**row, "size": size}
        for kind, prediction in predictions.items():
            with noted(one, f"error_{kind}"):
                one[f"predicted_{kind}"] = prediction.peak_bytes_at(size)
        if work is not None:
            began = time.perf_counter()
            with noted(one, "error_measured"):
                one["measured"] = measured(work, size)
                for kind in predictions:
                    one[f"off_{kind}"] = round(one[f"predicted_{kind}"] / one["measured"] - 1, 5)
            one["measure_s"] = round(time.perf_counter() - began, 2)
        yield one | {"seconds": round(time.perf_counter() - begun, 2)}
    if work is not None:
        let_go(work)


@contextlib.contextmanager
def noted(row: dict[str, Any], name: str) -> Iterator[None]:
    """An error becomes text in the row."""
    try:
        with limited(LIMIT_S):
            yield
    except (Exception, _TooLongError):  # noqa: BLE001  the other loops go on
        row[name] = traceback.format_exc()[-1500:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.json")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", choices=[*CASES, []])
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[dict[str, Any]] = []
    for name in arguments.only or CASES:
        for row in rows_of(CASES[name]):
            rows.append(row)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
            print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    off = " ".join(f"{kind} {row[f'off_{kind}']:+.2%}" for kind in ("gpu", "cpu") if f"off_{kind}" in row)
    bytes_ = next((row[key] for key in ("measured", "predicted_gpu", "predicted_cpu") if key in row), 0)
    outcomes = {row.get(f"outcome_{kind}") for kind in ("gpu", "cpu")} - {None}
    marks = [key for key in row if key.startswith(("error", "left", "changed")) and row[key]]
    size = row.get("size", "-")
    return (
        f"{row['name']:26} {'/'.join(sorted(outcomes)):8} {size:>6} {bytes_ / 2**20:8.0f} MiB  {off}  "
        f"{row['seconds']:.1f} s {' '.join(marks)}"
    )


if __name__ == "__main__":
    sys.exit(main())
