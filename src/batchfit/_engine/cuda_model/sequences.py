"""Recurrent layers and CTC on CUDA: the kernels that cuDNN runs, and their workspaces.

With a GPU too: on its own way there torch keeps a random state for dropout in a place of its own, and would
keep a fake one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.workspaces import Extra, Rule, summed_rows
from batchfit._engine.device.tensors import bytes_of
from batchfit._engine.torch_private.fake import FakeTensor

if TYPE_CHECKING:
    from batchfit._engine.cuda_model.dispatch import CudaRules

aten: Any = torch.ops.aten
# The numbers by which cuDNN knows the kinds of recurrent layers.
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}


# -- the ways; the traced device comes first


def _layer(name: str) -> Callable[..., Any]:
    """cuDNN's recurrent layer of that name."""
    operation = getattr(aten, name).input

    def kernel(rules: CudaRules, value: Tensor, hx: Any, params: Any, *options: Any, **named: Any) -> Any:
        if not rules.has(value, *params):
            return operation.decompose(value, hx, params, *options, **named)
        batch_first = options[-1]
        turned = value.transpose(0, 1) if batch_first else value
        first, *states = _cudnn_rnn(rules, name, turned, hx, params, *options[:-1], batch_sizes=[])
        return (first.transpose(0, 1) if batch_first else first, *states)

    return kernel


def _packed_layer(name: str) -> Callable[..., Any]:
    """The same for a packed sequence, whose `batch_sizes` are on the host."""
    operation = getattr(aten, name).data

    def kernel(
        rules: CudaRules, value: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *options: Any
    ) -> Any:
        if not rules.has(value, *params) or isinstance(batch_sizes, FakeTensor):
            return operation.decompose(value, batch_sizes, hx, params, *options)
        sizes = batch_sizes.tolist()
        return _cudnn_rnn(rules, name, value, hx, params, *options, batch_sizes=sizes)

    return kernel


def _cudnn_rnn(
    rules: CudaRules,
    name: str,
    value: Tensor,
    hx: Any,
    params: Any,
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *,
    batch_sizes: list[int],
) -> Any:
    hidden, cell = hx if name == "lstm" else (hx, None)
    kind = rules.device.type
    if torch.is_autocast_enabled(kind):
        # Under autocast these go to fp16 whatever its dtype, the weights in one buffer.
        value, hidden = value.to(torch.float16), hidden.to(torch.float16)
        cell = None if cell is None else cell.to(torch.float16)
        flat = value.new_zeros(sum(one.numel() for one in params))
        params = [one.to(torch.float16) for one in params]
    else:
        flat = value.new_empty(0)
    with torch.autocast(kind, enabled=False):
        out = aten._cudnn_rnn.default(
            value,
            list(params),
            4 if has_biases else 2,
            flat,
            hidden,
            cell,
            _MODES[name],
            hidden.shape[-1],
            0,
            layers,
            False,
            dropout,
            train,
            bidirectional,
            batch_sizes,
            None,
        )
    return out[:3] if name == "lstm" else out[:2]


def _gru_cell(
    rules: CudaRules,
    value: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Any = None,
    b_hh: Any = None,
) -> Any:
    """One step by itself: what comes after the products is one kernel."""
    if not rules.has(value, hx, w_ih):
        return aten.gru_cell.default.decompose(value, hx, w_ih, w_hh, b_ih, b_hh)
    gates = value @ w_ih.t(), hx @ w_hh.t()
    return aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]


def _lstm_cell(
    rules: CudaRules, value: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
) -> Any:
    if not rules.has(value, *hx, w_ih):
        return aten.lstm_cell.default.decompose(value, hx, w_ih, w_hh, b_ih, b_hh)
    gates = value @ w_ih.t(), hx[0] @ w_hh.t()
    return aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)[:2]


