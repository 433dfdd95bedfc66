"""ResizableLoader beside DataLoader: steady throughput, and what a change of the batch size costs.

    python benchmarks/loader.py run --out FILE.json [--rounds N]    # again: goes on where it was
    python benchmarks/loader.py page FILE.json --to FILE.md

Throughput: epochs of both in turn, each with new workers; the wall clock from the 20th batch on, and the CPU
time of all processes over the whole epoch, which neighbours on the machine disturb less. Ratios are theirs
over ours, of the median epochs and of the fastest ones: 1.00 is DataLoader's throughput.

Changes: a loop that "trains" a fixed time on each batch, so that the workers are ahead. The stall is the wait
for the first batch of the new size, from when the size is set (or the old DataLoader is dropped) on.
`lost` adds the waits for the seven batches after it. To make one batch is part of every unplanned change: how
long that takes in one process, alone, is in the column before.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import batchfit
from batchfit._loader.pure.progress import Progress
from pages import add_page, write_page
from rows import keep

WORKERS = 4
AHEAD = 10  # batches before a change, so that all workers are at work
AFTER = 8


class Samples(Dataset[torch.Tensor]):
    """Samples copied out of memory: nothing to wait for, so that what the loader adds shows."""

    def __init__(self, shape: tuple[int, ...], kept: int) -> None:
        self.kept = torch.randn(kept, *shape)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.kept[index % len(self.kept)] * 2


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    batch_size: int
    changed: int
    batches: int  # of an epoch
    train_s: float


CASES = [
    Case("512 floats", (512,), 256, 384, 1200, 0.03),
    Case("3x224x224", (3, 224, 224), 32, 48, 60, 0.25),
]


class Doubling:
    """The planned change: after `AHEAD` batches."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def size_at(self, progress: Progress) -> int:
        return self.case.batch_size if progress.step < AHEAD else self.case.changed


def cpu_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def epoch(make: Callable[[Any], Any], dataset: Samples, case: Case) -> tuple[float, float]:
    """Seconds of the wall clock a batch, and of all processors."""
    part = torch.utils.data.Subset(dataset, range(case.batches * case.batch_size))
    gc.collect()
    cpu = cpu_s()
    began = 0.0
    for number, _ in enumerate(make(part), 1):
        if number == 20:
            began = time.perf_counter()
    wall = time.perf_counter() - began
    return wall / (case.batches - 20), (cpu_s() - cpu) / case.batches


def throughput(case: Case, dataset: Samples, rounds: int) -> dict[str, Any]:
    ways: list[Callable[[Any], Any]] = [
        lambda part: DataLoader(part, case.batch_size, shuffle=True, num_workers=WORKERS),
        lambda part: batchfit.ResizableLoader(part, case.batch_size, shuffle=True, num_workers=WORKERS),
    ]
    theirs, ours = [], []
    for number in range(rounds):
        turn = [(ways[0], theirs), (ways[1], ours)]
        for way, times in turn if number % 2 == 0 else reversed(turn):
            times.append(epoch(way, dataset, case))
    names = {"dataloader": theirs, "ours": ours}
    return {
        clock: {name: [round(one[column] * 1e3, 3) for one in times] for name, times in names.items()}
        for column, clock in enumerate(("wall_ms_a_batch", "cpu_ms_a_batch"))
    }


def waits(case: Case, batches: Iterator[Any], change: Callable[[], Iterator[Any]], size: int) -> list[float]:
    """How long the loop waits for each batch from the change on."""
    for _ in range(AHEAD):
        next(batches)
        time.sleep(case.train_s)
    found = []
    for number in range(AFTER):
        began = time.perf_counter()
        if number == 0:
            batches = change()
        got = len(next(batches))
        found.append(time.perf_counter() - began)
        if number == 0 and got != size:
            raise AssertionError(f"a batch of {got}, and {size} was wanted")
        time.sleep(case.train_s)
    return found


def changes(case: Case, dataset: Samples, rounds: int) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}

    def note(name: str, times: list[float]) -> None:
        found.setdefault(name, []).append(times)
        gc.collect()

    def ours(**keywords: Any) -> batchfit.ResizableLoader:
        return batchfit.ResizableLoader(dataset, shuffle=True, num_workers=WORKERS, **keywords)

    def theirs(size: int, persistent: bool) -> DataLoader[Any]:
        return DataLoader(dataset, size, shuffle=True, num_workers=WORKERS, persistent_workers=persistent)

    for _ in range(rounds):
        loop = iter(ours(batch_size=case.batch_size))
        note("no change", waits(case, loop, lambda loop=loop: loop, case.batch_size))
        loop = iter(ours(schedule=Doubling(case)))
        note("planned", waits(case, loop, lambda loop=loop: loop, case.changed))
        sizes = ((case.batch_size, case.changed, "larger"), (case.changed, case.batch_size, "smaller"))
        for before, after, name in sizes:
            loader = ours(batch_size=before)
            loop = iter(loader)

            def resize(loader: Any = loader, loop: Any = loop, after: int = after) -> Iterator[Any]:
                loader.batch_size = after
                return loop

            note(f"set, {name}", waits(case, loop, resize, after))
            del loader, loop, resize
        for persistent in (False, True):
            held = [theirs(case.batch_size, persistent)]
            loops = [iter(held[0])]

            def recreate(
                held: Any = held, loops: Any = loops, persistent: bool = persistent
            ) -> Iterator[Any]:
                loops.clear()
                held[0] = theirs(case.changed, persistent)
                return iter(held[0])

            name = "re-created, persistent" if persistent else "re-created"
            note(name, waits(case, itertools.chain.from_iterable(loops), recreate, case.changed))
            del held, loops, recreate
    return found


