"""What the processes of one run have reported: steps and readings by rank, and how it went wrong.

Rules: a process that takes no step (a launcher, a loader's worker) is no rank. An OOM on any rank outweighs
every other error, since the others lose their connection to that rank. Only text of errors is kept.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass, field
from typing import Any, final

from batchfit._engine.distributed.collectives import reads_as_lost
from batchfit._find.driver import worst
from batchfit._program.pure.size_use import SizeUse
from batchfit.results import Outcome, Trial

Event = dict[str, Any]
_OF_MEMORY: dict[str, Outcome] = {"oom": "oom", "too_large": "too_large", "ambiguous": "oom"}
_WORKER_KILLED = re.compile(r"DataLoader worker .*(?:is killed by signal: Killed|exited unexpectedly)")
_WORKER_BUS = re.compile(r"DataLoader worker .*is killed by signal: Bus error|insufficient shared memory")


@final
@dataclass(slots=True)
class RankReport:
    """One process of the program."""

    peer: int
    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    steps: list[Event] = field(default_factory=list)
    reached: int | None = None  # the step at which it waits
    steps_s: list[float] = field(default_factory=list)  # as its device took them, once it has waited
    counts_memory: bool = False  # in a way that slows its steps
    largest_bytes: int | None = None  # the largest block that its allocator has taken
    exited: bool = False

    def take_who(self, event: Event) -> None:
        for name in ("rank", "world_size", "local_world_size"):
            if name in event:
                setattr(self, name, event[name])


@final
@dataclass(slots=True)
class ProgramFailure:
    """How a run failed, by the first report that says so best."""

    outcome: Outcome | None  # None: an error of the program's own
    text: str
    phase: str | None = None
    ambiguous: bool = False
    lost: bool = False  # a lost connection: another rank will say why
    kind: str = ""
    lines: tuple[str, ...] = ()

    @property
    def weight(self) -> int:
        """An OOM first, a lost connection last."""
        return 3 if self.is_certain else 2 if self.outcome else 0 if self.lost else 1

    @property
    def is_certain(self) -> bool:
        """Whether nothing that another rank says could change it."""
        return self.outcome is not None and not self.ambiguous


@final
class Reports:
    """All that one run has reported."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankReport] = {}
        self.failure: ProgramFailure | None = None
        self.device = ""
        self.budget_bytes: int | None = None
        self.first_pass_s: float | None = None
        self.last_step_s: float | None = None
        self.handled: ProgramFailure | None = None  # an error that the program made an exit code of
        self.heard = False  # a process with torch was there
        self.died = False  # one that had taken a step or a pass left without a word
        self.passes = 0  # forward passes of a process that ended by itself
        self.is_evaluation = False
        self.evaluated = False  # a program that trains, within its steps
        self.holders: list[tuple[str, int]] = []  # what held the most at the first OOM
        self._passed: set[int] = set()

    def take(self, event: Event, now_s: float) -> None:
        """One event of a process."""
        peer = event.get("peer")
        if peer is None:
            return
        rank = self.ranks.setdefault(peer, RankReport(peer))
        rank.take_who(event)
        kind = event["kind"]
        if kind == "hello":
            self.heard = True
        elif kind == "first_pass":
            self._passed.add(peer)
            self.device = event["device"] or self.device
            if event["budget_bytes"] is not None:
                self.budget_bytes = min(event["budget_bytes"], self.budget_bytes or event["budget_bytes"])
            if self.first_pass_s is None:
                self.first_pass_s = now_s
        elif kind == "step":
            if rank.steps and event["number"] <= rank.steps[-1]["number"]:
                rank.steps = []  # it has evaluated before, and trains now
            rank.steps.append(event)
            self.last_step_s = now_s
        elif kind == "reached":
            rank.reached = event["number"]
            rank.steps_s = event["steps_s"]
            rank.counts_memory = event["counts_memory"]
            rank.largest_bytes = event.get("largest_bytes")
            self.is_evaluation = event["kind_of_step"] == "pass"
            self.evaluated |= event.get("evaluated", False)
        elif kind == "oom":
            self.holders = self.holders or [(name, size) for name, size in event.get("holders", ())]
            self._fail(ProgramFailure("oom", _on(rank, event["text"]), event["phase"]))
        elif kind == "raised":
            failure = _raised(rank, event)
            # A launcher reports that its ranks have died: how they did says more.
            failure.lost |= failure.outcome is None and bool(self._passed) and peer not in self._passed
            self._fail(failure)
        elif kind == "handled":
            self.handled = _raised(rank, event)
        elif kind == "exits":
            rank.exited = True
            self.passes = max(self.passes, event.get("passes", 0))
        elif kind == "left":
            self.died |= not rank.exited and peer in self._passed

    def _fail(self, failure: ProgramFailure) -> None:
        if self.failure is None or failure.weight > self.failure.weight:
            self.failure = failure

    @property
    def stepping(self) -> list[RankReport]:
        """The ranks: processes that have taken steps."""
        return [one for one in self.ranks.values() if one.steps]

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return max((one.world_size for one in self.ranks.values()), default=1)

    @property
    def other_nodes(self) -> RankReport | None:
        """A rank of a program that needs more nodes than this one, if it does."""
        return next((one for one in self.ranks.values() if one.world_size > one.local_world_size), None)

    @property
    def steps_run(self) -> int:
        """Steps that every rank has taken."""
        return min((one.steps[-1]["number"] for one in self.stepping), default=0)

    def waiting(self) -> list[int]:
        """The processes that wait, once all ranks do."""
        peers = [one.peer for one in self.ranks.values() if one.reached is not None]
        return peers if len(peers) >= self.world_size else []

    def go_on(self) -> None:
        """Those that waited do so no longer."""
        for one in self.ranks.values():
            one.reached = None

    def last_lines(self, printed: list[str]) -> list[str]:
        """What the program printed last; of one that prints nothing, the traceback of its error."""
        return printed or (list(self.failure.lines) if self.failure is not None else [])

    def step_s(self) -> float | None:
        """Seconds of one step, of the slowest rank."""
        return max((_median_s(one) for one in self.stepping), default=None)

    def use(self, size: int) -> SizeUse:
        """How the program used the size."""
        lasts = [one.steps[-1] for one in self.stepping]
        peaks = [one["peak_bytes"] for one in lasts if one.get("peak_bytes") is not None]
        return SizeUse(
            size=size,
            samples=max((one["samples"] for one in lasts), default=0),
            elements=max((one["elements"] for one in lasts), default=0),
            passes=max((one["passes"] for one in lasts), default=0),
            peak_bytes=max(peaks, default=None),
        )

    def trial(self, size: int, *, soak: bool, elapsed_s: float, outcome: Outcome, message: str = "") -> Trial:
        """One trial that stands for all ranks'."""
        failure = self.failure if outcome != "fits" else None
        made = [
            _trial_of(one, size, soak=soak, elapsed_s=elapsed_s, outcome=outcome) for one in self.stepping
        ]
        trial = (
            worst(made)
            if made
            else Trial(size=size, outcome=outcome, steps_run=0, soak=soak, elapsed_s=elapsed_s)
        )
        if failure is None:
            return trial.model_copy(update={"message": message})
        return trial.model_copy(
            update={
                "message": message or failure.text,
                "phase": failure.phase if failure.phase in ("forward", "optimizer") else None,
                "ambiguous": failure.ambiguous,
            }
        )


