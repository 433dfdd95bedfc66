"""docs/reference/compatibility.md, made of the stored results of tests/versions.py.

Rules: every figure on the page is stored, and every skip and every failure is on it. What a user needs comes
first: which torch, what is refused or poorer there; then the evidence. Nothing but the standard library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

Results = dict[str, Any]
LIBRARIES = (
    *("transformers", "accelerate", "lightning", "ray", "torchtune"),
    *("peft", "trl", "sentence-transformers", "diffusers", "bitsandbytes", "torchao"),
    *("pydantic", "typer", "rich", "matplotlib", "numpy", "pandas"),
)
PARTS = ("ranks", "integrations", "torch, a to l", "torch, m to z", "pure")
_OPENING = """\
# Compatibility

Does batchfit work with the torch that you have? It needs torch 2.6 or later, and Python 3.11 or later. All
tests of `make test` ran with each torch in this table, unless its line says otherwise. A line "changed"
has tests that are newer than that run. A version between two of these is expected to work like its neighbors.
A newer one is used without a warning: torch itself is asked for what batchfit needs, whatever its version
number.
"""
_DOCTOR = """\
`batchfit doctor` shows the same for your installation. A feature that a torch cannot carry is refused before
anything runs, with the version and what to do. A caveat means that it works, in a poorer way that results
name.
"""
_EVIDENCE = """\
Ordinary wheels of torch, on CPUs; on the machines of this table. The tests that need a GPU are skipped
here: they ran with torch 2.11 on an H200 ([Benchmarks](../project/benchmarks.md)). `make test-versions` makes
this page.
"""
_PREDICTIONS = """\
## Predictions

`batchfit predict` follows the memory of torch 2.11 on an H200, where it was measured. What other versions do
otherwise is known by their sources, and was not measured on a GPU.

| since | what torch does | in predictions |
|---|---|---|
| 2.12 | cuDNN's attention is left to flash for some dropouts | the same memory |
| 2.14 | memory-efficient attention takes grouped heads | torch is asked |
| 2.14 | fused attention takes queries of three dimensions | torch is asked |
| 2.15 | cuBLAS keeps no workspace (`TORCH_CUBLAS_WORKSPACE_CACHE=1` does) | a caveat: up to 65 MiB too many |
| 2.15 | `expandable_segments_reserve` in `PYTORCH_ALLOC_CONF` | a caveat where it is set |

transformers 4.57 asks some masks for their values (padded prompts, BART): those steps are refused
(`UntraceableError`), and `batchfit find` measures them.

