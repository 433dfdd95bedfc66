"""The scripts of benchmarks/ as their tests use them: imported, or run as a user runs them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from conftest import need

FOLDER = Path(__file__).parents[2] / "benchmarks"
need("benchmarks", present=FOLDER.exists())  # they are not in the distribution


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> str:
    """What it prints; a script that fails fails the test with what it said."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
