"""Tells when we got slower: ratios to the plain way, and counts of simulated searches, beside stored ones.

    python benchmarks/guard.py run                      # measure and compare; exit code 1 where it got worse
    python benchmarks/guard.py run --subjects search    # some of it
    python benchmarks/guard.py store                    # measure three times and store the medians

Rules
- Costs are ratios (ours over the plain way in the same run), never times: machines differ. Lower is better.
- A cost that is more than 10 % above the stored one is measured again, and again: it is worse only if it is
  above all three times. One that is 10 % below is named, so that it can be stored.
- Counts of searches are the same on every machine: they must not get worse at all, not once.
- A figure that is stored and was not measured, or measured and not stored, is a failure: nothing drops out
  without a word.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
STORED = HERE / "results" / "guard.json"
ALLOWED = 0.10
TIMES = 3
SAME = 1e-9  # what the last bits of a mean may differ by

Figures = dict[str, float]
Kind = Literal["ratio", "cost", "gain"]  # a ratio of times; an exact count where less, or more, is better
Verdict = Literal["as stored", "better", "worse", "again", "not stored", "not measured"]


@dataclass(frozen=True)
class Row:
    """One figure: what is stored, and what each measurement said."""

    name: str
    kind: Kind
    stored: float | None
    measured: tuple[float, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """`again` asks for another measurement."""
        if self.stored is None:
            return "not stored"
        if not self.measured:
            return "not measured"
        if self.kind != "ratio":
            change = self.measured[-1] - self.stored
            if abs(change) <= SAME:
                return "as stored"
            return "worse" if (change > 0) == (self.kind == "cost") else "better"
        best = min(self.measured)
        if best > self.stored * (1 + ALLOWED):
            return "worse" if len(self.measured) >= TIMES else "again"
        return "better" if best < self.stored * (1 - ALLOWED) else "as stored"

    @property
    def failed(self) -> bool:
        return self.verdict in ("worse", "not stored", "not measured")


def compared(
    stored: Mapping[str, Figures],
    kinds: Mapping[str, Kind],
    measure: Callable[[str], Figures],
    subjects: Sequence[str],
) -> list[Row]:
    """The rows of all figures of these subjects; a subject with one that is above is measured again."""
    rows = []
    for subject in subjects:
        known, kind = stored.get(subject, {}), kinds[subject]
        found: dict[str, list[float]] = {name: [] for name in known}
        while True:
            for name, value in measure(subject).items():
                found.setdefault(name, []).append(value)
            told = [
                Row(name, _kind(name, kind), known.get(name), tuple(some)) for name, some in found.items()
            ]
            if not any(row.verdict == "again" for row in told):
                break
        rows += told
    return rows


def _kind(name: str, kind: Kind) -> Kind:
    """Of exact counts, those that say how much was reached are better when higher."""
    return "gain" if kind != "ratio" and name.endswith("of the maximum") else kind


def table(rows: Sequence[Row]) -> str:
    """What is printed: one line a figure, the failed ones last."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'figure':{width}}  {'stored':>9}  {'measured':>9}  change"]
    for row in sorted(rows, key=lambda row: row.failed):
        now = min(row.measured) if row.measured else None
        cells = ["-" if value is None else f"{value:.4g}" for value in (row.stored, now)]
        change = "" if now is None or not row.stored else f"{now / row.stored - 1:+7.1%}"
        times = f" ({len(row.measured)} times)" if len(row.measured) > 1 else ""
        lines.append(
            f"{row.name:{width}}  {cells[0]:>9}  {cells[1]:>9}  {change:7}  {row.verdict}{times}".rstrip()
        )
    return "\n".join(lines)


def conclusion(rows: Sequence[Row]) -> str:
    failed = [row.name for row in rows if row.failed]
    better = [row.name for row in rows if row.verdict == "better"]
    told = [f"{len(rows)} figures, {len(failed)} failed" + (": " + "; ".join(failed) if failed else "")]
    if better:
        told.append(
            f"better than stored ({'; '.join(better)}): keep it with `python benchmarks/guard.py store`"
        )
    return "\n".join(told)


# --- what is measured -------------------------------------------------------------------------------------


