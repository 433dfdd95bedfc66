"""The source line that declares each parameter, found in the program's source.

Weights are there before a step begins, so that no line of the step has made them.

Rules: nothing is run and nothing is guessed. A parameter goes by the innermost assignment to `self` that
leads to it (`self.up = nn.Linear(...)` for "blocks.0.up.weight"); where there is none, there is no line.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, final

from torch import nn

from batchfit._engine.allocator.footprint import CodeLine
from batchfit._engine.trace.program_lines import HERE, TORCH

_REGISTERS = ("register_parameter", "register_buffer", "register_module", "add_module")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@final
class DeclaredLines:
    """The lines that declare what some models hold."""

    def __init__(self, models: list[nn.Module]) -> None:
        self._models = models
        self._files: dict[str, dict[str, ast.ClassDef]] = {}
        self._attributes: dict[tuple[type, str], CodeLine | None] = {}

    def of(self, name: str) -> CodeLine | None:
        """The line that declares a parameter or buffer, by its name in a model."""
        for model in self._models:
            found = self._followed(model, name.split("."))
            if found is not None:
                return found[0]
        return None

    def _followed(self, model: nn.Module, names: list[str]) -> tuple[CodeLine | None] | None:
        """The innermost line on the way to a tensor; None where the way leads nowhere in this model."""
        here: Any = model
        line: CodeLine | None = None
        for name in names:
            if not isinstance(here, nn.Module):
                return None
            line = self._attribute(type(here), name) or line
            tables = (here._modules, here._parameters, here._buffers)
            here = next((table[name] for table in tables if name in table), None)
            if here is None:
                return None
        return (line,)

    def _attribute(self, kind: type, name: str) -> CodeLine | None:
        if (kind, name) not in self._attributes:
            self._attributes[kind, name] = self._looked_up(kind, name)
        return self._attributes[kind, name]

    def _looked_up(self, kind: type, name: str) -> CodeLine | None:
        for one in kind.__mro__:
            try:
                file = inspect.getsourcefile(one)
            except TypeError:  # built in
                continue
            if file is None or file.startswith((*TORCH, *HERE)):
                continue
            if file not in self._files:
                classes = defined(parsed(file))
                self._files[file] = {path: node for path, node in classes if isinstance(node, ast.ClassDef)}
            node = self._files[file].get(one.__qualname__.rpartition("<locals>.")[2])
            for method in node.body if node is not None else ():
                if isinstance(method, ast.FunctionDef):
                    number = _assigned_at(method, name)
                    if number is not None:
                        return CodeLine(file, number, f"{node.name}.{method.name}" if node else "")
        return None


def defined(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Classes and functions by their qualified names, from the outer to the inner; as `CodeLine` has them."""
    for node in ast.iter_child_nodes(tree):
        inner = outer
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{node.name}" if outer else node.name
            yield name, node
            inner = name if isinstance(node, ast.ClassDef) else ""
        yield from defined(node, inner)


def _assigned_at(method: ast.AST, name: str) -> int | None:
    """The line of a method that assigns to `self.name`, or registers it."""
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(ast.unparse(one) == f"self.{name}" for one in targets):
                return node.lineno
        elif isinstance(node, ast.Call) and _registers(node, name):
            return node.lineno
    return None


def _registers(call: ast.Call, name: str) -> bool:
    given = [getattr(one, "value", None) for one in call.args[:1]]
    return getattr(call.func, "attr", "") in _REGISTERS and given == [name]


@cache
def _parsed_text(file: str, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):  # another version's, or not what was imported
        return ast.Module([], [])


def parsed(file: str) -> ast.Module:
    """A file's source, parsed; empty where it cannot be."""
    return _parsed_text(file, text_of(file))


def text_of(file: str) -> str:
    """A file's source; empty where it cannot be read."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
