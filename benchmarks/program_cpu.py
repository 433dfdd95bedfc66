"""What `find -- COMMAND` costs, and whether it answers as a workload does.

    python benchmarks/program_cpu.py run --out FILE.json [--part step|start|search|programs] [--rounds N]
    python benchmarks/program_cpu.py page FILE.json --to FILE.md

Rules: `step`: programs that wait for their turn take blocks of steps, in turn; one has no probe, one has it,
one has it with the virtual memory that stands for a GPU's limit (on a GPU there is no such cost). `start`:
CPU time of processes that import torch, in turn, with the probe and without. `search`: one command that
sleeps 20 s before it trains. Each way runs that command and counts whole starts; the last one is another
program, changed to search within itself. `programs`: those of tests/program/programs, which nobody adapted,
by command and as a workload under the same virtual memory; `--program NAME` runs some of them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from turns import IN_TURN, about, children_cpu_s, in_turn, made_by, median_ms

Results = dict[str, Any]
SLEEP_S, BUDGET, START = 20, "16MiB", 256
SUPPORT = Path(__file__).parents[1] / "tests" / "support"
TRAINS = """
import sys, time, torch
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(16, 64, 256)
def step():
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
for _ in range(5):
    step()
print("ready", flush=True)
for line in sys.stdin:
    begun = time.process_time()
    for _ in range(int(line)):
        step()
    print(time.process_time() - begun, flush=True)
"""
SLOW = f"""
import sys, time, torch
time.sleep({SLEEP_S})
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.Adam(model.parameters())
def train(size, steps):
    for step in range(steps):
        x = torch.randn(size, 16, 256)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
PLAIN = f"{SLOW}train(int(sys.argv[1]), 10_000)\n"
# The same program changed: Accelerate's decorator around its loop, and our virtual memory in a GPU's place.
CHANGED = f"""{SLOW}
import batchfit
from accelerate.utils import find_executable_batch_size
sizes = []
@find_executable_batch_size(starting_batch_size={START})
def run(batch_size):
    sizes.append(batch_size)
    train(batch_size, 3)
    return batch_size
with batchfit.virtual_memory({BUDGET!r}):
    answer = run()
print(answer, *sizes)
"""


class Listener:
    """Stands for the parent of a probe: takes what it says, and nothing more."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="batchfit-bench-"))
        for name in ("t", "b", "out"):
            (self.folder / name).mkdir()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.folder / "s"))
        self._socket.listen(8)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            threading.Thread(target=self._drain, args=(peer,), daemon=True).start()

    @staticmethod
    def _drain(peer: socket.socket) -> None:
        while peer.recv(1 << 16):
            pass

    def environment(self, *, limits: bool) -> dict[str, str]:
        """The environment of a program with a probe that reports here and never stops it."""
        from batchfit._program.pure.variables import probe_variables

        settings = {
            "socket": str(self.folder / "s"),
            "token": "t",
            "steps": 10**9,
            "stops": limits,
            "device": "cpu",
            "budget_bytes": 2**34,
            "ram_bytes": 2**34,
        }
        return probe_variables(os.environ, folder=str(self.folder), settings=json.dumps(settings))

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self.folder)


def measure_steps(rounds: int) -> Results:
    """CPU seconds of blocks of steps by way, in turn."""
    listener, block = Listener(), 5
    ways = {
        "no probe": dict(os.environ),
        "probe": listener.environment(limits=False),
        "probe, virtual memory": listener.environment(limits=True),
    }
    programs = {
        name: subprocess.Popen(
            [sys.executable, "-c", TRAINS],
            env={**env, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for name, env in ways.items()
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    try:
        for process in programs.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for number in range(rounds):
            order = list(programs) if number % 2 else list(programs)[::-1]
            for name in order:
                process = programs[name]
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(f"{block}\n")
                taken[name].append(float(process.stdout.readline()) / block)
    finally:
        for process in programs.values():
            process.kill()
            process.wait()
        listener.close()
    plain = taken["no probe"]
    return {
        "rounds": rounds,
        "block": block,
        "step_ms": {name: 1000 * statistics.median(each) for name, each in taken.items()},
        "least_ms": {name: 1000 * min(each) for name, each in taken.items()},
        "ratio": {
            name: statistics.median(a / b for a, b in zip(each, plain, strict=True))
            for name, each in taken.items()
        },
    }


def measure_starts(rounds: int) -> Results:
    """CPU milliseconds of a process, with the probe and without."""
    listener = Listener()
    with_probe = {**listener.environment(limits=True), "PYTHONUNBUFFERED": ""}

    def start(code: str, env: dict[str, str]) -> None:
        subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True)

    ways = {
        "Python": lambda: start("pass", dict(os.environ)),
        "Python, probe": lambda: start("pass", with_probe),
        "import torch": lambda: start("import torch", dict(os.environ)),
        "import torch, probe": lambda: start("import torch", with_probe),
    }
    try:
        seconds = in_turn(ways, rounds, seconds=children_cpu_s, warm_up=1)
    finally:
        listener.close()

    def beside(name: str) -> float:
        pairs = zip(seconds[f"{name}, probe"], seconds[name], strict=True)
        return 1000 * statistics.median(a - b for a, b in pairs)

    return {
        "rounds": rounds,
        "cpu_ms": median_ms(seconds),
        "more_ms": {name: beside(name) for name in ("Python", "import torch")},
    }


def measure_searches() -> Results:
    """Answer, starts and seconds of each way to search with the same slow command."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "train.py").write_text(PLAIN)
        (folder / "changed.py").write_text(CHANGED)
        return {
            "sleep_s": SLEEP_S,
            "budget": BUDGET,
            "ways": {
                "batchfit": _by_batchfit(folder),
                "batchfit --strategy bisect": _by_batchfit(folder, "--strategy", "bisect"),
                f"Accelerate's 0.9 rule from {START}, a start per size": _by_accelerate(folder),
                f"the program changed: Accelerate's decorator from {START}": _by_changed_program(folder),
            },
        }


