"""Nodes of a snapshot's tree: for each kind of value what is remembered, and how it is restored.

Rules: whatever is not a `Node` is immutable and stands for itself. A node answers one question: which object
belongs where `now` is bound? It is asked twice in a restore. The first time tensors that are gone are
answered by None, so that what was made since is let go; the second time all tensors are there. A container
that may hold tensors is not kept alive: it is known by its identity, and created again where it is gone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, cast

import torch

from batchfit._engine.device import oom
from batchfit._engine.snapshot.contents import Contents, items_of, put_items, tables_of
from batchfit._engine.snapshot.host_copy import TensorCopy
from batchfit._engine.snapshot.iterators import position_of, twin_of

MISSING: Final = object()


class Restoring:
    """One restore: what is alive in it, what has been visited, what has failed."""

    __slots__ = ("entered", "failed", "final", "live", "storages", "tensors")

    def __init__(self) -> None:
        self.final = False
        self.entered: set[Node] = set()
        self.failed: dict[str, str] = {}
        self.live: dict[Node, Any] = {}
        self.tensors: dict[TensorNode, torch.Tensor] = {}
        self.storages: list[torch.UntypedStorage] = []

    @contextmanager
    def part(self, path: str) -> Iterator[None]:
        """An error inside is remembered as text, and the next part goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - every part must have its turn; all errors are raised as one
            self.failed.setdefault(path, oom.describe(error))

    def value(self, saved: object, now: object) -> object:
        """What to bind where `now` is bound."""
        value = now
        if not isinstance(saved, Node):
            return saved
        with self.part(saved.path):
            value = saved.value(now, self)
        return value

    def first_visit(self, node: Node) -> bool:
        """True once per round: shared and cyclic structures are filled once."""
        if node in self.entered:
            return False
        self.entered.add(node)
        return True


