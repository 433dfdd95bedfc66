"""What CUDA would do with an operation, for a trace on a machine that has no GPU.

Rules:
- With a GPU the traced device is a fake `cuda` and torch itself makes CUDA's choices; nothing here acts.
- Without one it is a second fake CPU (`cpu:1`), distinct from the host, and CUDA's choices are put in:
  attention back-ends by the rules of the target GPU, fused dropout, cuDNN's LSTM, autocast's lists.
- Every replacement is registered for the time of a trace, for tensors of the traced device only.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.autocast import cuda_lists

aten: Any = torch.ops.aten


@final
@dataclass(frozen=True, slots=True)
class CudaRules:
    """The device that a trace takes place on, and the GPU that it stands for."""

    gpu: Gpu
    device: torch.device

    @property
    def host_means_device(self) -> bool:
        """Without a GPU the program's own tensors are on the CPU, which stands for the GPU."""
        return self.device.type == "cpu"

    @property
    def autograd_key(self) -> str:
        """Where torch's dispatcher is given another way through an operation, for the time of a trace."""
        return "AutogradCPU" if self.host_means_device else "AutogradCUDA"

    def renamed(self, device: Any) -> Any:
        """The traced device for "cuda", anything else as it is."""
        if device is None or not self.host_means_device:
            return device
        return self.device if torch.device(device).type == "cuda" else device

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, operations on the traced device are CUDA's."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        kernels: dict[str, Any] = {f"{name}.input": self._recurrent(name) for name in _RECURRENT}
        kernels |= {f"{name}.data": self._recurrent_packed(name) for name in _RECURRENT}
        kernels |= {"ctc_loss.Tensor": _ctc_loss, "ctc_loss.IntList": _ctc_loss}
        if self.host_means_device:
            kernels |= {"scaled_dot_product_attention": self._attention, "dropout": self._dropout}
            kernels |= {"gru_cell": self._gru_cell, "lstm_cell": self._lstm_cell}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for name, kernel in kernels.items():
                    library.impl(name, kernel, self.autograd_key)
            with cuda_lists(self.device) if self.host_means_device else contextlib.nullcontext():
                yield
        finally:
            library._destroy()

    def composite(self, func: Any) -> Any:
        """CUDA's way through an operation that reaches the trace whole (in inference mode); None for most."""
        if func in _WHOLE:
            return self._recurrent(_WHOLE[func])
        if func in _WHOLE_PACKED:
            return self._recurrent_packed(_WHOLE_PACKED[func])
        if not self.host_means_device:
            return None
        return {
            aten.scaled_dot_product_attention.default: self._attention,
            aten.dropout.default: self._dropout,
            aten.gru_cell.default: self._gru_cell,
            aten.lstm_cell.default: self._lstm_cell,
        }.get(func)

    def _here(self, *tensors: Any) -> bool:
        return any(isinstance(one, FakeTensor) and one.fake_device == self.device for one in tensors)

    def _dropout(self, value: Tensor, p: float, train: bool) -> Any:
        if not train or p == 0 or not value.numel():
            return value  # nothing is dropped, and nothing copied
        if self._here(value) and p < 1:
            return aten.native_dropout.default(value, p, True)[0]
        return aten.dropout.default.decompose(value, p, train)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if not self._here(query, key, value):
            return aten.scaled_dot_product_attention.default.decompose(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        mask = _additive(attn_mask, query.dtype)
        backend = self._backend(query, key, value, mask, enable_gqa)
        if backend == "cudnn":
            return aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "flash":
            return aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "efficient":
            mask = _padded(mask, query, key)
            return aten._scaled_dot_product_efficient_attention.default(
                query, key, value, mask, needs, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]

    def _backend(self, query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> str:
        """Which kernel torch takes on the GPU (sdp_utils.cpp), as far as they differ in memory."""
        cuda: Any = torch.backends.cuda
        low = query.dtype in (torch.float16, torch.bfloat16)
        head = query.shape[-1]
        # Neither kernel reads a mask or a head whose neighbours are not side by side (T5's position bias).
        apart = any(one is not None and one.stride(-1) != 1 for one in (query, key, value, mask))
        if query.dim() != 4 or apart:
            return "math"
        learns = mask is not None and mask.requires_grad and torch.is_grad_enabled()
        small = head % 8 == 0 and max(head, value.shape[-1]) <= 128
        if self.gpu.prefers_cudnn_attention and cuda.cudnn_sdp_enabled() and low and small and not learns:
            return "cudnn"
        if (
            self.gpu.capability >= (8, 0)
            and cuda.flash_sdp_enabled()
            and low
            and mask is None
            and head <= 256
            and head == value.shape[-1]
        ):
            return "flash"
        grouped = grouped and query.shape[1] != key.shape[1]
        takes = cuda.mem_efficient_sdp_enabled() and not grouped and self._efficient(query, key, value)
        return "efficient" if takes else "math"

    def _efficient(self, query: Any, key: Any, value: Any) -> bool:
        """The kernel's dtypes, and heads of whole vectors (minimum_gemm_alignment)."""
        ampere = self.gpu.capability >= (8, 0)
        kinds = (torch.float16, torch.float32, *((torch.bfloat16,) if ampere else ()))
        step = 8 if query.dtype is not torch.float32 else 4 if ampere else 1
        same = query.shape[-1] == key.shape[-1]
        return query.dtype in kinds and same and query.shape[-1] % step == 0 and value.shape[-1] % step == 0

    def _recurrent(self, name: str) -> Any:
        """cuDNN's recurrent layer of that name.

        With a GPU too: on its own way there torch keeps a random state for dropout in a place of its own,
        and would keep a fake one.
        """
        operation = getattr(aten, name).input

        def kernel(value: Tensor, hx: Any, params: Any, *options: Any, **named: Any) -> Any:
            if not self._here(value, *params):
                return operation.decompose(value, hx, params, *options, **named)
            batch_first = options[-1]
            turned = value.transpose(0, 1) if batch_first else value
            first, *states = self._cudnn_rnn(name, turned, hx, params, *options[:-1], batch_sizes=[])
            return (first.transpose(0, 1) if batch_first else first, *states)

        return kernel

    def _recurrent_packed(self, name: str) -> Any:
        """The same for a packed sequence, whose `batch_sizes` are on the host."""
        operation = getattr(aten, name).data

        def kernel(value: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *options: Any) -> Any:
            if not self._here(value, *params) or isinstance(batch_sizes, FakeTensor):
                return operation.decompose(value, batch_sizes, hx, params, *options)
            sizes = batch_sizes.tolist()
            return self._cudnn_rnn(name, value, hx, params, *options, batch_sizes=sizes)

        return kernel

    def _gru_cell(
        self, value: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        """One step by itself: what comes after the products is one kernel."""
        if not self._here(value, hx, w_ih):
            return aten.gru_cell.default.decompose(value, hx, w_ih, w_hh, b_ih, b_hh)
        gates = value @ w_ih.t(), hx @ w_hh.t()
        return aten._thnn_fused_gru_cell.default(*gates, hx, b_ih, b_hh)[0]

    def _lstm_cell(
        self, value: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None
    ) -> Any:
        if not self._here(value, *hx, w_ih):
            return aten.lstm_cell.default.decompose(value, hx, w_ih, w_hh, b_ih, b_hh)
        gates = value @ w_ih.t(), hx[0] @ w_hh.t()
        return aten._thnn_fused_lstm_cell.default(*gates, hx[1], b_ih, b_hh)[:2]

    def _cudnn_rnn(
        self,
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
        kind = self.device.type
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
                _RECURRENT[name],
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


# The numbers by which cuDNN knows the kinds of recurrent layers.
_RECURRENT = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_WHOLE = {getattr(aten, name).input: name for name in _RECURRENT}
_WHOLE_PACKED = {getattr(aten, name).data: name for name in _RECURRENT}


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as the numbers that torch adds to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    hidden = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


def _padded(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask as the kernel wants it: rows of a multiple of eight, one for every head of every sample."""
    if mask is None:
        return None
    columns = mask.shape[-1]
    if columns % 8:
        mask = torch.nn.functional.pad(mask, (0, 8 - columns % 8))[..., :columns]
    return mask.expand(*query.shape[:-1], key.shape[-2])


def _grouped_mm(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups of rows, one group an expert: the fake kernel takes bf16 only, CUDA fp32 too."""
    dtype = out_dtype or first.dtype
    groups = 0 if offs is None else offs.shape[0]
    if first.dim() == 2 and second.dim() == 2:
        return first.new_empty((groups, first.shape[0], second.shape[1]), dtype=dtype)
    if first.dim() == 2:
        return first.new_empty((first.shape[0], second.shape[-1]), dtype=dtype)
    if second.dim() == 2:
        return first.new_empty((first.shape[1], second.shape[1]), dtype=dtype)
    return first.new_empty((first.shape[0], first.shape[1], second.shape[-1]), dtype=dtype)


def _rnn_backward(value: Tensor, weight: list[Tensor], *rest: Any, **_: Any) -> Any:
    """cuDNN's gradients have the shapes of what they are gradients of; torch has no fake kernel for them."""
    hx, cx = rest[2], rest[3]
    made = [None if one is None else torch.empty_like(one) for one in (value, hx, cx)]
    flat: Any = value.new_empty(sum(one.numel() for one in weight))
    parts = flat.split([one.numel() for one in weight])
    return *made, [part.view(one.shape) for part, one in zip(parts, weight, strict=True)]


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


def _ctc_loss(
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


def _ctc_table(log_probs: Tensor, _: Tensor, __: Any, target_lengths: Any, *___: Any) -> Any:
    """The losses, and the probabilities of being at each place of a text at each time."""
    times, samples = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    places = 2 * max(target_lengths, default=0) + 1
    losses = log_probs.new_empty(samples if log_probs.dim() == 3 else ())
    return losses, log_probs.new_empty((samples, times, places))


def _ctc_backward(_: Tensor, log_probs: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _gru_cell(_: Tensor, __: Tensor, hx: Tensor, *___: Any) -> Any:
    return torch.empty_like(hx), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(grad: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    wide = workspace.shape[1] // 5 * 3
    gates = [grad.new_empty((grad.shape[0], wide)) for _ in range(2)]
    biases = [grad.new_empty((wide,)) if has_bias else None for _ in range(2)]
    return *gates, torch.empty_like(grad), *biases


def _lstm_cell(gates: Tensor, _: Tensor, cx: Tensor, *__: Any) -> Any:
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(gates)


def _lstm_cell_backward(_: Any, __: Any, cx: Tensor, ___: Tensor, workspace: Tensor, has_bias: bool) -> Any:
    bias = workspace.new_empty((workspace.shape[1],)) if has_bias else None
    return torch.empty_like(workspace), torch.empty_like(cx), bias


# Where torch's fake kernel is missing, or stricter than CUDA's.
STAND_INS: dict[Any, Any] = {
    aten._cudnn_rnn_backward.default: _rnn_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
    aten._ctc_loss.default: _ctc_table,
    aten._ctc_loss_backward.default: _ctc_backward,
}
if hasattr(aten, "_grouped_mm"):
    STAND_INS[aten._grouped_mm.default] = _grouped_mm
