"""An error on one rank while others may wait for it: reported to them, so that no rank waits for this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchfit._engine.distributed.collectives import is_lost_connection
from batchfit._engine.distributed.ranks import Ranks, broken
from batchfit.errors import BatchfitError, RankFailedError


def text_of(error: BaseException) -> str:
    """As the other ranks get it."""
    return f"{type(error).__name__}: {error}"[:500].rstrip(": ")


def give_up(ranks: Ranks, error: BaseException, vote: Callable[[str], object] | None) -> None:
    """This rank raises: `vote` gets the text of the error, where others wait for a vote of this rank."""
    if not isinstance(error, Exception):  # Ctrl-C comes at any time, also while this rank waits in a vote
        ranks.leave(text_of(error))
    elif vote is not None:
        try:
            vote(text_of(error))
        except BatchfitError as other:
            if not isinstance(other, RankFailedError):
                error.add_note(f"batchfit: the other ranks could not be informed: {other}")


@contextmanager
def in_collectives(ranks: Ranks) -> Iterator[None]:
    """Inside, others may wait for this rank in a collective: an error makes this rank leave.

    Where the connection is lost, the error names the rank that has left.
    """
    try:
        yield
    except Exception as error:
        if is_lost_connection(error):
            raise broken(ranks, error) from error
        ranks.leave(text_of(error))
        raise
    except BaseException as error:
        ranks.leave(type(error).__name__)
        raise
