"""What `find -- COMMAND` costs: the probe beside a program's steps and start, and runs of a slow starter.

    python benchmarks/program_cpu.py run --out FILE.json [--part step|start|search] [--rounds N]
    python benchmarks/program_cpu.py page FILE.json --to FILE.md

Rules: `step`: programs that wait for their turn take blocks of steps, in turn; one has no probe, one has it,
one has it with the virtual memory that stands for a GPU's limit (on a GPU there is no such cost). `start`:
CPU time of processes that import torch, in turn, with the probe and without. `search`: one command that
sleeps 20 s before it trains; each way runs that command, and counts whole starts.
"""

from __future__ import annotations

import argparse
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
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from turns import IN_TURN, about, children_cpu_s, in_turn, made_by, median_ms

Results = dict[str, Any]
SLEEP_S, BUDGET, START = 20, "16MiB", 256
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
size = int(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
optimizer = torch.optim.Adam(model.parameters())
for step in range(10_000):
    x = torch.randn(size, 16, 256)
    loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
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
    """Answer, starts and seconds of three ways to search with the same slow command."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "train.py").write_text(SLOW)
        before = Path.cwd()
        os.chdir(place)
        try:
            return {
                "sleep_s": SLEEP_S,
                "budget": BUDGET,
                "batchfit": _batchfit("guided"),
                "batchfit --strategy bisect": _batchfit("bisect"),
                f"Accelerate's 0.9 rule, from {START}": _accelerate(),
            }
        finally:
            os.chdir(before)


def _target() -> Any:
    from batchfit._program.pure.template import CommandTemplate
    from batchfit._program.trials import ProgramTarget

    return ProgramTarget(template=CommandTemplate(words=(sys.executable, "train.py", "{}")))


def _batchfit(strategy: str) -> Results:
    from batchfit._find.find import find_with
    from batchfit._find.pure.options import FindOptions
    from batchfit._program.find import program_trials

    options = FindOptions(budget=BUDGET, strategy=strategy, isolate=True)
    begun = time.perf_counter()
    fit = find_with(program_trials(_target(), options), lambda: options)
    sizes = list(dict.fromkeys(trial.size for trial in fit.trials))
    return {"answer": fit.batch_size, "sizes": sizes, "seconds": time.perf_counter() - begun}


def _accelerate() -> Results:
    """Accelerate's own decorator, around a function that runs the command at a size."""
    import torch
    from accelerate.utils import find_executable_batch_size

    from batchfit._engine.trial.trial import TrialRequest
    from batchfit._program.trials import ProgramTrials
    from batchfit._units import parse_bytes

    sizes: list[int] = []
    runner = ProgramTrials(_target(), TrialRequest(1, steps=3))

    @find_executable_batch_size(starting_batch_size=START)
    def run(batch_size: int) -> int:
        sizes.append(batch_size)
        with runner.trying(parse_bytes(BUDGET)) as trial:
            if not trial(TrialRequest(batch_size, steps=3)).fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return batch_size

    begun = time.perf_counter()
    answer = run()
    return {"answer": answer, "sizes": sizes, "seconds": time.perf_counter() - begun}


def page(found: Results) -> str:
    """The results as text."""
    lines = ["# What a search in a program costs", "", f"{made_by(found['about'])}. {IN_TURN}", ""]
    step, start, search = found["step"], found["start"], found["search"]
    lines += [
        f"## A step: blocks of {step['block']} steps, {step['rounds']} rounds",
        "",
        "| way | ms per step, median | least | ratio to no probe |",
        "|---|---|---|---|",
    ]
    for name, ms in step["step_ms"].items():
        lines.append(f"| {name} | {ms:.2f} | {step['least_ms'][name]:.2f} | {step['ratio'][name]:.4f} |")
    lines += [
        "",
        "Virtual memory is what limits a program on a CPU; on a GPU the allocator does.",
        "",
        f"## A start, {start['rounds']} rounds",
        "",
        "| process | CPU ms, median | more with the probe |",
        "|---|---|---|",
    ]
    for name, more in start["more_ms"].items():
        lines.append(f"| {name} | {start['cpu_ms'][name]:.0f} | {more:.0f} |")
    lines += [
        "",
        f"## A program that takes {search['sleep_s']} s to start, {search['budget']} of virtual memory",
        "",
        "| way | answer | starts | seconds | sizes |",
        "|---|---|---|---|---|",
    ]
    for name, one in search.items():
        if isinstance(one, dict):
            sizes = ", ".join(map(str, one["sizes"]))
            lines.append(
                f"| {name} | {one['answer']} | {len(one['sizes'])} | {one['seconds']:.0f} | {sizes} |"
            )
    lines += [
        "",
        "The answers of batchfit took 25 steps; Accelerate's rule ends with the first size that takes three.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--rounds", type=int, default=15)
    running.add_argument("--part", choices=("step", "start", "search"), action="append")
    running.add_argument("--out", type=Path, required=True)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    found["about"] = about("python benchmarks/program_cpu.py run")
    for part in given.part or ("step", "start", "search"):
        found[part] = (
            measure_searches()
            if part == "search"
            else measure_steps(given.rounds)
            if part == "step"
            else measure_starts(given.rounds)
        )
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
