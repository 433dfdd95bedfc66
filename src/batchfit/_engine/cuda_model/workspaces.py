"""Temporary memory of torch's own kernels: contiguous copies of inputs, and workspaces while they run.

A fake run of an operation shows its results only. Many of CUDA's kernels want their inputs in one order in
memory and copy those that are not; losses are first made element by element; a product copies what cuBLAS
cannot read; reductions over thread blocks have a staging buffer. The rules were read off an H200
(`benchmarks/kernels_gpu.py`: each operation with inputs and gradients in order, channels last, cut out of
larger ones and expanded), and `tests/data/h200_kernels.json.gz` holds what was seen; what is by torch's
source alone is named in `BY_SOURCE`. What libraries' kernels take is in `library_kernels.py`.

Rules: bytes only, as a function of shapes, strides and the GPU; how a tensor lies does not change with the
batch size from two samples on, the fewest that are traced, so a copy that is not made is not written down.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.device.tensors import bytes_of, is_dense

aten = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class Extra:
    """Bytes beside the results: `after[i]` live shortly after result i is there, `together` until the end.

    `plans` are like `after`, but the kernel does without where there is no room: cuDNN then takes its next
    plan. `before[i]` is there before result i is made, and until the end: what is kept is then placed beside
    it, which decides fragmentation. `outputs` corrects the bytes of results that the fake kernel gets wrong.
    What takes nothing at this size says 0, so that the stream of allocations is the same at every size.
    """

    together: tuple[int, ...] = ()
    after: dict[int, int] = field(default_factory=dict)
    plans: dict[int, int] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)


Rule = Callable[[Any, Gpu], Extra | None]
FP32_BYTES = 4
LOW = (torch.float16, torch.bfloat16)
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _copies(size_of: Callable[[Tensor], int], *which: int, early: int | None = None) -> Rule:
    """A rule: these arguments are copied, in as many bytes as `size_of` says; `early` before the result."""

    def rule(args: Any, gpu: Gpu) -> Extra | None:
        first = 0 if early is None else size_of(args[early])
        return made(*(size_of(args[index]) for index in which), first=first)

    return rule


def made(*sizes: int, first: int = 0) -> Extra | None:
    """Copies that are there together, one of them (`first`) before the result; None without any."""
    found = tuple(size for size in sizes if size)
    return Extra(found, before={0: first} if first else {}) if found or first else None


def copied(tensor: Tensor, layout: torch.memory_format = torch.contiguous_format) -> int:
    """Bytes of the copy that a kernel makes to have it in order, or in another layout."""
    return 0 if tensor.is_contiguous(memory_format=layout) else bytes_of(tensor)


def _laid_out(tensor: Tensor) -> int:
    """As `copied`, and channels last will do."""
    last = _LAST.get(tensor.dim())
    if last is not None and tensor.is_contiguous(memory_format=last):
        return 0
    return copied(tensor)


def _permuted(tensor: Tensor) -> bool:
    """Whether it fills its memory, in another order: results that take after it do so too."""
    return not tensor.is_contiguous() and is_dense(tensor)


# -- products


def _readable(tensor: Tensor) -> int:
    """cuBLAS reads rows or columns that are contiguous; anything else is copied."""
    (rows, columns), (down, along) = tensor.shape[-2:], tensor.stride()[-2:]
    by_row = along == 1 and down >= max(1, columns)
    by_column = down == 1 and along >= max(1, rows)
    return 0 if by_row or by_column or tensor.is_contiguous() else bytes_of(tensor)


# -- losses


def loss(reduction: int, *, held: int = 0, kept: bool = False) -> Rule:
    """`held` temporaries of the input's size; where `kept`, the loss stays in the memory of all its elements.

    The latter is torch's way to reduce in place of the result: a number of 4 bytes that holds on to as much
    as the input, until it is dropped.
    """

    def rule(args: Any, gpu: Gpu) -> Extra | None:
        size = bytes_of(args[0])
        if len(args) > reduction and args[reduction] == 0:  # of every element: one temporary is the result
            return Extra((size,) * (held - 1)) if held > 1 else None
        return Extra((size,) * held, outputs={0: size} if kept else {})

    return rule


def _twice(args: Any, gpu: Gpu) -> Extra:
    return Extra((bytes_of(args[1]),) * 2)


def _once(args: Any, gpu: Gpu) -> Extra:
    return Extra((bytes_of(args[0]),))


# -- softmax


def _softmax_backward(args: Any, gpu: Gpu) -> Extra | None:
    """Gradient times output, before the sum is taken off; in order."""
    size = bytes_of(args[0])
    return made(size, size if _permuted(args[0]) else 0)


def _safe_softmax(args: Any, gpu: Gpu) -> Extra:
    extent = args[0].shape[args[1]] if args[0].dim() else 1
    rows = args[0].numel() // max(extent, 1)
    return Extra((args[0].numel(), rows))  # which scores are -inf, and which rows are nothing else


# -- indices


def _partial_bytes(count: int, weights: int, width: int) -> int:
    """Sums of an embedding's gradient by runs of sorted indices, in fp32."""
    return (count // 10 + min(count, weights)) * width * 4


def _embedding_backward(args: Any, gpu: Gpu) -> Extra:
    gradient, indices, weights = args[:3]
    count = indices.numel()
    before = _before(gradient)
    if count <= 3072:  # embedding_dense_backward_cuda: few indices need no sorting
        return Extra((0,) * 7, before=before)
    partial = _partial_bytes(count, weights, gradient.shape[-1])
    return Extra((*(8 * count,) * 6, partial), before=before)


def _embedding_bag_backward(args: Any, gpu: Gpu) -> Extra:
    gradient, indices, weights = args[0], args[1], args[6]
    count = indices.numel()
    partial = _partial_bytes(count, weights, gradient.shape[-1])
    return Extra((*(8 * count,) * 6, partial), before=_before(gradient))


def _before(gradient: Tensor) -> dict[int, int]:
    return {} if gradient.is_contiguous() else {0: bytes_of(gradient)}


def _index_put(args: Any, gpu: Gpu) -> Extra | None:
    adds = len(args) > 3 and args[3]
    return made(copied(args[2])) if adds else None


def _roll(args: Any, gpu: Gpu) -> Extra | None:
    """One dimension after the other."""
    dims = args[2] if len(args) > 2 else ()
    return made(bytes_of(args[0]) if len(dims) > 1 else 0, first=copied(args[0]))


# -- pictures


def _rolled_out(args: Any, gpu: Gpu) -> Extra | None:
    """`unfold`: the picture is copied in any case."""
    return made(copied(args[0]), first=bytes_of(args[0]))


def _rolled_up(args: Any, gpu: Gpu) -> Extra:
    """`fold`: the picture stays in the memory of all its patches."""
    again = copied(args[0])
    return Extra((again,) if again else (), outputs={0: bytes_of(args[0])})


def _adaptive_max(args: Any, gpu: Gpu) -> Extra | None:
    """Results that are channels last are made in order first: the values, and where they were."""
    tensor, kernel = args[:2]
    results = math.prod((*tensor.shape[:-2], *kernel)) if _permuted(tensor) else 0
    return made(results * tensor.element_size(), results * 8, copied(tensor))


def _adaptive_max_backward(args: Any, gpu: Gpu) -> Extra | None:
    again = bytes_of(args[1]) if _permuted(args[1]) else 0
    return made(copied(args[0]), copied(args[2]), again)


# -- distances


def _distance(args: Any, gpu: Gpu) -> Extra:
    """Both sides with two columns more: their squares, and ones."""
    wider = (one.numel() // max(one.shape[-1], 1) * (one.shape[-1] + 2) for one in args[:2])
    return Extra(tuple(count * args[0].element_size() for count in wider))


def counted(tensor: Tensor) -> tuple[int, ...]:
    """The copy in int64 that a sum of yes and no, or of small whole numbers, makes first."""
    dtype = tensor.dtype
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return (8 * tensor.numel(),) if whole and dtype is not torch.int64 else ()


# -- reductions


def reduction_bytes(
    outputs: int, inputs: int, *, on_fastest: bool, whole: bool, gpu: Gpu, aligned: int = 1
) -> int:
    """The staging buffer of a reduction over thread blocks (aten/src/ATen/native/cuda/Reduce.cuh).

    `inputs` values go into each of `outputs` results; `on_fastest` says that neighbours in memory are
    summed, `whole` that all is summed into one; `aligned` is the number of results that one thread may take.
    """
    vector = 1
    if on_fastest:
        width, height = inputs, outputs
        if whole and width > 128:
            width //= 4
    else:
        vector = aligned
        width, height = outputs // vector, inputs
    most = 512 // vector
    wide = _power(width, most)
    high = _power(height, most)
    block_width = min(wide, 32)
    block_height = min(high, most // block_width)
    block_width = min(wide, most // block_height)
    step_input = step_output = 1
    if on_fastest:
        step_input *= block_width
    else:
        step_output *= block_width
    values = -(-inputs // step_input)
    split_over_height = values >= block_height * 16 or values >= 256
    if split_over_height:
        step_input *= block_height
    else:
        step_output *= block_height
    values = -(-inputs // step_input)
    target = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (block_width * block_height))
    grid = -(-(outputs // vector) // step_output)
    if not split_over_height or values < 256 or grid > target:
        return 0
    blocks = max(min(-(-target // grid), -(-values // 16)), -(-values // 256))
    if blocks <= 1:
        return 0
    size = FP32_BYTES * outputs * blocks
    return size if on_fastest else size * block_width * vector


def _power(value: int, most: int) -> int:
    return most if value >= most else 1 << max(value.bit_length() - 1, 0)


def reduced(tensor: Tensor, dims: Any, gpu: Gpu) -> int:
    rank = tensor.dim()
    if rank == 0:
        return 0
    over = {d % rank for d in dims} if dims else set(range(rank))
    inputs = math.prod(tensor.shape[d] for d in over)
    outputs = tensor.numel() // max(inputs, 1)
    if inputs <= 1 or outputs == 0:
        return 0
    strides = [(tensor.stride(d), d in over) for d in range(rank) if tensor.shape[d] > 1]
    least = min(strides, default=(1, True))
    kept = [tensor.shape[d] for d in range(rank) if d not in over and tensor.shape[d] > 1]
    whole = not kept
    on_fastest = whole or least[1]
    aligned = _results_per_thread(kept[-1] if kept else 1) if least[0] == 1 else 1
    return reduction_bytes(outputs, inputs, on_fastest=on_fastest, whole=whole, gpu=gpu, aligned=aligned)


def _sum(args: Any, gpu: Gpu) -> Extra | None:
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
    return Extra((*counted(args[0]), reduced(args[0], dims, gpu)))


def _vector_norm(args: Any, gpu: Gpu) -> Extra | None:
    dims = args[2] if len(args) > 2 and isinstance(args[2], list | tuple) else None
    return Extra((reduced(args[0], dims, gpu),))


def _results_per_thread(count: int) -> int:
    return 4 if count % 4 == 0 else 2 if count % 2 == 0 else 1


def summed_rows(rows: int, columns: int, gpu: Gpu) -> int:
    """The staging buffer of a sum over the rows of a matrix."""
    aligned = _results_per_thread(columns)
    return reduction_bytes(columns, rows, on_fastest=False, whole=False, gpu=gpu, aligned=aligned)


in_order = partial(_copies, copied)
in_a_layout = partial(_copies, _laid_out)
product = partial(_copies, _readable)

RULES: dict[Any, Rule] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _sum,
    aten.mean.default: _sum,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mm.default: product(0, 1),
    aten.addmm.default: product(1, 2),
    aten._addmm_activation.default: product(1, 2),
    aten.bmm.default: product(0, 1),
    aten.baddbmm.default: product(1, 2),
    aten._softmax.default: in_order(0),
    aten._log_softmax.default: in_order(0),
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: in_order(0, 1),
    aten._safe_softmax.default: _safe_softmax,
    aten.logsumexp.default: _once,
    aten.native_layer_norm.default: in_order(0),
    aten.native_layer_norm_backward.default: in_order(0, 1),
    aten.cumsum.default: in_order(0),
    aten._fft_r2c.default: in_order(0),
    aten.topk.default: in_order(0),
    aten.roll.default: _roll,
    aten.index_put.default: _index_put,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.mse_loss.default: loss(2, held=1, kept=True),
    aten.smooth_l1_loss.default: loss(2, held=1, kept=True),
    aten.huber_loss.default: loss(2, held=1),
    aten.soft_margin_loss.default: loss(2, kept=True),
    aten.soft_margin_loss_backward.default: _twice,
    aten.binary_cross_entropy.default: loss(3, kept=True),
    aten.binary_cross_entropy_with_logits.default: loss(4, held=2),
    aten.nll_loss_forward.default: in_order(0),
    aten.nll_loss_backward.default: in_order(1),
    aten.nll_loss2d_forward.default: in_order(0),
    aten.multi_margin_loss.default: in_order(0),
    aten.multi_margin_loss_backward.default: in_order(1),
    aten._euclidean_dist.default: _distance,
    aten.im2col.default: _rolled_out,
    aten.col2im.default: _rolled_up,
    aten._adaptive_avg_pool2d.default: in_a_layout(early=0),
    aten._adaptive_avg_pool2d_backward.default: in_a_layout(0),
    aten.adaptive_max_pool2d.default: _adaptive_max,
    aten.adaptive_max_pool2d_backward.default: _adaptive_max_backward,
    aten.avg_pool2d.default: in_a_layout(0),
    aten.avg_pool2d_backward.default: in_a_layout(1, 0),
    aten.max_pool2d_with_indices.default: in_a_layout(0),
    aten.max_pool2d_with_indices_backward.default: in_a_layout(1, 0),
    aten.upsample_nearest2d.default: in_a_layout(0),
    aten.upsample_nearest2d_backward.default: in_a_layout(0),
    aten.upsample_bilinear2d_backward.default: in_a_layout(0),
    aten.upsample_bicubic2d_backward.default: in_order(0),
    aten.upsample_linear1d_backward.default: in_order(0),
    aten.reflection_pad2d.default: in_order(0),
    aten.reflection_pad2d_backward.default: in_order(0),
}
if hasattr(aten, "_fused_rms_norm_backward"):  # torch 2.9 and later
    RULES[aten._fused_rms_norm.default] = in_order(early=0)
    RULES[aten._fused_rms_norm_backward.default] = in_order(0, early=1)

# The same calls as others that were seen, or copies in torch's source that the survey did not reach.
BY_SOURCE = {
    aten.addmm.default,
    aten._addmm_activation.default,
    aten.baddbmm.default,
    aten.nll_loss2d_forward.default,
    aten._safe_softmax.default,
}
