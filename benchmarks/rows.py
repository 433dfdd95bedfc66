"""Rows of a benchmark: each in a process of its own, kept as soon as it is there, and not run again.

Rules: a row is timed alone. The process of the one after it may import meanwhile (`Ahead`), and does nothing
more until it is its turn.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

Results = dict[str, Any]
_WAITS = "BATCHFIT_BENCHMARK_WAITS"


class Ahead:
    """`script one ROW` in a fresh process for each row; one that was prepared has imported already."""

    def __init__(self, script: str, *more: str, smoke: bool) -> None:
        self._command = [sys.executable, script, "one"]
        self._more = [*more, *(["--smoke"] if smoke else [])]
        self._waiting: dict[str, subprocess.Popen[str]] = {}

    def prepare(self, row: str) -> None:
        """Let the process of a row import what it needs."""
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", _WAITS: "1"}
        if row not in self._waiting:
            self._waiting[row] = subprocess.Popen(
                [*self._command, row, *self._more],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=quiet,
            )

    def run(self, row: str) -> Results:
        """What it says; a row that failed is its error."""
        self.prepare(row)
        child = self._waiting.pop(row)
        begun = time.perf_counter()
        said, wrong = child.communicate("go\n")
        if child.returncode != 0:
            return {"error": wrong.strip()[-800:] or f"exit {child.returncode}"}
        answer: Results = json.loads(said.splitlines()[-1])
        answer["process_s"] = time.perf_counter() - begun
        return answer

    def close(self) -> None:
        """End those that nobody asked."""
        for child in self._waiting.values():
            child.kill()
            child.communicate()
        self._waiting.clear()


def my_turn(*modules: str) -> None:
    """In the process of a row: import these, then wait until it may run."""
    for name in modules:
        importlib.import_module(name)
    if os.environ.get(_WAITS) and sys.stdin.readline() != "go\n":
        sys.exit("nobody waits for the answer")


def in_child(script: str, row: str, *more: str, smoke: bool) -> Results:
    """What `script one ROW` says in a fresh process; a row that failed is its error."""
    return Ahead(script, *more, smoke=smoke).run(row)


def keep(out: Path, results: Results) -> None:
    """Whole or not at all: a run that is ended while it writes must not cost what earlier calls measured."""
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    part.write_text(json.dumps(results, indent=1) + "\n")
    part.replace(out)


def run_rows(
    out: Path,
    about: Results,
    wanted: Sequence[str],
    *,
    deadline_s: float,
    run: Callable[[str, Results], Results],
    not_yet: Callable[[str, Results], str] = lambda row, results: "",
    shown: Callable[[Results], Results] = dict,
    called: str = "rows",
    prepare: Callable[[str], None] = lambda row: None,
) -> None:
    """Run what `out` lacks, until no row may start any more.

    `not_yet` says what must come before a row; `prepare` is told the row after the one that runs.
    """
    results: Results = json.loads(out.read_text()) if out.exists() else {}
    results["about"] = about
    begun = time.perf_counter()
    missing = [row for row in wanted if row not in results or "error" in results[row]]
    for row, following in zip_longest(missing, missing[1:]):
        if time.perf_counter() - begun > deadline_s:
            print(f"{row}: left for another call", flush=True)
            continue
        if reason := not_yet(row, results):
            print(f"{row}: {reason}", flush=True)
            continue
        if following is not None:
            prepare(following)
        results[row] = run(row, results)
        keep(out, results)
        print(row, json.dumps(shown(results[row])), flush=True)
    left = [row for row in wanted if row not in results or "error" in results[row]]
    print(f"{len(left)} {called} left")