def _by_batchfit(folder: Path, *flags: str) -> Results:
    words = [sys.executable, "-m", "batchfit", "find", "--json", "--no-store", "--budget", BUDGET, *flags]
    words += ["--", sys.executable, "train.py", "{}"]
    begun = time.perf_counter()
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - begun
    fit = json.loads(ran.stdout)
    sizes = list(dict.fromkeys(trial["size"] for trial in fit["trials"]))
    return {"answer": fit["batch_size"], "sizes": sizes, "starts": len(sizes), "seconds": seconds}


def _by_accelerate(folder: Path) -> Results:
    """Accelerate's own decorator, around a function that runs the command at a size under our probe."""
    import torch
    from accelerate.utils import find_executable_batch_size

    from batchfit._engine.trial.trial import TrialRequest
    from batchfit._program.pure.template import CommandTemplate
    from batchfit._program.trials import ProgramTarget, ProgramTrials
    from batchfit._units import parse_bytes

    sizes: list[int] = []
    template = CommandTemplate(words=(sys.executable, str(folder / "train.py"), "{}"))
    runner = ProgramTrials(ProgramTarget(template=template), TrialRequest(1, steps=3))

    @find_executable_batch_size(starting_batch_size=START)
    def run(batch_size: int) -> int:
        sizes.append(batch_size)
        with runner.trying(parse_bytes(BUDGET)) as trial:
            if not trial(TrialRequest(batch_size, steps=3)).fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    begun = time.perf_counter()
    answer = run()
    seconds = time.perf_counter() - begun
    return {"answer": answer, "sizes": sizes, "starts": len(sizes), "seconds": seconds}


def _by_changed_program(folder: Path) -> Results:
    begun = time.perf_counter()
    words = [sys.executable, "changed.py"]
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    answer, *sizes = map(int, ran.stdout.split())
    return {"answer": answer, "sizes": sizes, "starts": 1, "seconds": time.perf_counter() - begun}


def measure_programs(names: list[str]) -> Results:
    """Each program's answer by its command and as a workload, with the runs and seconds of both."""
    sys.path.insert(0, str(SUPPORT))
    from program_cases import CASES, MORE

    found: Results = {}
    for case in (*CASES, *MORE):
        if names and case.name not in names:
            continue
        if not all(importlib.util.find_spec(one) for one in case.needs):
            print(f"{case.name}: skipped, needs {', '.join(case.needs)}", file=sys.stderr)
            continue
        found[case.name] = {"command": " ".join(case.command), "budget": case.budget}
        for way, find in (("by_command", case.by_command), ("as_workload", case.as_workload)):
            with tempfile.TemporaryDirectory() as place:
                case.make(Path(place))
                begun = time.perf_counter()
                fit = find(Path(place))
                found[case.name][way] = {
                    "answer": fit.batch_size,
                    "sizes": list(dict.fromkeys(trial.size for trial in fit.trials)),
                    "ooms": sum(trial.outcome == "oom" for trial in fit.trials),
                    "peak_bytes": fit.peak_bytes,
                    "seconds": time.perf_counter() - begun,
                }
        answers = [found[case.name][way]["answer"] for way in ("by_command", "as_workload")]
        if abs(answers[0] - answers[1]) > 1:  # within the tolerance of the searches: exact ones must agree
            with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
                case.make(Path(one))
                case.make(Path(other))
                found[case.name]["exact"] = case.both_exact(Path(one), Path(other))
        print(case.name, found[case.name], file=sys.stderr, flush=True)
    return found


