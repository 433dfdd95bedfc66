"""Every kind of state x verb x ending: afterwards it is what it was, and training can go on.

All kinds at once hang off one model, so that sixteen runs look at all of them; one by one they are slow.
"""

from __future__ import annotations

import array
import collections
import contextlib
import copy
import dataclasses
import io
import itertools
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Scripted
from state_judge import Bag, fingerprint
from torch import nn

import batchfit
from batchfit._engine.snapshot.contents import tables_of
from batchfit.errors import NothingFitsError, UntraceableError

LEAVES_BYTES = 2**16  # TorchScript keeps, for good, what it has recorded of each module that was run


class Slotted:
    __slots__ = ("count", "later", "values")

    def __init__(self) -> None:
        self.count, self.values = 0, [1]


class SlottedToo(Slotted):
    __slots__ = ("more",)


@dataclasses.dataclass
class Record:
    count: int = 0
    values: list[int] = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    values: list[int] = dataclasses.field(default_factory=lambda: [1])


class Table(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        if getattr(self, "closed", False):
            raise TypeError("it is closed")
        super().__setitem__(key, value)

    def clear(self) -> None:
        raise TypeError("never")

    update = clear  # type: ignore[assignment]


class History(list[int]):
    total = 0

    def clear(self) -> None:
        raise TypeError("never")


class Tagged(nn.Parameter):
    """A parameter that keeps a list."""


class Referred:
    """Something to hold weakly."""


KEPT = [Referred() for _ in range(3)]


def table() -> Table:
    made = Table(a=1)
    made.closed = True
    return made


def history() -> History:
    made = History([1])
    made.total = 1
    return made


def tagged() -> Tagged:
    made = Tagged(torch.zeros(2))
    made.notes = [1]
    return made


def change_table(value: Table) -> None:
    dict.__setitem__(value, "b", 2)
    value.closed = False


def change_history(value: History) -> None:
    value.append(2)
    value.total += 2


def change_slots(value: Slotted) -> None:
    value.count += 1
    value.later = [value.count]
    value.values.append(2)


def change_record(value: Any) -> None:
    value.count += 1
    value.values.append(2)
    value.new = value.count


def change_stream(value: Any) -> None:
    value.write(b"more" if isinstance(value, io.BytesIO) else "more")


def resize(value: Any) -> None:
    value.resize((value.shape[0] + 2, *value.shape[1:]), refcheck=False)
    value += 1


def add_weakly(value: Any) -> None:
    value.add(KEPT[1])
    value.discard(KEPT[0])


def weak_keys() -> Any:
    return weakref.WeakKeyDictionary({KEPT[0]: [1]})


def weak_values() -> Any:
    return weakref.WeakValueDictionary({"a": KEPT[0]})


def objects() -> Any:
    made = np.empty(2, dtype=object)
    made[0], made[1] = [1], "text"
    return made


def set_objects(value: Any) -> None:
    value[0].append(2)
    value[1] = 5


Kind = tuple[Callable[[], Any], Callable[[Any], object]]
KINDS: dict[str, Kind] = {
    "plain object": (lambda: Bag(count=0, values=[1], table=np.zeros(2)), change_record),
    "object in an object": (lambda: Bag(inner=Bag(count=0, values=[1])), lambda v: change_record(v.inner)),
    "namespace": (lambda: types.SimpleNamespace(count=0, values=[1]), change_record),
    "dataclass": (Record, change_record),
    "frozen dataclass with slots": (Frozen, lambda v: v.values.append(2)),
    "slots": (Slotted, change_slots),
    "slots of two classes": (SlottedToo, change_slots),
    "dict": (lambda: {"a": [1]}, lambda v: (v["a"].append(2), v.update(b=2))),
    "dict subclass": (table, change_table),
    "OrderedDict": (lambda: collections.OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "defaultdict": (lambda: collections.defaultdict(list, a=[1]), lambda v: v["b"].append(1)),
    "Counter": (lambda: collections.Counter("ab"), lambda v: v.update("bc")),
    "ChainMap": (lambda: collections.ChainMap({"a": 1}), lambda v: v.__setitem__("b", 2)),
    "UserDict": (lambda: collections.UserDict(a=1), lambda v: v.update(b=2)),
    "UserList": (lambda: collections.UserList([1]), lambda v: v.append(2)),
    "list": (lambda: [1, [2]], lambda v: (v.append(3), v[1].append(4))),
    "list subclass": (history, change_history),
    "deque": (lambda: collections.deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "set": (lambda: {1, 2}, lambda v: v.add(3)),
    "set of objects": (lambda: {KEPT[0]}, lambda v: v.add(KEPT[1])),
    "tuple of lists": (lambda: ([1], [2]), lambda v: v[0].append(3)),
    "WeakSet": (lambda: weakref.WeakSet(KEPT[:1]), add_weakly),
    "WeakKeyDictionary": (weak_keys, lambda v: v.__setitem__(KEPT[1], [2])),
    "WeakValueDictionary": (weak_values, lambda v: v.__setitem__("b", KEPT[1])),
    "bytearray": (lambda: bytearray(b"ab"), lambda v: v.extend(b"c")),
    "array.array": (lambda: array.array("d", [1.0]), lambda v: v.append(2.0)),
    "BytesIO": (io.BytesIO, change_stream),
    "StringIO": (io.StringIO, change_stream),
    "NumPy array": (lambda: np.zeros(3), lambda v: v.__iadd__(1)),
    "NumPy array resized": (lambda: np.zeros((2, 2)), resize),
    "NumPy array of objects": (objects, set_objects),
    "NumPy masked array": (lambda: np.ma.masked_array([1, 2], [0, 1]), lambda v: v.__setitem__(1, 7)),
    "list iterator": (lambda: iter([1, 2, 3, 4] * 99), next),
    "count": (itertools.count, next),
    "cycle": (lambda: itertools.cycle([1, 2, 3]), next),
    "zip of iterators": (lambda: zip(iter(range(999)), itertools.count(), strict=False), next),
    "generators": (
        lambda: [random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)],
        lambda v: (v[0].random(), v[1].random(), torch.rand(1, generator=v[2])),
    ),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "tensor resized": (lambda: torch.zeros(3), lambda v: v.resize_(v.numel() + 1).add_(1)),
    "parameter with a list": (tagged, lambda v: v.notes.append(2)),
    "scheduler-like of a library": (
        lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2)),
        lambda v: v.n_averaged.add_(1),
    ),
}


