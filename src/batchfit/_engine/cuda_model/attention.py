"""Which kernel of attention torch takes on a GPU, for a trace on a machine that has none (sdp_utils.cpp).

Rules: kernels are distinguished as far as they differ in memory. Measured is torch 2.11 on an H200. Since
2.12 cuDNN's kernel is left to flash where dropout is no multiple of 1/16, before 2.11 wherever cuDNN was old:
both take the same memory there. Since 2.14 the memory-efficient kernel takes grouped heads, and fused kernels
take queries of three dimensions: torch is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.workspaces import LOW
from batchfit._engine.torch_private.dispatch import modes_disabled

aten: Any = torch.ops.aten
_MATH = int(SDPBackend.MATH.value)


def backend(gpu: Gpu, query: Any, key: Any, value: Any, mask: Any, *, grouped: bool) -> str:
    """The kernel that torch takes on that GPU: "cudnn", "flash", "efficient" or "math"."""
    cuda: Any = torch.backends.cuda
    low = query.dtype in LOW
    head = query.shape[-1]
    # Neither kernel reads a mask or a head whose neighbours are not side by side (T5's position bias).
    apart = any(one is not None and one.stride(-1) != 1 for one in (query, key, value, mask))
    if query.dim() != 4 or apart:
        return "math"
    learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
    small = head % 8 == 0 and max(head, value.shape[-1]) <= 128
    if gpu.prefers_cudnn_attention and cuda.cudnn_sdp_enabled() and low and small and not learns:
        return "cudnn"
    if (
        gpu.capability >= (8, 0)
        and cuda.flash_sdp_enabled()
        and low
        and mask is None
        and head <= 256
        and head == value.shape[-1]
    ):
        return "flash"
    grouped = grouped and query.shape[1] != key.shape[1]
    takes_groups = not grouped or efficient_takes_groups()
    takes = cuda.mem_efficient_sdp_enabled() and takes_groups and _efficient(gpu, query, key, value)
    return "efficient" if takes else "math"


def _efficient(gpu: Gpu, query: Any, key: Any, value: Any) -> bool:
    """The kernel's dtypes, and heads of whole vectors (minimum_gemm_alignment)."""
    ampere = gpu.capability >= (8, 0)
    kinds = (torch.float16, torch.float32, *((torch.bfloat16,) if ampere else ()))
    step = 8 if query.dtype is not torch.float32 else 4 if ampere else 1
    same = query.shape[-1] == key.shape[-1]
    return query.dtype in kinds and same and query.shape[-1] % step == 0 and value.shape[-1] % step == 0


@functools.cache
def efficient_takes_groups() -> bool:
    """Whether the memory-efficient kernel of this torch gives fewer heads of the key a gradient of their own.

    Without that, attention with grouped heads ends in products and a softmax of all scores.
    """
    query, key = (torch.empty(1, heads, 8, 8, device="meta") for heads in (4, 2))
    rows = torch.empty(1, 4, 32, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    wanted = [True, True, True, False]
    found = aten._scaled_dot_product_efficient_attention_backward.default(
        query, query, key, key, None, query, rows, seed, seed, 0.0, wanted, False
    )
    return bool(found[1].shape == key.shape)


@functools.cache
def fuses_three_dimensions() -> bool:
    """Whether this torch runs queries of three dimensions in fused kernels, as heads of one sample.

    Without that, attention over them ends in products and a softmax of all scores. What is asked is its rule
    for a CPU, which begins in the same function.
    """
    with modes_disabled():
        query = torch.empty(1, 8, 8, device="cpu")
        return int(aten._fused_sdp_choice.default(query, query, query)) != _MATH


def is_one_sample(*tensors: Tensor) -> bool:
    """Whether torch hands them on as one sample: query, key and value of three dimensions."""
    return all(one.dim() == 3 for one in tensors) and fuses_three_dimensions()


def with_sample(mask: Tensor | None) -> Tensor | None:
    """The mask for one sample: of four dimensions."""
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as the numbers that torch adds to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    hidden = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


def padded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the kernel wants it: rows of a multiple of eight, one for every head of every sample."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    if columns % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(*query.shape[:-1], key.shape[-2])