def page(found: Results) -> str:
    """The results as text: the parts that were measured."""
    lines = ["# What a search in a program costs", "", f"{made_by(found['about'])}. {IN_TURN}"]
    for part, said in (
        ("step", _of_steps),
        ("start", _of_starts),
        ("search", _of_searches),
        ("programs", _of_programs),
    ):
        if part in found:
            lines += ["", *said(found[part])]
    return "\n".join(lines) + "\n"


def _of_steps(step: Results) -> list[str]:
    lines = [
        f"## A step: blocks of {step['block']} steps, {step['rounds']} rounds",
        "",
        "| way | CPU ms per step, median | least | ratio to no probe |",
        "|---|---|---|---|",
    ]
    for name, ms in step["step_ms"].items():
        lines.append(f"| {name} | {ms:.2f} | {step['least_ms'][name]:.2f} | {step['ratio'][name]:.4f} |")
    return [*lines, "", "Virtual memory is what limits a program on a CPU; on a GPU the allocator does."]


def _of_starts(start: Results) -> list[str]:
    lines = [
        f"## A start, {start['rounds']} rounds",
        "",
        "| process | CPU ms, median | more with the probe |",
        "|---|---|---|",
    ]
    for name, more in start["more_ms"].items():
        lines.append(f"| {name} | {start['cpu_ms'][name]:.0f} | {more:.0f} |")
    return lines


def _of_searches(search: Results) -> list[str]:
    lines = [
        f"## A program that takes {search['sleep_s']} s to start, {search['budget']} of virtual memory",
        "",
        "| way | answer | starts | OOMs | seconds | sizes |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in search["ways"].items():
        sizes = ", ".join(map(str, one["sizes"]))
        ooms = sum(size > one["answer"] for size in one["sizes"])
        lines.append(
            f"| {name} | {one['answer']} | {one['starts']} | {ooms} | {one['seconds']:.0f} | {sizes} |"
        )
    return [
        *lines,
        "",
        "The answers of batchfit took 25 steps; Accelerate's rule ends with the first size that takes three.",
        "The last row is another program: one that was changed starts once, whatever it tries.",
    ]


def _of_programs(found: Results) -> list[str]:
    lines = [
        "## Programs that nobody adapted",
        "",
        "| program | virtual memory | by command | as a workload | starts | OOMs | seconds | of workload |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        command, workload = one["by_command"], one["as_workload"]
        lines.append(
            f"| {name} | {one['budget']} | {command['answer']} | {workload['answer']} | "
            f"{len(command['sizes'])} | {command['ooms']} | {command['seconds']:.0f} | "
            f"{workload['seconds']:.0f} |"
        )
    exact = "; ".join(
        f"`{name}` {' and '.join(map(str, one['exact']))}" for name, one in found.items() if "exact" in one
    )
    more = (
        (f"Exact searches (`--tolerance 0`) of both, where they differ by more: {exact}.",) if exact else ()
    )
    return [
        *lines,
        "",
        "The programs: `tests/program/programs`; as workloads: `program_workloads.py`. Rows were measured at",
        "different times, on a machine more or less busy: compare seconds within a row only. An answer may",
        "lie below the true maximum by the tolerance of the search.",
        *more,
        "TRL's loss takes 9 MiB per sample on a CPU, whatever the vocabulary. `hydrated` and `lit_cli` need",
        "packages that are not installed with the tests (hydra-core, jsonargparse).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--rounds", type=int, default=15)
    running.add_argument("--part", choices=("step", "start", "search", "programs"), action="append")
    running.add_argument("--program", action="append", default=[])
    running.add_argument("--out", type=Path, required=True)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    parts: dict[str, Callable[[], Results]] = {
        "step": lambda: measure_steps(given.rounds),
        "start": lambda: measure_starts(given.rounds),
        "search": measure_searches,
        "programs": lambda: measure_programs(given.program),
    }
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    found["about"] = about("python benchmarks/program_cpu.py run")
    for part in given.part or parts:
        made = parts[part]()
        if part == "programs":
            made = {**found.get(part, {}), **made}
        found[part] = made
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
