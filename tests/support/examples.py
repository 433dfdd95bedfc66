"""How many examples a property test draws."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(number: int, **more: Any) -> settings:
    """Settings of a property test: `number` examples, or a tenth of them under the profile "quick"."""
    if settings.get_current_profile_name() == "quick":
        number = max(number // 10, 5)
    return settings(max_examples=number, deadline=None, **more)
