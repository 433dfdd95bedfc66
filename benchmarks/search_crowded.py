"""The measured search where weights fill 40 to 80 % of the budget.

    python benchmarks/search_crowded.py                # lines and real steps; JSON and a dated page
    python benchmarks/search_crowded.py --lines        # simulated lines only, in seconds; nothing is written
    python benchmarks/search_crowded.py page results/search_crowded_cpu_202611.json

Sets:
- Lines: `fixed + each * size` under budgets of 64 MiB to 24 GiB, as they are, or rounded up to 2 MiB: the
  whole reading, or the block that grows (as the caching allocator does from 10 MiB up). Held bytes are
  unknown, all of what is fixed, or half of it. Row 15 of issue 26 is about these: at most 6 sizes, one OOM,
  and one stability check more than needed.
- Not lines: six blocks that are rounded each by itself, and a peak that is flat until the optimizer step is
  no longer the largest. They are shown beside the lines, and nothing is promised for them.
- Real steps under `virtual_memory`. The true maximum is found by bisection from the answer.

No random numbers and no clock: every run gives the same figures. A real step that is in the JSON already is
not run again, unless the search does something else on the simulated lines since.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pages
from batchfit._find.pure.search import Observation, Request, Search, run

MIB = 2**20
BUDGETS = {"64 MiB": 64 * MIB, "512 MiB": 512 * MIB, "24 GiB": 24 * 1024 * MIB}
SHARES = (0.4, 0.5, 0.6, 0.7, 0.8)
CAPACITIES = (20, 100, 500, 3000)
HELD = {"unknown": None, "known": 1.0, "half": 0.5}
RESULTS = Path(__file__).parent / "results" / "search_crowded_cpu_202611.json"

Peak = Callable[[int], int]  # size -> bytes


@dataclass(frozen=True)
class Outcome:
    """One search: how many sizes and trials it took, what failed, and the answer beside the maximum."""

    case: str
    sizes: int
    trials: int
    ooms: int
    soaks: int
    failed_soaks: int
    answer: int
    maximum: int
    path: str

    @property
    def on_line_promise(self) -> bool:
        """What row 15 of issue 26 asks for."""
        return self.sizes <= 6 and self.ooms <= 1 and self.soaks <= 2


def outcome(case: str, tried: Sequence[Any], answer: int, maximum: int) -> Outcome:
    """From trials or observations: both have a size, whether it fits and whether it was a stability check."""
    return Outcome(
        case=case,
        sizes=len({one.size for one in tried}),
        trials=len(tried),
        ooms=sum(not one.fits for one in tried),
        soaks=sum(one.soak for one in tried),
        failed_soaks=sum(one.soak and not one.fits for one in tried),
        answer=answer,
        maximum=maximum,
        path=" ".join(f"{one.size}{'s' if one.soak else ''}{'' if one.fits else 'x'}" for one in tried),
    )


# --- simulated ----------------------------------------------------------------------------------------


def rounded(size: int) -> int:
    """Up to the next 2 MiB."""
    return -(-size // (2 * MIB)) * 2 * MIB


def block_bytes(size: int) -> int:
    """The block that the caching allocator takes: 512 bytes, from 10 MiB up often a multiple of 2 MiB."""
    block = -(-size // 512) * 512
    return rounded(block) if block >= 10 * MIB and rounded(block) - block <= MIB else block


def peak_of(kind: str, fixed: int, budget: int, capacity: int) -> Peak:
    """The peak of a step by its size: before it is rounded, `capacity` is the largest that fits."""
    each = (budget - fixed) / (capacity + 0.5)
    if kind == "exact":
        return lambda size: int(fixed + each * size)
    if kind == "reading rounded":
        return lambda size: rounded(int(fixed + each * size))
    if kind == "block rounded":
        return lambda size: fixed + block_bytes(int(each * size))
    if kind == "six blocks":
        return lambda size: fixed + 6 * block_bytes(int(each * size / 6))
    if kind == "flat, then a line":  # a quarter of what is fixed is needed in the optimizer step only
        low = 0.75 * fixed
        return lambda size: max(fixed, int(low + (budget - low) / (capacity + 0.5) * size))
    if kind == "slow, then thrice":  # an MLP: the backward pass, with a third of its weights' bytes on top
        low = 0.65 * fixed
        each = (budget - low) / (capacity + 0.5)
        return lambda size: int(max(fixed + each / 3 * size, low + each * size))
    raise ValueError(f"kind must be one of {', '.join(LINES + OTHERS)}, not {kind!r}")


LINES = ("exact", "reading rounded", "block rounded")
OTHERS = ("six blocks", "flat, then a line", "slow, then thrice")
# Of what the smallest size needs, what stays between steps; all of it where nothing is said.
KEPT = {"flat, then a line": 0.6, "slow, then thrice": 0.4}


def largest_fitting(peak: Peak, budget: int) -> int:
    """The largest size whose peak is within the budget."""
    low, high = 0, 1
    while peak(high) <= budget:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if peak(middle) <= budget else (low, middle)
    return low


def searched(case: str, peak: Peak, budget: int, *, held: int | None, tolerance: float) -> Outcome:
    """A search of a step whose trials read `peak`."""

    def trial(request: Request) -> Observation:
        fits = peak(request.size) <= budget
        read = peak(request.size) if fits else None
        return Observation(
            size=request.size, fits=fits, soak=request.soak, allocated_bytes=read, held_bytes=held
        )

    done = run(Search(budget_bytes=budget, tolerance=tolerance), trial)
    return outcome(case, done.observations, done.best or 0, largest_fitting(peak, budget))


def lines(kinds: Iterable[str], *, tolerance: float = 0.02) -> Iterator[Outcome]:
    """Every kind under every budget, share, capacity and knowledge of what is held."""
    for kind in kinds:
        for name, budget in BUDGETS.items():
            for share in SHARES:
                for capacity in CAPACITIES:
                    fixed = int(share * budget)
                    peak = peak_of(kind, fixed, budget, capacity)
                    if peak(1) > budget:
                        continue
                    for knows, part in HELD.items():
                        held = None if part is None else int(part * KEPT.get(kind, 1.0) * fixed)
                        case = f"{kind}/{name}/{share:.0%}/{capacity}/held {knows}"
                        yield searched(case, peak, budget, held=held, tolerance=tolerance)


# --- real steps ---------------------------------------------------------------------------------------


def mlp(optimizer: str, width: int, depth: int) -> tuple[Callable[[], Any], int]:
    """A workload of an MLP, and the bytes of its weights, gradients and optimizer state."""
    import torch
    from torch import nn

    import batchfit

    def make() -> Any:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.ReLU()]
        model = nn.Sequential(*layers)
        data = torch.randn(1, width)
        if optimizer == "inference":
            return batchfit.inference(model, data)
        if optimizer == "frozen":
            for layer in layers[:-2]:
                layer.requires_grad_(False)
        trained = [one for one in model.parameters() if one.requires_grad]
        made = torch.optim.Adam(trained) if optimizer == "Adam" else torch.optim.SGD(trained, lr=0.1)
        return batchfit.training(model, made, lambda m, x: m(x).square().mean(), data)

    times = {"inference": 1, "frozen": 1, "SGD": 2, "Adam": 4}[optimizer]
    return make, 4 * (width + 1) * width * depth * times


def plain(fixed: int, *, kept: bool) -> Callable[[], Any]:
    """A step of one tensor a batch, beside weights that it loads each time or that stay."""
    import torch

    import batchfit

    def make() -> Any:
        held = torch.empty(fixed if kept else 1, dtype=torch.uint8)

        def step(batch_size: int) -> None:
            weights = held if kept else torch.empty(fixed, dtype=torch.uint8)
            activations = torch.empty(batch_size, 40_000, dtype=torch.uint8)
            del weights, activations

        return batchfit.Workload(step, state=[held])

    return make


def steps() -> Iterator[tuple[str, Callable[[], Any], int]]:
    """(name, how to make the workload, budget)."""
    for share in SHARES:
        for budget in (32 * MIB, 64 * MIB, 512 * MIB):
            for kept in (False, True):
                name = f"plain, weights {'kept' if kept else 'loaded'}/{budget // MIB} MiB/{share:.0%}"
                yield name, plain(int(share * budget), kept=kept), budget
        for optimizer in ("inference", "frozen", "SGD", "Adam"):
            for width, depth in ((256, 4), (512, 4)):
                make, fixed = mlp(optimizer, width, depth)
                budget = int(fixed / share)
                yield f"MLP {width}x{depth}, {optimizer}/{budget / MIB:.0f} MiB/{share:.0%}", make, budget


def found(name: str, make: Callable[[], Any], budget: int, maximum: int | None) -> Outcome | None:
    """A real search, and then the maximum by bisection unless it is known; None where not even 1 fits."""
    import batchfit

    try:
        fit = batchfit.find_batch_size(make(), device="cpu", budget=budget)
    except batchfit.errors.NothingFitsError:
        return None
    if maximum is None:
        truth = batchfit.find_batch_size(
            make(), device="cpu", budget=budget, strategy="bisect", start=fit.batch_size, soak_steps=0
        )
        maximum = truth.batch_size
    return outcome(name, fit.trials, fit.batch_size, maximum)


def digest() -> str:
    """Of what the search does on every simulated line: another search has another one."""
    kinds = (*LINES, *OTHERS)
    paths = [one.path for tolerance in (0.02, 0.0) for one in lines(kinds, tolerance=tolerance)]
    return hashlib.sha256(json.dumps(paths).encode()).hexdigest()[:16]


def real(before: dict[str, Any], to: Path) -> list[Outcome]:
    """All real steps, the file written after each; those of the same search are as they were.

    A maximum does not depend on the search, and is measured once.
    """
    search = digest()
    same = before.get("real", {}) if before.get("search") == search else {}
    maxima = before.get("maxima", {}) | {name: one["maximum"] for name, one in before.get("real", {}).items()}
    done: dict[str, Any] = {}
    for name, make, budget in steps():
        if name in same:
            done[name] = same[name]
            continue
        one = found(name, make, budget, maxima.get(name))
        if one is None:
            continue
        done[name] = asdict(one)
        print(name, done[name]["path"], "=", done[name]["answer"], "of", done[name]["maximum"], flush=True)
        to.write_text(json.dumps({"search": search, "real": done, "maxima": maxima}) + "\n")
    return [Outcome(**one) for one in done.values()]


# --- the page -----------------------------------------------------------------------------------------


def summary(name: str, some: Sequence[Outcome]) -> dict[str, Any]:
    """Means and worst of a group, and how many cases keep row 15's line."""
    shares = [one.answer / one.maximum for one in some]
    figures = {"name": name, "cases": len(some), "kept": sum(one.on_line_promise for one in some)}
    for key in ("sizes", "trials", "ooms", "soaks", "failed_soaks"):
        values = [getattr(one, key) for one in some]
        figures |= {f"{key}_mean": statistics.mean(values), f"{key}_max": max(values)}
    return figures | {
        "share_mean": statistics.mean(shares),
        "share_min": min(shares),
        "exact": sum(one.answer == one.maximum for one in some) / len(some),
    }


