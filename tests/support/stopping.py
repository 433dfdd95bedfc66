"""A search that is ended from outside, as by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable

from batchfit.results import Trial


class Stop(Exception):
    """Ends a search from outside."""


def stop_after(count: int) -> Callable[[Trial, int], None]:
    """An `on_trial` that ends the search at its trial number `count`."""
    seen: list[Trial] = []

    def on_trial(trial: Trial, budget_bytes: int) -> None:
        seen.append(trial)
        if len(seen) == count:
            raise Stop

    return on_trial
