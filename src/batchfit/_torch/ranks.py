"""The one place where ranks agree.

Rules
- In one process every call answers at once and talks to nobody.
- Every rank gets the same answer, or every rank that waits gets the same error. Nobody waits longer than
  its time-out, and the error names the ranks that did not come.
- A call says what it is about (`doing`). Ranks that are out of step get an error, never each other's numbers.
- After a rank went missing nothing more is agreed in that process group: the same error comes again.
- Host decisions never touch the default group: a vote must not queue behind a collective of the model.

How: through the key-value store that every process group already has, not through a gloo side group.
`new_group` is itself a collective, so a rank that is missing there hangs the others before any time-out of
ours; a gloo collective that times out does not say who; `monitored_barrier` names the rank on rank 0 only;
and a group that failed once is dead. One store entry a rank shows exactly who has come, needs no group, no
thread and no connection of its own, and works where the default group is nccl.

One agreement: each rank writes what it holds; rank 0 collects and publishes all of it as the verdict. A rank
whose time is up publishes a verdict that names the missing instead. `compare_set` lets only the first verdict
in, so all ranks read the same one, the late rank too. Entries are deleted once read. Waiting is polling with
a pause that grows: a blocking `wait` logs a warning at its time-out, holds the store's lock and keeps Ctrl-C
out.

Cost, measured on one machine with 2 cores and a TCPStore: 2 ranks 0.6 ms an agreement, 3 ranks 0.9 ms (a
gloo all-reduce of one number beside it: 0.4 and 0.9 ms). It grows with the number of ranks, since rank 0
reads one entry of each: made for decisions between trials and batches, not for the reduction of tensors.
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing.util
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch.distributed as dist

from batchfit.errors import BatchfitError, RankMissingError, RanksDisagreeError

_LONGEST_PAUSE_S = 0.02
_FAREWELL_S = 5.0

# How many process groups of this process have agreed on something. A store can outlive a group (torchrun
# keeps one for all of them), and entries of an earlier group must not be taken for ours. All ranks count
# alike: the count moves with the first agreement in a group, and an agreement involves all ranks.
_groups_so_far = 0


@final
class Ranks:
    """All ranks of the program, as they take a decision together.

        ranks = Ranks.current()
        if ranks.any(ran_out, doing="trial 3"):     # on every rank: did anyone run out?
            ...
        size = ranks.minimum(size, doing="the size to try next")

    In one process the same code runs and costs nothing.
    """

    def __init__(self, meeting: _Meeting | None, timeout_s: float) -> None:
        self._meeting = meeting
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
        return self._meeting.rank if self._meeting else 0

    @property
    def world_size(self) -> int:
        return self._meeting.world_size if self._meeting else 1

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes files and speaks."""
        return self.rank == 0

    def gather(self, value: object, *, doing: str) -> list[Any]:
        """What each rank holds, in the order of the ranks. It travels as JSON: a tuple becomes a list."""
        return self._exchange("gather", value, doing)

    def any(self, flag: bool, *, doing: str) -> bool:
        """True on all ranks if it is true on one."""
        if not isinstance(flag, bool):
            raise TypeError(f"flag must be a bool, not {flag!r}")
        return True in self._exchange("any", flag, doing)

    def minimum(self, value: int, *, doing: str) -> int:
        """The smallest value of all ranks."""
        return int(min(self._exchange("minimum", _whole(value), doing)))

    def maximum(self, value: int, *, doing: str) -> int:
        """The largest value of all ranks."""
        return int(max(self._exchange("maximum", _whole(value), doing)))

    def same(self, value: object, *, doing: str) -> None:
        """Nothing if all ranks hold the same value, else `RanksDisagreeError` that lists who holds what."""
        held = [json.dumps(one, sort_keys=True) for one in self._exchange("same", value, doing)]
        if len(set(held)) > 1:
            raise RanksDisagreeError(f"all ranks must hold the same {doing}, but {_who_holds(held)}")

    def find_lost(self, *, doing: str, within_s: float, ended: Callable[[], Sequence[int]]) -> None:
        """After a collective that broke off: an error that names the ranks which are gone, if any are.

        `ended()`: ranks that have certainly ended, as far as this one can tell. They are named at once; a
        rank that neither comes nor is known to have ended is named after `within_s`.
        """
        if self._meeting is not None:
            entry = json.dumps({"call": "lost", "doing": doing, "value": None})
            try:
                self._meeting.exchange(entry, doing, min(within_s, self.timeout_s), ended)
            finally:
                self._meeting.part(ended)

    def flag(self, name: str) -> None:
        """Raise a flag that the other ranks can see without an agreement; it stays up."""
        if self._meeting is not None:
            self._meeting.flag(name)

    def flagged(self, name: str) -> bool:
        """Whether any rank has raised the flag of that name."""
        return self._meeting is not None and self._meeting.flagged(name)

    def leave(self, why: str) -> None:
        """Tell the others that this rank will not come again, so that they fail now, not at their time-out.

        For a rank that is about to raise an error of its own. Raises nothing itself.
        """
        if self._meeting is not None:
            self._meeting.leave(why, self.timeout_s)

    def settle(self) -> None:
        """Wait until all ranks have read the last agreement, so that this process may end.

        The store often lives in rank 0's process. It also waits when the process group goes, but a process
        that ends without a word (`os._exit`, a worker of multiprocessing) never comes to that.
        """
        if self._meeting is not None:
            self._meeting.settle()

    def _exchange(self, call: str, value: object, doing: str) -> list[Any]:
        if not doing:
            raise ValueError(f"doing must say what is being agreed on, not {doing!r}")
        try:
            entry = json.dumps({"call": call, "doing": doing, "value": value})
        except (TypeError, ValueError) as error:
            raise TypeError(f"value must be JSON (numbers, text, lists), not {value!r:.200}") from error
        if self._meeting is None:
            return [json.loads(entry)["value"]]
        return _in_step(self._meeting.exchange(entry, doing, self.timeout_s))

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size}, timeout_s={self.timeout_s:g})"


