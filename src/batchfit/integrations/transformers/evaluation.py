"""An evaluation batch in microbatches: what `Trainer.prediction_step` returns for the whole of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.integrations.transformers.comparing import predict_compared
from batchfit.integrations.transformers.losses import count_labels, opened, rows_of, shifts_labels
from batchfit.integrations.transformers.predictions import (
    loss_of_rows,
    loss_rows,
    of_the_batch,
    padded_rows,
    per_sample,
)
from batchfit.integrations.transformers.reduction import adds_up, items_of
from batchfit.integrations.transformers.sharding import is_sharded
from batchfit.integrations.trl.packed import is_packed


def predict_in_microbatches(
    trainer: Any, step: Any, model: nn.Module, inputs: Any, *, items: Any, loss_only: bool, **options: Any
) -> Any:
    """Loss, logits and labels; `step` is the trainer's own `prediction_step`, `items` those of the batch."""
    run = trainer._batchfit
    compared = run.comparing_step(trainer, model, inputs, trains=False)
    if compared is not None:
        options["prediction_loss_only"] = loss_only
        return predict_compared(trainer, compared, step, model, inputs, **options)
    if not loss_only and is_packed(trainer, inputs):  # its outputs have no rows
        return step(model, inputs, loss_only, **options)
    shifted = shifts_labels(trainer)
    batch = opened(trainer, model, inputs, trains=False)
    sums = adds_up(trainer, batch, items)
    generates = getattr(trainer.args, "predict_with_generate", False) and not loss_only
    if generates and is_sharded(model):  # each token is a forward with collectives: how many, samples decide
        return step(model, inputs, loss_only, **options)
    dtypes: set[torch.dtype] = set()

    def predict(micro: Any) -> dict[str, Any]:
        # Not in inference mode, unlike other uses of `map`: what a model caches is for training too.
        with torch.inference_mode(mode=False), torch.no_grad():
            given = items_of(trainer, micro, batch, items, sums=sums)
            with run.evaluating_with(given), batch.exact(micro):
                loss, logits, labels = step(model, batch.restored(micro), loss_only, **options)
            logits, labels = batch.outputs_of(logits), batch.outputs_of(labels)
            adds, count = run.was_asked and sums, rows_of(micro)
            if loss is not None:
                dtypes.add(loss.dtype)
                loss = loss_rows(loss, 1 if adds else count_labels(micro, shifted=shifted), count)
            if generates and isinstance(logits, torch.Tensor):
                logits = list(logits.unbind(0))  # as long as each microbatch made them
            else:
                logits = per_sample(logits, count)
            return {"loss": loss, "adds": adds, "logits": logits, "labels": labels}

    with run.deferring_logs(trainer.log):
        found = run.evaluator_of(trainer, model).map(predict, batch.cut)
    loss, logits = found["loss"], found["logits"]
    if loss is not None:
        loss = loss_of_rows(loss, adds=found["adds"], dtype=dtypes.pop())
    is_ragged = generates and isinstance(logits, list)
    logits = padded_rows(trainer, logits) if is_ragged else of_the_batch(logits)
    return loss, batch.joined(logits), batch.joined(found["labels"])
