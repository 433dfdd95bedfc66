"""Which modules of batchfit a call enters: the length of the walk that a reader takes through the source.

    python benchmarks/walks.py            # find, backward with one OOM, predict: modules and switches
    python benchmarks/walks.py --list     # with the modules in the order in which they are entered

A module is entered when one of its functions is called; its import does not count. Functions that torch calls
back while virtual memory is on (`_engine/virtual_memory`, and what they call) stand for the GPU, and those
that reach a private name of torch's (`_engine/torch_private`) for torch: neither is counted.

`backward` is a call of a function that has run before, as nearly every call is: the checks of a new one are
made once, and `first backward` enters them too.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

import batchfit
from batchfit.results import StepReport

ROOT = str(Path(batchfit.__file__).parent)
GPU = "_engine.virtual_memory"
NOT_COUNTED = (GPU, "_engine.torch_private")


class Walk(NamedTuple):
    """The modules that a call entered, in order of entry, and how often control went to another one."""

    modules: tuple[str, ...]
    switches: int


def walk(call: Callable[[], object]) -> Walk:
    """Run `call` and record the modules that it enters."""
    seen: dict[str, None] = {}
    switches, last = 0, ""

    def record(frame: Any, event: str, _: object) -> None:
        nonlocal switches, last
        module = module_of(frame.f_code) if event == "call" else ""
        if not module or module.startswith(NOT_COUNTED):
            return
        caller = frame.f_back
        while caller is not None and not module_of(caller.f_code):
            caller = caller.f_back
        if caller is not None and module_of(caller.f_code).startswith(GPU):
            return
        seen[module] = None
        switches += module != last
        last = module

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(tuple(seen), switches)


@cache
def module_of(code: CodeType) -> str:
    """The module of batchfit that holds this function; "" for other code, and for what an import runs."""
    if not code.co_filename.startswith(ROOT) or code.co_name == "<module>":
        return ""
    return ".".join(Path(code.co_filename[len(ROOT) + 1 : -3]).parts)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 256), torch.randint(0, 10, (size,))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))


def walks() -> dict[str, Walk]:
    """The walks, each of a call like one that was made before: imports do not count."""
    torch.manual_seed(0)
    model = make_model()
    workload = batchfit.training(model, torch.optim.Adam(model.parameters()), loss_fn, make_batch)
    found = {}
    for name, call, budgets in (
        ("find", batchfit.find_batch_size, ("16MiB", "15MiB")),
        ("predict", batchfit.predict_batch_size, ("2GiB", "1GiB")),
    ):
        call(workload, budget=budgets[0])
        # Another budget: what a search decides for the first one is remembered.
        found[name] = walk(lambda: call(workload, budget=budgets[1]))  # noqa: B023
    batch = make_batch(2048)
    reports: list[StepReport] = []
    needed: list[int] = []  # bytes of a tensor that the next microbatch makes first

    def fn(micro: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if needed:
            torch.empty(needed.pop(), dtype=torch.uint8)
        return loss_fn(model, micro)

    with batchfit.virtual_memory("1GiB"):
        for _ in range(2):
            mb = batchfit.Microbatcher(model, budget="13MiB")
            found["first backward"] = walk(lambda: reports.append(mb.backward(fn, batch)))  # noqa: B023
        needed.append(2**30)
        found["backward"] = walk(lambda: reports.append(mb.backward(fn, batch)))
    assert all(report.retries == 1 for report in reports), f"each of them has one OOM: {reports}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the modules")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, found in walks().items():
        print(f"{name}: {len(found.modules)} modules, {found.switches} switches")
        if given.list:
            print("  " + "\n  ".join(found.modules))


if __name__ == "__main__":
    main()
