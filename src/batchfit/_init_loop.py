"""A training loop written by hand, changed to run its batches in microbatches that fit.

    for x, y in loader:                          for x, y in loader:
        optimizer.zero_grad()                        optimizer.zero_grad()
        loss = criterion(model(x), y)      ->        def loss_of(batch):
        loss.backward()                                  x, y = batch
        optimizer.step()                                 loss = criterion(model(x), y)
                                                         return loss
                                                     loss = mb.backward(loss_of, (x, y)).loss
                                                     optimizer.step()

Rules
- What computes the loss moves into a function, as it is: it runs once for each part, and again after an
  out-of-memory. So it is moved only where it does nothing else, where nothing but the loss is used later,
  where it carries nothing from batch to batch, and where nothing in it leaves the loop.
- Statements that do something else stay where they are, before that function, where nothing that they make
  for the whole batch is used in it. What only notes the loss comes after it. Otherwise nothing is changed.
- The models are those that compute the loss and whose parameters are handed on somewhere, as to an optimizer.
  Where there are none, nothing is changed.
- The first loop that can be changed is. Where none can, a note says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from batchfit._init_effects import (
    called_name,
    changed_names,
    effect_line,
    function_effect,
    is_zero_grad,
    keeps_batch,
    names_in,
    notes_the_loss,
)

_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_GUIDE = "docs/microbatch.md shows the loop with batchfit.Microbatcher"


@final
@dataclass(frozen=True, slots=True)
class Edit:
    """Lines `first` up to before `last` (counted from 0) become `lines`; none of them: an insertion."""

    first: int
    last: int
    lines: tuple[str, ...]

    @classmethod
    def replacing(cls, node: ast.stmt, lines: Sequence[str]) -> Edit:
        indent = " " * node.col_offset
        return cls(node.lineno - 1, node.end_lineno or node.lineno, tuple(indent + line for line in lines))

    @classmethod
    def after(cls, node: ast.stmt, lines: Sequence[str]) -> Edit:
        end, indent = node.end_lineno or node.lineno, " " * node.col_offset
        return cls(end, end, tuple(indent + line for line in lines))

    @classmethod
    def inside(cls, line: int, byte: int, text: str, more: str) -> Edit:
        """Put `more` into a line, at an offset as `ast` counts it: in bytes."""
        whole = text.split("\n")[line - 1].encode()
        return cls(line - 1, line, ((whole[:byte] + more.encode() + whole[byte:]).decode(),))

    @classmethod
    def argument(cls, call: ast.Call, text: str, argument: str) -> Edit:
        """One more argument of a call, after the last one that there is."""
        end_line, end_byte = call.end_lineno or call.lineno, (call.end_col_offset or 1) - 1
        given: list[ast.expr] = [*call.args, *(keyword.value for keyword in call.keywords)]
        ends = [(one.end_lineno or 0, one.end_col_offset or 0) for one in given]
        if not ends:
            return cls.inside(end_line, end_byte, text, argument)
        line, byte = max(ends)
        return cls.inside(line, byte, text, f", {argument}")


class _UnchangedError(Exception):
    """The loop is left alone; the text says why."""


def loop_edits(tree: ast.Module, text: str) -> tuple[list[Edit], list[str]] | None:
    """The edits and notes for the first loop; None where there is none."""
    if any(isinstance(node, ast.Attribute) and node.attr == "Microbatcher" for node in ast.walk(tree)):
        return [], ["it has a Microbatcher already: nothing to add"]
    whys = []
    for scope, top, loop in _training_loops(tree):
        try:
            edits = _changed(tree, text, scope, top, loop)
        except _UnchangedError as why:
            whys.append(f"line {loop.lineno}: the loop is left alone, since {why}. {_GUIDE}")
            continue
        notes = [
            "the loss must be a mean over the samples; for one over tokens give Microbatcher(weight=...)"
        ]
        return edits, notes
    return ([], whys) if whys else None


def _training_loops(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.stmt, ast.For]]:
    """(the scope, the outermost loop in it, the loop that has `.backward()` in its body)."""

    def within(
        scope: ast.AST, body: Sequence[ast.stmt], top: ast.stmt | None
    ) -> Iterator[tuple[ast.AST, ast.stmt, ast.For]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from within(node, node.body, None)
                continue
            outer = top or (node if isinstance(node, ast.For | ast.While) else None)
            if isinstance(node, ast.For) and outer is not None and _backward(node.body) is not None:
                yield scope, outer, node
                continue
            for name in ("body", "orelse", "finalbody"):
                yield from within(scope, getattr(node, name, ()), outer)

    yield from within(tree, tree.body, None)


def _backward(body: Sequence[ast.stmt]) -> tuple[int, str, str | None] | None:
    """Where `loss.backward()` or `scaler.scale(loss).backward()` is: index, the loss, the scaler."""
    for index, node in enumerate(body):
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr != "backward":
            continue
        of = call.func.value
        if isinstance(of, ast.Name) and not call.args and not call.keywords:
            return index, of.id, None
        if (
            isinstance(of, ast.Call)
            and isinstance(of.func, ast.Attribute)
            and of.func.attr == "scale"
            and isinstance(of.func.value, ast.Name)
            and len(of.args) == 1
            and isinstance(of.args[0], ast.Name)
        ):
            return index, of.args[0].id, of.func.value.id
        return index, "", None
    return None


def _changed(tree: ast.Module, text: str, scope: ast.AST, top: ast.stmt, loop: ast.For) -> list[Edit]:
    found = _backward(loop.body)
    assert found is not None
    index, loss, scaler = found
    if not loss:
        raise _UnchangedError("backward is not called on a variable")
    before, call = loop.body[:index], loop.body[index]
    parts = _batch_names(loop)
    head, moved, kept, tail = _parted(before, loss, set(parts) | set(_models(tree)))
    rest = [*tail, *loop.body[index + 1 :], *loop.orelse]
    _check_flow(before, rest)
    _check_effects(tree, head, moved, loss, parts)
    _check(scope, loop, head, moved, rest, loss, parts)
    used = {name for node in moved for name in names_in(node, ast.Load)}
    if not used & set(parts):
        raise _UnchangedError(f"what computes the loss does not read {' or '.join(parts)}")
    models = [name for name in _models(tree) if name in used]
    if not models:
        raise _UnchangedError("no optimizer is given the parameters of a model by name")
    if set(models) & names_in(top, ast.Store):  # made anew in the outer loop
        top = loop
    if set(models) & names_in(loop, ast.Store):
        raise _UnchangedError("its model is made in it")
    if not is_tidy(text, [*before, call]):
        raise _UnchangedError("its statements share lines, or are indented by tabs")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    micro = _free("mb", names)
    function = _free("loss_of", names)
    given = parts[0] if len(parts) == 1 else f"({', '.join(parts)})"
    argument = parts[0] if len(parts) == 1 else _free("batch", names)
    lines = text.split("\n")
    indent = " " * call.col_offset
    first = before[len(head)].lineno - 1
    stays = _lines_of(kept, lines, first)
    notes = _lines_of(tail, lines, first)
    new = [lines[number] for number in sorted(stays)]
    new += [""] * bool(kept or head) + [f"{indent}def {function}({argument}):"]
    if len(parts) > 1:
        new.append(f"{indent}    {', '.join(parts)} = {argument}")
    for number in range(first, call.lineno - 1):
        if number not in stays | notes:
            new.append(f"    {lines[number]}" if lines[number].strip() else lines[number])
    while not new[-1].strip():
        new.pop()
    more = f", scaler={scaler}" if scaler else ""
    new += [
        f"{indent}    return {loss}",
        "",
        f"{indent}{loss} = {micro}.backward({function}, {given}{more}).loss",
        *(lines[number] for number in sorted(notes)),
    ]
    made = f"{' ' * top.col_offset}{micro} = batchfit.Microbatcher({', '.join(models)})"
    return [
        Edit(first, call.end_lineno or call.lineno, tuple(new)),
        Edit(top.lineno - 1, top.lineno - 1, (made,)),
    ]


def _parted(
    before: Sequence[ast.stmt], loss: str, apart: set[str]
) -> tuple[list[ast.stmt], list[ast.stmt], list[ast.stmt], list[ast.stmt]]:
    """What stays before the function, what goes into it, zero_grad beside it, what comes after `backward`."""
    end = len(before)
    while end and (is_zero_grad(before[end - 1]) or effect_line(before[end - 1])):
        end -= 1
    made = {name for node in before[:end] for name in names_in(node, ast.Store)}
    used = {name for node in before[:end] for name in names_in(node, ast.Load)}
    trailing = [node for node in before[end:] if not is_zero_grad(node)]
    notes = (
        notes_the_loss(node, loss, read=apart | made - {loss}, changed=apart | made | used)
        for node in trailing
    )
    tail = trailing if all(notes) else []
    begin = 0
    for number, node in enumerate(before):
        if effect_line(node) and not is_zero_grad(node) and node not in tail:
            begin = number + 1
    after = [node for node in before[begin:] if node not in tail]
    kept = [node for node in after if is_zero_grad(node)]
    return list(before[:begin]), [node for node in after if not is_zero_grad(node)], kept, tail


def _check_flow(before: Sequence[ast.stmt], rest: Sequence[ast.stmt]) -> None:
    """Refuse what leaves the loop, takes another batch or steps early, and a second `backward`."""
    inner = [node for statement in before for node in ast.walk(statement)]
    if any(isinstance(node, _LEAVES) for node in inner):
        raise _UnchangedError("what computes the loss may leave the loop")
    if any(
        isinstance(node, ast.Call) and called_name(node) in ("next", "step", "backward") for node in inner
    ):
        raise _UnchangedError("what computes the loss takes more than this batch, or steps")
    if any(
        isinstance(node, ast.Attribute) and node.attr == "backward" for one in rest for node in ast.walk(one)
    ):
        raise _UnchangedError("it calls backward more than once")


def _check_effects(
    tree: ast.Module, head: Sequence[ast.stmt], moved: Sequence[ast.stmt], loss: str, parts: Sequence[str]
) -> None:
    """Refuse where the loss is computed among statements that do more, or by a function that does."""
    made = {name for node in head for name in names_in(node, ast.Store) | changed_names(node)}
    read = {name for node in moved for name in names_in(node, ast.Load)}
    computed = any(loss in names_in(node, ast.Store) for node in moved)
    if head and (
        not computed or made & read - set(parts) or not all(keeps_batch(node, parts) for node in head)
    ):
        line = effect_line(head[-1])  # the head ends with what keeps it from moving
        raise _UnchangedError(f"line {line} does something besides computing the loss")
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    asked, seen = read & functions.keys(), set[str]()
    while asked:
        name = asked.pop()
        seen.add(name)
        there = function_effect(functions[name], set(parts))
        if there:
            raise _UnchangedError(f"{name}, line {there}, does something besides computing the loss")
        asked |= names_in(functions[name], ast.Load) & functions.keys() - seen


def _check(
    scope: ast.AST,
    loop: ast.For,
    head: Sequence[ast.stmt],
    moved: Sequence[ast.stmt],
    rest: Sequence[ast.stmt],
    loss: str,
    parts: Sequence[str],
) -> None:
    """Refuse statements that would mean something else inside a function."""
    known = set(parts)
    for statement in moved:
        stored = names_in(statement, ast.Store)
        everywhere = {name for one in moved for name in names_in(one, ast.Store)}
        early = (names_in(statement, ast.Load) & everywhere) - known - stored
        own = names_in(statement, ast.Load) & stored - known
        simple = isinstance(statement, ast.Assign)
        if early or (own and simple):
            raise _UnchangedError(f"{min(early | own)} is carried from one batch to the next")
        known |= stored
    if loss not in known:
        raise _UnchangedError(f"{loss} is not computed in it")
    made = known - set(parts) - {loss}
    later = {name for node in rest for name in names_in(node, ast.Load)}
    inside = {id(node) for node in ast.walk(loop)}
    later |= {
        node.id
        for node in ast.walk(scope)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
    }
    carried = made & {name for node in head for name in names_in(node, ast.Load)}
    if carried:
        raise _UnchangedError(f"{min(carried)} is carried from one batch to the next")
    if made & later:
        raise _UnchangedError(f"{min(made & later)} is used after backward, and is there for a part only")
    changed = {name for statement in moved for name in names_in(statement, ast.Store)} & set(parts)
    if changed & later:
        raise _UnchangedError(f"{min(changed & later)} is changed before backward and used after it")


def _batch_names(loop: ast.For) -> list[str]:
    """The names of a batch: `batch`, or `x` and `y`; what `enumerate` and `range` count is none."""
    target: ast.expr = loop.target
    if any(
        isinstance(node, ast.Call) and called_name(node) in ("range", "trange", "arange", "count")
        for node in ast.walk(loop.iter)
    ):
        raise _UnchangedError("it counts, and its batch is made in it: give that to Microbatcher.backward")
    counts = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "enumerate"
        for node in ast.walk(loop.iter)
    )
    if counts:
        if not (isinstance(target, ast.Tuple) and len(target.elts) == 2):
            raise _UnchangedError("it does not say what enumerate counts")
        target = target.elts[1]
    elements = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
    names = [element.id for element in elements if isinstance(element, ast.Name)]
    if len(names) != len(elements) or len(set(names)) != len(names):
        raise _UnchangedError("its batch is not one name, or a few")
    return names


def _models(tree: ast.Module) -> list[str]:
    """The names `model` of all `model.parameters()` that are handed to a call."""
    found: list[str] = []
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr in ("parameters", "named_parameters") and isinstance(node.func.value, ast.Name):
            name = node.func.value.id
            if name not in found and name != "self":
                found.append(name)
    return found


def _lines_of(statements: Sequence[ast.stmt], lines: Sequence[str], first: int) -> set[int]:
    """The lines of the statements from `first` on, with the comments right above them."""
    numbers: set[int] = set()
    for node in statements:
        above = node.lineno - 1
        while above > first and lines[above - 1].strip().startswith("#"):
            above -= 1
        numbers |= set(range(above, node.end_lineno or node.lineno))
    return numbers


def is_tidy(text: str, statements: Sequence[ast.stmt]) -> bool:
    """Every statement has lines of its own, indented by spaces, and no text that runs over lines."""
    lines = text.split("\n")
    ends = 0
    for node in statements:
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        head = lines[first][: node.col_offset]
        if first < ends or head.strip(" ") or len(lines[first].encode()) < node.col_offset:
            return False
        tail = lines[last - 1].encode()[node.end_col_offset or 0 :].decode().strip()
        if tail and not tail.startswith("#"):
            return False
        for inner in ast.walk(node):
            is_text = isinstance(inner, ast.JoinedStr) or (
                isinstance(inner, ast.Constant) and isinstance(inner.value, str | bytes)
            )
            if is_text and getattr(inner, "end_lineno", 0) != getattr(inner, "lineno", 0):
                return False
        ends = last
    return True


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
