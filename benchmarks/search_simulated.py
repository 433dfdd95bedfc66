"""Trials and failures that a search costs, and how close it comes: 400 simulated maxima, ours and the peers.

    python benchmarks/search_simulated.py

Rules: every algorithm meets the same 400 maxima in the same run. A size fits if and only if it is at most the
maximum; what a trial reads is the peak of the variant, with noise that depends on the size. All trials count,
soaks included; an answer above the maximum is unsafe and counts as 0 %. Peers marked [real] are the packages'
own code with an injected OOM (their garbage collection is stubbed: sizes are counted, not seconds); [port] is
written here from a description of what the package does. Of a package that cannot be imported the run in the
earlier results is kept, marked with its date (maxima and peers are the same); without one it is absent.
Writes results/search_simulated.json and, from the same numbers, results/search_simulated_cpu_<yyyymm>.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import batchfit
from batchfit._find.pure.search import Observation, Request, Search, run

BUDGET = 24 * 2**30
MAXIMA = [int(8192 ** ((i + 0.5) / 400)) for i in range(400)]
NOISE = 0.03
DRAWS = range(5)
OOM_TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB."

Share = Callable[[int, float], float]  # (size, where the memory ends) -> share of the budget


def unit(*of: object) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


# --- what a size needs --------------------------------------------------------------------------------


def linear(fixed: float) -> Share:
    return lambda size, end: fixed + (1 - fixed) * size / end


def knees(flat: float, middle: float, last: float, meets: float) -> Share:
    """Flat where the optimizer step is the peak, then lines from `middle` and `last` that meet at `meets`."""
    slope = 1 - last - (middle - last) / meets

    def share(size: int, end: float) -> float:
        return max(flat, middle + slope * size / end, last + (1 - last) * size / end)

    return share


def stepped(fixed: float) -> Share:
    """A line that rises by 1 GiB of the 24 at size 32 (a workspace)."""

    def share(size: int, end: float) -> float:
        rise = 1 / 24 if end >= 32 else 0.0
        return fixed + (1 - fixed - rise) * size / end + rise * (size >= 32)

    return share


@dataclass(frozen=True)
class Variant:
    name: str
    share: Share
    held: float  # what stays between steps
    noise: float = 0.0

    def observe(self, request: Request, maximum: int, *, held: bool, sustained: float = 1.0) -> Observation:
        """A trial: fits up to `maximum`; as a soak, up to that share of it."""
        end = maximum + unit("room", maximum)  # the budget ends between the maximum and the next size
        wobble = 1 + self.noise * (2 * unit("noise", maximum, request.size) - 1)
        most = max(1, math.floor(maximum * sustained)) if request.soak else maximum
        return Observation(
            size=request.size,
            fits=request.size <= most,
            soak=request.soak,
            allocated_bytes=round(BUDGET * self.share(request.size, end) * wobble),
            held_bytes=round(BUDGET * self.held) if held else None,
        )


SHAPES = {
    "linear": (linear(0.2), 0.2),
    "convex": (knees(0.25, 0.22, 0.18, 0.15), 0.15),
    "stepped": (stepped(0.2), 0.2),
}
VARIANTS = [
    Variant(name + (", noise" if noise else ""), share, held, noise)
    for name, (share, held) in SHAPES.items()
    for noise in (0.0, NOISE)
]
# The constants of the search were chosen on the variants above; these say whether that was luck.
OTHERS = [
    Variant(f"{name}, noise", share, held, NOISE)
    for name, share, held in [
        *((f"linear, {fixed:.0%} fixed", linear(fixed), fixed) for fixed in (0.05, 0.1, 0.3, 0.4, 0.6)),
        ("like GPT-2", knees(0.10, 0.09, 0.081, 0.06), 0.08),
        ("like ViT", knees(0.071, 0.062, 0.06, 0.03), 0.057),
        ("knees at 20 % and half way", knees(0.3, 0.25, 0.1, 0.5), 0.1),
    ]
]


# --- runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One algorithm on all maxima."""

    name: str
    trials: list[int]
    ooms: list[int]
    returned: list[int]
    maxima: tuple[int, ...] = tuple(MAXIMA)

    def summary(self) -> dict[str, float]:
        count = len(self.maxima)
        pairs = list(zip(self.returned, self.maxima, strict=True))
        safe = [size / maximum if size <= maximum else 0.0 for size, maximum in pairs]
        return {
            "trials_mean": sum(self.trials) / count,
            "trials_max": max(self.trials),
            "ooms_mean": sum(self.ooms) / count,
            "ooms_max": max(self.ooms),
            "share_of_max_mean": sum(safe) / count,
            "share_of_max_min": min(safe),
            "exact": sum(size == maximum for size, maximum in pairs) / count,
            "unsafe": sum(size > maximum for size, maximum in pairs) / count,
        }


