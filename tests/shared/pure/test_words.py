"""Whatever batchfit says is said in PyTorch's words: errors, warnings, log lines, help texts, docstrings."""

from __future__ import annotations

from pathlib import Path

import pytest
from words import docstrings, messages, words_that_are_out

SOURCE = Path(__file__).parents[3] / "src" / "batchfit"
FILES = sorted(SOURCE.rglob("*.py"))
PACKAGES = sorted({path.relative_to(SOURCE).parts[0] for path in FILES})


def _of(package: str) -> list[Path]:
    return [path for path in FILES if path.relative_to(SOURCE).parts[0] == package]


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_and_docstrings_use_the_words_of_pytorch(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {wrong}"
        for path in _of(package)
        for read in (messages, docstrings)
        for line, text in read(path)
        for wrong in words_that_are_out(text)
    ]
    assert not found, "\n".join(found)


def test_all_that_may_be_said_is_read() -> None:
    count = sum(1 for path in FILES for _ in messages(path))
    assert count > 2000, "the reader of messages has lost most of them"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ('raise ValueError("a piece of it")', "a piece of it"),
        ('raise ValueError(f"{n} pieces of {x!r}")', "{} pieces of {}"),
        ('raise KeyError("one text " "in two pieces")', "one text in two pieces"),
        ('warnings.warn("the memory is in pieces", stacklevel=2)', "the memory is in pieces"),
        ('_LOG.info("%d pieces of memory", n)', "%d pieces of memory"),
        ('flag("--x", help="the pieces of it")', "the pieces of it"),
        ('TABLE = {"a": "two pieces of it"}', "two pieces of it"),
        ('def f():\n    """One."""\n    return "three pieces left"', "three pieces left"),
    ],
)
def test_a_message_is_read_wherever_it_stands(code: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(code, encoding="utf-8")
    assert [said for _, said in messages(path)] == [text]
    assert words_that_are_out(text)


def test_a_docstring_is_no_message_and_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""Of many pieces here."""\n\n\ndef f():\n    """Falls into pieces."""\n', encoding="utf-8"
    )
    assert not list(messages(path))
    assert [text for _, text in docstrings(path)] == ["Of many pieces here.", "Falls into pieces."]
