"""Every goal of the design beside what was measured: met, missed with its cause, or not measured.

Rules
- All goals are here, those of other cases only where they are missed; a row whose JSON is not in `results/`
  is named as missing.
- A figure comes from the JSON; a cause is words, shown only where its check is missed. A check that is missed
  and has no cause is an error: nothing falls short without a reason.
- A ratio is met or missed only where its 95 % interval says so; otherwise it is `open`.
- Nothing but the standard library at import: `summary.py` puts this table into the docs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Results = dict[str, Any]
SOAKED = "our seconds hold a stability check, which no peer makes"
VOTED = "ranks vote before they reduce, so that one rank's OOM costs a retry, not the run: nothing overlaps"
BY_ONE = (
    "one of 68, ViT-MAE in fp32, by one sample (163 for 162): with a GPU at hand the margin is 1 to 1.5 %, "
    "less than the fragmentation there"
)
CAUSES = {  # (row, check): why it was missed
    ("GPT-2 small: find", "seconds to the fastest peer"): SOAKED,
    ("ResNet-50: find", "seconds to the fastest peer"): SOAKED,
    ("T5-small: find", "seconds to the fastest peer"): SOAKED,
    ("T5-small: find, no prediction", "seconds to the fastest peer"): SOAKED,
    ("ResNet-50, 80 GiB: find, no prediction", "of the maximum"): "the search ends where about 2 % could "
    "still be gained, as far as readings show it; with a prediction the answer is the maximum",
    (
        "400 maxima, simulated",
        "exact, every curve",
    ): "curves with 3 % noise: what it leaves open must be bisected",
    ("prediction", "no OOM as a cap, calibrated"): BY_ONE,
    ("prediction", "no OOM as a cap, GPU there, not run"): BY_ONE,
    ("prediction", "seconds of a trace"): "a trace grows with the number of operations, and torch's fake "
    "tensors are most of it; these models have the most operations",
    ("microbatching", "DDP, sync=safe, one microbatch"): VOTED,
    ("microbatching", "DDP, sync=safe, many microbatches"): VOTED,
    ("loader with 4 workers", "steady throughput"): "where samples cost next to nothing to make, dealing "
    "indices shows; DataLoader against itself spreads by more",
    ("loader with 4 workers", "unplanned change"): "the first batch of the new size has to be made: of 40 ms "
    "a worker takes 11 for its samples and 21 to write them into new shared memory",
}


@dataclass(frozen=True)
class Check:
    """One figure: what was measured, the goal, and whether it is met (None: it cannot be told)."""

    name: str
    measured: str
    goal: str
    met: bool | None


@dataclass(frozen=True)
class Goal:
    """One subject; without checks it was not measured."""

    what: str
    files: tuple[str, ...]  # patterns of its JSON; the last month of each counts
    checks: Callable[..., list[Check]]
    only_missed: bool = False  # no row where nothing is


def find_checks(case_name: str, found: Results, ours: tuple[str, ...] = ()) -> list[Check]:
    import find_gpu

    case = found["cases"].get(case_name, {"find": {}})
    names = ours or find_gpu.OURS
    mine = next((name for name in names if case["find"].get(name, {}).get("answer")), None)
    if mine is None:
        return []
    return [Check(*one) for one in find_gpu.checks(case, mine)]


def missed(case_name: str, finder: str) -> Callable[[Results], list[Check]]:
    """What a case beside the main ones falls short of."""
    return lambda found: [one for one in find_checks(case_name, found, (finder,)) if one.met is False]


def search_checks(found: Results) -> list[Check]:
    groups = found["groups"]
    default = [*groups["default"], *groups["default, held known"]]
    exact = [*groups["exact"], *groups["exact, held known"]]

    def most(key: str, some: list[Results]) -> float:
        return float(max(one[key] for one in some))

    trials, ooms = most("trials_mean", default), most("ooms_mean", default)
    share = min(one["share_of_max_mean"] for one in default)
    mean, above = (
        statistics.mean(one["trials_mean"] for one in exact),
        [one["trials_mean"] for one in exact if one["trials_mean"] > 7],
    )
    worst = most("trials_max", [*default, *exact])
    return [
        Check("trials, every curve", f"at most {trials:.2f} on average", "5", trials <= 5),
        Check("OOMs, every curve", f"at most {ooms:.2f} on average", "0.3", ooms <= 0.3),
        Check("of the maximum, every curve", f"at least {share:.1%}", "98 %", share >= 0.98),
        Check("exact, mean of all curves", f"{mean:.2f} trials", "7", mean <= 7),
        Check(
            "exact, every curve",
            f"above 7 trials on {len(above)} of {len(exact)}" + (f", to {max(above):.2f}" if above else ""),
            "7",
            not above,
        ),
        Check("worst case", f"{worst:.0f} trials", "24", worst <= 24),
    ]


def size_errors(found: Results, mode: str) -> tuple[list[float], list[float]]:
    """Errors of the predicted size in all cases that have a truth; in the second, a sample apart is none."""
    errors, beyond = [], []
    for key, truth in found["truth"].items():
        one = found.get(mode, {}).get(key, {})
        if "@" in key or "sustained" not in truth or "raw" not in one:
            continue
        errors.append(abs(one["raw"] / truth["sustained"] - 1))
        beyond.append(errors[-1] if abs(one["raw"] - truth["sustained"]) > 1 else 0.0)
    return errors, beyond


def prediction_checks(found: Results, traces: Results) -> list[Check]:
    checks = []
    modes = (
        ("calibrated", "calibrated", 0.02, 0.05),
        ("gpu", "GPU there, not run", 0.02, 0.06),
        ("none", "no GPU", 0.04, 0.10),
    )
    for mode, name, middle, worst in modes:
        errors, beyond = size_errors(found, mode)
        if not errors:
            checks.append(Check(f"size, {name}", "not measured", f"{middle:.0%}, {worst:.0%}", None))
            continue
        median, most = statistics.median(errors), max(beyond)
        said = f"{median:.1%} median, {most:.1%} worst of {len(errors)} cases"
        met = median <= middle and most <= worst
        checks.append(Check(f"size, {name}", said, f"{middle:.0%}, {worst:.0%}", met))
        over = [
            key
            for key, truth in found["truth"].items()
            if found[mode].get(key, {}).get("default", 0) > truth.get("sustained", float("inf"))
        ]
        said = f"out of memory in {len(over)} of {len(errors)}" + (f" ({', '.join(over)})" if over else "")
        checks.append(Check(f"no OOM as a cap, {name}", said, "none", not over))
    seconds = {key: one["seconds"] for key, one in traces.items() if key != "about"}
    if seconds:
        slow = sorted({key.split("/")[0] for key, one in seconds.items() if one >= 3})
        said = f"{statistics.median(seconds.values()):.1f} s median, {max(seconds.values()):.1f} s worst"
        said += f"; not under 3 s: {', '.join(slow)}" if slow else ""
        checks.append(Check("seconds of a trace", said, "3 s", not slow))
    return checks


def by_interval(name: str, middle: float, low: float, high: float) -> Check:
    """At most 1 % slower, as far as the interval of the median tells."""
    met = True if high <= 1.01 else False if low > 1.01 else None
    return Check(name, f"{middle - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%})", "+1 %", met)


def overheads(found: Results) -> dict[str, list[float]]:
    """Ours over the loop by hand, pair by pair; the largest microbatches, which keep a GPU busy, first."""
    ratios = {}
    for part, one in found.items():
        if part.startswith("overhead/") and one.get("pairs_s"):
            way, _, size = part.removeprefix("overhead/").partition(", ")
            ratios[way, int(size or 8)] = [ours / hand for hand, ours in one["pairs_s"]]
    largest_first = sorted(ratios, key=lambda key: -key[1])  # stable: eager stays before compiled
    return {f"{way}, microbatches of {size}": ratios[way, size] for way, size in largest_first}


def microbatch_checks(found: Results, ranks: Results) -> list[Check]:
    import ranks_gpu
    from turns import interval

    checks = [
        by_interval(name, statistics.median(ratios), *interval(ratios))
        for name, ratios in overheads(found).items()
    ]
    for part, name in (("one", "one microbatch"), ("many", "many microbatches")):
        if part in ranks:
            told = ranks_gpu.summary(ranks[part])
            for sync in ("overlap", "safe"):
                ends = [told[sync][key] for key in ("ratio", "ratio_low", "ratio_high")]
                checks.append(by_interval(f"DDP, sync={sync}, {name}", *ends))
    return checks


def ragged_checks(found: Results) -> list[Check]:
    ours = found.get("ours/default", {})
    if "cold" not in ours:
        return []
    checks = []
    for phase in ("cold", "warm"):
        speed = ours[phase]["tokens_per_s"]
        checks.append(Check(f"tokens/s, {phase}", f"{speed / 1e3:.1f}k", "95k", speed >= 95e3))
    lost = ours["cold"]["lost_steps"] + ours["warm"]["lost_steps"]
    return [*checks, Check("lost steps", str(lost), "0", lost == 0)]


def loader_checks(found: Results) -> list[Check]:
    checks = []
    for case in found["cases"]:
        name = case["name"]
        cpu = case["steady"]["cpu_ms_a_batch"]
        steady = statistics.median(cpu["dataloader"]) / statistics.median(cpu["ours"])
        said = f"{name}: {steady:.1%} of DataLoader's by CPU time"
        checks.append(Check("steady throughput", said, "97 %", steady >= 0.97))
        stall = {way: statistics.median(one[0] for one in some) for way, some in case["changes"].items()}
        more = max(0.0, stall["planned"] - stall["no change"])
        said = f"{name}: {1e3 * more:.1f} ms more than no change"
        # A planned change is a batch like any other: what is beyond making one would be a stall.
        checks.append(Check("planned change", said, "no stall", more <= case["making_s"]))
        times = stall["re-created"] / max(stall["set, larger"], stall["set, smaller"])
        checks.append(Check("unplanned change", f"{name}: {times:.1f} x less", "10 x", times >= 10))
    return checks


def program_checks(found: Results) -> list[Check]:
    """Programs as they are, and what a probe and its starts cost."""
    ways = {name: one for name, one in found["search"]["ways"].items() if name.startswith("batchfit")}
    (_, ours), (_, bisection) = sorted(ways.items(), key=lambda way: len(way[0]))
    answers = [
        one.get("exact") or [one[way]["answer"] for way in ("by_command", "as_workload")]
        for one in found["programs"].values()
    ]
    same = sum(abs(by_command - as_workload) <= 1 for by_command, as_workload in answers)
    ratio = found["step"]["ratio"]["probe"]
    start_s = found["start"]["more_ms"]["import torch"] / 1000
    starts = f"{ours['starts']}, bisection {bisection['starts']}"
    return [
        Check("no line changed", f"{same} of {len(answers)} as their workloads", "12", same >= 12),
        Check("probe, a step", f"{ratio - 1:+.2%}", "+1 %", ratio < 1.01),
        Check("probe, its start", f"{start_s:.2f} s", "0.2 s", start_s < 0.2),
        Check(
            "starts, of one that takes 20 s to start", starts, "fewer", ours["starts"] < bisection["starts"]
        ),
    ]


FOUND = ("find_h200_*.json",)
GOALS = (
    Goal("GPT-2 small: find", FOUND, lambda found: find_checks("gpt2/24", found)),
    Goal("ResNet-50: find", FOUND, lambda found: find_checks("resnet50/24", found)),
    Goal("T5-small: find", FOUND, missed("t5_small/24", "batchfit_predict"), only_missed=True),
    Goal("T5-small: find, no prediction", FOUND, missed("t5_small/24", "batchfit"), only_missed=True),
    Goal(
        "ResNet-50, 80 GiB: find, no prediction", FOUND, missed("resnet50/80", "batchfit"), only_missed=True
    ),
    Goal("400 maxima, simulated", ("search_simulated.json",), search_checks),
    Goal("prediction", ("prediction_h200_*.json", "trace_cost_cpu_*.json"), prediction_checks),
    Goal("microbatching", ("microbatch_h200_*.json", "ranks_h200_*.json"), microbatch_checks),
    Goal("ragged lengths", ("ragged_h200_*.json",), ragged_checks),
    Goal("loader with 4 workers", ("loader_*.json",), loader_checks),
    Goal("any program", ("program_cpu_*.json",), program_checks),
)


def newest(results: Path, pattern: str) -> Path | None:
    """Of a subject that was measured several times, the last month."""
    return max(results.glob(pattern), key=lambda file: (file.stem[-6:], file.name), default=None)


def measured(results: Path) -> Iterator[tuple[Goal, list[Check]]]:
    """Each row with its checks."""
    for goal in GOALS:
        files = [newest(results, pattern) for pattern in goal.files]
        found: list[Results] = [json.loads(file.read_text()) if file is not None else {} for file in files]
        yield goal, goal.checks(*found) if files[0] is not None else []


def cause(goal: Goal, check: Check) -> str:
    if (goal.what, check.name) not in CAUSES:
        raise ValueError(f"CAUSES in goals.py must say why ({goal.what!r}, {check.name!r}) was missed")
    return CAUSES[goal.what, check.name]


def table(results: Path, *, links: str) -> str:
    """The table, in markdown, and below it what falls short; `links` leads from the page to the results."""
    lines = ["| subject | check | measured | goal | met |", "|---" * 5 + "|"]
    short = []
    for goal, checks in measured(results):
        if not checks and goal.only_missed:
            continue
        if not checks:
            lines.append(f"| {goal.what} | all | **not measured** | | |")
            continue
        for number, check in enumerate(checks):
            row = f"[{goal.what}]({links}{_page(results, goal)})" if number == 0 else ""
            met = {True: "yes", False: "**no**", None: "open"}[check.met]
            lines.append(f"| {row} | {check.name} | {check.measured} | {check.goal} | {met} |")
            if check.met is False:
                short.append(f"- {goal.what}, {check.name}: {cause(goal, check)}.")
    return "\n".join(
        [*lines, "", "What falls short, and why:", "", *(dict.fromkeys(short) or ["- nothing."])]
    )


def _page(results: Path, goal: Goal) -> str:
    kept = newest(results, goal.files[0])
    assert kept is not None
    page = newest(results, f"{kept.stem}*.md")
    return page.name if page is not None else kept.name
