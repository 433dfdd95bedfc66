"""Batches of any structure: however they are cut, the gradients of the full batch, or both readings named."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import event, given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.data import default_collate

from batchfit import Microbatcher
from batchfit._engine.batch.structure import children, leaves
from batchfit._profile.readings import batch_samples
from batchfit.errors import BatchfitError

Point = namedtuple("Point", ["x", "y"])
TWO_WAYS = "can be read in two ways"


class Weights(nn.Module):
    """A loss in which every number of every sample counts, each leaf of a structure in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.2, 1.3, 64, dtype=torch.float64))

    def values(self, batch: Any, at: int = 0) -> Iterator[torch.Tensor]:
        """One value per row for each tensor."""
        for index, leaf in enumerate(leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor)):
            rows = leaf.double().reshape(len(leaf), math.prod(leaf.shape[1:]))
            scale = torch.arange(1, rows.shape[1] + 1, dtype=torch.float64)
            yield torch.tanh(rows * scale * self.weight[(index + at) % 64]).sum(1)

    def of_rows(self, batch: Any) -> torch.Tensor:
        return torch.stack(list(self.values(batch))).sum(0).square().mean()

    def of_sample(self, sample: Any) -> torch.Tensor:
        return sum((value.sum() for value in self.values(sample)), torch.zeros((), dtype=torch.float64))

    def of_samples(self, samples: Any) -> torch.Tensor:
        return torch.stack([self.of_sample(sample).square() for sample in samples]).mean()


def gradient(model: Weights, run: Callable[[], object]) -> torch.Tensor:
    model.zero_grad()
    run()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def is_exact(
    fn: Callable[[Weights, Any], torch.Tensor], batch: Any, size: int, samples: int, **options: Any
) -> bool:
    """Whether microbatches of `size` give the full batch's gradient; False where both readings are named."""
    model = Weights()
    full = gradient(model, lambda: fn(model, batch).backward())
    mb = Microbatcher(model, microbatch_size=size, **options)
    try:
        cut = gradient(model, lambda: mb.backward(lambda micro: fn(model, micro), batch))
    except ValueError as error:
        if TWO_WAYS not in str(error):
            raise
        return False
    sizes = mb.backward(lambda micro: fn(model, micro), batch).microbatch_sizes
    assert sum(sizes) == samples
    assert max(sizes) <= size
    assert torch.allclose(cut, full, rtol=1e-10, atol=1e-12)
    return True


# --- what default_collate makes of nested samples


def collated(structure: Any, samples: int) -> Any:
    """A batch of samples of this structure, as DataLoader makes it."""
    generator = torch.Generator().manual_seed(0)

    def made(node: Any, index: int) -> Any:
        if isinstance(node, dict):
            return {key: made(value, index) for key, value in node.items()}
        if isinstance(node, Point):
            return Point(*(made(value, index) for value in node))
        if isinstance(node, list | tuple) and not (node and node[0] == "leaf"):
            return type(node)(made(value, index) for value in node)
        _, kind, shape = node
        if kind == "text":
            return f"sample {index}"
        if kind == "number":
            return float(index) + 0.5
        if kind == "long":
            return torch.randint(0, 5, shape, generator=generator)
        return torch.randn(shape, generator=generator)

    return default_collate([made(structure, index) for index in range(samples)])


def has_tensors(structure: Any) -> bool:
    if isinstance(structure, tuple) and structure and structure[0] == "leaf":
        return structure[1] != "text"
    items = structure.values() if isinstance(structure, dict) else structure
    return any(has_tensors(item) for item in items)


