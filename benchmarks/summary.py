"""The tables that answer "why should I use this?", in README (`brief.py`) and docs: of committed JSON.

    python benchmarks/summary.py write     # into README.md and pages of docs/project, between comments
    python benchmarks/summary.py check     # exit code 1 where they say something else than the JSON
    python benchmarks/summary.py show

Rules: at most five rows; no figure of ours that is not in `results/`; of a subject that was measured several
times the last month counts; one that was not measured has no row. Peers are those of the same run. Nothing
but the standard library: a test reads this without torch.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brief
import floors
import goals
import plots
from turns import interval

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- made by benchmarks/summary.py -->", "<!-- end of the summary -->"
PAGES = {  # what else stands in the docs: on which page
    "the plots": "benchmarks.md",
    "the goals": "goals.md",
    "own time": "own-time.md",
    "growth": "own-time.md",
}
PARTS = {  # its comments
    name: (f"<!-- {name}, made by benchmarks/summary.py -->", f"<!-- end of {name} -->") for name in PAGES
}
Results = dict[str, Any]
PEERS = {  # finders as readers know them
    "bisection": "bisection",
    "accelerate": "Accelerate",
    "accelerate_4096": "Accelerate from 4096",
    "lightning_power": "Lightning power",
    "lightning_binsearch": "Lightning binsearch",
    "toma": "toma",
    "torch_max_mem": "torch-max-mem",
    "batch_finder": "batch-finder",
}


@dataclass(frozen=True)
class Row:
    """One subject: what was measured, us, the others, what we want to reach."""

    what: str
    ours: str
    others: str
    goal: str
    page: str = ""  # the file with all figures, in `results/`


def find_row(found: Results) -> Row | None:
    import find_gpu

    case = found["cases"].get(f"gpt2/{find_gpu.CAP}")
    if case is None:
        return None
    answered = {name: one for name, one in case["find"].items() if one.get("answer")}
    mine = next((name for name in find_gpu.OURS if name in answered), None)
    if mine is None:
        return None
    best = find_gpu.sustained(case)

    def said(one: Results) -> str:
        lived, _ = find_gpu.lasts(case, one["answer"])
        died = ", and dies later" if lived is False else ""
        return f"{one['answer']}{died} ({one['ooms']} OOMs, {one['seconds']:.1f} s)"

    peers = [f"{PEERS[name]} {said(answered[name])}" for name in PEERS if name in answered]
    # One that could not be run here has said nothing.
    ran = [name for name in PEERS if "error" not in case["find"].get(name, {"error": ""})]
    peers += [f"{PEERS[name]} finds none" for name in ran if name not in answered]
    of = f" of {best} that last" if best else ""
    tried = len(set(answered[mine]["sizes"]))
    ours = f"**{answered[mine]['answer']}**{of}, {answered[mine]['ooms']} OOMs, {tried} sizes tried"
    return Row(
        f"largest batch of GPT-2 small, 512 tokens, {find_gpu.CAP} GiB of {_card(found)}",
        f"{ours}, {answered[mine]['seconds']:.1f} s with its stability check{_of_steps(answered[mine])}",
        "; ".join(peers),
        "98 % of what lasts, 0 OOMs, 4 sizes, as fast as the fastest peer within 5 %",
    )


def _of_steps(one: Results) -> str:
    """` of 10 steps`: the longest trial, where trials were kept."""
    steps = max((trial["steps_run"] for trial in one.get("trials", ()) if trial["soak"]), default=None)
    return "" if steps is None else f" of {steps} steps"


def prediction_row(found: Results) -> Row | None:
    """Errors of the size in all cases that have a truth; a sample apart does not count in the worst."""
    told = []
    for mode, name in (("none", "no GPU"), ("gpu", "GPU there, not run"), ("calibrated", "calibrated")):
        errors, beyond = goals.size_errors(found, mode)
        if errors:
            shares = f"{statistics.median(errors):.1%}, {max(beyond):.1%}"
            told.append(f"{name} {shares} ({len(errors)} cases)")
    if not told:
        return None
    return Row(
        "error of the predicted size: median, worst beyond one sample; on an H200",
        "; ".join(told),
        "xMem publishes 3.6 % of the memory (median); nobody an error of the size",
        "no GPU 4 %, 10 %; GPU there, not run 2 %, 6 %; calibrated 2 %, 5 %",
    )


def microbatch_row(found: Results) -> Row | None:
    told = []
    for name, ratios in goals.overheads(found).items():
        low, high = interval(ratios)
        middle = statistics.median(ratios)
        told.append(f"{name}: {middle - 1:+.1%} (95 % interval {low - 1:+.1%} to {high - 1:+.1%})")
    if not told:
        return None
    return Row(
        f"a training step in microbatches, GPT-2 small on {_card(found)}",
        "; ".join(told),
        "a loop by hand: 0 %, and it dies when a batch does not fit",
        "at most 1 % slower than the loop by hand",
    )


def ragged_row(found: Results) -> Row | None:
    names = {"fixed_8": "fixed microbatch of 8", "halving": "halving", "by_hand": "packed by hand"}

    def measured(way: str, flags: str) -> str | None:
        one = found.get(f"{way}/{flags}", {})
        if "cold" not in one:
            return None
        lost = one["cold"]["lost_steps"] + one["warm"]["lost_steps"]
        speed = [f"{one[phase]['tokens_per_s'] / 1e3:.0f}k" for phase in ("cold", "warm")]
        return f"{speed[0]} cold, {speed[1]} warm" + (f", {lost} steps lost" if lost else "")

    def said(way: str) -> str:
        """As it is, and with the switch that helps whoever knows of it."""
        switched = measured(way, "no_cudnn_attention")
        return f"{measured(way, 'default')}" + (f" (cuDNN's attention off: {switched})" if switched else "")

    if measured("ours", "default") is None:
        return None
    peers = [f"{name} {said(way)}" for way, name in names.items() if measured(way, "default")]
    return Row(
        f"tokens/s on ragged lengths (32 to 1024), GPT-2 small on {_card(found)}",
        f"**{measured('ours', 'default')}**" + said("ours").removeprefix(str(measured("ours", "default"))),
        "; ".join(peers) or "not measured",
        "95k with nothing to tune",
    )


def search_row(found: Results) -> Row | None:
    groups = found["groups"]

    def said(*some: Results) -> str:
        """Means over these runs."""
        keys = ("trials_mean", "ooms_mean", "share_of_max_mean", "unsafe")
        trials, ooms, share, unsafe = (statistics.mean(one[key] for one in some) for key in keys)
        too_large = f", {unsafe:.0%} of the answers too large" if unsafe else ""
        return f"{trials:.1f} trials, {ooms:.1f} OOMs, {share:.1%} of the maximum{too_large}"

    wanted = {
        r"Accelerate .*start 128": "Accelerate from 128",
        r"Accelerate .*start 8192": "Accelerate from 8192",
        r"Lightning .*binsearch": "Lightning binsearch (port)",
        r"batch-finder": "batch-finder",
        r"NeMo": "NeMo (port)",
    }
    peers = [
        f"{label} {said(one)}"
        for pattern, label in wanted.items()
        for one in groups["beside"]
        if re.match(pattern, one["name"])
    ]
    exact = statistics.mean(one["trials_mean"] for one in groups["exact"])
    return Row(
        f"search over {len(found['maxima'])} simulated maxima x {len(groups['default'])} memory curves",
        f"**{said(*groups['default'])}**; exact in {exact:.1f} trials",
        "; ".join(peers),
        "5 trials, 0.3 OOMs, 98 %; exact in 7 trials",
    )


ROWS: tuple[tuple[str, Callable[[Results], Row | None]], ...] = (
    ("find_h200_*.json", find_row),
    ("prediction_h200_*.json", prediction_row),
    ("microbatch_h200_*.json", microbatch_row),
    ("ragged_h200_*.json", ragged_row),
    ("search_simulated.json", search_row),
)


def _card(found: Results) -> str:
    about = found.get("about", {})
    card = str(about.get("device") or about.get("gpu") or "a GPU")
    return "an H200" if "H200" in card else card


def rows(results: Path) -> Iterator[Row]:
    for pattern, make in ROWS:
        kept = goals.newest(results, pattern)
        row = make(json.loads(kept.read_text())) if kept is not None else None
        if kept is not None and row is not None:
            page = goals.newest(results, f"{kept.stem}*.md") or kept
            yield Row(row.what, row.ours, row.others, row.goal, page.name)


def table(results: Path, *, links: str) -> str:
    """The table of the docs, in markdown; `links` leads from the page to the results."""
    lines = ["|  | batchfit | others | goal |", "|---|---|---|---|"]
    lines += [
        f"| [{row.what}]({links}{row.page}) | {row.ours} | {row.others} | {row.goal} |"
        for row in rows(results)
    ]
    return "\n".join(lines)


def inserted(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the text between its two comments."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"a page must hold {begin} and {end} once, in this order")
    return page[: page.index(begin)] + f"{begin}\n{text}\n" + page[page.index(end) :]


def pages(root: Path) -> dict[Path, str]:
    """The pages as they should be."""
    results = root / "benchmarks" / "results"
    readme, docs = root / "README.md", root / "docs" / "project"
    links = "../../benchmarks/results/"
    found = {docs / name: (docs / name).read_text(encoding="utf-8") for name in set(PAGES.values())}
    first = docs / "benchmarks.md"
    found[first] = inserted(found[first], table(results, links=links))
    pictures = [
        f'<img src="{links}{plot.file(results).name}" width="900" alt="{plot.shows}">'
        for plot, _, _ in plots.wanted(results)
    ]
    parts = {
        "the goals": [goals.table(results, links=links)],
        "the plots": ["\n\n".join(pictures)],
        "own time": floors.own_time(results),
        "growth": floors.growth(results),
    }
    for name, lines in parts.items():
        page = docs / PAGES[name]
        found[page] = inserted(found[page], "\n".join(lines), *PARTS[name])
    short = brief.table(results, links="benchmarks/results/")
    return {readme: inserted(readme.read_text(encoding="utf-8"), short), **dict(sorted(found.items()))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("write", "check", "show"))
    parser.add_argument("--root", type=Path, default=ROOT)
    given = parser.parse_args()
    if given.command == "show":
        print(table(given.root / "benchmarks" / "results", links="benchmarks/results/"))
        return
    wrong = []
    if stale := plots.stale(given.root / "benchmarks" / "results"):
        print(f"{', '.join(stale)}: not of the newest JSON. Run: python benchmarks/plots.py write")
    for page, text in pages(given.root).items():
        if given.command == "write":
            page.write_text(text, encoding="utf-8")
        elif page.read_text(encoding="utf-8") != text:
            wrong.append(page.name)
    if wrong:
        print(f"{' and '.join(wrong)}: not what the JSON says. Run: python benchmarks/summary.py write")
    if wrong or (stale and given.command == "check"):
        sys.exit(1)


if __name__ == "__main__":
    main()
