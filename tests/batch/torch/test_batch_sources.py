"""Where batches come from: each source, each structure, each error with its text."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import batchfit
from batchfit import ResizableLoader
from batchfit._engine.batch import sources
from batchfit._engine.batch.sample_cache import Samples
from batchfit._engine.batch.sources import batch_source, repeat_rows, takes_arguments
from batchfit._engine.batch.structure import element_count, to_device, wrong_size
from batchfit.errors import ReadOnceError

KINDS = "a callable make_batch(n), a dataset, a DataLoader or one example batch"


class Ragged(Dataset[Any]):
    """Samples of the given lengths; remembers what was read."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(index)
        return torch.full((self.lengths[index],), index)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1)


# A callable


def test_callable_gives_its_own_batch() -> None:
    made: list[Any] = []

    def make_batch(n: int) -> torch.Tensor:
        made.append(torch.zeros(n, 3))
        return made[-1]

    batch = batch_source(make_batch)(5)
    assert batch is made[0]
    assert len(made) == 1


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(8, 3),
        {"x": torch.zeros(8, 3), "y": torch.zeros(8), "scale": torch.tensor(1.0)},
        [torch.zeros(8, 3), torch.zeros(8)],
        [{"image": torch.zeros(3, 4, 4)}] * 8,
        ["text"] * 8,
        {"text": ["text"] * 8},
        {"x": np.zeros((8, 2))},
        (torch.zeros(8, 31),),
    ],
)
def test_callable_with_the_wrong_size(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"^make_batch\(32\) returned a batch of 8\. Return as many samples"):
        batch_source(lambda n: batch)(32)


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(32, 3),
        {"x": torch.zeros(32), "sizes": torch.zeros(7)},  # one part has the samples
        torch.zeros(7, 32, 5),  # sequence-first
        (torch.zeros(7, 32), torch.zeros(7, 32)),
        {"src": torch.zeros(7, 9), "target": torch.zeros(8, 9)},  # cannot be read
        [torch.zeros(3, 5, 5)] * 32,  # a list of images
        (tuple([torch.zeros(3, 5, 5)] * 32), ({"boxes": torch.zeros(2, 4)},) * 32),
        {"x": torch.tensor(1.0)},
        object(),
        "text",
        pack_sequence([torch.zeros(4), torch.zeros(2)]),
    ],
)
def test_callable_with_what_cannot_be_called_wrong(batch: Any) -> None:
    assert batch_source(lambda n: batch)(32) is batch


def test_callable_errors() -> None:
    with pytest.raises(
        TypeError, match=r"^make_batch must take one argument, the number of samples, not <func"
    ):
        batch_source(lambda: torch.zeros(1))
    with pytest.raises(TypeError, match=r"^make_batch must take one argument"):
        batch_source(lambda n, device: torch.zeros(n))
    with pytest.raises(
        TypeError, match=r"^make_batch must return a batch, and make_batch\(4\) returned None$"
    ):
        batch_source(lambda n: None)(4)
    with pytest.raises(
        TypeError,
        match=r"^collate_fn must be None unless make_batch is a dataset or a list of samples, and make_batch "
        r"is a callable: collate inside it$",
    ):
        batch_source(lambda n: torch.zeros(n), collate_fn=padded)
    with pytest.raises(TypeError, match=r"^collate_fn must be a callable or None, not 3$"):
        batch_source(Ragged([1]), collate_fn=3)  # type: ignore[arg-type]


def test_takes_arguments() -> None:
    assert takes_arguments(lambda *args: None, 5)
    assert takes_arguments(lambda n, other=1: None, 1)
    assert not takes_arguments(lambda *, n: None, 1)
    assert takes_arguments(dict.fromkeys, 1)
    assert takes_arguments(print, 1)


# A dataset


