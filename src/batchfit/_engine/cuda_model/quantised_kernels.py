"""What bitsandbytes' kernels for 4-bit and 8-bit weights do on CUDA, by the source of version 0.50.

Rules:
- Read from its source. Products with 4-bit weights were measured on an H200 (benchmarks/stack_gpu.py,
  plan_gpu.py: within 0.02 %); 8-bit ones were not: a caveat of the answer says so.
- A product with 4-bit weights makes the whole weight in the dtype of the input first. Its own kernel, which
  does without, is for few tokens; it is counted as if it did not, so the stream is the same at every size.
- An 8-bit product has no outlier columns here: how many there are depends on the data.
- On a CPU bitsandbytes takes another way through 8-bit products (`MatMul8bitFp`): a trace takes CUDA's.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.workspaces import FP32_BYTES, Extra, Rule
from batchfit._engine.device.tensors import bytes_of


def _product_of_4bit(args: Any, gpu: Gpu) -> Extra:
    tensor, shape = args[0], args[2]
    weight = math.prod(shape) * tensor.element_size()
    nested = args[7] if len(args) > 7 else None  # scales that are 8-bit numbers themselves
    return Extra(() if nested is None else (2 * nested.numel() * FP32_BYTES,), before={0: weight})


def _product_of_8bit(args: Any, gpu: Gpu) -> Extra:
    first, second = (args[1], args[2]) if args[0].is_floating_point() else args[:2]
    rows = first.numel() // first.shape[-1]
    return Extra(before={0: rows * second.shape[0] * 4})  # sums are 32-bit integers


def _quantised_rows(args: Any, gpu: Gpu) -> Extra | None:
    if len(args) < 2 or args[1] == 0.0:
        return None
    return Extra(after={1: bytes_of(args[0]) + args[0].numel()})  # absolute values, and which are large


RULES: dict[str, Rule] = {
    "bitsandbytes::gemm_4bit": _product_of_4bit,
    "bitsandbytes::int8_scaled_mm": _product_of_8bit,
    "bitsandbytes::int8_mixed_scaled_mm": _product_of_8bit,
    "bitsandbytes::int8_vectorwise_quant": _quantised_rows,
}


def _int8_vectorwise_quant(tensor: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = tensor.new_empty(tensor.shape, dtype=torch.int8)
    scales = tensor.new_empty(tensor.numel() // tensor.shape[-1], dtype=torch.float32)
    return rows, scales, None if threshold == 0.0 else tensor.new_empty(0, dtype=torch.int64)


def _int8_mixed_scaled_mm(
    tensor: Tensor, rows: Tensor, weight: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    return tensor.new_empty((*rows.shape[:-1], weight.shape[0])), tensor.new_empty(0)


# bitsandbytes' own fake kernels of these ask for an unknown length, which a trace does not have.
STAND_INS: dict[str, Any] = {
    "bitsandbytes::int8_vectorwise_quant": _int8_vectorwise_quant,
    "bitsandbytes::int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
}


@contextlib.contextmanager
def way_of_cuda() -> Iterator[None]:
    """Inside, 8-bit products go CUDA's way on every device; their remarks about dtypes are not logged."""
    module: Any = sys.modules.get("bitsandbytes.autograd._functions")
    ways = [getattr(module, name, None) for name in ("MatMul8bitFp", "MatMul8bitLt")]
    if None in ways:
        yield
        return
    disabled = module.logger.disabled
    module.MatMul8bitFp, module.logger.disabled = ways[1], True
    try:
        yield
    finally:
        module.MatMul8bitFp, module.logger.disabled = ways[0], disabled
