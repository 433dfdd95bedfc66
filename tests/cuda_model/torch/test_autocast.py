"""CUDA's autocast without CUDA: its lists are this torch's, and its casts are the documented ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from batchfit._engine.cuda_model.dispatch import (
    FP32,
    FP32_RESULT,
    LOWER,
    REFUSED,
    WIDEST,
    cuda_autocast,
    registered,
)

HERE = torch.device("cpu", 1)
F = nn.functional
BF16 = torch.bfloat16


def test_the_lists_are_those_of_this_torch() -> None:
    """Every operation with an autocast kernel for CUDA is in one list, and in one only."""
    listed = [*LOWER, *FP32, *FP32_RESULT, *WIDEST, *REFUSED]
    assert len(listed) == len(set(listed))
    # A list may name what an older torch had; it must not lack what this one has. Builds with cuDNN have a
    # kernel for its recurrent layers, which `dispatch` stands for; dimensions with names are in no list.
    apart = {name for name in registered("AutocastCUDA") if "dimname" in name.lower()}
    apart |= {"_cudnn_rnn", "norm.names_ScalarOpt_dim"}
    assert set(registered("AutocastCUDA")) - set(listed) - apart == set()
    missing = set(listed) - set(registered("AutocastCUDA"))
    assert len(missing) < 10


def dtype_of(run: Any, *, low: torch.dtype = BF16, device: torch.device = HERE) -> torch.dtype:
    with FakeTensorMode(), cuda_autocast(device), torch.autocast("cuda", dtype=low):
        wide = torch.empty(4, 4, device=HERE)
        found = run(wide, wide @ wide)
    assert isinstance(found.dtype, torch.dtype)
    return found.dtype  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("run", "dtype"),
    [
        (lambda x, h: x @ x, BF16),
        (lambda x, h: F.linear(x, x), BF16),
        (lambda x, h: torch.einsum("ij,jk->ik", x, x), BF16),
        (lambda x, h: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]), BF16),
        (lambda x, h: torch.exp(h), torch.float32),
        (lambda x, h: F.layer_norm(h, (4,)), torch.float32),
        (lambda x, h: F.mse_loss(h, h), torch.float32),
        (lambda x, h: F.softmax(h, -1), torch.float32),
        (lambda x, h: F.softmax(h, -1, dtype=torch.float64), torch.float64),
        (lambda x, h: h.sum(), torch.float32),
        (lambda x, h: h.cumsum(0), torch.float32),
        (lambda x, h: h.pow(2), torch.float32),
        (lambda x, h: torch.addcmul(h, h, x), torch.float32),
        (lambda x, h: torch.addcmul(h, h, h), BF16),
        (lambda x, h: F.gelu(h), BF16),
        (lambda x, h: h + h, BF16),
        (lambda x, h: h + x, torch.float32),
        (lambda x, h: torch.cat([h, h]), BF16),
        (lambda x, h: x.double() @ x.double(), torch.float64),  # not eligible
        (lambda x, h: F.avg_pool2d(h[None], 2), BF16),  # fp32 on the CPU's list only
    ],
)
def test_each_list_does_what_it_says(run: Any, dtype: torch.dtype) -> None:
    assert dtype_of(run) is dtype


def test_fp16_is_cudas_default() -> None:
    with FakeTensorMode(), cuda_autocast(HERE), torch.autocast("cuda"):
        assert (torch.empty(2, 2, device=HERE) @ torch.empty(2, 2, device=HERE)).dtype is torch.float16


def test_the_host_is_left_alone() -> None:
    """Real tensors, and fakes of another device, are computed as they are."""
    assert (
        dtype_of(lambda x, h: torch.empty(2, 2, device="cpu") @ torch.empty(2, 2, device="cpu"))
        is torch.float32
    )
    with cuda_autocast(HERE), torch.autocast("cuda", dtype=BF16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
        assert F.softmax(torch.ones(2, dtype=BF16), 0).dtype is BF16


def test_a_region_can_be_switched_off_inside() -> None:
    def run(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", enabled=False):
            return x @ x

    assert dtype_of(run) is torch.float32


def test_a_weight_is_cast_once_in_a_region() -> None:
    with FakeTensorMode(), cuda_autocast(HERE):
        weight = nn.Parameter(torch.empty(4, 4, device=HERE))
        x = torch.empty(4, 4, device=HERE)

        def cast() -> list[int]:
            with torch.autocast("cuda", dtype=BF16):
                seen = [out.grad_fn.next_functions for out in (x @ weight, x @ weight)]
            return [next(id(node) for node, _ in functions if node is not None) for functions in seen]

        first, second = cast(), cast()
        assert first[0] == first[1]
        with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
            functions = [(x @ weight).grad_fn.next_functions for _ in range(2)]  # type: ignore[union-attr]
        assert functions[0] != functions[1]
        assert second[0] == second[1]


@pytest.mark.parametrize(("dtype", "on"), [(BF16, True), (torch.float16, False)])
def test_one_made_before_the_trace_works_if_it_names_bf16(dtype: torch.dtype, on: bool) -> None:
    """torch has switched it off for want of a GPU; with fp16 that cannot be told from enabled=False."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.autocast("cuda", dtype=dtype)
    for _ in range(2):
        with FakeTensorMode(), cuda_autocast(HERE):
            x = torch.empty(2, 2, device=HERE)
            with made:
                assert (x @ x).dtype is (dtype if on else torch.float32)
            assert (x @ x).dtype is torch.float32
        assert (made.device, made._enabled) == ("cuda", False)


def test_everything_is_put_back_after_an_error() -> None:
    before = torch.autocast.__init__, torch.autocast.__enter__, torch.clear_autocast_cache
    kernels = registered("AutocastCPU")
    with pytest.raises(KeyError), cuda_autocast(HERE):
        raise KeyError
    assert (torch.autocast.__init__, torch.autocast.__enter__, torch.clear_autocast_cache) == before
    assert registered("AutocastCPU") == kernels
    with torch.autocast("cpu", dtype=BF16):
        low = torch.ones(2, 2) @ torch.ones(2, 2)
        assert low.dtype is BF16
        assert torch.exp(low).dtype is BF16  # fp32 on CUDA's list only
