"""The scripts of benchmarks/ as their tests use them: imported, or run as a user runs them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from warm import run_python

from conftest import need

FOLDER = Path(__file__).parents[2] / "benchmarks"
need("benchmarks", present=FOLDER.exists())  # they are not in the distribution


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


def run(name: str, *arguments: str) -> str:
    """What it prints; a script that fails fails the test with what it said."""
    done = run_python(str(FOLDER / f"{name}.py"), *arguments, timeout_s=280)
    assert done.returncode == 0, done.stderr
    return done.stdout
