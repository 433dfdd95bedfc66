"""What a trace takes from an earlier operation is what torch itself would have said."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch_private import dispatch_keys, enable_backends, private_aten, storage_address

import batchfit
from batchfit._engine.trace import fake_cache
from batchfit._engine.trace.fake_cache import FakeResults
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for

aten = torch.ops.aten
HERE = torch.device("cpu", 1)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    fake_cache.results_by_call.clear()
    fake_cache.forms_seen.clear()
    yield
    fake_cache.results_by_call.clear()
    fake_cache.forms_seen.clear()


def fake_mode() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def make(mode: FakeTensorMode, shape: Any, dtype: torch.dtype = torch.float32, device: Any = HERE) -> Any:
    with mode:
        return torch.empty(shape, dtype=dtype, device=device)


def look(value: Any, args: Any) -> Any:
    """All that can be told of a result: its form, and whose memory it has."""
    if isinstance(value, list | tuple):
        return type(value), [look(one, args) for one in value]
    if not isinstance(value, Tensor):
        return type(value), value
    held = [storage_address(one) for one in fake_cache.tensors_among(args)]
    address = storage_address(value)
    return (
        type(value),
        value.shape,
        value.stride(),
        value.dtype,
        value.device,
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.requires_grad,
        value.is_inference(),
        dispatch_keys(value),
        [index for index, other in enumerate(held) if other == address],
        [index for index, other in enumerate(fake_cache.tensors_among(args)) if other is value],
        sorted(vars(value)),
    )


def both(mode: FakeTensorMode, func: Any, args: Any, kwargs: Any | None = None) -> None:
    """torch's answer, and ours: when it is asked, and when it is repeated."""
    results = FakeResults(mode)
    kwargs = kwargs or {}
    with mode:
        theirs = look(func(*args, **kwargs), args)
        for _ in range(3):
            assert look(results.of(func, args, kwargs), args) == theirs


@pytest.mark.parametrize("switch", ["cudnn", "mkldnn", "deterministic", "dtype"])
def test_torch_is_asked_again_under_another_mode(switch: str) -> None:
    mode = fake_mode()
    results, args = FakeResults(mode), (make(mode, (2, 3)),)
    before, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    with mode:
        for _ in range(2):
            results.of(aten.neg.default, args, {})
        assert len(fake_cache.results_by_call) == 1
        try:
            torch.use_deterministic_algorithms(before is not (switch == "deterministic"))
            torch.set_default_dtype(torch.float64 if switch == "dtype" else dtype)
            enable_backends(cudnn=switch != "cudnn", mkldnn=switch != "mkldnn")
            results.of(aten.neg.default, args, {})
        finally:
            enable_backends(cudnn=True, mkldnn=True)
            torch.use_deterministic_algorithms(before)
            torch.set_default_dtype(dtype)
    assert len(fake_cache.results_by_call) == 2


lengths = st.lists(st.integers(1, 5), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


@st.composite
def layouts(draw: Any, mode: FakeTensorMode, dim: int | None = None) -> Any:
    """A tensor of any layout that views make."""
    shape = draw(st.lists(st.integers(1, 5), min_size=dim or 1, max_size=dim or 4))
    one = make(mode, shape, draw(dtypes))
    with mode:
        one = one.permute(draw(st.permutations(range(len(shape)))))
        if draw(st.booleans()):
            one = one[: max(1, one.shape[0] - 1)]
        if draw(st.booleans()):
            one = one.expand(2, *one.shape) if dim is None else one
    return one


ONE = (
    aten.relu.default,
    aten.tanh.default,
    aten.gelu.default,
    aten.zeros_like.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.sum.default,
    aten.neg_.default,
    private_aten("_softmax.default"),
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.native_dropout.default,
    private_aten("_to_copy.default"),
    aten.numel.default,
)
MORE: dict[Any, tuple[Any, ...]] = {
    private_aten("_softmax.default"): (0, False),
    aten.unsqueeze.default: (0,),
    aten.native_dropout.default: (0.1, True),
}


@examples(60)
@given(st.data())
def test_results_of_one_tensor_are_torchs(data: Any) -> None:
    mode = fake_mode()
    func = data.draw(st.sampled_from(ONE))
    one = data.draw(layouts(mode))
    kwargs = {"dtype": torch.bfloat16} if func is private_aten("_to_copy.default") else {}
    if func is aten.neg_.default:
        one = make(mode, one.shape)
    both(mode, func, (one, *MORE.get(func, ())), kwargs)


@examples(40)
@given(st.data())
def test_results_of_two_tensors_are_torchs(data: Any) -> None:
    mode = fake_mode()
    func = data.draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.threshold_backward.default]))
    one = data.draw(layouts(mode))
    kind = data.draw(st.sampled_from(["same", "itself", "row", "scalar"]))
    with mode:
        other = {
            "same": torch.empty_like(one),
            "itself": one,
            "row": torch.empty(one.shape[-1], device=HERE),
            "scalar": torch.empty((), dtype=torch.float64, device=HERE),
        }[kind]
    rest = (0.0,) if func is aten.threshold_backward.default else ()
    both(mode, func, (one, other, *rest))


