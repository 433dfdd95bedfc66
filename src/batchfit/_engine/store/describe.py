"""Any value of a program as nested lists that are the same in every process: code, classes, objects, modules.

Rules:
- No id, no address, no hash order, no line number and no value of a tensor goes in.
- Where in doubt, more goes in. What cannot be read (the inside of an extension type) counts by its class.
- Code of the user's counts by its bytecode, constants, defaults, closure and the globals that it names; a
  package's code by the package's version, and by whatever was patched into its classes.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import json
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, timedelta
from numbers import Number
from pathlib import PurePath
from typing import Any, Final, final

import torch
from torch import nn

from batchfit._engine.batch.structure import is_array

MOST_PARTS: Final = 1_000_000  # a second or two of reading
_DEEPEST: Final = 60
_LONG: Final = 1024  # longer sequences are data: their length and evenly spaced items count

# No size is that large: it is an id, a hash or a time, which transformers and dynamo keep in attributes.
_IDENTITY: Final = 2**40

ATOMS: Final = (int, float, complex, str, bytes, bool, type(None), type(...), range, slice)
_NAMED: Final = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, PurePath)
# Machinery: what it holds differs from run to run (sockets, counters, compiled code) and needs no memory.
_MACHINERY: Final = (
    *("torch._C", "torch._dynamo", "torch._inductor", "torch.distributed", "torch.utils.tensorboard"),
    *(
        "threading",
        "_thread",
        "logging",
        "multiprocessing",
        "concurrent",
        "queue",
        "asyncio",
        "socket",
        "_io",
    ),
    *("random", "numpy.random", "weakref", "itertools"),
    *("wandb", "mlflow", "neptune", "comet_ml", "tensorboard", "tqdm", "loguru"),
)
_MODULE_PARTS: Final = frozenset(vars(nn.Module()))  # torch's own, read in their own way
_MODULE_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CLASS_PARTS: Final = (
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__abstractmethods__"),
    *("_abc_impl", "__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
)
# The name of an attribute that `fully_shard` adds begins so, and goes on with a UUID.
_RANDOM_NAME: Final = "__composable_api_state_key"


class UndescribableError(Exception):
    """Something that has no description; the text says why."""


def digest_of(parts: object) -> str:
    """A name for nested lists, text and numbers: equal for equal ones, whatever the process."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@final