def ours(
    name: str,
    variant: Variant,
    *,
    held: bool = False,
    sustained: float = 1.0,
    maxima: list[int] = MAXIMA,
    **settings: Any,
) -> Run:
    done = [
        run(
            Search(budget_bytes=BUDGET, **settings),
            lambda request, maximum=maximum: variant.observe(
                request, maximum, held=held, sustained=sustained
            ),
        )
        for maximum in maxima
    ]
    return Run(
        name,
        [len(search.observations) for search in done],
        [sum(not one.fits for one in search.observations) for search in done],
        [search.best or 0 for search in done],
        tuple(maxima),
    )


def drawn(seed: int) -> list[int]:
    """400 maxima drawn at random, log-uniform."""
    rng = random.Random(seed)
    return [int(8192 ** rng.random()) for _ in range(400)]


Attempt = Callable[[int], bool]  # size -> fits
Finder = Callable[[Attempt], int]


def peer(name: str, find: Finder) -> Run:
    logs: list[list[bool]] = []
    returned = []
    for maximum in MAXIMA:
        log: list[bool] = []

        def attempt(size: int, maximum: int = maximum, log: list[bool] = log) -> bool:
            log.append(size <= maximum)
            return log[-1]

        returned.append(find(attempt))
        logs.append(log)
    return Run(name, [len(log) for log in logs], [log.count(False) for log in logs], returned)


# --- peers, from descriptions -------------------------------------------------------------------------


def double_and_bisect(fits: Attempt) -> int:
    size = 1
    while fits(size):
        size *= 2
    low, high = size // 2, size
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def lightning_power(fits: Attempt, *, most: int = 8192) -> int:
    """Doubles from 2; ends with the size after the last that ran where that reaches `most`, tried or not."""
    size, ran = 2, False
    for _ in range(25):
        if fits(size):
            size, ran = 2 * size, True
            if size >= most:
                break
        else:
            size //= 2
            if ran:
                break
    return size


def lightning_binsearch(fits: Attempt, *, most: int = 8192, margin: float = 0.05) -> int:
    size, low, high = 2, 1, 0
    for _ in range(25):
        if fits(size):
            low = size
            if high and high - low <= 1:
                break
            size = (low + high) // 2 if high else 2 * size
            if size >= most:
                break
        else:
            high = size
            size = (low + high) // 2
            if high - low <= 1:
                break
    return max(1, int(size * (1 - margin)))


def nemo_oomptimizer(fits: Attempt, *, start: int = 32, gap: float = 0.05) -> int:
    size, good, bad = start, 0, 0
    while True:
        good, bad = (size, bad) if fits(size) else (good, size)
        if bad == 1:
            return 0
        if good and bad:
            size = round((good + bad) / 2)
            if (bad - good) / bad <= gap or size in (good, bad):
                return good
        else:
            size = 2 * size if good else size // 2


def knowing_bisection(variant: Variant) -> Run:
    """A bound, no finder: bisection that knows the shape, its fixed part, the noise and the range."""
    trials, ooms = [], []
    for maximum in MAXIMA:
        end = maximum + unit("room", maximum)
        good, bad, low, high, count, failed = 0, 8192, 1.0, 8192.0, 0, 0
        while bad - good > 1:
            first, last = max(good + 1, math.ceil(low - 1)), min(bad - 1, math.floor(high))
            size = (
                round(math.sqrt(first * last)) if first <= last else (good + 1 if last <= good else bad - 1)
            )
            count += 1
            if size > maximum:
                failed, bad = failed + 1, size
                continue
            good = size
            read = variant.share(size, end) * (1 + variant.noise * (2 * unit("noise", maximum, size) - 1))
            for error in (1 + variant.noise, 1 - variant.noise):
                slope = read / error - 0.2
                crossing = 0.8 * size / slope if slope > 0 else 8192.0
                low, high = (low, min(high, crossing)) if error > 1 else (max(low, min(crossing, bad)), high)
        trials.append(count)
        ooms.append(failed)
    return Run("bisection that knows the curve [bound]", trials, ooms, list(MAXIMA))


