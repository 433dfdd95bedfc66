"""A collective failed: because of this rank, or of another one, and of which.

Rules
- A rank that fails by itself leaves with its reason, so that the others need not wait for their time-out.
- One that lost its connection asks who is still there, for a few seconds: the answer names who is not.
"""

from __future__ import annotations

from typing import Final

from batchfit._engine.distributed.collectives import is_lost_connection
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import BatchfitError, RankMissingError

# How long those who lost a connection wait for each other.
_ROLL_CALL_S: Final = 10.0


def broken(ranks: Ranks, error: Exception) -> Exception:
    """A collective failed: the error to raise in its place, which names who has left or is missing."""
    text = f"{type(error).__name__}: {error}"[:500]
    if not is_lost_connection(error):
        ranks.leave(text)
        return BatchfitError(
            f"the gradients of a batch could not be reduced, so the ranks are no longer alike: {text}"
        )
    call = Ranks(ranks._meeting, min(ranks.timeout_s, _ROLL_CALL_S))
    try:
        call.gather(text, doing="who is left after a collective failed")
    except RankMissingError as missing:
        return missing
    except BatchfitError as other:
        text = f"{text} ({other})"
    return BatchfitError(f"a collective failed on all ranks, and none of them knows why: {text}")