def grouped(some: Sequence[Outcome], *parts: int) -> list[dict[str, Any]]:
    """A summary for each value of those parts of the cases' names."""
    groups: dict[str, list[Outcome]] = {}
    for one in some:
        words = one.case.split("/")
        groups.setdefault(", ".join(words[part] for part in parts), []).append(one)
    return [summary(name, group) for name, group in groups.items()]


def measured(to: Path, before: dict[str, Any], *, with_real: bool) -> dict[str, Any]:
    default, exact = list(lines(LINES)), list(lines(LINES, tolerance=0.0))
    others = list(lines(OTHERS))
    groups = {
        "lines": [*grouped(default, 0), *grouped(default, 1), *grouped(default, 2), *grouped(default, 4)],
        "exact": grouped(exact, 0, 1),
        "others": grouped(others, 0, 1),
    }
    every = {one.case: asdict(one) for one in (*default, *others)}
    steps_done = real(before, to) if with_real else []
    if steps_done:
        groups["real"] = [*grouped(steps_done, 0), *grouped(steps_done, 2)]
    return {
        "search": digest(),
        "groups": groups,
        "broken": [one.case for one in default if not one.on_line_promise],
        "lines": every,
        "real": {one.case: asdict(one) for one in steps_done},
    }


def row(s: dict[str, Any]) -> str:
    pairs = [
        f"{s[f'{key}_mean']:.2f} / {s[f'{key}_max']}"
        for key in ("sizes", "trials", "ooms", "soaks", "failed_soaks")
    ]
    shares = f"{s['share_mean']:.1%} / {s['share_min']:.1%} | {s['exact']:.0%}"
    return f"| {s['name']} | {s['cases']} | {' | '.join(pairs)} | {shares} | {s['kept']} |"


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = "| | cases | sizes | trials | OOMs | stability checks | failed | answer / maximum | exact | kept |"
    return "\n".join([head, "|---" * 10 + "|", *map(row, rows)])


