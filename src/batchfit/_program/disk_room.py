"""The error where batchfit cannot make a folder, as on a full disk: what it was for, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchfit.errors import ProgramError


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Inside, files of ours are made: a system error is a `ProgramError` that names `what` they are for."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise ProgramError(
            f"no folder for {what} could be made: {error.strerror or error}{place}. "
            "Free some space, or name another place with TMPDIR"
        ) from None
