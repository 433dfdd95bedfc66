"""The mechanism behind `ranks.py`: one agreement through the key-value store of a process group.

Rules
- One agreement: each rank writes what it holds; rank 0 collects and publishes all of it as the verdict. A
  rank whose time is up publishes a verdict that names the missing instead, and one that leaves a verdict that
  names itself. `compare_set` lets only the first verdict in, so all ranks read the same one, the late rank
  too.
- Entries are deleted once read; rank 0, whose process often keeps the store, stays until the others have.
- After a verdict that names the missing nothing more is agreed: the same error comes again.
- Waiting is polling with a pause that grows: a blocking `wait` logs a warning at its time-out, holds the
  store's lock and keeps Ctrl-C out.

Why not a gloo side group: `new_group` is itself a collective, so a rank that is missing there hangs the
others before any time-out of ours; a gloo collective that times out does not say who; `monitored_barrier`
names the rank on rank 0 only; and a group that failed once is dead. One store entry per rank shows who has
come, needs no group, no thread and no connection of its own, and works where the default group is nccl.

Cost, measured on one machine with 2 cores and a TCPStore: 2 ranks 0.6 ms per agreement, 3 ranks 0.9 ms (a
gloo all-reduce of one number beside it: 0.4 and 0.9 ms). It grows with the number of ranks, since rank 0
reads one entry of each: made for decisions between trials and batches, not for the reduction of tensors.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from batchfit.errors import BatchfitError, RankMissingError

LONGEST_PAUSE_S = 0.02
_FAREWELL_S = 5.0

# How many process groups of this process have agreed on something. A store can outlive a group (torchrun
# keeps one for all of them), and entries of an earlier group must not be taken for ours. All ranks count
# alike: the count moves with the first agreement in a group, and an agreement involves all ranks.
_groups_so_far = 0


@final
@dataclass(frozen=True, slots=True)
class _Missing:
    """The verdict that ranks are missing: a value, so that every call raises an error of its own from it."""

    missing: tuple[int, ...]
    doing: str
    timeout_s: float
    why: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_verdict(cls, verdict: dict[str, Any]) -> _Missing:
        return cls(**{**verdict, "missing": tuple(verdict["missing"])})

    def error(self) -> RankMissingError:
        return RankMissingError(self.missing, doing=self.doing, timeout_s=self.timeout_s, why=self.why)


@final
class StoreConsensus:
    """The agreements of one process group, round by round; every rank of the group holds one."""

    def __init__(self, store: Any, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store  # a torch.distributed.Store; None once the group has ended
        self.generation: int | None = None
        self._round = 0
        self._unsettled: str | None = None  # where our entry waits for a verdict; stays after a Ctrl-C there
        self._missing: _Missing | None = None
        self._lock = threading.Lock()

    def exchange(
        self,
        entry: str,
        doing: str,
        timeout_s: float,
        ended: Callable[[], Sequence[int]] = tuple,
        or_leave: str = "",
    ) -> list[dict[str, Any]]:
        """Every rank's entry, in the order of the ranks; `or_leave`: why this rank leaves if not all come."""
        with self._lock:
            if self._missing is not None:
                raise self._missing.error()
            if self.store is None:
                raise BatchfitError("the process group of these ranks has ended. Call Ranks.current() again.")
            try:
                verdict = self._meet(entry, doing, timeout_s, ended, or_leave)
            except RuntimeError as error:  # what a torch store raises once it cannot be reached
                self._missing = self._store_lost(error, doing, timeout_s, ended)
                raise self._missing.error() from error
            if "entries" in verdict:
                return list(verdict["entries"])
            self._missing = _Missing.from_verdict(verdict)
            raise self._missing.error()

    def flag(self, name: str) -> None:
        with contextlib.suppress(RuntimeError):  # a lost store is noticed at the next agreement
            if self.store is not None:
                self.store.set(f"batchfit/{self.generation}/flag/{name}", "up")

    def flagged(self, name: str) -> bool:
        with contextlib.suppress(RuntimeError):
            return self.store is not None and bool(
                self.store.check([f"batchfit/{self.generation}/flag/{name}"])
            )
        return False

    def leave(self, why: str, timeout_s: float) -> None:
        with self._lock:
            if self._missing is not None or self.store is None:
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
                    self.store.set(f"{room}/{self.rank}", json.dumps({"left": why}))
            except RuntimeError:
                return  # the others cannot be reached: their time-out ends their wait

    def close(self) -> None:
        """Release the store, but not before the others have read the last verdict.

        The store often lives in rank 0's process: were it to end at once, a rank that polls a moment later
        would find no store and report rank 0 missing, although all had agreed.
        """
        store, self.store = self.store, None
        if store is None or self.rank != 0 or self._round == 0:
            return
        if self._missing is not None:
            time.sleep(10 * LONGEST_PAUSE_S)  # ranks that wait poll that often
            return
        self._await_readers(store)

    def settle(self) -> None:
        """On rank 0: wait until the others have read the last verdict."""
        if self.rank == 0 and self._round and self.store is not None and self._missing is None:
            self._await_readers(self.store)

    def part(self, ended: Callable[[], Sequence[int]]) -> None:
        """After a verdict that names the missing: rank 0 keeps the store until the others have read it."""
        store, room = self.store, self._room(self._round - 1)
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
        if self.generation is None:
            self.generation = _groups_so_far
            _groups_so_far += 1
        self._round += 1
        return self._room(self._round - 1)

    def _room(self, number: int) -> str:
        return f"batchfit/{self.generation}/{number}"

    def _meet(
        self, entry: str, doing: str, timeout_s: float, ended: Callable[[], Sequence[int]], or_leave: str
    ) -> dict[str, Any]:
        """Write our entry, wait for the verdict (rank 0: for all entries), delete what all have read."""
        store = self.store
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
                room, _Missing(gone, doing, timeout_s, f"{name_of(gone)}: the process has ended").to_json()
            )
        elif not came:
            missing = _Missing(absent or (0,), doing, timeout_s)
            if or_leave:
                missing = _Missing((self.rank,), doing, timeout_s, _has_left(self.rank, or_leave))
            verdict = self._publish(room, missing.to_json())
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
        first: dict[str, Any] = json.loads(self.store.compare_set(f"{room}/verdict", "", verdict))
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
            why = f"{name_of(gone)}: the process has ended; {why}"
        return _Missing(gone or likely, doing, timeout_s, why)


def _poll(condition: Callable[[], bool], deadline: float) -> bool:
    """True once the condition holds, False if the deadline came first. Polls more rarely as time passes."""
    begun = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now >= deadline:
            return False
        pause = min(LONGEST_PAUSE_S, 1e-4 + (now - begun) / 10)
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


def name_of(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
