"""Words of ours that nobody searches for, and PyTorch's words in their place; where a source file says them.

Rules: a message is any text of the source with three words or more that is no docstring: what is raised,
warned, logged, printed, drawn, or shown by `--help`. What is filled in later stands as `{}`. Pure: no import.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

OUT = {
    r"\b(falls?|lies?|fell|falling|lay) (in|into) pieces": "fragmentation",
    r"\bpieces?\b|\bin parts\b": "microbatch, or name the thing",
    r"\bholes?\b": "fragmentation",
    r"\b(ran|runs?) short\b|\b(after|without) running out\b(?! of memory)": "CUDA out of memory, OOM",
    r"\b(put|puts|putting|taken|takes) back\b": "restore",
    r"(?<!class=\"grid )\bcards?\b": "GPU",  # a class of the theme is none
    r"\b(norms?|values?|times|seconds|sizes) an? (batch|sample|step|token|rank|epoch)\b"
    r"|\b(samples|tokens|steps) a second\b": "per",
    r"\bholds? (it|them) back\b": "bottleneck",
    r"\bwhat (holds?|held) the memory\b": "memory breakdown",
    r"\b(is|are|was|were|be|not|been) told\b|\btells?\b": "observation, report, says",
    r"\btakes? for (itself|themselves)\b": "workspace",
    r"\b(waits?|waited) for (the|a) device\b|\bis waited for\b": "forces a CUDA synchronization",
    r"\btalks? to nobody\b|\bin company\b|\bblame": "collectives, process group, rank",
    r"\b(is|are) void\b|\bdealt (out )?again\b": "discarded and re-batched",
    r"\bthousand million\b": "5.9B",
    r"\bunseen\b": "caveat, not measured",
    r"\bteachers? that follows?\b|\bcritics? with penalt": "WGAN-GP, EMA teacher",
    r"\banew\b|\bas ever\b|\bfor ever\b|\bmended\b": "again, repeatedly, fixed",
}


def words_that_are_out(text: str) -> list[str]:
    """Each with what to say, as `'card': say GPU`."""
    return [
        f"{match[0]!r}: say {better}"
        for out, better in OUT.items()
        for match in re.finditer(out, text, re.IGNORECASE)
    ]


def _is_documented(node: ast.AST) -> bool:
    return isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)


def _filled_later(node: ast.JoinedStr) -> str:
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of whatever this file may say to somebody."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    apart: set[int] = set()  # docstrings, and the texts that an f-string is made of
    for node in ast.walk(tree):
        if _is_documented(node) and isinstance(
            first := next(iter(getattr(node, "body", [])), None), ast.Expr
        ):
            apart.add(id(first.value))
        elif isinstance(node, ast.JoinedStr):
            apart |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = _filled_later(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in apart:
            text = node.value
        else:
            continue
        if len(text.split()) >= 3:
            yield node.lineno, text


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and docstring of the module, its classes and functions: their prose, without names of code."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if _is_documented(node) and (text := ast.get_docstring(node)):  # type: ignore[arg-type]
            text = re.sub(r"^(>>>|\.\.\.) .*$|^ +\w+:(?= )", "", text, flags=re.MULTILINE)
            yield getattr(node, "lineno", 1), re.sub(r"`[^`]+`", "", text)
