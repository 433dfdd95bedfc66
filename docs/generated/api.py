"""The public Python API as text: signatures and docstrings, read from the source and not imported."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

from batchfit import _EXPORTS

SOURCE = Path(__file__).parent.parent.parent / "src"
Definition = ast.FunctionDef | ast.ClassDef


@cache
def _module(name: str) -> ast.Module | None:
    path = SOURCE / name.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def definition(address: str) -> Definition | ast.Module:
    """What `batchfit.find_batch_size`, `batchfit.results.Trial.fits` or `batchfit.errors` names."""
    parent, _, name = address.rpartition(".")
    if parent == "batchfit" and name in _EXPORTS and _EXPORTS[name] != address:
        return definition(f"{_EXPORTS[name]}.{name}")
    if (module := _module(address)) is not None:
        return module
    if not parent:
        raise LookupError(f"there is no {address}")
    for node in definition(parent).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in {one.name for one in node.names}:
            return definition(f"{node.module}.{name}")
    raise LookupError(f"{parent} has no {name}")


def signature(node: ast.FunctionDef, *, name: str = "") -> str:
    """`find_batch_size(workload, *, budget=None) -> FitResult`: without the types of arguments."""
    plain = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(plain, ast.FunctionDef)
    every = plain.args
    for one in (*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg):
        if one is not None:
            one.annotation = None
    every.args = [one for one in every.args if one.arg not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"{name or node.name}({ast.unparse(every)}){returns}"


def summary(address: str) -> str:
    """The first sentence of a docstring."""
    text = inspect.cleandoc(ast.get_docstring(definition(address)) or "").split("\n\n")[0]
    return " ".join(text.split())


def as_text(address: str) -> str:
    """Signature and docstring of an object, and of its public methods."""
    node = definition(address)
    if isinstance(node, ast.FunctionDef):
        return f"{signature(node, name=address)}\n\n{ast.get_docstring(node) or ''}\n"
    parts = [f"{address}\n\n{ast.get_docstring(node) or ''}\n"]
    for one in node.body:
        if isinstance(node, ast.Module) and isinstance(one, ast.ClassDef) and one.name[0] != "_":
            parts.append(as_text(f"{address}.{one.name}"))
        elif isinstance(one, ast.FunctionDef) and one.name == "__init__":
            parts.insert(0, signature(one, name=address.rpartition(".")[2]))
        elif isinstance(one, ast.FunctionDef) and one.name[0] != "_" and ast.get_docstring(one):
            parts.append(f"{signature(one, name=f'{address}.{one.name}')}\n\n{ast.get_docstring(one)}\n")
    return "\n".join(parts)
