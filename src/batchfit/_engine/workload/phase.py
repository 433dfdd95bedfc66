"""Which phase of a step is running: workloads say it as they go, the trial reads it when a step fails.

Rules: one plain variable per thread, so that saying it costs next to nothing; a step that ends well
leaves no phase behind, a step that fails leaves the phase it failed in.
"""

from __future__ import annotations

import threading

PHASES = ("batch", "forward", "backward", "optimizer")


class _RunningPhase(threading.local):
    name: str | None = None


_running = _RunningPhase()


def enter(name: str) -> None:
    """This thread now runs the phase `name`, one of `PHASES`."""
    if name not in PHASES:
        raise ValueError(f"name must be one of {', '.join(PHASES)}, not {name!r}")
    _running.name = name


def current() -> str | None:
    """The phase that this thread entered last, or None."""
    return _running.name


def clear() -> None:
    """No phase is running in this thread."""
    _running.name = None
