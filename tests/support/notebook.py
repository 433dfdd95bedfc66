"""Results as a notebook shows them."""

from __future__ import annotations

from typing import Any


def notebook_html(result: Any) -> str:
    """What IPython displays for `result`."""
    return result._repr_html_()  # type: ignore[no-any-return]
