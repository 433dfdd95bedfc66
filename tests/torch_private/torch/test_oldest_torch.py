"""A torch that is too old is named by the first feature that uses torch, and nothing else is said of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import torch
torch.__version__ = {version!r}
import batchfit
print(batchfit.__version__)
{use}
"""


def run(version: str, use: str) -> subprocess.CompletedProcess[str]:
    program = _PROGRAM.format(version=version, use=use)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)


# Each row starts a process: one for each answer is enough.
@pytest.mark.parametrize(
    "use", ["batchfit.find_batch_size", pytest.param("batchfit.virtual_memory", marks=pytest.mark.slow)]
)
def test_a_torch_below_the_oldest_is_refused_at_first_use(use: str) -> None:
    ran = run("2.5.1+cu121", use)
    assert ran.returncode == 1
    assert ran.stdout  # `import batchfit` itself asks nothing of torch
    assert ran.stderr.splitlines()[-1] == (
        "ImportError: batchfit needs torch 2.6 or later, and this is 2.5.1+cu121: install a newer one "
        '(pip install --upgrade "torch>=2.6")'
    )


@pytest.mark.parametrize("version", ["2.6.0", pytest.param("3.0.0a0+git123", marks=pytest.mark.slow)])
def test_the_oldest_and_newer_ones_than_any_tested_are_taken(version: str) -> None:
    assert run(version, "batchfit.find_batch_size").returncode == 0