def page(facts: dict[str, Any]) -> str:
    """The dated page: every figure comes from the JSON."""
    groups = facts["groups"]
    paths = [
        f"| {one['case']} | {one['path']} | {one['answer']} | {one['maximum']} |"
        for one in facts["real"].values()
    ]
    listed = "\n".join(
        ["| real step, budget, weights' share | sizes tried | answer | maximum |", "|---" * 4 + "|"]
    )
    return f"""# Searches in a crowded budget

`python benchmarks/search_crowded.py`. Cells are mean / worst (answers: mean / lowest). Kept: at most 6 sizes,
one OOM and two stability checks (row 15 of issue 26). `s` is a stability check, `x` a trial that did not fit.

## Lines
By how they are rounded, by budget, by the share that is fixed, and by what is known to be held. Of these
{len(facts["broken"])} cases do not keep row 15's line.

{table(groups["lines"])}

## Lines, `tolerance=0`

{table(groups["exact"])}

## Not lines

{table(groups["others"])}

## Real steps under `virtual_memory`
MLPs are no lines: each of their blocks is rounded by itself, and an optimizer step can be the largest peak.

{table(groups["real"])}

{listed}
{chr(10).join(paths)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", action="store_true", help="simulated lines only; nothing is written")
    parser.add_argument("--to", type=Path, default=RESULTS, help="the JSON; the page goes beside it")
    pages.add_page(parser.add_subparsers(dest="command"))
    given = parser.parse_args()
    if given.command == "page":
        pages.write_page(given, page)
        return
    before = json.loads(given.to.read_text()) if given.to.exists() else {}
    facts = measured(given.to, before, with_real=not given.lines)
    for name, rows in facts["groups"].items():
        print(f"{name}\n{table(rows)}\n")
    print(f"{len(facts['broken'])} lines break row 15")
    if not given.lines:
        given.to.write_text(json.dumps(facts, separators=(",", ":")).replace('},"', '},\n"') + "\n")
        given.to.with_suffix(".md").write_text(page(facts))


if __name__ == "__main__":
    main()
