"""The pytest plug-in: the fixture `peak_memory`, and `pytest --memory-update`.

pytest loads this module in every run where batchfit is installed (PYTEST_DONT_REWRITE is pytest's mark).

Rule: a run that does not use the fixture pays for this file and nothing else: what it needs is imported when
a test asks for it, and another plug-in that has an option of the same name keeps it.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from batchfit._check.in_tests import PeakMemory

_UPDATE = "--memory-update"
_DEST = "batchfit_memory_update"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag and two settings."""
    group = parser.getgroup("batchfit", "peak memory (batchfit)")
    # Another plug-in may have it (argparse's error, since pytest 9): the fixture says so where it is used.
    with contextlib.suppress(ValueError, argparse.ArgumentError):
        group.addoption(
            _UPDATE,
            action="store_true",
            dest=_DEST,
            help="write the baselines of the tests that use peak_memory, in place of comparing with them",
        )
    parser.addini("memory_baseline", "file with the baselines of peak_memory", default="memory.json")
    parser.addini("memory_max_increase", "how much more than the baseline is allowed", default="2%")


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest) -> Callable[..., PeakMemory]:
    """Peak memory of a step on a GPU, without one: `assert peak_memory(workload, batch_size=8) < "20GiB"`."""
    config = request.config
    update: Any = config.getoption(_DEST, default=None)
    if update is None:
        pytest.fail(f"another plug-in of pytest has an option {_UPDATE}: peak_memory needs it", pytrace=False)
    from batchfit._check.in_tests import MemoryOfTest

    return MemoryOfTest(
        test=request.node.nodeid,
        path=config.rootpath / config.getini("memory_baseline"),
        max_increase=config.getini("memory_max_increase"),
        update=bool(update),
        fail=lambda text: pytest.fail(text, pytrace=False),
    )
