"""What statements of a training loop do besides computing: what they change, set, read and note.

Rules
- Read from the text alone: a call whose name is known to change something does, and so does one whose result
  nobody uses. What a call of another file does inside is not seen.
- Where it is doubtful whether a statement changes something, it does.
- Nothing is decided here: `_init.loop` says what may move, and what must not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

# All that may stand in the function; whatever else does something, or hides an error (`try`).
_PLAIN = (
    *(ast.Assign, ast.AnnAssign, ast.Expr, ast.With, ast.If, ast.For, ast.While),
    *(ast.Pass, ast.Assert, ast.Raise),
)
# Calls that change something even where their result is used; those whose names end in `_` do too.
_CHANGES = re.compile(
    r"append|appendleft|clear|discard|extend|insert|pop|popitem|popleft|remove|setdefault|update"
    r"|delattr|exec|input|print|put|put_nowait|get_nowait|send|setattr|write|writelines"
    r"|add_scalar|log_metrics|zero_grad|\w*[^\W_]_"
)
# Calls that may as well come after `backward`, with the loss as a number.
_NOTES = re.compile(r"add_scalar|append|debug|info|print|set_description|set_postfix|update")
# Methods that leave a batch a batch: its samples along the first dimension.
_CASTS = re.compile(r"to|cuda|cpu|float|half|bfloat16|double|long|int")


def effect_line(statement: ast.AST) -> int | None:
    """The line where the statement does something besides computing; None where it does not."""
    for node in ast.walk(statement):
        plain = isinstance(node, _PLAIN) or not isinstance(node, ast.stmt)
        if not plain or _changed_by(node) is not None:
            return getattr(node, "lineno", None)
    return None


def _changed_by(node: ast.AST) -> ast.expr | None:
    """The expression that this one node changes, if any: `meter.update` of `meter.update(1)`."""
    if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return node
    if isinstance(node, ast.AugAssign):
        return node.target
    if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        if not isinstance(node.value, ast.Call):
            return node.value
        return None if called_name(node.value) in ("train", "eval") else node.value.func
    if isinstance(node, ast.Call):
        name = called_name(node)
        in_place = any(
            one.arg == "out" or (one.arg == "inplace" and ast.unparse(one.value) != "False")
            for one in node.keywords
        )
        if in_place or _CHANGES.fullmatch(name):
            return node.func
    return None


def called_name(call: ast.Call) -> str:
    """`update` of `meter.update(...)`, `print` of `print(...)`."""
    of = call.func
    return of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""


def notes_the_loss(statement: ast.stmt, loss: str, *, read: set[str], changed: set[str]) -> bool:
    """`losses.append(loss.item())`, `total += loss.item()`: the same before and after `backward`.

    It takes the loss as a number, since the loss that comes back has no graph. It must not read the names
    `read`, but for their length, and what it changes must be none of `changed`.
    """
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        of, target = [statement.value], statement.target.id
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        base = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        if not _NOTES.fullmatch(called_name(call)) or not isinstance(base, ast.Name):
            return False
        if called_name(call) == "update" and f"{loss}.item()" not in ast.unparse(call):
            return False  # of a scaler, or of a running mean of weights
        of, target = [*call.args, *(one.value for one in call.keywords)], base.id
    else:
        return False
    numbers = (f"{loss}.item()", f"float({loss})", *(f"len({name})" for name in read))
    nodes = [node for one in of for node in ast.walk(one)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    within = {id(inner) for one in calls for inner in ast.walk(one)}
    free = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in within}
    return (
        target not in changed
        and all(ast.unparse(one) in numbers for one in calls)
        and not free & (read | {loss})
        and not any(isinstance(node, ast.NamedExpr | ast.Lambda | ast.comprehension) for node in nodes)
        and not any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in nodes)
    )


def keeps_batch(statement: ast.stmt, parts: Sequence[str]) -> bool:
    """Whether the batch is as it was after a statement, samples first, so that it can be cut there."""
    if names_in(statement, ast.Store) & set(parts):
        if not (isinstance(statement, ast.Assign) and len(statement.targets) == 1):
            return False
        target, value = statement.targets[0], statement.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        return all(
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Attribute)
            and _CASTS.fullmatch(one.func.attr) is not None
            and ast.unparse(one.func.value) == ast.unparse(name)
            for name, one in pairs
        )
    for node in ast.walk(statement):
        root = _root(_changed_by(node))
        if isinstance(root, ast.Name) and root.id in parts:
            return False
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            given = {one.id for one in node.value.args if isinstance(one, ast.Name)}
            if given & set(parts) and not _NOTES.fullmatch(called_name(node.value)):
                return False
    return True


def changed_names(statement: ast.stmt) -> set[str]:
    """The variables whose objects a statement changes; gradients that are set to zero do not count."""
    found = set()
    for node in ast.walk(statement):
        root = _root(_changed_by(node))
        if isinstance(root, ast.Name) and "zero_grad" not in ast.unparse(node):
            found.add(root.id)
    return found


def _root(node: ast.AST | None) -> ast.AST | None:
    """`meter` of `meter.all[0].update`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return node


def function_effect(function: ast.FunctionDef, parts: set[str]) -> int | None:
    """The line where a function changes what is not its own, or reads the batch that it is not given."""
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    own = names_in(function, ast.Store) - arguments
    for node in ast.walk(function):
        stops = isinstance(node, ast.Global | ast.Nonlocal | ast.Yield | ast.YieldFrom) or (
            isinstance(node, ast.Call) and called_name(node) in ("next", "step", "backward", "zero_grad")
        )
        asks = isinstance(node, ast.Name) and node.id in parts - own - arguments
        root = _root(_changed_by(node))
        foreign = root is not None and not (isinstance(root, ast.Name) and root.id in own)
        if stops or asks or foreign:
            return getattr(node, "lineno", function.lineno)
    return None


def is_zero_grad(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "zero_grad"
    )


def names_in(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    """The variables that are read or set in it; those of comprehensions are their own."""
    own = {
        one.id
        for inner in ast.walk(node)
        if isinstance(inner, ast.comprehension)
        for one in ast.walk(inner.target)
        if isinstance(one, ast.Name)
    }
    names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}
    return names - own
