"""How many examples a property test draws, and which rows of a table wait for `make test-all`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(number: int, **more: Any) -> settings:
    """Settings of a property test: `number` examples, drawn anew each time (`make test-all`).

    `make test` draws the same half of them every time (profile "same"), `make test-find` a tenth ("quick").
    """
    part = {"same": 2, "quick": 10}.get(settings.get_current_profile_name(), 1)
    return settings(max_examples=max(number // part, min(number, 5)), deadline=None, **more)


def some_slow(rows: Iterable[Any], *, is_slow: Callable[[Any], bool]) -> list[Any]:
    """The rows of a table; those that prove little more than the others belong to `make test-all`."""
    return [pytest.param(row, marks=pytest.mark.slow) if is_slow(row) else row for row in rows]