KINDS = ("float", "long", "number", "text")
SHAPES = ((), (1,), (2,), (3, 2), (3, 4, 4))
leaf_of = st.builds(
    lambda kind, shape: ("leaf", kind, shape), st.sampled_from(KINDS), st.sampled_from(SHAPES)
)
structures = st.recursive(
    leaf_of,
    lambda nodes: st.one_of(
        st.lists(nodes, min_size=1, max_size=4),
        st.lists(nodes, min_size=1, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abcd"), nodes, min_size=1, max_size=3),
        st.builds(Point, nodes, nodes),
    ),
    max_leaves=8,
).filter(has_tensors)


@examples(250)
@given(structure=structures, samples=st.integers(2, 12), size=st.integers(1, 11))
def test_what_default_collate_makes_is_cut_by_samples_or_refused(
    structure: Any, samples: int, size: int
) -> None:
    batch = collated(structure, samples)
    right = is_exact(Weights.of_rows, batch, size, samples)
    event("right" if right else "refused")


def test_most_structures_of_default_collate_are_cut_and_all_others_refused() -> None:
    """The 150 random structures of which 32 failed."""
    rng = random.Random(0)

    def drawn(depth: int) -> Any:
        kind = rng.choice(["leaf", "leaf", "list", "tuple", "dict", "point"]) if depth else "leaf"
        if kind == "leaf":
            return ("leaf", rng.choice(("float", "float", "long", "number")), rng.choice(SHAPES))
        inner = [drawn(depth - 1) for _ in range(rng.randint(1, 3))]
        if kind == "dict":
            return dict(zip("abc", inner, strict=False))
        if kind == "point":
            return Point(inner[0], inner[-1])
        return inner if kind == "list" else tuple(inner)

    batches = [collated((drawn(3), drawn(3)), 7) for _ in range(150)]
    right = [is_exact(Weights.of_rows, batch, rng.randint(1, 6), 7) for batch in batches]
    assert sum(right) >= 145


@pytest.mark.parametrize(
    "batch",
    [
        [torch.randn(9, 3, 4, 4)],  # TensorDataset of inputs alone
        [torch.randn(9, 16), torch.randn(9, 1)],  # TensorDataset of a regression
        [torch.randn(9, 3), torch.randn(9, 3), torch.randn(9, 3)],  # anchor, positive, negative
        [[torch.randn(9, 2), torch.randn(9, 2)], [torch.randn(9), torch.randn(9)]],
        [{"ids": torch.arange(9)}, {"ids": torch.randn(9, 2)}],
        [[torch.randn(9, 3, 4, 4) for _ in range(10)], torch.arange(9)],  # crops, labels
        [torch.randn(4, 3, 4, 4), torch.arange(4)],
        [[torch.randn(9, 2)], ("a",) * 9, [("b",) * 9, ("c",) * 9]],
    ],
)
@pytest.mark.parametrize("size", [1, 4])
def test_common_batches_of_a_data_loader_are_cut(batch: Any, size: int) -> None:
    samples = next(len(leaf) for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
    assert is_exact(Weights.of_rows, batch, size, samples)


def test_nested_text_is_cut_with_its_samples() -> None:
    seen = []
    batch = [torch.randn(5, 2), [("a", "b", "c", "d", "e"), {"text": ["v", "w", "x", "y", "z"]}], [224, 224]]
    model = Weights()
    Microbatcher(model, microbatch_size=3, compared="ignore").backward(
        lambda micro: (seen.append(micro[1:]), model.of_rows(micro[0]))[1], batch
    )
    assert seen[:2] == [
        [[("a", "b", "c"), {"text": ["v", "w", "x"]}], [224, 224]],
        [[("d", "e"), {"text": ["y", "z"]}], [224, 224]],
    ]


# --- lists of samples


def raw(kind: str, count: int, rows: Callable[[int], int]) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = []
    for index in range(count):
        x = torch.randn(rows(index), 2, generator=generator)
        y = torch.randn(rows(index), generator=generator)
        made.append({"tensor": x, "tuple": (x, y), "dict": {"x": x, "y": y}, "label": (x, index)}[kind])
    return made


@examples(150)
@given(
    kind=st.sampled_from(["tensor", "tuple", "dict", "label"]),
    count=st.integers(2, 12),
    size=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 12), min_size=12, max_size=12),
    equal=st.booleans(),
    told=st.booleans(),
)
def test_a_list_of_samples_is_cut_by_its_items_or_refused(
    kind: str, count: int, size: int, lengths: list[int], equal: bool, told: bool
) -> None:
    batch = raw(kind, count, lambda index: lengths[0] if equal else lengths[index])
    options: dict[str, Any] = {"count": len} if told else {}
    is_small_pair = kind == "tensor" and count <= 3 and len({len(one) for one in batch}) == 1
    if is_small_pair and not told:
        return  # `[inputs, targets]`: what default_collate makes, and nothing tells it from two samples
    right = is_exact(Weights.of_samples, batch, size, count, **options)
    same_size = (
        count == lengths[0] and len({len(leaf) for leaf in leaves(batch) if torch.is_tensor(leaf)}) == 1
    )
    assert right or not told or same_size
    assert right or count <= 8 or len({len(leaf) for leaf in leaves(batch) if torch.is_tensor(leaf)}) == 1


