"""What is public, and which of it has no sentence of its own: read from signatures, fields and docstrings.

Rules
- Public is what `batchfit.__all__`, the public modules and `batchfit.integrations` export, and every class
  of batchfit's that one of these returns or takes.
- A parameter and a field have a line of their own in `Args:` or `Attributes:`. One sentence before these says
  what is returned; where there are more, `Returns:` does (or `Yields:`). Each error that a body raises is in
  `Raises:`.
- What overrides a method of a framework or of Python (Trainer.training_step, __iter__) is not described.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
import typing
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from batchfit.results._docstrings import introduction, sections

MODULES = (
    "batchfit",
    "batchfit.errors",
    "batchfit.results",
    "batchfit.schedules",
    "batchfit.testing",
    "batchfit.workload",
)
ARGUMENTS = ("Args", "Attributes")
NOTHING = (None, "None", "Iterator[None]", inspect.Signature.empty)


def integrations() -> tuple[str, ...]:
    """The modules that are for a framework each."""
    import batchfit.integrations as package

    private = ("_", "torchtune_settings")
    names = [one.name for one in pkgutil.iter_modules(package.__path__) if not one.name.startswith(private)]
    return tuple(f"batchfit.integrations.{name}" for name in names)


def exported(module: ModuleType) -> dict[str, Any]:
    """Its `__all__`, or what it defines under a public name."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
    return {name: getattr(module, name) for name in names}


def public(modules: tuple[str, ...]) -> dict[str, Any]:
    """Address -> object: classes and functions, once each, and the classes that they return or take."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = []
    for name in modules:
        module = importlib.import_module(name)
        waiting += [(f"{name}.{key}", value) for key, value in exported(module).items()]
    while waiting:
        address, value = waiting.pop(0)
        if id(value) in seen or not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        seen.add(id(value))
        found[address] = value
        waiting += [(f"{one.__module__}.{one.__qualname__}", one) for one in _named_by(value)]
    return found


def _named_by(value: Any) -> Iterator[type]:
    """Classes of batchfit's in the annotations of a public object: whoever calls it meets them."""
    for owner in (value, *(one for _, one in members(value))) if inspect.isclass(value) else (value,):
        function = owner.fget if isinstance(owner, property) else inspect.unwrap(owner)
        try:
            hints = typing.get_type_hints(function)
        except (NameError, TypeError):
            continue
        for name, hint in hints.items():
            if not name.startswith("_"):
                yield from _classes(hint)


