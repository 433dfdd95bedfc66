"""A temporary folder of a test's own in which probe folders are really made.

A probe folder holds a socket, whose path must be short. pytest's folders are too long for it, and batchfit
would take /tmp: a check that nothing is left would look at an empty folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batchfit._program.command_run import ProbeFolder


@contextmanager
def short_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of this process for a `with`; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as name, monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", name)
        probe = ProbeFolder().path
        shutil.rmtree(probe)
        assert probe.parent == Path(name)
        yield Path(name)