def detection(boxes: list[int], images: Callable[[int], tuple[int, ...]]) -> Any:
    """What torchvision's references make: `tuple(zip(*batch))`."""
    generator = torch.Generator().manual_seed(0)
    samples = [
        (
            torch.randn(images(index), generator=generator),
            {
                "boxes": torch.randn(count, 4, generator=generator),
                "labels": torch.arange(count),
                "image_id": index,
            },
        )
        for index, count in enumerate(boxes)
    ]
    return tuple(zip(*samples, strict=True))


def detection_loss(model: Weights, batch: Any) -> torch.Tensor:
    images, targets = batch
    return model.of_samples(list(zip(images, targets, strict=True)))


@examples(150)
@given(boxes=st.lists(st.integers(0, 5), min_size=2, max_size=9), size=st.integers(1, 8), equal=st.booleans())
def test_detection_batches_are_cut_without_a_split(boxes: list[int], size: int, equal: bool) -> None:
    batch = detection(boxes, lambda index: (3, 4, 4) if equal else (3, 4, 4 + index))
    right = is_exact(detection_loss, batch, size, len(boxes))
    assert right or set(boxes) == {3}  # as many boxes as channels
    as_lists = [list(part) for part in batch]
    assert is_exact(detection_loss, as_lists, size, len(boxes)) or set(boxes) == {3} or len(boxes) == 2


def test_a_batch_that_can_be_read_in_two_ways_is_read_like_those_before_it() -> None:
    model = Weights()
    mb = Microbatcher(model, microbatch_size=2)
    ambiguous = detection([3, 3, 3], lambda index: (3, 4, 4))
    with pytest.raises(ValueError, match=TWO_WAYS):
        mb.backward(lambda micro: detection_loss(model, micro), ambiguous)
    mb.backward(lambda micro: detection_loss(model, micro), detection([1, 2, 5], lambda index: (3, 4, 4)))
    full = gradient(model, lambda: detection_loss(model, ambiguous).backward())
    cut = gradient(model, lambda: mb.backward(lambda micro: detection_loss(model, micro), ambiguous))
    assert torch.allclose(cut, full, rtol=1e-10)


def test_what_is_known_of_one_structure_says_nothing_of_another() -> None:
    model = Weights()
    mb = Microbatcher(model)
    mb.backward(model.of_rows, [torch.randn(8, 4, 4), torch.randn(8, 4, 4)])
    with pytest.raises(ValueError, match=TWO_WAYS):
        mb.backward(model.of_rows, [torch.randn(8, 4, 4) for _ in range(7)])


@pytest.mark.parametrize(
    "labels", [("a", "b", "c", "d", "e"), (3, 1, 4, 1, 5), torch.arange(5), [1, 2, 3, 4, 5]]
)
def test_images_of_one_size_beside_their_labels(labels: Any) -> None:
    seen: list[Any] = []
    model = Weights()
    images = tuple(torch.randn(3, 4, 4) for _ in range(5))

    def fn(micro: Any) -> torch.Tensor:
        seen.append((len(micro[0]), len(micro[1])))
        return model.of_samples(micro[0])

    full = gradient(model, lambda: model.of_samples(images).backward())
    mb = Microbatcher(model, microbatch_size=2, compared="ignore")
    cut = gradient(model, lambda: mb.backward(fn, (images, labels)))
    assert torch.allclose(cut, full, rtol=1e-10)
    assert seen[:3] == [(2, 2), (2, 2), (1, 1)]


# --- tasks


