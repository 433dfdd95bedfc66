"""What batchfit's warnings advise, in words that hold inside a Trainer.

Rules: only the advice is another one, and only while a Trainer trains; a message without any stays as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_INSTEAD = (
    (
        "Pass reduction='sum'",
        "Set trainer.loss_is_scaled_for_ga = True, which says that losses of parts of a batch add up",
    ),
    ("Pass reduction='mean'", "Set trainer.loss_is_scaled_for_ga = False, which says that it is a mean"),
    (
        "Use backward_cached, which is exact",
        "Train it with Microbatcher.backward_cached in a loop of your own, which is exact",
    ),
    (
        "pass a callable make_batch(n) to choose them yourself",
        "a step with one that does not fit is done again in smaller pieces",
    ),
)


def _in_a_trainer(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    for ours, theirs in _INSTEAD:
        if ours in text:
            record.msg, record.args = text.replace(ours, theirs), ()
            break
    return True


@contextmanager
def advising() -> Iterator[None]:
    """Inside, warnings name what users of a Trainer can set."""
    log = logging.getLogger("batchfit")
    log.addFilter(_in_a_trainer)
    try:
        yield
    finally:
        log.removeFilter(_in_a_trainer)