def _trial_of(rank: RankReport, size: int, *, soak: bool, elapsed_s: float, outcome: Outcome) -> Trial:
    last = rank.steps[-1]
    retries = [one.get("alloc_retries") or 0 for one in rank.steps]
    half = len(retries) // 2
    held = [one["held_bytes"] for one in rank.steps if one.get("held_bytes") is not None]
    return Trial(
        size=size,
        outcome=outcome,
        steps_run=last["number"],
        peak_bytes=last.get("peak_bytes"),
        reserved_bytes=last.get("reserved_bytes"),
        split_bytes=last.get("split_bytes"),
        largest_bytes=rank.largest_bytes,
        held_bytes=max(held, default=None),
        alloc_retries=retries[-1],
        settled_retries=retries[-1] - retries[half - 1] if soak and half else 0,
        step_s=_median_s(rank),
        elapsed_s=elapsed_s,
        soak=soak,
    )


def _median_s(rank: RankReport) -> float:
    seconds: list[float] = rank.steps_s or [one["step_s"] for one in rank.steps]
    return statistics.median(seconds[1:] or seconds)


def _raised(rank: RankReport, event: Event) -> ProgramFailure:
    verdict, text = event["verdict"], event["text"]
    lines = tuple(event["traceback"])
    if _WORKER_KILLED.search(text):
        return ProgramFailure("killed", _on(rank, text), lines=lines)
    if _WORKER_BUS.search(text):
        return ProgramFailure("killed", _on(rank, text), ambiguous=True, lines=lines)
    outcome = _OF_MEMORY.get(verdict, "killed" if verdict == "fatal" else None)
    return ProgramFailure(
        outcome,
        _on(rank, text),
        event["phase"],
        ambiguous=verdict in ("ambiguous", "fatal"),
        lost=outcome is None and rank.world_size > 1 and reads_as_lost(text),
        kind=event["type"],
        lines=lines,
    )


def _on(rank: RankReport, text: str) -> str:
    return f"rank {rank.rank}: {text}" if rank.world_size > 1 else text
