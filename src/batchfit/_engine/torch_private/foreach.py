"""The operations of `torch.optim` on lists of tensors, in few kernels. Public by use, private by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from batchfit._engine.torch_private.lookup import needed

add_: Callable[..., Any] = needed("torch._foreach_add_")
copy_: Callable[..., Any] = needed("torch._foreach_copy_")
mul_: Callable[..., Any] = needed("torch._foreach_mul_")
norm: Callable[..., Any] = needed("torch._foreach_norm")
sub_: Callable[..., Any] = needed("torch._foreach_sub_")
