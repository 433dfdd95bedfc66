"""Rows of a benchmark: each in a process of its own, kept as soon as it is there, and not run again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Results = dict[str, Any]


def in_child(script: str, row: str, *more: str, smoke: bool) -> Results:
    """What `script one ROW` says in a fresh process; a row that failed is its error."""
    command = [sys.executable, script, "one", row, *more, *(["--smoke"] if smoke else [])]
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
    if done.returncode != 0:
        return {"error": done.stderr.strip()[-800:] or f"exit {done.returncode}"}
    answer: Results = json.loads(done.stdout.splitlines()[-1])
    answer["process_s"] = time.perf_counter() - begun
    return answer


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
) -> None:
    """Run what `out` lacks, until no row may start any more; `not_yet` says what must come before a row."""
    results: Results = json.loads(out.read_text()) if out.exists() else {}
    results["about"] = about
    begun = time.perf_counter()
    for row in wanted:
        if row in results and "error" not in results[row]:
            continue
        if time.perf_counter() - begun > deadline_s:
            print(f"{row}: left for another call", flush=True)
            continue
        if reason := not_yet(row, results):
            print(f"{row}: {reason}", flush=True)
            continue
        results[row] = run(row, results)
        keep(out, results)
        print(row, json.dumps(shown(results[row])), flush=True)
    left = [row for row in wanted if row not in results or "error" in results[row]]
    print(f"{len(left)} {called} left")
