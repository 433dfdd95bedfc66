"""`batchfit why` on the command line: no torch, one error line, JSON alone on stdout, a report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from snapshot_cases import PLANTED, h200

from batchfit._cli.exits import Code
from batchfit.results import OomExplanation


def why(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchfit", "why", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "BATCHFIT_BLOCK_TORCH": "1"},
    )


def test_json_is_alone_and_the_report_has_the_timeline(tmp_path: Path) -> None:
    page, saved = tmp_path / "why.html", tmp_path / "why.json"
    ran = why(h200("long batch"), "--json", "--report", page, "--output", saved, "--batch-size", "12")
    assert ran.returncode == Code.FOUND, ran.stderr
    found = OomExplanation.from_json(ran.stdout)
    assert json.loads(saved.read_text()) == json.loads(ran.stdout)
    assert found.causes[0].name == "long batch"
    assert "because  long batch" in ran.stderr
    text = page.read_text()
    for part in (
        "Why it was out of memory",
        "Memory over the recorded history",
        'data-zoom="in"',
        "snapshots_gpu.py:47 batch",
        "Replayed with PYTORCH_CUDA_ALLOC_CONF",
        "clip-path",
    ):
        assert part in text
    assert len(text) < 150_000


def test_several_files_are_one_answer(tmp_path: Path) -> None:
    one = PLANTED["too large"]().write(tmp_path / "one.pickle")
    two = PLANTED["leak"]().write(tmp_path / "two.pickle")
    ran = why(one, two, "--no-what-if")
    assert ran.returncode == Code.FOUND, ran.stderr
    assert "one.pickle" in ran.stdout
    assert "two.pickle" in ran.stdout


@pytest.mark.parametrize("content", [b"", b"text", b"cos\nsystem\n(S'x'\ntR."])
def test_a_file_that_cannot_be_read_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.pickle"
    path.write_bytes(content)
    ran = why(path)
    assert ran.returncode == Code.USAGE
    assert not ran.stdout
    assert len(ran.stderr.strip().splitlines()) == 1
    assert "bad.pickle: refused" in ran.stderr