68 cases predicted without a GPU, by version:
[the page](../../benchmarks/results/prediction_versions_cpu_202611.md).
"""


def totals(result: Results) -> tuple[int, list[dict[str, str]], Counter[str]]:
    """Passed, failed, skipped by reason: of all parts."""
    parts = result["parts"].values()
    skipped: Counter[str] = Counter()
    for part in parts:
        skipped.update(part["skipped"])
    return sum(part["passed"] for part in parts), [one for part in parts for one in part["failed"]], skipped


def not_run(result: Results) -> list[str]:
    """The parts of the tests that did not end; of reports from another machine the parts are not known.

    A run of changed tests has parts of its own, and ends with all of them.
    """
    ours = set(result["parts"]) <= set(PARTS)
    return [part for part in PARTS if ours and part not in result["parts"]]


def runs(found: Mapping[str, Results]) -> dict[str, Results]:
    """Each stored run: of all tests, and after it that of the tests that changed since, if there is one."""
    all_of_them: dict[str, Results] = {}
    for name, result in found.items():
        all_of_them[name] = result
        if "changed" in result:
            all_of_them[f"{name}, changed"] = {**result, **result["changed"], "again": ()}
    return all_of_them


def page(found: Mapping[str, Results]) -> str:
    """The whole page."""
    lines = [*_OPENING.splitlines(), "", *_short(found), "", *_limits(found), "", *_PREDICTIONS.splitlines()]
    lines += ["", *_evidence(found)]
    return "\n".join(lines).rstrip() + "\n"


def _short(found: Mapping[str, Results]) -> list[str]:
    """What is asked first: does it work with mine?"""
    lines = ["| torch | passed | failed | skipped | refused or with a caveat |", "|---|---:|---:|---:|---|"]
    for name, result in runs(found).items():
        passed, failed, skipped = totals(result)
        if name not in found:
            files = f"{result['files']} of {result['of']} files of tests that are new or changed since"
            lines.append(f"| {name} | {passed:,} | {len(failed)} | {skipped.total()} | {files} |")
            continue
        limits = result["limits"]
        counts = Counter(one["state"] for one in limits)
        said = ", ".join(f"{counts[state]} {text}" for state, text in _STATES.items() if counts[state])
        if missing := not_run(result):
            said = "; ".join([*([said] if said else []), f"**not run: {', '.join(missing)}**"])
        lines.append(f"| {name} | {passed:,} | {len(failed)} | {skipped.total()} | {said or 'nothing'} |")
    return lines


_STATES = {"not here": "refused", "caveat": "with a caveat"}  # as the doctor says it, and as the page does


def _limits(found: Mapping[str, Results]) -> list[str]:
    """Features that do not simply work, and on which versions."""
    lines = ["## What is refused or poorer", "", *_DOCTOR.splitlines(), ""]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name, result in found.items():
        for one in result["limits"]:
            detail = _any_version(one["detail"], result["torch"])
            rows.setdefault((one["name"], _STATES[one["state"]], detail), []).append(name)
    if not rows:
        return [*lines, "On the versions above: nothing."]
    lines += ["| feature | on torch | | why, and what to do |", "|---|---|---|---|"]
    for (feature, state, detail), names in rows.items():
        lines.append(f"| {_cell(feature)} | {', '.join(names)} | {state} | {_cell(detail)} |")
    return lines


def _any_version(detail: str, torch: str) -> str:
    """The reason without the version that was running, which has a column of its own."""
    return detail.replace(f", and this is {torch}", "").replace(f", and {torch} has not", "")


def _evidence(found: Mapping[str, Results]) -> list[str]:
    lines = ["## Evidence", "", *_EVIDENCE.splitlines(), ""]
    lines += ["| torch | date | commit | Python | machine | tests took |", "|---|---|---|---|---|---:|"]
    for name, result in runs(found).items():
        minutes = sum(part["seconds"] for part in result["parts"].values()) / 60
        again = "".join(map(_again, result.get("again", ())))
        torch = result["torch"] if name in found else f"{result['torch']}, changed"
        lines.append(
            f"| {torch} | {result['date']} | {result['source']}{again} | {result['python']} "
            f"| {_cell(result['machine'])} | {minutes:.0f} min |"
        )
    lines += [
        "",
        "### Libraries",
        "",
        f"| beside torch | {' | '.join(found)} |",
        "|---" * (len(found) + 1) + "|",
    ]
    for library in LIBRARIES:
        versions = " | ".join(result["libraries"].get(library, "-") for result in found.values())
        lines.append(f"| {library} | {versions} |")
    lines += ["", "### Skipped tests", ""]
    skips = {name: _any_torch(totals(result)[2], result["torch"]) for name, result in runs(found).items()}
    reasons = sorted({why for counts in skips.values() for why in counts}, key=lambda why: (_group(why), why))
    lines += [f"| why | {' | '.join(skips)} |", "|---" + "|---:" * len(skips) + "|"]
    for why in reasons:
        counts = " | ".join(str(one[why] or "") for one in skips.values())
        lines.append(f"| {_cell(why)} | {counts} |")
    for name, result in runs(found).items():
        if failed := totals(result)[1]:
            lines += ["", f"### Failed with torch {name}", ""]
            lines += [f"- `{one['test']}`: {_cell(one['why'])}" for one in failed]
    return lines


def _again(run: Results) -> str:
    """That failed tests were run again, and how many of them a later commit no longer has."""
    gone = f", {len(run['gone'])} of them no longer there" if run.get("gone") else ""
    return f"; {run['tests']} again at {run['source']}{gone}"


def _any_torch(skipped: Counter[str], torch: str) -> Counter[str]:
    """Reasons without the version, which has a column of its own."""
    counts: Counter[str] = Counter()
    for why, count in skipped.items():
        counts[why.replace(f"torch {torch}", "that torch")] += count
    return counts


def _group(why: str) -> tuple[int, str]:
    """What the machine lacks first, then libraries, then what torch lacks."""
    if why.startswith("needs gpu"):
        return 0, ""
    return (2 if "torch" in why and why != "needs torchtune" else 1), ""


def _cell(text: str) -> str:
    """Text of pytest as text in a table: nothing in it is Markdown."""
    return re.sub(r"([\\|<>*_`\[\]{}#])", r"\\\1", text)
