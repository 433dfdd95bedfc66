"""Finders beside each other on one GPU: one run, the same step, the same cap, each in a fresh process.

    python benchmarks/find_gpu.py run --out results.json --deadline-s 540   # again: goes on where it was
    python benchmarks/find_gpu.py page results.json                         # the dated page and its JSON
    python benchmarks/find_gpu.py run --smoke --out smoke.json              # a tiny model, no GPU

Rules:
- A finder is timed alone: others may import and build meanwhile, but run nothing. A child builds its model,
  says "ready" and waits for "go"; the clock runs from there to the answer, all trials, traces and soaks
  included. A cap (`set_per_process_memory_fraction`) bounds each process. Before any is timed, each model
  runs a few steps in a process of its own: whoever comes first would pay for reading the kernels from disk.
- What is not timed comes after, side by side: whether an answer survives 200 steps in a fresh process, and
  the sustained maximum by a bracket of 25-step soaks upwards from our answer. What tells most comes first,
  since a deadline may end it; a size that has been run is not run again, whoever answered it.
- The page holds no figure that is not in the JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rows import keep

GIB = 2**30
MODELS = ("gpt2", "resnet50", "vit", "t5_small", "convnext", "llama110m")
TINY, TINY_GIB = "tiny", 1 / 128
CAP = 24
OURS_ALONE = (("gpt2", 16), ("resnet50", 16), ("gpt2", 80), ("resnet50", 80))
# The order in which they are timed; `peers.FINDERS` says how each is called.
OURS = ("batchfit_predict", "batchfit")
FINDERS = (
    *OURS,
    "bisection",
    "accelerate",
    "accelerate_4096",
    "lightning_power",
    "lightning_binsearch",
    "toma",
    "torch_max_mem",
    "batch_finder",
)
MAIN_ROWS = (f"gpt2/{CAP}", f"resnet50/{CAP}")
SOAK, LASTING, LASTING_TINY = 25, 200, 30
WARM_SIZES = (1, 8, 16)  # that fit the cap with every model
WARMED = (
    "Before any was timed, each model had run a few steps in another process: the first to run a model on a",
    "fresh machine waits a second or more for kernels to be read from disk.",
)
S_PER_GIB = 3  # what a long run beside another one needs, about: none starts later before the deadline
Results = dict[str, Any]
KEPT = (  # of our trials: enough to replay the search
    "size", "outcome", "soak", "settled", "steps_run", "elapsed_s", "ended_s", "peak_bytes", "reserved_bytes",
    "split_bytes", "largest_bytes", "held_bytes", "alloc_retries",
)  # fmt: skip
Job = dict[str, Any]


# ---- in a child: one finder, one long run, or one bracket


def tiny() -> Any:
    """A model for a machine without a GPU: under 8 MiB some 30 samples fit."""
    import torch
    from torch import nn

    import batchfit

    model = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def loss_fn(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch), batch)

    optimizer = torch.optim.AdamW(model.parameters())
    return batchfit.training(model, optimizer, loss_fn, lambda n: torch.zeros(n, 16, 128))


def capped(job: Job) -> AbstractContextManager[Any]:
    """The cap, for as long as the child lives; on a machine without a GPU, virtual memory."""
    import torch

    import batchfit

    if job["model"] == TINY:
        return batchfit.virtual_memory(round(job["cap_gib"] * GIB))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(job["cap_gib"] * GIB / total)
    return nullcontext()


def built(model: str) -> Any:
    if model == TINY:
        return tiny()
    import zoo

    return zoo.make(model, "bf16")


def find(job: Job, go: Callable[[], None]) -> Results:
    from peers import FINDERS as CALLED
    from peers import Program

    program = Program(built(job["model"]), cap_bytes=round(job["cap_gib"] * GIB))
    finder = CALLED[job["finder"]]
    search, answer, reason = finder.prepare(program), None, ""
    program.synchronize()
    go()
    begun = time.perf_counter()
    try:
        answer = search()
    except (RuntimeError, MemoryError) as error:  # how peers say that they found nothing
        reason = f"{type(error).__name__}: {error}"[:300]
    program.synchronize()
    seconds = time.perf_counter() - begun
    return {
        "answer": answer,
        "reason": reason,
        "sizes": program.sizes,
        "ooms": program.ooms,
        "seconds": seconds,
        "version": importlib.metadata.version(finder.package) if finder.package != "batchfit" else "",
        "trials": [
            {name: trial[name] for name in KEPT if trial.get(name) is not None} for trial in program.trials
        ],
    }


def warm(job: Job, go: Callable[[], None]) -> Results:
    """A step of a few sizes, for the system to read the kernels from disk once."""
    workload = built(job["model"])
    go()
    for size in WARM_SIZES:
        workload.step(size)
    return {}


def survive(job: Job, go: Callable[[], None]) -> Results:
    from batchfit._engine.device.oom import is_oom
    from batchfit._engine.device.resolve import resolve_device

    workload = built(job["model"])
    device = resolve_device(None, near=workload.state)
    survived, settled, died = 0, 0, ""
    go()
    begun = time.perf_counter()
    try:
        for _ in range(job["steps"]):
            workload.step(job["size"])
            device.synchronize()
            survived += 1
            if survived == job["steps"] // 2:
                settled = device.alloc_retries()
    except Exception as error:
        if not is_oom(error):
            raise
        died = str(error)[:200]
    retries = device.alloc_retries()
    return {
        "survived": survived,
        "of": job["steps"],
        "retries": retries,
        "settled_retries": retries - settled if survived >= job["steps"] // 2 else None,
        "seconds": time.perf_counter() - begun,
        "message": died,
    }


def bracket(job: Job, go: Callable[[], None]) -> Results:
    """Soaks upwards from our answer, which has had its own, by 2 % (at least one sample) until one fails."""
    from batchfit._engine.device.resolve import resolve_device
    from batchfit._engine.device.tensors import tensors_in
    from batchfit._engine.snapshot.snapshot import Snapshot
    from batchfit._engine.trial.trial import run_trial

    workload = built(job["model"])
    place = resolve_device(None, near=workload.state)
    snapshot = Snapshot.take(workload.state)
    parameters = [one for one in tensors_in(workload.state) if one.requires_grad]
    soaks: list[dict[str, Any]] = []
    go()

    def sustains(size: int) -> bool:
        trial = run_trial(
            workload.step,
            size,
            device=place,
            snapshot=snapshot,
            parameters=parameters,
            steps=job["steps"],
            soak=True,
        )
        names = ("size", "outcome", "steps_run", "alloc_retries", "settled_retries")
        soaks.append({"verdict": trial.verdict, **{name: getattr(trial, name) for name in names}})
        return trial.sustained

    size = job["size"]
    stride = max(1, round(size * 0.02))
    while sustains(size + stride):
        size += stride
    return {"sustained": size, "fails": size + stride, "soaks": soaks}


def child(job: Job) -> None:
    """Builds, says "ready", waits for "go", and answers one line; what else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    import batchfit

    def go() -> None:
        print("ready", file=answers, flush=True)
        if sys.stdin.readline() != "go\n":
            sys.exit("nobody waits for the answer")

    with capped(job):
        kinds = {"find": find, "warm": warm, "survive": survive, "bracket": bracket}
        answer = kinds[job["kind"]](job, go)
    answer["about"] = {
        "device": torch.cuda.get_device_name(0) if job["model"] != TINY else f"CPU, {platform.machine()}",
        "batchfit": batchfit.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "default"),
    }
    if job["model"] != TINY:
        answer["about"]["transformers"] = importlib.metadata.version("transformers")
    print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # taking an interpreter with CUDA down in order takes a second, and the next one waits


