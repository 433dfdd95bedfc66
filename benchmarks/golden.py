"""The golden record: answers of today, to be compared after code was moved or renamed.

    python benchmarks/golden.py write [--out FILE]      # results/golden.json.gz unless named
    python benchmarks/golden.py check [--quick]         # a line for each difference; 1 where there is one
    python benchmarks/golden.py check --only search     # one part

Parts: predictions of the zoo without a GPU; searches (simulated, replayed on recorded H200 curves and on
traced models, and `find_batch_size` on fake devices); knees of recorded throughputs; plans of `Microbatcher`
under virtual memory, on fake devices and with faults; schedules with their LR rules; reports; result files.
`--quick` is a subset of the keys, in a few seconds: `tests/test_golden.py` runs it.

Left out, since it varies or may be reworded: seconds, versions, paths and source lines, the words of events,
losses and gradients. Of errors the type is kept. Peaks are counted from what was live when a case began.
Floats have nine digits. Predictions depend on the versions of torch and transformers: `made_with` names
those of the record, and `check` says where they are others.

Only public names are used, and those of the benchmark scripts beside this one.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import random
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import batchfit
import prediction_gpu
import profile_replayed
import search_replayed
import search_simulated
from batchfit import results, schedules, testing

ROOT = Path(__file__).parents[1]
DATA = ROOT / "tests" / "data"
STORED = Path(__file__).parent / "results" / "golden.json.gz"
MIB, GIB = 2**20, 2**30
LONG = 2000  # characters of JSON: longer values are kept as a hash

Answers = Iterator[tuple[str, object]]


# --- values that compare ------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """As JSON has it, floats with nine digits."""
    if isinstance(value, bool) or value is None or isinstance(value, int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    return [plain(one) for one in value]


def untimed(value: Any) -> Any:
    """Without seconds, versions and source lines."""
    if isinstance(value, dict):
        return {
            key: untimed(one)
            for key, one in value.items()
            if not key.endswith(("_s", "_version", "source", "message"))
        }
    if isinstance(value, list):
        return [untimed(one) for one in value]
    return re.sub(r"\S*\.py:\d+", "<line>", value) if isinstance(value, str) else value


def hashed(text: str) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "length": len(text)}


def kept(value: object) -> Any:
    """What the record keeps of a value: itself, or a hash where it is long."""
    value = plain(value)
    text = json.dumps(value, sort_keys=True)
    return value if len(text) <= LONG else hashed(text)


def named(error: Exception) -> dict[str, str]:
    """An error, by the name of its type."""
    return {"error": type(error).__name__}


def settle() -> None:
    """Collect, and let later collections look at nothing that is there now: a case has many of them."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def calm() -> Iterator[None]:
    """No collection in the middle of a case: what is live then depends on the case alone."""
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        gc.enable()


# --- predictions --------------------------------------------------------------------------------------

QUICK_PREDICTIONS = (("lstm", "bf16"), ("lstm", "fp32"), ("dcgan", "fp32"))


def predicted(model: str, precision: str, cap: int) -> object:
    try:
        found = prediction_gpu.run_predict(model, precision, str(cap), "lean", "none")
    except Exception as error:  # noqa: BLE001  a case of the record like any other
        return named(error)
    names = ("peak_bytes", "peak_phase", "peak_operation", "margin", "answers", "knees", "check", "curve")
    whole = untimed(found["prediction"])
    whole["curve"] = [[p["size"], p["peak_bytes"], p["reserved_bytes"]] for p in whole["curve"]]
    return {"default": found["default"], "raw": found["raw"]} | {name: whole[name] for name in names}


def predictions(quick: bool) -> Answers:
    for model, precision, cap in prediction_gpu.asked_for("predict", [], ["bf16", "fp32"]):
        if not quick or (model, precision) in QUICK_PREDICTIONS:
            yield f"{model}/{precision}/{cap}", predicted(model, precision, cap)
            gc.collect()


# --- searches -----------------------------------------------------------------------------------------


def path_of(search: Any) -> str:
    """The sizes that were tried: `x` one that failed, `s` a soak; then the answer."""
    tried = [f"{one.size}{'s' if one.soak else ''}{'' if one.fits else 'x'}" for one in search.observations]
    return f"{' '.join(tried)} = {search.best}"


