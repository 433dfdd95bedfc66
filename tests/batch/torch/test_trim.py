"""Microbatches out of padded batches: nothing but padding is cut, and the way back is exact."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from batchfit._engine.batch import trim
from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.trim import Trimmer, attention_without_plans, restored
from batchfit._engine.sizing.pure.pack import SeenShapes, pack

CUDA = torch.device("cuda", 0)


def padded_batch(lengths: list[int], width: int, side: str = "right") -> dict[str, torch.Tensor]:
    """Ids from 1 on, 0 where padded; the mask says so; labels -100 there."""
    place = torch.arange(width).unsqueeze(0)
    counts = torch.tensor(lengths).unsqueeze(1)
    mask = place < counts if side == "right" else place >= width - counts
    ids = torch.arange(1, len(lengths) * width + 1).view(len(lengths), width) * mask
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~mask, -100)}


@examples(100)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=24),
    st.integers(0, 9),
    st.sampled_from(["left", "right"]),
    st.integers(1, 9),
    st.integers(1, 8),
)
def test_no_token_is_lost_whatever_the_plan(
    lengths: list[int], extra: int, side: str, multiple: int, most: int
) -> None:
    batch = padded_batch(lengths, max(lengths) + extra + 1, side)
    trimmer = Trimmer.of(batch, "attention_mask")
    assert trimmer.lengths == tuple(lengths)
    packs = pack(
        trimmer.lengths,
        most_samples=most,
        multiple=multiple,
        padded_length=trimmer.padded_length,
        shapes=SeenShapes(),
    )
    micros = [trimmer.take(one.samples, one.length) for one in packs]
    for micro, one in zip(micros, packs, strict=True):
        assert micro["input_ids"].shape == (one.size, one.length)
        for row, index in enumerate(one.samples):
            kept = micro["input_ids"][row][micro["attention_mask"][row] == 1]
            assert kept.tolist() == batch["input_ids"][index][batch["attention_mask"][index] == 1].tolist()
    back = restored(micros, packs, padded_length=trimmer.padded_length, padding_side=trimmer.padding_side)
    width = trimmer.padded_length if len({one.length for one in packs}) > 1 else packs[0].length
    whole = trimmer.take(range(len(lengths)), width)
    assert torch.equal(back["input_ids"], whole["input_ids"])
    assert torch.equal(back["attention_mask"], whole["attention_mask"])


@pytest.mark.parametrize("side", ["left", "right"])
def test_gradients_equal_those_of_the_padded_batch(side: str) -> None:
    """A small attention model over packed microbatches: fp64, the sum over tokens."""
    torch.manual_seed(0)
    lengths = [3, 11, 7, 1, 16, 5, 9]
    batch = padded_batch(lengths, 20, side)
    embed = torch.nn.Embedding(200, 8).double()
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()

    def loss(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = embed(micro["input_ids"])
        out, _ = layer(hidden, hidden, hidden, key_padding_mask=micro["attention_mask"] == 0)
        summed: torch.Tensor = (out.square().sum(-1) * micro["attention_mask"]).sum()
        return summed

    def gradients() -> torch.Tensor:
        parts = [p.grad.flatten() for p in (*embed.parameters(), *layer.parameters()) if p.grad is not None]
        embed.zero_grad()
        layer.zero_grad()
        return torch.cat(parts)

    loss(batch).backward()
    whole = gradients()
    trimmer = Trimmer.of(batch, "attention_mask")
    assert trimmer.padding_side == side
    packs = pack(trimmer.lengths, most_samples=3, multiple=4, padded_length=20)
    assert len(packs) > 2
    for one in packs:
        loss(trimmer.take(one.samples, one.length)).backward()
    assert (gradients() - whole).norm() <= 1e-10 * whole.norm()


@dataclasses.dataclass(frozen=True)
class Fields:
    ids: torch.Tensor
    name: str


Named = namedtuple("Named", ["ids", "weights"])


def test_every_kind_of_batch_comes_back_as_its_own_kind() -> None:
    ids = torch.arange(12).view(3, 4)
    lengths = [2, 4, 1]
    BatchEncoding = pytest.importorskip("transformers", reason="needs transformers").BatchEncoding  # noqa: N806
    encoding = Trimmer.of(BatchEncoding({"input_ids": ids}), lengths).take((0, 2), 2)
    assert isinstance(encoding, BatchEncoding)
    assert encoding["input_ids"].tolist() == [[0, 1], [8, 9]]
    fields = Trimmer.of(Fields(ids, "train"), lengths).take((2, 0), 3)
    assert isinstance(fields, Fields)
    assert fields.ids.tolist() == [[8, 9, 10], [0, 1, 2]]
    assert fields.name == "train"
    named = Trimmer.of(Named(ids, torch.arange(3.0)), torch.tensor(lengths)).take((1,), 4)
    assert isinstance(named, Named)
    assert named.weights.tolist() == [1.0]
    batch = (ids, {"texts": ["a", "b", "c"], "scale": 2.0, "size": [224, 224]})
    pair = Trimmer.of(batch, lengths, samples={"batch[1]['texts']"})
    taken = pair.take((2, 1), 4)
    assert isinstance(taken, tuple)
    assert taken[1] == {"texts": ["c", "b"], "scale": 2.0, "size": [224, 224]}
    array = Trimmer.of({"x": np.arange(12).reshape(3, 4)}, np.array(lengths)).take((2, 0), 2)
    assert array["x"].tolist() == [[8, 9], [0, 1]]


def test_lengths_come_from_a_callable_a_key_or_a_padding_mask() -> None:
    batch = padded_batch([2, 3], 5)
    assert Trimmer.of(batch, lambda part: part["attention_mask"].sum(1)).lengths == (2, 3)
    named = {"input_ids": batch["input_ids"], "n": torch.tensor([2, 3])}
    assert Trimmer.of(named, "n").take((1,), 3)["input_ids"].shape == (1, 3)
    beside = {"x": torch.zeros(2, 3), "scores": torch.zeros(2, 9)}  # as wide as the longest: that is the one
    assert Trimmer.of(beside, [2, 3]).take((0,), 2)["scores"].shape == (1, 9)
    padding = {"x": torch.zeros(2, 5, 7), "src_key_padding_mask": batch["attention_mask"] == 0}
    trimmer = Trimmer.of(padding, "src_key_padding_mask")
    assert trimmer.lengths == (2, 3)
    assert trimmer.take((0, 1), 3)["x"].shape == (2, 3, 7)


def test_samples_that_were_not_collated_are_chosen_and_left_as_they_are() -> None:
    samples = [{"ids": list(range(n))} for n in (3, 1, 2)]
    trimmer = Trimmer.of(samples, lambda batch: [len(sample["ids"]) for sample in batch], samples={"batch"})
    assert trimmer.padded_length == 3
    assert trimmer.take((2, 0), 3) == [samples[2], samples[0]]


def test_samples_that_were_not_collated_have_containers_of_their_own() -> None:
    batch = [{"ids": [1] * n, "y": n} for n in (3, 1, 2)]
    trimmer = Trimmer.of(batch, lambda some: [len(one["ids"]) for one in some], samples={"batch"})
    for sample in trimmer.take((0, 2), 3):
        sample["ids"].append(sample.pop("y"))
    assert batch == [{"ids": [1] * n, "y": n} for n in (3, 1, 2)]


def test_rows_that_are_neighbours_are_views() -> None:
    batch = padded_batch([4, 3, 2, 1], 6)
    trimmer = Trimmer.of(batch, "attention_mask")
    storage = batch["input_ids"].untyped_storage().data_ptr()
    assert trimmer.take((1, 2), 3)["input_ids"].untyped_storage().data_ptr() == storage
    copied = trimmer.take((2, 1), 3)["input_ids"]
    assert copied.untyped_storage().nbytes() == 2 * 3 * 8  # only what is needed


def test_a_square_mask_is_trimmed_both_ways_and_other_squares_are_asked_about() -> None:
    ids = torch.ones(2, 6, dtype=torch.long)
    batch: dict[str, Any] = {"input_ids": ids, "causal_mask": torch.ones(2, 1, 6, 6)}
    assert Trimmer.of(batch, [3, 4]).take((0, 1), 4)["causal_mask"].shape == (2, 1, 4, 4)
    batch = {"input_ids": ids, "features": torch.ones(2, 6, 6)}
    with pytest.raises(
        ValueError, match=r"batch\['features'\] is not clear: \(2, 6, 6\) has 6 more than once"
    ):
        Trimmer.of(batch, [3, 4])
    assert Trimmer.of(batch, [3, 4], pad_dim=1).take((0,), 3)["features"].shape == (1, 3, 6)
    assert Trimmer.of(batch, [3, 4], pad_keys=["input_ids"]).take((0,), 3)["features"].shape == (1, 6, 6)


def test_the_layout_of_an_earlier_batch_settles_what_chance_blurs() -> None:
    def batch(width: int) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(2, width, 8), "target": torch.zeros(2, 8)}

    first = Trimmer.of(batch(10), [5, 10])
    assert first.layout == {"batch['x']": (1,)}
    later = Trimmer.of(batch(8), [5, 8], layout=first.layout)
    taken = later.take((0,), 5)
    assert taken["x"].shape == (1, 5, 8)
    assert taken["target"].shape == (1, 8)


@pytest.mark.parametrize(
    ("batch", "lengths", "options", "message"),
    [
        ({"x": torch.zeros(3, 5)}, [1, 2], {}, r"there are 2, and batch\['x'\] has 3 rows"),
        ({"x": torch.zeros(2, 5)}, [1, 9], {}, "9 is the longest, and the parts are"),
        (
            {"x": torch.zeros(2, 5), "y": torch.zeros(2, 7)},
            [1, 4],
            {},
            r"not clear: .*'x'.* has 5, .*'y'.* has 7",
        ),
        ({"x": torch.zeros(2, 5)}, "n", {}, "lengths must name a part of the batch"),
        ({"x": torch.zeros(2, 5)}, [1.5, 2.0], {}, "lengths must be one integer for each sample"),
        ({"x": torch.zeros(2, 5)}, [1, -2], {}, "lengths must not be negative, not -2"),
        ({"x": torch.zeros(2, 5)}, [1, 2], {"pad_keys": ["z"]}, "pad_keys must name parts of the batch"),
        (
            {"x": torch.zeros(2)},
            [1, 2],
            {"pad_keys": ["x"]},
            "keys must name parts with the dimension 1, not 'x'",
        ),
        ({"x": torch.zeros(2, 5)}, [1, 2], {"padding_side": "top"}, "padding_side must be 'left', 'right'"),
        ({"x": torch.zeros(2, 5)}, [1, 2], {"pad_dim": 0}, "pad_dim must be at least 1"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "attention_mask", {}, "without gaps"),
        ({"attention_mask": torch.tensor([[1, 1, 1]])}, [2], {}, "agree with the lengths"),
        (
            {"attention_mask": torch.tensor([[1, 1, 0]])},
            "attention_mask",
            {"padding_side": "left"},
            "padding_side must be what the mask says, not 'left'",
        ),
        (
            {"attention_mask": torch.tensor([[1, 1, 0], [0, 1, 1]])},
            "attention_mask",
            {},
            "padded on one side",
        ),
    ],
)
def test_what_is_not_clear_is_asked_about(batch: Any, lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trimmer.of(batch, lengths, **options)


def test_what_cannot_be_cut_by_rows_is_refused() -> None:
    with pytest.raises(TypeError, match="lengths must be one integer for each sample, not \\['a', 'b'\\]"):
        Trimmer.of({"x": torch.zeros(2, 5)}, ["a", "b"])  # type: ignore[list-item]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    with pytest.raises(TypeError, match=r"batch\['x'\] must be made of tensors, not PackedSequence"):
        Trimmer.of({"x": packed}, [2, 1])
    with pytest.raises(TypeError, match="must be a dense tensor"):
        Trimmer.of({"x": torch.eye(2).to_sparse()}, [2, 1])


def test_taking_checks_that_only_padding_is_cut() -> None:
    trimmer = Trimmer.of(padded_batch([2, 4], 6), "attention_mask")
    for length in (3, 7):
        with pytest.raises(ValueError, match=f"length must be from 4 to 6, not {length}"):
            trimmer.take((0, 1), length)
    with pytest.raises(ValueError, match="indices must name at least one sample"):
        trimmer.take((), 3)


def test_outputs_of_any_kind_are_restored_in_order() -> None:
    packs = (Microbatch((2, 0), 2, 8), Microbatch((1,), 1, 4))
    outputs = [
        {"pooled": torch.tensor([[2.0], [0.0]]), "texts": ["c", "a"], "cache": None},
        {"pooled": torch.tensor([[1.0]]), "texts": ["b"], "cache": None},
    ]
    joined = restored(outputs, packs)
    assert joined["pooled"].tolist() == [[0.0], [1.0], [2.0]]
    assert joined["texts"] == ["a", "b", "c"]
    assert joined["cache"] is None
    with pytest.raises(TypeError, match=r"output must have one row for each of 2 samples, not shape \(\)"):
        restored([torch.tensor(1.0), torch.tensor(2.0)], packs)
    with pytest.raises(
        ValueError, match="output must have one shape, or that of the microbatch: dimension 1"
    ):
        restored([torch.zeros(2, 3), torch.zeros(1, 2)], packs)
    with pytest.raises(ValueError, match="outputs must be one for each of 2 microbatches, not 1"):
        restored(outputs[:1], packs)
    with pytest.raises(TypeError, match="or the same in all microbatches, not float"):
        restored([1.0, 2.0], packs)


# --- attention --------------------------------------------------------------------------------------------


@pytest.fixture
def cudnn_on() -> Any:
    """The switch exists without a GPU; each test leaves it as it was."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.usefixtures("cudnn_on")
