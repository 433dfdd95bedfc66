"""What kernels take for themselves: rules by hand, and sizes that an H200 was seen to take."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_private import private_aten

from batchfit._engine.allocator.gpus import GPUS
from batchfit._engine.cuda_model.library_kernels import GEMMS, RULES
from batchfit._engine.cuda_model.workspaces import Extra, reduction_bytes

aten = torch.ops.aten
H200 = GPUS["h200"]
DATA = Path(__file__).parents[2] / "data"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def extra(func: Any, *args: Any) -> Extra | None:
    rule = RULES.get(func)
    return None if rule is None else rule(args, H200)


def test_most_operations_take_nothing() -> None:
    assert extra(aten.add.Tensor, meta(4), meta(4)) is None
    assert extra(aten.native_layer_norm.default, meta(4, 4), [4], None, None, 1e-5) is None


def test_a_layer_norm_copies_what_is_not_in_order() -> None:
    turned = meta(8, 4).t()
    assert extra(aten.native_layer_norm.default, turned, [8], None, None, 1e-5) == Extra((8 * 4 * 4,))


def test_cublas_does_the_products() -> None:
    assert {aten.mm.default, aten.addmm.default} <= GEMMS
    assert aten.mul.Tensor not in GEMMS


def test_a_softmax_gradient_has_one_temporary_of_its_size() -> None:
    found = extra(private_aten("_softmax_backward_data.default"), meta(8, 16), meta(8, 16), -1, torch.float32)
    assert found == Extra((8 * 16 * 4,))


def test_few_indices_are_not_sorted_but_say_so() -> None:
    """The same number of blocks at every size, or there would be no line through two of them."""
    few = extra(aten.embedding_dense_backward.default, meta(3072, 8), meta(3072), 100, -1, False)
    many = extra(aten.embedding_dense_backward.default, meta(3073, 8), meta(3073), 100, -1, False)
    assert few is not None
    assert many is not None
    assert len(few.together) == len(many.together)
    assert sum(few.together) == 0
    assert many.together[:6] == (8 * 3073,) * 6


@given(st.integers(1, 10**7), st.integers(1, 10**5), st.booleans(), st.sampled_from(list(GPUS)))
def test_a_reduction_never_needs_more_than_its_input(
    inputs: int, outputs: int, on_fastest: bool, card: str
) -> None:
    found = reduction_bytes(outputs, inputs, on_fastest=on_fastest, whole=outputs == 1, gpu=GPUS[card])
    assert found >= 0
    # A block of threads takes 16 values or more for each number that it stages.
    assert found <= 4 * inputs * outputs


def test_small_reductions_need_nothing() -> None:
    assert extra(aten.sum.default, meta(1000)) == Extra((0,))
    assert extra(aten.sum.dim_IntList, meta(64, 32), [1]) == Extra((0,))
    assert extra(aten.sum.default, meta(0)) == Extra((0,))


def test_a_large_sum_is_staged_over_blocks() -> None:
    found = extra(aten.sum.default, meta(50_000_000))
    assert found is not None
    assert 0 < found.together[0] < 10**6
    over_rows = extra(aten.sum.dim_IntList, meta(100_000, 768), [0])
    assert over_rows is not None
    assert over_rows.together[0] % (4 * 768) == 0
    assert over_rows.together[0] > 0


def test_a_convolution_is_copied_into_cudnns_layout() -> None:
    x, weight = meta(8, 16, 32, 32), meta(24, 16, 3, 3)
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    found = extra(aten.convolution.default, *args)
    assert found is not None
    out_bytes = 8 * 24 * 32 * 32 * 4
    assert found.plans == {0: x.numel() * 4 + out_bytes + weight.numel() * 4}
    last = x.to(memory_format=torch.channels_last)
    in_place = extra(aten.convolution.default, last, *args[1:])
    assert in_place is not None
    assert in_place.plans == {0: 0}
    depthwise = extra(aten.convolution.default, x, meta(16, 1, 3, 3), *args[2:8], 16)
    assert depthwise is not None
    assert depthwise.plans == {0: 0}


def test_the_length_of_a_transposed_convolution() -> None:
    x, weight = meta(2, 8, 7, 7), meta(8, 4, 4, 4)
    args = (x, weight, None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1)
    found = extra(aten.convolution.default, *args)
    real = aten.convolution.default(*args)
    assert found is not None
    assert found.plans[0] == (x.numel() + real.numel() + weight.numel()) * 4


@pytest.mark.parametrize("length", [64, 100, 257])
def test_attention_gradients_in_fp32(length: int) -> None:
    low = meta(2, 4, length, 64, dtype=torch.bfloat16)
    found = extra(private_aten("_scaled_dot_product_cudnn_attention_backward.default"), low, low, low)
    assert found is not None
    assert found.together == (2 * 4 * length * (64 + 1) * 4 + 256,)


def test_grouped_heads_are_written_out() -> None:
    query, key = meta(2, 8, 64, 64, dtype=torch.bfloat16), meta(2, 2, 64, 64, dtype=torch.bfloat16)
    plain = extra(private_aten("_scaled_dot_product_flash_attention_backward.default"), query, query, query)
    grouped = extra(private_aten("_scaled_dot_product_flash_attention_backward.default"), query, query, key)
    assert plain is not None
    assert grouped is not None
    assert sum(grouped.together) - sum(plain.together) == 2 * query.numel() * 2


MODES = {"rnn_tanh": 1, "lstm": 2, "gru": 3}


def test_recurrent_layers_keep_and_take_what_cudnn_did() -> None:
    """What is kept to the byte, but for the masks of dropout; the workspace by a fit."""
    rows = json.loads(gzip.decompress((DATA / "h200_recurrent.json.gz").read_bytes()))["rows"]
    assert len(rows) == 232
    for row in rows:
        dtype = {"fp32": torch.float32, "fp16": torch.float16}[row["dtype"]]
        empty = partial(torch.empty, device="meta", dtype=dtype)
        shape = (row["tokens"],) if row["packed"] else (row["steps"], row["samples"])
        options = (MODES[row["kind"]], row["hidden"], 0, row["layers"], False, row["dropout"], row["train"])
        arguments = (
            empty(*shape, row["inputs"]),
            [empty(row["parameters"])],
            4,
            None,
            empty(row["layers"] * row["ways"], row["samples"], row["hidden"]),
            None,
            *options,
            row["ways"] == 2,
            [row["samples"]] if row["packed"] else [],
            None,
        )
        found = extra(private_aten("_cudnn_rnn.default"), *arguments)
        assert found is not None
        assert found.outputs[3] == pytest.approx(row["reserve"], abs=200_000 if row["dropout"] else 1024)
        loose = 0.17 if row["kind"] == "rnn_tanh" and row["packed"] else 0.08
        assert found.before[3] == pytest.approx(row["workspace"], rel=loose)


def test_a_cell_by_itself_sums_its_gates_up() -> None:
    """99 MiB of a step of a graph network on an H200."""
    workspace = torch.empty(75_600, 5 * 64, device="meta")
    found = extra(private_aten("_thnn_fused_gru_cell_backward.default"), workspace, workspace, True)
    assert found is not None
    assert found.after == {3: 99 * 2**20, 4: 99 * 2**20}
