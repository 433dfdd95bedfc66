"""The CUDA caching allocator and what lies beside it: recorded history, workspaces of cuBLAS, settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import torch

# Read by every torch that batchfit runs on, and where it is not set.
_CUDA: Final = "PYTORCH_CUDA_ALLOC_CONF"
_HIP: Final = "PYTORCH_HIP_ALLOC_CONF"
_ANY: Final = "PYTORCH_ALLOC_CONF"
_SINCE: Final = (2, 9)  # a name in a library of C++: nothing but the version says it
_PER_PRODUCT_SINCE: Final = (2, 15)  # so is this
_KEPT: Final = "TORCH_CUBLAS_WORKSPACE_CACHE"


def history_is_recorded() -> bool:
    """Whether `torch.cuda.memory._record_memory_history` is on: a snapshot has stacks then."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and bool(enabled())


def clear_cublas_workspaces() -> bool:
    """Release the workspaces of cuBLAS; False where this torch cannot."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is None:
        return False
    clear()
    return True


def keeps_cublas_workspaces() -> bool:
    """Whether the workspaces of cuBLAS stay after a product; later torches take one per product."""
    return _release() < _PER_PRODUCT_SINCE or os.environ.get(_KEPT) == "1"


def observe_ooms(call: Callable[[int, int, int, int], None]) -> bool:
    """Have `call(device, asked, total, free)` called before CUDA's allocator raises an OOM.

    CUDA must be initialized. False where this torch cannot do so.
    """
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        return False
    attach(call)
    return True


def record_history(max_entries: int) -> bool:
    """Have CUDA's allocator record its history, with stacks of Python; False where it is recorded already.

    The allocator initializes CUDA for it.
    """
    if history_is_recorded():
        return False
    torch.cuda.memory._record_memory_history(max_entries=max_entries, stacks="python")
    return True


def stop_history() -> None:
    """Record no more, and forget what was recorded."""
    torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> dict[str, Any]:
    """The segments and the history of CUDA's allocator, as it records them."""
    found: dict[str, Any] = torch.cuda.memory._snapshot()
    return found


def history_is_known() -> bool:
    """Whether it can be asked; a build without CUDA has no history to ask for."""
    return not _has_cuda() or hasattr(torch._C, "_cuda_isHistoryEnabled")


def can_clear_workspaces() -> bool:
    """Whether they can be released; a build without CUDA has none."""
    return not _has_cuda() or hasattr(torch._C, "_cuda_clearCublasWorkspaces")


def settings_variables() -> tuple[str, ...]:
    """The environment variables of its allocator's settings that this torch reads: the first that is set."""
    return (_ANY, _CUDA, _HIP) if reads_any_name() else (_CUDA, _HIP)


def reads_any_name() -> bool:
    """Whether PYTORCH_ALLOC_CONF is one of them."""
    return _release() >= _SINCE


def settings_text() -> str:
    """The settings of CUDA's allocator, as the environment has them."""
    names = [name for name in settings_variables() if name != _HIP]
    return next((text for name in names if (text := os.environ.get(name))), "")


def _has_cuda() -> bool:
    return torch.version.cuda is not None or torch.version.hip is not None


def _release() -> tuple[int, int]:
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)