@examples(20)
@given(st.data())
def test_rows_of_a_table_are_torchs(data: Any) -> None:
    """An index of numbers gives the same shape each time; one of truth values is asked about, and refused."""
    mode = fake_mode()
    table = data.draw(layouts(mode))
    rows = make(mode, data.draw(lengths), data.draw(st.sampled_from([torch.int64, torch.int32])))
    skipped = [None] * data.draw(st.integers(0, table.dim() - 1))
    both(mode, aten.index.Tensor, (table, [*skipped, rows]))
    mask = make(mode, table.shape[:1], torch.bool)
    results, known = FakeResults(mode), len(fake_cache.results_by_call)
    for _ in range(2):
        with mode, pytest.raises(DynamicOutputShapeException):
            results.of(aten.index.Tensor, (table, [mask]), {})
    assert len(fake_cache.results_by_call) == known


@examples(15)
@given(st.data())
def test_what_follows_from_other_lengths_is_torchs(data: Any) -> None:
    """Two sizes of one layer: the second one's results follow from the first one's, or are asked about."""
    mode = fake_mode()
    dtype = data.draw(dtypes)
    training = data.draw(st.booleans())
    for channels in data.draw(st.lists(st.integers(1, 6), min_size=2, max_size=3)):
        size = [data.draw(st.integers(least, 5)) for least in (2, 1, 1)]  # one number has no variance
        shape = (size[0], channels, size[1], size[2])
        image = make(mode, shape, dtype)
        if data.draw(st.booleans()):
            with mode:
                image = image.to(memory_format=torch.channels_last)
        row = make(mode, (channels,))
        both(mode, aten.native_batch_norm.default, (image, row, row, row, row, training, 0.1, 1e-5))
        saved = make(mode, (channels if training else 0,))
        flags = [True, data.draw(st.booleans()), True]
        both(
            mode,
            aten.native_batch_norm_backward.default,
            (image, image, row, row, row, saved, saved, training, 1e-5, flags),
        )
        for func in (aten.relu.default, aten.zeros_like.default):
            both(mode, func, (image,))


@examples(15)
@given(st.lists(lengths, min_size=1, max_size=6), dtypes, st.booleans())
def test_operations_on_lists_are_torchs(shapes: Any, dtype: torch.dtype, turned: bool) -> None:
    mode = fake_mode()
    several = [make(mode, shape, dtype) for shape in shapes]
    if turned:
        with mode:
            several = [one.permute(*reversed(range(one.dim()))) for one in several]
    numbers = [float(index) for index in range(len(several))]
    both(mode, private_aten("_foreach_sqrt.default"), (several,))
    both(mode, private_aten("_foreach_add_.Scalar"), (several, 1.0))
    both(mode, private_aten("_foreach_lerp_.Scalar"), (several, several, 0.1))
    both(mode, private_aten("_foreach_addcdiv_.ScalarList"), (several, several, several, numbers))
    both(mode, private_aten("_foreach_norm.Scalar"), (several, 2))


def test_each_result_has_memory_of_its_own() -> None:
    mode = fake_mode()
    results, one = FakeResults(mode), make(mode, (4, 3))
    with mode:
        found = [results.of(aten.relu.default, (one,), {}) for _ in range(4)]
    assert len({id(each.untyped_storage()) for each in found}) == 4
    assert len({storage_address(each) for each in (*found, one)}) == 5


def test_torch_is_asked_once_for_arguments_that_look_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = fake_mode()
    asked: list[Any] = []
    own = FakeTensorMode.dispatch

    def counted(self: Any, func: Any, *rest: Any) -> Any:
        asked.append(func)
        return own(self, func, *rest)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    results = FakeResults(mode)
    ones = [make(mode, (4, 3)) for _ in range(5)]
    several = [make(mode, (4, 3)) for _ in range(20)]
    asked.clear()
    with mode:
        for one in ones:
            results.of(aten.mm.default, (one, make(mode, (3, 2))), {})
        assert asked.count(aten.mm.default) == 1
        for lr in (0.1, 0.2, 0.3):
            results.of(private_aten("_foreach_mul_.Scalar"), (several, lr), {})
        assert asked.count(private_aten("_foreach_mul_.Scalar")) == 1
        for one in ones:
            results.of(aten.index.Tensor, (one, [make(mode, (2,), torch.int64)]), {})
        assert asked.count(aten.index.Tensor) == 1
        for length in (2, 3, 4):
            results.of(aten.relu.default, (make(mode, (length, 5)),), {})
        assert asked.count(aten.relu.default) == 1


