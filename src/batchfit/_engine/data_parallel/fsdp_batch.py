"""One pass of this rank where all ranks run the same number of microbatches.

Rules
- A rank that has fewer microbatches fills up with one sample whose loss has no weight, before its own:
  buffers and random numbers are restored after it.
- Nothing here has collectives except through the models (`fsdp` agrees and votes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch
from batchfit._engine.batch.transfer import feed
from batchfit._engine.data_parallel.fsdp_models import Shards
from batchfit._engine.data_parallel.interface import BatchWork, PlannedPass

_MOST_SAMPLES: Final = 256  # among which one with weight is searched


@final
class FsdpPass:
    """All microbatches of a pass: first those without weight, then this rank's own."""

    def __init__(
        self, work: BatchWork, plan: Sequence[Microbatch], count: int, *, spare: Any, models: Shards
    ) -> None:
        self._work = work
        self._plan = plan
        self._spare = spare  # a microbatch without weight
        self._models = models
        self.count = count
        self.made: PlannedPass | None = None

    def __call__(self) -> None:
        work = self._work
        self.made = work.prepare(self._plan) if self._plan else None
        missing = self.count - (0 if self.made is None else self.made.count)
        if missing:
            for micro in feed([self._spare] * missing, work.device):
                self._models.reshard()
                work.run_without_weight(micro, self._models.gathered_parameters)
                del micro
            work.undo.restore(gradients=False)
        if self.made is not None:
            self.made()
        self._models.reshard()

    @property
    def at(self) -> int:
        return -1 if self.made is None else self.made.at


def sample_of(whole: Batch, weigh: Callable[[Any], float] | None, *, times: int) -> Any:
    """A microbatch of one sample that has weight (its loss is a number then); None where none is found.

    `times`: how often the sample is in it. Where samples cannot be picked, it is the first ones.
    """
    for at in range(min(whole.length, _MOST_SAMPLES if whole.can_take and weigh is not None else 1)):
        if whole.can_take:
            micro = whole.take([at] * times, None if whole.trimmer is None else whole.trimmer.padded_length)
        else:
            first = min(times, whole.length)
            micro = whole.cut([first, whole.length - first] if whole.length > first else [first])[0]
        if weigh is None or weigh(micro):
            return micro
    return None
