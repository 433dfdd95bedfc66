"""Batches of any structure, cut and joined."""

from __future__ import annotations

import enum
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from batchfit._engine.batch.sample_count import AmbiguousBatchError
from batchfit._engine.batch.split import Batch, joined, microbatches
from batchfit._engine.batch.user_split import Cutter
from batchfit._engine.sizing.pure.sizes import balanced

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Record:
    x: torch.Tensor
    name: str = "a"


class Kind(enum.Enum):
    ONE = 1


class Table:
    """What a TensorDict looks like to us."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.batch_size = torch.Size(x.shape[:1])

    def __getitem__(self, rows: Any) -> Table:
        return Table(self.x[rows])


def values(n: int) -> list[Any]:
    return [
        torch.arange(n),
        torch.arange(3.0 * n).view(n, 3),
        torch.arange(n).view(n, 1).expand(n, 4),
        np.arange(n),
        [{"text": str(i), "ids": torch.arange(i)} for i in range(n)],
        [f"sample {i}" for i in range(n)],
        torch.tensor(2.5),
        0.1,
        None,
        "broadcast",
        tuple(f"t{i}" for i in range(n)),
    ]


def with_values(node: Any, n: int) -> Any:
    """The tree with a value for each number. Hypothesis keeps what it draws: tensors are made afterwards."""
    if isinstance(node, int):
        return values(n)[node]
    if isinstance(node, dict):
        return {name: with_values(one, n) for name, one in node.items()}
    if isinstance(node, Pair):
        return Pair(*(with_values(one, n) for one in node))
    return tuple(with_values(one, n) for one in node)


def batches(n: int) -> st.SearchStrategy[Any]:
    inner = st.recursive(
        st.integers(0, 10),
        lambda nodes: st.one_of(
            st.dictionaries(st.sampled_from("abcd"), nodes, min_size=1, max_size=3),
            st.lists(nodes, min_size=2, max_size=3).map(tuple),
            st.builds(Pair, nodes, nodes),
        ),
        max_leaves=5,
    )
    return inner.map(lambda node: {"rows": torch.arange(n), "more": with_values(node, n)})


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return bool((one == two).all())
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=50).map(tuple))
def test_microbatches_take_every_sample_once_and_in_order(sizes: tuple[int, ...]) -> None:
    taken = [
        i
        for microbatch in microbatches(sizes)
        for i in range(microbatch.samples.start, microbatch.samples.stop)
    ]
    assert taken == list(range(sum(sizes)))
    assert tuple(microbatch.size for microbatch in microbatches(sizes)) == sizes


def test_microbatches_go_on_where_others_have_ended() -> None:
    first, second = microbatches((3, 2)), microbatches((2, 1), start=5)
    assert [one.samples for one in (*first, *second)] == [slice(0, 3), slice(3, 5), slice(5, 7), slice(7, 8)]
    assert [one.size for one in second] == [2, 1]
    assert microbatches(()) == ()


@examples(150)
@given(data=st.data(), n=st.integers(2, 9), at_most=st.integers(1, 9))
def test_microbatches_of_any_structure_hold_every_sample_once(data: Any, n: int, at_most: int) -> None:
    batch = data.draw(batches(n))
    sizes = balanced(n, at_most)
    try:
        whole = Batch.of(batch)
    except AmbiguousBatchError:
        assert n <= 3  # two or three tensors alike, with as many rows: parts, or one per sample
        return
    assert whole.length == n
    micros = whole.micros(microbatches(sizes))
    assert [micro["rows"].tolist() for micro in micros] == [
        list(range(n))[microbatch.samples] for microbatch in microbatches(sizes)
    ]
    # picked one by one, in the same order, is the same
    for micro, microbatch in zip(micros, microbatches(sizes), strict=True):
        assert same(micro, whole.take(list(range(n))[microbatch.samples]))
    assert same(whole.cut([n])[0], batch)


@examples(100)
@given(data=st.data(), n=st.integers(2, 9), at_most=st.integers(1, 9))
def test_joining_is_the_inverse_of_cutting(data: Any, n: int, at_most: int) -> None:
    kinds = [torch.arange(2.0 * n).view(n, 2), [{"id": i} for i in range(n)], np.arange(n), None, "same"]
    batch = {
        "rows": torch.arange(n),
        "nested": Pair(kinds[data.draw(st.integers(0, 4))], (kinds[data.draw(st.integers(0, 4))],)),
    }
    sizes = balanced(n, at_most)
    assert same(joined(Batch.of(batch).cut(sizes), sizes), batch)


def test_containers_keep_their_kind_and_are_new() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.arange(6).view(3, 2)})
    output = transformers.modeling_outputs.BaseModelOutput(last_hidden_state=torch.ones(3, 2))
    table = Table(torch.arange(3))
    batch = {"e": encoding, "o": output, "r": Record(torch.arange(3)), "d": OrderedDict(t=table)}
    first, last = Batch.of(batch).cut([2, 1])
    assert [type(value) for value in first.values()] == [type(value) for value in batch.values()]
    assert last["e"]["input_ids"].tolist() == [[4, 5]]
    assert last["o"].last_hidden_state.shape == (1, 2)
    assert last["r"] == Record(last["r"].x, "a")
    assert last["d"]["t"].x.tolist() == [2]
    (only,) = Batch.of(batch).cut([3])
    only.pop("e")  # what fn does to its microbatch does not reach the batch
    only["d"].clear()
    assert "e" in batch
    assert "t" in batch["d"]


def test_containers_of_samples_are_new_too() -> None:
    """Collate functions pop labels out of their samples; a second try must find them."""
    batch = [{"x": torch.ones(2), "y": i, "ids": [i], "more": ({"z": i},)} for i in range(4)]
    cutter = Cutter(count=len)
    for micro in (*Batch.of(batch, cutter=cutter).cut([3, 1]), Batch.of(batch, cutter=cutter).take([2, 0])):
        for sample in micro:
            sample.pop("y")
            sample["ids"].append(7)
            sample["more"][0].clear()
    assert batch == [{"x": batch[i]["x"], "y": i, "ids": [i], "more": ({"z": i},)} for i in range(4)]
    assert Batch.of(batch, cutter=cutter).cut([2, 2])[1][0]["x"] is batch[2]["x"]


def test_microbatches_are_views() -> None:
    x = torch.arange(6)
    assert Batch.of((x, x)).cut([4, 2])[1][0].data_ptr() == x[4:].data_ptr()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_sparse_and_nested_tensors_are_cut_too() -> None:
    sparse = torch.eye(4).to_sparse()
    assert Batch.of(sparse).cut([3, 1])[1].to_dense().tolist() == [[0, 0, 0, 1]]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3), torch.ones(1)], layout=torch.jagged)
    assert [row.numel() for row in Batch.of({"x": nested}).cut([1, 2])[1]["x"].unbind()] == [3, 1]
    with pytest.raises(TypeError, match=r"one of layout torch\.sparse_csr"):
        Batch.of(torch.eye(4).to_sparse_csr()).cut([2, 2])


def test_a_length_that_disagrees_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch\['x'\] has 4, batch\['y'\]\[0\] has 3. Pass split="):
        Batch.of({"x": torch.ones(4), "y": (torch.ones(3), torch.ones(4))})
    with pytest.raises(TypeError, match="must hold tensors or lists with one row per sample, not dict"):
        Batch.of({"x": 3})
    with pytest.raises(TypeError, match=r"batch\[0\] is a PackedSequence"):
        Batch.of((pack_sequence([torch.ones(2)]), torch.ones(1)))


class Opaque:
    """What no one here knows how to cut."""


def sum_or_4(batch: Any) -> int:
    return sum(batch) if isinstance(batch, list) else 4


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": torch.zeros(4, 2), "mask": Opaque()}, r"batch\['mask'\] is a Opaque: pass split="),
        ((torch.zeros(4), {"y": [torch.zeros(4), Opaque()]}), r"batch\[1\]\['y'\]\[1\] is a Opaque"),
    ],
)
def test_an_unknown_object_is_handed_whole_and_never_to_a_part(batch: Any, named: str) -> None:
    whole = Batch.of(batch)
    (same_batch,) = whole.cut([4])
    assert type(same_batch) is type(batch)
    with pytest.raises(TypeError, match=named):
        whole.cut([3, 1])
    cutter = Cutter(lambda batch, sizes: [sizes[at : at + 1] for at in range(len(sizes))], count=sum_or_4)
    assert Batch.of(batch, cutter=cutter).cut([3, 1]) == [[3], [1]]


def test_what_is_the_same_for_all_samples_goes_to_every_part() -> None:
    common = {
        "path": Path("a"),
        "kind": Kind.ONE,
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "number": np.float32(3),
        "set": {1},
        "type": Opaque,
        "nothing": None,
        "shape": torch.Size([2, 3]),
    }
    for part in Batch.of({"x": torch.zeros(4), **common}).cut([3, 1]):
        assert {name: value for name, value in part.items() if name != "x"} == common
    samples = [Opaque() for _ in range(4)]  # one a sample: it can be cut
    assert Batch.of({"x": torch.zeros(4), "objects": samples}).cut([3, 1])[1]["objects"] == samples[3:]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("tables", ["of each row", "of all rows"])
def test_block_masks_are_cut_with_their_rows(sizes: list[int], tables: str) -> None:
    """Each row has documents of its own: the attention of the parts is that of the whole batch."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    ends = torch.tensor([32, 7, 16, 20, 1])
    documents = (torch.arange(32)[None, :] >= ends[:, None]).int()

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    mask = flex.create_block_mask(mask_mod, 5, None, 32, 32, device="cpu", BLOCK_SIZE=16)
    if tables == "of all rows":
        causal = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 32, 32, "cpu", BLOCK_SIZE=16)
        mask = flex.BlockMask.from_kv_blocks(
            causal.kv_num_blocks + causal.full_kv_num_blocks,
            torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32),
            BLOCK_SIZE=16,
            mask_mod=mask_mod,
        )
    x = torch.randn(5, 2, 32, 8, generator=torch.Generator().manual_seed(0))

    def attended(batch: Any) -> Any:
        with torch.no_grad():
            return flex.flex_attention(batch["x"], batch["x"], batch["x"], block_mask=batch["mask"])

    batch = {"x": x, "mask": mask}
    expected = attended(batch)
    allowed = torch.stack(
        [mask_mod(b, 0, torch.arange(32)[:, None], torch.arange(32)[None, :]) for b in range(5)]
    )
    dense = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=allowed[:, None])
    assert torch.allclose(expected, dense, atol=1e-5)  # else the comparison below says nothing
    whole = Batch.of(batch)
    assert whole.length == 5
    parts = whole.cut(sizes)
    assert torch.allclose(torch.cat([attended(part) for part in parts]), expected, atol=1e-6)
    picked = whole.take([4, 1])
    assert torch.allclose(attended(picked), expected[[4, 1]], atol=1e-6)
    for part, size in zip(parts, sizes, strict=True):
        rows = part["mask"].q_num_blocks.shape[0]
        assert rows == (1 if tables == "of all rows" else size)


