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
  for the whole batch is used in it; so does a batch's way to the device, where it is used later. What only
  notes the loss comes after it. Otherwise nothing is changed.
- A loop of Accelerate's (`accelerator.backward(loss)`, in `accumulate` too) gets our `backward` in its place.
- The models are those that compute the loss and whose parameters are handed on somewhere, as to an optimizer.
  Where there are none, nothing is changed.
- The first loop that can be changed is. Where none can, a note says why.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from batchfit._init.edits import Edit, is_tidy, lines_of
from batchfit._init.effects import (
    called_name,
    changed_names,
    effect_line,
    function_effect,
    is_zero_grad,
    keeps_batch,
    names_in,
    notes_the_loss,
)
from batchfit._init.liveness import read_after

_LEAVES = (ast.Break, ast.Continue, ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)
_GUIDE = "By hand: mb = batchfit.Microbatcher(model), mb.backward(loss_of, batch), mb.step(optimizer)"


class _UnchangedError(Exception):
    """The loop is left alone; the text says why."""


@final
@dataclass(frozen=True, slots=True)
class LoopAdvice:
    """What changes a loop, the imports that it needs then, and what there is to say."""

    edits: tuple[Edit, ...] = ()
    imports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def loop_edits(tree: ast.Module, text: str) -> LoopAdvice | None:
    """What to do with the first loop that can be changed; None where there is no loop."""
    if any(isinstance(node, ast.Attribute) and node.attr == "Microbatcher" for node in ast.walk(tree)):
        return LoopAdvice(notes=("it has a Microbatcher already: nothing to add",))
    whys = []
    for scope, top, loop in _training_loops(tree):
        try:
            edits, imports = _changed(tree, text, scope, top, loop)
        except _UnchangedError as why:
            whys.append(f"line {loop.lineno}: the loop is left alone, since {why}. {_GUIDE}")
            continue
        note = "the loss must be a mean over the samples; for one over tokens give Microbatcher(weight=...)"
        return LoopAdvice(tuple(edits), tuple(imports), (note,))
    return LoopAdvice(notes=tuple(whys)) if whys else None


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
            if isinstance(node, ast.For) and outer is not None and _backward(_body_of(node)[0]) is not None:
                yield scope, outer, node
                continue
            for name in ("body", "orelse", "finalbody"):
                yield from within(scope, getattr(node, name, ()), outer)

    yield from within(tree, tree.body, None)


def _body_of(loop: ast.For) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """The statements of a batch, and those after them: what `with accelerator.accumulate(model):` holds."""
    first = loop.body[0]
    if isinstance(first, ast.With) and len(first.items) == 1 and first.items[0].optional_vars is None:
        of = first.items[0].context_expr
        if isinstance(of, ast.Call) and called_name(of) == "accumulate":
            return first.body, loop.body[1:]
    return loop.body, []


@final
@dataclass(frozen=True, slots=True)
class _Backward:
    """Where `backward` is called, of which loss (empty: of none with a name), and through what."""

    index: int
    loss: str = ""
    scaler: str = ""
    accelerator: str = ""


def _backward(body: Sequence[ast.stmt]) -> _Backward | None:
    """`loss.backward()`, `scaler.scale(loss).backward()` or `accelerator.backward(loss)`."""
    for index, node in enumerate(body):
        call = node.value if isinstance(node, ast.Expr) else None
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        if call.func.attr != "backward":
            continue
        of = call.func.value
        if isinstance(of, ast.Name) and not call.keywords:
            if not call.args:
                return _Backward(index, of.id)
            if len(call.args) == 1 and isinstance(call.args[0], ast.Name):
                return _Backward(index, call.args[0].id, accelerator=of.id)
        if (
            isinstance(of, ast.Call)
            and isinstance(of.func, ast.Attribute)
            and of.func.attr == "scale"
            and isinstance(of.func.value, ast.Name)
            and len(of.args) == 1
            and isinstance(of.args[0], ast.Name)
        ):
            return _Backward(index, of.args[0].id, scaler=of.func.value.id)
        return _Backward(index)
    return None


