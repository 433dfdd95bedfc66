"""What a trial may do to tensors, modules, optimizers and other objects: all of it is undone."""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
import weakref
from collections import defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from state_judge import Bag, fingerprint, raw, rich_model
from torch import nn
from torch.optim import lr_scheduler
from torch_private import storage_address, wrapper_subclass

from batchfit._engine.snapshot import rng
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit.errors import SnapshotError

# ------------------------------------------------------------------------------------- tensors

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def random_bits(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_bit_for_bit(dtype: torch.dtype) -> None:
    bits = random_bits(16 * 12)
    if dtype is torch.bool:
        bits &= 1
    tensor = bits.view(dtype)  # NaNs with payloads, denormals, negative zeros
    before = raw(tensor)
    snapshot = Snapshot.take([tensor])
    tensor.zero_()
    snapshot.restore()
    assert raw(tensor) == before


def test_nan_payloads_survive_in_parameters_gradients_and_state() -> None:
    bits = torch.tensor([0x7FC0DEAD, 0x7F800001, -1, -(2**31)], dtype=torch.int32)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model.weight.data.view(torch.int32).copy_(bits)
    model.weight.grad = bits.clone().view(torch.float32)[None]
    optimizer.state[model.weight]["momentum_buffer"] = bits.clone().view(torch.float32)[None]
    before = fingerprint(model, optimizer)
    snapshot = Snapshot.take([model, optimizer])
    optimizer.step()
    optimizer.zero_grad()
    optimizer.state.clear()
    snapshot.restore()
    assert fingerprint(model, optimizer) == before


@examples(80)
@given(data=st.data())
def test_any_view_of_any_storage(data: st.DataObject) -> None:
    """Tensors that look into shared storages in odd ways, replaced, resized or scribbled over."""
    bases = [torch.arange(float(n)) for n in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))]
    views: list[torch.Tensor] = []
    for _ in range(data.draw(st.integers(1, 5))):
        base = data.draw(st.sampled_from(bases))
        offset = data.draw(st.integers(0, base.numel()))
        length = data.draw(st.integers(0, base.numel() - offset))
        view = base[offset : offset + length]
        match data.draw(st.sampled_from(["plain", "flip", "expand", "strided", "scalar", "reshape"])):
            case "expand":
                view = view[:1].expand(3, min(length, 1))
            case "strided":
                view = view[::2]
            case "scalar" if length:
                view = view[0]
            case "reshape" if length % 2 == 0:
                view = view.view(2, -1).t()
            case _:
                pass
        views.append(view)
    holder = Bag(views=views, first=views[0])
    before = fingerprint(holder)
    snapshot = Snapshot.take([holder])
    for _ in range(2):
        for index, view in enumerate(list(views)):
            match data.draw(st.sampled_from(["fill", "data", "drop", "resize", "keep"])):
                case "fill":
                    view.untyped_storage().fill_(7)
                case "data":
                    view.data = torch.ones(5, dtype=torch.float64)
                case "drop":
                    views[index] = torch.full((2, 2), 3.0)
                case "resize":
                    view.data = view.data.clone()[..., None]
                case _:
                    pass
        if data.draw(st.booleans()):
            holder.first = None
        del view
        snapshot.restore()
        assert fingerprint(holder) == before
        storages = {id(view.untyped_storage()): storage_address(view) for view in views}
        assert len(set(storages.values())) <= len(bases)  # what shared a storage shares one again


def test_conjugate_and_negative_views() -> None:
    base = torch.randn(3, dtype=torch.complex64)
    holder = Bag(conj=base.conj(), neg=base.conj().imag, base=base)
    assert holder.conj.is_conj()
    assert holder.neg.is_neg()
    before = fingerprint(holder)
    snapshot = Snapshot.take([holder])
    holder.conj, holder.neg = None, None
    base.zero_()
    snapshot.restore()
    assert fingerprint(holder) == before


def test_sparse_gradients() -> None:
    model = nn.Embedding(10, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())

    def step() -> None:
        model(torch.randint(0, 10, (4,))).sum().backward()
        optimizer.step()

    step()
    assert model.weight.grad.is_sparse
    before = fingerprint(model, optimizer)
    snapshot = Snapshot.take([model, optimizer])
    for forget in (False, True):
        step()
        if forget:
            model.weight.grad = None
        snapshot.restore()
        assert fingerprint(model, optimizer) == before