@pytest.mark.parametrize("kind", [list, tuple, dict])
@pytest.mark.parametrize("sizes", [(8, 8), (8, 4), (2, 2), (8, 8, 8), (8, 4, 6)])
@pytest.mark.parametrize("alike", [True, False])
def test_tasks_are_cut_by_their_samples_or_refused(kind: Any, sizes: tuple[int, ...], alike: bool) -> None:
    """Lightning's CombinedLoader gives a list with a batch of each task; the loss is the sum of theirs."""
    tasks: list[Any] = []
    for size in sizes:
        x, y = torch.randn(size, 3), torch.randn(size, 3) if alike else torch.arange(size)
        tasks.append({"x": x, "y": y} if kind is dict else kind((x, y)))

    def fn(model: Weights, batch: Any) -> torch.Tensor:
        return sum((model.of_rows(task) for task in batch), torch.zeros(()))

    right = is_exact(fn, tasks, 3, sizes[0])
    if len(set(sizes)) > 1:
        assert not right
        with pytest.raises(ValueError, match=f"{TWO_WAYS}|one number of samples in all its parts"):
            Microbatcher(Weights()).backward(lambda micro: fn(Weights(), micro), tuple(tasks))
    else:
        assert is_exact(fn, tuple(tasks), 3, sizes[0]) or sizes[0] == 2


# --- the user's own split


def sequence_first(batch: Any, sizes: list[int]) -> list[Any]:
    """An LSTM's batch: the samples are the second dimension of its inputs."""
    x, y = batch
    return list(zip(x.split(sizes, dim=1), y.split(sizes), strict=True))


def lstm_loss(model: Weights, batch: Any) -> torch.Tensor:
    return model.of_rows((batch[0].transpose(0, 1), batch[1]))


@examples(60)
@given(steps=st.integers(1, 7), samples=st.integers(1, 9), size=st.integers(1, 8), told=st.booleans())
def test_the_samples_of_a_split_batch_are_never_a_tuples_length(
    steps: int, samples: int, size: int, told: bool
) -> None:
    batch = (torch.randn(steps, samples, 3), torch.randn(samples, 2))
    options: dict[str, Any] = {"count": lambda batch: batch[1].shape[0]} if told else {}
    assert is_exact(lstm_loss, batch, size, samples, split=sequence_first, **options)


@pytest.mark.parametrize("told", [True, False])
def test_split_batches_may_change_their_size(told: bool) -> None:
    model = Weights()
    options: dict[str, Any] = {"count": lambda batch: batch[1].shape[0]} if told else {}
    mb = Microbatcher(model, microbatch_size=4, split=sequence_first, **options)
    for samples in (7, 3, 9):
        batch = (torch.randn(5, samples, 3), torch.randn(samples, 2))
        full = gradient(model, lambda batch=batch: lstm_loss(model, batch).backward())
        cut = gradient(model, lambda batch=batch: mb.backward(lambda micro: lstm_loss(model, micro), batch))
        assert torch.allclose(cut, full, rtol=1e-10)


def test_detection_and_dicts_with_a_split() -> None:
    batch = detection([1, 2, 3, 4, 0, 2, 2, 5], lambda index: (3, 4, 4))

    def split(batch: Any, sizes: list[int]) -> list[Any]:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [tuple(part[span] for part in batch) for span in spans]

    assert is_exact(detection_loss, batch, 3, 8, split=split)
    table = {"x": torch.randn(2, 7, 3), "y": torch.randn(7), "z": torch.randn(7, 2)}
    cut = lambda batch, sizes: [  # noqa: E731
        {"x": x, "y": y, "z": z}
        for x, y, z in zip(
            batch["x"].split(sizes, 1), batch["y"].split(sizes), batch["z"].split(sizes), strict=True
        )
    ]
    loss = lambda model, batch: model.of_rows((batch["x"].transpose(0, 1), batch["y"], batch["z"]))  # noqa: E731
    assert is_exact(loss, table, 3, 7, split=cut)


def test_packed_sequences_with_a_split() -> None:
    lengths = [5, 4, 4, 2, 1]
    packed = pack_sequence([torch.randn(n, 2) for n in lengths])

    def split(batch: Any, sizes: list[int]) -> list[Any]:
        rows, found = pad_packed_sequence(batch[0], batch_first=True)
        pairs = zip(rows.split(sizes), found.split(sizes), batch[1].split(sizes), strict=True)
        return [
            (pack_sequence([row[:n] for row, n in zip(x, length.tolist(), strict=True)]), y)
            for x, length, y in pairs
        ]

    def fn(model: Weights, batch: Any) -> torch.Tensor:
        rows, found = pad_packed_sequence(batch[0], batch_first=True)
        samples = [(row[:n],) for row, n in zip(rows, found.tolist(), strict=True)]
        return model.of_samples(list(zip(samples, batch[1].split(1), strict=True)))

    batch = (packed, torch.arange(5.0))
    for options in ({}, {"count": lambda batch: len(batch[1])}):
        assert is_exact(fn, batch, 2, 5, split=split, **options)


