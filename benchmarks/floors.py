"""Where our own time goes and how cost grows, for the docs: words around figures that are in the JSON.

Rules: a figure comes from `own_cost`, `cost_cpu`, `import_time` or `growth`, the last month of each; without
its JSON a part has no lines. What was made smaller, and when, is history, and stands in the docs by hand.
Nothing but the standard library at import: `summary.py` puts these lines into the docs.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import goals

Results = dict[str, Any]
MICROBATCHES = 8  # of a step in own_cost and cost_cpu
FAKE = "torch's fake tensors"


def kept(results: Path, subject: str) -> Results:
    file = goals.newest(results, f"{subject}_[0-9]*.json")
    return json.loads(file.read_text()) if file is not None else {}


def own_time(results: Path) -> list[str]:
    """The table of floors: what a thing costs at least, and what is ours."""
    sampled, cost = kept(results, "own_cost_cpu"), kept(results, "cost_cpu")
    starts = kept(results, "import_time_cpu")
    if not (sampled and cost and starts):
        return []

    def share(work: str, *whose: str) -> str:
        return f"{sum(sampled[work]['shares'].get(one, 0.0) for one in whose):.0%}"

    find, trace = "a find, small GPT in virtual memory", "a trace of two steps, small GPT"
    small, tiny = (f"a step of {MICROBATCHES} microbatches, {name}" for name in ("small GPT", "tiny MLP"))
    epoch = "an epoch with a resize every ten batches, no workers"
    steps = cost["microbatch"]["cpu_ms"]
    each = {name: steps[f"step, {name}, by hand"] / MICROBATCHES for name in ("small", "tiny")}
    more = (steps["step, tiny, ours"] - steps["step, tiny, by hand"]) / MICROBATCHES
    ms, ratios = starts["cpu_ms"], starts["ratios"]
    bare = 1 / ratios["import batchfit / bare interpreter"]
    ours = ms["import batchfit"] - ms["bare interpreter"]
    planned = cost["loader"]["ratios"]["ResizableLoader, planned changes / one size"]
    rows = [
        (
            "a find",
            "its trials near the maximum and its stability check: the program's own steps are "
            f"{share(find, 'the program')} of a find of a small GPT in virtual memory",
            f"two full garbage collections ({share(find, 'batchfit/_torch/here.py')}: before memory is "
            "counted, and after the first trial; all others look at new objects only), counting live tensors "
            f"({share(find, 'batchfit/_torch/ledger.py')}), virtual memory itself",
        ),
        (
            f"a step of {MICROBATCHES} microbatches",
            f"the loop by hand: {share(small, 'the program')} where a microbatch takes "
            f"{each['small']:.0f} ms, {share(tiny, 'the program')} where it takes {each['tiny']:.1f} ms",
            f"{more:.1f} ms per microbatch on this CPU: cutting, weighing, what undoes it, random states",
        ),
        (
            "a trace",
            f"torch's fake tensors and the program's Python: {share(trace, FAKE, 'the program')}",
            "writing down what each operation allocates, and on which line",
        ),
        (
            "an epoch with a resize every ten batches, no workers",
            f"DataLoader: {share(epoch, 'the program')}",
            f"dealing indices; an epoch with planned changes takes {planned:.2f} times one of a single size",
        ),
        (
            "`import batchfit`",
            f"a bare interpreter: {bare:.0%}",
            f"{ours:.0f} ms; torch, pydantic and even `typing` come later",
        ),
        (
            "`batchfit --help`",
            f"typer with rich: {1 / ratios['batchfit --help / typer with rich']:.0%}",
            f"building the commands; {ratios['batchfit --help / bare interpreter']:.0f} times a bare "
            "interpreter in all",
        ),
    ]
    return [
        "| what | its floor | what is ours |",
        "|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def growth(results: Path) -> list[str]:
    """How trials, traces and votes grow, in a sentence each."""
    found = kept(results, "growth_cpu")
    if not found:
        return []
    bins = {int(low): row for low, row in found["search"].items() if 2 <= int(low) < 4096}

    def ends(way: str) -> str:
        trials = [row[way][0] for row in bins.values()]
        return f"{min(trials):.0f} to {max(trials):.0f}"

    peers = [way for way in next(iter(bins.values())) if not way.startswith("batchfit")]
    beside = "; ".join(f"{way.removesuffix(' [port]')} {ends(way)}" for way in peers)
    a_thousand = [1e3 * one["cpu_s"] / one["events"] for one in found["trace"].values()]
    models = sorted(found["trace"], key=lambda name: found["trace"][name]["parameters"])
    votes = found["votes"]
    most = max(votes, key=int)
    return [
        f"- A search takes {ends('batchfit, default')} trials on average for maxima from 2 to 4095; "
        f"{beside}.",
        "- A trace grows with the number of operations, thus with layers, not with parameters: "
        f"{statistics.median(a_thousand):.1f} s per thousand events, from {models[0]} to {models[-1]}.",
        f"- A vote of {most} ranks takes {1e3 * votes[most]['vote']:.1f} ms, a gloo all-reduce of one number "
        f"{1e3 * votes[most]['all-reduce']:.1f} ms; with more ranks than cores both wait for a core.",
    ]
