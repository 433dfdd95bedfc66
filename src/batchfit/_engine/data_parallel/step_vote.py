"""One optimizer step that all ranks take, or none: this rank's part in the votes.

Rules
- As long as the others wait for a vote of this rank, it votes, also when it raises.
- An optimizer with collectives in its step is refused.
- Once parameters change and no copy can be restored, an error makes the rank leave: the others raise at their
  next vote.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final, Literal, Self, final

import torch
from torch.optim import Optimizer

from batchfit._engine.data_parallel.pure.protocol import StepVote
from batchfit._engine.data_parallel.rank_errors import give_up, text_of
from batchfit._engine.data_parallel.steps_taken import StepsTaken
from batchfit._engine.distributed.consensus import name_of
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import BatchfitError, RankFailedError, RanksDisagreeError

STEP: Final = "an optimizer step"


@final
class RankStep:
    """One optimizer step of one rank: as long as others wait for its vote, an error inside votes too."""

    def __init__(self, ranks: Ranks, steps: StepsTaken | None = None) -> None:
        self._ranks = ranks
        self._counting: AbstractContextManager[None] = nullcontext() if steps is None else steps.as_one()
        self._phase: Literal["before", "over", "moving"] = "before"

    def __enter__(self) -> Self:
        self._counting.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._counting.__exit__(kind, error, trace)
        if error is not None:
            self._give_up(error)

    def check(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse a step with collectives: a rank that has an OOM in it would leave the others waiting."""
        zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        kind = getattr(zero, "ZeroRedundancyOptimizer", None)
        for one in optimizers:
            inner = getattr(one, "optimizer", one)  # Accelerate's
            if kind is not None and isinstance(inner, kind):
                raise BatchfitError(
                    "ZeroRedundancyOptimizer sends parameters from rank to rank inside its step: a rank that "
                    "is out of memory there would leave the others waiting. Call optimizer.step() "
                    "yourself, or shard with FSDP2"
                )

    def vote(self, mine: StepVote) -> list[StepVote]:
        """All ranks' votes."""
        self._phase = "over"  # where it fails, all ranks raise
        entry = [mine.error, mine.out_of_memory, mine.protected]
        try:
            votes = [StepVote(*one) for one in self._ranks.gather(entry, doing=STEP)]
        except RanksDisagreeError as error:
            ahead = [rank for rank, point in enumerate(error.places) if point != STEP]
            if not ahead:
                raise
            raise RanksDisagreeError(
                f"{name_of(ahead)} went on to the next batch without this optimizer step, after an error "
                "between backward and step: no rank has stepped. Go on with the next batch",
                error.places,
            ) from None
        self._phase = "before"
        return votes

    def over(self) -> None:
        """All have taken the last decision of this step: whatever is raised now, no rank waits."""
        self._phase = "over"

    def failed(self, votes: Sequence[StepVote]) -> RankFailedError:
        """The error where others have failed."""
        return RankFailedError(
            [(rank, vote.error) for rank, vote in enumerate(votes) if vote.error], doing=STEP
        )

    def moves(self) -> None:
        """From here on no rank waits for this one before its next call, and no rank can undo."""
        self._phase = "moving"

    def _give_up(self, error: BaseException) -> None:
        """This rank raises: report it to the others."""
        if self._phase == "moving":
            self._ranks.leave(text_of(error))
            return
        is_oom = isinstance(error, torch.OutOfMemoryError)
        vote = (lambda text: self.vote(StepVote(text, is_oom))) if self._phase == "before" else None
        give_up(self._ranks, error, vote)
