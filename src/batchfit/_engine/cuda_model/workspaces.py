"""What CUDA's kernels take for themselves: memory that an operation allocates and frees inside.

A fake run of an operation shows its results only. The temporaries below were read off allocation histories
of an H200 (torch 2.11, `benchmarks/prediction_gpu.py history`), each next to the rule in torch's source or in
cuDNN's choice that explains it. cuDNN's convolutions choose by heuristics of their own: what is here is the
common case, the copies into its own layout.

Rules: bytes only, as a function of shapes, strides and the GPU; an operation that is not here takes
nothing. What a kernel keeps for good (cuBLAS) is separate from what it releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.copies import RULES as COPIES
from batchfit._engine.cuda_model.copies import Extra, copied, counted, expanded
from batchfit._engine.device.tensors import bytes_of as _bytes

aten = torch.ops.aten
_FP32 = 4
_LOW = (torch.float16, torch.bfloat16)


def extra_rule(func: Any) -> Callable[[Any, Gpu], Extra | None] | None:
    """What says, from arguments and GPU, what an operation takes beside its results; None for most."""
    return _RULES.get(func)


def extra_of(func: Any, args: Any, gpu: Gpu) -> Extra | None:
    """What an operation takes beside its results; None for most."""
    rule = extra_rule(func)
    return None if rule is None else rule(args, gpu)


def is_gemm(func: Any) -> bool:
    """Whether cuBLAS does this, which keeps a workspace for each thread that uses it."""
    return func in _GEMMS


_GEMMS = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._addmm_activation.default,
    }
)


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
    size = _FP32 * outputs * blocks
    return size if on_fastest else size * block_width * vector


def _power(value: int, most: int) -> int:
    return most if value >= most else 1 << max(value.bit_length() - 1, 0)


def _reduced(tensor: Tensor, dims: Any, gpu: Gpu) -> int:
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
    last = kept[-1] if kept else 1
    aligned = 4 if last % 4 == 0 else 2 if last % 2 == 0 else 1
    if least[0] != 1:
        aligned = 1
    return reduction_bytes(outputs, inputs, on_fastest=on_fastest, whole=whole, gpu=gpu, aligned=aligned)


def _sum(args: Any, gpu: Gpu) -> Extra | None:
    dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else None
    return Extra((*counted(args[0]), _reduced(args[0], dims, gpu)))


def _vector_norm(args: Any, gpu: Gpu) -> Extra | None:
    dims = args[2] if len(args) > 2 and isinstance(args[2], list | tuple) else None
    return Extra((_reduced(args[0], dims, gpu),))


# -- attention


def _cudnn_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * length
    size = rows * width * _FP32 + rows * _FP32 + 256  # the query's gradient in fp32, and row sums
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * key.element_size()
    return Extra((*expanded(args[0]), size))


def _efficient_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, mask = args[1], args[4]
    batch, heads, length, width = query.shape
    blocks = -(-length // 64)
    wide = -(-width // 64) * 64
    rows = batch * heads * length
    found = [batch * heads * (blocks * 64 * wide * _FP32 + blocks * 16), rows * _FP32]
    if query.dtype not in _LOW:
        found.append(query.numel() * _FP32)  # gradient times output
    outputs = {}
    if mask is not None and mask.shape[-1] % 8:
        columns = -(-mask.shape[-1] // 64) * 64
        outputs[3] = rows * columns * query.element_size()
    return Extra(tuple(found), outputs=outputs)


def _flash_attention_backward(args: Any, gpu: Gpu) -> Extra:
    query, key = args[1], args[2]
    batch, heads, length, width = query.shape
    rows = batch * heads * (-(-length // 128) * 128)
    size = [rows * (-(-width // 32) * 32) * _FP32, rows * _FP32]
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
        padded = -(-channels // 8) * 8 if overlap and tensor.dtype in _LOW else channels
        return in_bytes // channels * padded + out_bytes + _bytes(weight)
    # A product of matrices, done in place where the pictures are large enough for that.
    in_place = all(step == 1 for step in stride) and math.prod(tensor.shape[2:]) > 196
    return 0 if in_place else in_bytes + out_bytes


def _convolution(args: Any, gpu: Gpu) -> Extra | None:
    tensor, weight, _, stride, padding, dilation, transposed, output_padding, groups = args[:9]
    layout = _layout(tensor, weight)
    if transposed:
        length = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for n, s, p, d, k, o in zip(
                tensor.shape[2:], stride, padding, dilation, weight.shape[2:], output_padding, strict=False
            )
        ]
        channels = weight.shape[1] * groups
    else:
        length = [
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, s, p, d, k in zip(
                tensor.shape[2:], stride, padding, dilation, weight.shape[2:], strict=False
            )
        ]
        channels = weight.shape[0]
    out_bytes = tensor.shape[0] * channels * math.prod(length) * tensor.element_size()
    plan = _plan(_bytes(tensor), out_bytes, tensor, weight, stride, groups)
    return Extra((copied(tensor, layout), copied(weight, layout)), plans={0: plan})


def _convolution_backward(args: Any, gpu: Gpu) -> Extra | None:
    gradient, tensor, weight, _, stride = args[:5]
    groups, wanted = args[9], args[10]
    layout = _layout(tensor, weight)
    plan = _plan(_bytes(tensor), _bytes(gradient), tensor, weight, stride, groups)
    plans = {index: plan for index in (0, 1) if wanted[index]}
    after = {2: _reduced(gradient, [0, *range(2, gradient.dim())], gpu)} if wanted[2] else {}
    return Extra((copied(gradient, layout), copied(tensor, layout)), after, plans)


# -- recurrent layers


class _Recurrent(NamedTuple):
    """What cuDNN takes for a kind of recurrent layers.

    `kept` is exact, in values for each unit (a token's hidden width) of a layer. The rest, of the workspace,
    was fitted to 232 layers of one to three in both directions and two types, and is off by up to a tenth of
    it: values for each unit, for each input, for each unit more in two directions, for each sample's state.
    """

    kept: int
    unit: float
    given: float
    both_ways: float
    state: float


# By cuDNN's number of the kind, and whether the sequence is packed.
_RNN = _Recurrent(1, 11.6, 3.6, -2.5, 18)
_RNN_PACKED = _Recurrent(1, 1.4, 0.6, 2.2, 2)
_RECURRENT = {
    (0, False): _RNN,
    (0, True): _RNN_PACKED,
    (1, False): _RNN,
    (1, True): _RNN_PACKED,
    (2, False): _Recurrent(5, 4.6, 1.8, 2.2, 10),
    (2, True): _Recurrent(5, 3.9, 0, 2.2, 7),
    (3, False): _Recurrent(6, 3.6, 2.5, 2.6, 3),
    (3, True): _Recurrent(6, 2.9, 0, 2.2, 3.8),
}


def _rnn_workspace(tensor: Tensor, weights: Any, hx: Tensor, options: Any) -> int:
    """Gates of all steps, and the weights in cuDNN's own order."""
    mode, hidden, _, layers, _, dropout, train, both, batch_sizes = options
    kind, ways = _RECURRENT[mode, bool(batch_sizes)], 2 if both else 1
    tokens = tensor.numel() // tensor.shape[-1]
    units = tokens * hidden * ways
    values = kind.unit * units + kind.given * tensor.numel() + kind.state * hx.numel()
    values += kind.both_ways * units if both else 0
    values += units if dropout and train and layers > 1 and not both else 0
    fixed: int = layers * ways * (8 << 20)
    return sum(_bytes(one) for one in weights) + int(values) * tensor.element_size() + fixed


def _rnn(args: Any, gpu: Gpu) -> Extra:
    """cuDNN's recurrent layers: gates and cells of each layer are kept, dropout between layers too."""
    tensor, weights, hx, options = args[0], args[1], args[4], args[6:15]
    mode, hidden, _, layers, _, dropout, train, both, batch_sizes = options
    ways, tokens = 2 if both else 1, tensor.numel() // tensor.shape[-1]
    per_unit = _RECURRENT[mode, bool(batch_sizes)].kept * layers + layers - 1
    kept = tokens * hidden * ways * per_unit * tensor.element_size()
    if dropout and train:
        kept += (layers - 1) * tokens * hidden * ways * ways // 8 + (128 << 10)  # a bit each
    return Extra(before={3: _rnn_workspace(tensor, weights, hx, options)}, outputs={3: kept})


def _rnn_backward(args: Any, gpu: Gpu) -> Extra:
    """First the gradients of the data, then, in one buffer, those of the weights: a workspace for each."""
    size = _rnn_workspace(args[0], args[1], args[4], args[10:19])
    return Extra(after={2: size, 3: size})


def _gru_cell_backward(args: Any, gpu: Gpu) -> Extra:
    """A cell by itself sums the gradients of its gates up for the biases, inside the operation."""
    workspace, has_bias = args[1], args[2]
    takes = _summed_rows(workspace.shape[0], workspace.shape[1] // 5 * 3, gpu) if has_bias else 0
    return Extra(after={3: takes, 4: takes})


def _lstm_cell_backward(args: Any, gpu: Gpu) -> Extra:
    workspace, has_bias = args[4], args[5]
    takes = _summed_rows(workspace.shape[0], workspace.shape[1], gpu) if has_bias else 0
    return Extra(after={2: takes})


def _summed_rows(rows: int, columns: int, gpu: Gpu) -> int:
    aligned = 4 if columns % 4 == 0 else 2 if columns % 2 == 0 else 1
    return reduction_bytes(columns, rows, on_fastest=False, whole=False, gpu=gpu, aligned=aligned)


def _ctc_backward(args: Any, gpu: Gpu) -> Extra:
    """The probabilities from the other end, of the same shape as those from the beginning."""
    return Extra(before={0: _bytes(args[6])})


_RULES: dict[Any, Callable[[Any, Gpu], Extra | None]] = {
    **COPIES,
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _sum,
    aten.mean.default: _sum,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten._cudnn_rnn.default: _rnn,
    aten._cudnn_rnn_backward.default: _rnn_backward,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._ctc_loss_backward.default: _ctc_backward,
}
