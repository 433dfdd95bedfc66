"""Starts that a search in a program costs: each trial is a run of its command.

    python benchmarks/search_programs.py            # table, JSON and a dated page
    python benchmarks/search_programs.py page results/search_programs_cpu_202611.json

Four programs of `program_cpu.py` as they were measured (peaks as lines in the size, what is held, and the
largest size that runs), and 400 drawn curves: a line; a flat part and a line (the optimizer step is the peak
of small sizes); a knee; and curves whose end is before their readings say so ("hidden": blocks that find no
gap). What is held is known in four of five. A start counts once: a size that ran long enough is not run again
for its stability check. Three searches meet the same curves: that of a command, that of a workload, and
bisection. No clock; the draws have a seed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
from batchfit._find.pure.search import Observation, Request, Search, run

MIB = 2**20
RESULTS = Path(__file__).parent / "results" / "search_programs_cpu_202611.json"
KINDS = ("line", "flat", "knee", "hidden")
WAYS: dict[str, dict[str, Any]] = {
    "of a command": {"costly_trials": True},
    "of a workload": {},
    "bisection": {"strategy": "bisect"},
}


@dataclass(frozen=True)
class Program:
    """What a program needs: the peak of a size, what is held, and the largest size that runs."""

    name: str
    peak: Callable[[int], float]
    held: Callable[[int], int] | None
    budget_bytes: int
    largest: int

    def observe(self, request: Request) -> Observation:
        """One trial of it."""
        fits = request.size <= self.largest
        return Observation(
            size=request.size,
            fits=fits,
            soak=request.soak,
            allocated_bytes=int(self.peak(request.size)) if fits else None,
            held_bytes=None if self.held is None else self.held(request.size),
        )


MEASURED = (
    Program(
        "nanogpt, 32 MiB",
        lambda size: 1_452_544 + 1_053_184 * size,
        lambda size: 1_455_104 + 66_560 * size,
        32 * MIB,
        30,
    ),
    Program(
        "starts in 20 s, 16 MiB",
        lambda size: max(10_513_000 + 16_384 * size, 7_359_488 + 212_992 * size),
        lambda size: 6_309_376 + 16_384 * size,
        16 * MIB,
        44,
    ),
    Program(
        "lit, 14 MiB",
        lambda size: max(12_280_800 + 3_640 * size, 9_841_900 + 12_629 * size),
        lambda size: 7_406_976 + 3_100 * size,
        14 * MIB,
        383,
    ),
    Program("evaluate, 24 MiB", lambda size: 243_712 + 536_576 * size, None, 24 * MIB, 43),
)


def drawn(count: int = 400, *, seed: int = 1) -> list[Program]:
    """Curves under 24 GiB; maxima log-uniform in 1 to 4096."""
    rng = random.Random(seed)
    return [_drawn(rng) for _ in range(count)]


def _drawn(rng: random.Random) -> Program:
    budget, largest = 24 * 2**30, int(4096 ** rng.random())
    held = int(budget * rng.choice([0.02, 0.1, 0.2, 0.4, 0.6]))
    kind, end = rng.choice(KINDS), largest + rng.random()
    at_zero = held + (budget - held) * rng.choice([0, 0.05, 0.2])
    slope = (budget - at_zero) / end
    low_slope, meets = slope, 0.0
    if kind == "knee":
        low_slope, meets = 0.6 * slope, 0.4 * end
    elif kind != "line":
        low_slope, meets = slope * rng.choice([0.01, 0.1, 0.3]), end * rng.choice([0.1, 0.3, 0.6, 0.8])
    low = at_zero + (slope - low_slope) * meets
    if kind == "hidden":
        largest = max(1, int(largest * rng.choice([0.85, 0.93, 0.97])))

    def peak(size: int) -> float:
        return max(low + low_slope * size, at_zero + slope * size)

    return Program(kind, peak, (lambda size: held) if rng.random() < 0.8 else None, budget, largest)


def searched(program: Program, **settings: Any) -> dict[str, Any]:
    """One search: its answer, starts, OOMs and sizes."""
    done = run(Search(budget_bytes=program.budget_bytes, **settings), program.observe).observations
    fitted = [one.size for one in done if one.fits]
    sizes = list(dict.fromkeys(one.size for one in done))
    return {
        "answer": max(fitted, default=0),
        "largest": program.largest,
        "starts": len(sizes),
        "ooms": len(set(sizes) - set(fitted)),
        "sizes": " ".join(f"{size}{'' if size in fitted else 'x'}" for size in sizes),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Means and worst of searches."""
    shares = [one["answer"] / one["largest"] for one in rows]
    return {
        "count": len(rows),
        "starts_mean": statistics.mean(one["starts"] for one in rows),
        "starts_max": max(one["starts"] for one in rows),
        "ooms_mean": statistics.mean(one["ooms"] for one in rows),
        "ooms_max": max(one["ooms"] for one in rows),
        "many_ooms": statistics.mean(one["ooms"] > 2 for one in rows),
        "share_mean": statistics.mean(shares),
        "share_min": min(shares),
    }


def measured() -> dict[str, Any]:
    """All searches."""
    programs = drawn()
    found: dict[str, Any] = {"programs": {}, "drawn": {}}
    for way, settings in WAYS.items():
        for one in MEASURED:
            found["programs"].setdefault(one.name, {})[way] = searched(one, **settings)
        rows = [(one.name, searched(one, **settings)) for one in programs]
        for kind in ("all", *KINDS):
            of_kind = [row for name, row in rows if kind in ("all", name)]
            found["drawn"].setdefault(kind, {})[way] = summary(of_kind)
    return found


def page(found: dict[str, Any]) -> str:
    """The results as text."""
    lines = [
        "# Starts that a search in a program costs",
        "",
        "Made by `python benchmarks/search_programs.py`: decisions on known curves, no clock. The search",
        "of a command (`_find/pure/by_starts.py`) counts a failure like a size that fits; that of a workload",
        "avoids failures. `x`: out of memory.",
        "",
        "## Programs as they were measured",
        "",
        "| program | search | answer | largest | starts | OOMs | sizes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ways in found["programs"].items():
        for way, one in ways.items():
            lines.append(
                f"| {name} | {way} | {one['answer']} | {one['largest']} | {one['starts']} | {one['ooms']} "
                f"| {one['sizes']} |"
            )
    lines += [
        "",
        "## Drawn curves",
        "",
        "| curves | count | search | starts, mean / max | OOMs, mean / max | over 2 OOMs | of the largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, ways in found["drawn"].items():
        for way, s in ways.items():
            lines.append(
                f"| {kind} | {s['count']:.0f} | {way} | {s['starts_mean']:.2f} / {s['starts_max']:.0f} "
                f"| {s['ooms_mean']:.2f} / {s['ooms_max']:.0f} | {s['many_ooms']:.0%} "
                f"| {s['share_mean']:.1%} / {s['share_min']:.1%} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, default=RESULTS, help="the JSON; the page goes beside it")
    pages.add_page(parser.add_subparsers(dest="command"))
    given = parser.parse_args()
    if given.command == "page":
        pages.write_page(given, page)
        return
    found = measured()
    given.to.write_text(json.dumps(found, indent=1) + "\n")
    given.to.with_suffix(".md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
