"""Hugging Face Accelerate: its `find_executable_batch_size`, and microbatches in its loops.

from batchfit.integrations.accelerate import find_executable_batch_size

@find_executable_batch_size(starting_batch_size=512)
def train(batch_size, ...): ...
"""

from __future__ import annotations

import warnings
from typing import Final

try:
    import accelerate
except ImportError as error:
    raise ImportError('pip install "batchfit[accelerate]" to use batchfit.integrations.accelerate') from error

from batchfit.integrations.accelerate.finder import find_executable_batch_size
from batchfit.integrations.accelerate.microbatches import backward

__all__ = ["backward", "find_executable_batch_size"]

TESTED: Final = ("1.10", "1.15")


def _warn_of_version(version: str = accelerate.__version__) -> None:
    """Warn of a version outside of the tested range."""
    try:
        now = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        now = (0,)
    low, high = (tuple(int(part) for part in edge.split(".")) for edge in TESTED)
    if not low <= now <= high:
        warnings.warn(
            f"batchfit.integrations.accelerate is tested with accelerate {TESTED[0]} to {TESTED[1]}, "
            f"and this is {version}",
            stacklevel=3,
        )


_warn_of_version()
