"""Prediction against the truth on one GPU: how far off is the size that nobody ran?

    python benchmarks/prediction_gpu.py truth --out results.json            # the sustained maxima, resumes
    python benchmarks/prediction_gpu.py predict --out gpu.json --mode gpu    # or none, calibrated
    python benchmarks/prediction_gpu.py explain --out explain.json          # its what-ifs; truth runs them
    python benchmarks/prediction_gpu.py history --folder histories           # allocations as they really came
    python benchmarks/prediction_gpu.py truth --loop kept --out kept.json    # loops that keep their outputs

The truth is a bracket under a cap (`set_per_process_memory_fraction`): the size survives 25 steps, the one
0.5 % (at least one sample) above it does not. Each case is a process of its own; several share the card: the
cap and not the card ends them. Results are kept in one JSON file, and what is there is not run again.

`--loop lean` (default): nothing outlives a step. `--loop kept`: outputs, loss and batch live until the next
step's replace them; the truth is then that of loops written by hand (`zoo.by_hand`), not of batchfit's own
step, and keys end in "/kept".
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rows import keep

GIB = 2**30
# Caps are spread over models; two numbers where fp32 and bf16 have one each.
CAPS = {
    "gpt2": (16, 24),
    "gpt2_eager": (16, 16),
    "llama110m": (16, 40),
    "qwen05b": (40, 40),
    "llama1b": (80, 80),
    "opt125m": (16, 16),
    "bert": (16, 40),
    "distilbert": (16, 16),
    "deberta": (16, 16),
    "t5_small": (16, 24),
    "mixtral_tiny": (16, 16),
    "mamba130m": (16, 16),
    "whisper_tiny": (16, 16),
    "vit": (16, 40),
    "swin": (16, 16),
    "convnext": (16, 40),
    "resnet50": (40, 80),
    "mobilenetv2": (16, 16),
    "unet": (16, 40),
    "lstm": (16, 16),
    "dcgan": (16, 16),
    "mlp": (16, 16),
    "segformer": (16, 16),
    "bart": (16, 16),
    "regnet": (16, 16),
}
SOAK = 25


def cases(models: list[str], precisions: list[str]) -> list[tuple[str, str, int]]:
    """(model, precision, cap in GiB), the longest first."""
    found = [(m, p, CAPS.get(m, (16, 16))[p != "fp32"]) for m in models for p in precisions]
    return sorted(found, key=lambda one: -one[2])


def asked_for(what: str, models: list[str], precisions: list[str]) -> list[tuple[str, str, int]]:
    """The cases of a run: those of the models named, or all, with programs that explain's advice changed."""
    from zoo import HELD_OUT

    if models:
        return cases(models, precisions)
    programs = {"explain": 0, "truth": 2}.get(what)
    named = dict.fromkeys(one[programs] for one in TURNED_ON) if programs is not None else {}
    every = [] if what == "explain" else cases([*CAPS, *HELD_OUT], precisions)
    return every + [(model, precision, int(cap)) for model, precision, cap in (n.split("/") for n in named)]


def capped(cap_gib: float) -> None:
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)