STRATEGIES: dict[str, dict[str, Any]] = {
    "guided": {},
    "exact": {"tolerance": 0.0},
    "bisect": {"strategy": "bisect"},
    "grow": {"strategy": "grow", "start": 512},
    "powers": {"strategy": "powers"},
    "halve": {"strategy": "halve", "start": 8192},
    "eights": {"multiple_of": 8},
    "power of two": {"power_of_two": True},
    "few": {"max_size": 300, "start": 64},
}


def simulated(quick: bool) -> Answers:
    variants = [*search_simulated.VARIANTS, *search_simulated.OTHERS]
    maxima = search_simulated.MAXIMA[5 :: 100 if quick else 20]
    for variant, how, held, lasts in itertools.product(variants, STRATEGIES, (False, True), (1.0, 0.985)):
        if quick and (lasts < 1 or not held):
            continue
        found = {}
        for maximum in maxima:
            search = search_simulated.Search(budget_bytes=search_simulated.BUDGET, **STRATEGIES[how])
            tell = functools.partial(variant.observe, maximum=maximum, held=held, sustained=lasts)
            try:
                found[maximum] = path_of(search_simulated.run(search, tell))
            except Exception as error:  # noqa: BLE001  where nothing of the kind that was asked for fits
                found[maximum] = f"{type(error).__name__}"
        for maximum, path in found.items():
            yield f"{variant.name}/{how}/held {held}/lasts {lasts}/{maximum}", path


def between(ran: list[dict[str, Any]], name: str, size: int) -> int | None:
    """What was read at a size, or on a line between its neighbours, in bytes."""
    known = sorted((row["size"], row[name]) for row in ran if row.get(name) is not None)
    low = max((one for one in known if one[0] <= size), default=None)
    high = min((one for one in known if one[0] >= size), default=low)
    if low is None or high is None:
        return None
    part = (size - low[0]) / max(1, high[0] - low[0])
    return int((low[1] + part * (high[1] - low[1])) * MIB)


def on_curve(ran: list[dict[str, Any]], capacity: int, request: Any) -> Any:
    """A trial on a recorded curve. `Observation` is what a search reads, by its type's own fields."""
    names = ("allocated", "reserved", "split", "largest", "held")
    read = {f"{name}_bytes": between(ran, name, request.size) for name in names}
    below = max(
        (row for row in ran if row["size"] <= request.size), key=lambda row: row["size"], default=ran[0]
    )
    return search_simulated.Observation(
        size=request.size,
        fits=request.size <= capacity,
        soak=request.soak,
        retries=below["retries"],
        **{name: value for name, value in read.items() if value is not None},
    )


def recorded_curves() -> Iterator[tuple[str, int, int, list[dict[str, Any]]]]:
    """(name, budget, largest size that runs, what was read at those that ran)."""
    curves = json.loads((DATA / "h200_curves.json").read_text())
    for model, all_rows in curves["models"].items():
        rows = [dict(zip(curves["columns"], row, strict=True)) for row in all_rows]
        ran = [row for row in rows if row["fits"]]
        fails = min(row["size"] for row in rows if not row["fits"])
        yield model, curves["budget_bytes"], (max(row["size"] for row in ran) + fails) // 2, ran
    cases = json.loads((DATA / "search_cases.json").read_text())
    for name, case in cases["cases"].items():
        rows = [dict(zip(cases["columns"], row, strict=True), held=case["held"]) for row in case["rows"]]
        yield name, int(name.rpartition("/")[2]) * GIB, case["end"], rows


def replayed(quick: bool) -> Answers:
    for name, budget, capacity, ran in recorded_curves():
        for how, share in itertools.product(STRATEGIES, (1.0, 0.97, 0.9, 0.7)):
            if quick and share < 1:
                continue
            search = search_simulated.Search(budget_bytes=budget, **STRATEGIES[how])
            done = search_simulated.run(search, functools.partial(on_curve, ran, int(capacity * share)))
            yield f"{name}/{how}/{share}", path_of(done)


TRACED = ("gpt2", "t5_small", "bert", "resnet50", "mobilenetv2", "unet")