class ValueReader:
    """Reads values into nested lists. What was read before is named by its number: ties and cycles show."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # so that no id is given out twice
        self._count = 0
        self._depth = 0

    def read(self, value: Any) -> Any:
        """Any value. Containers, tensors, modules, functions, classes and objects by what is in them."""
        self._count += 1
        if self._count > MOST_PARTS:
            raise UndescribableError(f"it refers to more than {MOST_PARTS:,} values")
        if isinstance(value, enum.Enum):
            return ["enum", type(value).__qualname__, value.name]
        if type(value) in ATOMS or isinstance(value, _NAMED):
            return atom(value)
        if self._depth > _DEEPEST:
            return ["deep", type(value).__qualname__]
        self._depth += 1
        try:
            if isinstance(value, tuple | frozenset | types.CodeType):
                # Never by number: whether equal constants are one object depends on how code was loaded.
                return self._unnumbered(value)
            number = self._numbers.get(id(value))
            if number is not None:
                return ["again", number]
            self._numbers[id(value)] = len(self._kept)
            self._kept.append(value)
            return self._numbered(value)
        finally:
            self._depth -= 1

    def _unnumbered(self, value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return self._code(value)
        if isinstance(value, frozenset):
            return ["frozenset", _unordered(value)]
        return [type(value).__qualname__, self._items(value)]

    def _numbered(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor_shape(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return ["method", self.read(value.__func__), self.read(value.__self__)]
        if isinstance(value, functools.partial):
            return ["partial", self.read(value.func), self.read(value.args), self.read(value.keywords)]
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__, version_of(value.__name__)]
        if isinstance(value, Mapping):
            keys = list(value)
            return [type(value).__qualname__, self._items(keys), self._items([value[key] for key in keys])]
        if isinstance(value, list | deque):
            return [type(value).__qualname__, self._items(value)]
        if isinstance(value, set):
            return ["set", _unordered(value)]
        if is_array(value):
            return ["array", list(value.shape), str(value.dtype)]
        return self._object(value)

    def _items(self, values: Any) -> list[Any]:
        count = len(values)
        if count <= _LONG:
            return [self.read(value) for value in values]
        values = list(values)
        if all(type(value) in ATOMS for value in values):
            return [count, digest_of([atom(value) for value in values])]
        return [count, [self.read(values[i * count // _LONG]) for i in range(_LONG)]]

    def _module(self, module: nn.Module) -> Any:
        own = vars(module)
        code = getattr(module, "code", None)  # of a traced or scripted module, whose class says nothing
        return [
            "nn.Module",
            self.read(type(module)),
            module.training,
            [[name, self.read(one)] for name, one in module._parameters.items()],
            [[name, self.read(one)] for name, one in module._buffers.items()],
            [[name, self.read(one)] for name, one in module._modules.items()],
            [[name, self.read(list(own[name].values()))] for name in _MODULE_HOOKS if own.get(name)],
            [
                [name, self.read(one)]
                for name, one in sorted(own.items())
                if name not in _MODULE_PARTS and not name.startswith(_RANDOM_NAME)
            ],
            code if isinstance(code, str) else None,
            _sharding(module),
        ]

    def _function(self, function: types.FunctionType) -> Any:
        closure = function.__closure__ or ()
        cells = [
            [name, self._cell(cell)]
            for name, cell in zip(function.__code__.co_freevars, closure, strict=True)
        ]
        given = [self.read(function.__defaults__), self.read(function.__kwdefaults__)]
        version = version_of(function.__module__)
        if version is not None:
            return ["function", f"{function.__module__}.{function.__qualname__}", version, cells, given]
        return ["function", self._code(function.__code__), self._globals(function), cells, given]

    def _cell(self, cell: types.CellType) -> Any:
        try:
            return self.read(cell.cell_contents)
        except ValueError:  # not bound yet
            return ["empty"]

    def _code(self, code: types.CodeType) -> Any:
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        work = hashlib.sha256(code.co_code + b"|" + code.co_exceptiontable).hexdigest()
        return ["code", work, list(shape), list(code.co_names), [self.read(one) for one in code.co_consts]]

    def _globals(self, function: types.FunctionType) -> Any:
        """The globals that a function of the user's names; of the user's modules also their functions."""
        names, attributes = _named_in(function.__code__)
        found = []
        for name in sorted(names & function.__globals__.keys()):
            value = function.__globals__[name]
            found.append([name, self.read(value)])
            if isinstance(value, types.ModuleType) and version_of(value.__name__) is None:
                inside = sorted(attributes & vars(value).keys())
                found += [[f"{name}.{one}", self.read(vars(value)[one])] for one in inside]
        return found

    def _class(self, cls: type) -> Any:
        version = version_of(cls.__module__)
        bases = [self.read(base) for base in cls.__bases__ if base is not object]
        if version is None:
            return ["class", cls.__qualname__, bases, self._members(cls, vars(cls).items())]
        home = cls.__module__.partition(".")[0]
        patched = [
            (name, one)
            for name, one in vars(cls).items()
            if isinstance(one, types.FunctionType) and (one.__module__ or "").partition(".")[0] != home
        ]
        # A class without patches needs no look at its bases: they are of packages with versions, or read.
        return ["class", f"{cls.__module__}.{cls.__qualname__}", version, bases, self._members(cls, patched)]

    def _members(self, cls: type, members: Iterable[tuple[str, Any]]) -> list[Any]:
        found = []
        for name, member in sorted(members, key=lambda one: one[0]):
            if name in _CLASS_PARTS:
                continue
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if isinstance(member, property):
                member = (member.fget, member.fset)
            elif isinstance(member, functools.cached_property):
                member = member.func
            found.append([name, self.read(member)])
        return found

    def _object(self, value: Any) -> Any:
        cls = type(value)
        if isinstance(value, torch.autocast):
            return ["autocast", value.device, str(value.fast_dtype), value._enabled, value._cache_enabled]
        if isinstance(value, torch.amp.GradScaler):
            return ["scaler", self.read(cls), value.is_enabled()]
        home = cls.__module__
        if home.startswith(("torch._ops", "triton")):  # a kernel: its name or its source, not its cache
            return ["kernel", cls.__qualname__, getattr(value, "src", None) or str(value)]
        if any(home == one or home.startswith(one + ".") for one in _MACHINERY):
            return ["object", f"{home}.{cls.__qualname__}"]
        if cls.__module__ == "builtins" or isinstance(value, types.BuiltinFunctionType):
            return ["builtin", cls.__qualname__, getattr(value, "__qualname__", None)]
        own = [[name, self.read(one)] for name, one in _attributes(value)]
        return ["object", self.read(cls), own, _number_or_text(value)]


def atom(value: object) -> list[str]:
    # Subclasses aside (`type(value) in ATOMS`), so that True is no 1 and no repr is the user's.
    if isinstance(value, str) and len(value) > 200:
        return ["str", hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()]
    if type(value) is int and abs(value) >= _IDENTITY:
        return ["int", "large"]
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    return [type(value).__name__, repr(value)]


def _number_or_text(value: Any) -> list[str] | None:
    """The value of a number or text of a class of its own: a NumPy scalar, a subclass of int, a date."""
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):
            return [base.__name__, base.__repr__(value)]
    if isinstance(value, Number | date | timedelta):
        return [type(value).__qualname__, repr(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return [str(value.dtype), repr(value.item())]
    return None


def _unordered(values: Iterable[object]) -> list[str]:
    """A set, in an order that no process chooses: each item is read on its own."""
    return sorted(digest_of(ValueReader().read(value)) for value in values)


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """The attributes of an object by name, those in slots too."""
    own = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                own.setdefault(name, getattr(value, name))
    yield from sorted((str(name), one) for name, one in own.items()) if _all_text(own) else ()


def _all_text(names: Iterable[object]) -> bool:
    return all(isinstance(name, str) for name in names)


def _named_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The globals that code names, and the attributes; those of functions inside it too."""
    names, attributes = set(), set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(step.argval)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_attributes = _named_in(constant)
            names |= inner_names
            attributes |= inner_attributes
    return names, attributes


