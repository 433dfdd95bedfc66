"""The ranks of this run: how they agree on a value, and find out which of them are gone.

Rules
- In one process every call returns at once and issues no collectives.
- Every rank gets the same answer, or every rank that waits gets the same error. Nobody waits longer than
  its time-out, and the error names the ranks that did not come.
- A call says what it is about (`doing`). Ranks that are out of step get an error, never each other's numbers.
- After a rank went missing nothing more is agreed in that process group: the same error comes again.
- Host decisions never touch the default group: a vote must not queue behind a collective of the model. They
  go through the store that every process group already has (`consensus`).
- An error on one rank ends what all do together: now, not at a time-out, with its text. One that all ranks
  raise together is not reported: they may go on, and search again.
- Every rank knows on which machine and in which process the others are. Those on its own machine it can
  check: a process that has ended, or that only waits to be reaped, is gone.
- A collective that breaks off says that a connection was lost, not whose. What it raised is replaced by an
  error that names the rank, and says what that rank said when it left. Where all ranks are still there, the
  error stands as it was raised.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing.util
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, final

import torch.distributed as dist

from batchfit._engine.device import oom
from batchfit._engine.distributed.collectives import is_lost_connection
from batchfit._engine.distributed.consensus import StoreConsensus, name_of
from batchfit._engine.torch_private import process_groups
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
_ROLL_CALL_S: Final = 10.0  # for those who lost a connection, to wait for each other


@final
class Ranks:
    """All ranks of the program, as they take a decision together.

        ranks = Ranks.current()
        if ranks.any(has_oom, doing="trial 3"):     # on every rank: has any of them an OOM?
            ...
        size = ranks.minimum(size, doing="the size to try next")

    In one process the same code runs and costs nothing.
    """

    def __init__(self, meeting: StoreConsensus | None, timeout_s: float) -> None:
        self.consensus = meeting
        self.timeout_s = timeout_s

    @classmethod
    def current(cls, timeout_s: float = 300) -> Ranks:
        """The ranks of the default process group; a single one where there is none."""
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise ValueError(f"timeout_s must be positive, not {timeout_s!r}")
        return cls(_current_meeting(), timeout_s)

    @property
    def rank(self) -> int:
        return self.consensus.rank if self.consensus else 0

    @property
    def world_size(self) -> int:
        return self.consensus.world_size if self.consensus else 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def gather(self, value: object, *, doing: str) -> list[Any]:
        """What each rank holds, in the order of the ranks. It travels as JSON: a tuple becomes a list."""
        return self._exchange("gather", value, doing)

    def gather_or_leave(self, value: object, *, doing: str, within_s: float, why: str) -> list[Any]:
        """`gather` for a rank that cannot go on: those who do not come in time hear why it has left.

        They may be waiting for it in a collective, and are not the ones to be named.
        """
        if self.consensus is None:
            return self.gather(value, doing=doing)
        entry = json.dumps({"call": "gather", "doing": doing, "value": value})
        limit_s = min(within_s, self.timeout_s)
        return _in_step(self.consensus.exchange(entry, doing, limit_s, or_leave=why))

    def any(self, flag: bool, *, doing: str) -> bool:
        """True on all ranks if it is true on one."""
        if not isinstance(flag, bool):
            raise TypeError(f"flag must be a bool, not {flag!r}")
        return True in self._exchange("any", flag, doing)

    def minimum(self, value: int, *, doing: str) -> int:
        """The smallest value of all ranks."""
        return int(min(self._exchange("minimum", _whole(value), doing)))

    def same(self, value: object, *, doing: str) -> None:
        """Nothing if all ranks hold the same value, else `RanksDisagreeError` that lists who holds what."""
        held = [json.dumps(one, sort_keys=True) for one in self._exchange("same", value, doing)]
        if len(set(held)) > 1:
            raise RanksDisagreeError(f"all ranks must hold the same {doing}, but {who_holds(held)}")

    def find_lost(self, *, doing: str, within_s: float, ended: Callable[[], Sequence[int]]) -> None:
        """After a collective that broke off: an error that names the ranks which are gone, if any are.

        `ended()`: ranks that have certainly ended, as far as this one knows. They are named at once; a
        rank that neither comes nor is known to have ended is named after `within_s`.
        """
        if self.consensus is not None:
            entry = json.dumps({"call": "lost", "doing": doing, "value": None})
            try:
                self.consensus.exchange(entry, doing, min(within_s, self.timeout_s), ended)
            finally:
                self.consensus.part(ended)

    def flag(self, name: str) -> None:
        """Set a flag that the other ranks can read without an agreement; it stays set."""
        if self.consensus is not None:
            self.consensus.flag(name)

    def flagged(self, name: str) -> bool:
        """Whether any rank has set the flag of that name."""
        return self.consensus is not None and self.consensus.flagged(name)

    def leave(self, why: str) -> None:
        """Report that this rank will not come again, so that the others fail now, not at their time-out.

        For a rank that is about to raise an error of its own. Raises nothing itself.
        """
        if self.consensus is not None:
            self.consensus.leave(why, self.timeout_s)

    def settle(self) -> None:
        """Wait until all ranks have read the last agreement, so that this process may end.

        The store often lives in rank 0's process. It also waits when the process group goes, but a process
        that ends abruptly (`os._exit`, a worker of multiprocessing) never comes to that.
        """
        if self.consensus is not None:
            self.consensus.settle()

    def _exchange(self, call: str, value: object, doing: str) -> list[Any]:
        if not doing:
            raise ValueError(f"doing must say what is being agreed on, not {doing!r}")
        try:
            entry = json.dumps({"call": call, "doing": doing, "value": value})
        except (TypeError, ValueError) as error:
            raise TypeError(f"value must be JSON (numbers, text, lists), not {value!r:.200}") from error
        if self.consensus is None:
            return [json.loads(entry)["value"]]
        return _in_step(self.consensus.exchange(entry, doing, self.timeout_s))

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size}, timeout_s={self.timeout_s:g})"


_meeting_now: tuple[weakref.ref[Any], StoreConsensus] | None = None


_our_group: weakref.ref[Any] | None = None


def join_launched() -> None:
    """Make a process group for decisions, where a launcher has started several ranks and there is none."""
    global _our_group
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    launched = all(os.environ.get(name, "").strip() for name in names)
    if not launched or os.environ["WORLD_SIZE"].strip() == "1" or not dist.is_available():
        return
    if not dist.is_initialized():
        dist.init_process_group("gloo")
        _our_group = weakref.ref(dist.group.WORLD)


def made_by_us() -> bool:
    """Whether the default process group is one of `join_launched`, and not of the program."""
    return _our_group is not None and dist.is_initialized() and _our_group() is dist.group.WORLD


def _current_meeting() -> StoreConsensus | None:
    global _meeting_now
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "fake":  # one process that pretends to be many: nobody is there to ask
        return None
    group: Any = dist.group.WORLD
    if _meeting_now is not None and _meeting_now[0]() is group:
        return _meeting_now[1]
    store = process_groups.default_store()
    if store is None:  # mpi
        raise BatchfitError(
            f"ranks of a {dist.get_backend()} group cannot agree, because the group has no store. "
            "Initialise torch.distributed with gloo or nccl."
        )
    meeting = StoreConsensus(store, rank=dist.get_rank(), world_size=dist.get_world_size())
    _meeting_now = (weakref.ref(group), meeting)
    # When the group goes, or the interpreter ends. The store must not outlive the group through us: a group
    # made after it on the same port would find the old one's entries, torch's own among them.
    closing = weakref.finalize(group, meeting.close)
    # A child of multiprocessing ends without what `atexit` knows, and garbage (a DDP in a cycle) may hold
    # the group until then.
    multiprocessing.util.Finalize(None, closing, exitpriority=1)
    return meeting


def _in_step(entries: Sequence[dict[str, Any]]) -> list[Any]:
    """The values, if every rank made the same call about the same thing."""
    calls = [f"{entry['call']}(doing={entry['doing']!r})" for entry in entries]
    if len(set(calls)) > 1:
        raise RanksDisagreeError(
            f"ranks are out of step: {who_holds(calls, verb=('is at', 'are at'))}. "
            "Every rank must run the same program with the same arguments.",
            places=[entry["doing"] for entry in entries],
        )
    return [entry["value"] for entry in entries]


def who_holds(values: Sequence[str], *, verb: tuple[str, str] = ("holds", "hold")) -> str:
    """`rank 0 holds 24, ranks 1-3 hold 32`."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in holders.items():
        shown = value if len(value) <= 200 else value[:197] + "..."
        parts.append(f"{name_of(ranks)} {verb[len(ranks) > 1]} {shown}")
    return ", ".join(parts)


def _whole(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"value must be an integer, not {value!r}")
    return value


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
