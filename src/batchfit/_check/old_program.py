"""The program of a baseline, traced again with the versions that are here.

A baseline of another version of torch does not say whose a change is. Where the baseline lies in git, the
program that it was written for is there, too: at the commit that wrote its record. That program is traced in
a child process, from a copy in a temporary folder, with the torch of this process.

Rules: nothing of the repository is changed, and no file of it that is newer may be read by the child. Where
any of this cannot be had, the reason is the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from batchfit._check.baseline_file import records_in
from batchfit._check.pure.baseline import read_baseline
from batchfit._check.pure.record import PeakRecord
from batchfit.errors import ResultFileError

_GIT_S = 60.0
_TRACE_S = 600.0
_MOST_COMMITS = 200


def retraced(
    before: PeakRecord, path: Path, name: str, target: str, arguments: Sequence[str]
) -> PeakRecord | str:
    """The record of the program that `before` was written for, or why it is not known."""
    real = path.resolve()
    top = _git(real.parent, "rev-parse", "--show-toplevel")
    if top is None:
        return "the baseline is in no git repository"
    root = Path(top.decode().strip())
    if _git(root, "rev-parse", "--is-shallow-repository") != b"false\n":
        return "the git repository is shallow: fetch all of its history"
    commit = _commit_of(before, root, real.relative_to(root).as_posix(), name)
    if commit is None:
        return "the baseline is not committed"
    archive = _git(root, "archive", "--format=tar", commit)
    if archive is None:
        return f"git archive of {commit[:10]} failed"
    with tempfile.TemporaryDirectory(prefix="batchfit-") as folder:
        copy = Path(folder).resolve()
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(copy, filter="data")
        return _traced(before, root, copy, name, target, arguments, commit)


def _commit_of(before: PeakRecord, root: Path, file: str, name: str) -> str | None:
    """The commit that wrote this record: later ones may have changed others in the file."""
    listed = _git(root, "log", "--format=%H", f"-{_MOST_COMMITS}", "--", file)
    found = None
    for commit in (listed or b"").decode().split():
        text = _git(root, "show", f"{commit}:{file}")
        try:
            record = read_baseline((text or b"").decode()).get(name)
        except (ResultFileError, UnicodeDecodeError):
            record = None
        if record != before:
            break
        found = commit
    return found


def _traced(
    before: PeakRecord,
    root: Path,
    copy: Path,
    name: str,
    target: str,
    arguments: Sequence[str],
    commit: str,
) -> PeakRecord | str:
    here = Path.cwd().resolve()
    inside = here.relative_to(root) if here.is_relative_to(root) else Path()
    result = copy / ".batchfit-record.json"
    order = {
        "target": target,
        "arguments": list(arguments),
        "name": name,
        "size": before.batch_size,
        "gpu": before.card,
        "root": str(copy),
        "newer": str(root),
        "result": str(result),
    }
    command = [sys.executable, "-m", "batchfit._check.child_main", json.dumps(order)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_paths(root, copy))}
    folder = copy / inside
    try:
        done = subprocess.run(
            command,
            cwd=folder if folder.is_dir() else copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TRACE_S,
        )
    except subprocess.TimeoutExpired:
        return f"the program of {commit[:10]} took over {_TRACE_S:.0f} s to trace"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return f"the program of {commit[:10]} cannot be traced here: {last}"
    return records_in(result)[name]


def _paths(root: Path, copy: Path) -> Iterator[str]:
    """Where the child looks for modules: what lies in the repository, in the copy instead."""
    yield str(copy)
    yield str(copy / "src")
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if entry:
            path = Path(entry).resolve()
            is_inside = path.is_relative_to(root) and not _is_installed(path)
            yield str(copy / path.relative_to(root) if is_inside else path)


def _is_installed(path: Path) -> bool:
    return "site-packages" in path.parts


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints; None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
