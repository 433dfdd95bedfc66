"""Every torch: `python tests/versions.py run` makes an environment per torch and runs all the tests in it.

    python tests/versions.py run                  # versions without a result, one after another
    python tests/versions.py run --torch 2.15     # one of them, whether it has a result or not
    python tests/versions.py page                 # docs/compatibility.md again, of the stored results

Rules: ordinary wheels of torch, used on the CPU. Environments lie in build/versions, one at a time, and are
removed; so is the copy of the source that the tests run on, so that work may go on meanwhile. What a version
gave is stored as soon as it is there, and a version that has a result is not run again unless it is named.
A test that is skipped is listed with its reason. Nothing but the standard library.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import environments

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "versions.json"
PAGE = ROOT / "docs" / "compatibility.md"
FOLDER = ROOT / "build" / "versions"
SHOWN = ("transformers", "accelerate", "lightning", "ray", "torchtune", "pydantic", "typer", "rich", "numpy")
TOOLS = (*environments.TOOLS, "pandas", "matplotlib", "hatchling", "ruff", "mypy")
REQUIRED = ("transformers", "accelerate", "lightning", "ray", "gloo", "matplotlib", "hatchling")
TORCHTUNE = {"torchtune": "0.6.1", "torchao": "0.10.0"}
_PARTS = {  # as in the Makefile; the pure part runs with torch blocked
    "pure": ("--hypothesis-profile=same",),
    "torch": ("--hypothesis-profile=same", "-m", "not slow", "--ignore-glob=*/pure"),
}
_MOST_SECONDS = 3 * 3600
Results = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One environment: a torch, and versions of libraries; one that is not named is the newest."""

    torch: str
    libraries: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # libraries that are not installed there

    @property
    def name(self) -> str:
        """How it is asked for: 2.15."""
        return ".".join(self.torch.split(".")[:2])

    def packages(self) -> list[str]:
        """What pip is asked for, but torch."""
        wanted = {name: "" for name in SHOWN if name not in ("torchtune", *self.without)} | self.libraries
        return [*TOOLS, *(f"{name}=={version}" if version else name for name, version in wanted.items())]

    def required(self) -> str:
        """What no test may be skipped for."""
        names = [name for name in REQUIRED if name not in self.without]
        return ",".join([*names, *(["torchtune"] if "torchtune" in self.libraries else [])])


# The oldest of each library beside the oldest torch, the newest beside the newest. torchtune's pin of torchao
# is of the time of torch 2.6, and keeps other libraries from being there: it is in that environment only.
OLDEST = {
    "transformers": "4.57.1",
    "accelerate": "1.10.0",
    "lightning": "2.5.0",
    "ray": "2.40.0",
    "pydantic": "2.10.0",
    "typer": "0.15.4",
    "rich": "13.7.0",
}
ROWS = (
    Row("2.6.0", OLDEST | TORCHTUNE),
    Row("2.8.0"),
    Row("2.10.0"),
    Row("2.12.1"),
    Row("2.15.0"),
)


# -- making and running


