"""typer's runner with stdout and stderr apart, whichever click is installed."""

from __future__ import annotations

import inspect
from typing import Any

from typer.testing import CliRunner


def runner() -> CliRunner:
    """click keeps them apart by itself from 8.2 on, and before when it is asked."""
    asked: dict[str, Any] = {"mix_stderr": False}
    known = inspect.signature(CliRunner.__init__).parameters
    return CliRunner(**asked if "mix_stderr" in known else {})
