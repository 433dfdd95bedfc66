"""How a model is spread over ranks, from a text."""

from __future__ import annotations

import pytest

from batchfit._engine.sharding.pure.layout import ShardLayout, layout_of


@pytest.mark.parametrize(
    ("text", "kind", "replicas", "reshard", "dtype"),
    [
        ("fsdp2", "fsdp2", 1, True, ""),
        ("zero3", "fsdp2", 1, True, ""),
        ("zero2", "fsdp2", 1, False, ""),
        ("zero1", "zero1", 1, True, ""),
        ("ddp", "ddp", 1, True, ""),
        ("hsdp:2x4", "fsdp2", 2, True, ""),
        ("HSDP:4x2,bf16", "fsdp2", 4, True, "bfloat16"),
        ("fsdp2:bf16,reshard=4", "fsdp2", 1, 4, "bfloat16"),
        ("zero2:fp16", "fsdp2", 1, False, "float16"),
        ("zero2:reshard=2", "fsdp2", 1, 2, ""),
    ],
)
def test_a_text_names_a_layout(text: str, kind: str, replicas: int, reshard: bool | int, dtype: str) -> None:
    found = ShardLayout.parse(text, ranks=8)
    assert (found.kind, found.replicas, found.reshard_after_forward, found.dtype) == (
        *(kind, replicas, reshard),
        dtype,
    )
    assert (found.ranks, found.name) == (8, text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one of ddp, fsdp2"),
        ("fsdp", "one of ddp, fsdp2"),
        ("ddp:bf16", "without options"),
        ("hsdp", "replicas and shards"),
        ("hsdp:2x3", "grid of all 8 ranks, each side at least 2 (hsdp:2x4)"),
        ("hsdp:1x8", "grid of all 8 ranks"),
        ("fsdp2:reshard=3", "divides 8"),
        ("fsdp2:reshard=8", "divides 8"),
        ("hsdp:2x4,reshard=4", "divides 4"),
        ("fsdp2:int4", "only options of"),
        ("fsdp2:bf16,fp16", "one dtype and one reshard"),
        ("fsdp2:reshard=2,reshard=4", "one dtype and one reshard"),
    ],
)
def test_what_is_no_layout_is_refused_by_name_and_value(text: str, words: str) -> None:
    with pytest.raises(ValueError, match="shard must") as caught:
        ShardLayout.parse(text, ranks=8)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_the_options_are_checked_together() -> None:
    assert layout_of(None, None, False) is None
    assert layout_of(8, None, False) is None
    assert layout_of(8, "fsdp2", True) == ShardLayout("fsdp2", 8, "fsdp2", offload=True)
    with pytest.raises(ValueError, match="ranks must be given with shard='fsdp2', not None"):
        layout_of(None, "fsdp2", False)
    with pytest.raises(ValueError, match="offload must be False"):
        layout_of(8, None, True)
    with pytest.raises(ValueError, match="offload must be left out"):
        layout_of(8, "ddp", True)
    with pytest.raises(ValueError, match="ranks must be"):
        layout_of(1, "ddp", False)
    with pytest.raises(TypeError, match="shard must be a text"):
        layout_of(8, 3, False)  # type: ignore[arg-type]