def run_truth(model: str, precision: str, cap: str, loop: str, steps: str = str(SOAK)) -> dict[str, Any]:
    """The largest size that survives a soak of so many steps, by find and then by single soaks upwards."""
    import batchfit
    import zoo
    from batchfit._engine.device.resolve import resolve_device
    from batchfit._engine.device.tensors import tensors_in
    from batchfit._engine.snapshot.snapshot import Snapshot
    from batchfit._engine.trial.trial import run_trial

    workload = zoo.make(model, precision, loop=loop)
    begun = time.perf_counter()
    fit = batchfit.find_batch_size(workload)
    find_s = time.perf_counter() - begun
    place = resolve_device(None, near=workload.state)
    snapshot = Snapshot.take(workload.state)
    parameters = [one for one in tensors_in(workload.state) if one.requires_grad]
    soaks: list[dict[str, Any]] = []

    steps_of = zoo.by_hand(workload) if loop == "kept" else lambda: iter([workload.step])
    generates = loop == "kept" and workload.kind == "generation"

    def soak(size: int) -> bool:
        for step in steps_of():
            trial = run_trial(
                step,
                size,
                device=place,
                snapshot=snapshot,
                parameters=parameters,
                steps=3 if generates else int(steps),
                soak=True,
                generates=generates,
                raise_ambiguous=False,
            )
        soaks.append(trial.model_dump())
        return trial.sustained

    good = fit.batch_size
    stride = max(1, round(good / 100))
    if loop == "kept":  # does a loop written by hand last at what was found?
        while not soak(good) and good > stride:
            good -= stride
    while soak(good + stride):
        good += stride
    fails = good + stride
    while fails - good > max(1, good // 200):
        middle = (good + fails) // 2
        good, fails = (middle, fails) if soak(middle) else (good, middle)
    return {
        "sustained": good,
        "fails": fails,
        "find": {
            "answer": fit.batch_size,
            "seconds": find_s,
            "sizes": [t.size for t in fit.trials],
            "ooms": sum(not t.fits for t in fit.trials),
        },
        "loop": loop,
        "trials": [t.model_dump() for t in fit.trials] + soaks,
    }


def run_predict(model: str, precision: str, cap: str, loop: str, mode: str) -> dict[str, Any]:
    """The prediction at the default margin, and the same without a margin."""
    import batchfit
    import zoo
    from batchfit._engine.trace.oracle import MARGINS

    here = mode != "none"
    basis = {"none": "no GPU", "gpu": "GPU, not run", "calibrated": "calibrated"}[mode]
    budget = round(float(cap) * GIB)
    begun = time.perf_counter()
    workload = zoo.make(model, precision, device="cuda" if here else "cpu", loop=loop)
    build_s = time.perf_counter() - begun
    asked: dict[str, Any] = {"gpu": None if here else "h200", "calibrate": mode == "calibrated"}
    # The larger budget is the one whose margin is the cap: one trace answers for both.
    prediction = batchfit.predict_batch_size(
        workload, budget=[budget, round(budget / (1 - MARGINS[basis]))], **asked
    )
    raw = prediction.answers[1].batch_size
    if prediction.margin != MARGINS[basis]:  # recurrent layers have another one
        raw = batchfit.predict_batch_size(workload, budget=budget, margin=0.0, **asked).batch_size
    return {
        "default": prediction.batch_size,
        "raw": raw,
        "build_s": build_s,
        "prediction": json.loads(prediction.to_json()),
    }


def run_explain(model: str, precision: str, cap: str, loop: str) -> dict[str, Any]:
    """What explain says would change the largest batch."""
    import batchfit
    import zoo

    workload = zoo.make(model, precision, loop=loop)
    begun = time.perf_counter()
    told = batchfit.explain_memory(workload, batch_size=8, budget=round(float(cap) * GIB))
    return {
        "seconds_explain": time.perf_counter() - begun,
        "largest": told.largest,
        "what_ifs": [json.loads(one.to_json()) for one in told.what_ifs],
        "unseen": list(told.unseen),
    }


def run_history(model: str, precision: str, cap: str, size: str, steps: str) -> dict[str, Any]:
    """Every allocation and free from before the model is there to the end of the last step.

    No dispatch mode is on: under one torch adds gradients and biases out of place, and this is the truth.
    """
    import torch

    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=4_000_000)
    import zoo

    workload = zoo.make(model, precision)
    marks, failed = [], False
    base = len(torch.cuda.memory._snapshot()["device_traces"][0])
    for _ in range(int(steps)):
        try:
            workload.step(int(size))
        except torch.OutOfMemoryError:
            failed = True
        torch.cuda.synchronize()
        marks.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
        if failed:
            break
    stats = torch.cuda.memory_stats()
    events = [
        [entry["action"], entry.get("addr", 0), entry["size"]]
        for entry in torch.cuda.memory._snapshot()["device_traces"][0]
    ]
    return {
        "model": model,
        "precision": precision,
        "cap_gib": float(cap),
        "size": int(size),
        "steps": int(steps),
        "failed": failed,
        "setup_ends": base,
        "step_ends": marks,
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_requested": stats["requested_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "events": events,
    }


