"""One prediction of all ranks, from those that each has made alone.

Rules
- Tracing talks to nobody; then all ranks tell what they have found, and all return the same: that of the rank
  on which the fewest samples fit, and for each budget the fewest that fit anywhere.
- Nothing fits on one rank: that is everyone's answer. An error that is not that comes out unchanged on the
  rank where it was raised, and as `RankFailedError` on the others; all can go on, and measure instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from batchfit._engine.device import oom
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import BatchfitError, NothingFitsError, RankFailedError, RanksDisagreeError
from batchfit.results import Prediction

_DOING: Final = "a prediction"


def joint(predict: Callable[[], Prediction], ranks: Ranks) -> Prediction:
    """What `predict` answers, the same on all ranks; they call this together. In one process: its answer."""
    if ranks.world_size == 1:
        return predict()
    try:
        told: dict[str, Any] = {"answer": predict().to_json()}
    except NothingFitsError as error:
        names = ("device", "budget_bytes", "peak_bytes", "state_bytes")
        numbers = {name: getattr(error, name) for name in names}
        told = {"nothing": [error.size, numbers]}
    except Exception as error:
        try:
            ranks.gather({"error": oom.describe(error)}, doing=_DOING)
        except BatchfitError as other:
            error.add_note(f"batchfit: the other ranks could not be told: {other}")
        raise
    except BaseException as error:
        ranks.leave(type(error).__name__)
        raise
    everyone = ranks.gather(told, doing=_DOING)
    failed = [(rank, one["error"]) for rank, one in enumerate(everyone) if "error" in one]
    if failed:
        raise RankFailedError(failed, doing=_DOING)
    for rank, one in enumerate(everyone):
        if "nothing" in one:
            size, numbers = one["nothing"]
            raise NothingFitsError(size, **numbers, detail=f"predicted on rank {rank}")
    return _least([Prediction.from_json(one["answer"]) for one in everyone])


def _least(predictions: list[Prediction]) -> Prediction:
    budgets = [len(one.answers) for one in predictions]
    if len(set(budgets)) > 1:
        raise RanksDisagreeError(f"all ranks must predict for as many budgets, not {budgets}")
    chosen = min(predictions, key=lambda one: one.batch_size)
    beside = zip(*(one.answers for one in predictions), strict=True)
    answers = tuple(min(alike, key=lambda one: one.batch_size) for alike in beside)
    samples = min((one.samples for one in predictions if one.samples is not None), default=None)
    return chosen.model_copy(update={"answers": answers, "samples": samples})
