"""A host copy of all state that a trial may change, and its exact restoration.

Rules:
- State before = state after, bit for bit, any number of times. In place and attribute by attribute, never
  through `load_state_dict`, which casts optimizer state and replaces the groups that schedulers hold.
- Nothing is kept on the device: tensors are host bytes and weak references (`host_copy`). The same objects
  come back wherever the program still has them, equal ones where it does not.
- Restoring runs after an OOM. First everything made since is let go (gradients, optimizer state, swapped
  storages, new attributes), then missing memory is allocated, then bytes are copied, then names are bound.
- A part that cannot be restored does not stop the others; all such parts are named in one `SnapshotError`.

Covered, in any nesting of lists, tuples, dicts and sets, of any subclass: modules, optimizers, LR schedulers,
gradient scalers, tensors, NumPy arrays, generators, and any other declared object by its attributes and
slots. Of each object: tensors (with `.grad`, `requires_grad`, attributes), plain data (numbers, text, None,
dtypes, enums), containers of these, objects of the kinds above, and records (`contents.is_record`): objects
of the program's own classes, dataclasses, weak containers, what has a `state_dict`. Attributes added since
are removed. Of a module also its submodules' train/eval flags. The global generators (Python, NumPy, torch
on every device in use) always. An iterator that has moved is replaced by one at its old place.

Left alone: hooks; datasets and loaders; what is inside an object of a library that hangs off a declared one
(a tokenizer, a stream: the same object is bound again, its contents are its own); what DDP and FSDP2 remember
of the step that they are in, which `wrappers` resets. A declared iterator is refused; a generator that hangs
off a declared object is named in a warning before anything runs: its position cannot be restored.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any, Final, Self, TypeVar, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from batchfit._engine.snapshot import rng, wrappers
from batchfit._engine.snapshot.contents import (
    BYTES,
    Scripted,
    contents_of,
    is_array,
    is_dead,
    is_iterator,
    is_own,
    is_record,
    items_of,
    tables_of,
)
from batchfit._engine.snapshot.host_copy import HostMemory, WrapperCopy, synchronize
from batchfit._engine.snapshot.iterators import twin_of, warn_of
from batchfit._engine.snapshot.nodes import (
    MISSING,
    ContainerNode,
    ContentsNode,
    DictNode,
    GeneratorNode,
    IteratorNode,
    ListNode,
    Node,
    ObjectNode,
    ObjectsNode,
    OtherNode,
    Restoring,
    SetNode,
    TensorNode,
    TupleNode,
    any_tensors,
    grad_of,
)
from batchfit._engine.snapshot.rng import not_restored

_N = TypeVar("_N", bound=Node)

# Objects whose attributes are state, wherever they are found.
_KNOWN: Final = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
# Immutable: bound again as they are.
_PLAIN: Final = (
    *(int, float, complex, str, bytes, type(None), type(...), range, slice, enum.Enum, type, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(date, timedelta, Decimal, Fraction, PurePath),
)
_ATOMS: Final = frozenset({int, float, bool, str, type(None)})
_BUILT_IN: Final = frozenset({dict, list, set, deque, OrderedDict, defaultdict, Counter})
# Where state may be in objects of any class: optimizers of objects, a LambdaLR's callables (which are
# part of its state_dict).
_DEEP: Final = frozenset({"state", "lr_lambdas", "_scale_fn_custom"})
# Containers that others may hold too (a scheduler, the user), with how deep that goes (groups, group,
# params): these very objects come back, not equal ones, even where `load_state_dict` has replaced them.
_HELD: Final = {"param_groups": 3}
# All that is restored of a wrapper whose own attributes follow state that is out of reach.
_WRAPPER: Final = frozenset({"training", "_parameters", "_buffers", "_modules"})


@final
class Snapshot:
    """The state of a workload at one moment, in host memory.

        snapshot = Snapshot.take([model, optimizer])
        ...                     # train, fail, run out of memory
        snapshot.restore()      # all of it is back, bit for bit

    It holds the objects that it was given, and no tensor of theirs.
    """

    __slots__ = ("_generators", "_memory", "_parallel", "_roots", "_tensors")

    def __init__(self, roots: list[Node], taking: _Taking, generators: list[tuple[str, rng.Undo]]) -> None:
        self._roots = roots
        self._tensors = taking.tensors
        self._parallel = taking.parallel
        self._memory = taking.memory
        self._generators = generators

    @classmethod
    def take(cls, state: Iterable[object]) -> Self:
        """Copy `state` and the global random number generators.

        A `TypeError` names what cannot be restored, before anything is copied.
        """
        if isinstance(state, (*_KNOWN, torch.Tensor, Mapping)) or not isinstance(state, Iterable):
            state = (state,)
        declared = [(f"state[{index}]", part) for index, part in enumerate(state)]
        for path, part in declared:
            _check(part, path, seen=set())
        generators = rng.global_states()
        taking = _Taking()
        saved = [taking.root(part, path) for path, part in declared]
        return cls([node for node in saved if isinstance(node, Node)], taking, generators)

    @property
    def host_bytes(self) -> int:
        """Host memory that the copies take."""
        return sum(storage.nbytes for storage in self._memory.storages.values())

    def restore(self, *, cut_off: bool = True) -> None:
        """Restore everything to its state when the snapshot was taken.

        `cut_off`: a step may have been stopped in the middle since.
        """
        restoring = Restoring()
        with torch.inference_mode(mode=False), torch.no_grad():
            self._restore(restoring, cut_off)
        for name, undo in self._generators:
            with restoring.part(name):
                undo()
        if restoring.failed:
            raise not_restored(list(restoring.failed.items()))

    def _restore(self, restoring: Restoring, cut_off: bool) -> None:
        torch.clear_autocast_cache()  # cast copies of weights that are about to change back
        for device in self._memory.devices:
            with restoring.part(str(device)):
                synchronize(device)
        for path, module in self._parallel if cut_off else ():
            with restoring.part(path):
                wrappers.settle(module)
        for node in self._tensors:
            with restoring.part(node.path):
                node.release(restoring)
        self._bind(restoring)
        restoring.final = True
        for storage in self._memory.storages.values():
            with restoring.part(storage.path):
                restoring.storages.append(storage.allocate())
                storage.write(restoring.storages[-1])
        for node in self._tensors:
            with restoring.part(node.path):
                restoring.tensors[node] = node.copy.put(restoring.tensors.get(node))
        for node in self._tensors:
            with restoring.part(node.path):
                node.put_grad(restoring)
        self._bind(restoring)

    def _bind(self, restoring: Restoring) -> None:
        restoring.entered.clear()
        for node in self._roots:
            restoring.value(node, MISSING)


class _Taking:
    """One walk over the state: every tensor, storage and object is remembered once."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.tensors: list[TensorNode] = []
        self.parallel: list[tuple[str, nn.Module]] = []  # perhaps: FSDP wraps modules in place
        self._nodes: dict[int, Node] = {}
        self._alive: list[object] = []  # what `_nodes` knows by address must not die during the walk

    def root(self, value: object, path: str) -> object:
        """A part of the declared state; here an object of any class is its attributes."""
        return self.capture(value, path, hold=sys.maxsize, deep=True)

    def capture(self, value: Any, path: str, *, hold: int = 0, deep: bool = False) -> object:
        """`value` as it is if it is plain, else a node that knows how to restore it."""
        if _is_plain(value):
            return value
        node = self._nodes.get(id(value))
        if node is not None and not (deep and isinstance(node, OtherNode)):
            return node
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, frozenset) and all(_is_plain(item) for item in value):
            return value
        if isinstance(value, tuple):
            items = [
                self.capture(item, f"{path}[{i}]", hold=hold - 1, deep=deep) for i, item in enumerate(value)
            ]
            plain = not any(isinstance(item, Node) for item in items)
            return value if plain else TupleNode(path, type(value), items)
        if isinstance(value, dict | list | deque | set):
            return self._container(value, path, hold, deep)
        if isinstance(value, _KNOWN):
            return self._object(value, path)
        undo = rng.undo_generator(value)
        if undo is not None:
            return self._remember(value, GeneratorNode(path, value, undo))
        if is_array(value) and value.dtype.hasobject:
            objects = self._remember(value, ObjectsNode(path, value))
            objects.items = [self.capture(item, f"{path}[...]") for item in value.reshape(-1)]
            return objects
        if is_array(value) or isinstance(value, BYTES):
            inner = [one for table in tables_of(value) for one in table.values() if is_array(one)]  # a mask
            contents = [found for one in (value, *inner) for found in contents_of(one)]
            return self._remember(value, ContentsNode(path, value, contents))
        if is_iterator(value):
            return self._iterator(value, path)
        if (deep and _has_attributes(value)) or is_record(value):
            return self._object(value, path)
        return self._remember(value, OtherNode(path, value))

    def _iterator(self, value: object, path: str) -> Node:
        twin = twin_of(value)
        if twin is None:
            warn_of(path, value)
            return self._remember(value, OtherNode(path, value))
        return self._remember(value, IteratorNode(path, value, twin))

    def _remember(self, value: object, node: _N) -> _N:
        self._nodes[id(value)] = node
        self._alive.append(value)
        return node

    def _tensor(self, tensor: torch.Tensor, path: str) -> TensorNode:
        node = self._remember(tensor, TensorNode(path, self.memory.copy(tensor, path)))
        self.tensors.append(node)
        grad = grad_of(tensor)
        if grad is not None:
            found = self.capture(grad, f"{path}.grad")
            assert isinstance(found, TensorNode)
            node.grad = found
        if not isinstance(node.copy, WrapperCopy):  # that one's attributes are its parts
            node.attributes = {n: self.capture(v, f"{path}.{n}") for n, v in vars(tensor).items()}
        return node

    def _container(self, value: Any, path: str, hold: int, deep: bool) -> ContainerNode:
        node: ContainerNode
        if isinstance(value, dict):
            node = self._remember(value, DictNode(path, value))
            pairs = [pair for pair in items_of(value) if not is_dead(pair)]
            node.items = [self._item(key, item, path, hold - 1, deep) for key, item in pairs]
            tensors = any(any_tensors([*pair]) for pair in node.items)
        else:
            several = SetNode if isinstance(value, set) else ListNode
            node = self._remember(value, several(path, value))
            node.items = [
                item if type(item) in _ATOMS else self.capture(item, f"{path}[{i}]", hold=hold - 1, deep=deep)
                for i, item in enumerate(items_of(value))
            ]
            tensors = any_tensors(node.items)
        if type(value) not in _BUILT_IN:
            node.attributes = [
                {name: self.capture(one, f"{path}.{name}") for name, one in list(table.items())}
                for table in tables_of(value)
            ]
            tensors = tensors or any(any_tensors(list(table.values())) for table in node.attributes)
        node.may_hold_tensors = tensors
        if hold > 0 or not tensors:
            node.held = value
        return node

    def _item(self, key: object, item: object, path: str, hold: int, deep: bool) -> tuple[object, object]:
        # Never the repr of a tensor: it would be long, and it would synchronize the device.
        saved_key = self.capture(key, f"{path}'s key") if isinstance(key, torch.Tensor) else key
        if type(item) in _ATOMS:
            return saved_key, item
        if path.endswith("."):  # a module's table: its entries are named as attributes
            label = f"{path}{key}"
        else:
            label = f"{path}[{saved_key.path if isinstance(saved_key, Node) else repr(key)}]"
        return saved_key, self.capture(item, label, hold=hold, deep=deep)

    def _object(self, obj: Any, path: str) -> ObjectNode:
        wrapper = isinstance(obj, DistributedDataParallel)
        hooked = isinstance(obj, nn.Module | Optimizer)

        def left_alone(name: str) -> bool:
            return (wrapper and name not in _WRAPPER) or (hooked and name[:1] == "_" and "hook" in name)

        node = self._remember(obj, ObjectNode(path, obj, left_alone))
        for table in tables_of(obj):
            attributes: dict[str, object] = {}
            node.attributes.append(attributes)
            for name, value in list(table.items()):
                if left_alone(name):
                    continue
                tensors = isinstance(obj, nn.Module) and name in ("_parameters", "_buffers", "_modules")
                attributes[name] = self.capture(
                    value,
                    f"{path}." if tensors else f"{path}.{name}",
                    hold=_HELD.get(name, 0) if hooked else 0,
                    deep=name in _DEEP and isinstance(obj, Optimizer | LRScheduler),
                )
        if wrapper:
            wrappers.check(obj, path)
        if wrapper or (isinstance(obj, nn.Module) and "torch.distributed.fsdp" in sys.modules):
            self.parallel.append((path, obj))
        if isinstance(obj, torch.jit.ScriptModule):
            for name, tensor in (*obj.named_parameters(), *obj.named_buffers()):
                self.capture(tensor, f"{path}.{name}")  # no Python attributes: written in place
            node.flags = [(module, module.training) for module in obj.modules()]
            node.scripted = [Scripted(module) for module in obj.modules()]
        return node