def test_dataset_gives_the_longest_which_are_last() -> None:
    source = batch_source(Ragged([2, 3, 4, 9, 7]), collate_fn=padded)
    assert source(1)[:, 0].tolist() == [3]
    two = source(2)
    assert two[:, 0].tolist() == [3, 4]
    assert two.shape == (2, 9)
    assert source(5)[:, 0].tolist() == [3, 4, 2, 1, 0]
    assert source(8)[:, 0].tolist() == [3, 4, 2, 1, 0, 3, 4, 2]


def test_dataset_is_scanned_once_and_lazily() -> None:
    dataset = Ragged([2, 5, 3])
    source = batch_source(dataset, collate_fn=padded)
    assert dataset.read == []
    source(1)
    assert dataset.read == [0, 1, 2, 1]
    source(2)
    assert dataset.read == [0, 1, 2, 1, 1, 2]


def test_dataset_of_equal_samples_keeps_its_order() -> None:
    x, y = torch.randn(6, 3), torch.arange(6)
    batch = batch_source(TensorDataset(x, y))(4)
    assert isinstance(batch, list)
    torch.testing.assert_close(batch[0], x[:4])
    assert batch[1].tolist() == [0, 1, 2, 3]


class Bulk(Ragged):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [torch.full((self.lengths[index],), 100 + index) for index in indices]


def test_dataset_that_fetches_many_at_once() -> None:
    assert batch_source(Bulk([1, 3, 2]), collate_fn=padded)(2)[:, 0].tolist() == [101, 102]


