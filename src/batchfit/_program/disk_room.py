"""What is said where the disk has no room for a file of ours: in the words of the run, with the way out."""

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