def test_numbers_types_and_modes_count() -> None:
    mode = fake_mode()
    results = FakeResults(mode)
    with mode:
        whole, real, truth = (
            results.of(aten.full.default, ([2], value), {"device": HERE}) for value in (1, 1.0, True)
        )
        assert (whole.dtype, real.dtype, truth.dtype) == (torch.int64, torch.float32, torch.bool)
        ends = [results.of(aten.arange.default, (end,), {"device": HERE}).shape for end in (2, 5, 2)]
        assert ends == [(2,), (5,), (2,)]
        torch.set_default_dtype(torch.float64)
        try:
            assert results.of(aten.full.default, ([2], 1.0), {"device": HERE}).dtype is torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        with torch.inference_mode():
            assert results.of(aten.full.default, ([2], 1.0), {"device": HERE}).is_inference()
        assert not results.of(aten.full.default, ([2], 1.0), {"device": HERE}).is_inference()


def test_an_error_comes_each_time_and_nothing_is_made_of_it() -> None:
    mode = fake_mode()
    results = FakeResults(mode)
    one, other = make(mode, (4, 3)), make(mode, (4, 3))
    with mode:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                results.of(aten.mm.default, (one, other), {})
            with pytest.raises(RuntimeError):
                results.of(private_aten("_foreach_add_.List"), ([one, one], [other]), {})
    assert not fake_cache.results_by_call


def test_a_value_that_torch_knows_is_worked_out_each_time() -> None:
    mode = fake_mode()
    results = FakeResults(mode)
    with mode:
        ones = [torch.tensor(number) for number in (3, 4)]
        assert all(isinstance(one, FakeTensor) and one.constant is not None for one in ones)
        found = [results.of(aten.add.Tensor, (one, 1), {}) for one in ones]
        assert [int(one.constant) for one in found] == [4, 5]


def test_what_may_be_resized_or_depends_on_data_is_asked_about() -> None:
    for func in (
        aten.relu.out,
        aten.resize_.default,
        aten.transpose_.default,
        aten.nonzero.default,
        private_aten("_local_scalar_dense.default"),
        aten.as_strided.default,
        aten.lift_fresh.default,
    ):
        assert not fake_cache.facts_about(func).repeats, func


def test_results_that_share_memory_with_one_of_several_are_asked_about() -> None:
    mode = fake_mode()
    one = make(mode, (4,))
    with mode:
        other = one.view(2, 2)
        out = one.view(4)
    assert FakeResults(mode).describe(out, (one,)) is not None
    assert FakeResults(mode).describe(out, (one, other)) is None
    assert FakeResults(mode).describe(out, ([one],)) is None
    assert FakeResults(mode).describe((out, out), (make(mode, (3,)),)) is None


def test_only_so_many_are_kept_and_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_cache, "_MOST", 8)
    mode = fake_mode()
    results = FakeResults(mode)
    with mode:
        for length in range(1, 40):
            results.of(aten.sum.default, (make(mode, (length,)),), {})
            assert len(fake_cache.results_by_call) <= 8
            assert len(fake_cache.forms_seen) <= 9

    def flat(value: Any) -> Iterator[Any]:
        if isinstance(value, tuple):
            for one in value:
                yield from flat(one)
        else:
            yield value

    kept = [
        one for key, found in fake_cache.results_by_call.items() for one in (*flat(key), *flat(tuple(found)))
    ]
    assert not any(isinstance(one, Tensor | FakeTensorMode) for one in kept)


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(3 if first else 8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
                for first in (True, False, False)
            ),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.layers(images)
        return out


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(16, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.encoder(self.embedding(ids)))
        out: Tensor = self.head(hidden[:, -1])
        return out


@pytest.mark.parametrize(
    ("kind", "autocast", "foreach"),
    [
        (Picture, None, None),
        (Text, torch.bfloat16, False),
        *(
            pytest.param(kind, autocast, foreach, marks=pytest.mark.slow)
            for kind, autocast, foreach in itertools.product(
                (Picture, Text), (None, torch.bfloat16), (None, False)
            )
            if (kind, autocast, foreach) not in ((Picture, None, None), (Text, torch.bfloat16, False))
        ),
    ],
)
def test_a_trace_is_the_same_whoever_answers(
    kind: type[nn.Module], autocast: Any, foreach: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = kind()

    def make_batch(n: int) -> Any:
        images = torch.zeros(n, 3, 9, 9) if kind is Picture else torch.zeros(n, 6, dtype=torch.long)
        return images, torch.zeros(n, dtype=torch.long)

    workload = batchfit.training(
        model,
        torch.optim.AdamW(model.parameters(), foreach=foreach),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        make_batch,
        autocast=autocast,
    )
    rules = rules_for(workload)
    ours = [trace(workload, size, rules=rules) for size in (2, 5, 2)]
    assert fake_cache.results_by_call
    monkeypatch.setattr(FakeResults, "of", lambda self, func, args, kwargs: func(*args, **kwargs))
    theirs = [trace(workload, size, rules=rules) for size in (2, 5)]
    assert ours == [*theirs, theirs[0]]