# --- peers, their own code ----------------------------------------------------------------------------


def raising(fits: Attempt) -> Callable[[int], int]:
    """A step that runs out of memory as torch does."""
    import torch

    def step(size: int) -> int:
        if not fits(size):
            raise torch.OutOfMemoryError(OOM_TEXT)
        return size

    return step


def accelerate_from(start: int) -> Finder:
    from accelerate.utils import find_executable_batch_size

    def find(fits: Attempt) -> int:
        step = raising(fits)

        def train(batch_size: int) -> int:
            return step(batch_size)

        return int(find_executable_batch_size(train, starting_batch_size=start)())

    return find


def toma_from(start: int) -> Finder:
    import toma

    return lambda fits: int(toma.simple.batch(raising(fits), start))


def torch_max_mem_from(start: int) -> Finder:
    from torch_max_mem import maximize_memory_utilization

    def find(fits: Attempt) -> int:
        step = raising(fits)

        def train(batch_size: int) -> int:
            return step(batch_size)

        return int(maximize_memory_utilization()(train)(batch_size=start))

    return find


def batch_finder_from(start: int) -> Finder:
    import torch
    from batch_finder import find_max_minibatch

    def find(fits: Attempt) -> int:
        step = raising(fits)

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(1))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                step(x.shape[0])
                return x * self.weight

        options = {"memory_guided": False, "delay": 0, "use_subprocess": False, "device": torch.device("cpu")}
        found = find_max_minibatch(Net, input_shapes=(-1, 1), initial_value=start, **options)
        return int(found[0]) if found else 0

    return find


