"""Predictions of the zoo without a GPU on several versions of torch: what differs, and beside the truth.

    python benchmarks/prediction_versions.py run --out 2.15.json      # once in each environment; resumes
    python benchmarks/prediction_versions.py join 2.11.json 2.15.json --commit C --date D --out FILE.json
    python benchmarks/prediction_versions.py page FILE.json --to FILE.md

`join` adds the predictions of the golden record. Truths are those of an H200 with torch 2.11. A model of
another version of transformers may be another program.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path
from typing import Any

from pages import add_page, write_page
from rows import keep

RESULTS = Path(__file__).parent / "results"
GPU, GOLDEN = RESULTS / "prediction_h200_202611.json", RESULTS / "golden.json.gz"
Case = dict[str, Any]


def label(made_with: dict[str, str]) -> str:
    """2.15 with transformers 5.23.0."""
    torch = ".".join(made_with["torch"].split(".")[:2])
    return f"torch {torch}, transformers {made_with['transformers']}"


def slim(answer: Case) -> Case:
    """What is compared of a prediction: sizes, and the peak at each size of its curve."""
    if "error" in answer:
        return answer
    kept = {name: answer[name] for name in ("raw", "default", "peak_phase", "peak_operation")}
    return {**kept, "peaks": [[size, peak] for size, peak, _ in answer["curve"]]}


def run(out: Path, models: list[str]) -> None:
    """Predict every case that `out` lacks, with the torch that is installed."""
    import golden
    import prediction_gpu

    made_with = golden.made_with()
    found = json.loads(out.read_text()) if out.exists() else {"made_with": made_with, "cases": {}}
    if found["made_with"] != made_with:
        raise SystemExit(f"{out} was made with {found['made_with']}, and here are {made_with}")
    for model, precision, cap in prediction_gpu.asked_for("predict", models, ["bf16", "fp32"]):
        case = f"{model}/{precision}/{cap}"
        if case not in found["cases"]:
            answer = golden.plain(golden.predicted(model, precision, cap))
            found["cases"][case] = slim(answer)
            keep(out, found)
            gc.collect()
            print(case, said(found["cases"][case]), flush=True)


def read(record: Path) -> Case:
    """Predictions of a run, or of the golden record."""
    import golden

    if record.suffix != ".gz":
        return dict(json.loads(record.read_text()))
    stored = golden.read(record)
    begins = "prediction/"
    cases = {key.removeprefix(begins): slim(one) for key, one in stored["answers"].items() if begins in key}
    return {"made_with": stored["made_with"], "cases": cases}


def join(records: list[Path], about: dict[str, Any]) -> Case:
    """The records beside each other, by what they were made with."""
    versions, cases = [], dict[str, Case]()
    for record in records:
        found = read(record)
        name = label(found["made_with"])
        versions.append({"name": name, **found["made_with"]})
        for case, answer in found["cases"].items():
            cases.setdefault(case, {})[name] = answer
    versions.sort(key=lambda one: [int(part) for part in one["torch"].split("+")[0].split(".")])
    truths = json.loads(GPU.read_text())["truth"]
    truth = {case: [truths[case]["sustained"], truths[case]["fails"]] for case in cases if case in truths}
    return {"about": about, "versions": versions, "truth": truth, "cases": cases}


def apart(one: Case, other: Case) -> float | None:
    """The largest relative difference of two predicted peaks at one size; None where no size is in both."""
    first, second = (dict(map(tuple, found["peaks"])) for found in (one, other))
    both = [second[size] / first[size] - 1 for size in first.keys() & second.keys()]
    return max(both, key=abs, default=None)


def differs(case: Case) -> bool:
    return len({json.dumps(one, sort_keys=True) for one in case.values()}) > 1


def errors(found: Case, name: str) -> list[float]:
    """Signed errors of the predicted sizes, by the H200's truths."""
    return [
        found["cases"][case][name]["raw"] / truth[0] - 1
        for case, truth in found["truth"].items()
        if "raw" in found["cases"][case].get(name, {})
    ]


def said(one: Case | None) -> str:
    """A predicted size, and in brackets the one at the default margin."""
    if one is None:
        return "-"
    return f"{one['raw']} ({one['default']})" if "raw" in one else one["error"]


def peak_difference(case: Case, base: str, name: str) -> str:
    """How far the peaks are from those of the first version."""
    one, other = case.get(base), case.get(name)
    if one is None or other is None or "peaks" not in one or "peaks" not in other:
        return "-"
    found = apart(one, other)
    return "-" if found is None else "same" if found == 0 else f"{found:+.2%}"


def page(found: Case) -> str:
    names = [one["name"] for one in found["versions"]]
    about = found["about"]
    cases = {case: found["cases"][case] for case in sorted(found["cases"])}
    differing = {case: one for case, one in cases.items() if differs(one)}
    same = len(cases) - len(differing)
    lines = [
        "# Predictions of the zoo on several versions of torch",
        "",
        f"{about['date']}, commit {about['source']}, {about['machine']}. Made by "
        "`python benchmarks/prediction_versions.py run` in an environment of each, then `join`. Budgets and "
        "truths are those of [the page of the H200](prediction_h200_202611.md); nothing ran on a GPU here.",
        "",
        f"{len(cases)} cases; in {same} of them all versions say the same, to the byte.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    by_name = {name: errors(found, name) for name in names}
    every = [(name, [abs(one) for one in by_name[name]]) for name in names]
    lines += [
        "| cases with a truth | " + " | ".join(str(len(one)) for _, one in every) + " |",
        "| size: median error | " + " | ".join(f"{statistics.median(one):.2%}" for _, one in every) + " |",
        "| size: worst error | " + " | ".join(f"{max(one):.1%}" for _, one in every) + " |",
    ]
    lines += ["", *about["notes"]]
    lines += [
        "",
        "## Cases that differ",
        "",
        "The size without a margin (at the default margin), and how far predicted peaks are from those of "
        "the first column at equal sizes: the largest difference.",
        "",
        "| case, cap GiB | truth | " + " | ".join(names) + " | peak, by column |",
        "|---" * (len(names) + 3) + "|",
    ]
    for case, one in differing.items():
        truth = ", ".join(map(str, found["truth"][case])) if case in found["truth"] else "-"
        sizes = " | ".join(said(one.get(name)) for name in names)
        peaks = ", ".join(peak_difference(one, names[0], name) for name in names[1:])
        lines.append(f"| {case} | {truth} | {sizes} | {peaks} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--models", nargs="*", default=[])
    joining = commands.add_parser("join")
    joining.add_argument("records", type=Path, nargs="+")
    joining.add_argument("--commit", required=True)
    joining.add_argument("--date", required=True)
    joining.add_argument("--machine", default="2 cores, no GPU")
    joining.add_argument("--notes", type=Path, help="paragraphs for the page: why they differ")
    joining.add_argument("--out", type=Path, required=True)
    add_page(commands)
    given = parser.parse_args()
    if given.command == "page":
        write_page(given, page)
        return
    if given.command == "run":
        run(given.out, given.models)
        return
    notes = given.notes.read_text(encoding="utf-8").splitlines() if given.notes else []
    about = {"date": given.date, "source": given.commit, "machine": given.machine, "notes": notes}
    found = join([GOLDEN, *given.records], about)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(page(found))


if __name__ == "__main__":
    main()