class Plain:
    """Map-style without any base class."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": list(range(index + 1)), "labels": index}


def test_dataset_without_a_base_class() -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {
            "input_ids": padded([torch.tensor(sample["input_ids"]) for sample in samples]),
            "labels": torch.tensor([sample["labels"] for sample in samples]),
        }

    batch = batch_source(Plain(), collate_fn=collate)(2)
    assert batch["labels"].tolist() == [2, 1]
    assert batch["input_ids"].shape == (2, 3)


def test_long_dataset_is_scanned_at_even_distances(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "SCAN_LIMIT", 4)
    dataset = Ragged([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    source = batch_source(dataset, collate_fn=padded)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        assert source(6)[:, 0].tolist() == [7, 5, 2, 0, 7, 5]
        source(1)
    assert dataset.read[:4] == [0, 2, 5, 7]
    assert [record.message for record in caplog.records] == [
        "batches are made of the longest of 4 of the dataset's 10 samples, evenly spaced; a longer one may "
        "exist: pass a callable make_batch(n) to choose them yourself"
    ]


def test_short_dataset_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="batchfit"):
        batch_source(Ragged([1, 2]), collate_fn=padded)(2)
    assert not caplog.records


def test_scan_limit() -> None:
    assert sources.SCAN_LIMIT == 4096


def _padded(samples: list[torch.Tensor]) -> dict[str, Any]:
    rows = pad_sequence(samples, batch_first=True)
    return {"rows": rows, "pair": (rows > 0, torch.tensor([len(one) for one in samples])), "kind": "padded"}


COLLATES: dict[str, tuple[Any, bool]] = {
    "rows": (_padded, True),
    "a tensor": (lambda samples: pad_sequence(samples, batch_first=True), True),
    "each against each": (
        lambda samples: {**_padded(samples), "mask": torch.ones(len(samples), len(samples))},
        False,
    ),
    "offsets": (lambda samples: {**_padded(samples), "ends": torch.arange(len(samples) + 1)}, False),
    "their number": (lambda samples: {**_padded(samples), "count": len(samples)}, False),
    "names": (lambda samples: {**_padded(samples), "names": [str(len(one)) for one in samples]}, False),
    "an array": (lambda samples: {**_padded(samples), "array": np.ones(len(samples))}, False),
    "sequences first": (lambda samples: pad_sequence(samples), False),
    "samples": (list, False),
}


@pytest.mark.parametrize("name", COLLATES)
@pytest.mark.parametrize("lengths", [[3], [1, 4, 2], [3, 3, 3, 3, 3, 3, 3]], ids=["one", "three", "seven"])
def test_samples_that_come_again_are_read_once_where_a_batch_is_rows(
    name: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine any sample may take long, and would be kept for that.
    monkeypatch.setattr("batchfit._engine.batch.sample_cache._SLOW_S", 60.0)
    collate, once = COLLATES[name]
    dataset = Ragged(lengths)
    source = batch_source(dataset, collate_fn=collate)
    source(2)
    longest = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    for size in (8, 23):
        wanted = collate(
            [torch.full((lengths[i],), i) for i in itertools.islice(itertools.cycle(longest), size)]
        )
        dataset.read.clear()
        batch = source(size)
        assert str(batch) == str(wanted)  # small enough that every value is in it
    assert (len(dataset.read) < 23) is once  # the first large batch reads twice, to know what rows are


def test_list_of_samples_with_collate_is_a_dataset() -> None:
    samples = [torch.zeros(2), torch.ones(5), torch.full((3,), 2.0)]
    assert batch_source(samples, collate_fn=padded)(2)[:, 0].tolist() == [1.0, 2.0]
    as_list = batch_source(samples, collate_fn=list)(4)
    assert [len(sample) for sample in as_list] == [5, 3, 2, 5]


def test_list_of_samples_without_collate_is_the_batch() -> None:
    images = [{"image": torch.zeros(3, size, size)} for size in (2, 8, 4)]
    batch = batch_source(images)(4)
    assert [sample["image"].shape[1] for sample in batch] == [8, 4, 2, 8]
    assert batch_source(["a", "long", "abc"])(2) == ["long", "abc"]
    assert batch_source([np.zeros(2), np.ones(3)])(1)[0].shape == (3,)


def test_collate_that_loses_samples() -> None:
    source = batch_source(Ragged([3, 3, 3, 3]), collate_fn=lambda samples: torch.stack(samples[:2]))
    assert source(2).shape == (2, 3)
    with pytest.raises(ValueError, match=r"^collate_fn made a batch of 2 out of 4 samples\. Where samples"):
        source(4)


def test_a_loader_is_its_dataset_and_collate_fn() -> None:
    data = Ragged([1, 4, 2])
    for loader in (
        DataLoader(data, batch_size=2, shuffle=True, collate_fn=padded, num_workers=2),
        DataLoader(data, batch_sampler=[[0, 1], [2]], collate_fn=padded),
        ResizableLoader(data, 2, collate_fn=padded),
    ):
        source = batch_source(loader)
        assert isinstance(source, sources.Longest)
        assert torch.equal(source(4), batch_source(data, collate_fn=padded)(4))
        with pytest.raises(TypeError, match=r"^collate_fn must be None with a loader, which has its own"):
            batch_source(loader, collate_fn=padded)


class HasBoth(Ragged):
    """A dataset over another one, with a method `collate_fn`, as people write them."""

    dataset = "what it reads"

    def __iter__(self) -> Any:
        return iter(())

    def collate_fn(self, samples: Any) -> Any:
        return padded(samples)


def test_a_dataset_that_has_what_loaders_have_is_a_dataset() -> None:
    data = HasBoth([1, 2])
    assert batch_source(data, collate_fn=data.collate_fn)(2).shape == (2, 2)


# A dataset in a trace


def popping(samples: list[dict[str, Any]]) -> Any:
    labels = [sample.pop("label") for sample in samples]
    return {"x": torch.stack([sample["x"] for sample in samples]), "label": torch.tensor(labels)}


class Labelled(Dataset[Any]):
    def __init__(self) -> None:
        self.rows, self.reads = torch.randn(5, 16), 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {"x": self.rows[index], "label": index % 2}


def predicted(make_batch: Any, collate_fn: Any = None, *, budget: str = "128MiB", **more: Any) -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    workload = batchfit.training(
        model,
        optimizer,
        lambda model, batch: torch.nn.functional.cross_entropy(model(batch["x"]), batch["label"]),
        make_batch,
        collate_fn=collate_fn,
    )
    return batchfit.predict_batch_size(workload, budget=budget, **more)


def test_a_trace_reads_a_dataset_a_few_times_and_predicts_the_same() -> None:
    data = Labelled()
    answer = predicted(data, popping)
    assert answer.batch_size > 10_000
    assert data.reads < 100
    example = popping([data[0], data[1]])
    assert answer.batch_size == predicted(example).batch_size


@pytest.mark.slow
def test_a_model_that_makes_the_batch_is_still_seen_in_a_trace() -> None:
    learns = torch.nn.Linear(16, 16)

    def embedding(samples: list[Any]) -> Any:
        batch = popping(samples)
        return {**batch, "x": learns(batch["x"]).tanh()}

    # What it computes is memory of the device, at each size.
    sizes = [predicted(Labelled(), how, budget="96MiB").batch_size for how in (embedding, popping)]
    assert 0 < sizes[0] < 0.9 * sizes[1]


@dataclass
class Carrier:
    """A batch that moves in a way of its own."""

    x: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(2), "names": ["a", "b"], "n": 3}, True),
        ([torch.zeros(2), Carrier(torch.zeros(1), torch.zeros(1))], True),
        ((torch.zeros(2), torch.zeros(2, device="meta")), False),
        ({"packed": pack_sequence([torch.zeros(2)])}, False),
    ],
)
def test_what_is_on_the_host(batch: Any, expected: bool) -> None:
    assert all(map(sources.is_on_host, sources.leaves(batch))) is expected


READ_ONCE = (
    "make_batch must be a dataset that can be iterated again, and count goes on where it was: what is read "
    "would be missing in training. Pass a list of samples with collate_fn, a callable make_batch(n), or give "
    "it an __iter__ that begins again"
)


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (itertools.count(), ReadOnceError, READ_ONCE),
        (
            DataLoader(Ragged([1]), batch_size=None),
            TypeError,
            f"make_batch must be {KINDS}, not a DataLoader with batch_size=None, whose dataset gives whole "
            "batches: pass one of them as the example, make_batch=next(iter(loader)), or a callable "
            "make_batch(n)",
        ),
        (
            NoLength(),
            TypeError,
            "make_batch must be a dataset with a length, not NoLength without __len__: "
            "give it one, or pass a callable make_batch(n)",
        ),
        (Ragged([]), ValueError, "make_batch must hold at least one sample, not an empty Ragged"),
        ([], ValueError, "make_batch must hold at least one sample, not an empty list"),
        (None, TypeError, f"make_batch must be {KINDS}, not None"),
        ("text", TypeError, f"make_batch must be {KINDS}, not 'text'"),
        (8, TypeError, f"make_batch must be {KINDS}, not 8"),
        (torch.tensor(1.0), TypeError, f"make_batch must be {KINDS}, not tensor(1.)"),
        (
            {"x": torch.tensor(1.0), "name": "a"},
            TypeError,
            f"make_batch must be {KINDS}, and this dict holds no tensor with a first dimension",
        ),
        (
            {"input_ids": torch.zeros(8, 3), "mask": torch.zeros(8, 3), "labels": torch.zeros(4)},
            ValueError,
            "make_batch must be an example batch whose parts have one length: "
            "batch['input_ids'] has 8, batch['labels'] has 4",
        ),
        (
            (torch.zeros(4), {"a": [torch.zeros(4), torch.zeros(3)]}),
            ValueError,
            "make_batch must be an example batch whose parts have one length: "
            "batch[0] has 4, batch[1]['a'][1] has 3",
        ),
        (
            {"x": torch.zeros(2), "targets": [{"boxes": torch.zeros(5, 4)}] * 3},
            ValueError,
            "make_batch must be an example batch whose parts have one length: "
            "batch['x'] has 2, batch['targets'] has 3",
        ),
        (
            torch.zeros(0, 3),
            ValueError,
            "make_batch must hold at least one sample, not an example batch of length 0",
        ),
    ],
    ids=lambda given: str(given).partition(" at 0x")[0],
)
def test_sources_that_are_refused(source: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        batch_source(source)
    assert str(caught.value) == text


def test_collate_with_an_example_batch() -> None:
    with pytest.raises(TypeError, match=r"^collate_fn must be None unless .*, and make_batch is a Tensor$"):
        batch_source(torch.zeros(4, 2), collate_fn=padded)


# One example batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


Loose = namedtuple("Loose", ["x", "name"])


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str
    total: int = field(init=False, default=7)

    def __post_init__(self) -> None:
        if self.x.shape[0] != 2:
            raise AssertionError("resizing must not run __post_init__ again")


@dataclass(slots=True)
class Slotted:
    x: torch.Tensor


def x_of(size: int) -> torch.Tensor:
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]])[torch.arange(size) % 2]


EXAMPLE = x_of(2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(
    ("example", "read"),
    [
        (EXAMPLE, lambda batch: batch),
        ({"x": EXAMPLE, "name": "a"}, lambda batch: batch["x"]),
        (OrderedDict(x=EXAMPLE), lambda batch: batch["x"]),
        (defaultdict(list, x=EXAMPLE), lambda batch: batch["x"]),
        ((EXAMPLE, 3), lambda batch: batch[0]),
        ([EXAMPLE, EXAMPLE[:, 0]], lambda batch: batch[0]),
        (Pair(EXAMPLE, EXAMPLE), lambda batch: batch.x),
        (Loose(EXAMPLE, "a"), lambda batch: batch.x),
        (Frozen(EXAMPLE, "a"), lambda batch: batch.x),
        (Slotted(EXAMPLE), lambda batch: batch.x),
        ({"deep": [({"x": EXAMPLE},), EXAMPLE]}, lambda batch: batch["deep"][0][0]["x"]),
        (EXAMPLE.numpy(), torch.from_numpy),
    ],
)
def test_example_is_repeated_or_cut(example: Any, read: Any, size: int) -> None:
    batch = batch_source(example)(size)
    assert type(batch) is type(example)
    assert torch.equal(read(batch), x_of(size))
    assert torch.equal(EXAMPLE, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))


def test_example_keeps_what_is_not_a_sample() -> None:
    scale = torch.tensor(2.0)
    example = {
        "x": EXAMPLE,
        "scale": scale,
        "size": [224, 224, 3],
        "names": ["a", "b"],
        "none": None,
        "shape": EXAMPLE.shape,
        "array": np.arange(2),
        "targets": [{"boxes": torch.zeros(5, 4)}, {"boxes": torch.zeros(1, 4)}],
        "empty": [],
    }
    batch = batch_source(example)(3)
    assert batch["scale"] is scale
    assert batch["size"] == [224, 224, 3]
    assert batch["names"] == ["a", "b", "a"]
    assert batch["none"] is None
    assert batch["shape"] == EXAMPLE.shape
    assert batch["array"].tolist() == [0, 1, 0]
    assert [target["boxes"].shape[0] for target in batch["targets"]] == [5, 1, 5]
    assert batch["empty"] == []
    assert list(batch) == list(example)


def test_example_of_lists_alone() -> None:
    source = batch_source({"input_ids": [[1, 2], [3]], "labels": [0, 1]})
    assert source(3) == {"input_ids": [[1, 2], [3], [1, 2]], "labels": [0, 1, 0]}
    with pytest.raises(ValueError, match=r"batch\['input_ids'\] has 2, batch\['labels'\] has 3$"):
        batch_source({"input_ids": [[1, 2], [3]], "labels": [0, 1, 2]})


def test_defaultdict_keeps_its_factory() -> None:
    assert batch_source(defaultdict(list, x=EXAMPLE))(1)["missing"] == []


def test_read_only_mapping_becomes_a_dict() -> None:
    assert batch_source(MappingProxyType({"x": EXAMPLE}))(1).keys() == {"x"}


def test_frozen_dataclass_keeps_its_other_fields() -> None:
    batch = batch_source(Frozen(EXAMPLE, "a"))(3)
    assert (batch.name, batch.total) == ("a", 7)


def test_batch_encoding() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    example = transformers.BatchEncoding({"input_ids": EXAMPLE, "attention_mask": EXAMPLE})
    batch = batch_source(example)(5)
    assert type(batch) is transformers.BatchEncoding
    assert torch.equal(batch["input_ids"], x_of(5))
    assert torch.equal(batch.attention_mask, x_of(5))
    assert torch.equal(example["input_ids"], EXAMPLE)
    moved = to_device(batch, torch.device("meta"))
    assert type(moved) is transformers.BatchEncoding
    assert moved["input_ids"].device.type == "meta"
    assert batch["input_ids"].device.type == "cpu"


def test_example_is_never_handed_out() -> None:
    example = {"x": torch.zeros(4, 2), "inner": {"y": torch.zeros(4)}}
    source = batch_source(example)
    for size in (2, 4):
        batch = source(size)
        batch["x"].add_(1)
        batch["inner"].pop("y").add_(1)
        batch.pop("x")
    assert torch.equal(example["x"], torch.zeros(4, 2))
    assert torch.equal(example["inner"]["y"], torch.zeros(4))


def test_example_keeps_requires_grad_but_no_graph() -> None:
    rows = torch.randn(2, 3, requires_grad=True)
    batch = batch_source({"x": rows, "hidden": rows * 2})(4)
    assert batch["x"].requires_grad
    assert batch["x"].is_leaf
    assert batch["hidden"].is_leaf


def test_example_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        rows = torch.randn(2, 3)
    batch = batch_source(rows)(3)
    assert not batch.is_inference()
    weight = torch.zeros(3, requires_grad=True)
    (batch @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("dims", "memory_format"),
    [((4, 5, 6), torch.channels_last), ((4, 5, 6, 7), torch.channels_last_3d)],
)
def test_example_keeps_channels_last(length: int, dims: Any, memory_format: torch.memory_format) -> None:
    rows = torch.randn(length, *dims).to(memory_format=memory_format)
    for size in (1, 2, 7):
        out = repeat_rows(rows, size)
        assert out.is_contiguous(memory_format=memory_format)
        assert torch.equal(out, rows[torch.arange(size) % length])


def test_strided_example_becomes_dense() -> None:
    out = repeat_rows(torch.arange(12).reshape(3, 4).t(), 5)
    assert out.is_contiguous()
    assert out[:, 0].tolist() == [0, 1, 2, 3, 0]
    assert out.untyped_storage().nbytes() == out.numel() * out.element_size()


def test_sparse_example() -> None:
    rows = torch.eye(3).to_sparse()
    assert torch.equal(repeat_rows(rows, 4).to_dense(), torch.eye(3)[torch.arange(4) % 3])


@examples(60)
@given(
    length=st.integers(1, 6),
    size=st.integers(1, 40),
    shape=st.lists(st.integers(0, 3), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
def test_repeated_rows_are_the_rows(length: int, size: int, shape: list[int], dtype: torch.dtype) -> None:
    rows = torch.randint(0, 9, (length, *shape)).to(dtype)
    out = repeat_rows(rows, size)
    assert torch.equal(out, rows[torch.arange(size) % length])
    assert out.dtype is dtype
    assert out.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr() or rows.numel() == 0


leaves = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.just(EXAMPLE))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        inner.map(Slotted),  # type: ignore[arg-type]
    ),
    max_leaves=8,
)


@examples(100)
@given(tree=trees, size=st.integers(1, 9))
def test_any_structure_is_resized_and_keeps_its_shape(tree: Any, size: int) -> None:
    """Every tensor gets `size` rows, everything else is the same, and so is the structure."""
    batch = batch_source((EXAMPLE, tree))(size)

    def compare(new: Any, old: Any) -> None:
        assert type(new) is type(old)
        if isinstance(old, torch.Tensor):
            assert torch.equal(new, x_of(size))
        elif isinstance(old, Slotted):
            compare(new.x, old.x)
        elif isinstance(old, dict):
            assert list(new) == list(old)
            for key in old:
                compare(new[key], old[key])
        elif isinstance(old, tuple) and len(old) == len(EXAMPLE) and all(isinstance(one, str) for one in old):
            assert new == tuple(old[i % len(EXAMPLE)] for i in range(size))  # a text per sample
        elif isinstance(old, tuple):
            for new_item, old_item in zip(new, old, strict=True):
                compare(new_item, old_item)
        else:
            assert new == old

    compare(batch, (EXAMPLE, tree))
    assert wrong_size(batch, size) is None


# Devices (meta stands for another device)


def test_to_device_moves_what_can_move() -> None:
    class Own:
        """Knows how to move itself."""

        def __init__(self, device: str) -> None:
            self.device = device

        def to(self, device: torch.device) -> Own:
            return Own(device.type)

    meta = torch.device("meta")
    batch = {"x": torch.zeros(2), "pair": Pair(torch.zeros(1), torch.zeros(1)), "n": 3, "own": Own("cpu")}
    moved = to_device(batch, meta)
    assert moved["x"].device.type == moved["pair"].y.device.type == moved["own"].device == "meta"
    assert isinstance(moved["pair"], Pair)
    assert moved["n"] == 3
    assert batch["x"].device.type == "cpu"  # type: ignore[attr-defined]


def test_to_device_leaves_what_is_there() -> None:
    batch = {"x": torch.zeros(2), "deep": [(torch.zeros(1),), "a"]}
    assert to_device(batch, torch.device("cpu")) is batch
    assert to_device(batch, None) is batch


def test_to_device_moves_a_packed_sequence_as_one() -> None:
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    moved = to_device({"x": packed}, torch.device("meta"))["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


# Lengths


class Picture:
    """As PIL's: `size` is (width, height)."""

    size = (5, 4)