def _accelerators(tree: ast.Module) -> set[str]:
    """The variables that are made by `Accelerator(...)`, or are annotated as one."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            if called_name(node.value) == "Accelerator":
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            kind = ast.unparse(node.annotation).split(".")[-1]
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            found |= {name} if kind == "Accelerator" else set()
    return found


def _changed(
    tree: ast.Module, text: str, scope: ast.AST, top: ast.stmt, loop: ast.For
) -> tuple[list[Edit], list[str]]:
    body, after = _body_of(loop)
    found = _backward(body)
    assert found is not None
    loss = found.loss
    if not loss or (found.accelerator and found.accelerator not in _accelerators(tree)):
        raise _UnchangedError("backward is not called on a variable")
    before, call = body[: found.index], body[found.index]
    parts = _batch_names(loop)
    follows = [*body[found.index + 1 :], *after, *loop.orelse]
    later = _read_later(scope, loop, follows)
    head, moved, kept, tail = _parted(before, loss, set(_models(tree)), parts, later)
    rest = [*tail, *follows]
    _check_flow(before, rest)
    _check_effects(tree, head, moved, loss, parts)
    _check(head, moved, loss, parts, later=_read_later(scope, loop, rest))
    used = {name for node in moved for name in names_in(node, ast.Load)}
    if not used & set(parts):
        raise _UnchangedError(f"what computes the loss does not read {' or '.join(parts)}")
    models = [name for name in _models(tree) if name in used]
    if not models:
        raise _UnchangedError("no optimizer is given the parameters of a model by name")
    if set(models) & names_in(top, ast.Store):  # made again in the outer loop
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
    stays = lines_of(kept, lines, first)
    notes = lines_of(tail, lines, first)
    new = [lines[number] for number in sorted(stays)]
    new += [""] * bool(kept or head) + [f"{indent}def {function}({argument}):"]
    if len(parts) > 1:
        new.append(f"{indent}    {', '.join(parts)} = {argument}")
    for number in range(first, call.lineno - 1):
        if number not in stays | notes:
            new.append(f"    {lines[number]}" if lines[number].strip() else lines[number])
    while not new[-1].strip():
        new.pop()
    imports = ["import batchfit"]
    if found.accelerator:
        ours = _free("backward", names)
        renamed = "" if ours == "backward" else f" as {ours}"
        imports.append(f"from batchfit.integrations.accelerate import backward{renamed}")
        run = f"{ours}({found.accelerator}, {micro}, {function}, {given})"
    else:
        run = f"{micro}.backward({function}, {given}{f', scaler={found.scaler}' * bool(found.scaler)})"
    new += [
        f"{indent}    return {loss}",
        "",
        f"{indent}{loss} = {run}.loss",
        *(lines[number] for number in sorted(notes)),
    ]
    made = f"{' ' * top.col_offset}{micro} = batchfit.Microbatcher({', '.join(models)})"
    edits = [
        Edit(first, call.end_lineno or call.lineno, tuple(new)),
        Edit(top.lineno - 1, top.lineno - 1, (made,)),
    ]
    return edits, imports


def _read_later(scope: ast.AST, loop: ast.For, follows: Sequence[ast.stmt]) -> set[str]:
    """The names that are read after `backward`, in the loop or after it."""
    return read_after(scope, loop) | {name for node in follows for name in names_in(node, ast.Load)}


def _parted(
    before: Sequence[ast.stmt], loss: str, models: set[str], parts: Sequence[str], later: set[str]
) -> tuple[list[ast.stmt], list[ast.stmt], list[ast.stmt], list[ast.stmt]]:
    """What stays before the function, what goes into it, zero_grad beside it, what comes after `backward`."""
    apart = set(parts) | models
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
    later = later | {name for node in trailing for name in names_in(node, ast.Load)}
    begin = 0
    for number, node in enumerate(before):
        does = effect_line(node) and not is_zero_grad(node) and node not in tail
        # `x = x.to(device)`: a whole batch goes there, where it is used after `backward` as well.
        moves = names_in(node, ast.Store) & set(parts) & later and keeps_batch(node, parts)
        if does or moves:
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
        line = effect_line(head[-1]) or head[-1].lineno  # the head ends with what keeps it from moving
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
    head: Sequence[ast.stmt], moved: Sequence[ast.stmt], loss: str, parts: Sequence[str], *, later: set[str]
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
    carried = made & {name for node in head for name in names_in(node, ast.Load)}
    if carried:
        raise _UnchangedError(f"{min(carried)} is carried from one batch to the next")
    if made & later:
        name = min(made & later)
        raise _UnchangedError(
            f"{name} is used after backward, where it would be that of the last microbatch: return "
            f"({loss}, {name}) from loss_of, and use report.outputs, which has all samples in order, after "
            "report = mb.backward(loss_of, batch)"
        )
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


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name