MODES = (("none", "no GPU"), ("gpu", "GPU, not run"), ("calibrated", "calibrated"))
PUBLISHED = """\
Published, for comparison (all are errors in bytes; nobody publishes the error in the size): xMem median
3.59 %, its estimate used as a cap runs out in 8.87 % of cases, 24 s an estimate (the authors, RTX 3060);
LLMem at most 1.6 % on its own models, median 76.83 % when xMem's authors measured it again; PyTorch's
MemTracker: its own tests accept 10 %; FakeTensor as GPUMemNet used it: median 45.8 %."""


def slim(folder: Path, before: dict[str, Any]) -> dict[str, Any]:
    """All parts of a run in one value, without what no table needs; what-ifs also of the run before it."""

    def part(name: str) -> dict[str, Any]:
        path = folder / f"{name}.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    keep = ("size", "outcome", "steps_run", "peak_bytes", "reserved_bytes", "alloc_retries", "soak")
    found: dict[str, Any] = {"about": part("about"), "truth": part("truth")}
    for one in found["truth"].values():
        one["trials"] = [{k: t[k] for k in keep} for t in one.get("trials", [])]
        one["error"] = one.get("error", "").strip().splitlines()[-1:] or None
    found["explain"] = {
        case: {
            "largest": one.get("largest"),
            "what_ifs": [
                {k: w[k] for k in ("change", "largest_before", "largest_after")} for w in one["what_ifs"]
            ],
        }
        for case, one in part("explain").items()
        if "error" not in one
    }
    for mode in ("none", "gpu", "calibrated", "here"):
        found[mode] = {}
        for key, one in part(mode).items():
            if "error" in one:
                found[mode][key] = {"error": one["error"].strip().splitlines()[-1]}
                continue
            kept = ("trace_s", "elapsed_s", "check", "curve", "knees", "peak_phase", "torch_version")
            whole = one["prediction"]
            found[mode][key] = {
                "raw": one["raw"],
                "default": one["default"],
                "margin": whole["margin"],
                "trials": [t["size"] for t in whole["trials"]],
                **{name: whole[name] for name in kept},
            }
    found["earlier"] = not found["explain"] and bool(before.get("explain"))
    if found["earlier"]:
        found["explain"] = before["explain"]
        changed = {name: one for name, one in before.get("truth", {}).items() if "@" in name}
        found["truth"] = {**changed, **found["truth"]}
    return found


def peak_errors(prediction: dict[str, Any], truth: dict[str, Any]) -> list[float]:
    """Signed errors of the predicted peak, at every size that ran without a retry."""
    points = [(p["size"], p["peak_bytes"]) for p in prediction["curve"]]

    def at(size: int) -> float:
        index = next((i for i in range(1, len(points) - 1) if points[i][0] >= size), len(points) - 1)
        (a, low), (b, high) = points[index - 1], points[index]
        return low + (high - low) * (size - a) / (b - a)

    return [
        at(t["size"]) / t["peak_bytes"] - 1
        for t in truth["trials"]
        if t["outcome"] == "fits" and not t["alloc_retries"] and t["size"] > 1
    ]


# What-ifs that were turned on and measured: the advice, and the case that is the same program with it.
TURNED_ON = (
    ("gpt2@plain/fp32/16", "activation checkpointing", "gpt2@checkpointing/fp32/16"),
    ("gpt2@plain/fp32/16", "sequences of 256", "gpt2@short/fp32/16"),
    ("gpt2@plain/fp32/16", "bf16 autocast", "gpt2@plain/bf16/16"),
    ("vit@plain/fp32/16", "bf16 autocast", "vit@plain/bf16/16"),
    ("vit@plain/fp32/16", "activation checkpointing", "vit@checkpointing/fp32/16"),
    ("bert@plain/fp32/16", "activation checkpointing", "bert@checkpointing/fp32/16"),
)


