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

from batchfit.integrations.accelerate.finder import PREPARED, find_executable_batch_size
from batchfit.integrations.accelerate.microbatches import backward

__all__ = ["backward", "find_executable_batch_size"]

OLDEST: Final = (1, 10)
_OF_STATE: Final = ("_set_sync_gradients", "_remove_dataloader")


def _warn_of_version(version: str = accelerate.__version__) -> None:
    """Warn of a version that is older than the tested ones, or lacks what is reset after a failed attempt."""
    parts = version.split(".")[:2]
    now = tuple(map(int, parts)) if all(part.isdigit() for part in parts) else OLDEST
    held = accelerate.Accelerator.__init__.__code__.co_names
    missing = [name for name in PREPARED if name not in held]
    missing += [name for name in _OF_STATE if not hasattr(accelerate.state.GradientState, name)]
    if now < OLDEST or missing:
        lacks = f", which has no {', '.join(missing)}" if missing else ""
        warnings.warn(
            f"batchfit.integrations.accelerate is tested with accelerate {'.'.join(map(str, OLDEST))} and "
            f"later, and this is {version}{lacks}",
            stacklevel=3,
        )


_warn_of_version()