REAL: list[tuple[str, str, Callable[[int], Finder], int]] = [
    ("accelerate", "Accelerate {}, start 128", accelerate_from, 128),
    ("accelerate", "Accelerate {}, start 8192", accelerate_from, 8192),
    ("accelerate", "Accelerate {}, start 8 (as HF Trainer)", accelerate_from, 8),
    ("toma", "toma {}, start 512", toma_from, 512),
    ("torch-max-mem", "torch-max-mem {}, start 8192", torch_max_mem_from, 8192),
    ("batch-finder", "batch-finder {}, x2, start 512", batch_finder_from, 512),
]
PORTS: list[tuple[str, Finder]] = [
    ("Lightning 2.6 power [port]", lightning_power),
    ("Lightning 2.6 binsearch [port]", lightning_binsearch),
    ("NeMo OOMptimizer [port]", nemo_oomptimizer),
    ("double, then bisect [port]", double_and_bisect),
]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection and no output of theirs: 400 runs of some peers collect 16,000 times."""
    collect, sink = gc.collect, io.StringIO()
    gc.collect = lambda *_: 0
    try:
        with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            yield
    finally:
        gc.collect = collect


def kept_run(name: str, earlier: dict[str, Any]) -> Run | None:
    """The run of a peer in earlier results, whatever its version was; None where there is none."""
    if earlier.get("maxima") != MAXIMA:
        return None
    pattern = re.escape(name).replace(r"\{\}", r"\S+") + r" \[real(, of [\d-]+)?\]"
    for one in earlier["groups"]["beside"]:
        if re.fullmatch(pattern, one["name"]):
            since = one["name"] if ", of " in one["name"] else f"{one['name'][:-1]}, of {earlier['date']}]"
            return Run(since, one["trials"], one["ooms"], one["returned"])
    return None


def peers(earlier: dict[str, Any]) -> tuple[list[Run], list[str]]:
    runs, absent = [], []
    for package, name, make, start in REAL:
        try:
            label = name.format(importlib.metadata.version(package)) + " [real]"
            find = make(start)
        except ImportError:
            kept = kept_run(name, earlier)
            if kept is not None:
                runs.append(kept)
            else:
                absent.append(name.format("").replace("  ", " ").strip())
            continue
        with quiet():
            runs.append(peer(label, find))
    return [*runs, *(peer(name, find) for name, find in PORTS)], absent


# --- the page -----------------------------------------------------------------------------------------

COLUMNS = (
    "| {} | trials, mean / max | OOMs, mean / max | of the maximum | exact | unsafe |{}\n"
    "|---|---|---|---|---|---|{}\n"
)


Summary = dict[str, Any]  # a run as it stands in the JSON: its name and `Run.summary`


def row(s: Summary, more: str = "") -> str:
    return (
        f"| {s['name']} | {s['trials_mean']:.2f} / {s['trials_max']:.0f} "
        f"| {s['ooms_mean']:.2f} / {s['ooms_max']:.0f} | {s['share_of_max_mean']:.1%} "
        f"| {s['exact']:.0%} | {s['unsafe']:.1%} |{more}\n"
    )


def met(s: Summary, *, exact: bool) -> bool:
    if exact:
        return bool(s["exact"] == 1 and s["trials_mean"] <= 7 and s["trials_max"] <= 24)
    close = s["share_of_max_mean"] >= 0.98 and s["unsafe"] == 0
    return bool(s["trials_mean"] <= 5 and s["ooms_mean"] <= 0.3 and close and s["trials_max"] <= 24)


def goal_table(runs: list[Summary], *, exact: bool) -> str:
    rows = [row(run, " yes |" if met(run, exact=exact) else " **no** |") for run in runs]
    return COLUMNS.format("variant", " goal met |", "---|") + "".join(rows)


def table(title: str, runs: list[Summary]) -> str:
    return COLUMNS.format(title, "", "") + "".join(row(run) for run in runs)


def spread_table(runs: list[Summary]) -> str:
    """The range of the means over the draws, a variant a row."""
    lines = ["| variant | trials | OOMs | of the maximum |\n|---|---|---|---|\n"]
    for name in dict.fromkeys(one["name"] for one in runs):
        all_of = [one for one in runs if one["name"] == name]
        cells = []
        for key, style in (("trials_mean", ".2f"), ("ooms_mean", ".2f"), ("share_of_max_mean", ".1%")):
            values = [each[key] for each in all_of]
            cells.append(f"{min(values):{style}} to {max(values):{style}}")
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    return "".join(lines)


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "batchfit": batchfit.__version__}
    for package in ("torch", *dict.fromkeys(package for package, *_ in REAL)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def page(facts: dict[str, Any]) -> str:
    """The dated page: every figure comes from the JSON."""
    groups = facts["groups"]
    installed = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    absent = ", ".join(facts["absent"]) or "none"
    return f"""# Search, simulated: {facts["date"]}

Made by `{facts["command"]}` in {facts["elapsed_s"]:.0f} s on {facts["cpu"]}, {facts["cores"]} cores.
{installed}. Peers absent: {absent}.
Every run with its 400 results is in `search_simulated.json`.

400 maxima in [1, 8191], evenly spaced in the logarithm; a size fits if and only if it is at most the maximum.
Readings: linear (20 % fixed), convex (flat up to 5 % of the maximum, a second knee at 15 %), stepped (1 GiB
more of the 24 from size 32 on). Noise: each reading wrong by up to 3 %, uniform, by a hash of maximum and
size. All trials count, the soak included.
Goal: mean at most 5 trials, 0.3 OOMs, at least 98 % of the maximum; with `tolerance=0` exact in
at most 7 trials; never more than 24.

## Default
Held bytes unknown:

{goal_table(groups["default"], exact=False)}
Held bytes known (as on a device):

{goal_table(groups["default, held known"], exact=False)}
## `tolerance=0`
Held bytes unknown:

{goal_table(groups["exact"], exact=True)}
Held bytes known:

{goal_table(groups["exact, held known"], exact=True)}
What 3 % of noise leaves open has to be bisected: 480 sizes at a maximum of 8000, about 9 bits. For
comparison, a bisection that is told the curve's shape, its fixed part, the bound of the noise and the range:

