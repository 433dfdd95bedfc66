"""Random number states, as functions that restore them; and the stack of all such undo functions.

Rules:
- Reading or writing a state never initialises a device and never imports a library that the program did not
  import itself. States are kept as plain data or host bytes, never as tensors.
- A stack is undone in reverse order, all of it, whatever raises; then one error names what could not be.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, final

import torch

from batchfit._engine.device.tensors import closure_of
from batchfit._engine.torch_private.dispatch import modes_disabled
from batchfit._engine.torch_private.modules import mps_generator
from batchfit.errors import SnapshotError

Undo = Callable[[], object]

# How far, and into how long containers, generators are searched.
_DEEPEST = 4
_MOST_ITEMS = 64
_NO_GENERATORS = (torch.Tensor, type, ModuleType, str, bytes, int, float, type(None))


def global_states() -> list[tuple[str, Undo]]:
    """Every global generator by name, each with a function that restores its present state."""
    states: list[tuple[str, Undo]] = [("python's random", _undo_python(random._inst))]
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        states.append(("numpy.random", _undo_numpy_legacy(numpy_random)))
    states.append(("torch's cpu generator", _undo_torch(torch.default_generator)))
    for kind in ("cuda", "xpu"):
        states.extend(_device_states(kind))
    if _mps_available():
        states.append(("torch's mps generator", _undo_torch(mps_generator())))
    return states


def is_generator(value: object) -> bool:
    """Whether `undo_generator` knows it: one of torch's, NumPy's or Python's, or a proxy that stands for one.

    By class, since `isinstance` of torch's classes runs Python code: a batch asks for dozens of values.
    """
    kind: type = value.__class__
    if issubclass(kind, torch.Generator):
        return True
    if issubclass(kind, random.Random):
        return not issubclass(kind, random.SystemRandom)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return issubclass(kind, kinds)


def generators_held(fns: Iterable[Any]) -> list[object]:
    """The generators of random numbers that these functions can reach by name, each once.

    Called once per batch, so long containers and globals of libraries are left out.
    """
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(fn, 0) for fn in fns]
    while waiting:
        value, depth = waiting.pop()
        if issubclass(type(value), _NO_GENERATORS) or id(value) in seen:
            continue
        seen.add(id(value))
        if is_generator(value):
            found[id(value)] = value
        elif depth < _DEEPEST:
            waiting += [(one, depth + 1) for one in _within(value)]
    return list(found.values())


def _within(value: Any) -> Iterable[Any]:
    """What a function, a small container or an object of the user's holds."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, dict):
        return tuple(value.values()) if len(value) <= _MOST_ITEMS else ()
    if isinstance(value, list | tuple | set):
        return value if len(value) <= _MOST_ITEMS else ()
    plain = getattr(value, "__func__", value)
    code = getattr(plain, "__code__", None)
    if code is None:
        table = getattr(value, "__dict__", None)
        held = tuple(table.values()) if isinstance(table, dict) and len(table) <= _MOST_ITEMS else ()
        return (*held, getattr(value, "__self__", None))  # of a method that is written in C
    known = getattr(plain, "__globals__", {})
    named = [known[name] for name in code.co_names if name in known]
    return (*closure_of(plain), *named, *(plain.__defaults__ or ()), getattr(value, "__self__", None))


def undo_generator(value: object) -> Undo | None:
    """A function that puts the generator `value` back as it is now; None if it is no generator."""
    if isinstance(value, torch.Generator):
        return _undo_torch(value)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return _undo_python(value)
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is not None:
        if isinstance(value, numpy_random.RandomState):
            return _undo_numpy_legacy(value)
        if isinstance(value, numpy_random.Generator):
            return _undo_numpy(value.bit_generator)
        if isinstance(value, numpy_random.BitGenerator):
            return _undo_numpy(value)
    return None


def _device_states(kind: str) -> Iterator[tuple[str, Undo]]:
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return
    if module.is_initialized():
        for index, generator in enumerate(module.default_generators):
            yield f"torch's {kind}:{index} generator", _undo_torch(generator)
    else:
        yield f"torch's {kind} generators", lambda: _reseed(module)


def _reseed(module: Any) -> None:
    # The device was first used after the snapshot: its generators go back to how they were born, at the
    # start of the stream of their seed.
    if module.is_initialized():
        for generator in module.default_generators:
            generator.manual_seed(generator.initial_seed())


def _undo_torch(generator: torch.Generator) -> Undo:
    # As a storage and not as a tensor, so that whoever counts live tensors does not count this one.
    with modes_disabled():
        storage = generator.get_state().untyped_storage()

    def undo() -> None:
        with modes_disabled():
            state = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            generator.set_state(state)

    return undo


def _undo_python(generator: random.Random) -> Undo:
    state = generator.getstate()
    return lambda: generator.setstate(state)


def _undo_numpy_legacy(generator: Any) -> Undo:
    state = generator.get_state(legacy=False)
    return lambda: generator.set_state(state)


def _undo_numpy(bit_generator: Any) -> Undo:
    state = bit_generator.state

    def undo() -> None:
        bit_generator.state = state

    return undo


def _mps_available() -> bool:
    backend = getattr(torch.backends, "mps", None)
    return backend is not None and bool(backend.is_available())


@final
class UndoStack:
    """Functions that undo something, each with the name of what it undoes."""

    def __init__(self) -> None:
        self._undos: list[tuple[str, Undo]] = []

    def push(self, name: str, undo: Undo) -> None:
        """`undo` is called by `run`, before all that were pushed earlier."""
        self._undos.append((name, undo))

    def run(self) -> None:
        """Undo everything; a `SnapshotError` at the end names what raised."""
        failed: list[tuple[str, Exception]] = []
        while self._undos:
            name, undo = self._undos.pop()
            try:
                undo()
            except Exception as error:  # noqa: BLE001  all others must have their turn; raised below
                failed.append((name, error))
        if failed:
            first = failed[0][1]
            raise not_restored([(name, f"{type(one).__name__}: {one}") for name, one in failed]) from first


def not_restored(failed: list[tuple[str, Any]]) -> SnapshotError:
    """The one error for all parts that could not be restored, each with its reason."""
    named = [f"{path} ({why})" for path, why in failed]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    count = "1 part" if len(named) == 1 else f"{len(named)} parts"
    return SnapshotError(
        f"{count} of the state could not be restored: {'; '.join(named[:5])}{more}. "
        "Do not train on: load a checkpoint, or start again."
    )