@pytest.mark.parametrize(
    ("split", "options", "match"),
    [
        (lambda batch, sizes: [batch] * len(sizes), {}, r"not be a tuple, .* Pass count="),
        (
            lambda batch, sizes: [batch] * len(sizes),
            {"count": lambda b: len(b[1])},
            r"and count says \[6, 6\]",
        ),
        (
            lambda batch, sizes: [(batch[0][:, :size], batch[1][:size]) for size in sizes],
            {"count": lambda b: len(b[1])},
            "each sample once",
        ),
        (lambda batch, sizes: sequence_first(batch, sizes), {"count": lambda b: 2}, "split_with_sizes|split"),
        (
            lambda batch, sizes: sequence_first(batch, sizes),
            {"count": lambda b: 2.5},
            "number of samples, not 2.5",
        ),
        (lambda batch, sizes: [None] * len(sizes), {}, "Pass count="),
    ],
)
def test_a_split_whose_parts_are_not_the_batch_is_refused(split: Any, options: Any, match: str) -> None:
    batch = (torch.randn(5, 6, 3), torch.randn(6, 2))
    model = Weights()
    ran: list[Any] = []

    def fn(micro: Any) -> torch.Tensor:
        ran.append(micro)
        return lstm_loss(model, micro)

    mb = Microbatcher(model, split=split, microbatch_size=3, **options)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=match):
        mb.backward(fn, batch)
    assert not ran