_FINGERPRINTED = (torch.Tensor, nn.Module, torch.Generator, random.Random, np.random.Generator)


class Judge:
    """What `fingerprint` cannot see: slots, attributes of containers, weak containers, positions."""

    def of(self, value: Any) -> object:
        if isinstance(
            value, torch.Tensor | nn.Module | torch.Generator | random.Random | np.random.Generator
        ):
            return fingerprint(value)[0], repr(vars(value)) if isinstance(value, Tagged) else ""  # type: ignore[index]
        if isinstance(value, np.ndarray):
            items = [self.of(one) for one in value.ravel()] if value.dtype.hasobject else value.tobytes()
            return id(value), value.shape, value.dtype.str, items, repr(getattr(value, "mask", None))
        if isinstance(value, io.BytesIO | io.StringIO):
            return id(value), value.getvalue(), value.tell()
        if isinstance(value, collections.abc.Iterator):
            return [str(one) for one in itertools.islice(copy.deepcopy(value), 5)]
        if isinstance(value, weakref.ref):
            return id(value())
        inside: list[object] = [type(value).__name__]
        if isinstance(value, dict):
            inside += [(self.of(key), self.of(one)) for key, one in dict.items(value)]
            if isinstance(value, collections.OrderedDict):
                inside += list(reversed(value))
        elif isinstance(value, list | tuple | collections.deque):
            inside += [self.of(one) for one in value]
        elif isinstance(value, set):
            inside += sorted(map(repr, map(self.of, value)))
        elif isinstance(value, int | float | str | bytes | bytearray | array.array | None):
            return repr(value)
        tables = [] if isinstance(value, type | types.FunctionType) else tables_of(value)
        return [id(value), *inside, *([(k, self.of(v)) for k, v in sorted(one.items())] for one in tables)]


