"""Where the time of a find, a microbatched step, a trace and a resize goes: samples of the stack, on a CPU.

    python benchmarks/own_cost.py run --out FILE.json
    python benchmarks/own_cost.py page FILE.json --to FILE.md

Rules: a timer of CPU time (`ITIMER_PROF`) fires with the kernel's tick; a sample belongs to the innermost
frame that says whose it is, and counts for the CPU time since the one before. `the program` is the user's
step, torch's backward and the optimizer's own step: what a loop by hand would do too. A file of batchfit is
our own code, with what torch and Python do for it (garbage collections stand with whoever asked for them).
"""

from __future__ import annotations

import argparse
import collections
import json
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pages import add_page, write_page
from turns import about, made_by

Results = dict[str, Any]
PROGRAM = "the program"
HERE = Path(__file__).parent
# Frames of torch that are the program's work, whoever called them.
THEIRS = ("/torch/autograd/", "/torch/optim/", "/torch/utils/data/", "/torch/_ops.py")
FAKE = "/torch/_subclasses/"


def owner(frame: FrameType | None) -> str:
    """Whose the innermost telling frame is."""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/batchfit/" in name:
            return "batchfit/" + name.rsplit("/batchfit/", 1)[1]
        if FAKE in name:
            return "torch's fake tensors"
        if any(part in name for part in THEIRS) or (name.startswith(str(HERE)) and "own_cost" not in name):
            return PROGRAM
        frame = frame.f_back
    return "the rest"


def sampled(work: Callable[[], object], times: int) -> Results:
    """The share of each owner."""
    found: collections.defaultdict[str, float] = collections.defaultdict(float)
    samples, last = 0, 0.0

    def note(_: int, frame: FrameType | None) -> None:
        nonlocal samples, last
        # Weighed: signals that come during one long call (a garbage collection) arrive as one, at its end.
        now = time.process_time()
        found[owner(frame)] += now - last
        samples, last = samples + 1, now

    work()
    last = time.process_time()
    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        for _ in range(times):
            work()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    whole = sum(found.values())
    shares = sorted(((name, some / whole) for name, some in found.items()), key=lambda one: -one[1])
    return {"samples": samples, "shares": dict(shares)}


def find() -> tuple[Callable[[], object], int]:
    import cost_cpu

    return lambda: cost_cpu.searching()[1](), 2


def microbatch(name: str, times: int) -> Callable[[], tuple[Callable[[], object], int]]:
    def make() -> tuple[Callable[[], object], int]:
        import cost_cpu

        return cost_cpu.stepping(getattr(cost_cpu, name)())["ours"], times

    return make


def trace() -> tuple[Callable[[], object], int]:
    import cost_cpu

    return cost_cpu.tracing()[0], 15


def resize() -> tuple[Callable[[], object], int]:
    """An epoch in which the size is set before every tenth batch."""
    import torch
    from torch.utils.data import TensorDataset

    import batchfit

    dataset = TensorDataset(torch.randn(8192, 128))

    def epoch() -> None:
        loader = batchfit.ResizableLoader(dataset, 32, shuffle=True)
        for number, _ in enumerate(loader):
            if number % 10 == 9:
                loader.batch_size = 48 if loader.batch_size == 32 else 32

    return epoch, 60


WHAT = {
    "a find, small GPT in virtual memory": find,
    "a step of 8 microbatches, tiny MLP": microbatch("tiny", 800),
    "a step of 8 microbatches, small GPT": microbatch("small", 40),
    "a trace of two steps, small GPT": trace,
    "an epoch with a resize every ten batches, no workers": resize,
}


def page(found: Results) -> str:
    made = f"{made_by(found['about'])}."
    lines = ["# Where our own time goes", "", made, ""]
    for name, one in found.items():
        if name == "about":
            continue
        lines += [f"## {name[0].upper()}{name[1:]}", "", f"{one['samples']} samples.", ""]
        lines += ["| whose | share |", "|---|---|"]
        shown = {owner: share for owner, share in one["shares"].items() if share >= 0.005}
        lines += [f"| {owner} | {share:.1%} |" for owner, share in shown.items()]
        lines += [f"| all others | {1 - sum(shown.values()):.1%} |", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run").add_argument("--out", type=Path, required=True)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    import torch

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found: Results = {"about": about("python benchmarks/own_cost.py run")}
    for name, make in WHAT.items():
        work, times = make()
        found[name] = sampled(work, times)
        given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(page(found))


if __name__ == "__main__":
    main()
