"""Parts of a Microbatcher that tests set or read and that no user sees."""

from __future__ import annotations

from typing import Any

from batchfit import Microbatcher


def skip_loss_check(mb: Microbatcher) -> None:
    """Make `mb` believe the loss: its first batch runs `fn` no more often than its microbatches need."""
    mb._loss_check.is_off = True


def sizing_of(mb: Microbatcher) -> Any:
    """What decides the microbatch sizes of batches whose samples are alike."""
    return mb._sizing


def packing_of(mb: Microbatcher) -> Any:
    """What decides the microbatches of ragged batches."""
    return mb._packing


def setting_of(mb: Microbatcher) -> Any:
    return mb._setting


def limit_microbatch(sizing_or_packing: Any, size: int | None) -> None:
    """Use microbatches of at most `size` samples from now on."""
    sizing_or_packing._most = size


def known_of(mb: Microbatcher) -> Any:
    """What a ragged `mb` knows of its only kind of batch."""
    (known,) = packing_of(mb)._known.values()
    return known
