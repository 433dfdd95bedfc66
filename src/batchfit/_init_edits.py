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


def import_edits(tree: ast.Module, text: str, *imports: str) -> list[Edit]:
    """The imports, after the last one at the top of the file; none that is there."""
    there = {ast.dump(node) for node in tree.body}
    wanted = tuple(line for line in imports if ast.dump(ast.parse(line).body[0]) not in there)
    if not wanted:
        return []
    lines = text.split("\n")
    place = next((number for number, one in enumerate(lines) if not one.startswith("#")), 0)
    for number, node in enumerate(tree.body):
        docstring = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or docstring:
            place = node.end_lineno or node.lineno
        else:
            break
    return [Edit(place, place, wanted)]


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
