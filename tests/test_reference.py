"""The reference is complete: what is public has a sentence, with each parameter, field, return and error.

Integrations: tests/integrations/test_integrations_reference.py.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
from public_api import MODULES, gaps, public

from batchfit.results._docstrings import introduction, sections


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_parameter_field_return_and_error_has_a_sentence(module: str) -> None:
    found = public((module,))
    assert found, f"{module} has no public name"
    missing = [gap for address, value in found.items() for gap in gaps(address, value)]
    assert not missing, "say in the docstring (Args:, Attributes:, Returns:, Raises:): " + "; ".join(missing)


# What a docstring can leave out, each as a case that must be found.


def _whole(size: int, *, budget: int | None = None) -> int:
    """Find a size.

    More about it. And more.

    Args:
        size: the first one,
            on two lines.
        budget: bytes (all: None).

    Returns:
        The size.

    Raises:
        ValueError: it is negative.
    """
    if size < 0:
        raise ValueError("size must not be negative")
    return size


def _broken(out: str, into: str = "") -> Any:
    function = type(_whole)(_whole.__code__, _whole.__globals__, "f", None, None)
    function.__annotations__ = {"return": int}
    assert out in (_whole.__doc__ or "")
    function.__doc__ = (_whole.__doc__ or "").replace(out, into)
    return function


def _gaps_of(value: Any) -> list[str]:
    return gaps("f", value)


def test_a_whole_docstring_has_no_gap() -> None:
    assert _gaps_of(_whole) == []


@pytest.mark.parametrize(
    ("out", "into", "gap"),
    [
        ("        size: the first one,\n            on two lines.\n", "", "f(size)"),
        ("        budget: bytes (all: None).\n", "", "f(budget)"),
        ("size: the first", "size, budget: the first", "f(size)"),
        ("budget: bytes", "budgets: bytes", "f(budgets) is described, and is not there"),
        ("    Returns:\n        The size.\n", "", "f: what it returns"),
        ("        ValueError: it is negative.\n", "", "f: raises ValueError"),
    ],
)
def test_a_gap_is_found(out: str, into: str, gap: str) -> None:
    assert gap in _gaps_of(_broken(out, into))


def test_a_function_and_a_class_without_docstring_are_found() -> None:
    @dataclass
    class Bare:
        size: int

    @dataclass
    class Half:
        """A size and a budget.

        Attributes:
            size: samples.
        """

        size: int
        budget: int = 0

        def half(self) -> int:
            return self.size // 2

    Bare.__module__ = Half.__module__ = "batchfit.made_up"
    assert gaps("Bare", Bare) == ["Bare: no docstring"]
    assert gaps("Half", Half) == ["Half: budget", "Half.half: no docstring"]


def test_sections_are_read() -> None:
    doc = inspect.cleandoc(_whole.__doc__ or "")
    found = sections(doc)
    assert found["Args"] == {"size": "the first one, on two lines.", "budget": "bytes (all: None)."}
    assert found["Returns"] == {"": "The size."}
    assert introduction(doc).endswith("And more.")