def test_a_block_mask_of_other_rows_is_named() -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex.create_block_mask(lambda b, h, q, kv: q >= kv, 3, None, 16, 16, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(ValueError, match=r"batch\['mask'\] has 3"):
        Batch.of({"x": torch.zeros(4, 2), "mask": mask})


def test_a_users_split_cuts_what_we_cannot() -> None:
    class Strange:
        def __init__(self, items: list[int]) -> None:
            self.items = items

        def __len__(self) -> int:
            return len(self.items)

    def split(batch: Strange, sizes: list[int]) -> list[Strange]:
        items = iter(batch.items)
        return [Strange([next(items) for _ in range(size)]) for size in sizes]

    cutter = Cutter(split)
    whole = Batch.of(Strange([1, 2, 3]), cutter=cutter)
    assert [part.items for part in whole.cut([2, 1])] == [[1, 2], [3]]
    assert [part.items for part in whole.micros(microbatches((1, 1), 1), microbatches((1,)))] == [[2], [3]]
    with pytest.raises(ValueError, match="one microbatch for each of 2 sizes, not 1"):
        Batch.of(Strange([1, 2]), cutter=Cutter(lambda batch, sizes: [batch])).cut([1, 1])
    with pytest.raises(TypeError, match=r"object without a length\. Pass count="):
        Batch.of(object(), cutter=Cutter(split))


def test_the_shape_is_that_of_a_sample() -> None:
    def shape(n: int, length: int, mode: str = "train", dtype: torch.dtype = torch.float32) -> Any:
        return Batch.of({"x": torch.ones(n, length, dtype=dtype)}, mode=mode).shape

    assert shape(4, 8) == shape(7, 8)
    assert shape(4, 8).elements == 8
    assert shape(4, 8).key != shape(4, 9).key
    assert shape(4, 8).family == shape(4, 9).family
    assert shape(4, 8).family != shape(4, 8, mode="eval").family
    assert shape(4, 8).family != shape(4, 8, dtype=torch.float64).family
    cutter = Cutter(count=len)
    samples = [[{"x": torch.ones(k)} for _ in range(n)] for n, k in ((3, 8), (5, 7))]
    of_samples = [Batch.of(batch, cutter=cutter).shape for batch in samples]
    assert of_samples[0] == of_samples[1]


@pytest.mark.parametrize(
    ("outputs", "error", "match"),
    [
        ([torch.tensor(1.0)] * 2, ValueError, "output must have one row per sample, not be a 0-dim tensor"),
        ([torch.ones(1, 2), torch.ones(1, 3)], ValueError, r"not \[\(2,\), \(3,\)\]: pad them in fn"),
        ([{"a": 1.5}], TypeError, r"output\['a'\] must be tensors.* not the number 1.5"),
        ([{"a": None}, {"b": None}], ValueError, "the same items"),
        ([None, torch.ones(1)], TypeError, "one type in all microbatches, not NoneType, Tensor"),
        ([[1, 2], [3]], ValueError, r"one item per sample \(\[1, 1\]\), not of \[2, 1\]"),
    ],
)
def test_outputs_that_cannot_be_joined_say_why(outputs: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        joined(outputs, [1] * len(outputs))


def test_lists_of_outputs_are_samples_unless_they_hold_whole_tensors() -> None:
    columns = [[torch.ones(2, 3), torch.zeros(2)], [torch.ones(1, 3), torch.zeros(1)]]
    assert [tuple(one.shape) for one in joined(columns, [2, 1])] == [(3, 3), (3,)]
    boxes = [[torch.ones(5), torch.ones(7)], [torch.ones(6)]]
    assert [one.numel() for one in joined(boxes, [2, 1])] == [5, 7, 6]


@pytest.mark.parametrize("kind", [torch.ones, np.ones])
def test_one_row_for_a_whole_microbatch_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"output\['mean'\] must have one row per sample, not one for all 3"):
        joined([{"mean": kind((1, 2))}] * 3, [3, 3, 1])
    assert joined([kind((1, 2))] * 3, [1, 1, 1]).shape == (3, 2)
    assert joined([kind((6, 2)), kind((2, 2))], [3, 1]).shape == (8, 2)  # two beams a sample
    with pytest.raises(ValueError, match=r"not one for all 3"):
        joined([kind((1, 2))], [3])
    with pytest.raises(ValueError, match=r"not \[10\] rows for \[3\] samples"):
        joined([kind((10, 10))], [3])