# ---- in the parent: jobs in order, answers kept as they come


class Child:
    """A process that prepares at once, and runs when it is asked for its answer."""

    def __init__(self, job: Job, ends: float) -> None:
        self.job = job
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        quiet = {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
        # Those that build while one is timed leave it cores.
        quiet |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4"), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "child", json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **quiet},
        )
        self.late = False
        self.timer = threading.Timer(max(0.0, ends - time.monotonic()), self._end)
        self.timer.daemon = True
        self.timer.start()

    def _end(self) -> None:
        self.late = True
        self.process.kill()

    def answer(self) -> Results | None:
        """What came of it; None where the deadline ended it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        text = ""
        if self.process.stdout.readline() == "ready\n":
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            text = self.process.stdout.readline()
        code = self.process.wait()
        self.log.seek(0)
        told = self.log.read()
        self.close()
        if text.endswith("\n"):
            return dict(json.loads(text))
        if self.late:
            return None
        print(told[-1500:], file=sys.stderr)
        # The last line alone is kept: what is above it names the folders of this machine.
        return {"error": " ".join([f"exit {code}:", *told.strip().splitlines()[-1:]])[:300]}

    def close(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.log):
            if stream is not None:
                stream.close()


def one_at_a_time(jobs: list[Job], ends: float, done: Callable[[Job, Results], None], ahead: int = 3) -> None:
    """Runs one after the other; those that come next prepare meanwhile."""
    children: deque[Child] = deque()
    following = iter(jobs)
    try:
        for _ in jobs:
            while len(children) <= ahead and (job := next(following, None)) is not None:
                children.append(Child(job, ends))
            answer = children[0].answer()
            if answer is None:
                return
            done(children.popleft().job, answer)
    finally:
        for one in children:
            one.close()


def side_by_side(
    jobs: list[Job], ends: float, done: Callable[[Job, Results], None], *, workers: int, room_gib: float
) -> None:
    """Runs several at once while their caps fit the card together; they are not timed."""
    turn = threading.Condition()
    free = room_gib

    def one(job: Job) -> None:
        nonlocal free
        takes = min(job["cap_gib"], room_gib)  # one that is larger than the room has it to itself
        with turn:
            turn.wait_for(lambda: free >= takes)
            free -= takes
        try:
            if ends - time.monotonic() > S_PER_GIB * job["cap_gib"]:
                answer = Child(job, ends).answer()
                if answer is not None:
                    with turn:
                        done(job, answer)
        finally:
            with turn:
                free += takes
                turn.notify_all()

    with ThreadPoolExecutor(workers) as executor:
        list(executor.map(one, jobs))


def key(job: Job) -> str:
    return f"{job['model']}/{job['cap_gib']:g}"


def case_of(results: Results, name: str) -> Results:
    case: Results = results["cases"].setdefault(name, {"find": {}, "survive": {}, "truth": None})
    return case


def answers(case: Results, *, ours: bool) -> set[int]:
    return {
        one["answer"] for name, one in case["find"].items() if one.get("answer") and (name in OURS) == ours
    }


def timed_jobs(results: Results, pairs: list[tuple[str, float]], finders: list[str]) -> list[Job]:
    """Ours first, everywhere; peers where the cap is the common one."""
    wanted = [(m, c, f) for m, c in pairs for f in finders if f in OURS]
    wanted += [(m, c, f) for m, c in pairs for f in finders if f not in OURS and c in (CAP, TINY_GIB)]
    jobs = [{"kind": "find", "model": m, "cap_gib": c, "finder": f} for m, c, f in wanted]

    def is_there(job: Job) -> bool:
        one = case_of(results, key(job))["find"].get(job["finder"])
        return one is not None and "error" not in one

    return [job for job in jobs if not is_there(job)]


def untimed_jobs(results: Results, pairs: list[tuple[str, float]]) -> list[list[Job]]:
    """In rounds, what tells most first; a round is planned when the one before it has ended."""
    rounds: list[list[Job]] = [[], []]
    for model, cap in pairs:
        case = case_of(results, f"{model}/{cap:g}")
        mine, theirs = answers(case, ours=True), answers(case, ours=False)
        common = {"model": model, "cap_gib": cap}
        if not mine:
            continue
        best = max(mine)
        if case["truth"] is None or "error" in case["truth"]:
            rounds[0].append({**common, "kind": "bracket", "size": best, "steps": SOAK})
        for size in sorted(mine | theirs, reverse=True):
            known = case["survive"].get(str(size))
            if known is None or "error" in known:
                steps = LASTING_TINY if model == TINY else LASTING
                job = {**common, "kind": "survive", "size": size, "steps": steps}
                if size >= best:  # below it, ours has told; above it, it is open
                    rounds[size > best].append(job)
    rounds[0].sort(key=lambda job: -job["cap_gib"])  # the longest first
    return rounds


def run(given: argparse.Namespace) -> None:
    begun = time.monotonic()
    ends = begun + given.deadline_s
    results: Results = json.loads(given.out.read_text()) if given.out.exists() else {}
    results = {"about": {}, "calls": [], "cases": {}, **results}
    pairs: list[tuple[str, float]] = [(TINY, TINY_GIB)] if given.smoke else [(m, CAP) for m in given.models]
    if not given.smoke:
        pairs += [(m, c) for m, c in OURS_ALONE if m in given.models]
    out = {"--out", str(given.out), f"--out={given.out}"}  # a folder of this machine is nobody's business
    flags = [one for one in sys.argv[1:] if one not in out]
    results["calls"].append({"command": " ".join(["python benchmarks/find_gpu.py", *flags])})

    def save() -> None:
        results["calls"][-1]["seconds"] = time.monotonic() - begun
        keep(given.out, results)

    def note(job: Job, answer: Results) -> None:
        results["about"].update(answer.pop("about", {}))
        case = case_of(results, key(job))
        if job["kind"] == "bracket":
            case["truth"] = answer
        elif job["kind"] == "find":
            case["find"][job["finder"]] = answer
        else:
            case["survive"][str(job["size"])] = answer
        save()
        shown = {name: value for name, value in answer.items() if name not in ("trials", "sizes", "version")}
        what = job.get("finder") or f"{job['kind']} {job['size']}"
        print(f"{time.monotonic() - begun:6.1f}", key(job), what, json.dumps(shown)[-300:], flush=True)

    jobs = [] if given.only == "untimed" else timed_jobs(results, pairs, given.finders)
    models = dict.fromkeys(job["model"] for job in jobs if job["model"] != TINY)
    first = [{"kind": "warm", "model": model, "cap_gib": CAP} for model in models]
    side_by_side(first, ends, lambda job, answer: None, workers=len(first) or 1, room_gib=given.room_gib)
    results["about"]["warmed"] = bool(first) or results["about"].get("warmed", False)
    one_at_a_time(jobs, ends, note, 1 if given.smoke else 3)
    if given.only != "timed":
        for number in range(2):
            now = untimed_jobs(results, pairs)[number]
            side_by_side(now, ends, note, workers=given.workers, room_gib=given.room_gib)
    save()
    left = 0 if given.only == "untimed" else len(timed_jobs(results, pairs, given.finders))
    left += 0 if given.only == "timed" else sum(map(len, untimed_jobs(results, pairs)))
    print(f"{time.monotonic() - begun:.0f} s, {left} runs left", flush=True)


# ---- the page


def sustained(case: Results) -> int | None:
    """The largest size known to be sustained: by the bracket, or below its failure by a long run."""
    truth = case["truth"]
    if truth is None or "sustained" not in truth:
        return None
    good = [
        int(size)
        for size, one in case["survive"].items()
        if one.get("survived") == one.get("of", -1)
        and one["settled_retries"] == 0
        and int(size) < truth["fails"]
    ]
    if lasts(case, truth["sustained"])[0] is not False:
        good.append(int(truth["sustained"]))
    return max(good, default=None)


def lasts(case: Results, size: int) -> tuple[bool | None, str]:
    """Whether a size survives the long run, in words; if it was not run, by another size or the bracket."""
    ran = {int(one): run for one, run in case["survive"].items() if "error" not in run}
    lived = {one: run["survived"] == run["of"] for one, run in ran.items()}
    if size in ran:
        retries = ran[size]["settled_retries"]
        if not lived[size]:
            return False, f"**dies at step {ran[size]['survived'] + 1}**"
        return True, "yes" + (f", {retries} retries in its second half" if retries else "")
    larger = [one for one, fine in lived.items() if one > size and fine]
    smaller = [one for one, fine in lived.items() if one < size and not fine]
    if larger:
        return True, f"not run, {min(larger)} does"
    if smaller:
        return False, f"not run, {max(smaller)} dies"
    failed = [one for one in (case["truth"] or {}).get("soaks", ()) if one["outcome"] != "fits"]
    died = min((one["size"] for one in failed if one["size"] <= size), default=None)
    return (None, "not run") if died is None else (False, f"not run, {died} dies in a soak of {SOAK}")


def fastest_peer(case: Results) -> float | None:
    """Seconds of the fastest peer within 5 % of the maximum whose answer is not known to die."""
    best = sustained(case)
    close = [
        one["seconds"]
        for name, one in case["find"].items()
        if best and name not in OURS and one.get("answer")
        if abs(one["answer"] / best - 1) <= 0.05 and lasts(case, one["answer"])[0] is not False
    ]
    return min(close, default=None)


def table(case: Results) -> list[str]:
    best, fastest = sustained(case), fastest_peer(case)
    lines = [
        "| finder | answer | of the sustained maximum | survives the long run | sizes tried | OOMs | seconds "
        "| to the fastest peer within 5 % |",
        "|---" * 8 + "|",
    ]
    failed = []
    for name in (one for one in FINDERS if one in case["find"]):
        one = case["find"][name]
        if not one.get("answer"):
            failed.append(f"{name}: {one.get('reason') or one.get('error')}")
        if "error" in one:
            lines.append(f"| {name} | none |" + " - |" * 6)
            continue
        share = f"{one['answer'] / best:.1%}" if best and one["answer"] else "-"
        ratio = f"{one['seconds'] / fastest:.2f}" if fastest else "-"
        survives = lasts(case, one["answer"])[1] if one["answer"] else "-"
        lines.append(
            f"| {name} | {one['answer'] or 'none'} | {share} | {survives} | {len(set(one['sizes']))} "
            f"| {one['ooms']} | {one['seconds']:.1f} | {ratio} |"
        )
    if case["truth"] and "soaks" in case["truth"]:
        soaks = ", ".join(f"{one['size']} {one['verdict']}" for one in case["truth"]["soaks"])
        lines += ["", f"Sustained maximum {best}. Soaks of the bracket, in order: {soaks}."]
    return [*lines, *("" if i == 0 else one for i, one in enumerate(["", *failed]) if failed)]


def checks(case: Results, finder: str) -> list[tuple[str, str, str, bool | None]]:
    """The goals for one answer of ours: name, figure, goal, whether it is met (None: not known)."""
    one, best, fastest = case["find"][finder], sustained(case), fastest_peer(case)
    tried = len(set(one["sizes"]))
    survives, words = lasts(case, one["answer"])
    return [
        (
            "of the maximum",
            f"{one['answer'] / best:.1%}" if best else "-",
            "98 % or one sample less",
            min(0.98 * best, best - 1) <= one["answer"] <= best if best else None,
        ),
        ("OOMs", str(one["ooms"]), "0", one["ooms"] == 0),
        ("sizes tried", str(tried), "4", tried <= 4),
        (
            "seconds to the fastest peer",
            f"{one['seconds'] / fastest:.2f}" if fastest else "-",
            "1.00",
            one["seconds"] <= fastest if fastest else None,
        ),
        (f"{LASTING} steps", words, "survives", survives),
    ]


def verdicts(cases: Results) -> list[str]:
    """The goals for each case: one sample apart counts as met, as it says."""
    lines = [
        "| case | finder | of the maximum | OOMs | sizes tried | to the fastest peer | 200 steps | all met |",
        "|---" * 8 + "|",
    ]
    for name, case in cases.items():
        for finder in (one for one in OURS if case["find"].get(one, {}).get("answer")):
            told = checks(case, finder)
            cells = [text if met is not False else f"{text}, **missed**" for _, text, _, met in told]
            known = [met for *_, met in told if met is not None]
            met = "no" if False in known else "yes" if told[0][3] and told[-1][3] else "open"
            lines.append(f"| {name} | {finder} | " + " | ".join(cells) + f" | {met} |")
    return lines


def page(results: Results) -> str:
    """The dated page: every figure comes from the JSON."""
    from peers import FINDERS as CALLED

    about, cases = results["about"], results["cases"]
    runs = "; ".join(f"`{one['command']}` ({one['seconds']:.0f} s)" for one in results["calls"])
    named = [name for name in ("batchfit", "torch", "python", "transformers") if name in about]
    versions = ", ".join(f"{name} {about[name]}" for name in named)
    lines = [
        f"# Finders on one {about['device']}",
        "",
        f"Made by {runs}; {versions}, CUDA {about['cuda']}, allocator settings: {about['allocator']}.",
        "Training in bf16 autocast with AdamW, random weights, batches made on the device. Each finder runs",
        "in a fresh process under a cap (`set_per_process_memory_fraction`) and is timed alone on the card;",
        "up to three others import and build meanwhile. Seconds count all from the call to the answer, with",
        "traces, calibration and soaks, but neither imports nor building the model. The long run is",
        f"{LASTING} steps in a fresh process. The sustained maximum survives {SOAK} steps with no allocation",
        "retry in their second half; the bracket goes up from our answer by 2 % (at least one sample) until",
        "a size fails, all in one process, and a long run without late retries below that size counts too.",
        "Cases are model/GiB.",
        *(WARMED if about.get("warmed") else ()),
        "",
    ]
    for name, case in cases.items():
        if case["find"]:
            lines += [f"## {name}", "", *table(case), ""]
    lines += [
        "## Goals",
        "",
        "At least 98 % of the sustained maximum or one sample less, no OOM, at most 4 sizes tried, no slower",
        "than the fastest peer within 5 % whose answer lasts (bisection counts as one), and the answer",
        f"survives {LASTING} steps. '-' was not measured, or no peer came within 5 %.",
        "",
        "The two main cases:",
        "",
        *verdicts({name: cases[name] for name in MAIN_ROWS if name in cases}),
        "",
        "The same goals for the others:",
        "",
        *verdicts({name: case for name, case in cases.items() if name not in MAIN_ROWS}),
        "",
        "## How each was called",
        "",
        "A trial is three steps wherever the peer leaves it to its user.",
        "",
    ]
    for name in FINDERS:
        found = {case["find"].get(name, {}).get("version") for case in cases.values()} - {None, ""}
        package = f" ({CALLED[name].package} {', '.join(sorted(found))})" if found else ""
        lines.append(f"- {name}{package}: {CALLED[name].called}.")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run what is not in --out yet")
    running.add_argument("--out", type=Path, default=Path("find_gpu.json"))
    running.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    running.add_argument("--finders", nargs="+", default=list(FINDERS), choices=FINDERS)
    running.add_argument("--deadline-s", type=float, default=540)
    running.add_argument("--only", choices=("timed", "untimed"))
    running.add_argument("--workers", type=int, default=2, help="runs at once that are not timed")
    running.add_argument("--room-gib", type=float, default=125, help="of the card, for those runs together")
    running.add_argument("--smoke", action="store_true", help="a tiny model in virtual memory, no GPU")
    paging = verbs.add_parser("page", help="write the page of a run")
    paging.add_argument("results", type=Path)
    kept = Path(__file__).parent / "results" / "find_h200_202611.json"
    paging.add_argument("--to", type=Path, default=kept, help="the JSON kept there, the page beside it")
    verbs.add_parser("child").add_argument("job", type=json.loads)
    given = parser.parse_args()
    if given.verb == "child":
        child(given.job)
    elif given.verb == "run":
        run(given)
    else:
        results = json.loads(given.results.read_text())
        given.to.write_text(json.dumps(results, indent=1) + "\n")
        given.to.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
