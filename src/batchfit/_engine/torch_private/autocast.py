"""Autocast: what a region is set to, and what CUDA's lists make of an operation, asked without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from batchfit._engine.torch_private.lookup import lost, optional

if TYPE_CHECKING:
    from batchfit._engine.torch_private.fake import FakeTensorMode

_FIELDS = ("device", "fast_dtype", "_enabled", "_cache_enabled")


class Region(NamedTuple):
    """What a `torch.autocast` object is set to."""

    device: str
    dtype: torch.dtype
    enabled: bool
    caches: bool


def region_of(context: Any) -> Region:
    """What this `torch.autocast` object is set to."""
    for name in _FIELDS:
        if not hasattr(context, name):
            raise lost(f"torch.autocast.{name}")
    return Region(context.device, context.fast_dtype, context._enabled, context._cache_enabled)


def set_region(context: Any, *, device: str, enabled: bool) -> None:
    """Move a `torch.autocast` object to another device."""
    context.device, context._enabled = device, enabled


def cuda_dtype(operation: Any, *args: Any) -> torch.dtype | None:
    """The dtype in which CUDA's autocast to bf16 runs an operation; None where torch cannot be asked.

    `args` are made by `fake_cuda`. The operation is sent through the kernel of CUDA's list, on fake tensors:
    no GPU is needed, nor a build for one.
    """
    keys_of, key = optional("torch._C._dispatch_keys"), optional("torch._C.DispatchKey.AutocastCUDA")
    if keys_of is None or key is None or not hasattr(operation, "redispatch"):
        return None
    was, low = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        out = operation.redispatch(keys_of(args[0]).add(key), *args)
    except (RuntimeError, NotImplementedError, TypeError):  # no fake kernel, or other arguments
        return None
    finally:
        torch.set_autocast_enabled("cuda", was)
        torch.set_autocast_dtype("cuda", low)
    return out.dtype if isinstance(out, torch.Tensor) else None


def fake_cuda(dtype: torch.dtype, *, mode: FakeTensorMode) -> torch.Tensor:
    """A small square matrix on a CUDA device that need not be there."""
    with mode:
        return torch.empty(4, 4, device="cuda:0", dtype=dtype)
