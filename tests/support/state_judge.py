"""The judge of the snapshot tests: it shares no code with what it judges.

`fingerprint` takes in the raw bytes of every tensor that can be reached, Python data, flags, identities
where they matter, and the state of every generator. A `World` is something that trains; `Fault` stops it
at any operation.
"""

from __future__ import annotations

import ctypes
import enum
import hashlib
import pickle
import random
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode


class Notes(Sequence[Any]):
    """What a test writes down inside a step: a list would hold afterwards what it held before.

    A queue of the standard library is not looked into.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Any] = SimpleQueue()

    def append(self, one: Any) -> None:
        self._queue.put(one)

    def extend(self, several: Iterable[Any]) -> None:
        for one in several:
            self.append(one)

    def clear(self) -> None:
        while not self._queue.empty():
            self._queue.get()

    def _all(self) -> list[Any]:
        found = [self._queue.get() for _ in range(self._queue.qsize())]
        self.extend(found)
        return found

    def __len__(self) -> int:
        return self._queue.qsize()

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __eq__(self, other: object) -> bool:
        return self._all() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._all())


Plain = int | float | complex | str | bytes | bool | None


def raw(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def fingerprint(*values: object, identities: bool = True) -> object:
    """Everything that can be told about `values` and the generators, as one comparable value."""
    judge = _Judge(identities)  # not nested functions: their cycle would keep every tensor alive
    generators = (random.getstate(), pickle.dumps(np.random.get_state()), raw(torch.get_rng_state()))
    return [judge.of(value) for value in values], generators


class _Judge:
    def __init__(self, identities: bool) -> None:
        self.identities = identities
        self.seen: dict[int, int] = {}
        self.keep: list[object] = []

    def name(self, value: object) -> object:
        return id(value) if self.identities else type(value).__qualname__

    def table(self, mapping: dict[Any, Any], owner: object) -> object:
        hooked = isinstance(owner, nn.Module | torch.optim.Optimizer)
        names = sorted(name for name in mapping if not (hooked and "hook" in name))
        return [(name, self.of(mapping[name])) for name in names]

    def of(self, value: Any) -> object:
        if isinstance(value, Plain | enum.Enum | torch.dtype | torch.device):
            return type(value).__name__, repr(value)
        if id(value) in self.seen:
            return "again", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        self.keep.append(value)
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, dict):
            return type(value).__name__, [(self.of(key), self.of(item)) for key, item in value.items()]
        if isinstance(value, list | tuple | deque):
            return type(value).__name__, getattr(value, "maxlen", None), [self.of(item) for item in value]
        if isinstance(value, set):
            return "set", sorted(map(repr, value))
        if isinstance(value, np.ndarray):
            return "array", self.name(value), value.shape, value.dtype.str, value.tobytes()
        if isinstance(value, torch.Generator):
            return self.name(value), raw(value.get_state())
        if isinstance(value, random.Random):
            return self.name(value), value.getstate()
        if isinstance(value, np.random.Generator):
            return self.name(value), repr(value.bit_generator.state)
        if isinstance(value, np.random.RandomState):
            return self.name(value), pickle.dumps(value.get_state())
        if isinstance(value, _BY_ATTRIBUTES):
            return self.name(value), type(value).__qualname__, self.table(vars(value), value)
        return "other", self.name(value)

    def tensor(self, value: torch.Tensor) -> object:
        facts = (type(value).__name__, value.dtype, value.device, value.requires_grad, value.is_leaf)
        if value.layout is not torch.strided:
            return facts, self.of(value._indices()), self.of(value._values()), value.is_coalesced()
        place = (tuple(value.shape), value.stride(), value.storage_offset(), value.is_conj(), value.is_neg())
        bits = hashlib.sha256(raw(value)).hexdigest()
        grad = value.grad if value.is_leaf else None
        return facts, place, bits, self.of(grad), self.table(vars(value), value)


class Bag:
    """An object of a class that batchfit does not know."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


_BY_ATTRIBUTES = (nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler, torch.amp.GradScaler, Bag)


@dataclass
class World:
    """Something that trains."""

    state: list[Any]
    step: Callable[[], object]
    extra: list[Any] = field(default_factory=list)

    def fingerprint(self, *, identities: bool = True) -> object:
        return fingerprint(*self.state, *self.extra, identities=identities)


def rich_model() -> nn.Sequential:
    """A module with something in every place where a module can have something."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model(torch.randn(3, 4)).sum().backward()
    model[2].weight.grad = None
    model.calls, model.gone, model.names = 1, 3.5, ["a"]
    model.nested = {"a": {"b": [1, 2]}, "tensor": torch.arange(3.0)}
    model.order = OrderedDict(x=1, y=torch.ones(2))
    model.counts = Counter("aab")
    model.queue = deque([1, torch.ones(1)], maxlen=2)
    model.pair = (1, torch.ones(2))
    model.config = types.SimpleNamespace(width=4)
    model[0].weight.mark = "mine"
    return model


def noise(*shape: int) -> torch.Tensor:
    """A batch that depends on every global generator."""
    return torch.randn(*shape) + random.random() + float(np.random.rand())


def seeded(make: Callable[[], World], *, warm: int) -> World:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    world = make()
    for _ in range(warm):
        world.step()
    return world


def repeat(world: World, steps: int) -> None:
    for _ in range(steps):
        world.step()


class Fault(TorchDispatchMode):
    """Raises at the n-th operation: before it runs, or when it has run and changed what it changes."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self.at = at
        self.after = after
        self.ran = 0

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran += 1
        if self.ran - 1 == self.at:
            if self.after:
                func(*args, **(kwargs or {}))
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to run {func}")
        return func(*args, **(kwargs or {}))