def told_and_true(found: dict[str, Any]) -> list[str]:
    """What explain said would be the largest batch, beside the one that was measured."""
    lines = [
        "## What-ifs of explain, turned on",
        "",
        "| program | change | told | measured |",
        "|---" * 4 + "|",
    ]
    for case, change, changed in TURNED_ON:
        told = [
            w
            for w in found["explain"].get(case, {}).get("what_ifs", [])
            if w["change"].startswith(change) and " and bf16 autocast" not in w["change"]
        ]
        truth = found["truth"].get(changed, {})
        if told and "sustained" in truth:
            name = told[0]["change"]
            before, after = told[0]["largest_before"], told[0]["largest_after"]
            lines.append(
                f"| {case} | {name} | {before} to {after} | {truth['sustained']}, {truth['fails']} |"
            )
    return lines


def about() -> dict[str, Any]:
    """Where the figures come from. Asks no CUDA: a context of this process would take of the card."""
    import importlib.metadata
    import platform

    card = "no GPU"
    if shutil.which("nvidia-smi"):
        ask = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        card = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip() or card
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformers"))
    return {"hardware": f"{card}, {packages}, python {platform.python_version()}"}


def page(found: dict[str, Any]) -> str:
    """The dated page; every figure comes from the JSON."""
    import statistics

    import zoo

    command = "`python benchmarks/prediction_gpu.py truth | predict --mode none | gpu | calibrated`"
    modes = [*MODES, *([("here", "no GPU, torch 2.13")] if found.get("here") else [])]
    kept = any(key.endswith("/kept") for key in found["truth"])
    lines = [
        "# Prediction against an H200" + (", loops that keep their outputs" if kept else ""),
        "",
        f"{found['about']['hardware']}. Made by {command}, then `page`.",
        "Truth: under a cap (`set_per_process_memory_fraction`) the first size survives 25 steps with no",
        "retry once settled, the second (at most 1 % more, or one sample) does not. Predicted: without a",
        "margin, and its signed error; in brackets the answer at the default margin "
        "(2 % no GPU, 1.5 % GPU not run, 1 % calibrated).",
        "Several cases shared the card, each within its cap.",
        "",
    ]
    if found.get("here"):
        lines += [
            "The last column ran on two CPU cores without a GPU, with torch 2.13 and transformers 5.22;",
            "its T5 is another program than the card's.",
            "",
        ]
    for note in found["about"].get("notes", ()):
        lines += [note, ""]
    if found["earlier"]:
        lines += ["Of an earlier run, with older code: the what-ifs and what was measured for them.", ""]
    every = [key for key in found["truth"] if "@" not in key]
    held = [key for key in every if key.split("/")[0] in zoo.HELD_OUT]
    for title, keys in (
        ("Models that the code was developed beside", [key for key in every if key not in held]),
        ("Models chosen after the code was frozen", held),
    ):
        if not keys:
            continue
        lines += [f"## {title}", ""]
        lines += ["| model, precision, cap GiB | truth | " + " | ".join(name for _, name in modes) + " |"]
        lines += ["|---" * (2 + len(modes)) + "|"]
        errors: dict[str, list[float]] = {mode: [] for mode, _ in modes}
        beyond: dict[str, list[float]] = {mode: [] for mode, _ in modes}
        peaks: dict[str, list[float]] = {mode: [] for mode, _ in modes}
        times: dict[str, list[float]] = {mode: [] for mode, _ in modes}
        over: dict[str, list[str]] = {mode: [] for mode, _ in modes}
        for key in keys:
            truth = found["truth"][key]
            if "sustained" not in truth:
                continue
            cells = []
            for mode, _ in modes:
                one = found[mode].get(key)
                if one is None:
                    cells.append("-")
                elif "error" in one:
                    cells.append("not traced")
                else:
                    error = one["raw"] / truth["sustained"] - 1
                    errors[mode].append(abs(error))
                    if abs(one["raw"] - truth["sustained"]) > 1:
                        beyond[mode].append(abs(error))
                    times[mode].append(one["trace_s"])
                    peaks[mode] += peak_errors(one, truth)
                    if one["default"] > truth["sustained"]:
                        over[mode].append(key)
                    cells.append(f"{one['raw']} {error:+.1%} ({one['default']})")
            lines.append(f"| {key} | {truth['sustained']}, {truth['fails']} | " + " | ".join(cells) + " |")
        lines += ["", "| | " + " | ".join(name for _, name in modes) + " |", "|---" * (1 + len(modes)) + "|"]

        def row(name: str, values: Any, keys_: list[Any] = modes) -> str:
            return f"| {name} | " + " | ".join(values(mode) for mode, _ in keys_) + " |"

        lines += [
            row("cases", lambda m, e=errors: str(len(e[m]))),
            row("size: median error", lambda m, e=errors: f"{statistics.median(e[m]):.2%}" if e[m] else "-"),
            row("size: worst error", lambda m, e=errors: f"{max(e[m]):.1%}" if e[m] else "-"),
            row("the same, one sample apart not counted", lambda m, e=beyond: f"{max(e[m], default=0):.1%}"),
            row(
                "peak allocated: median error",
                lambda m, e=peaks: f"{statistics.median(map(abs, e[m])):.2%} of {len(e[m])}" if e[m] else "-",
            ),
            row(
                "peak allocated: largest under- and over-prediction",
                lambda m, e=peaks: f"{min(e[m]):+.1%}, {max(e[m]):+.1%}" if e[m] else "-",
            ),
            row("runs out at the default margin", lambda m, e=over: ", ".join(e[m]) or "none"),
            row(
                "all traces of a prediction, median s (many processes at once)",
                lambda m, e=times: f"{statistics.median(e[m]):.1f}" if e[m] else "-",
            ),
            "",
        ]
    lines += [*found_sizes(found["truth"]), "", *told_and_true(found), "", PUBLISHED]
    return "\n".join(lines) + "\n"


