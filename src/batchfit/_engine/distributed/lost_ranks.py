"""Ranks that went away during a search: found by those that are left, and named.

Rules:
- An error on one rank ends the search on the others: now, not at their time-out, with its text. One that all
  ranks raise together is not reported: they may go on, and search again.
- Every rank knows on which machine and in which process the others are. Those on its own machine it can
  check: a process that has ended, or that only waits to be reaped, is gone.
- A collective that breaks off says that a connection was lost, not whose. What it raised is replaced by an
  error that names the rank, and says what that rank said when it left. Where all ranks are still there, the
  error stands as it was raised.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from typing import Final, final

from batchfit._engine.device import oom
from batchfit._engine.distributed.collectives import is_lost_connection
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import (
    BatchfitError,
    CollectivesError,
    NothingFitsError,
    RankMissingError,
    RanksDisagreeError,
    SearchStoppedError,
)

# Raised by all ranks, from what they have agreed on.
_TOGETHER = (NothingFitsError, SearchStoppedError, RanksDisagreeError, CollectivesError)
PATIENCE_S = 15.0  # for ranks whose own collective gives up a little later


@final
class Everyone:
    """Where the processes of all ranks are; nothing is known before they have met."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._processes: list[tuple[str, int]] = []

    def meet(self) -> None:
        """Exchange machine and process, on all ranks together."""
        found = self._ranks.gather([_machine(), os.getpid()], doing="where the ranks are")
        self._processes = [(machine, pid) for machine, pid in found]

    def ended(self) -> list[int]:
        """Ranks on this machine whose process is over."""
        here = _machine()
        return [
            rank for rank, (machine, pid) in enumerate(self._processes) if machine == here and not _lives(pid)
        ]

    def behind(self, error: BaseException) -> RankMissingError | None:
        """Who is behind an error of a collective; None where it is not one, or nobody is missing."""
        if self._ranks.world_size == 1 or isinstance(error, BatchfitError) or not is_lost_connection(error):
            return None
        try:
            self._ranks.find_lost(doing="a collective that broke off", within_s=PATIENCE_S, ended=self.ended)
        except RankMissingError as missing:
            return missing
        return None


@contextlib.contextmanager
def telling_others(ranks: Ranks) -> Iterator[Everyone]:
    """An error inside ends what all ranks do together, and names the rank that is behind it."""
    everyone = Everyone(ranks)
    try:
        yield everyone
    except BaseException as error:
        text = oom.describe(error)
        missing = everyone.behind(error)
        if not isinstance(error, _TOGETHER):
            ranks.leave(text)
        if missing is None:
            raise
        missing.add_note(f"batchfit: what this rank saw of it: {text}")
        raise missing from None


def _machine() -> str:
    return f"{socket.gethostname()} {uuid.getnode()}"


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that nobody has reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        if os.path.exists("/proc/self/stat"):
            return False
    except OSError:
        return True
    try:
        os.kill(pid, 0)  # no /proc: macOS
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


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
    call = Ranks(ranks.consensus, min(ranks.timeout_s, _ROLL_CALL_S))
    try:
        call.gather(text, doing="who is left after a collective failed")
    except RankMissingError as missing:
        return missing
    except BatchfitError as other:
        text = f"{text} ({other})"
    return BatchfitError(f"a collective failed on all ranks, and none of them knows why: {text}")