def _ctc_loss(
    _: CudaRules,
    log_probs: Tensor,
    targets: Tensor,
    lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """With lengths on the host, as CUDA reads them there."""
    if isinstance(lengths, FakeTensor) or isinstance(target_lengths, FakeTensor):
        options = (blank, reduction, zero_infinity)
        return aten.ctc_loss.Tensor.decompose(log_probs, targets, lengths, target_lengths, *options)
    known = [one.tolist() if isinstance(one, Tensor) else list(one) for one in (lengths, target_lengths)]
    losses = aten._ctc_loss.default(log_probs, targets, *known, blank, zero_infinity)[0]
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == 1:
        return (losses / torch.clamp_min(torch.empty_like(losses), 1)).mean()
    return losses.sum() if reduction == 2 else losses


LAYERS = {f"{name}.input": _layer(name) for name in _MODES} | {
    f"{name}.data": _packed_layer(name) for name in _MODES
}
CELLS = {"gru_cell": _gru_cell, "lstm_cell": _lstm_cell}
LOSSES = {"ctc_loss.Tensor": _ctc_loss, "ctc_loss.IntList": _ctc_loss}


def packed(value: Tensor, lengths: list[int], batch_first: bool) -> tuple[Tensor, list[int]]:
    """A padded batch, step after step, as torch packs it; and how many samples there are at each step."""
    turned = value.transpose(0, 1) if batch_first else value
    parts: list[Tensor] = []
    sizes: list[int] = []
    done = 0
    for count, length in zip(range(turned.shape[1], 0, -1), reversed(lengths), strict=True):
        if length > done:
            parts.append(turned[done:length, :count].contiguous().view(-1, *turned.shape[2:]))
            sizes += [count] * (length - done)
            done = length
    return torch.cat(parts), sizes


# -- where torch's fake kernel is missing


def _rnn_gradients(value: Tensor, weight: list[Tensor], *rest: Any, **_: Any) -> Any:
    """cuDNN's gradients have the shapes of what they are gradients of; torch has no fake kernel for them."""
    hx, cx = rest[2], rest[3]
    made = [None if one is None else torch.empty_like(one) for one in (value, hx, cx)]
    flat: Any = value.new_empty(sum(one.numel() for one in weight))
    parts = flat.split([one.numel() for one in weight])
    return *made, [part.view(one.shape) for part, one in zip(parts, weight, strict=True)]


def _ctc_results(log_probs: Tensor, _: Tensor, __: Any, target_lengths: Any, *___: Any) -> Any:
    """The losses, and the probabilities of being at each place of a text at each time."""
    times, samples = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    places = 2 * max(target_lengths, default=0) + 1
    losses = log_probs.new_empty(samples if log_probs.dim() == 3 else ())
    return losses, log_probs.new_empty((samples, times, places))


def _ctc_gradient(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _gru_cell_results(_: Tensor, __: Tensor, hx: Tensor, *___: Any) -> Any:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_gradients(grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    wide = workspace.shape[1] // 5 * 3
    gates = [grad.new_empty((grad.shape[0], wide)) for _ in range(2)]
    biases = [grad.new_empty((wide,)) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def _lstm_cell_results(gates: Tensor, _: Tensor, cx: Tensor, *__: Any) -> Any:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


def _lstm_cell_gradients(_: Any, __: Any, cx: Tensor, ___: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    bias = workspace.new_empty((workspace.shape[1],)) if has_bias else None
    return torch.empty_like(workspace), torch.empty_like(cx), bias


STAND_INS: dict[Any, Any] = {
    aten._cudnn_rnn_backward.default: _rnn_gradients,
    aten._thnn_fused_gru_cell.default: _gru_cell_results,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_gradients,
    aten._thnn_fused_lstm_cell.default: _lstm_cell_results,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_gradients,
    aten._ctc_loss.default: _ctc_results,
    aten._ctc_loss_backward.default: _ctc_gradient,
}


# -- workspaces


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
_TAKEN = {
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
    kind, ways = _TAKEN[mode, bool(batch_sizes)], 2 if both else 1
    tokens = tensor.numel() // tensor.shape[-1]
    units = tokens * hidden * ways
    values = kind.unit * units + kind.given * tensor.numel() + kind.state * hx.numel()
    values += kind.both_ways * units if both else 0
    values += units if dropout and train and layers > 1 and not both else 0
    fixed: int = layers * ways * (8 << 20)
    return sum(bytes_of(one) for one in weights) + int(values) * tensor.element_size() + fixed


def _rnn(args: Any, gpu: Gpu) -> Extra:
    """cuDNN's recurrent layers: gates and cells of each layer are kept, dropout between layers too."""
    tensor, weights, hx, options = args[0], args[1], args[4], args[6:15]
    mode, hidden, _, layers, _, dropout, train, both, batch_sizes = options
    ways, tokens = 2 if both else 1, tensor.numel() // tensor.shape[-1]
    per_unit = _TAKEN[mode, bool(batch_sizes)].kept * layers + layers - 1
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
    takes = summed_rows(workspace.shape[0], workspace.shape[1] // 5 * 3, gpu) if has_bias else 0
    return Extra(after={3: takes, 4: takes})


def _lstm_cell_backward(args: Any, gpu: Gpu) -> Extra:
    workspace, has_bias = args[4], args[5]
    takes = summed_rows(workspace.shape[0], workspace.shape[1], gpu) if has_bias else 0
    return Extra(after={2: takes})


def _ctc_backward(args: Any, gpu: Gpu) -> Extra:
    """The probabilities from the other end, of the same shape as those from the beginning."""
    return Extra(before={0: bytes_of(args[6])})


RULES: dict[Any, Rule] = {
    aten._cudnn_rnn.default: _rnn,
    aten._cudnn_rnn_backward.default: _rnn_backward,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._ctc_loss_backward.default: _ctc_backward,
}
