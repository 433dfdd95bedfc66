"""Attributes and items of a Python object: read for a snapshot, and set again.

Rules:
- One object at a time: its items, its attributes, its slots, its bytes. What is inside them is for
  others to look at (`held`).
- What has not changed is not touched. What has is written by the operations of the built-in class (of `dict`,
  of `list`), past whatever a subclass makes of them: one that refuses `update` is restored like any other.
- By identity: the same objects come back, in the same order.
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import functools
import io
import sys
import types
import weakref
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private.modules import scripted

GONE: Final[Any] = object()  # in the place of something that is not there
ATOMS: Final = frozenset({int, float, bool, str, bytes, complex, type(None)})
# Classes of libraries that are containers or plain records of the program's: looked into as its own are.
_RECORDS: Final = (
    *(UserDict, collections.UserList, collections.ChainMap, types.SimpleNamespace, argparse.Namespace),
    *(weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary),
)
_CODE: Final = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    functools.partial,
)
BYTES: Final = (bytearray, array.array, io.BytesIO, io.StringIO)
# Data, not state: as large as a disk, and what reads it changes none of it.
_DATA: Final = (torch.utils.data.Dataset, torch.utils.data.DataLoader, torch.utils.data.Sampler)


class Contents(ABC):
    """What one object holds now."""

    @abstractmethod
    def restore(self) -> None:
        """Give the object back what it held, where it holds something else."""

    def held(self) -> Iterable[Any]:
        """What was held: values that may have contents of their own."""
        return ()

    def replace(self, meanwhile: Callable[[Any], Any]) -> None:
        """Have the object hold `meanwhile(one)` in place of each thing that it holds, until `restore`."""
        return  # bytes hold nothing

    def place_of(self, value: Any) -> str:
        """How the program writes the place where `value` is held."""
        return "[...]"


def contents_of(value: Any) -> list[Contents]:
    """All that `value` holds itself; nothing for what cannot be changed."""
    found: list[Contents] = []
    if isinstance(value, dict | list | deque | set):
        found.append(Items(value))
    elif isinstance(value, bytearray | array.array):
        found.append(_Bytes(value))
    elif isinstance(value, io.BytesIO | io.StringIO):
        found.append(_Stream(value))
    elif is_array(value):
        found.append(ArrayContents(value))
    elif isinstance(value, torch.jit.ScriptModule):
        found.append(Scripted(value))
    return [*found, *(Attributes(table) for table in tables_of(value))]


# -- items


def items_of(value: Any) -> list[Any]:
    """The items of a list, deque or set, or pairs of a dict, as the built-in class lists them."""
    if isinstance(value, dict):
        return list(_base(value).items(value))
    return list(_base(value).__iter__(value))


def put_items(value: Any, items: list[Any]) -> None:
    """Make these its items, if they are not; `items` is as from `items_of`."""
    now = items_of(value)
    if isinstance(value, dict):
        _put_pairs(value, now, items)
    elif isinstance(value, set):
        if set(map(id, now)) != set(map(id, items)):
            set.clear(value)
            set.update(value, items)
    elif list(map(id, now)) != list(map(id, items)):
        if isinstance(value, list):
            list.__setitem__(value, slice(None), items)
        else:
            deque.clear(value)
            deque.extend(value, items)


def _put_pairs(value: Any, now: list[tuple[Any, Any]], items: list[tuple[Any, Any]]) -> None:
    """What stays is left in its place, as other threads may look."""
    base = _base(value)
    wanted = {id(key) for key, _ in items}
    for key, _ in now:
        if id(key) not in wanted:
            base.__delitem__(value, key)
    kept = [(key, one) for key, one in now if id(key) in wanted]
    if [id(key) for key, _ in kept] == [id(key) for key, _ in items]:
        for (key, one), (_, old) in zip(items, kept, strict=True):
            if one is not old:
                base.__setitem__(value, key, one)
        return
    # Some are missing: at the end they may be added, elsewhere the order would be another.
    if [id(key) for key, _ in kept] != [id(key) for key, _ in items[: len(kept)]]:
        base.clear(value)
    for key, one in items:
        if base.get(value, key, GONE) is not one:
            base.__setitem__(value, key, one)


def _base(value: Any) -> Any:
    """The built-in class that keeps the items; an OrderedDict has an order beside its dict."""
    return next(one for one in (OrderedDict, dict, list, deque, set) if isinstance(value, one))


@final
class Items(Contents):
    """The items of a dict, list, deque or set, of any subclass."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._items = items_of(value)
        self._factory = value.default_factory if isinstance(value, defaultdict) else None

    def held(self) -> Iterable[Any]:
        if isinstance(self._value, dict):
            return (one for pair in self._items for one in pair)
        return self._items

    def replace(self, meanwhile: Callable[[Any], Any]) -> None:
        if isinstance(self._value, dict):
            put_items(self._value, [(meanwhile(key), meanwhile(one)) for key, one in self._items])
        else:
            put_items(self._value, [meanwhile(one) for one in self._items])

    def restore(self) -> None:
        put_items(self._value, [one for one in self._items if not is_dead(one)])
        if isinstance(self._value, defaultdict) and self._value.default_factory is not self._factory:
            self._value.default_factory = self._factory


