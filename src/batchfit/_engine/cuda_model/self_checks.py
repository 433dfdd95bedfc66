"""Whether the installed torch is the one that predictions take it for, asked without a GPU.

Rules: what is compared are autocast's lists, and what the kernels of recurrent layers and of attention take.
Each check gives the names that differ; none of them runs a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from batchfit._engine.cuda_model.dispatch import FP32, FP32_RESULT, LOWER, REFUSED, WIDEST
from batchfit._engine.torch_private.autocast import cuda_dtype, fake_cuda
from batchfit._engine.torch_private.dispatch import registered, schema_of
from batchfit._engine.torch_private.fake import FakeTensorMode

# Builds with cuDNN have a kernel for its recurrent layers, which `sequences` stands for.
_APART: Final = {"_cudnn_rnn", "norm.names_ScalarOpt_dim"}
# How many square matrices they take.
_PROBED: Final = {
    "mm": 2,
    "matmul": 2,
    "linear": 2,
    "addmm": 3,
    "exp": 1,
    "log": 1,
    "rsqrt": 1,
    "softplus": 1,
    "mse_loss": 2,
    "cdist": 2,
}
_RNN: Final = (
    "input weight weight_stride0 weight_buf hx cx mode hidden_size proj_size num_layers batch_first dropout "
    "train bidirectional batch_sizes dropout_state"
)
RECURRENT: Final[Mapping[str, str]] = {
    "_cudnn_rnn": _RNN,
    "_thnn_fused_gru_cell": "input_gates hidden_gates hx input_bias hidden_bias",
    "_thnn_fused_lstm_cell": "input_gates hidden_gates cx input_bias hidden_bias",
}
ATTENTION: Final[Mapping[str, str]] = {
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp dropout_p is_causal "
    "return_debug_mask scale",
    "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_efficient_attention": "query key value attn_bias compute_log_sumexp dropout_p "
    "is_causal scale",
    "_scaled_dot_product_attention_math": "query key value attn_mask dropout_p is_causal dropout_mask scale "
    "enable_gqa",
}


def unlisted() -> list[str]:
    """Operations that CUDA's autocast casts, and that are in none of our lists."""
    known = {*LOWER, *FP32, *FP32_RESULT, *WIDEST, *REFUSED, *_APART}
    return [
        name for name in registered("AutocastCUDA") if name not in known and "dimname" not in name.lower()
    ]


def cast_otherwise() -> list[str]:
    """Of some operations, those that this torch casts to another dtype than our lists say."""
    return [
        name
        for name in _PROBED
        if _cast_to(name) not in (None, torch.bfloat16 if name in LOWER else torch.float32)
    ]


def changed(operations: Mapping[str, str]) -> list[str]:
    """Those that this torch lacks, or that take other arguments than predictions give them."""
    return [name for name, takes in operations.items() if _arguments_of(name) != takes.split()]


def _cast_to(name: str) -> torch.dtype | None:
    """The dtype of its result under autocast, where its inputs have the other one; None where unknown."""
    operation: Any = getattr(torch.ops.aten, name).default
    given = torch.float32 if name in LOWER else torch.bfloat16
    mode = FakeTensorMode()
    with mode:
        return cuda_dtype(operation, *(fake_cuda(given, mode=mode) for _ in range(_PROBED[name])))


def _arguments_of(name: str) -> list[str]:
    operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
    return [] if operation is None else [argument.name for argument in schema_of(operation).arguments]
