"""CUDA's autocast on fake tensors of a machine without CUDA.

torch.autocast("cuda") switches itself off where there is no GPU, and the CPU's lists differ from CUDA's (a
loss in fp32 there is bf16 here, exp the other way round), which changes what a step keeps by tens of per
cent. While `cuda_lists` is active, autocast on the CPU follows CUDA's lists for tensors of the traced device
and leaves every other tensor alone.

Rules: kernels are registered for the time of a trace and taken away after it; a test compares the lists with
the operations for which this torch has a CUDA autocast kernel.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


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
    group_norm hinge_embedding_loss huber_loss kl_div l1_loss layer_norm log log10 log1p log2
    logsumexp margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
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

_KEY = "AutocastCPU"


def registered(key: str) -> list[str]:
    """The operations of aten with a kernel for a dispatch key, without "aten::"."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return sorted(name[6:] for name in names if name.startswith("aten::"))


@contextlib.contextmanager
def cuda_lists(device: torch.device) -> Iterator[None]:
    """CPU autocast follows CUDA's lists for fake tensors on `device`."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    cache: dict[int, tuple[Tensor, Tensor]] = {}
    caster = _Caster(device, cache)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        cache.clear()
        clear()

    torch.clear_autocast_cache = clear_both
    made, entered = torch.autocast.__init__, torch.autocast.__enter__
    moved: list[tuple[Any, bool]] = []

    def on_cpu(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        made(self, device_type, dtype, *args, **kwargs)

    def enter(self: Any) -> Any:
        # Made before the trace, where torch switched it off for want of a GPU. One that was made with
        # enabled=False is the same but for its dtype: nobody names bfloat16 to have nothing.
        if self.device == "cuda":
            moved.append((self, self._enabled))
            meant = not torch.cuda.is_available() and self.fast_dtype is torch.bfloat16
            self.device, self._enabled = "cpu", self._enabled or meant
        return entered(self)  # type: ignore[no-untyped-call]

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each says that a kernel is replaced, which is what we want
            for name, kernel in caster.kernels().items():
                library.impl(name, kernel, _KEY)
        yield
    finally:
        torch.clear_autocast_cache = clear
        torch.autocast.__init__ = made  # type: ignore[method-assign]
        torch.autocast.__enter__ = entered  # type: ignore[method-assign]
        for context, enabled in moved:
            context.device, context._enabled = "cuda", enabled
        cache.clear()
        library._destroy()


class _Caster:
    def __init__(self, device: torch.device, cache: dict[int, tuple[Tensor, Tensor]]) -> None:
        self._device = device
        self._cache = cache
        self._without = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernel of each operation that either list knows."""
        present = set(registered("AutocastCUDA"))
        table: dict[str, Callable[..., Any]] = {}
        for names, make in (
            (LOWER, self._lower),
            (FP32, self._fp32),
            (FP32_RESULT, self._fp32_result),
            (WIDEST, self._widest),
        ):
            table.update((name, make(_operation(name))) for name in names if name in present)
        # What only the CPU's lists know runs as it is on CUDA.
        for name in registered(_KEY):
            table.setdefault(name, torch.library.fallthrough_kernel)
        return table

    def _eligible(self, value: Any) -> bool:
        # A real tensor is the host's, which stands for the GPU where it meets the GPU's tensors.
        return (
            isinstance(value, Tensor)
            and (not isinstance(value, FakeTensor) or value.fake_device == self._device)
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )

    def _ours(self, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a tensor of the traced device is among the arguments."""
        return any(
            isinstance(one, FakeTensor) and one.fake_device == self._device
            for one in _flat((*args, *kwargs.values()))
        )

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
            and not value._is_view()
            and torch.is_autocast_cache_enabled()
        )
        if not keeps:
            return value.to(dtype)
        found = self._cache.get(id(value))
        if found is None:
            found = self._cache[id(value)] = (value, value.to(dtype))
        return found[1]

    def _outside(self) -> Any:
        return torch._C._ExcludeDispatchKeyGuard(self._without)

    def _lower(self, operation: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype("cpu")
            with self._outside():
                if not self._ours(args, kwargs):
                    return operation(*args, **kwargs)
                return self._called(operation, args, kwargs, dtype)

        return kernel

    def _fp32(self, operation: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with self._outside():
                if not self._ours(args, kwargs):
                    return operation(*args, **kwargs)
                return self._called(operation, args, kwargs, torch.float32)

        return kernel

    def _fp32_result(self, operation: Any) -> Callable[..., Any]:
        names = [argument.name for argument in operation._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            given = dict(zip(names, args, strict=False)) | kwargs
            low = self._ours(args, kwargs) and args[0].dtype in (torch.float16, torch.bfloat16)
            with self._outside():
                if low and given.get("dtype") is None:
                    given["dtype"] = torch.float32
                    return operation(**given)
                return operation(*args, **kwargs)

        return kernel

    def _widest(self, operation: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            if not self._ours(args, kwargs):
                with self._outside():
                    return operation(*args, **kwargs)
            tensors = [one for one in _flat((args, *kwargs.values())) if self._eligible(one)]
            wide = any(one.dtype is torch.float32 for one in tensors)
            dtype = torch.float32 if wide else torch.get_autocast_dtype("cpu")
            with self._outside():
                return self._called(operation, args, kwargs, dtype)

        return kernel

    def _called(self, operation: Any, args: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
        """The operation on cast arguments, cast from the last to the first as compiled code does.

        The order decides where copies of weights come to lie: GPT-2 under 16 GiB ends at 19 one way, 20 the
        other.
        """
        named = {name: self._cast(kwargs[name], dtype) for name in reversed(kwargs)}
        plain = [self._cast(one, dtype) for one in reversed(args)]
        return operation(*reversed(plain), **named)


def _operation(name: str) -> Any:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