def is_dead(item: Any) -> bool:
    """An entry of a weak container whose object has gone since."""
    parts = item if type(item) is tuple else (item,)
    return any(isinstance(one, weakref.ref) and one() is None for one in parts)


# -- attributes


@final
class Slots(MutableMapping[str, Any]):
    """The slots of an object, as a table like a `__dict__`; past its `__setattr__`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kind: Any = type(owner)
        self._slots = _slots_of(kind)

    def __getitem__(self, name: str) -> Any:
        try:
            return self._slots[name].__get__(self._owner)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._slots[name].__set__(self._owner, value)

    def __delitem__(self, name: str) -> None:
        self._slots[name].__delete__(self._owner)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._slots if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return self.get(str(name), GONE) is not GONE


def _slots_of(kind: Any) -> dict[str, Any]:
    known = _SLOT_NAMES.get(kind)
    if known is None:
        known = _SLOT_NAMES[kind] = _find_slots(kind)
    return {name: vars(kind.__mro__[at])[slot] for name, (at, slot) in known.items()}


# Places in the `__mro__` only: a descriptor holds its class, and a class of the user's may hold models.
_SLOT_NAMES: weakref.WeakKeyDictionary[type, dict[str, tuple[int, str]]] = weakref.WeakKeyDictionary()


def _find_slots(kind: Any) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for at, one in enumerate(kind.__mro__):
        names = vars(one).get("__slots__", ())
        for slot, member in vars(one).items():
            if isinstance(member, types.MemberDescriptorType) and names:
                found.setdefault(f"{one.__qualname__}.{slot}" if slot in found else slot, (at, slot))
    return found


def tables_of(value: Any) -> list[MutableMapping[str, Any]]:
    """Where an object keeps its attributes: its `__dict__`, its slots."""
    if isinstance(value, _CODE):
        return []
    found: list[MutableMapping[str, Any]] = []
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        table = None
    if isinstance(table, dict):
        found.append(table)
    kind: Any = type(value)
    if _slots_of(kind):
        found.append(Slots(value))
    return found


@final
class Attributes(Contents):
    """One table of attributes."""

    def __init__(self, table: MutableMapping[str, Any]) -> None:
        self._table = table
        self._items = list(table.items())

    def held(self) -> Iterable[Any]:
        return (one for _, one in self._items)

    def place_of(self, value: Any) -> str:
        return next((f".{name}" for name, one in self._items if one is value), "")

    def replace(self, meanwhile: Callable[[Any], Any]) -> None:
        for name, one in self._items:
            other = meanwhile(one)
            if other is not one:
                self._table[name] = other

    def restore(self) -> None:
        if isinstance(self._table, dict):
            put_items(self._table, self._items)
            return
        before = dict(self._items)
        for name in list(self._table):
            if name not in before:
                del self._table[name]
        for name, one in before.items():
            if self._table.get(name, GONE) is not one:
                self._table[name] = one


@final
class Scripted(Contents):
    """What TorchScript keeps of a module: tensors, and numbers and lists that `forward` may change."""

    def __init__(self, module: Any) -> None:
        self._module, names = scripted(module)
        self._values = {name: self._module.getattr(name) for name in names}

    def restore(self) -> None:
        for name, value in self._values.items():
            now = self._module.getattr(name)
            if now is not value and (_any_tensor(value) or _any_tensor(now) or now != value):
                self._module.setattr(name, value)


def _any_tensor(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or any(map(_any_tensor, inner))


# -- bytes


@final
class _Bytes(Contents):
    def __init__(self, value: Any) -> None:
        self._value, self._copy = value, value[:]

    def restore(self) -> None:
        if self._value != self._copy:
            self._value[:] = self._copy


@final
class _Stream(Contents):
    """A file in memory."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._state = None if value.closed else (value.getvalue(), value.tell())

    def restore(self) -> None:
        if self._state is None or (self._value.getvalue(), self._value.tell()) == self._state:
            return
        text, position = self._state
        self._value.seek(0)
        self._value.truncate()
        self._value.write(text)
        self._value.seek(position)


