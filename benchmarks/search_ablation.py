"""What each constant of the guided search is worth: the searches of the benchmarks with one changed at a time.

    python benchmarks/search_ablation.py                       # the table, printed and as a dated page
    python benchmarks/search_ablation.py --only _NEAR          # constants whose name holds that

Each constant is set to a neutral value where it has one, and to 20 % less and more. A cell is the change of a
group's mean against the search as it is: trials, OOMs (per search) and the share of the maximum. A constant
that moves none by 1 % in any group has no evidence and should go.

Groups: the simulated curves (`search_simulated.py`) default and exact, the same with noise, curves that no
constant was chosen on, crowded lines and knees (`search_crowded.py`), and curves recorded on an H200.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import search_crowded as crowded
import search_simulated as simulated
from batchfit._find.pure import guided, line, memory_curve, on_line
from batchfit._find.pure.search import Search, _decide, run

RESULTS = Path(__file__).parent / "results" / "search_ablation_cpu_202611.json"
MAXIMA = simulated.MAXIMA[2::8]
# (module, constant, neutral value or None, what it is set to besides)
NEUTRAL: dict[str, float] = {
    "_BOLD": 1.0,
    "_FAR": 1e9,
    "_REACH": 0.0,
    "_REACH_EXACT": 0.0,
    "_NEAR": 1.0,
    "_DOUBT": 0.0,
    "_FEW": 0.0,
    "_LARGEST_LEAP": 1e9,
    "_LEAP": 1e9,
    "_BEYOND_RAY": 1e9,
    "_EXACT_START": 1,
    "_EXACT_END": 0.0,
    "_CROWDED": 1.0,
    "_USUAL": 0.0,
    "_FULL": 1.0,
    "_ON_LINE": 0.0,
    "_ROUNDING_BYTES": 0,
    "_MUCH_FIXED": 1.0,
    "_MOST_OF_IT": 1e9,
    "_UNSEEN": 1.0,
    "_CLEAR": 1.0,
    "LIVE_SHARE": 1.0,
    "_FINE_SHARE": 0.0,
    "_NEAR_END": 0.0,
    "_COARSE_SHARE": 1.0,
    "_SMALL_SPLIT_SHARE": 0.0,
    "_FIXED_SHARE": 0.0,
    "_BLOCKS": 1,
    "_WIDE_RATIO": 1e9,
    "_GROWTH_PER_ERROR": 0.0,
    "_LARGEST_LEAP_RATIO": 1e9,
    "_MOST_SIZES": 99,
    "_FLAT_RATIO": 1.0,
    "_WORTH_RATIO": 1.0,
    "_LATE_TOLERANCE": 0.0,
}
Figures = dict[str, tuple[float, float, float]]  # of a group: trials, OOMs, share of the maximum


def constants() -> list[tuple[ModuleType, str, float]]:
    """The numbers that the modules of the guided search define, with their values."""
    found = []
    for module in (guided, line, memory_curve, on_line):
        for name, value in vars(module).items():
            written = f"\n{name} = " in Path(module.__file__ or "").read_text()
            if written and isinstance(value, int | float) and not isinstance(value, bool):
                found.append((module, name, value))
    return found


def recorded() -> Iterable[tuple[int, int, int]]:
    """Searches on curves that were read on an H200: trials, OOMs, answer in thousandths of the end."""
    import golden

    for _, budget, capacity, ran in golden.recorded_curves():
        for share in (1.0, 0.97, 0.9, 0.7):
            end = int(capacity * share)
            done = run(Search(budget_bytes=budget), functools.partial(golden.on_curve, ran, end))
            failed = sum(not one.fits for one in done.observations)
            yield len(done.observations), failed, 1000 * (done.best or 0) // end


def mean(rows: Iterable[tuple[float, float, float]]) -> tuple[float, float, float]:
    columns = list(zip(*rows, strict=True))
    return (
        sum(columns[0]) / len(columns[0]),
        sum(columns[1]) / len(columns[0]),
        sum(columns[2]) / len(columns[0]),
    )


def of_variants(variants: Iterable[Any], *, held: bool, tolerance: float) -> tuple[float, float, float]:
    rows = [
        simulated.ours(one.name, one, held=held, maxima=MAXIMA, tolerance=tolerance).summary()
        for one in variants
    ]
    return mean((one["trials_mean"], one["ooms_mean"], one["share_of_max_mean"]) for one in rows)


def of_crowded(kinds: Iterable[str], tolerance: float = 0.02) -> tuple[float, float, float]:
    found = crowded.lines(kinds, tolerance=tolerance)
    return mean((one.trials, one.ooms, one.answer / one.maximum) for one in found)


GROUPS: dict[str, Callable[[], tuple[float, float, float]]] = {
    **{
        f"{how}, held {'known' if held else 'unknown'}": functools.partial(
            of_variants, variants, held=held, tolerance=tolerance
        )
        for how, variants, tolerance in (
            ("default", simulated.VARIANTS[::2], 0.02),
            ("default, noise", simulated.VARIANTS[1::2], 0.02),
            ("exact", simulated.VARIANTS[::2], 0.0),
            ("exact, noise", simulated.VARIANTS[1::2], 0.0),
            ("other curves", simulated.OTHERS, 0.02),
        )
        for held in (False, True)
    },
    "nothing fixed": functools.partial(
        of_variants, [simulated.Variant("nothing fixed", simulated.linear(0.0), 0.0)], held=False, tolerance=0.02
    ),
    "crowded lines": functools.partial(of_crowded, crowded.LINES),
    "crowded lines, exact": functools.partial(of_crowded, crowded.LINES, 0.0),
    "crowded knees": functools.partial(of_crowded, crowded.OTHERS),
    "recorded on an H200": lambda: mean((a, b, c / 1000) for a, b, c in recorded()),
}


def figures() -> Figures:
    _decide.cache_clear()
    return {name: measure() for name, measure in GROUPS.items()}


def changed(now: Figures, usual: Figures) -> dict[str, tuple[float, str]]:
    """The largest move of trials, OOMs and answers, with the group."""
    moves = {}
    for index, what in enumerate(("trials", "OOMs", "answers")):
        # OOMs are counted per search: a share of nearly none says nothing.
        by = {
            name: (now[name][index] - one[index]) / (1.0 if what == "OOMs" else one[index])
            for name, one in usual.items()
        }
        group = max(by, key=lambda name: abs(by[name]))
        moves[what] = (round(by[group], 4), group)
    return moves


def ablated(only: str) -> dict[str, Any]:
    usual = figures()
    rows = []
    for module, name, value in constants():
        if only not in name:
            continue
        values = [value * 0.8, value * 1.2]
        if name in NEUTRAL:
            values.insert(0, NEUTRAL[name])
        for other in values:
            setattr(module, name, type(value)(other))
            try:
                moves = changed(figures(), usual)
            finally:
                setattr(module, name, value)
            rows.append(
                {
                    "constant": f"{module.__name__.rpartition('.')[2]}.{name}",
                    "value": value,
                    "set": other,
                    **moves,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"usual": usual, "rows": rows}


def page(facts: dict[str, Any]) -> str:
    """The dated page: every figure comes from the JSON."""
    usual = "\n".join(
        f"| {name} | {one[0]:.3f} | {one[1]:.3f} | {one[2]:.2%} |" for name, one in facts["usual"].items()
    )
    rows = "\n".join(
        f"| `{one['constant']}` | {one['value']:g} | {one['set']:g} | "
        + " | ".join(f"{one[what][0]:+.1%} ({one[what][1]})" for what in ("trials", "OOMs", "answers"))
        + " |"
        for one in facts["rows"]
    )
    return f"""# What the constants of the guided search are worth

`python benchmarks/search_ablation.py`. The largest move of any group's mean when one constant is set to
another value: trials and answers as shares, OOMs in hundredths of an OOM per search.

| group | trials | OOMs | of the maximum |
|---|---|---|---|
{usual}

| constant | value | set to | trials | OOMs | answers |
|---|---|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="constants whose name holds this; nothing is written")
    given = parser.parse_args()
    facts = ablated(given.only)
    if not given.only:
        RESULTS.write_text(json.dumps(facts, indent=0) + "\n")
        RESULTS.with_suffix(".md").write_text(page(facts))


if __name__ == "__main__":
    main()
