"""What CUDA would do with an operation, and in which dtype, for a trace on a machine that has no GPU.

Rules:
- With a GPU the traced device is a fake `cuda` and torch itself makes CUDA's choices; nothing here acts.
- Without one it is a second fake CPU (`cpu:1`), distinct from the host, and CUDA's choices are put in:
  attention back-ends by the rules of the target GPU, fused dropout, cuDNN's LSTM, autocast's lists.
- Every replacement is registered for the time of a trace, for tensors of the traced device only.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model import attention, collectives, quantised_kernels, sequences
from batchfit._engine.cuda_model.workspaces import LOW
from batchfit._engine.torch_private.autocast import region_of, set_region
from batchfit._engine.torch_private.autograd import is_view
from batchfit._engine.torch_private.dispatch import (
    cpu_autocast_keys,
    end_library,
    excluding,
    registered,
    schema_of,
)
from batchfit._engine.torch_private.fake import FakeTensor, device_of
from batchfit._engine.torch_private.replaced import replaced

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
        attention.efficient_takes_groups()  # now: a trace would see the operation that it runs
        losses = {name: partial(kernel, self) for name, kernel in sequences.LOSSES.items()}
        with (
            kernels_replaced(self._ways() | losses, self.autograd_key),
            cuda_autocast(self.device) if self.host_means_device else contextlib.nullcontext(),
            quantised_kernels.way_of_cuda() if "bitsandbytes" in sys.modules else contextlib.nullcontext(),
        ):
            yield

    def composite(self, func: Any) -> Any:
        """CUDA's way through an operation that reaches the trace whole (in inference mode); None for most."""
        return self._ways().get(func.name().removeprefix("aten::"))

    def _ways(self) -> dict[str, Any]:
        """CUDA's ways through operations that torch would take apart."""
        found = sequences.LAYERS | (sequences.CELLS if self.host_means_device else {})
        ways: dict[str, Any] = {name: partial(kernel, self) for name, kernel in found.items()}
        if self.host_means_device:
            ways |= {"scaled_dot_product_attention": self._attention, "dropout": self._dropout}
        return ways

    def has(self, *tensors: Any) -> bool:
        """Whether one of these is on the traced device."""
        return any(is_on(self.device, one) for one in tensors)

    def _dropout(self, value: Tensor, p: float, train: bool) -> Any:
        if not train or p == 0 or not value.numel():
            return value  # nothing is dropped, and nothing copied
        if self.has(value) and p < 1:
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
        if not self.has(query, key, value):
            return aten.scaled_dot_product_attention.default.decompose(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attention.is_one_sample(query, key, value):
            query, key, value = (one.unsqueeze(0) for one in (query, key, value))
            mask = attention.with_sample(attn_mask)
            return self._attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            ).squeeze(0)
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        mask = attention.additive(attn_mask, query.dtype)
        backend = attention.backend(self.gpu, query, key, value, mask, grouped=enable_gqa)
        if backend == "cudnn":
            return aten._scaled_dot_product_cudnn_attention.default(
                query, key, value, mask, needs, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "flash":
            return aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if backend == "efficient":
            mask = attention.padded(mask, query, key)
            return aten._scaled_dot_product_efficient_attention.default(
                query, key, value, mask, needs, dropout_p, is_causal, scale=scale
            )[0]
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]


