"""What a trace asks about each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.copies import Extra
from batchfit._engine.cuda_model.dispatch import STAND_INS, CudaRules
from batchfit._engine.cuda_model.workspaces import extra_rule, is_gemm

ITEM = torch.ops.aten._local_scalar_dense.default
_SHAPED_BY_DATA = frozenset({torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default})


class Operation(NamedTuple):
    """What is asked about an operation each time, looked up once: they come by the ten thousand."""

    name: str
    reads_data: bool  # a value is read, or makes the shape of the result
    composite: Any  # CUDA's way through it, where it comes whole
    is_composite: bool
    takes: Callable[[Any, Gpu], Extra | None] | None
    stand_in: Any
    is_gemm: bool

    @classmethod
    def of(cls, func: Any, rules: CudaRules) -> Operation:
        plain = isinstance(func, torch._ops.OpOverload)
        return cls(
            str(func),
            func is ITEM or func in _SHAPED_BY_DATA,
            rules.composite(func),
            plain
            and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
            extra_rule(func),
            STAND_INS.get(func),
            is_gemm(func),
        )
