"""Which variables that a training loop sets are read after it, before they are set again.

Rules
- `outputs` of an evaluation that sets it first is another one: nobody reads the training's.
- What may be read counts as read. Functions and classes may run at any time; a loop may run no time or often;
  of `try` and `match` nobody knows how far they come.
- Where statements outside the loop jump (`break`, `continue`), or look variables up by name (`locals()`), all
  that is read anywhere counts.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

_ANY_TIME = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_BY_NAME = ("locals", "globals", "vars", "eval", "exec")


def read_after(scope: ast.AST, loop: ast.For) -> set[str]:
    """The names whose values from inside `loop` may be read in `scope` after it."""
    inside = {id(node) for node in ast.walk(loop)}
    outside = [node for node in ast.walk(scope) if id(node) not in inside]
    body: list[ast.stmt] = getattr(scope, "body", [])
    jumps = any(
        isinstance(node, ast.Break | ast.Continue) or (isinstance(node, ast.Name) and node.id in _BY_NAME)
        for node in outside
    )
    if jumps:
        return {name for node in outside for name in _own_read(node)}
    at_any_time = {
        name
        for node in outside
        if isinstance(node, _ANY_TIME) and node is not scope
        for one in ast.walk(node)
        if id(one) not in inside
        for name in _own_read(one)
    }
    return _after(body, loop, set()) | at_any_time


def _after(body: Sequence[ast.stmt], loop: ast.For, out: set[str]) -> set[str]:
    """The names that are live right after the loop, which is somewhere in these statements."""
    for number, node in enumerate(body):
        if all(one is not loop for one in ast.walk(node)):
            continue
        rest = _before(body[number + 1 :], out)
        if node is loop:
            return rest
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):  # it may come around again
            rest = rest | _before([node], rest)
        elif not isinstance(node, ast.If | ast.With | ast.AsyncWith):
            return rest | _read(node)
        for block in (node.body, getattr(node, "orelse", [])):
            if any(one is loop for inner in block for one in ast.walk(inner)):
                return _after(block, loop, rest)
    return set(out)


def _before(body: Sequence[ast.stmt], after: set[str]) -> set[str]:
    """The names that are live before statements, where `after` are live behind them."""
    live = set(after)
    for node in reversed(body):
        live = _before_one(node, live)
    return live


def _before_one(node: ast.stmt, live: set[str]) -> set[str]:
    if isinstance(node, ast.Assign):
        return (live - {name for target in node.targets for name in _set(target)}) | _read(node)
    if isinstance(node, ast.For | ast.AsyncFor):
        end = _before(node.orelse, live) | live
        once = _before(node.body, end) - _set(node.target)
        return end | (_before(node.body, end | once) - _set(node.target)) | _read(node.iter)
    if isinstance(node, ast.While):
        end = _before(node.orelse, live) | live | _read(node.test)
        return end | _before(node.body, end | _before(node.body, end))
    if isinstance(node, ast.If):
        return _before(node.body, live) | _before(node.orelse, live) | _read(node.test)
    if isinstance(node, ast.With | ast.AsyncWith):
        held = {name for item in node.items for name in _read(item)}
        return _before(node.body, live) | held
    return live | _read(node)


def _set(target: ast.expr) -> set[str]:
    """The names that are always set: `x`, and `x` and `y` of `x, (y, z[0])`."""
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Tuple | ast.List):
        return {name for element in target.elts for name in _set(element)}
    return _set(target.value) if isinstance(target, ast.Starred) else set()


def _read(node: ast.AST) -> set[str]:
    return {name for one in ast.walk(node) for name in _own_read(one)}


def _own_read(node: ast.AST) -> set[str]:
    """The name that this one node reads; `x += 1` and `del x` read too."""
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    return {node.id} if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store) else set()