class Node(ABC):
    """A value that takes more than binding it again."""

    __slots__ = ("may_hold_tensors", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.may_hold_tensors = False

    @abstractmethod
    def value(self, now: object, restoring: Restoring) -> object:
        """The object that belongs where `now` is bound."""


class TensorNode(Node):
    """A tensor with its gradient and its Python attributes."""

    __slots__ = ("attributes", "copy", "grad")

    def __init__(self, path: str, copy: TensorCopy) -> None:
        super().__init__(path)
        self.copy = copy
        self.grad: TensorNode | None = None
        self.attributes: dict[str, object] | None = None
        self.may_hold_tensors = True

    def release(self, restoring: Restoring) -> None:
        """Let go of a gradient, a graph and a storage that were not there before."""
        tensor = self.copy.live()
        if tensor is None:
            return
        grad = grad_of(tensor)
        if grad is not None and (self.grad is None or grad is not self.grad.copy.live()):
            tensor.grad = None
        kept = self.copy.release(tensor)
        if kept is not None:
            restoring.tensors[self] = kept

    def put_grad(self, restoring: Restoring) -> None:
        """Bind the gradient; the tensor itself has its own shape and dtype again."""
        tensor = restoring.tensors[self]
        wanted = None if self.grad is None else restoring.tensors[self.grad]
        if grad_of(tensor) is not wanted:
            tensor.grad = wanted

    def value(self, now: object, restoring: Restoring) -> object:
        tensor = restoring.tensors.get(self)
        if tensor is None:
            return now if restoring.final else None
        if self.attributes is not None and restoring.first_visit(self):
            fill_attributes(vars(tensor), self.attributes, restoring)
        return tensor


def grad_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient; torch warns about asking a tensor that cannot have one."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


class ContainerNode(Node):
    """A mutable container: the same object where it still is, with the contents that it had."""

    __slots__ = ("attributes", "cls", "held", "identity")

    def __init__(self, path: str, container: object) -> None:
        super().__init__(path)
        self.cls: type[Any] = type(container)
        self.attributes: list[dict[str, object]] = []  # of a subclass: a table each
        self.identity = id(container)
        self.held: object = None
        self.may_hold_tensors = True  # until its contents are known, and for as long as it is in a cycle

    def value(self, now: object, restoring: Restoring) -> object:
        live = restoring.live.get(self, self.held)
        if live is None:
            if type(now) is self.cls and id(now) == self.identity:
                live = now
            elif restoring.final:
                live = self._new()
            else:
                return None
        restoring.live[self] = live
        if restoring.first_visit(self):
            self._fill(live, restoring)
            if self.attributes:
                for table, attributes in zip(tables_of(live), self.attributes, strict=True):
                    fill_attributes(table, attributes, restoring)
            self.identity = id(live)
        return live

    def _new(self) -> Any:
        # Past a `__new__` of its own, which may want arguments.
        base = next(one for one in (dict, list, deque, set) if issubclass(self.cls, one))
        return cast("Any", base).__new__(self.cls)

    @abstractmethod
    def _fill(self, live: Any, restoring: Restoring) -> None: ...


class ListNode(ContainerNode):
    """A list or a deque."""

    __slots__ = ("items", "limit")

    def __init__(self, path: str, container: list[Any] | deque[Any]) -> None:
        super().__init__(path, container)
        self.items: list[object] = []
        self.limit = container.maxlen if isinstance(container, deque) else None

    def _new(self) -> Any:
        new = super()._new()
        if self.limit is not None:
            deque.__init__(new, (), self.limit)
        return new

    def _fill(self, live: Any, restoring: Restoring) -> None:
        here = {id(item): item for item in items_of(live)}
        wanted = [restoring.value(saved, here.get(_identity(saved), MISSING)) for saved in self.items]
        if any(value is MISSING for value in wanted):
            return  # a part of it failed, which is reported: the old list stays
        put_items(live, wanted)


class DictNode(ContainerNode):
    """A dict of any kind, in its order. Keys may be tensors (an optimizer's state)."""

    __slots__ = ("factory", "items")

    def __init__(self, path: str, container: dict[Any, Any]) -> None:
        super().__init__(path, container)
        self.items: list[tuple[object, object]] = []
        self.factory = container.default_factory if isinstance(container, defaultdict) else None

    def _new(self) -> Any:
        new = super()._new()
        if self.factory is not None:
            new.default_factory = self.factory
        return new

    def _fill(self, live: Any, restoring: Restoring) -> None:
        wanted = []
        for saved_key, saved in self.items:
            key = restoring.value(saved_key, MISSING)
            if isinstance(saved_key, Node) and not isinstance(key, torch.Tensor):
                continue  # a key that is gone; in the second round it is there again
            value = restoring.value(saved, dict.get(live, key, MISSING))
            if value is not MISSING:
                wanted.append((key, value))
        put_items(live, wanted)


class SetNode(ContainerNode):
    """A set."""

    __slots__ = ("items",)

    def __init__(self, path: str, container: set[Any]) -> None:
        super().__init__(path, container)
        self.items: list[object] = []

    def _fill(self, live: Any, restoring: Restoring) -> None:
        here = {id(item): item for item in items_of(live)}
        wanted = [restoring.value(saved, here.get(_identity(saved), MISSING)) for saved in self.items]
        if any(value is MISSING or (value is None and not restoring.final) for value in wanted):
            return
        if set(live) != set(wanted) or any(isinstance(saved, Node) for saved in self.items):
            put_items(live, wanted)


class TupleNode(Node):
    """A tuple that holds something which is not plain."""

    __slots__ = ("cls", "items")

    def __init__(self, path: str, cls: type[Any], items: list[object]) -> None:
        super().__init__(path)
        self.cls = cls
        self.items = items
        self.may_hold_tensors = any_tensors(items)

    def value(self, now: object, restoring: Restoring) -> object:
        same = type(now) is self.cls and len(cast("tuple[object, ...]", now)) == len(self.items)
        current = cast("tuple[object, ...]", now) if same else (MISSING,) * len(self.items)
        wanted = [restoring.value(saved, old) for saved, old in zip(self.items, current, strict=True)]
        unchanged = same and all(new is old for new, old in zip(wanted, current, strict=True))
        if unchanged or any(value is MISSING for value in wanted):
            return now
        return self.cls._make(wanted) if hasattr(self.cls, "_make") else self.cls(wanted)


class ContentsNode(Node):
    """An object whose contents are bytes, or values that are no objects: a NumPy array, a file in memory."""

    __slots__ = ("_contents", "_obj")

    def __init__(self, path: str, obj: object, contents: list[Contents]) -> None:
        super().__init__(path)
        self._obj = obj
        self._contents = contents

    def value(self, now: object, restoring: Restoring) -> object:
        if restoring.first_visit(self):
            for contents in self._contents:
                contents.restore()
        return self._obj


class ObjectsNode(Node):
    """A NumPy array of objects."""

    __slots__ = ("_array", "_shape", "items")

    def __init__(self, path: str, array: Any) -> None:
        super().__init__(path)
        self._array = array
        self._shape = array.shape
        self.items: list[object] = []

    def value(self, now: object, restoring: Restoring) -> object:
        if restoring.first_visit(self):
            if self._array.shape != self._shape:
                self._array.resize(self._shape, refcheck=False)
            flat = self._array.reshape(-1)
            for index, saved in enumerate(self.items):
                value = restoring.value(saved, flat[index])
                if value is not flat[index]:
                    self._array[self._place(index)] = value
        return self._array

    def _place(self, index: int) -> tuple[int, ...]:
        place: list[int] = []
        for length in reversed(self._shape):
            place.insert(0, index % length)
            index //= length
        return tuple(place)


class IteratorNode(Node):
    """An iterator: itself where it has not moved, else another one at the place where it was."""

    __slots__ = ("_iterator", "_position", "_twin")

    def __init__(self, path: str, iterator: object, twin: object) -> None:
        super().__init__(path)
        self._iterator = iterator
        self._position = position_of(iterator)
        self._twin = twin

    def value(self, now: object, restoring: Restoring) -> object:
        if restoring.first_visit(self) and position_of(self._iterator) != self._position:
            self._iterator = twin_of(self._twin)
        return self._iterator


class GeneratorNode(Node):
    """A random number generator."""

    __slots__ = ("_generator", "_undo")

    def __init__(self, path: str, generator: object, undo: Callable[[], object]) -> None:
        super().__init__(path)
        self._generator = generator
        self._undo = undo

    def value(self, now: object, restoring: Restoring) -> object:
        if restoring.final and restoring.first_visit(self):
            self._undo()
        return self._generator


class ObjectNode(Node):
    """An object by its attributes."""

    __slots__ = ("attributes", "cls", "flags", "left_alone", "obj", "scripted")

    def __init__(self, path: str, obj: object, left_alone: Callable[[str], bool]) -> None:
        super().__init__(path)
        self.obj = obj
        self.cls = type(obj)
        self.left_alone = left_alone
        self.attributes: list[dict[str, object]] = []  # a table each: its `__dict__`, its slots
        self.scripted: Sequence[Contents] = ()
        self.flags: list[tuple[torch.nn.Module, bool]] = []  # where they are no attributes (TorchScript)

    def value(self, now: object, restoring: Restoring) -> object:
        if restoring.first_visit(self):
            if type(self.obj) is not self.cls:  # parametrizations and FSDP exchange a module's class
                self.obj.__class__ = self.cls
            for table, attributes in zip(tables_of(self.obj), self.attributes, strict=True):
                fill_attributes(table, attributes, restoring, self.left_alone)
            for contents in self.scripted:
                contents.restore()
            for module, training in self.flags:
                if module.training != training:
                    module.training = training
        return self.obj


class OtherNode(Node):
    """An object of which only the binding is known. It is kept: an equal one could not be made."""

    __slots__ = ("_obj",)

    def __init__(self, path: str, obj: object) -> None:
        super().__init__(path)
        self._obj = obj

    def value(self, now: object, restoring: Restoring) -> object:
        return self._obj


def fill_attributes(
    table: MutableMapping[str, Any],
    attributes: Mapping[str, object],
    restoring: Restoring,
    left_alone: Callable[[str], bool] = lambda name: False,
) -> None:
    """Make an object's `__dict__` or slots what they were; past `__setattr__`, which may do anything."""
    for name in [name for name in table if name not in attributes and not left_alone(name)]:
        del table[name]
    for name, saved in attributes.items():
        now = table.get(name, MISSING)
        value = restoring.value(saved, now)
        if value is not MISSING and value is not now:
            table[name] = value


def any_tensors(items: list[object]) -> bool:
    """Some of the saved values may hold tensors that the program could free."""
    return any(isinstance(item, Node) and item.may_hold_tensors for item in items)


def _identity(saved: object) -> int:
    return saved.identity if isinstance(saved, ContainerNode) else 0
