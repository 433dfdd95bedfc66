"""Whether CUDA's kernels of recurrent layers and of attention take what predictions give them.

Rules: the operations of the installed torch are compared with those that the modules beside this one call.
No kernel runs, and no GPU is needed. Autocast's lists have a check of their own (`autocast_check.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from batchfit._engine.torch_private.dispatch import schema_of

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


def changed(operations: Mapping[str, str]) -> list[str]:
    """Those that this torch lacks, or that take other arguments than predictions give them."""
    return [name for name, takes in operations.items() if _arguments_of(name) != takes.split()]


def _arguments_of(name: str) -> list[str]:
    operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
    return [] if operation is None else [argument.name for argument in schema_of(operation).arguments]