def is_array(value: Any) -> bool:
    """A NumPy array of the program's memory; one that is a file on a disk is data."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return not isinstance(value, numpy.memmap) and not isinstance(value.base, numpy.memmap)


class ArrayContents(Contents):
    """A NumPy array: its shape, its dtype, and its bytes or objects."""

    def __init__(self, array: Any) -> None:
        numpy: Any = sys.modules["numpy"]
        self._array = array
        self._plain = numpy.ndarray
        self._shape, self._dtype = array.shape, array.dtype
        self._writeable = bool(array.flags.writeable)
        self._copy: Any = None if not self._writeable else numpy.array(array, subok=False)

    def held(self) -> Iterable[Any]:
        return self._copy.ravel().tolist() if self._copy is not None and self._dtype.hasobject else ()

    def restore(self) -> None:
        array = self._array
        if self._copy is None:  # nobody could write into it
            return
        if not array.flags.writeable:
            array.flags.writeable = True
        if array.dtype != self._dtype:
            array.dtype = self._dtype
        if array.shape != self._shape:
            array.resize(self._shape, refcheck=False)
        if not self._is_same():
            array.view(self._plain)[...] = self._copy
        if array.flags.writeable != self._writeable:
            array.flags.writeable = self._writeable

    def _is_same(self) -> bool:
        # Bit for bit, and objects by identity: their addresses are the bytes.
        return bool(self._array.view(self._plain).tobytes() == self._copy.tobytes())


# -- which objects are looked into


def is_own(value: Any) -> bool:
    """An object of the program's own classes."""
    if isinstance(value, (*_CODE, Tensor)):
        return False
    module = type(value).__module__
    return not is_installed(module) and module.partition(".")[0] != "batchfit"


def is_record(value: Any) -> bool:
    """An object whose attributes are the program's state.

    Of its own classes, a plain record, or of a library that says what has state: what can be checkpointed.
    """
    if isinstance(value, (*_CODE, *_DATA, Tensor)):
        return False
    kind = type(value)
    if isinstance(value, _RECORDS) or dataclasses.is_dataclass(kind) or is_own(value):
        return True
    ours = kind.__module__.partition(".")[0] == "batchfit"
    return hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict") and not ours


def is_iterator(value: Any) -> bool:
    """A built-in iterator or one of a library in C; one with attributes is restored by these."""
    return isinstance(value, Iterator) and not hasattr(value, "__dict__")


def is_parallel(module: Any) -> bool:
    """Whether a step through the module issues collectives, and keeps a record of that outside Python."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return isinstance(module, (DistributedDataParallel, *(kind for kind in kinds if kind is not None)))


@functools.lru_cache(maxsize=4096)
def is_installed(module: str | None) -> bool:
    """Code of a library, which knows nothing of the program's own models."""
    root = (module or "").partition(".")[0]
    if root in sys.stdlib_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != "batchfit" and ("site-packages" in file or "dist-packages" in file)