def make(row: Row, folder: Path) -> tuple[Path, float]:
    """A new environment with that torch, and its MiB on the disk."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    # No cache: these wheels are gigabytes, and are used once.
    pip = [environments.python_of(venv), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    torch = f"torch=={row.torch}"
    for packages in ([torch], [torch, *row.packages()], ["--no-deps", str(folder / "source")]):
        subprocess.run([*pip, "--no-cache-dir", *packages], check=True)
    taken_bytes = sum(path.lstat().st_size for path in venv.rglob("*") if path.is_file())
    return venv, taken_bytes / 2**20


_VERSIONS = """
import json
from importlib import metadata
print(json.dumps({one.metadata["Name"].lower(): one.version for one in metadata.distributions()}))
"""


def versions_in(venv: Path) -> dict[str, str]:
    """Every package of an environment, with its version."""
    command = [environments.python_of(venv), "-c", _VERSIONS]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    found: dict[str, str] = json.loads(said.stdout)
    return found


def run_part(part: str, *, venv: Path, source: Path, required: str, processes: int) -> Results:
    """One part of the tests there: counts, what failed, and why what was skipped."""
    report = source.parent / f"{part}.xml"
    tests = sorted(str(path) for path in source.glob("tests/*/pure")) if part == "pure" else ["tests"]
    command = [environments.python_of(venv), "-m", "pytest", "-q", "-n", str(processes)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", *_PARTS[part], *tests]
    variables = {**environments.environment(), "BATCHFIT_REQUIRE": required}
    # The tests start `batchfit` and `python` by name, too.
    variables["PATH"] = os.pathsep.join([str(environments.python_of(venv).parent), os.environ["PATH"]])
    if part == "pure":
        variables["BATCHFIT_BLOCK_TORCH"] = "1"
    began = time.monotonic()
    with (source.parent / f"{part}.log").open("w", encoding="utf-8") as log:
        subprocess.run(command, cwd=source, env=variables, stdout=log, stderr=log, timeout=_MOST_SECONDS)
    if not report.exists():
        raise SystemExit(f"pytest ended without a report: {source.parent / f'{part}.log'}")
    return {**read(report), "seconds": round(time.monotonic() - began)}


def read(report: Path) -> Results:
    """A report of pytest (JUnit's XML): counts, the tests that failed, and reasons of skips."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '')}::{case.get('name', '')}".strip(":")
        wrong = [*case.iter("failure"), *case.iter("error")]
        left_out = case.find("skipped")
        if wrong:
            failed.append({"test": name, "why": first_line(wrong[0].get("message") or "")})
        elif left_out is not None:
            skipped[reason(left_out.get("message") or "")] += 1
        else:
            passed += 1
    failed.sort(key=lambda one: one["test"])
    return {"passed": passed, "failed": failed, "skipped": dict(sorted(skipped.items()))}


def first_line(message: str) -> str:
    """What a failure says first, without what differs from run to run."""
    line = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return re.sub(r"0x[0-9a-f]+", "0x...", line.replace(str(FOLDER), "..."))[:200]


def reason(message: str) -> str:
    """Why a test was skipped; what pytest says around it is left out."""
    found = re.search(r"could not import '([\w.]+)'", message)
    return f"needs {found[1]}" if found else first_line(message.removeprefix("Skipped: "))


def run_row(row: Row, *, processes: int, keep: bool) -> Results:
    """All tests beside that torch."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    folder = FOLDER / row.name
    folder.mkdir(parents=True)
    try:
        _, archive = environments.build(folder / "dist")
        environments.unpack(archive, folder / "unpacked").rename(folder / "source")
        began = time.monotonic()
        print(f"torch {row.torch}: installing", flush=True)
        venv, taken_mib = make(row, folder)
        made_s = time.monotonic() - began
        print(f"torch {row.torch}: {taken_mib / 1024:.1f} GiB in {made_s:.0f} s; tests", flush=True)
        tested = partial(run_part, venv=venv, source=folder / "source", processes=processes)
        parts = {part: tested(part, required=row.required()) for part in _PARTS}
        there = versions_in(venv)
    finally:
        if not keep:
            shutil.rmtree(FOLDER, ignore_errors=True)
    return {
        "torch": there["torch"],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "source": revision(),
        "libraries": {name: there[name] for name in SHOWN if name in there},
        "install_s": round(made_s),
        "install_mib": round(taken_mib),
        "parts": parts,
    }


def revision() -> str:
    """The commit that was tested, with a plus where the tree is not that commit."""
    git = ["git", "-C", str(ROOT)]
    said = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
    if said.returncode != 0:
        return "unknown"
    left = subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True, text=True)
    return said.stdout.strip() + ("+" if left.stdout.strip() else "")


# -- what is stored, and its page


def stored(path: Path = RESULTS) -> dict[str, Results]:
    """Results by torch version, the oldest first."""
    found: dict[str, Results] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(sorted(found.items(), key=lambda pair: [int(part) for part in pair[0].split(".")]))


def store(name: str, result: Results, path: Path = RESULTS) -> dict[str, Results]:
    """Add a result; all of them."""
    found = stored(path) | {name: result}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return stored(path)


def totals(result: Results) -> tuple[int, list[dict[str, str]], Counter[str]]:
    """Passed, failed, skipped by reason: of both parts."""
    parts = result["parts"].values()
    skipped: Counter[str] = Counter()
    for part in parts:
        skipped.update(part["skipped"])
    return sum(part["passed"] for part in parts), [one for part in parts for one in part["failed"]], skipped


def page(found: dict[str, Results]) -> str:
    """docs/compatibility.md."""
    return "\n".join(_lines(found)).rstrip() + "\n"


def _lines(found: dict[str, Results]) -> list[str]:
    lines = [
        "# Versions that are tested",
        "",
        "The whole test suite beside each of these, on a CPU. Made by `make test-versions`; figures are of",
        "the date and commit in the table. A test that is skipped is listed below with its reason.",
        "",
        "| torch | passed | failed | skipped | date | commit | tests |",
        "|---|---:|---:|---:|---|---|---:|",
    ]
    for result in found.values():
        passed, failed, skipped = totals(result)
        minutes = sum(part["seconds"] for part in result["parts"].values()) / 60
        lines.append(
            f"| {result['torch']} | {passed:,} | {len(failed)} | {skipped.total()} | {result['date']} "
            f"| {result['source']} | {minutes:.0f} min |"
        )
    lines += ["", "## Libraries beside them", ""]
    lines += [f"| torch | Python | {' | '.join(SHOWN)} | on disk |", "|---" * (len(SHOWN) + 2) + "|---:|"]
    for result in found.values():
        beside = " | ".join(result["libraries"].get(name, "-") for name in SHOWN)
        size = f"{result['install_mib'] / 1024:.1f} GiB"
        lines.append(f"| {result['torch']} | {result['python']} | {beside} | {size} |")
    lines += ["", "## What is skipped, and why", ""]
    skips = {name: totals(result)[2] for name, result in found.items()}
    reasons = sorted({why for counts in skips.values() for why in counts})
    lines += [f"| reason | {' | '.join(found)} |", "|---" + "|---:" * len(found) + "|"]
    for why in reasons:
        counts = " | ".join(str(skips[name][why] or "") for name in found)
        lines.append(f"| {_cell(why)} | {counts} |")
    for result in found.values():
        if failed := totals(result)[1]:
            lines += ["", f"## What fails beside torch {result['torch']}", ""]
            lines += [f"- `{one['test']}`: {_cell(one['why'])}" for one in failed]
    return lines


def _cell(text: str) -> str:
    """Text of pytest as text in a table: nothing in it is Markdown."""
    return re.sub(r"([\\|<>*_`\[\]{}#])", r"\\\1", text)


# -- the command


def chosen(named: Sequence[str], found: dict[str, Results], *, again: bool = False) -> list[Row]:
    """The rows to run: those that are named, or those without a result."""
    unknown = set(named) - {row.name for row in ROWS}
    if unknown:
        raise SystemExit(f"--torch must be one of {', '.join(row.name for row in ROWS)}, not {unknown.pop()}")
    return [row for row in ROWS if (row.name in named if named else again or row.name not in found)]


def main() -> int:
    """0 where no test failed, in the versions that were run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="make environments, run the tests, store what they gave")
    running.add_argument("--torch", nargs="*", default=[], help="these, whether they have a result or not")
    running.add_argument("--again", action="store_true", help="all of them again")
    running.add_argument("--keep", action="store_true", help="leave the last environment and its logs")
    running.add_argument("-n", "--processes", type=int, default=2)
    commands.add_parser("page", help="write docs/compatibility.md from the stored results")
    given = parser.parse_args()
    if given.command == "page":
        PAGE.write_text(page(stored()), encoding="utf-8")
        return 0
    wrong = 0
    for row in chosen(given.torch, stored(), again=given.again):
        result = run_row(row, processes=given.processes, keep=given.keep)
        PAGE.write_text(page(store(row.name, result)), encoding="utf-8")
        passed, failed, skipped = totals(result)
        wrong += len(failed)
        found = f"{passed:,} passed, {len(failed)} failed, {skipped.total()} skipped"
        print(f"torch {row.torch}: {found}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
