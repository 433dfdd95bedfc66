"""Log lines that users always see: the batch size that was found, a batch size that changes.

Rules
- A line is said once, by rank 0: by the logger `batchfit` where a handler shows it, otherwise on stdout.
- Whoever raised the level of the logger `batchfit` itself, or disabled logging, has asked not to hear it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

log = logging.getLogger("batchfit")


def say(text: str) -> None:
    """Show one line on rank 0, through logging or on stdout."""
    if _rank() != 0:
        return
    if _is_heard():
        log.info("%s", text)
    elif not _is_silenced():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _is_silenced() -> bool:
    """Somebody has said that this logger's lines are not wanted, which a level of the root does not."""
    return log.level > logging.INFO or log.disabled or log.manager.disable >= logging.INFO


def _is_heard() -> bool:
    """A handler shows a line at INFO: libraries set up logging at WARNING, and some handlers show nothing."""
    if not log.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = log
    while logger is not None:
        for handler in logger.handlers:
            if handler.level <= logging.INFO and not isinstance(handler, logging.NullHandler):
                return True
        logger = logger.parent if logger.propagate else None
    return False


def _rank() -> int:
    torch: Any = sys.modules.get("torch")
    distributed = None if torch is None else getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return int(os.environ.get("RANK", "").strip() or 0)
