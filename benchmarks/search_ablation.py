"""What each constant of the search is worth: the simulated benchmark with one of them neutral at a time.

    python benchmarks/search_ablation.py

A constant stays if its neutral value moves trials, OOMs or the share of the maximum by 1 % on one group of
`search_simulated.py`, or of the steps of small programs here; the table prints the largest move of each.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import search_simulated as simulated
from batchfit._find.pure import guided, memory_curve
from batchfit._find.pure.search import Observation, Request, Search, _decide, run

MIB = 2**20
NEUTRAL: list[tuple[object, str, float]] = [
    (guided, "_FIRST_STEP_BEYOND_RAY_RATIO", 1.0),
    (guided, "_CHORD_EXPONENT", 0.0),
    (guided, "_NEAR_END_RATIO", 1.0),
    (guided, "_ERROR_SHARE_WORTH_NO_TRIAL", 0.0),
    (guided, "_LAST_STEP_RATIO", 0.0),
    (guided, "_LAST_STEP_BUDGET_SHARE", 1.0),
    (guided, "_LARGEST_STEP_RATIO", 1e9),
    (guided, "_RAY_MARGIN_RATIO", 1e9),
    (guided, "_EXACT_FIRST_SIZE", 1),
    (guided, "_EXACT_SOAK_SHARE", 0.0),
    (guided, "_CROWDED_BUDGET_SHARE", 1.0),
    (guided, "_KNEE_EXPONENT", 0.5),
    (guided, "_EXACT_FAILURES_BEFORE_BISECTION", 99),
    (guided, "_FLAT_STEP_RATIO", 1.0),
    (memory_curve, "_EXACT_READING_SHARE", 0.0),
    (memory_curve, "_HIDDEN_ERROR_FACTOR", 1.0),
    (memory_curve, "_CLEAR_GROWTH_FACTOR", 1.0),
]
Peak = Callable[[int], int]


def block_bytes(size: float) -> int:
    """The block that the caching allocator takes: 512 bytes, from 10 MiB up often a multiple of 2 MiB."""
    rounded = math.ceil(size / 512) * 512
    segment = math.ceil(rounded / (2 * MIB)) * 2 * MIB
    return segment if rounded >= 10 * MIB and segment - rounded <= MIB else rounded


def small_program(rng: random.Random) -> tuple[Peak, int, int]:
    """An MLP's peaks by size, what it holds, and a budget of which its optimizer step takes 20 to 97 %."""
    width, depth = rng.choice([128, 256, 512, 1024, 2048]), rng.randint(1, 8)
    optimizer = rng.choice([0, 1, 2])  # inference, SGD, Adam
    weights = depth * block_bytes(4 * width * width)
    held = weights * (3 if optimizer == 2 else 1)
    flat = weights + held + (2 * block_bytes(4 * width * width) if optimizer == 2 else 0)

    def peak(size: int) -> int:
        one = block_bytes(4 * width * size)
        if not optimizer:
            return held + 3 * one
        return max(flat, held + (2 * depth + 2) * one, held + weights + 2 * one)

    return peak, held, int((flat if optimizer else held) / rng.uniform(0.2, 0.97))


def small_programs(count: int = 200) -> dict[str, float]:
    rng = random.Random(26)
    trials = ooms = 0
    share, done = 0.0, 0
    while done < count:
        peak, held, budget = small_program(rng)
        if peak(1) > budget:
            continue
        low, high = 1, 2
        while peak(high) <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if peak(middle) <= budget else (low, middle)

        def trial(request: Request, peak: Peak = peak, held: int = held, budget: int = budget) -> Observation:
            need = peak(request.size)
            return Observation(
                size=request.size,
                fits=need <= budget,
                soak=request.soak,
                allocated_bytes=min(need, budget),
                held_bytes=held,
            )

        search = run(Search(budget_bytes=budget), trial)
        done += 1
        trials += len(search.observations)
        ooms += sum(not one.fits for one in search.observations)
        share += (search.best or 0) / low
    return {"trials": trials / count, "ooms": ooms / count, "share": share / count}


def measured() -> dict[str, dict[str, float]]:
    """Means of each group: the simulated variants, the others, and small programs."""
    _decide.cache_clear()
    maxima = simulated.MAXIMA[::4]
    groups = {
        f"{name}, held {'known' if held else 'unknown'}": [
            simulated.ours(one.name, one, held=held, maxima=maxima, tolerance=tolerance).summary()
            for one in variants
        ]
        for name, variants, tolerance in (
            ("default", simulated.VARIANTS, 0.02),
            ("exact", simulated.VARIANTS, 0.0),
            ("others", simulated.OTHERS, 0.02),
        )
        for held in (False, True)
    }
    names = {"trials": "trials_mean", "ooms": "ooms_mean", "share": "share_of_max_mean"}
    found = {
        key: {short: sum(one[name] for one in rows) / len(rows) for short, name in names.items()}
        for key, rows in groups.items()
    }
    return {**found, "small programs": small_programs()}


def main() -> None:
    usual = measured()
    for key, one in usual.items():
        print(f"{key:24s} trials {one['trials']:.3f} OOMs {one['ooms']:.3f} share {one['share']:.4f}")
    print("\n| constant | value | neutral | trials, largest move | OOMs | share of the maximum |")
    print("|---|---|---|---|---|---|")
    for module, name, neutral in NEUTRAL:
        value = getattr(module, name)
        setattr(module, name, neutral)
        try:
            now = measured()
        finally:
            setattr(module, name, value)
        cells = []
        for what in ("trials", "ooms", "share"):
            key = max(usual, key=lambda key: abs(now[key][what] / usual[key][what] - 1))
            cells.append(f"{now[key][what] / usual[key][what] - 1:+.1%} ({key})")
        print(f"| `{name}` | {value:g} | {neutral:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
