"""All GPU benchmarks in parts that resume: what is missing is run, until the time is up.

    python benchmarks/gpu.py run --folder gpu --deadline-s 570        # again and again, until nothing is left
    python benchmarks/gpu.py run --folder gpu --only find profile     # some of them
    python benchmarks/gpu.py run --folder gpu --tag h200_202611       # go on from the kept results
    python benchmarks/gpu.py run --folder quick --quick               # a short form, under ten minutes in all
    python benchmarks/gpu.py pages gpu --tag h200_202611              # JSON, pages, plots, summary

Rules:
- What is timed has the machine to itself. Predictions and their truths run side by side, after all others.
- A benchmark keeps each row as soon as it is there, and says at its end how many are left; one that is still
  running when the time is up is ended, and loses the row that it was at.
- A benchmark that fails is named with its log, and the others go on; the exit code says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
GRACE_S = 8.0  # from the deadline that a benchmark is told to the end of the call
LEAST_S = 45.0  # no benchmark begins with less


@dataclass(frozen=True)
class Part:
    """One command of a benchmark. `out` is its JSON in the folder; parts of a subject may share it."""

    subject: str
    script: str
    arguments: tuple[str, ...]
    out: str
    alone: bool = True
    quick: tuple[str, ...] | None = None  # what the short form adds; None: it has none

    @property
    def name(self) -> str:
        return f"{self.script} {' '.join(self.arguments)}"


QUICK_FIND = ("--models", "gpt2", "--finders", "batchfit_predict", "accelerate")
QUICK_RAGGED = ("--ways", "ours", "fixed_8", "--flags", "default")
QUICK_PREDICTION = ("--models", "gpt2", "--precisions", "bf16")
PREDICT = ("predict", "--workers", "3", "--mode")
PARTS = (
    Part("microbatch", "microbatch_gpu", ("run",), "microbatch", quick=("--parts", "overhead/eager")),
    Part("ragged", "ragged_gpu", ("run",), "ragged", quick=QUICK_RAGGED),
    Part("find", "find_gpu", ("run", "--only", "timed"), "find", quick=QUICK_FIND),
    Part("find", "find_gpu", ("run", "--only", "untimed"), "find"),
    Part("profile", "profile_gpu", ("run",), "profile", quick=("--rows", "gpt2/24GiB/ours/1")),
    Part("ranks", "ranks_gpu", ("run",), "ranks"),
    Part("noise", "noise_gpu", ("run",), "noise", quick=("--parts", "cheap")),
    Part(
        "integrations", "integrations_gpu", ("run",), "integrations", quick=("--rows", "lightning/ours/find")
    ),
    Part("loader", "loader", ("run", "--rounds", "5"), "loader"),  # the machine's cores, not its card
    Part("stack", "stack_gpu", ("run",), "stack"),
    Part("sweep", "sweep_gpu", ("run",), "sweep", quick=("--rows", "guided/2048")),
    Part("schedules", "schedules_gpu", ("run",), "schedules"),
    *(
        Part("prediction", "prediction_gpu", arguments, out, alone=False, quick=QUICK_PREDICTION)
        for arguments, out in (
            (("truth", "--workers", "5", "--room", "100"), "truth"),
            ((*PREDICT, "gpu"), "gpu"),
            ((*PREDICT, "calibrated", "--room", "25"), "calibrated"),
            ((*PREDICT, "none"), "none"),
        )
    ),
    Part("prediction", "prediction_gpu", ("explain", "--workers", "1"), "explain", alone=False),
)
LEFT = re.compile(r"(\d+) (?:rows|parts|runs|cases) left")


class Running:
    """One part's process, with all that it starts."""

    def __init__(self, part: Part, folder: Path, until: float, quick: bool) -> None:
        self.part, self.log = part, folder / f"{part.out}.log"
        left_s = max(1.0, until - GRACE_S - time.monotonic())
        command = [sys.executable, str(HERE / f"{part.script}.py"), *part.arguments]
        command += (part.quick or ()) if quick else ()
        command += ["--out", str(folder / f"{part.out}.json"), "--deadline-s", f"{left_s:.0f}"]
        self.begun, self.until = time.monotonic(), until
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def end(self) -> tuple[bool, str]:
        """Wait for it, or end it; whether it is complete, and what to say."""
        try:
            self.process.wait(max(0.0, self.until - time.monotonic()))
            cut = ""
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            cut = ", ended at the deadline"
        told = self.log.read_text(errors="replace")
        left = LEFT.findall(told)
        seconds = time.monotonic() - self.begun
        what = self.part.name
        if self.process.returncode == 0 and left and int(left[-1]) == 0:
            return True, f"{what}: complete ({seconds:.0f} s)"
        if cut or (self.process.returncode == 0 and left):
            return False, f"{what}: {left[-1] if left else 'some'} left{cut} ({seconds:.0f} s)"
        last = (told.strip().splitlines() or ["it said nothing"])[-1]
        return False, f"{what}: failed with {self.process.returncode}: {last[:200]}, see {self.log.name}"


