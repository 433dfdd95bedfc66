"""Workspaces of attention, cuDNN and cuBLAS, and the table of all workspaces by operation.

Read off allocation histories of an H200 (torch 2.11, `benchmarks/prediction_gpu.py history`), each next to
the rule in torch's source or in cuDNN's choice that explains it. cuDNN's convolutions choose by heuristics of
their own: what is here is the common case, the copies into its own layout.

Rules: an operation that is in no table takes nothing. What a kernel keeps for good (cuBLAS) is separate from
what it releases.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model import sequences, workspaces
from batchfit._engine.cuda_model.workspaces import FP32_BYTES, LOW, Extra, Rule, copied, reduced
from batchfit._engine.device.tensors import bytes_of

aten = torch.ops.aten
# What cuBLAS does, which keeps a workspace for each thread that uses it.
GEMMS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._addmm_activation.default,
    }
)


# -- attention


def _cudnn_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    size = rows * width * FP32_BYTES + rows * FP32_BYTES + 256  # the query's gradient in fp32, and row sums
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * key.element_size()
    return Extra((*_expanded(args[0]), size))


def _expanded(gradient: Tensor) -> tuple[int, ...]:
    """cuDNN's attention takes a gradient as it lies, unless it is an expanded one: that is copied."""
    spread = any(step == 0 and n > 1 for step, n in zip(gradient.stride(), gradient.shape, strict=True))
    return (bytes_of(gradient),) if spread else ()


def _efficient_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, key, mask = args[1], args[2], args[4]
    batch, heads, length, width = query.shape
    blocks = -(-length // 64)
    wide = -(-width // 64) * 64
    rows = batch * heads * length
    found = [batch * heads * (blocks * 64 * wide * FP32_BYTES + blocks * 16), rows * FP32_BYTES]
    if query.dtype not in LOW:
        found.append(query.numel() * FP32_BYTES)  # gradient times output
    if key.shape[1] != heads:  # torch 2.14 and later, by its source: a gradient per head, then summed
        found += [batch * heads * key.shape[2] * width * key.element_size()] * 2
    outputs = {}
    if mask is not None and mask.shape[-1] % 8:
        columns = -(-mask.shape[-1] // 64) * 64
        outputs[3] = rows * columns * query.element_size()
    return Extra(tuple(found), outputs=outputs)


def _flash_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * (-(-length // 128) * 128)
    size = [rows * (-(-width // 32) * 32) * FP32_BYTES, rows * FP32_BYTES]
    if key.shape[1] != heads:
        size.append(2 * batch * heads * key.shape[2] * width * key.element_size())
    return Extra(tuple(size))


# -- convolutions


def _layout(tensor: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout in which cuDNN is asked to work: the one that the input or the weight is in."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if last is None:
        return torch.contiguous_format
    for one in (tensor, weight):
        if one.is_contiguous(memory_format=last) and not one.is_contiguous():
            return last
    return torch.contiguous_format


def _plan(in_bytes: int, out_bytes: int, tensor: Tensor, weight: Tensor, stride: Any, groups: int) -> int:
    """cuDNN's copies of input, output and weight in its own layout; nothing where it works in place."""
    if groups > 1 or _layout(tensor, weight) is not torch.contiguous_format:
        return 0
    if math.prod(weight.shape[2:]) > 1:
        channels = tensor.shape[1]
        # Windows that overlap are read from a copy with channels by eights; patches are not (ViT).
        overlap = any(size > step for size, step in zip(weight.shape[2:], stride, strict=False))
        padded = -(-channels // 8) * 8 if overlap and tensor.dtype in LOW else channels
        return in_bytes // channels * padded + out_bytes + bytes_of(weight)
    # A product of matrices, done in place where the pictures are large enough for that.
    in_place = all(step == 1 for step in stride) and math.prod(tensor.shape[2:]) > 196
    return 0 if in_place else in_bytes + out_bytes


def _convolution(args: Any, gpu: Gpu) -> Extra | None:
    tensor, weight, _, *windows, transposed, output_padding, groups = args[:9]
    layout = _layout(tensor, weight)
    each = list(zip(tensor.shape[2:], weight.shape[2:], *windows, strict=False))
    if transposed:
        length = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for (n, k, s, p, d), o in zip(each, output_padding, strict=False)
        ]
        channels = weight.shape[1] * groups
    else:
        length = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in each]
        channels = weight.shape[0]
    out_bytes = tensor.shape[0] * channels * math.prod(length) * tensor.element_size()
    plan = _plan(bytes_of(tensor), out_bytes, tensor, weight, windows[0], groups)
    return Extra((copied(tensor, layout), copied(weight, layout)), plans={0: plan})


def _convolution_backward(args: Any, gpu: Gpu) -> Extra | None:
    gradient, tensor, weight, _, stride = args[:5]
    groups, wanted = args[9], args[10]
    layout = _layout(tensor, weight)
    plan = _plan(bytes_of(tensor), bytes_of(gradient), tensor, weight, stride, groups)
    plans = {index: plan for index in (0, 1) if wanted[index]}
    after = {2: reduced(gradient, [0, *range(2, gradient.dim())], gpu)} if wanted[2] else {}
    return Extra((copied(gradient, layout), copied(tensor, layout)), after, plans)


# What says, from arguments and GPU, what an operation takes beside its results.
RULES: dict[Any, Rule] = {
    **workspaces.RULES,
    **sequences.RULES,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