def found_sizes(truths: dict[str, Any]) -> list[str]:
    """What find answered in each case, of what lasts, and at what cost."""
    told = {key: one for key, one in truths.items() if "find" in one and "sustained" in one}
    cases = {key: one for key, one in told.items() if "@" not in key}  # without what explain advised

    def gap(one: dict[str, Any]) -> int:
        return int(one["sustained"] - one["find"]["answer"])

    low = [k for k, one in cases.items() if gap(one) > max(1, 0.02 * one["sustained"])]
    ran_out = [k for k, one in cases.items() if one["find"]["ooms"]]
    many = [
        f"{k} ({len(f['sizes'])})"
        for k, f in ((k, o["find"]) for k, o in cases.items())
        if len(f["sizes"]) > 2
    ]
    lines = [
        "## Find, which begins with the prediction",
        "",
        f"Of {len(cases)} cases (without programs that explain's advice changed): with an OOM "
        f"{', '.join(ran_out) or 'none'}; after more than two sizes {', '.join(many) or 'none'}; below 98 % "
        f"of what lasts, by more than one sample, {', '.join(low) or 'none'}.",
        "",
        "| case | answer | of the sustained maximum | sizes tried | OOMs |",
        "|---|---|---|---|---|",
    ]
    for key, one in told.items():
        find = one["find"]
        share = f"{find['answer'] / one['sustained']:.1%}"
        sizes = ", ".join(map(str, find["sizes"]))
        lines.append(f"| {key} | {find['answer']} | {share} | {sizes} | {find['ooms']} |")
    return lines