class Model(nn.Module):
    """A model off which values hang; a step changes all of them."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("queue", torch.zeros(2, 4))
        for index, kind in enumerate(kinds):
            setattr(self, f"kind{index}", KINDS[kind][0]())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.queue = torch.cat([self.queue, batch.detach()[:1]])
        return self.linear(batch) + self.queue.mean(0)  # type: ignore[no-any-return]


class World:
    def __init__(self, kinds: list[str], ending: str) -> None:
        self.kinds, self.ending = kinds, ending
        torch.manual_seed(0)
        self.model = Model(kinds)
        self.optimizer = torch.optim.AdamW(self.model.linear.parameters(), lr=0.1)
        self.armed = False

    def step(self, n: int) -> None:
        self.model(torch.randn(n, 4)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for index, kind in enumerate(self.kinds):
            KINDS[kind][1](getattr(self.model, f"kind{index}"))
        if self.armed and self.ending != "success":
            raise {"oom": torch.OutOfMemoryError, "error": ValueError, "ctrl-c": KeyboardInterrupt}[
                self.ending
            ]("CUDA out of memory. Tried to allocate 2.00 GiB" if self.ending == "oom" else "mine")

    def judged(self) -> dict[str, object]:
        judge = Judge()
        kinds = {kind: judge.of(getattr(self.model, f"kind{i}")) for i, kind in enumerate(self.kinds)}
        return {**kinds, "model": fingerprint(self.model.linear, self.model.queue, self.optimizer)}


VERBS: dict[str, Callable[[batchfit.Workload], object]] = {
    "find": lambda work: batchfit.find_batch_size(work, budget="8MiB", max_size=4, soak_steps=2, steps=2),
    "profile": lambda work: batchfit.profile_throughput(work, budget="8MiB", largest=2, time_limit_s=2),
    "predict": lambda work: batchfit.predict_batch_size(work, budget="1GiB"),
    "explain": lambda work: batchfit.explain_memory(work, batch_size=2),
}
ENDINGS = ("success", "oom", "error", "ctrl-c")


def check(kinds: list[str], verb: str, ending: str) -> None:
    world = World(kinds, ending)
    twin = World(kinds, "success")
    before = world.judged()
    world.armed = True
    with virtual(verb):
        try:
            VERBS[verb](batchfit.Workload(world.step, state=[world.model, world.optimizer]))
            ended = "success"
        except (NothingFitsError, UntraceableError, ValueError, KeyboardInterrupt):
            ended = ending
    world.armed = False
    assert (ended == "success") is (ending == "success")
    after = world.judged()
    assert [kind for kind in before if after[kind] != before[kind]] == []
    for one in (world, twin):
        torch.manual_seed(1)
        one.step(3)  # training goes on, as it does where there was no such call
    assert torch.equal(world.model.linear.weight, twin.model.linear.weight)


def virtual(verb: str) -> Any:
    return batchfit.virtual_memory("8MiB") if verb in ("find", "profile") else contextlib.nullcontext()


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("verb", VERBS)
def test_all_kinds_of_state_at_once(verb: str, ending: str) -> None:
    check(list(KINDS), verb, ending)


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_state(kind: str, verb: str, ending: str) -> None:
    check([kind], verb, ending)


@pytest.mark.parametrize("verb", VERBS)
def test_what_cannot_be_restored_is_named_before_anything_runs(verb: str) -> None:
    model = nn.Linear(4, 4)
    model.source = (one for one in range(999))  # type: ignore[assignment]

    def step(n: int) -> None:
        raise AssertionError("it ran")

    # Warnings are errors in tests, so that this one ends the call: nothing has run by then.
    named = r"\.source is 'generator', an iterator that cannot be restored"
    with pytest.raises((UserWarning, UntraceableError), match=named):
        VERBS[verb](batchfit.Workload(step, state=[model]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("way", ["script", "trace"])
def test_torchscript_trains_on(way: str, verb: str, ending: str) -> None:
    def make() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        eager = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = torch.jit.script(Scripted()) if way == "script" else torch.jit.trace(eager, torch.ones(3, 4))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(model: Any, optimizer: torch.optim.Optimizer, n: int) -> None:
        model(torch.ones(n, 4) * torch.arange(n)[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    (model, optimizer), other = make(), make()
    armed = True

    def stepping(n: int) -> None:
        step(model, optimizer, n + 1)
        if armed and ending != "success":
            raise {"oom": torch.OutOfMemoryError, "error": ValueError, "ctrl-c": KeyboardInterrupt}[ending](
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )

    expected = pytest.raises((NothingFitsError, UntraceableError, ValueError, KeyboardInterrupt))
    with virtual(verb), contextlib.nullcontext() if ending == "success" else expected:
        VERBS[verb](batchfit.Workload(stepping, state=[model, optimizer]))
    assert way == "trace" or model.count == 0
    for one, its in ((model, optimizer), other):
        step(one, its, 3)
    for (name, mine), (_, theirs) in zip(
        model.state_dict().items(), other[0].state_dict().items(), strict=True
    ):
        assert torch.equal(mine, theirs), name
