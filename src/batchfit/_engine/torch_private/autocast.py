"""Autocast: what a region is set to, and what CUDA's lists make of an operation, asked without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch

from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.torch_private.lookup import lost, needed, optional

_keys_of: Callable[[torch.Tensor], Any] = needed("torch._C._dispatch_keys")
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


@final
class _Seen(Exception):
    """The first operation is seen, and need not run."""


@final
class _FirstOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what autocast does first: it casts, or it calls the operation. Nothing runs."""

    dtype: torch.dtype | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import dynamo, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # asked by autocast, of each argument
            return func(*args)
        self.dtype = (kwargs or {}).get("dtype")
        raise _Seen


def cuda_cast(operation: Any, args: Sequence[Any], like: torch.Tensor) -> torch.dtype | None:
    """The dtype that CUDA's autocast to bf16 casts to before this operation; None where it does not cast.

    The tensors among `args` are made inside a `FakeTensorMode`, on a CUDA device (which need not be there)
    as `like` is. Without a GPU, or a build for one, torch has its lists all the same.
    """
    key = optional("torch._C.DispatchKey.AutocastCUDA")
    keys = _keys_of(like).add(key)
    was, low = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    first = _FirstOperation()  # type: ignore[no-untyped-call]
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        with contextlib.suppress(_Seen), first:
            operation.redispatch(keys, *args)
    finally:
        torch.set_autocast_enabled("cuda", was)
        torch.set_autocast_dtype("cuda", low)
    return first.dtype