def child(arguments: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        },
    )
    if done.returncode != 0:
        return {"error": done.stderr[-1500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


class Pool:
    """Children side by side while the sum of their caps fits the card."""

    def __init__(self, capacity_gib: float, workers: int, deadline_s: float) -> None:
        self.free = capacity_gib
        self.turn = threading.Condition()
        self.workers = workers
        self.ends = time.monotonic() + deadline_s

    def run(self, jobs: list[tuple[Any, float, list[str]]], done: Any) -> None:
        if never := [key for key, cap, _ in jobs if cap > self.free]:
            raise SystemExit(
                f"--room must hold the largest cap, not {self.free:g} GiB: {never[0]} needs more"
            )

        def one(job: tuple[Any, float, list[str]]) -> None:
            key, cap, arguments = job
            with self.turn:
                self.turn.wait_for(lambda: self.free >= cap)
                self.free -= cap
            try:
                if time.monotonic() < self.ends:
                    begun = time.perf_counter()
                    blind = arguments[1] == "predict" and arguments[-1] == "none"
                    environment = {"CUDA_VISIBLE_DEVICES": ""} if blind else {}
                    if "@expandable" in arguments[2]:
                        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
                    answer = child(arguments, environment)
                    with self.turn:
                        done(key, answer, time.perf_counter() - begun)
            finally:
                with self.turn:
                    self.free += cap
                    self.turn.notify_all()

        with ThreadPoolExecutor(self.workers) as executor:
            list(executor.map(one, jobs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("truth", "predict", "explain", "history", "page", "child"))
    parser.add_argument("--mode", choices=("none", "gpu", "calibrated"), default="gpu")
    parser.add_argument("--loop", choices=("lean", "kept"), default="lean")
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("prediction_gpu.json"))
    parser.add_argument("--folder", type=Path, default=Path("histories"))
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=500)
    parser.add_argument("--room", type=float, default=125, help="GiB of the card for all children together")
    kept = Path(__file__).parent / "results" / "prediction_h200_202611.json"
    parser.add_argument(
        "--to", type=Path, default=kept, help="where `page` keeps the JSON, the page beside it"
    )
    given = parser.parse_intermixed_args()

    if given.what == "child":
        name, *rest = given.rest
        if os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            capped(float(rest[2]))
        runs = {
            "truth": run_truth,
            "predict": run_predict,
            "explain": run_explain,
            "history": run_history,
        }
        answer = runs[name](*rest)
        print(json.dumps(answer))
        return

    if given.what == "page":
        kept = given.to
        if given.rest:
            before = json.loads(kept.read_text()) if kept.exists() else {}
            kept.write_text(json.dumps(slim(Path(given.rest[0]), before), indent=0) + "\n")
        kept.with_suffix(".md").write_text(page(json.loads(kept.read_text())))
        return

    pool = Pool(given.room, given.workers, given.deadline_s)
    if given.what == "history":
        given.folder.mkdir(exist_ok=True, parents=True)
        jobs = []
        for text in given.rest:
            model, precision, cap, size, steps = text.split(":")
            jobs.append((text, float(cap), ["child", "history", model, precision, cap, size, steps]))

        def save(key: str, answer: dict[str, Any], seconds: float) -> None:
            (given.folder / (key.replace(":", "_") + ".json")).write_text(json.dumps(answer))
            print(key, seconds, answer.get("error", "")[-300:], flush=True)

        pool.run(jobs, save)
        return

    results: dict[str, Any] = json.loads(given.out.read_text()) if given.out.exists() else {}
    keep(given.out.with_name("about.json"), about())
    jobs = []
    for model, precision, cap in asked_for(given.what, given.models or [], given.precisions):
        key = f"{model}/{precision}/{cap}" + ("/kept" if given.loop == "kept" else "")
        if results.get(key) and "error" not in results[key]:
            continue
        rest = [model, precision, str(cap), given.loop] + ([given.mode] if given.what == "predict" else [])
        # What runs nothing on the card waits for no room on it; a calibration's runs are small.
        room = float(cap)
        if given.what == "predict":
            room = cap / 8 if given.mode == "calibrated" else 0.0
        jobs.append((key, room, ["child", given.what, *rest]))

    def note(key: str, answer: dict[str, Any], seconds: float) -> None:
        results[key] = {**answer, "seconds": seconds}
        keep(given.out, results)
        shown = {k: v for k, v in answer.items() if k not in ("trials", "prediction")}
        print(key, round(seconds, 1), json.dumps(shown)[-400:], flush=True)

    pool.run(jobs, note)
    print(f"{sum('error' in results.get(key, {'error': None}) for key, _, _ in jobs)} cases left")


if __name__ == "__main__":
    main()
