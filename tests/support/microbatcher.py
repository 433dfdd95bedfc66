"""Parts of a Microbatcher that tests set or read and that no user sees."""

from __future__ import annotations

from typing import Any

from batchfit import Microbatcher


def skip_loss_check(mb: Microbatcher) -> None:
    """Make `mb` believe the loss: its first batch runs `fn` no more often than its microbatches need."""
    mb._loss_check = None


def uniform_sizer(mb: Microbatcher) -> Any:
    """What decides the microbatch sizes of batches whose samples are alike."""
    return mb._uniform


def ragged_sizer(mb: Microbatcher) -> Any:
    """What decides the microbatches of ragged batches."""
    return mb._ragged


def context_of(mb: Microbatcher) -> Any:
    return mb._context


def limit_microbatch(sizer: Any, size: int | None) -> None:
    """Use microbatches of at most `size` samples from now on."""
    sizer._most = size


def known_of(mb: Microbatcher) -> Any:
    """What a ragged `mb` knows of its only kind of batch."""
    (known,) = ragged_sizer(mb)._known.values()
    return known