@dataclass(frozen=True, slots=True)
class _Missing:
    """The verdict that ranks are missing: a value, so that every call raises an error of its own from it."""

    missing: tuple[int, ...]
    doing: str
    timeout_s: float
    why: str = ""

    def to_json(self) -> str:
        return json.dumps(
            {"missing": self.missing, "doing": self.doing, "timeout_s": self.timeout_s, "why": self.why}
        )

    @classmethod
    def from_verdict(cls, verdict: dict[str, Any]) -> _Missing:
        return cls(tuple(verdict["missing"]), verdict["doing"], verdict["timeout_s"], verdict["why"])

    def error(self) -> RankMissingError:
        return RankMissingError(self.missing, doing=self.doing, timeout_s=self.timeout_s, why=self.why)


class _Meeting:
    """The agreements of one process group, round by round; every rank of the group holds one."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store  # a torch.distributed.Store; None once the group has ended
        self._generation: int | None = None
        self._round = 0
        self._unsettled: str | None = None  # where our entry waits for a verdict; stays after a Ctrl-C there
        self._missing: _Missing | None = None
        self._lock = threading.Lock()

    def exchange(
        self, entry: str, doing: str, timeout_s: float, ended: Callable[[], Sequence[int]] = tuple
    ) -> list[dict[str, Any]]:
        """Every rank's entry, in the order of the ranks."""
        with self._lock:
            if self._missing is not None:
                raise self._missing.error()
            if self._store is None:
                raise BatchfitError("the process group of these ranks has ended. Call Ranks.current() again.")
            try:
                verdict = self._meet(entry, doing, timeout_s, ended)
            except RuntimeError as error:  # what a torch store raises once it cannot be reached
                self._missing = self._store_lost(error, doing, timeout_s, ended)
                raise self._missing.error() from error
            if "entries" in verdict:
                return list(verdict["entries"])
            self._missing = _Missing.from_verdict(verdict)
            raise self._missing.error()

    def flag(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # a lost store is noticed at the next agreement
            if self._store is not None:
                self._store.set(f"batchfit/{self._generation}/flag/{name}", "up")

    def flagged(self, name: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return self._store is not None and bool(
                self._store.check([f"batchfit/{self._generation}/flag/{name}"])
            )
        return False

    def leave(self, why: str, timeout_s: float) -> None:
        with self._lock:
            if self._missing is not None or self._store is None:
                return
            self._missing = _Missing((self.rank,), "what comes next", timeout_s, _has_left(self.rank, why))
            unsettled, room = self._unsettled, self._next_room()
            try:
                # After a Ctrl-C while we waited our entry is there, and the others may be waiting still.
                if unsettled is not None:
                    self._publish(unsettled, self._missing.to_json())
                if self.rank == 0:
                    self._publish(room, self._missing.to_json())
                else:
                    self._store.set(f"{room}/{self.rank}", json.dumps({"left": why}))
            except RuntimeError:
                return  # the others cannot be told: they find out by their time-out

    def close(self) -> None:
        """Let go of the store, but not before the others have read the last verdict.

        The store often lives in rank 0's process: were it to end at once, a rank that polls a moment later
        would find no store and report rank 0 missing, although all had agreed.
        """
        store, self._store = self._store, None
        if store is None or self.rank != 0 or self._round == 0:
            return
        if self._missing is not None:
            time.sleep(10 * _LONGEST_PAUSE_S)  # those who wait look that often; those who don't are not told
            return
        self._await_readers(store)

    def settle(self) -> None:
        """On rank 0: wait until the others have read the last verdict."""
        if self.rank == 0 and self._round and self._store is not None and self._missing is None:
            self._await_readers(self._store)

    def part(self, ended: Callable[[], Sequence[int]]) -> None:
        """After a verdict that names the missing: rank 0 keeps the store until the others have read it."""
        store, room = self._store, self._room(self._round - 1)
        if store is None or self._missing is None:
            return
        left = {*self._missing.missing}

        def all_read() -> bool:
            here = [rank for rank in range(1, self.world_size) if rank not in left.union(ended())]
            return not here or bool(store.check([f"{room}/{rank}/read" for rank in here]))

        with contextlib.suppress(RuntimeError):
            if self.rank == 0:
                _poll(all_read, time.monotonic() + _FAREWELL_S)
            else:
                store.set(f"{room}/{self.rank}/read", "yes")

    def _await_readers(self, store: Any) -> None:
        room = self._room(self._round - 1)
        unread = [f"{room}/{rank}" for rank in range(1, self.world_size)]

        def all_read() -> bool:
            unread[:] = [key for key in unread if store.check([key])]
            return not unread

        try:
            _poll(all_read, time.monotonic() + _FAREWELL_S)
        except RuntimeError:
            return

    def _next_room(self) -> str:
        global _groups_so_far
        if self._generation is None:
            self._generation = _groups_so_far
            _groups_so_far += 1
        self._round += 1
        return self._room(self._round - 1)

    def _room(self, number: int) -> str:
        return f"batchfit/{self._generation}/{number}"

    def _meet(
        self, entry: str, doing: str, timeout_s: float, ended: Callable[[], Sequence[int]]
    ) -> dict[str, Any]:
        """Write our entry, wait for the verdict (rank 0: for all entries), delete what all have read."""
        store = self._store
        room = self._next_room()
        entries = [f"{room}/{rank}" for rank in range(self.world_size)]
        self._unsettled = room
        store.set(entries[self.rank], entry)
        begun = time.monotonic()
        complete = False
        gone: tuple[int, ...] = ()

        def settled() -> bool:
            nonlocal complete, gone
            gone = tuple(rank for rank in ended() if not store.check([entries[rank]]))
            if gone:
                return True
            if self.rank == 0:
                complete = bool(store.check(entries))
                # another rank may have given up already; asked only once this has taken a while
                if complete or time.monotonic() - begun < 0.1:
                    return complete
            return bool(store.check([f"{room}/verdict"]))

        came = _poll(settled, begun + timeout_s)
        absent: tuple[int, ...] = ()
        if not came:
            absent = tuple(rank for rank, key in enumerate(entries) if not store.check([key]))
            # all are there after all, the last one just now: rank 0 needs a moment to say so
            came = not absent and _poll(settled, time.monotonic() + _FAREWELL_S)
        if gone:
            verdict = self._publish(
                room, _Missing(gone, doing, timeout_s, f"{_name(gone)}: the process has ended").to_json()
            )
        elif not came:
            verdict = self._publish(room, _Missing(absent or (0,), doing, timeout_s).to_json())
        elif complete:
            verdict = self._publish(room, _collected(store.multi_get(entries), doing, timeout_s))
        else:
            verdict = json.loads(store.get(f"{room}/verdict"))
        self._unsettled = None
        # All is settled. Rank 0 may end as soon as our entry is gone, and the store with it, before we hear
        # of it: a lost store is noticed at the next agreement, if there is one.
        with contextlib.suppress(RuntimeError):
            if "entries" in verdict:
                store.delete_key(entries[self.rank])
                if (
                    self.rank == 0 and self._round > 1
                ):  # all came to this round, so all have read the last one
                    store.delete_key(f"{self._room(self._round - 2)}/verdict")
        return dict(verdict)

    def _publish(self, room: str, verdict: str) -> dict[str, Any]:
        """The verdict of this room: ours if it is the first, else the one that was there before."""
        first: dict[str, Any] = json.loads(self._store.compare_set(f"{room}/verdict", "", verdict))
        return first

    def _store_lost(
        self, error: RuntimeError, doing: str, timeout_s: float, ended: Callable[[], Sequence[int]]
    ) -> _Missing:
        """The store went away while we waited: nobody can be asked, and its keeper is the likely cause."""
        gone = tuple(ended())
        likely = (0,) if self.rank != 0 else tuple(range(1, self.world_size))
        detail = str(error).partition("\n")[0]
        why = f"the store of the process group, which rank 0 or the launcher keeps, was lost: {detail}"
        if gone:
            why = f"{_name(gone)}: the process has ended; {why}"
        return _Missing(gone or likely, doing, timeout_s, why)


_meeting_now: tuple[weakref.ref[Any], _Meeting] | None = None


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


def _current_meeting() -> _Meeting | None:
    global _meeting_now
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    if dist.get_backend() == "fake":  # one process that pretends to be many: nobody is there to ask
        return None
    group: Any = dist.group.WORLD
    if _meeting_now is not None and _meeting_now[0]() is group:
        return _meeting_now[1]
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # mpi
        raise BatchfitError(
            f"ranks of a {dist.get_backend()} group cannot agree, because the group has no store. "
            "Initialise torch.distributed with gloo or nccl."
        )
    meeting = _Meeting(store, rank=dist.get_rank(), world_size=dist.get_world_size())
    _meeting_now = (weakref.ref(group), meeting)
    # When the group goes, or the interpreter ends. The store must not outlive the group through us: a group
    # made after it on the same port would find the old one's entries, torch's own among them.
    closing = weakref.finalize(group, meeting.close)
    # A child of multiprocessing ends without what `atexit` knows, and garbage (a DDP in a cycle) may hold
    # the group until then.
    multiprocessing.util.Finalize(None, closing, exitpriority=1)
    return meeting


def _poll(condition: Callable[[], bool], deadline: float) -> bool:
    """True once the condition holds, False if the deadline came first. Looks more rarely as time passes."""
    begun = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now >= deadline:
            return False
        pause = min(_LONGEST_PAUSE_S, 1e-4 + (now - begun) / 10)
        time.sleep(min(pause, deadline - now))
    return True


def _collected(texts: Iterable[bytes], doing: str, timeout_s: float) -> str:
    """The verdict over a full set of entries: all of them, or who has left."""
    found = [json.loads(text) for text in texts]
    left = tuple(rank for rank, one in enumerate(found) if "left" in one)
    if left:
        why = "; ".join(_has_left(rank, found[rank]["left"]) for rank in left)
        return _Missing(left, doing, timeout_s, why).to_json()
    return json.dumps({"entries": found})


def _has_left(rank: int, why: str) -> str:
    return f"rank {rank} has left: {why}"


def _in_step(entries: Sequence[dict[str, Any]]) -> list[Any]:
    """The values, if every rank made the same call about the same thing."""
    calls = [f"{entry['call']}(doing={entry['doing']!r})" for entry in entries]
    if len(set(calls)) > 1:
        raise RanksDisagreeError(
            f"ranks are out of step: {_who_holds(calls, verb=('is at', 'are at'))}. "
            "Every rank must run the same program with the same arguments."
        )
    return [entry["value"] for entry in entries]


def _who_holds(values: Sequence[str], *, verb: tuple[str, str] = ("holds", "hold")) -> str:
    """`rank 0 holds 24, ranks 1-3 hold 32`."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    parts = []
    for value, ranks in holders.items():
        shown = value if len(value) <= 200 else value[:197] + "..."
        parts.append(f"{_name(ranks)} {verb[len(ranks) > 1]} {shown}")
    return ", ".join(parts)


def _name(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _whole(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"value must be an integer, not {value!r}")
    return value
