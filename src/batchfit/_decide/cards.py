"""The cards that a prediction can be made for: usable bytes, and what changes memory there.

Rules: `usable_bytes` is what a program's tensors can have once the driver and the CUDA context have taken
theirs; a card that we have not measured says so (`measured=False`), and its figures are its vendor's memory
less a stated share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

GIB = 2**30
MIB = 2**20


@final
@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    name: str
    usable_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    measured: bool = False
    blas_workspace_bytes: int = 0
    prefers_cudnn_attention: bool = False