def searches() -> Figures:
    """Trials, failures and answers of simulated searches, all exact."""
    import search_simulated as simulated

    figures: Figures = {}
    for held in (False, True):
        for tolerance, how in ((0.02, "default"), (0.0, "exact")):
            runs = [
                simulated.ours(one.name, one, held=held, tolerance=tolerance) for one in simulated.VARIANTS
            ]
            name = f"search, {how}, held bytes {'known' if held else 'unknown'}"
            figures[f"{name}: trials"] = statistics.mean(x for run in runs for x in run.trials)
            figures[f"{name}: most trials"] = max(x for run in runs for x in run.trials)
            figures[f"{name}: OOMs"] = statistics.mean(x for run in runs for x in run.ooms)
            said = [run.summary() for run in runs]
            figures[f"{name}: unsafe"] = sum(one["unsafe"] for one in said)
            figures[f"{name}: of the maximum"] = statistics.mean(one["share_of_max_mean"] for one in said)
    return figures


def sweeps() -> Figures:
    """Trials and failures of the seed's examples, in virtual memory: exact too."""
    import sweep_seed

    figures: Figures = {}
    for strategy in ("guided", "grow"):
        records = [sweep_seed.record_of(one, strategy) for one in sweep_seed.EXAMPLES.values()]
        name = f"sweep of the seed's examples, {strategy}"
        figures[f"{name}: trials"] = sum(len(one.trials) for one in records)
        figures[f"{name}: OOMs"] = sum(not trial.fits for one in records for trial in one.trials)
        most = [min(one.most, 64) for one in sweep_seed.EXAMPLES.values()]
        shares = [one.batch_size_used / fits for one, fits in zip(records, most, strict=True)]
        figures[f"{name}: of the maximum"] = statistics.mean(shares)
    return figures


def imports() -> Figures:
    import import_time

    return dict(import_time.measure(rounds=15)["ratios"])


def cost(part: str) -> Callable[[], Figures]:
    def measure() -> Figures:
        import torch

        from cost_cpu import PARTS

        torch.set_num_threads(1)
        work, rounds = PARTS[part]
        return dict(work(rounds)["ratios"])

    return measure


SUBJECTS: dict[str, tuple[Kind, Callable[[], Figures]]] = {
    "search": ("cost", searches),
    "sweep": ("cost", sweeps),
    "import": ("ratio", imports),
    "microbatch": ("ratio", cost("microbatch")),
    "noise": ("ratio", cost("noise")),
    "loader": ("ratio", cost("loader")),
    "find": ("ratio", cost("find")),
    "trace": ("ratio", cost("trace")),
    "virtual": ("ratio", cost("virtual")),
}
KINDS: dict[str, Kind] = {name: kind for name, (kind, _) in SUBJECTS.items()}


def in_child(subject: str) -> Figures:
    """A subject in a fresh process, on one thread."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, __file__, "one", subject],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode != 0:
        raise SystemExit(f"{subject} failed:\n{done.stderr[-2000:]}")
    print(f"measured {subject} in {time.monotonic() - begun:.0f} s", flush=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def medians(measured: Sequence[Figures]) -> Figures:
    return {name: round(statistics.median(one[name] for one in measured), 6) for name in measured[0]}


def store(subjects: Sequence[str], file: Path) -> None:
    from turns import about

    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"figures": {}}
    for subject in subjects:
        times = TIMES if KINDS[subject] == "ratio" else 1
        found = [in_child(subject) for _ in range(times)]
        kept["figures"][subject] = medians(found) if times > 1 else found[0]
        kept["about"] = about("python benchmarks/guard.py store")
        file.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "store"):
        one = commands.add_parser(name)
        one.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=SUBJECTS)
        one.add_argument("--stored", type=Path, default=STORED)
    commands.add_parser("one").add_argument("subject", choices=SUBJECTS)
    given = parser.parse_args()
    if given.command == "one":
        print(json.dumps(SUBJECTS[given.subject][1]()))
    elif given.command == "store":
        store(given.subjects, given.stored)
    else:
        stored = json.loads(given.stored.read_text())["figures"]
        rows = compared(stored, KINDS, in_child, given.subjects)
        print(f"\n{table(rows)}\n\n{conclusion(rows)}")
        if any(row.failed for row in rows):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