def making_s(case: Case, dataset: Samples) -> float:
    """How long it takes to make one batch of the new size, in one process that has a core for itself."""
    times = []
    for _ in range(5):
        began = time.process_time()
        torch.utils.data.default_collate([dataset[index] for index in range(case.changed)])
        times.append(time.process_time() - began)
    return statistics.median(times)


def page(found: dict[str, Any]) -> str:
    lines = [
        "# A loader whose batch size changes",
        "",
        f"Made by `python benchmarks/loader.py run`; {found['about']}; {WORKERS} workers. Medians of "
        f"{found['rounds']} rounds, all ways in turn in each. The raw numbers are in the JSON file beside.",
        "",
        "## Steady throughput, DataLoader = 1",
        "",
        "| samples | batch | CPU time of all processes: median, fastest | wall clock: median, fastest |",
        "|---|---|---|---|",
    ]
    for case in found["cases"]:
        cells = []
        for clock in ("cpu_ms_a_batch", "wall_ms_a_batch"):
            theirs, ours = case["steady"][clock]["dataloader"], case["steady"][clock]["ours"]
            median = statistics.median(theirs) / statistics.median(ours)
            cells.append(f"{median:.3f}, {min(theirs) / min(ours):.3f}")
        lines.append(f"| {case['name']} | {case['batch_size']} | {cells[0]} | {cells[1]} |")
    lines += [
        "",
        "How much the slowest epoch of DataLoader alone took over its fastest, as a measure of the noise:",
    ]
    for case in found["cases"]:
        alone = {clock: times["dataloader"] for clock, times in case["steady"].items()}
        cpu, wall = alone["cpu_ms_a_batch"], alone["wall_ms_a_batch"]
        lines.append(
            f"{case['name']} {max(cpu) / min(cpu):.2f} x by CPU time, {max(wall) / min(wall):.2f} x by the "
            "wall clock. Ratios that are nearer to 1 than this say nothing."
        )
    lines += [
        "",
        "## The wait for the first batch after a change",
        "",
        "`lost` is the waits for the first eight batches together. An unplanned change cannot be faster than "
        "it takes to make a batch: the time for that, in one process alone, stands with the sizes.",
        "",
        "| samples | sizes (one batch takes) | way | stall, ms | lost, ms | re-creating takes |",
        "|---|---|---|---|---|---|",
    ]
    for case in found["cases"]:
        stalls = {name: statistics.median(one[0] for one in rows) for name, rows in case["changes"].items()}
        for name, rows in case["changes"].items():
            lost = statistics.median(sum(one) for one in rows)
            ratio = f"{stalls['re-created'] / stalls[name]:.1f} x as long" if "re-cr" not in name else ""
            lines.append(
                f"| {case['name']} | {case['batch_size']}, {case['changed']} "
                f"({case['making_s'] * 1e3:.1f} ms) "
                f"| {name} | {stalls[name] * 1e3:.1f} | {lost * 1e3:.1f} | {ratio} |"
            )
    return "\n".join(lines) + "\n"


def run(given: argparse.Namespace) -> None:
    """Each case as soon as it is measured; a file of fewer or more rounds is not gone on with."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, python {platform.python_version()}"
    found: dict[str, Any] = {
        "about": f"{os.cpu_count()} CPU cores, shared with other programs, {versions}",
        "rounds": given.rounds,
        "cases": [],
    }
    if given.out.exists():
        before = json.loads(given.out.read_text())
        found["cases"] = before["cases"] if before["rounds"] == given.rounds else []
    begun = time.perf_counter()
    for case in CASES:
        if case.name in {one["name"] for one in found["cases"]}:
            continue
        if time.perf_counter() - begun > given.deadline_s:
            break
        dataset = Samples(case.shape, 2048 if len(case.shape) == 1 else 64)
        one: dict[str, Any] = {
            "name": case.name,
            "batch_size": case.batch_size,
            "changed": case.changed,
            "making_s": making_s(case, dataset),
            "steady": throughput(case, dataset, given.rounds),
            "changes": changes(case, dataset, given.rounds),
        }
        print(case.name, json.dumps(one["steady"]), flush=True)
        found["cases"].append(one)
        keep(given.out, found)
    print(f"{len(CASES) - len(found['cases'])} rows left")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--rounds", type=int, default=12)
    running.add_argument("--deadline-s", type=float, default=float("inf"), help="no case starts later")
    add_page(commands)
    given = parser.parse_args()
    if given.command == "run":
        run(given)
    else:
        write_page(given, page)


if __name__ == "__main__":
    main()
