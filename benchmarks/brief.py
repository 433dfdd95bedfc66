"""The five rows of the README: one number of ours and one of the best other, from the committed JSON.

Rules: a cell has at most 12 words; a number of ours and its neighbour are of the same run; "best other" is
the best of all that were run beside us, and one whose answer dies in training is not the best. A subject that
was not measured has no row. `summary.py` writes the table. Standard library only.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import goals
import hero

Results = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    what: str
    ours: str
    other: str
    pattern: str  # of the JSON; its page is linked


def find_lines(found: Results) -> Iterator[Line]:
    rows = hero.finders(found)
    ours = next((row for row in rows if row.name == "batchfit"), None)
    if ours is None:
        return
    models = len(ours.dots)
    others = [row for row in rows if row is not ours and len(row.dots) == models]
    alive = [row for row in others if not any(dot.dies for dot in row.dots)]

    def worst(row: hero.Finder) -> float:
        return min(dot.share for dot in row.dots)

    best = max(alive, key=worst, default=None)
    least = min(others, key=lambda row: row.ooms, default=None)
    pattern = "find_h200_*.json"
    yield Line(
        f"worst answer of {models} models, % of the largest that trains",
        f"{worst(ours):.0f} %",
        f"{worst(best):.0f} % ({best.name})" if best else "all die in training",
        pattern,
    )
    yield Line(
        f"OOMs in those {models} searches",
        f"{ours.ooms}",
        f"{least.ooms} ({least.name})" if least else "-",
        pattern,
    )


def prediction_lines(found: Results) -> Iterator[Line]:
    errors, beyond = goals.size_errors(found, "none")
    if errors:
        what = f"size predicted without a GPU, worst of {len(errors)} cases"
        yield Line(
            what, f"{max(beyond):.1%} off".replace("%", " %"), "none published", "prediction_h200_*.json"
        )


def microbatch_lines(found: Results) -> Iterator[Line]:
    for name, ratios in goals.overheads(found).items():
        what = f"a training step, {name}"
        ours = f"{statistics.median(ratios) - 1:+.1%} time".replace("%", " %")
        yield Line(what, ours, "0 % (a loop by hand)", "microbatch_h200_*.json")
        return


def ragged_lines(found: Results) -> Iterator[Line]:
    ways = {"by_hand": "packed by hand", "fixed_8": "microbatches of 8", "halving": "halving"}

    def speed(way: str) -> float:
        return float(found.get(f"{way}/default", {}).get("cold", {}).get("tokens_per_s", 0)) / 1e3

    if speed("ours"):
        best = max(ways, key=speed)
        other = f"{speed(best):.0f}k ({ways[best]})" if speed(best) else "-"
        yield Line(
            "tokens/s on ragged lengths, nothing tuned", f"{speed('ours'):.0f}k", other, "ragged_h200_*.json"
        )


LINES = (find_lines, prediction_lines, microbatch_lines, ragged_lines)
PATTERNS = ("find_h200_*.json", "prediction_h200_*.json", "microbatch_h200_*.json", "ragged_h200_*.json")


def table(results: Path, links: str) -> str:
    """The table, in markdown; `links` leads from the page to the results."""
    rows = ["| on an H200 | batchfit | best other |", "|---|---|---|"]
    for make, pattern in zip(LINES, PATTERNS, strict=True):
        kept = goals.newest(results, pattern)
        if kept is None:
            continue
        for line in make(json.loads(kept.read_text(encoding="utf-8"))):
            page = goals.newest(results, f"{kept.stem}*.md") or kept
            rows.append(f"| [{line.what}]({links}{page.name}) | **{line.ours}** | {line.other} |")
    return "\n".join(rows)