def _grouped_mm(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Products of groups of rows, one group an expert: the fake kernel takes bf16 only, CUDA fp32 too."""
    rows: tuple[int, ...] = first.shape[:-1]
    if second.dim() == 2:
        rows = (0 if offs is None else len(offs), *rows) if first.dim() == 2 else rows[1:]
    return first.new_empty((*rows, second.shape[-1]), dtype=out_dtype or first.dtype)


# Where torch's fake kernel is missing, or stricter than CUDA's.
STAND_INS: dict[Any, Any] = {**sequences.STAND_INS, **collectives.stand_ins()}
if hasattr(aten, "_grouped_mm"):
    STAND_INS[aten._grouped_mm.default] = _grouped_mm


@contextlib.contextmanager
def kernels_replaced(kernels: Mapping[str, Any], key: str) -> Iterator[None]:
    """Inside, these stand for operations of aten, by name, where torch's dispatcher comes to `key`."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each says that a kernel is replaced, which is what we want
            for name, kernel in kernels.items():
                library.impl(name, kernel, key)
        yield
    finally:
        end_library(library)


def is_on(device: torch.device, value: Any) -> bool:
    """Whether it is a fake tensor on that device."""
    return isinstance(value, FakeTensor) and device_of(value) == device


# -- autocast


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# From torch's documentation of autocast, "CUDA Ops that can autocast to ...", as this torch registers them.
LOWER = _names(
    """
    _convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell
    _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d
    conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution
    cudnn_convolution cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot
    linear lstm_cell matmul mm mv prelu rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention
    """
)
FP32 = _names(
    """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d
    _upsample_nearest_exact2d _upsample_nearest_exact3d acos asin binary_cross_entropy_with_logits
    cdist cosh cosine_embedding_loss cosine_similarity dist erfinv exp expm1 frobenius_norm.dim
    group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm linalg_matrix_sqrth log log10
    log1p log2 logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
    native_layer_norm nll_loss nll_loss2d nuclear_norm nuclear_norm.dim pdist poisson_nll_loss
    pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh
    smooth_l1_loss soft_margin_loss softplus tan triplet_margin_loss upsample_bicubic2d
    upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d norm.Scalar norm.ScalarOpt_dim
    """
)
# These take the dtype of their result as an argument: fp32 unless the program says otherwise.
FP32_RESULT = _names(
    """
    cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int
    prod prod.dim_int softmax.int sum sum.dim_IntList
    """
)
WIDEST = _names(
    """
    addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot
    """
)
REFUSED = ("binary_cross_entropy",)


@contextlib.contextmanager
def cuda_autocast(device: torch.device) -> Iterator[None]:
    """Inside, autocast on the CPU follows CUDA's lists for fake tensors on `device`, and leaves others alone.

    torch.autocast("cuda") switches itself off where there is no GPU, and the CPU's lists differ from CUDA's
    (a loss in fp32 there is bf16 here, exp the other way round), which changes what a step keeps by tens of
    per cent. A test compares the lists with the operations for which this torch has a CUDA autocast kernel.
    """
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cache.clear()
        clear()

    made, entered = torch.autocast.__init__, torch.autocast.__enter__
    moved: list[tuple[Any, bool]] = []

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        made(self, device_type, dtype, *args, **kwargs)

    def enter(self: Any) -> Any:
        # Made before the trace, where torch switched it off for want of a GPU. One that was made with
        # enabled=False is the same but for its dtype: nobody names bfloat16 to have nothing.
        region = region_of(self)
        if region.device == "cuda":
            moved.append((self, region.enabled))
            meant = not torch.cuda.is_available() and region.dtype is torch.bfloat16
            set_region(self, device="cpu", enabled=region.enabled or meant)
        return entered(self)  # type: ignore[no-untyped-call]

    try:
        with (
            replaced(torch, "clear_autocast_cache", clear_both),
            replaced(torch.autocast, "__init__", on_cpu),
            replaced(torch.autocast, "__enter__", enter),
            kernels_replaced(_Caster(device, cache).kernels(), "AutocastCPU"),
        ):
            yield
    finally:
        for context, enabled in moved:
            set_region(context, device="cuda", enabled=enabled)
        cache.clear()


@final
class _Caster:
    """CUDA's autocast for tensors of the traced device."""

    def __init__(self, device: torch.device, cache: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._device = device
        self._cache = cache
        self._without = cpu_autocast_keys()

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernel of each operation that either list knows."""
        present = set(registered("AutocastCUDA"))
        makers: dict[tuple[str, ...], Callable[[Any], Callable[..., Any]]] = {
            LOWER: partial(self._casting, dtype_for=lambda _: torch.get_autocast_dtype("cpu")),
            FP32: partial(self._casting, dtype_for=lambda _: torch.float32),
            FP32_RESULT: self._fp32_result,
            WIDEST: partial(self._casting, dtype_for=self._widest),
        }
        table = {
            name: make(operation_of(name))
            for names, make in makers.items()
            for name in names
            if name in present
        }
        # What only the CPU's lists know runs as it is on CUDA.
        for name in registered("AutocastCPU"):
            table.setdefault(name, torch.library.fallthrough_kernel)
        return table

    def _eligible(self, value: Any) -> bool:
        # A real tensor is the host's, which stands for the GPU where it meets the GPU's tensors.
        return (
            isinstance(value, Tensor)
            and (not isinstance(value, FakeTensor) or is_on(self._device, value))
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )

    def _ours(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a tensor of the traced device is among the arguments."""
        return any(is_on(self._device, one) for one in _flat((*args, *kwargs.values())))

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(one, dtype) for one in value)
        if not self._eligible(value) or value.dtype is dtype:
            return value
        keeps = (
            dtype is not torch.float32
            and value.dtype is torch.float32
            and value.requires_grad
            and value.is_leaf
            and not is_view(value)
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        found = self._cache.get(id(value))
        if found is None:
            found = self._cache[id(value)] = (value, value.to(dtype))
        return found[1]

    def _outside(self) -> Any:
        return excluding(self._without)

    def _casting(self, operation: Any, dtype_for: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
        """The operation on arguments that are cast to what `dtype_for` says of them."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._outside():
                if not self._ours(args, kwargs):
                    return operation(*args, **kwargs)
                dtype = dtype_for((*args, *kwargs.values()))
                # Cast from the last to the first, as compiled code does. The order decides where copies of
                # weights come to lie: GPT-2 under 16 GiB ends at 19 one way, 20 the other.
                named = {name: self._cast(kwargs[name], dtype) for name in reversed(kwargs)}
                plain = [self._cast(one, dtype) for one in reversed(args)]
                return operation(*reversed(plain), **named)

        return kernel

    def _widest(self, values: Any) -> torch.dtype:
        wide = any(one.dtype is torch.float32 for one in _flat(values) if self._eligible(one))
        return torch.float32 if wide else torch.get_autocast_dtype("cpu")

    def _fp32_result(self, operation: Any) -> Callable[..., Any]:
        names = [argument.name for argument in schema_of(operation).arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            low = self._ours(args, kwargs) and args[0].dtype in LOW
            with self._outside():
                if low and given.get("dtype") is None:
                    return operation(**(given | {"dtype": torch.float32}))
                return operation(*args, **kwargs)

        return kernel


def operation_of(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