def traced(quick: bool) -> Answers:
    for model, precision in () if quick else itertools.product(TRACED, ("bf16", "fp32")):
        footprint = search_replayed.footprint_of(model, precision)
        for cap in search_replayed.CAPS:

            def tell(request: Any, cap: int = cap, footprint: Any = footprint) -> Any:
                return search_replayed.trial(footprint, request.size, cap * GIB, soak=request.soak)

            search = search_simulated.Search(budget_bytes=cap * GIB)
            yield f"{model}/{precision}/{cap}", path_of(search_simulated.run(search, tell))


DEVICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": {"split": 0.08},
    "cached": {"cached": 0.2},
    "both": {"split": 0.05, "cached": 0.15, "settles_after": None},
    "creeps": {"creep_bytes": MIB},
    "like a CPU": {"reserves": False},
}


def found_on(fixed: int, each: int, device: dict[str, Any], asked: dict[str, Any]) -> object:
    fake = testing.FakeDevice("1GiB", peak=lambda size: fixed + each * size, **device)
    try:
        fit = batchfit.find_batch_size(
            batchfit.Workload(fake.step, state=()), device=fake, **{"predict": False, **asked}
        )
    except Exception as error:  # noqa: BLE001  nothing fits
        return named(error)
    names = ("size", "outcome", "soak", "steps_run", "peak_bytes", "reserved_bytes", "alloc_retries")
    tried = [[getattr(trial, name) for name in names] for trial in fit.trials]
    return {"batch_size": fit.batch_size, "stopped": fit.stopped_because, "trials": tried}