@pytest.mark.parametrize(
    ("sample", "count"),
    [
        (torch.zeros(2, 3), 6),
        (np.zeros((2, 3)), 6),
        ("text", 4),
        (b"12345", 5),
        (3, 1),
        (None, 1),
        ([1, 2, 3], 3),
        (["ab", "c"], 3),
        ([], 0),
        ([[1, 2], [3]], 3),
        ({"x": torch.zeros(4), "y": 1}, 5),
        ((torch.zeros(2), "ab"), 4),
        (Slotted(torch.zeros(7)), 7),
        (Picture(), 20),
        (torch.tensor(1.0), 1),
    ],
)
def test_element_count(sample: Any, count: int) -> None:
    assert element_count(sample) == count


@examples(60)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), size=st.integers(1, 30))
def test_batch_is_the_worst_case(lengths: list[int], size: int) -> None:
    batch = batch_source(Ragged(lengths), collate_fn=padded)(size)
    chosen = sorted((lengths[index] for index in batch[:, 0].tolist()), reverse=True)
    assert len(chosen) == size
    whole, rest = divmod(size, len(lengths))
    assert chosen == sorted(lengths * whole + sorted(lengths, reverse=True)[:rest], reverse=True)


class Slow(torch.utils.data.Dataset[Any]):
    """Counts what is read; half of a millisecond per sample."""

    def __init__(self, count: int, *, make: Callable[[int], Any] | None = None) -> None:
        self.count, self.read = count, Counter[int]()
        self._make = make or (lambda index: (torch.full((4 + index % 7,), float(index)), index))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.read[index] += 1
        time.sleep(5e-4)
        return self._make(index)


