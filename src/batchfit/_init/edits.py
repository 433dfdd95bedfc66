"""Changes to the lines of a program, and the program with them.

Rules
- Only lines that an edit names change: the rest stays byte for byte. Offsets are bytes, as `ast` counts them.
- Statements are moved by whole lines, so a layout in which they share lines, or hold text that runs over
  lines, is not tidy, and nothing of it is moved.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


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


def edited(text: str, edits: Sequence[Edit]) -> str:
    """The text with the edits made, the last one first, so that lines keep their numbers."""
    if not edits:
        return text
    lines = text.removesuffix("\n").split("\n")
    for edit in sorted(edits, key=lambda one: (one.first, one.last), reverse=True):
        lines[edit.first : edit.last] = edit.lines
    return "\n".join(lines) + "\n" * text.endswith("\n")


def import_edits(tree: ast.Module, text: str, *imports: str, after: Sequence[str]) -> list[Edit]:
    """The imports, below the program's own import of one of the packages `after`; none that is there.

    What a program does before that import (`os.environ["HF_HOME"] = ...`) stays before ours, which loads the
    same package. A program that imports none of them gets ours below the imports at its top.
    """
    there = {ast.dump(node) for node in tree.body}
    wanted = tuple(line for line in imports if ast.dump(ast.parse(line).body[0]) not in there)
    if not wanted:
        return []
    body, at = _last_import(tree, after)
    if at is None:
        lines = text.split("\n")
        place = next((number for number, one in enumerate(lines) if not one.startswith("#")), 0)
        return [Edit(place, place, wanted)]
    while at + 1 < len(body) and isinstance(body[at + 1], ast.Import | ast.ImportFrom):
        at += 1  # below the whole block
    return [Edit.after(body[at], wanted)]


def _last_import(tree: ast.Module, packages: Sequence[str]) -> tuple[list[ast.stmt], int | None]:
    """The statements among which the program imports one of the packages, and which of them does so last.

    At the top level if it is there, else in the function that does; else the docstring, or the last import
    before anything else.
    """
    bodies = [tree.body]
    bodies += [node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for body in bodies:
        found = [number for number, node in enumerate(body) if _imports(node, packages)]
        if found:
            return body, found[-1]
    at = None
    for number, node in enumerate(tree.body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        at = number
    return tree.body, at


def _imports(node: ast.stmt, packages: Sequence[str]) -> bool:
    """Whether a statement that is run imports one of the packages: an import, or a `try`, `if` or `with`."""
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in packages for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level == 0 and (node.module or "").split(".")[0] in packages
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return any(_imports(one, packages) for one in node.orelse)
    if isinstance(node, ast.Try | ast.If | ast.With):
        return any(_imports(one, packages) for one in ast.iter_child_nodes(node) if isinstance(one, ast.stmt))
    return False


def lines_of(statements: Sequence[ast.stmt], lines: Sequence[str], first: int) -> set[int]:
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
