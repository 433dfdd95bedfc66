"""Batches whose loss compares their samples: encoded in microbatches, one loss for all.

Rules: the own `training_step` and `prediction_step` of the trainer compute the loss, from embeddings.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.integrations.sentence_transformers import ComparingStep


def compared_loss(trainer: Any, compared: ComparingStep, model: nn.Module, embeddings: Any) -> torch.Tensor:
    """The loss of a batch, from its embeddings."""
    step = trainer._batchfit_own_step
    return compared.mean_loss(embeddings, lambda inputs: trainer._batchfit_loss(step, model, inputs, None))


def run_compared(
    trainer: Any, compared: ComparingStep, microbatcher: Any, model: nn.Module, inputs: Any
) -> Any:
    """Forward and backward of a batch; its `StepReport`."""
    return microbatcher.backward_cached(
        compared.encode_to_train,
        lambda embeddings: compared_loss(trainer, compared, model, embeddings),
        inputs,
        scaler=trainer.accelerator.scaler,
    )


def predict_compared(
    trainer: Any, compared: ComparingStep, step: Any, model: nn.Module, inputs: Any, **options: Any
) -> Any:
    """What the trainer's own `prediction_step` returns for a batch."""
    with trainer._batchfit.deferring_logs(trainer.log), torch.inference_mode(mode=False), torch.no_grad():
        embeddings = trainer._batchfit.evaluator_of(trainer, model).map(compared.encode, inputs)
        return compared.loss(embeddings, lambda inputs: step(model, inputs, **options))