def test_quantized_tensors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated since torch 2.13, and still around
        holder = Bag(weight=torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8))
        kept = holder.weight.int_repr().tolist()
        snapshot = Snapshot.take([holder])
        for new in (holder.weight, None):
            holder.weight.copy_(torch.zeros(4))
            holder.weight = new
            snapshot.restore()
            assert holder.weight.int_repr().tolist() == kept
            assert holder.weight.q_zero_point() == 3


class Pair(torch.Tensor):
    """A tensor made of two tensors, as DTensor and torchao's types are made of others."""

    @staticmethod
    def __new__(cls, high: torch.Tensor, low: torch.Tensor) -> Pair:
        return wrapper_subclass(cls, high.shape, dtype=high.dtype, device=high.device)

    def __init__(self, high: torch.Tensor, low: torch.Tensor) -> None:
        self.high, self.low = high, low

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Pair:
        return Pair(parts["high"], parts["low"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Pair(args[0].high.detach(), args[0].low.detach())
        raise NotImplementedError(func)


def test_a_tensor_made_of_tensors() -> None:
    holder = Bag(pair=Pair(torch.arange(3.0), torch.ones(3)))
    pair, high = holder.pair, holder.pair.high
    snapshot = Snapshot.take([holder])
    high += torch.ones(3, requires_grad=True)  # and now it is part of a graph
    pair.low = torch.zeros(9)
    holder.pair = 5
    snapshot.restore()
    assert holder.pair is pair
    assert pair.high is high
    assert high.is_leaf
    assert [pair.high.tolist(), pair.low.tolist()] == [[0, 1, 2], [1, 1, 1]]
    del pair, high
    holder.pair = None
    gc.collect()
    snapshot.restore()
    assert type(holder.pair) is Pair
    assert [holder.pair.high.tolist(), holder.pair.low.tolist()] == [[0, 1, 2], [1, 1, 1]]


def test_a_tensor_that_a_trial_pulls_into_its_graph() -> None:
    """`buffer += x` with gradients: afterwards the buffer holds the whole graph of the step."""
    model = nn.Linear(2, 2)
    model.register_buffer("memory", torch.zeros(2))
    model.rows = torch.zeros(2, 2)
    model.row = model.rows[0]  # a view: torch cannot detach it in place
    before = fingerprint(model)
    snapshot = Snapshot.take([model])
    activation = model(torch.ones(2))
    watched = weakref.ref(activation)
    model.memory += activation
    model.row += activation
    assert not model.memory.is_leaf
    assert not model.row.is_leaf
    assert not model.rows.is_leaf
    del activation
    snapshot.restore()
    assert fingerprint(model) == before
    gc.collect()
    assert watched() is None


# ------------------------------------------------------------------------------------- modules


def change_flags(model: nn.Module) -> None:
    model.eval()
    model[0].train()
    model[0].weight.requires_grad_(False)
    model.register_buffer("extra", torch.ones(1))
    del model[1].running_mean
    model[1].running_var = None
    model[1].num_batches_tracked = torch.tensor(99)


def change_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data.add(1)


def change_kind(model: nn.Module) -> None:
    model.double()


def change_half(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    model[2].weight.grad = torch.ones_like(model[2].weight)


def change_meta(model: nn.Module) -> None:
    model.to_empty(device="meta")


def change_parameters(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.zeros(9, 9))
    model[0].bias = None
    model[2].register_parameter("scale", nn.Parameter(torch.ones(1)))
    del model[2].weight


def change_modules(model: nn.Module) -> None:
    model.append(nn.Linear(1, 1))
    model[2] = nn.Identity()
    del model[0]


def change_parametrization(model: nn.Module) -> None:
    nn.utils.parametrizations.weight_norm(model[0], "weight")
    model(torch.ones(3, 4)).sum().backward()


def change_shapes(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.set_(torch.zeros(2, 1))
        model[2].weight.t_()
        model[2].bias.set_(model[2].bias.repeat(9))
        model[1].running_mean.resize_(50)
        model[1].running_var.untyped_storage().resize_(0)


def change_attributes(model: nn.Module) -> None:
    model.calls = 7
    model.names.append("b")
    model.nested["a"]["b"] = [4]
    model.nested["new"] = torch.ones(3)
    model.order.move_to_end("x")
    model.counts["k"] += 2
    model.late_bound = object()
    model.queue.append(3)
    model.pair = (9, torch.zeros(1))
    model.config = None
    del model.gone
    model[0].weight.mark = "changed"
    model[0].weight.new_mark = torch.ones(1)


CHANGES = [
    *(change_flags, change_data, change_kind, change_half, change_meta, change_parameters, change_modules),
    *(change_parametrization, change_shapes, change_attributes),
]


@pytest.mark.parametrize("keep", [True, False], ids=["held", "free"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_a_trial_may_do_to_a_module(change: Callable[[nn.Module], None], keep: bool) -> None:
    model = rich_model()
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())] if keep else []
    everything = fingerprint(model)
    ids = [id(tensor) for tensor in held]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if keep else None
    snapshot = Snapshot.take([model])
    for _ in range(2):
        change(model)
        assert fingerprint(model) != everything
        snapshot.restore()
        assert fingerprint(model) == everything
    now = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
    assert [id(tensor) for tensor in now if keep] == ids
    if optimizer is not None:
        model(torch.randn(3, 4)).square().sum().backward()  # still one model, and it trains
        weight = model[2].weight.clone()
        optimizer.step()
        assert not torch.equal(weight, model[2].weight)


def test_tied_weights_are_copied_once_and_stay_tied() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
    model["head"].weight = model["embed"].weight
    model.view = model["embed"].weight.data[2:4]
    before = fingerprint(model)
    snapshot = Snapshot.take([model])
    assert snapshot.host_bytes == 7 * 5 * 4
    model["head"].weight = nn.Parameter(torch.zeros(7, 5))
    model["embed"].weight.data = torch.zeros(1)
    model.view = None
    snapshot.restore()
    assert fingerprint(model) == before
    assert model["head"].weight is model["embed"].weight
    model["embed"].weight.data.fill_(3)
    assert model.view.eq(3).all()


def test_an_lstm_keeps_its_flat_weights() -> None:
    model = nn.LSTM(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    before = fingerprint(model, optimizer)
    snapshot = Snapshot.take([model, optimizer])
    model(torch.randn(2, 1, 3))[0].sum().backward()
    optimizer.step()
    snapshot.restore()
    assert fingerprint(model, optimizer) == before
    assert all(a is b for a, b in zip(model._flat_weights, model.parameters(), strict=True))


def test_hooks_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    calls: list[int] = []
    snapshot = Snapshot.take([model])
    model.register_forward_hook(lambda *_: calls.append(1))
    snapshot.restore()
    model(torch.ones(2))
    assert calls == [1]


def test_modules_that_are_not_registered() -> None:
    student, teacher = nn.Linear(2, 2), nn.BatchNorm1d(2)
    student.teachers = [teacher]
    before = fingerprint(student, teacher)
    snapshot = Snapshot.take([student])
    teacher(torch.randn(4, 2))
    teacher.eval()
    snapshot.restore()
    assert fingerprint(student, teacher) == before


def test_a_lazy_module_is_refused_with_a_remedy() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(SnapshotError, match=r"state\[0\]\.0\.weight is not initialised.*Run the model once"):
        Snapshot.take([model])
    model(torch.ones(1, 2))
    Snapshot.take([model])


def test_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still around
        model = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.ones(3, 2))
    gc.collect()
    before = [raw(t) for t in (*model.parameters(), *model.buffers())]
    snapshot = Snapshot.take([model])
    with torch.no_grad():
        model.eval()
        for p in (*model.parameters(), *model.buffers()):
            p.fill_(3)
    gc.collect()
    snapshot.restore()
    assert [raw(t) for t in (*model.parameters(), *model.buffers())] == before
    assert all(module.training for module in model.modules())


def test_a_compiled_module_is_its_original() -> None:
    inner = nn.BatchNorm1d(2)
    model = torch.compile(inner, backend="eager")
    before = fingerprint(inner)
    snapshot = Snapshot.take([model])
    inner(torch.randn(4, 2))
    snapshot.restore()
    assert fingerprint(inner) == before


# ------------------------------------------------------------------------------------- optimizers


def test_groups_are_the_same_objects_with_the_same_contents() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups, group, params = (
        optimizer.param_groups,
        optimizer.param_groups[0],
        optimizer.param_groups[0]["params"],
    )
    before = fingerprint(model, optimizer, scheduler)
    snapshot = Snapshot.take([model, optimizer, scheduler])
    for _ in range(2):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())  # replaces groups and state
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 9.0})
        optimizer.param_groups[0]["added"] = 1
        optimizer.defaults["lr"] = 77
        optimizer.grad_scale = torch.ones(1)
        snapshot.restore()
        assert fingerprint(model, optimizer, scheduler) == before
        assert optimizer.param_groups is groups
        assert optimizer.param_groups[0] is group
        assert group["params"] is params
    assert not hasattr(optimizer, "grad_scale")


def test_state_keeps_its_dtype_and_its_tensors() -> None:
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moments = [torch.randn(p.shape) for p in model.parameters()]
    for p, moment in zip(model.parameters(), moments, strict=True):
        optimizer.state[p] = {"moment": moment, "nested": {"parts": [moment[:1], (moment, 3)]}}
    before = fingerprint(model, optimizer)
    snapshot = Snapshot.take([model, optimizer])
    for moment in moments:
        moment.zero_()
    for p in model.parameters():
        optimizer.state[p]["nested"]["parts"].append(p)
    snapshot.restore()
    assert fingerprint(model, optimizer) == before
    state = [optimizer.state[p]["moment"] for p in model.parameters()]
    assert all(now is then and now.dtype == torch.float32 for now, then in zip(state, moments, strict=True))


def test_state_that_was_dropped_is_made_again() -> None:
    model = rich_model()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    before = fingerprint(model, optimizer)
    snapshot = Snapshot.take([model, optimizer])
    optimizer.state = defaultdict(dict)
    gc.collect()
    snapshot.restore()
    assert fingerprint(model, optimizer) == before
    assert optimizer.state[torch.ones(1)] == {}  # still a defaultdict
    optimizer.state.popitem()
    optimizer.step()


def test_a_scheduler_alone_brings_its_optimizer() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    snapshot = Snapshot.take([scheduler])
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    snapshot.restore()
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.optimizer is optimizer
    assert scheduler.last_epoch == 0


# ------------------------------------------------------------------------------------- other objects


def test_generators_of_every_kind() -> None:
    holder = Bag(
        torch=torch.Generator().manual_seed(1),
        python=random.Random(2),
        numpy=np.random.default_rng(3),
        legacy=np.random.RandomState(4),
        mersenne=np.random.Generator(np.random.MT19937(5)),
    )

    def draw() -> list[float]:
        return [
            float(torch.rand(1, generator=holder.torch)),
            holder.python.random(),
            holder.numpy.random(),
            holder.legacy.rand(),
            holder.mersenne.normal(),
            torch.rand(1).item(),
            random.gauss(0, 1),
            float(np.random.randn()),
        ]

    random.gauss(0, 1)
    np.random.randn()  # both keep the second of a pair of normal numbers
    snapshot = Snapshot.take([holder, holder.torch, random.Random(1), np.random.default_rng(0)])
    first = draw()
    for _ in range(3):
        snapshot.restore()
        assert draw() == first
    assert draw() != first


def test_numpy_is_not_imported_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "numpy"]:
        monkeypatch.delitem(sys.modules, name)
    snapshot = Snapshot.take([nn.Linear(1, 1), random.Random(1)])
    snapshot.restore()
    assert not any(name.split(".")[0] == "numpy" for name in sys.modules)