@functools.lru_cache(maxsize=4096)
def version_of(module: str | None) -> str | None:
    """The version that stands for a module's code; None for code of the user's own, which has none."""
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names and top != "__main__":
        return "python {}.{}".format(*sys.version_info)
    loaded = sys.modules.get(top)
    version = getattr(loaded, "__version__", None)
    if not isinstance(version, str):
        return None
    if top in ("torch", "batchfit"):
        return version
    file = getattr(loaded, "__file__", None) or ""
    installed = {"site-packages", "dist-packages"} & set(PurePath(file).parts)
    return version if installed else None


def tensor_shape(tensor: torch.Tensor) -> list[Any]:
    described: list[Any] = [
        *(type(tensor).__qualname__, [str(side) for side in tensor.shape], str(tensor.dtype)),
        *(str(tensor.layout), tensor.device.type, tensor.requires_grad),
    ]
    if tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_contiguous():
        described.append(list(tensor.stride()))  # channels-last chooses other kernels
    placements = getattr(tensor, "placements", None)  # a DTensor: how it is spread over the ranks
    if placements is not None:
        described.append([str(placements), tensor_shape(tensor.to_local())])  # type: ignore[attr-defined]
    return described


def _sharding(module: Any) -> list[Any] | None:
    """How FSDP2 was told to shard a module; it keeps that out of the module's own attributes."""
    if not callable(getattr(module, "_get_fsdp_state", None)):
        return None
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    names = ("mp_policy", "offload_policy", "_reshard_after_forward")
    return [[repr(getattr(group, name, None)) for name in names] for group in groups]