def test_plans_are_off_inside_only_and_restored_after_an_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trim, "_told", False)
    enabled = torch.backends.cuda.cudnn_sdp_enabled

    def failing() -> None:
        with attention_without_plans(CUDA):
            assert not enabled()
            assert torch.backends.cuda.flash_sdp_enabled()
            raise RuntimeError("mine")

    with caplog.at_level(logging.INFO, "batchfit"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="mine"):
                failing()
            assert enabled()
    assert [record.message[:17] for record in caplog.records] == ["cuDNN's attention"]
    for device in (None, torch.device("cpu")):
        with attention_without_plans(device):
            assert enabled()


@pytest.mark.usefixtures("cudnn_on")
def test_the_users_own_choice_is_kept() -> None:
    flags = torch.backends.cuda
    flags.enable_cudnn_sdp(False)
    with attention_without_plans(CUDA):
        assert not flags.cudnn_sdp_enabled()
    assert not flags.cudnn_sdp_enabled()
    with (
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION),
        attention_without_plans(CUDA),
    ):
        assert flags.cudnn_sdp_enabled()  # the only one that the user allows


@pytest.mark.usefixtures("cudnn_on")
def test_a_forward_run_again_in_backward_sees_it_and_so_do_other_threads() -> None:
    """Activation checkpointing runs forward in backward; the choice there is made again."""
    seen: list[bool] = []

    def attend(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    with attention_without_plans(CUDA):
        out: torch.Tensor = checkpoint(attend, x, use_reentrant=False)
        out.sum().backward()
        thread = threading.Thread(target=lambda: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        thread.start()
        thread.join()
    assert seen == [False, False, False]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["pad_mask", "src_padding_mask", "key_padding_mask", "attention_mask"])
def test_masks_that_are_true_for_padding_are_read_as_such(name: str, side: str) -> None:
    counts = torch.tensor([5, 64, 128, 100])
    place = torch.arange(192)
    tokens = place < counts[:, None] if side == "right" else place >= 192 - counts[:, None]
    mask: Any = ~tokens
    if name == "attention_mask":  # what is added to the scores
        mask = torch.zeros(4, 192).masked_fill(~tokens, float("-inf"))
    found = Trimmer.of({"x": torch.ones(4, 192) * tokens, name: mask}, name)
    assert found.lengths == (5, 64, 128, 100)
    assert found.padding_side == side
    assert all(found.take((row,), int(counts[row]))["x"].sum() == counts[row] for row in range(4))


@pytest.mark.parametrize(("name", "true_for_padding"), [("mask", True), ("valid", True), ("pad_mask", False)])
def test_a_mask_that_its_name_contradicts_is_asked_about(name: str, true_for_padding: bool) -> None:
    tokens = torch.tensor([[1, 1, 1], [1, 0, 0]]) != 0
    with pytest.raises(ValueError, match=rf"clear, not '{name}': .* leaves sample 0 without any"):
        Trimmer.of({"x": torch.ones(2, 3), name: tokens != true_for_padding}, name)
    assert Trimmer.of({"x": torch.ones(2, 3), name: tokens != true_for_padding}, [3, 1]).lengths == (3, 1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_that_are_as_wide_by_chance_keep_all_their_tokens(side: str) -> None:
    inputs, outputs = torch.tensor([128, 30, 20]), torch.tensor([20, 100, 128])
    place = torch.arange(128) if side == "right" else torch.arange(127, -1, -1)
    mask = (place < inputs[:, None]).long()
    own = place < outputs[:, None]
    batch = {
        "input_ids": mask * 7,
        "attention_mask": mask,
        "labels": torch.where(own, place + 1, -100),
        "decoder_input_ids": torch.where(own, place + 1, 0),
        "lengths": inputs,
    }
    micro = Trimmer.of(batch, "attention_mask").take((1, 2), 64)
    assert micro["input_ids"].shape == (2, 64)
    assert torch.equal(micro["labels"], batch["labels"][1:])
    assert torch.equal(micro["decoder_input_ids"], batch["decoder_input_ids"][1:])
    # The same names where they follow the inputs: trimmed with them.
    follows = {**batch, "labels": torch.where(mask != 0, place + 1, -100), "decoder_input_ids": mask * 7}
    micro = Trimmer.of(follows, "attention_mask").take((1, 2), 64)
    assert micro["labels"].shape == micro["decoder_input_ids"].shape == (2, 64)


def test_features_that_are_as_wide_by_chance_are_left_whole() -> None:
    tokens = (torch.arange(128) < torch.tensor([128, 30, 20])[:, None]).long()
    patches = torch.randn(3, 128, 2)
    batch = {
        "input_ids": tokens * 7,
        "attention_mask": tokens,
        "image": patches,
        "pixels": torch.rand(3, 1, 128, 4),
    }
    micro = Trimmer.of(batch, "attention_mask").take((1, 2), 64)
    assert micro["input_ids"].shape == (2, 64)
    assert torch.equal(micro["image"], patches[1:])
    assert torch.equal(micro["pixels"], batch["pixels"][1:])
    # Features of each token are filled as those are; and where there are no tokens, the lengths are theirs.
    filled = {**batch, "image": torch.where(tokens[:, :, None] != 0, patches, torch.tensor([0.5, 2.0]))}
    assert Trimmer.of(filled, "attention_mask").take((1, 2), 64)["image"].shape == (2, 64, 2)
    alone = {"attention_mask": tokens, "image": patches}
    assert Trimmer.of(alone, "attention_mask").take((1, 2), 64)["image"].shape == (2, 64, 2)
    named = Trimmer.of(batch, "attention_mask", pad_keys=["input_ids", "image", "attention_mask"])
    assert named.take((1, 2), 64)["image"].shape == (2, 64, 2)
