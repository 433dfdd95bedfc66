"""How a tensor lies in memory."""

from __future__ import annotations

from torch import Tensor


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True