def finds(quick: bool) -> Answers:
    eaches = (3 * MIB,) if quick else (MIB // 3, 3 * MIB, 90 * MIB, 2 * GIB)
    for device, how, each in itertools.product(DEVICES, STRATEGIES, eaches):
        if quick and how != "guided":
            continue
        yield f"{device}/{how}/{each}", found_on(200 * MIB, each, DEVICES[device], STRATEGIES[how])


# --- knees --------------------------------------------------------------------------------------------


def knees(quick: bool) -> Answers:
    recorded = json.loads(profile_replayed.RECORDED.read_text())
    for case in profile_replayed.CASES:
        replay = profile_replayed.Replay(recorded, case)
        for seed in range(1 if quick else 25):
            run = replay.run(profile_replayed.FIRST + seed)
            asked = " ".join(f"{size}{'*' if fine else ''}/{steps}" for size, fine, steps in run.asked)
            yield f"{case}/{seed}", f"{asked} = {run.recommended}"


# --- plans of the Microbatcher ------------------------------------------------------------------------

WORDS = 50
MODES = (
    *("virtual", "virtual and faults", "fake device", "fake device and faults", "faults"),
    *("ragged", "ragged and faults", "ragged on a fake device"),
)


class Reader(nn.Module):
    """Words with a mask, a layer, and a loss over the words that count."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS)

    def forward(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.head(torch.tanh(self.embed(micro["input_ids"])))
        return nn.functional.cross_entropy(logits.transpose(1, 2), micro["labels"], ignore_index=-100)


def rows(size: int, width: int) -> torch.Tensor:
    return torch.linspace(-1, 1, size * width).reshape(size, width)


def padded(lengths: list[int]) -> dict[str, torch.Tensor]:
    width = 64 * math.ceil(max(lengths) / 64)
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    ids = (torch.arange(mask.numel()).reshape(mask.shape) % (WORDS - 1) + 1) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def counted(micro: dict[str, torch.Tensor]) -> torch.Tensor:
    return (micro["labels"] != -100).sum()


@dataclasses.dataclass
class Case:
    """A row of batches for one Microbatcher; everything is drawn from the number of the case."""

    number: int
    mode: str

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(f"golden/{self.mode}/{self.number}")
        self.ragged = "ragged" in self.mode
        self.maps = not self.ragged and self.number % 7 == 3
        self.width = rng.choice((8, 32, 64))
        self.most = rng.choice((None, None, None, 8, 13))
        self.room = rng.choice((60, 150, 400, 1500)) * 2**10 * (8 if self.ragged else 1)
        times = rng.randint(1, 5) if "faults" in self.mode else 0
        self.faults: dict[int, str] = {
            rng.randrange(60): rng.choice(("oom", "oom", "cublas", "cudnn", "cpu")) for _ in range(times)
        }
        self.tried: list[list[int]] = []
        self.batches: list[Any] = []
        size = rng.choice((5, 16, 33, 64, 100)) // (2 if self.ragged else 1)
        for _ in range(6):
            drawn = size if rng.random() < 0.5 else rng.randint(1, 2 * size)
            longest = rng.choice((20, 90, 200))
            lengths = [rng.randint(1, longest) for _ in range(drawn)]
            self.batches.append(padded(lengths) if self.ragged else rows(drawn, self.width))
        torch.manual_seed(0)
        inner = 2 * self.width
        layers = nn.Sequential(nn.Linear(self.width, inner), nn.Tanh(), nn.Linear(inner, 1))
        self.model: nn.Module = Reader(self.width) if self.ragged else layers


def run_case(case: Case, live: int) -> object:
    """The plan of each batch, and that of a Microbatcher which takes over what was learned."""
    model = case.model
    events: list[list[Any]] = []
    device = None
    if "fake device" in case.mode:
        device = testing.FakeDevice(case.room, **DEVICES[("plain", "split", "cached")[case.number % 3]])
    each = case.room // (7 + case.number % 50)

    def loss_of(micro: Any) -> torch.Tensor:
        size = [len(micro["input_ids"]), micro["input_ids"].shape[1]] if case.ragged else [len(micro)]
        if torch.is_grad_enabled() or case.maps:
            case.tried.append(size)
        if device is not None:
            device.use(each * math.prod(size) // (40 if case.ragged else 1))
        return model(micro) if case.ragged else model(micro).square().mean()

    padding: dict[str, Any] = {"lengths": "attention_mask", "weight": counted} if case.ragged else {}

    def made() -> batchfit.Microbatcher:
        return batchfit.Microbatcher(
            model,
            microbatch_size=case.most,
            device=device,
            on_event=lambda event: events.append([event.kind, event.size_before, event.size_after]),
            **padding,
        )

    fn = testing.faulty(loss_of, case.faults)
    found, batcher = [], made()
    for number, batch in enumerate([*case.batches, case.batches[0]]):
        if number == len(case.batches):
            state = json.loads(json.dumps(batcher.state_dict()))
            batcher = made()
            batcher.load_state_dict(state)
        found.append(one_batch(case, batcher, fn, batch, live))
        model.zero_grad()
    return {"batches": found, "events": events}


def one_batch(
    case: Case, batcher: batchfit.Microbatcher, fn: Callable[[Any], Any], batch: Any, live: int
) -> object:
    case.tried.clear()
    try:
        if case.maps:
            batcher.map(lambda micro: [fn(micro)] and micro.sum(1), batch)
            return {"mapped": list(case.tried)}
        report = batcher.backward(fn, batch)
    except Exception as error:  # noqa: BLE001  where one sample does not fit
        return named(error) | {"tried": list(case.tried)}
    peak = None if report.peak_bytes is None else report.peak_bytes - live
    return {
        "sizes": report.microbatch_sizes,
        "retries": report.retries,
        "first": case.tried[0] if case.tried else None,
        "tried": hashed(json.dumps(case.tried))["sha256"][:16],
        "peak": peak,
    }


def microbatches(quick: bool) -> Answers:
    for mode, number in itertools.product(MODES, range(1 if quick else 45)):
        settle()
        case = Case(number, mode)
        with calm():
            if "virtual" not in mode and mode not in ("ragged", "ragged and faults"):
                yield f"{mode}/{number}", run_case(case, 0)
                continue
            with batchfit.virtual_memory(64 * GIB) as memory:
                live = memory.allocated_bytes
                with memory.lowered(live + case.room):
                    found = run_case(case, live)
            yield f"{mode}/{number}", found


# --- schedules ----------------------------------------------------------------------------------------


def by_progress(progress: Any) -> int:
    return 32 * (1 + int(progress.epoch) // 7)


def by_epoch(epoch: int, current_batch_size: int) -> int:
    return current_batch_size // 2 if epoch % 5 == 4 else 0


def configs() -> dict[str, Any]:
    """Schedules of all kinds; those in epochs and those in other units."""
    smooth = {
        "linear": batchfit.LinearBatchSizeConfig,
        "exponential": batchfit.ExponentialBatchSizeConfig,
        "cosine": batchfit.CosineBatchSizeConfig,
    }
    milestones = batchfit.MilestoneBatchSizeConfig
    found: dict[str, Any] = {
        "constant": None,
        "step": batchfit.StepBatchSizeConfig(step_size=10, gamma=2, max_batch_size=1000),
        "step in samples": batchfit.StepBatchSizeConfig(
            step_size="20k", gamma=3, unit="samples", max_batch_size=900, multiple_of=8
        ),
        "milestone": milestones(milestones="0:64 10:128 25:96 40:512"),
        "milestone in tokens": milestones(milestones="0:64 1M:128 3M:256 tokens"),
        "milestone in steps": milestones(milestones={0: 64, 100: 192, 300: 100}, unit="step"),
        "seesaw, cosine": milestones.seesaw(64, decay="cosine", total=50),
        "seesaw, quarter": milestones.seesaw(64, decay="quarter-cosine", total=50, ratio=1.5, multiple_of=8),
        "seesaw, cuts": milestones.seesaw(64, decay={10: 0.2, 30: 0.5}, max_batch_size=400),
        "custom": batchfit.CustomBatchSizeConfig(function=by_progress, max_batch_size=200),
        "increase": batchfit.IncreaseBatchSizeConfig(function=by_epoch, max_batch_size=400),
        "increase, clamped": batchfit.IncreaseBatchSizeConfig(
            function=by_epoch, max_batch_size=400, clamp=True
        ),
    }
    for name, kind in smooth.items():
        found[name] = kind(final_batch_size=700, over=45)
        found[f"{name}, falls"] = kind(final_batch_size=9, over=30, start=5, rounding="nearest")
        found[f"{name}, stairs"] = kind(final_batch_size=512, over=400, every=50, unit="step", multiple_of=16)
        found[f"{name}, samples"] = kind(final_batch_size=512, over="80k", unit="samples", rounding="up")
    return found


RULES = ("none", "linear", "sqrt", "seesaw", "power(0.6)")
LIMITS: dict[str, dict[str, Any]] = {
    "free": {},
    "limited": {"largest": 300},
    "ranks": {"world_size": 4, "microbatch_size": 2},
}


def walked(config: Any, rule: str, limits: dict[str, Any]) -> object:
    """Sizes and factors along a run, the updates that it takes, and how it goes on from a checkpoint."""
    unit = "epoch" if config is None else config.unit
    weights = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    events: list[list[Any]] = []

    def made() -> batchfit.BatchSizeScheduler:
        return batchfit.BatchSizeScheduler(
            config,
            64,
            lr=rule,
            optimizer=optimizer,
            tokens_per_sample=50,
            on_event=lambda event: events.append([event.kind, event.size_before, event.size_after]),
            **limits,
        )

    try:
        scheduler = made()
        stride = {"epoch": 1, "step": 13, "samples": 1777, "tokens": 70_001}[unit]
        sizes, factors = [], []
        for count in range(60):
            size, _ = scheduler.step(**{unit: count * stride})
            sizes.append(size)
            factors.append([*scheduler.lr_factors, optimizer.param_groups[0]["lr"]])
        updates = [
            scheduler.updates(samples=samples, epochs=40, drop_last=drops)
            for samples, drops in itertools.product((999, 5000), (False, True))
        ]
        state = scheduler.state_dict()
        scheduler.close()
        again = made()
        again.load_state_dict(json.loads(json.dumps(state)))
        later, _ = again.step(**{unit: 61 * stride})
        again.close()
    except Exception as error:  # noqa: BLE001  a schedule that the limits refuse
        return named(error)
    runs = [f"{size} x {len(list(run))}" for size, run in itertools.groupby(sizes)]
    rates = [one for one, _ in itertools.groupby(factors)]
    return {
        "sizes": runs,
        "rates": rates,
        "updates": updates,
        "state": state,
        "later": later,
        "events": events,
    }


class Noise:
    """Readings of a noise scale that rises and falls, in place of a measurement."""

    def __init__(self) -> None:
        self.empty = batchfit.GradientNoise(nn.Linear(1, 1)).reading()
        self.asked = 0

    def reading(self) -> Any:
        self.asked += 1
        scale = 40.0 * 2 ** (5 * math.sin(self.asked / 6) + 2)
        known: dict[str, Any] = {
            "scale": scale,
            "low": 0.95 * scale,
            "high": 1.05 * scale,
            "noise": scale,
            "signal": 1.0,
        }
        errors: dict[str, Any] = {
            "noise_error": 0.01 * scale,
            "signal_error": 0.01,
            "effective_steps": 100.0,
            "reason": "",
        }
        return dataclasses.replace(
            self.empty, **known, **errors, steps=100 * self.asked, samples=6400.0 * self.asked
        )


def by_noise(config: Any, throughput: Callable[[int], float] | None) -> object:
    scheduler = batchfit.BatchSizeScheduler(config, 64, noise=Noise(), throughput=throughput)
    sizes = [scheduler.step(step=step)[0] for step in range(900)]
    return [f"{size} x {len(list(run))}" for size, run in itertools.groupby(sizes)]


def all_schedules(quick: bool) -> Answers:
    for name, config in configs().items():
        for rule, limits in itertools.product(RULES, LIMITS):
            if quick and (rule != "sqrt" or limits == "ranks"):
                continue
            yield f"{name}/{rule}/{limits}", walked(config, rule, LIMITS[limits])
        if name == "custom" or name.startswith("increase"):
            config = type(config)(function="math:floor", max_batch_size=200)
        if config is not None:
            text = config.to_json()
            again = batchfit.load_schedule(text)
            assert again is not None
            yield f"{name}/json", {"json": json.loads(text), "again": again == config}
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "eager": {"min_steps": 0, "hysteresis": 0.01},
        "bounded": {"min_batch_size": 32, "max_batch_size": 512, "ratio": 4, "use_bound": True},
        "grows": {"can_shrink": False, "target": 2.0},
    }
    for name, settings in kinds.items():
        noise = schedules.NoiseBatchSizeConfig(**settings)
        yield f"noise/{name}/json", json.loads(noise.to_json())
        yield f"noise/{name}", by_noise(noise, None)
        yield f"noise/{name}/throughput", by_noise(noise, lambda size: 1000 * size / (size + 90))


# --- reports and results ------------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "fit": results.FitResult,
    "prediction": results.Prediction,
    "memory": results.MemoryExplanation,
    "throughput": results.ThroughputProfile,
    "sweep": results.SweepResult,
}


def reports(quick: bool) -> Answers:
    files = sorted((DATA / "report").glob("*.json"))
    asked: dict[str, Any] = {file.stem: file for file in files}
    asked["all"] = files
    with tempfile.TemporaryDirectory() as folder:
        for name, given in asked.items():
            path = batchfit.report(given, Path(folder) / "report.html", title=f"Golden {name}")
            text = path.read_text(encoding="utf-8").replace(f"batchfit {batchfit.__version__}", "batchfit")
            yield f"{name}/whole", hashed(text)
            for number, section in enumerate(re.split(r"(?=<section|<style|<script|<footer)", text)):
                yield f"{name}/section {number:02}", hashed(section)


def stored_results() -> Iterator[tuple[str, results.Result]]:
    for file in sorted((DATA / "report").glob("*.json")):
        data = json.loads(file.read_text(encoding="utf-8"))
        for number, one in enumerate(data if isinstance(data, list) else [data]):
            if one["kind"] in TYPES:
                yield f"{file.stem}/{number}", TYPES[one["kind"]].from_json(json.dumps(one))


def inside(value: object) -> Iterator[results.Result]:
    """A result and all results that it holds."""
    if isinstance(value, results.Result):
        yield value
        for name in type(value).model_fields:
            yield from inside(getattr(value, name))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from inside(one)
    elif isinstance(value, Mapping):
        yield from inside(tuple(value.values()))


def small_workload() -> batchfit.Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return batchfit.training(
        model, optimizer, loss_of, lambda n: (torch.zeros(n, 64), torch.zeros(n, dtype=torch.long))
    )


def fresh_results() -> Iterator[tuple[str, results.Result]]:
    """Results that are made now."""
    fake = testing.FakeDevice("1GiB", peak=lambda size: 200 * MIB + size * 3 * MIB)
    yield "fit", batchfit.find_batch_size(batchfit.Workload(fake.step, state=()), device=fake)
    yield "prediction", batchfit.predict_batch_size(small_workload(), budget="1GiB", gpu="a100")
    yield "memory", batchfit.explain_memory(small_workload(), batch_size=32, budget="1GiB", gpu="h200")


def result_files(quick: bool) -> Answers:
    seen: set[str] = set()
    for name, result in stored_results():
        yield f"stored/{name}/json", json.loads(result.to_json())
        yield f"stored/{name}/text", str(result)
        yield f"stored/{name}/html", result._repr_html_() if hasattr(result, "_repr_html_") else None
        for part in inside(result):
            kind = type(part).__name__
            if kind not in seen:
                seen.add(kind)
                yield f"type/{kind}", json.loads(part.to_json())
    for name, result in fresh_results():
        yield f"fresh/{name}", untimed(json.loads(result.to_json()))
    report = results.StepReport(torch.tensor(0.25), (8, 8, 3), retries=2, peak_bytes=3 * MIB)
    yield "step report", str(report)


# --- the record ---------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool], Answers]] = {
    "microbatch": microbatches,  # first: what others leave live could count
    "schedule": all_schedules,
    "report": reports,
    "result": result_files,
    "search/simulated": simulated,
    "search/replayed": replayed,
    "search/find": finds,
    "knee": knees,
    "search/traced": traced,
    "prediction": predictions,
}


def answers(only: str = "", *, quick: bool = False) -> dict[str, Any]:
    """All answers by key."""
    logging.getLogger("batchfit").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    settle()
    found: dict[str, Any] = {}
    for part, made in PARTS.items():
        if not part.startswith(only):
            continue
        begun = time.perf_counter()
        for name, value in made(quick):
            key = f"{part}/{name}"
            assert key not in found, key
            found[key] = kept(value)
        print(f"{part}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    return found


def made_with() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "pydantic")}


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def write(path: Path, found: dict[str, Any]) -> None:
    text = json.dumps({"made_with": made_with(), "answers": found}, sort_keys=True, indent=0)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def others(path: Path, only: str) -> dict[str, Any]:
    """The stored answers outside the part `only`: a part is written without the others being lost."""
    if not only or not path.exists():
        return {}
    stored = read(path)
    if (now := made_with()) != stored["made_with"]:
        raise SystemExit(f"{path} was made with {stored['made_with']}, not {now}: write all parts")
    return {key: answer for key, answer in stored["answers"].items() if not key.startswith(only)}


def text_of(record: dict[str, Any], key: str) -> str:
    return json.dumps(record[key], sort_keys=True) if key in record else "nothing"


def differences(stored: dict[str, Any], found: dict[str, Any], only: str, *, quick: bool) -> list[str]:
    """A line for each key whose answer is another, missing or new."""
    lines = []
    for key in sorted({*stored, *found}):
        if not key.startswith(only) or (quick and key not in found):
            continue
        before, now = (
            json.dumps(one[key], sort_keys=True) if key in one else "nothing" for one in (stored, found)
        )
        if before != now:
            at = next((i for i, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), 0)
            begin = max(0, at - 40)
            lines.append(f"{key}: {before[begin : at + 60]} -> {now[begin : at + 60]}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "check"))
    parser.add_argument("--out", type=Path, default=STORED, help="the record to write")
    parser.add_argument("--record", type=Path, default=STORED, help="the record to compare with")
    parser.add_argument("--quick", action="store_true", help="a subset, in seconds")
    parser.add_argument("--only", default="", help="keys that begin so: " + ", ".join(PARTS))
    given = parser.parse_args()
    found = answers(given.only, quick=given.quick)
    if given.what == "write":
        kept = others(given.out, given.only)
        write(given.out, {**kept, **found})
        print(f"{len(found)} answers, {len(kept)} kept, {given.out.stat().st_size} bytes")
        return 0
    stored = read(given.record)
    if (now := made_with()) != stored["made_with"]:
        print(f"made with {stored['made_with']}, and here are {now}")
    lines = differences(stored["answers"], found, given.only, quick=given.quick)
    for line in lines:
        print(line)
    print(f"{len(found)} answers, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