def _check(part: Any, path: str, *, seen: set[int], place: bool = False) -> None:
    """Refuse what cannot be restored. `place`: it sits in a list or dict, where a plain value can be."""
    if id(part) in seen:
        return
    if _is_plain(part):
        if part is None or place:
            return
        raise TypeError(
            f"{path} must be a module, an optimizer or another object with state, not {part!r:.80} "
            f"({type(part).__name__}): a plain value cannot be restored. Keep it in a dict or an object."
        )
    seen.add(id(part))
    if isinstance(part, dict):
        for key, item in items_of(part):
            label = "a tensor" if isinstance(key, torch.Tensor) else repr(key)
            _check(item, f"{path}[{label}]", seen=seen, place=True)
    elif isinstance(part, list | deque | set | tuple):
        for index, item in enumerate(part if isinstance(part, tuple) else items_of(part)):
            _check(item, f"{path}[{index}]", seen=seen, place=not isinstance(part, tuple))
    elif not _can_hold_state(part):
        why = "it has no state that could be restored"
        if isinstance(part, Iterator):
            why = "an iterator's position cannot be restored"
        raise TypeError(
            f"{path} must be a module, an optimizer or another object with state, "
            f"not {part!r:.80} ({type(part).__name__}): {why}."
        )


def _can_hold_state(part: object) -> bool:
    if isinstance(part, (torch.Tensor, *_KNOWN, *BYTES)) or is_array(part):
        return True
    if isinstance(part, Iterator) and is_iterator(part):
        return False
    return rng.undo_generator(part) is not None or _has_attributes(part)


def _is_plain(value: object) -> bool:
    if type(value) in _ATOMS or isinstance(value, _PLAIN):
        return True
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _has_attributes(value: object) -> bool:
    return bool(tables_of(value)) and not (isinstance(value, Iterator) and not is_own(value))
