"""Which collectives the steps of a workload issue, recorded before the first trial.

Rules:
- A step that issues no collectives costs two small steps, and nothing is recorded.
- Every rank rehearses at the same sizes, and all reach the same verdict: whether a rank whose step failed can
  go on issuing them. Where it cannot, the search is refused on all ranks, with the reason and the remedy.
- A wrapper changes its collectives in the first steps after its state was restored (DDP rebuilds its buckets
  in the second one): these are recorded one by one. Then all must be equal.
- The state is restored after each, as after a trial. The budget does not hold here: a rank with an OOM at the
  smallest size has no memory for it at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from batchfit._engine.distributed.collectives import (
    CollectiveCall,
    CountedStep,
    ExpectedCollectives,
    StepSends,
    Unservable,
    begun_since,
    counts,
    recording,
)
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import CollectivesError, NothingFitsError, RankMissingError
from batchfit.results import Trial

Step = Callable[[int], object]
PATIENCE_S = 30.0  # of a rank with an OOM in its first step, for others that may wait in a collective
_SETTLED = 4  # steps after which a wrapper no longer changes, the last two to compare


class RunSteps(Protocol):
    """Runs some steps at a size and restores the state."""

    def __call__(self, step: Step, size: int, *, steps: int) -> Trial: ...


def rehearse(
    step: Step, run: RunSteps, ranks: Ranks, *, sizes: Sequence[int], device: str
) -> tuple[ExpectedCollectives | None, bool]:
    """The collectives of a step at any size, or None without any; and whether a step failed on any rank.

    `sizes`: small ones, ascending.
    """
    before = counts()
    first = run(step, sizes[0], steps=2)
    sends = any(count > 0 for count in begun_since(before).values())
    oom_text = "" if first.fits else first.message or first.outcome
    answers = _agreed([oom_text, sends], first, ranks, device)
    if not any(sent for _, sent in answers):
        return None, False
    if any(text for text, _ in answers):
        raise _nothing_fits(first, answers, device)
    owed: ExpectedCollectives | None = None
    whole, why = False, ""
    try:
        owed, whole = _learned(step, run, sizes)
    except Unservable as error:
        why = str(error)
    learned = ranks.gather([why, whole], doing="the collectives of a step")
    reasons = [reason for reason, _ in learned if reason]
    if reasons:
        raise CollectivesError(
            f"trials of this step cannot run in this process under torch.distributed: {reasons[0]}. A rank "
            "that runs out of memory alone would leave the others waiting. Give find_batch_size a function "
            "that builds the workload, and isolate=True: each trial then has processes of its own."
        )
    return owed, not all(ended for _, ended in learned)


def _agreed(mine: list[object], first: Trial, ranks: Ranks, device: str) -> list[tuple[str, bool]]:
    doing = f"a first step of batch size {first.size}"
    if first.fits:
        return [(text, sends) for text, sends in ranks.gather(mine, doing=doing)]
    why = f"it ran out of memory in a first step of batch size {first.size}: {first.message}"[:500]
    try:
        answers = ranks.gather_or_leave(mine, doing=doing, within_s=PATIENCE_S, why=why)
        return [(text, sends) for text, sends in answers]
    except RankMissingError:
        pass
    # This rank has an OOM, and the others wait for it in a collective.
    answers = [("", True)] * ranks.world_size
    answers[ranks.rank] = (first.message, True)
    raise _nothing_fits(first, answers, device)


def _nothing_fits(first: Trial, answers: list[tuple[str, bool]], device: str) -> NothingFitsError:
    failed = [
        f"rank {rank} was out of memory in the first steps: {text}"
        for rank, (text, _) in enumerate(answers)
        if text
    ]
    used = first.reserved_bytes or first.peak_bytes or 0
    return NothingFitsError(first.size, device=device, budget_bytes=used, detail="; ".join(failed))


def _learned(step: Step, run: RunSteps, sizes: Sequence[int]) -> tuple[ExpectedCollectives, bool]:
    """The collectives of the steps, and whether all steps ended."""
    whole = True
    records: dict[int, list[list[CollectiveCall]]] = {}
    for size in sizes:
        seen: list[list[CollectiveCall]] = []
        counted = CountedStep(_recorded(step, seen), steps=_SETTLED)
        trial = run(counted, size, steps=_SETTLED)
        if trial.fits:
            if StepSends.learn({size: seen[-1]}) != StepSends.learn({size: seen[-2]}):
                raise Unservable("its steps do not all send the same")
            records[size] = seen
        elif records:  # the larger ones are for shapes that grow: without them none does
            counted.serve(ExpectedCollectives.learn(records), size)
            whole = False
    return ExpectedCollectives.learn(records), whole


def _recorded(step: Step, seen: list[list[CollectiveCall]]) -> Step:
    def recorded(size: int) -> object:
        before = counts()
        with recording() as calls:
            returned = step(size)
        sent = {name: count for name, count in begun_since(before).items() if count}
        kept = {name: sum(call.group == name for call in calls) for name in {call.group for call in calls}}
        if sent != kept:
            raise Unservable(f"its collectives were counted as {sent}, and seen as {kept}")
        seen.append(calls)
        return returned

    return recorded
