"""A sweep over all ranks of a launcher: each has a child, and the children run a configuration together.

Rules:
- All ranks go through the same configurations and keep the same records; rank 0 alone writes and speaks.
- The children have a process group of their own (`_engine.trial.child_group`): what breaks in it, breaks with
  them. One that fails alone, in a factory or in the middle of a collective, would leave the others waiting:
  they are ended, and all ranks go on with new ones.
- What all ranks found is one record: rank 0's, or that of the first rank that failed by itself.
- A child that dies is tried once more with new ones, as in a sweep on devices.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from batchfit._engine.distributed.collectives import reads_as_lost
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial.child_group import ChildGroup
from batchfit._engine.trial.child_process import wait_for_any
from batchfit._sweep.devices import TRIES
from batchfit._sweep.job import Job
from batchfit._sweep.pure.events import OnEvent, SweepEvent
from batchfit._sweep.pure.grid import Entry
from batchfit._sweep.worker import Death, Worker, check_may_have_children, portable
from batchfit.results import SweepRecord

# For the children of the other ranks, once one has failed: they fail too, or wait for it without end.
PATIENCE_S = 5.0


@final
@dataclass(frozen=True, slots=True)
class RankAnswer:
    """What one rank's child said: a record, or how it ended, or nothing because it was cut off."""

    record: SweepRecord | None = None
    death: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the other ranks."""
        return {"record": self.record and self.record.model_dump(mode="json"), "death": self.death}

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> RankAnswer:
        """The answer of another rank."""
        record = answer["record"]
        return cls(None if record is None else SweepRecord.model_validate(record), answer["death"])

    @property
    def failed(self) -> bool:
        """Whether the other ranks need not expect anything of it."""
        return self.record is None or self.record.error is not None


def settle(answers: Sequence[RankAnswer]) -> SweepRecord | None:
    """One record out of the answers of all ranks; None where a child died, and no record says why."""
    own = [(rank, one.record) for rank, one in enumerate(answers) if one.record is not None]
    failed = [(rank, record) for rank, record in own if record.error is not None]
    if not failed:
        return own[0][1] if len(own) == len(answers) else None
    causes = [one for one in failed if not _because_of_others(one[1].error or "")]
    if not causes and any(one.death for one in answers):
        return None  # they lost the one that died
    rank, record = (causes or failed)[0]
    if len(failed) == len(answers) and len({one.error for _, one in failed}) == 1:
        return record
    return record.model_copy(update={"error": f"{record.error} (on rank {rank})"})


def _because_of_others(error: str) -> bool:
    """Whether a rank raised this because another one went away: never the cause."""
    return error.startswith("RankMissingError") or reads_as_lost(error)


def may_go_on(answers: Sequence[RankAnswer]) -> bool:
    """Whether the children can be asked for more: none is gone, and what failed has failed on all alike."""
    records = [one.record for one in answers]
    if None in records:
        return False
    errors = {one.error for one in records if one is not None}
    if errors == {None}:
        return True
    alike = len(errors) == 1 and None not in errors
    return alike and all(
        one is not None and (one.failed_in == "factory" or (one.error or "").startswith("NothingFitsError"))
        for one in records
    )


@final
@dataclass(slots=True)
class AllRanks:
    """The engine: `AllRanks(ranks)(job, waiting, on_event)`, on every rank."""

    ranks: Ranks
    _asked: int = field(default=0)

    def __call__(
        self, job: Job, waiting: Sequence[Entry], on_event: OnEvent
    ) -> Generator[SweepRecord, None, None]:
        check_may_have_children()
        worker, group = Worker(portable(job)), ChildGroup(self.ranks)
        ended = False
        try:
            for entry in waiting:
                yield self._record(worker, group, entry, on_event)
            ended = True
        finally:
            worker.end(gently=ended)

    def _record(self, worker: Worker, group: ChildGroup, entry: Entry, on_event: OnEvent) -> SweepRecord:
        for number in range(1, TRIES + 1):
            answers = self._try(worker, group, entry, on_event)
            record = settle(answers)
            if record is not None:
                return record
            if number < TRIES:
                continue
        deaths = [(rank, one.death) for rank, one in enumerate(answers) if one.death]
        rank, death = deaths[0] if deaths else (0, "gave no answer")
        return worker.failed(
            entry, f"ChildDiedError: the process that ran it on rank {rank} {death}, {TRIES} times"
        )

    def _try(self, worker: Worker, group: ChildGroup, entry: Entry, on_event: OnEvent) -> list[RankAnswer]:
        """Have all ranks run a configuration once; what each of them has to say."""
        self._asked += 1
        doing = f"{entry.label}, number {self._asked}"
        invitation = None
        if self.ranks.any(worker.child is None, doing=f"the processes for {doing}"):
            worker.end()
            invitation = group.rendezvous()
        worker.begin(entry, invitation)
        mine = self._answer(worker, on_event, flag=f"sweep {self._asked}")
        gathered = self.ranks.gather(mine.as_json(), doing=f"the record of {doing}")
        answers = [RankAnswer.of(one) for one in gathered]
        if not may_go_on(answers):
            worker.end()
        return answers

    def _answer(self, worker: Worker, on_event: OnEvent, *, flag: str) -> RankAnswer:
        """What this rank's child says, or nothing where another one has failed and ours goes on waiting."""
        deadline: float | None = None
        while worker.child is not None:
            wait_for_any([worker.child])
            for said in worker.said():
                if isinstance(said, SweepEvent):
                    if self.ranks.is_main:
                        on_event(said)
                    continue
                answer = RankAnswer(death=said.text) if isinstance(said, Death) else RankAnswer(said)
                if answer.failed:
                    self.ranks.flag(flag)
                return answer
            if deadline is None and self.ranks.flagged(flag):
                deadline = time.monotonic() + PATIENCE_S
            if deadline is not None and time.monotonic() > deadline:
                worker.end()
        return RankAnswer()