def padded_pairs(samples: list[Any]) -> Any:
    samples.sort(key=lambda one: -len(one[0]))  # of its own list, as a collate_fn may
    rows = torch.nn.utils.rnn.pad_sequence([one[0] for one in samples], batch_first=True)
    return rows, torch.tensor([one[1] for one in samples])


def test_slow_samples_are_read_once() -> None:
    """By the scan for the longest, by trials of any size, by steps and by traces."""
    dataset = Slow(60)
    model = nn.Linear(10, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = model(batch[0]).square().mean()
        return loss

    work = batchfit.training(model, optimizer, loss_fn, dataset, collate_fn=padded_pairs)
    fit = batchfit.find_batch_size(work, budget="64KiB")
    assert fit.batch_size > 60
    batchfit.predict_batch_size(work, budget="1GiB", max_size=100)
    assert set(dataset.read.values()) == {1}


def test_samples_that_are_kept_are_the_datasets() -> None:
    kept, read = batch_source(Slow(9), collate_fn=padded_pairs), Slow(9)
    order = sorted(range(9), key=lambda index: -(4 + index % 7))
    for size in (1, 3, 9):
        wanted = padded_pairs([read[index] for index in order[:size]])
        for one, two in zip(kept(size), wanted, strict=True):
            assert torch.equal(one, two)


def test_what_is_kept_is_bounded_and_the_longest_stay() -> None:
    samples, lengths = Samples(most_bytes=20_000), [100 * (1 + index % 10) for index in range(50)]

    def fetch(indices: list[int]) -> list[torch.Tensor]:
        time.sleep(5e-4 * len(indices))
        asked.extend(indices)
        return [torch.full((lengths[index],), float(index)) for index in indices]

    asked: list[int] = []
    samples.read(range(50), fetch)
    asked.clear()
    again = samples.read(range(50), fetch)
    assert [int(one[0]) for one in again] == list(range(50))
    assert 0 < 50 - len(asked) <= 20_000 // 400
    assert min(lengths[i] for i in set(range(50)) - set(asked)) >= max(lengths[i] for i in asked)


def test_views_and_what_cannot_be_pickled_are_read_again() -> None:
    whole = torch.arange(4000.0).reshape(40, 100)
    for make in (lambda index: whole[index], lambda index: lambda: index):
        dataset = Slow(8, make=make)
        source = batch_source(dataset, collate_fn=list)
        assert len(source(8)) == len(source(8)) == 8
        assert set(dataset.read.values()) == {3}


def test_a_list_of_pairs_is_collated_as_a_loader_does() -> None:
    pairs = [(torch.full((3,), float(i)), i) for i in range(5)]
    x, y = batch_source(pairs)(4)
    assert x.shape == (4, 3)
    assert y.tolist() == [0, 1, 2, 3]
    assert batch_source(pairs, collate_fn=list)(2) == pairs[:2]


# What `default_collate` makes of nested samples


@pytest.mark.parametrize("size", [3, 8, 11])
def test_batches_of_nested_samples_are_what_a_data_loader_gives(size: int) -> None:
    samples = [((torch.full((2,), float(i)), torch.tensor(i)), {"a": torch.full((3,), i)}) for i in range(8)]

    class Nested(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    batch = batch_source(Nested())(size)
    assert [len(batch[0][0]), len(batch[0][1]), len(batch[1]["a"])] == [size] * 3
    example = batch_source(default_collate(samples))(size)
    assert [len(example[0][0]), len(example[0][1]), len(example[1]["a"])] == [size] * 3
    with pytest.raises(ValueError, match=r"^make_batch\(9\) returned a batch of 2"):
        batch_source(lambda n: [[torch.zeros(7, 2), torch.zeros(6)], {"a": torch.zeros(5)}])(9)
