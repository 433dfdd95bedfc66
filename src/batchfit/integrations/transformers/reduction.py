"""Whether losses of microbatches add up to the loss of their batch, or are means.

Rules
- `trainer.loss_is_scaled_for_ga` decides where it is set. Else the loss of two samples is probed with `n` and
  `2 n` items, at most three times per run; all ranks agree on the most doubtful answer.
- Where the probe has no answer and a batch is cut, microbatches count as means, and one warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import batchfit
from batchfit.integrations.transformers.losses import (
    FACTORS,
    UNKNOWN,
    divides_by_items,
    scales_with_items,
)
from batchfit.integrations.transformers.probing import evaluating, same_random_numbers, uncounted
from batchfit.integrations.transformers.sharding import is_sharded
from batchfit.integrations.trl.cutting import CutBatch

log = logging.getLogger("batchfit")

_PROBED_ROWS = 2
_MOST_PROBES = 3
_ANSWERS = (False, None, True)  # the smallest index of all ranks counts


def adds_up(trainer: Any, batch: CutBatch, items: Any) -> bool:
    """Whether losses of microbatches of this batch add up to its loss; the same on all ranks."""
    run, given = trainer._batchfit, getattr(trainer, "loss_is_scaled_for_ga", None)
    if given is not None or items is None:
        return bool(given)
    if not _takes_items(trainer):
        return False
    if run.sums is None and run.probes < _MOST_PROBES:
        run.probes += 1
        answer = torch.tensor(_ANSWERS.index(_probe(trainer, batch, items)), device=trainer.args.device)
        if trainer.args.world_size > 1:
            answer = trainer.accelerator.gather(answer).min()
        run.sums = _ANSWERS[int(answer)]
        if run.sums is False and trainer.is_world_process_zero():
            log.warning(
                "the loss of %s does not divide by num_items_in_batch, although Trainer assumes it: batchfit "
                "takes it for a mean. (Trainer's own accumulation would add such means up.)",
                type(trainer.model).__name__,
            )
    return bool(run.sums)


def items_of(trainer: Any, micro: Any, batch: CutBatch, items: Any, *, sums: bool) -> Any:
    """The number of items that a microbatch's loss is given: none where it is to be a mean."""
    if not sums and _is_unknown(trainer) and trainer.args.world_size == 1 and batch.is_whole(micro):
        return items  # a batch that is not cut: the Trainer's own loss, whatever it is
    return items if sums else None


def warn_of_unknown(trainer: Any) -> None:
    """Warn once where a batch was cut whose loss could not be classified."""
    run = trainer._batchfit
    if _is_unknown(trainer) and not run.has_warned and trainer.is_world_process_zero():
        run.has_warned = True
        log.warning(
            "cannot determine whether the loss of %s divides by num_items_in_batch (it is zero, not finite, "
            "or different each time), and the batch is cut: microbatches count as means over labels. Set "
            "trainer.loss_is_scaled_for_ga, True where it divides and False for a mean",
            type(trainer.model).__name__,
        )


def _takes_items(trainer: Any) -> bool:
    return trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None


def _is_unknown(trainer: Any) -> bool:
    """Whether neither the user nor a probe says if the loss divides by the number of items."""
    is_set = getattr(trainer, "loss_is_scaled_for_ga", None) is not None
    return _takes_items(trainer) and not is_set and trainer._batchfit.sums is None


def _probe(trainer: Any, batch: CutBatch, items: Any) -> bool | None:
    if not hasattr(batch.cut, "items"):
        return None
    rows = trainer._prepare_inputs(batch.few(_PROBED_ROWS))
    answers: list[bool | None] = []

    def loss_of(micro: Any, count: Any) -> Any:
        with same_random_numbers(trainer.args.device), trainer.compute_loss_context_manager():
            return trainer.compute_loss(trainer.model, dict(micro), num_items_in_batch=count)

    def once(batch_size: int) -> None:
        if not answers:
            with evaluating(trainer.model), uncounted(trainer):
                if is_sharded(trainer.model):
                    answers.append(_probe_together(trainer.model, rows, loss_of, items))
                else:
                    answers.append(divides_by_items(lambda count: loss_of(rows, count), items))

    state = trainer._batchfit.options.state
    if state:  # a search of one size, since that restores everything
        work = batchfit.Workload(once, state=list(state))
        batchfit.find_batch_size(work, max_size=1, steps=2, soak_steps=0, predict=False)
    else:
        once(1)
    return answers[0]


def _probe_together(
    model: nn.Module, rows: Any, loss_of: Callable[[Any, Any], Any], items: Any
) -> bool | None:
    """Whether losses divide by the number of items, where a forward of one rank waits for the others.

    All ranks run the same forwards, also where one of them fails: `Microbatcher.map` sees to that.
    """

    def losses(micro: Any) -> torch.Tensor:
        return torch.stack([loss_of(micro, items * factor).double().mean() for factor in FACTORS])[None]

    # One sample for the Microbatcher, which cannot be cut: rows may be pairs, or sequences in one row.
    microbatcher = batchfit.Microbatcher(model, split=lambda batch, sizes: [batch], count=lambda batch: 1)
    try:
        (found,) = microbatcher.map(losses, rows).tolist()
    except Exception as error:
        # Not None, as in one process: a rank that has failed alone would go on, and the others wait for it.
        error.add_note(
            f"batchfit: {UNKNOWN}, and under FSDP2 the loss of a few samples must run on all ranks. Set "
            "trainer.loss_is_scaled_for_ga, True where it divides and False for a mean"
        )
        raise
    return scales_with_items(*found)
