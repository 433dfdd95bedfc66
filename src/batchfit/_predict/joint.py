"""One prediction of all ranks: they predict together, and all return the answer of the one with the fewest.

Rules: those of `predict.py` about ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from batchfit._engine.device import oom
from batchfit._engine.distributed.ranks import Ranks
from batchfit.errors import BatchfitError, NothingFitsError, RankFailedError, RanksDisagreeError
from batchfit.results import Prediction

_DOING: Final = "a prediction"
# What the error of one rank says on all.
_OF_ERROR: Final = (
    *("device", "budget_bytes", "peak_bytes", "state_bytes"),
    *("holders", "changes", "changed_bytes", "tried", "traced"),
)


def joint(predict: Callable[[], Prediction], ranks: Ranks) -> Prediction:
    """What `predict` answers, the same on all ranks; they call this together."""
    try:
        mine: dict[str, Any] = {"answer": predict().to_json()}
    except NothingFitsError as error:
        numbers = {name: getattr(error, name) for name in _OF_ERROR}
        mine = {"nothing": [error.size, numbers]}
    except Exception as error:
        try:
            ranks.gather({"error": oom.describe(error)}, doing=_DOING)
        except BatchfitError as other:
            error.add_note(f"batchfit: the other ranks could not be notified: {other}")
        raise
    except BaseException as error:
        ranks.leave(type(error).__name__)
        raise
    everyone = ranks.gather(mine, doing=_DOING)
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