{table("linear, noise", groups["bound"])}
## Beside the peers
Ours on the linear variant with held bytes unknown; the peers read no memory (batch-finder's guided mode needs
a GPU).

{table("algorithm", groups["beside"])}
## Other draws
The same, held bytes unknown, on {len(DRAWS)} random draws of 400 maxima: lowest and highest mean.

{spread_table(groups["draws"])}
## Curves that the constants were not chosen on
Default; held bytes unknown, then known. No goal is set for these.

{table("variant", groups["others"])}
## Soaks that fail
Sizes above 98.5 % of the maximum run in a short trial and die in the soak. Shares are of the maximum: one
sample less is much where it is small.

{table("variant", groups["soaks"])}"""


def measure(earlier: dict[str, Any]) -> tuple[dict[str, list[Run]], list[str]]:
    groups: dict[str, list[Run]] = {}
    for key, tolerance in (("default", 0.02), ("exact", 0.0)):
        for suffix, held in (("", False), (", held known", True)):
            groups[key + suffix] = [ours(v.name, v, held=held, tolerance=tolerance) for v in VARIANTS]
    groups["bound"] = [knowing_bisection(VARIANTS[1])]
    line = VARIANTS[0]
    beside = [
        ours("batchfit guided", line),
        ours("batchfit guided, tolerance=0", line, tolerance=0.0),
        ours("batchfit bisect", line, strategy="bisect"),
        ours("batchfit grow, start 512, 5 attempts", line, strategy="grow", start=512),
        ours("batchfit powers", line, strategy="powers"),
        ours("batchfit halve, start 8192", line, strategy="halve", start=8192),
    ]
    runs, absent = peers(earlier)
    groups["beside"] = [*beside, *runs]
    groups["others"] = [
        *(ours(v.name, v) for v in OTHERS),
        *(ours(f"{v.name}, held known", v, held=True) for v in OTHERS),
    ]
    groups["draws"] = [ours(v.name, v, maxima=drawn(seed)) for v in VARIANTS for seed in DRAWS]
    groups["soaks"] = [ours(v.name, v, sustained=0.985) for v in VARIANTS]
    return groups, absent


def details(run: Run) -> dict[str, Any]:
    """A run's 400 results; those of a random draw can be made again from its seed."""
    if run.maxima != tuple(MAXIMA):
        return {"name": run.name}
    return {"name": run.name, "trials": run.trials, "ooms": run.ooms, "returned": run.returned}


def main() -> None:
    parser = argparse.ArgumentParser(description="trials, failures and accuracy of searches, simulated")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder")
    output: Path = parser.parse_args().output
    begun = time.perf_counter()
    before = Path(__file__).parent / "results" / "search_simulated.json"
    groups, absent = measure(json.loads(before.read_text()) if before.exists() else {})
    today = datetime.datetime.now(datetime.UTC).date()
    facts = {
        "date": str(today),
        "command": "python benchmarks/search_simulated.py",
        "elapsed_s": round(time.perf_counter() - begun, 1),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "absent": absent,
        "maxima": MAXIMA,
    }
    raw = {key: [{**one.summary(), **details(one)} for one in runs] for key, runs in groups.items()}
    found = {**facts, "groups": raw}
    text = json.dumps(found, separators=(",", ":")).replace('},"', '},\n"')
    output.mkdir(parents=True, exist_ok=True)
    (output / "search_simulated.json").write_text(text + "\n")
    (output / f"search_simulated_cpu_{today:%Y%m}.md").write_text(page(found))
    for key, runs in groups.items():
        print(f"{key}")
        for one in runs:
            s = one.summary()
            print(
                f"  {one.name:48s} trials {s['trials_mean']:5.2f}/{s['trials_max']:<3.0f}"
                f" OOMs {s['ooms_mean']:5.2f}/{s['ooms_max']:<3.0f}"
                f" {s['share_of_max_mean']:6.1%} exact {s['exact']:4.0%} unsafe {s['unsafe']:.1%}"
            )
    print(f"{facts['elapsed_s']} s; absent: {', '.join(absent) or 'none'}")


if __name__ == "__main__":
    main()