def run(folder: Path, deadline_s: float, only: Sequence[str], quick: bool) -> bool:
    """Whether all is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + deadline_s
    wanted = [p for p in PARTS if (not only or p.subject in only) and (not quick or p.quick is not None)]
    if only:
        wanted.sort(key=lambda part: only.index(part.subject))
    complete = True
    for part in (p for p in wanted if p.alone):
        if until - time.monotonic() < LEAST_S:
            print(f"{part.name}: left for another call", flush=True)
            complete = False
            continue
        done, told = Running(part, folder, until, quick).end()
        complete &= done
        print(told, flush=True)
    together = [p for p in wanted if not p.alone]
    if until - time.monotonic() < LEAST_S:
        return complete and not together
    for running in [Running(part, folder, until, quick) for part in together]:
        done, told = running.end()
        complete &= done
        print(told, flush=True)
    return complete


def begin_with_kept(folder: Path, tag: str, only: Sequence[str]) -> None:
    """The kept rows into the folder, where it has none. Those of predictions are kept in another form."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        kept, new = HERE / "results" / f"{part.subject}_{tag}.json", folder / f"{part.out}.json"
        wanted = part.subject != "prediction" and (not only or part.subject in only)
        if wanted and kept.exists() and not new.exists():
            shutil.copy(kept, new)


def pages(folder: Path, tag: str) -> None:
    """The JSON of each subject and its page into `results/`."""
    results = HERE / "results"
    for part in {p.subject: p for p in reversed(PARTS)}.values():
        if part.subject == "prediction":
            if (folder / "truth.json").exists():
                to = str(results / f"prediction_{tag}.json")
                made = [sys.executable, str(HERE / "prediction_gpu.py"), "page", str(folder), "--to", to]
                subprocess.run(made, check=True)
            continue
        found = folder / f"{part.out}.json"
        if not found.exists():
            print(f"{part.subject}: nothing in {folder}")
            continue
        kept = results / f"{part.subject}_{tag}.json"
        to = kept if part.subject == "find" else kept.with_suffix(".md")
        if part.subject != "find":
            shutil.copy(found, kept)
        command = [sys.executable, str(HERE / f"{part.script}.py"), "page", str(found), "--to", str(to)]
        subprocess.run(command, check=True)
        print(f"{part.subject}: {kept.name}")
    # All that is made from these: a figure must not be new in one place and old in another.
    for script in ("plots", "summary"):
        subprocess.run([sys.executable, str(HERE / f"{script}.py"), "write"], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    subjects = sorted({part.subject for part in PARTS})
    running = commands.add_parser("run")
    running.add_argument("--folder", type=Path, default=Path("gpu"))
    running.add_argument("--deadline-s", type=float, default=570)
    running.add_argument("--only", nargs="+", default=[], choices=subjects)
    running.add_argument("--tag", help="go on from the results that are kept with this tag")
    running.add_argument("--quick", action="store_true", help="a short form of each")
    paging = commands.add_parser("pages")
    paging.add_argument("folder", type=Path)
    paging.add_argument("--tag", required=True, help="hardware and month, as in h200_202611")
    given = parser.parse_args()
    if given.command == "pages":
        pages(given.folder, given.tag)
        return
    if given.tag:
        begin_with_kept(given.folder, given.tag, given.only)
    if not run(given.folder, given.deadline_s, given.only, given.quick):
        raise SystemExit(3)


if __name__ == "__main__":
    main()
