"""What each constant of the guided search is worth: all searches of the benchmarks, one changed at a time.

    python benchmarks/search_ablation.py                       # the table, printed and as a dated page
    python benchmarks/search_ablation.py --only _NEAR          # constants whose name holds that

Each constant is set to a value at which it does nothing, or to 20 % less and more where there is none. A cell
is the change of a group's mean against the search as it is: trials, OOMs (per search) and the share of the
maximum. A constant
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
from typing import Any

import search_crowded as crowded
import search_simulated as simulated
from batchfit._find.pure import bracket, by_curve, by_line, guided, memory_curve
from batchfit._find.pure.search import Search, _decide, run

RESULTS = Path(__file__).parent / "results" / "search_ablation_cpu_202611.json"
MAXIMA = simulated.MAXIMA[2::8]
MODULES = (guided, by_line, by_curve, memory_curve, bracket)
# Values at which a constant does nothing; others are changed by 20 % only.
NEUTRAL: dict[str, float] = {
    "EXACT_SOAK_SHARE": 0.0,
    "_EXACT_FIRST_SIZE": 1,
    "_WIDE_RATIO": 1e9,
    "_GROWTH_PER_ERROR": 0.0,
    "_LARGEST_LEAP_RATIO": 1e9,
    "_MOST_SIZES": 99,
    "_FLAT_RATIO": 1.0,
    "_LATE_SHORTFALL_SHARE": 0.0,
    "_FIRST_STEP_PER_RAY": 1.0,
    "_CHORD_EXPONENT": 0.0,
    "_NEAR_END_RATIO": 1.0,
    "_DOUBTED_ERROR_SHARE": 0.0,
    "_LAST_STEP_RATIO": 0.0,
    "_LAST_STEP_BUDGET_SHARE": 1.0,
    "_LARGEST_STEP_RATIO": 1e9,
    "_LARGEST_STEP_PER_RAY": 1e9,
    "_STEP_PER_RAY": 1e9,
    "_FAR_FAILURE_RATIO": 1e9,
    "_CROWDED_SHARE": 1.0,
    "_USUAL_SHARE": 0.0,
    "_CROWDED_LINE_SHARE": 1.0,
    "_FLOOR_SHARE": 1e9,
    "_HIDDEN_ERROR_FACTOR": 1.0,
    "_CLEAR_GROWTH_FACTOR": 1.0,
    "LIVE_SHARE": 1.0,
    "_SMALL_BLOCK_SHARE": 0.0,
    "_NEAR_BUDGET_SHARE": 0.0,
    "_LARGE_BLOCK_LIVE_SHARE": 1.0,
    "_SMALL_SPLIT_SHARE": 0.0,
    "_FIRST_READING_FIXED_SHARE": 0.0,
}
Figures = dict[str, tuple[float, float, float]]  # of a group: trials, OOMs, share of the maximum


def constants() -> list[tuple[str, float]]:
    """The numbers that the modules of the guided search define, with their values."""
    found = []
    for module in MODULES:
        text = Path(module.__file__ or "").read_text()
        for name, value in vars(module).items():
            if f"\n{name} = " in text and isinstance(value, int | float) and not isinstance(value, bool):
                found.append((name, value))
    return found


def set_everywhere(name: str, value: float) -> None:
    """In every module that has it, by definition or by import."""
    for module in MODULES:
        if hasattr(module, name):
            setattr(module, name, value)


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
        of_variants,
        [simulated.Variant("nothing fixed", simulated.linear(0.0), 0.0)],
        held=False,
        tolerance=0.02,
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
    for name, value in constants():
        if only not in name:
            continue
        for other in [NEUTRAL[name]] if name in NEUTRAL else [value * 0.8, value * 1.2]:
            set_everywhere(name, type(value)(other))
            try:
                moves = changed(figures(), usual)
            finally:
                set_everywhere(name, value)
            rows.append({"constant": name, "value": value, "set": other, **moves})
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
another value: trials and answers as shares, OOMs in hundredths of an OOM per search. A constant that is in no
module any more was deleted for what stands here.

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
