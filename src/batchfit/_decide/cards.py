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
    threads_per_multiprocessor: int = 2048
    measured: bool = False

    @property
    def blas_bytes(self) -> int:
        """What cuBLAS keeps for each thread that uses it (at::cuda::getChosenWorkspaceSize)."""
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    @property
    def blas_lt_bytes(self) -> int:
        """What cuBLASLt keeps beside it."""
        return MIB

    @property
    def prefers_cudnn_attention(self) -> bool:
        """torch puts cuDNN's attention first from Hopper on."""
        return self.capability >= (9, 0)