class Counted:
    """Like a graph library's batch: its length is the number of its attributes."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def __len__(self) -> int:
        return 2  # attributes, say


def test_the_length_of_an_object_is_not_trusted() -> None:
    model = Weights()
    split = lambda batch, sizes: [Counted(part) for part in batch.nodes[: sum(sizes)].split(sizes)]  # noqa: E731
    with pytest.raises(ValueError, match=r"of \[1, 1\] samples, not of \[2, 2\]. Pass count="):
        Microbatcher(model, split=split).backward(
            lambda micro: model.of_rows(micro.nodes), Counted(torch.randn(9, 2))
        )
    count = lambda batch: len(batch.nodes)  # noqa: E731
    assert is_exact(
        lambda model, batch: model.of_rows(batch.nodes),
        Counted(torch.randn(9, 2)),
        4,
        9,
        split=split,
        count=count,
    )


def test_a_split_may_sort_its_samples() -> None:
    def split(batch: Any, sizes: list[int]) -> list[Any]:
        parts = batch.split(sizes)
        return [part[part[:, 0].argsort()] for part in parts]

    assert is_exact(Weights.of_rows, torch.randn(9, 2), 4, 9, split=split)


# --- count


@pytest.mark.parametrize("size", [1, 3])
def test_count_chooses_between_two_readings(size: int) -> None:
    images = [torch.randn(6, 4, 4) for _ in range(5)]
    assert not is_exact(Weights.of_samples, images, size, 5)
    assert is_exact(Weights.of_samples, images, size, 5, count=len)
    assert is_exact(Weights.of_rows, images, size, 6, count=lambda batch: len(batch[0]))
    with pytest.raises(ValueError, match=r"count must return the number of samples \(6 or 5\), not 4"):
        is_exact(Weights.of_rows, images, size, 6, count=lambda batch: 4)
    with pytest.raises(ValueError, match="count must return the number of samples, not 4: batch has 6"):
        is_exact(Weights.of_rows, torch.randn(6, 2), size, 6, count=lambda batch: 4)
    with pytest.raises(TypeError, match="count must be a callable or None, not 3"):
        Microbatcher(Weights(), count=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="count must return a number of samples, not None"):
        is_exact(Weights.of_rows, images, size, 6, count=lambda batch: None)


def test_children_of_a_reading_are_new_containers() -> None:
    batch = [[torch.randn(6, 2), [torch.randn(6)]], {"a": [1, 2]}]
    model = Weights()

    def fn(micro: Any) -> torch.Tensor:
        loss = model.of_rows(micro[0])
        micro[0].clear()
        micro[1]["a"].clear()
        return loss

    Microbatcher(model, microbatch_size=4).backward(fn, batch)
    assert len(children(batch[0]) or ()) == 2
    assert batch[1] == {"a": [1, 2]}


# --- what map cannot join


class Opaque:
    pass


@pytest.mark.parametrize("size", [8, 3, 1])
@pytest.mark.parametrize(
    ("output", "error"),
    [
        (lambda x: x.mean(), ValueError),
        (lambda x: x.mean(0), ValueError),  # 2 rows for 8 samples
        (lambda x: x.mean(0, keepdim=True), ValueError),
        (lambda x: x.mean().item(), TypeError),
        (lambda x: {"right": int((x > 0).sum())}, TypeError),
        (lambda x: (x, x.sum()), ValueError),
        (lambda x: x.T @ x, ValueError),  # a matrix of the features
        (lambda x: {"x": x, "cache": Opaque()}, TypeError),
        (lambda x: [x.mean()], ValueError),
        (lambda x: x[x[:, 0] > 9], ValueError),  # none
    ],
)
def test_map_refuses_a_value_of_the_batch_whether_it_is_cut_or_not(
    output: Any, error: type[Exception], size: int
) -> None:
    x = torch.arange(16.0).view(8, 2) - 8
    if size == 1 and error is ValueError and output(x[:1]).__class__ is torch.Tensor and output(x[:1]).dim():
        return  # one row for one sample, or two for each: nothing tells it from values of the sample
    if size == 1 and isinstance(output(x), list):
        return
    with pytest.raises(error, match=r"one (row|item) per sample"):
        Microbatcher(Weights(), microbatch_size=size).map(output, x)


@pytest.mark.parametrize("size", [8, 3])
def test_map_joins_what_has_rows_for_each_sample(size: int) -> None:
    x = torch.arange(16.0).view(8, 2)
    mb = Microbatcher(Weights(), microbatch_size=size)
    assert torch.equal(mb.map(lambda x: x * 2, x), x * 2)
    assert torch.equal(mb.map(lambda x: x.repeat_interleave(3, 0), x), x.repeat_interleave(3, 0))  # beams
    found = mb.map(lambda x: {"rows": list(x), "name": "a", "none": None, "flag": True}, x)
    assert [row.tolist() for row in found["rows"]] == x.tolist()
    assert (found["name"], found["none"], found["flag"]) == ("a", None, True)


def test_a_list_of_outputs_that_can_be_read_in_two_ways_is_refused() -> None:
    x = torch.arange(8.0).view(4, 2)
    mb = Microbatcher(Weights(), microbatch_size=2)
    with pytest.raises(ValueError, match=TWO_WAYS):
        mb.map(lambda x: [x, x + 1], x)
    assert len(mb.map(lambda x: (x, x + 1), x)) == 2


@pytest.mark.parametrize("size", [6, 2])
def test_encode_must_return_rows_whether_the_batch_is_cut_or_not(size: int) -> None:
    model = nn.Linear(2, 3)
    mb = Microbatcher(model, microbatch_size=size)
    with pytest.raises(ValueError, match="encode's output must have one row per sample"):
        mb.backward_cached(lambda x: model(x).mean(), lambda z: z.square(), torch.randn(6, 2))


class Unsliced:
    """A table of rows that gives all of itself for any of them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.batch_size = rows, rows.shape[:1]

    def __getitem__(self, rows: Any) -> Unsliced:
        return self


def test_the_first_cut_of_a_structure_is_checked() -> None:
    model = Weights()
    ran: list[Any] = []
    mb = Microbatcher(model, microbatch_size=2)
    with pytest.raises(
        BatchfitError, match=r"batch\['x'\] of 5 samples was cut into \[5, 5, 5\], not \[2, 2, 1\]"
    ):
        mb.backward(
            lambda micro: ran.append(micro) or model.of_rows(micro["x"].rows), {"x": Unsliced(torch.ones(5))}
        )
    assert not ran


def test_a_loaders_batches_are_counted_by_their_samples() -> None:
    x, y = torch.randn(9, 2), torch.arange(9)
    for batch in ((x, y), [[x, y], [y, x]], [{"x": x}, y], x):
        assert batch_samples(batch) == 9
    assert batch_samples(detection([1, 2, 0, 3], lambda index: (3, 4, 4))) == 4