def _classes(hint: Any) -> Iterator[type]:
    is_ours = inspect.isclass(hint) and hint.__module__.startswith("batchfit.")
    if is_ours and not hint.__name__.startswith("_") and not getattr(hint, "_is_protocol", False):
        yield hint
    for one in typing.get_args(hint):
        yield from _classes(one)


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of a class, those of its bases in batchfit included."""
    names: set[str] = set()
    for base in owner.__mro__:
        if not base.__module__.startswith("batchfit"):
            continue
        for name, value in vars(base).items():
            if name.startswith(("_", "model_")) or name in names:
                continue
            names.add(name)
            if isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if isinstance(value, property) or inspect.isfunction(value):
                yield name, value


def fields(owner: type) -> list[str]:
    """Fields of a pydantic model or a dataclass, and public attributes that `__init__` sets."""
    if hasattr(owner, "model_fields"):
        return list(owner.model_fields)
    if dataclasses.is_dataclass(owner):
        return [one.name for one in dataclasses.fields(owner) if not one.name.startswith("_")]
    return sorted(_assigned(owner))


def _assigned(owner: type) -> set[str]:
    found: set[str] = set()
    for base in owner.__mro__:
        init = vars(base).get("__init__")
        if not base.__module__.startswith("batchfit") or not inspect.isfunction(init):
            continue
        for node in ast.walk(_tree(init)):
            is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if is_set and ast.unparse(node.value) == "self" and not node.attr.startswith("_"):
                found.add(node.attr)
    return found


def _tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def raised(function: Any) -> set[str]:
    """Names of the errors that the body itself raises."""
    found = set()
    for node in ast.walk(_tree(inspect.unwrap(function))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = ast.unparse(node.exc.func).rpartition(".")[2]
            if name[:1].isupper():
                found.add(name)
    return found - {"NotImplementedError"}


def gaps(address: str, value: Any) -> list[str]:
    """What has no sentence, or one about what is not there."""
    find = _gaps_of_class if inspect.isclass(value) else _gaps_of_function
    return list(find(address, value))


def _gaps_of_class(address: str, owner: type) -> Iterator[str]:
    if not _has_docstring(owner):
        yield f"{address}: no docstring"
        return
    described = {name.lstrip("*"): text for name, text in _described(owner).items()}
    known = {name for name, _ in members(owner)}
    wanted = [*_constructed_with(owner), *(name for name in fields(owner) if name not in known)]
    for name in dict.fromkeys(wanted):
        if not described.get(name):
            yield f"{address}: {name}"
    for name in described:
        if name not in {*wanted, *known}:
            yield f"{address}: {name} is described, and is not there"
    for name, member in members(owner):
        if _is_framework_s(owner, name):
            continue
        doc = _own_doc(owner, name)
        if not isinstance(member, property):
            yield from _gaps_of_function(f"{address}.{name}", member, doc=doc)
        elif not doc:
            yield f"{address}.{name}: no docstring"


def _has_docstring(owner: type) -> bool:
    """One of its own: dataclasses write a signature there, and pydantic leaves that of the base."""
    doc = vars(owner).get("__doc__") or ""
    return bool(doc.strip()) and not doc.startswith(f"{owner.__name__}(")


def _constructed_with(owner: type) -> list[str]:
    """The parameters of an `__init__` that batchfit wrote; errors are not constructed by users."""
    init = owner.__init__
    if hasattr(owner, "model_fields") or dataclasses.is_dataclass(owner) or not inspect.isfunction(init):
        return []
    ours = init.__module__.startswith("batchfit") and not issubclass(owner, Exception)
    return parameters(init) if ours else []


def _described(owner: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("batchfit"):
            for section in ARGUMENTS:
                found |= sections(vars(base).get("__doc__") or "").get(section, {})
    return found


def _own_doc(owner: type, name: str) -> str:
    """The docstring that batchfit wrote for a member, in the class or in a base."""
    for base in owner.__mro__:
        member = vars(base).get(name)
        if member is not None and base.__module__.startswith("batchfit"):
            if isinstance(member, staticmethod | classmethod):
                member = member.__func__
            if member.__doc__:
                return str(member.__doc__)
    return ""


def _is_framework_s(owner: type, name: str) -> bool:
    """Whether it overrides what a class of another package has."""
    others = [base for base in owner.__mro__ if not base.__module__.startswith("batchfit")]
    if owner.__name__ == "BatchfitMixin":  # which gets its base from the user
        from transformers import Trainer

        others.append(Trainer)
    return any(name in vars(base) for base in others)


def parameters(function: Any) -> list[str]:
    """Names of its parameters, as a docstring writes them."""
    return [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.name not in ("self", "cls") and not one.name.startswith("_")
    ]


def _gaps_of_function(address: str, function: Any, doc: str | None = None) -> Iterator[str]:
    doc = function.__doc__ if doc is None else doc
    if not doc:
        yield f"{address}: no docstring"
        return
    found = sections(doc)
    described = {name.lstrip("*"): text for name, text in found.get("Args", {}).items()}
    wanted = parameters(function)
    for name in wanted:
        if not described.get(name):
            yield f"{address}({name})"
    for name in described:
        if name not in wanted:
            yield f"{address}({name}) is described, and is not there"
    for name in sorted(raised(function) - set(found.get("Raises", {}))):
        yield f"{address}: raises {name}"
    returned = inspect.signature(function).return_annotation
    is_said = returned in NOTHING or found.get("Returns") or found.get("Yields")
    if not is_said and not is_one_sentence(introduction(doc)):
        yield f"{address}: what it returns"


def is_one_sentence(text: str) -> bool:
    """Code and what is in brackets may have full stops."""
    plain = re.sub(r"`[^`]*`|\([^)]*\)", "", " ".join(text.split()))
    return len(re.findall(r"[.](?= |$)", plain)) <= 1
