"""How many examples a property test draws, and which rows of a table wait for `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(number: int, **more: Any) -> settings:
    """Settings of a property test: `number` examples, or a tenth of them under the profile "quick"."""
    if settings.get_current_profile_name() == "quick":
        number = max(number // 10, 5)
    return settings(max_examples=number, deadline=None, **more)


def some_slow(rows: Iterable[Any], *, is_slow: Callable[[Any], bool]) -> list[Any]:
    """The rows of a table; those that prove little more than the others belong to `make test-all`."""
    return [pytest.param(row, marks=pytest.mark.slow) if is_slow(row) else row for row in rows]