class FakeDevice:
    """A device module whose generators are CPU ones."""

    def __init__(self, *, initialized: bool) -> None:
        self.generators = tuple(torch.Generator().manual_seed(7) for _ in range(2))
        self.initialized = initialized

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        assert self.initialized, "asked for its generators before it was in use"
        return self.generators

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.initialized


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_every_device_that_is_in_use(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(initialized=True)
    monkeypatch.setattr(torch, kind, device)
    torch.rand(3, generator=device.default_generators[1])
    states = [raw(generator.get_state()) for generator in device.default_generators]
    undo = rng.global_states()
    for generator in device.default_generators:
        torch.rand(3, generator=generator)
    assert [name for name, _ in undo if kind in name] == [
        f"torch's {kind}:0 generator",
        f"torch's {kind}:1 generator",
    ]
    for _, put_back in undo:
        put_back()
    assert [raw(generator.get_state()) for generator in device.default_generators] == states


def test_a_device_first_used_in_the_trial_is_as_new(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(initialized=False)
    monkeypatch.setattr(torch, "cuda", device)
    states = [raw(generator.get_state()) for generator in device.generators]
    undo = rng.global_states()
    for _, put_back in undo:
        put_back()  # still not in use: nothing happens
    device.initialized = True
    torch.rand(3, generator=device.generators[1])
    for _, put_back in undo:
        put_back()
    assert [raw(generator.get_state()) for generator in device.generators] == states


Point = namedtuple("Point", "x y")


def test_containers_keep_kind_order_and_identity() -> None:
    inner = {"z": 1, "a": [1, 2]}
    names = ["x", ["y"]]
    loop: list[Any] = [1]
    loop.append(loop)
    holder = Bag(
        inner=inner,
        alias=inner,
        names=names,
        loop=loop,
        point=Point(torch.ones(1), [1]),
        frozen=frozenset({1}),
        default=defaultdict(list, k=[torch.ones(2)]),
        array=np.arange(6.0).reshape(2, 3)[:, ::2],
        dates=[np.float32(1), 1j, b"x", ..., range(3), torch.float16, slice(1)],
    )
    before = fingerprint(holder)
    snapshot = Snapshot.take([holder])
    for _ in range(2):
        inner.clear()
        inner.update(a=3, z=1)
        holder.alias = {"z": 2}
        holder.loop = None
        holder.names = None
        names[1].append("z")
        holder.point = Point(1, 2)
        holder.default = {}
        holder.array[...] = -1
        holder.dates.reverse()
        snapshot.restore()
        assert fingerprint(holder) == before
        assert holder.alias is inner
        assert holder.inner is inner
        assert holder.names is names
        assert holder.loop[1] is holder.loop
        assert list(inner) == ["z", "a"]
        assert type(holder.point) is Point
        assert holder.default["new"] == []
        del holder.default["new"]


def test_plain_state_in_lists_and_dicts() -> None:
    losses: list[float] = [0.5]
    progress = {"epoch": 1, "best": None}
    snapshot = Snapshot.take([losses, progress, None, (losses, [progress])])
    losses.append(0.25)
    progress.update(epoch=2, best=0.25, more=1)
    snapshot.restore()
    assert losses == [0.5]
    assert progress == {"epoch": 1, "best": None}


def test_objects_of_the_programs_own_are_walked_and_those_of_libraries_bound_again() -> None:
    model = nn.Linear(1, 1)
    config = model.config = Bag(width=3)
    stream = model.lock = threading.Thread(name="mine")
    snapshot = Snapshot.take([model])
    config.width = 4
    model.config = Bag(width=5)
    stream.name = "another"
    model.lock = None
    snapshot.restore()
    assert model.config is config
    assert config.width == 3
    assert model.lock is stream
    assert stream.name == "another"


def test_an_object_that_is_declared_is_walked_wherever_else_it_is() -> None:
    model = nn.Linear(1, 1)
    model.helper = Bag(count=1, weight=torch.ones(2))
    before = fingerprint(model)
    snapshot = Snapshot.take([model, model.helper])
    model.helper.count = 2
    model.helper.weight.zero_()
    model.helper = None
    snapshot.restore()
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ([nn.Linear(1, 1), 3], r"state\[1\] must .*, not 3 \(int\): a plain value"),
        ([(1.5,)], r"state\[0\]\[0\] must .*, not 1.5 \(float\)"),
        (["model"], r"state\[0\] must .*, not 'model' \(str\)"),
        ([{"a": [nn.Linear(1, 1), lambda: 0]}], r"state\[0\]\['a'\]\[1\] must .*<lambda>.* \(function\)"),
        ([iter([1])], r"state\[0\] must .*\(list_iterator\): an iterator's position"),
        ([(x for x in "a")], r"state\[0\] must .*\(generator\): an iterator's position"),
        (
            [iter(torch.utils.data.DataLoader([1]))],
            r"state\[0\] must .*\(_SingleProcessDataLoaderIter\): an iter",
        ),
        ([nn.Linear], r"state\[0\] must .*\(type\): a plain value"),
        ([random], r"state\[0\] must .*\(module\): it has no state"),
        ([object()], r"state\[0\] must .*\(object\): it has no state"),
        (7, r"state\[0\] must .*, not 7 \(int\)"),
    ],
)
def test_what_cannot_be_restored_is_refused_before_any_work(state: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Snapshot.take(state)


@pytest.mark.parametrize(
    "wrap", [lambda model: model, lambda model: {"model": model}, lambda model: iter([model])]
)
def test_one_thing_alone_or_any_iterable_is_a_state(wrap: Callable[[nn.Module], Any]) -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    before = fingerprint(model)
    snapshot = Snapshot.take(wrap(model))
    model.eval()
    with torch.no_grad():
        model[0].weight.add_(1)
    snapshot.restore()
    assert fingerprint(model) == before
