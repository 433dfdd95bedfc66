"""What CUDA's kernels take in the installed torch, beside what predictions give them."""

from __future__ import annotations

import pytest
import torch
from torch_private import private_aten

from batchfit._engine.allocator.gpus import gpu_named
from batchfit._engine.cuda_model import attention, kernel_arguments
from batchfit._engine.cuda_model.library_kernels import RULES
from batchfit._engine.torch_private.fake import FakeTensorMode


def test_this_torch_is_the_one_that_predictions_know() -> None:
    assert kernel_arguments.changed(kernel_arguments.RECURRENT) == []
    assert kernel_arguments.changed(kernel_arguments.ATTENTION) == []


def test_other_arguments_and_missing_operations_are_named() -> None:
    takes = kernel_arguments.RECURRENT["_cudnn_rnn"]
    known = {"_cudnn_rnn": f"{takes} more", "_no_such_operation": "input"}
    assert kernel_arguments.changed(known) == ["_cudnn_rnn", "_no_such_operation"]
    assert kernel_arguments.changed({"_cudnn_rnn": takes}) == []


@pytest.mark.parametrize("takes", [True, False])
def test_grouped_heads_go_where_this_torch_sends_them(monkeypatch: pytest.MonkeyPatch, takes: bool) -> None:
    monkeypatch.setattr(attention, "efficient_takes_groups", lambda: takes)
    query, key = torch.empty(1, 8, 16, 64), torch.empty(1, 2, 16, 64)
    gpu = gpu_named("h200")
    grouped = attention.backend(gpu, query, key, key, None, grouped=True)
    assert grouped == ("efficient" if takes else "math")
    assert attention.backend(gpu, query, query, query, None, grouped=True) == "efficient"
    assert (
        attention.backend(gpu, query.bfloat16(), key.bfloat16(), key.bfloat16(), None, grouped=True)
        == "cudnn"
    )


def test_torch_is_asked_whether_its_kernel_takes_grouped_heads() -> None:
    since = (2, 14)
    running = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert attention.efficient_takes_groups() is (running >= since)


def test_torch_is_asked_whether_it_fuses_queries_of_three_dimensions() -> None:
    running = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert attention.fuses_three_dimensions() is (running >= (2, 14))
    with FakeTensorMode():  # as in a trace
        attention.fuses_three_dimensions.cache_clear()
        assert attention.fuses_three_dimensions() is (running >= (2, 14))


def test_gradients_of_grouped_heads_are_made_for_each_head_first() -> None:
    rule = RULES[private_aten("_scaled_dot_product_efficient_attention_backward.default")]
    with FakeTensorMode():
        query, key = torch.empty(2, 8, 16, 64), torch.empty(2, 2, 16, 64)
        whole = rule((query, query, query, query, None), gpu_named("h200"))
        grouped = rule((query, query, key, key, None), gpu_named("h200"))
    assert whole is not None
    assert grouped is not None
    assert sum(grouped.together) - sum(whole.together) == 2 * 2 * 8 * 16 * 64 * 4
