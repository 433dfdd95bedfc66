"""How the Trainer's loss of a microbatch contributes to the loss of the batch.

Rules
- Two kinds. Losses that are divided by `num_items_in_batch` add up. Any other loss is a mean over its
  microbatch, and is weighted by what it is a mean over: labels that are not -100, or samples.
- A batch in one row counts its labels when it is made into units of sequences (`integrations.trl.packed`).
- A probe decides which kind it is: Trainer assumes that any model whose `forward` has `**kwargs` divides by
  `num_items_in_batch`, and many do not. A loss of unknown kind counts as a mean where a batch is cut, and
  gets no number of items there, so that a loss that would divide by it is a mean too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from batchfit.integrations.trl.cutting import CutBatch, open_batch
from batchfit.integrations.trl.packed import LABEL_COUNT

log = logging.getLogger("batchfit")

_IGNORED = -100
FACTORS = (1, 2, 1)  # of the number of items, with which the loss of the same samples is computed
UNKNOWN = "whether the loss is divided by num_items_in_batch is not known"


def rows_of(batch: Any) -> int:
    """How many samples a batch has: rows of its first tensor, or else items of its first list."""
    values = list(batch.values() if isinstance(batch, Mapping) else batch)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    for value in values:
        if isinstance(value, list):
            return len(value)
    raise TypeError(f"inputs must hold a tensor with one row per sample, not {type(batch).__name__}")


def first_rows(batch: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The first samples of a batch, in a new dict: `compute_loss` may take entries out of it."""
    rows = rows_of(batch)

    def cut(value: Any) -> Any:
        is_rows = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
        return value[:count] if is_rows else value

    return {name: cut(value) for name, value in batch.items()}


def is_whole(micro: Any, batch: Any) -> bool:
    """Whether a microbatch is all of its batch."""
    return hasattr(batch, "items") and rows_of(micro) == rows_of(batch)


def opened(trainer: Any, model: Any, inputs: Any, *, trains: bool = True) -> CutBatch:
    """How a batch of this trainer is cut into microbatches."""
    plain = CutBatch(
        inputs,
        lambda micro: micro,
        lambda micro: is_whole(micro, inputs),
        lambda micro: nullcontext(),
        lambda samples: first_rows(inputs, samples),
    )
    return open_batch(trainer, model, inputs, plain, trains=trains)


def shifts_labels(trainer: Any) -> bool:
    """Whether the first label of a sample is not a target, as in causal language models."""
    if getattr(trainer, "_loss_shifts_labels", False):
        return True
    # Trainer's own flag depends on `config.loss_type`, which GPT-2, for example, does not set.
    model = trainer.accelerator.unwrap_model(trainer.model)
    get_base = getattr(model, "get_base_model", None)  # of peft
    model = get_base() if callable(get_base) else model
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def count_labels(batch: Any, *, shifted: bool) -> Any:
    """The number that a mean loss divides by: labels that are not ignored, or samples without labels."""
    if isinstance(batch, Mapping) and LABEL_COUNT in batch:
        return batch[LABEL_COUNT].sum()
    labels = batch.get("shift_labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor):
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if shifted and isinstance(labels, torch.Tensor) and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return rows_of(batch)
    return labels.ne(_IGNORED).sum()


def divides_by_items(loss_of: Callable[[Any], torch.Tensor], items: Any) -> bool | None:
    """Whether a loss is divided by the number of items that it is given; None: not known.

    `loss_of(items)` is the loss of the same few samples each time, with the same random numbers.
    """
    found = []
    for factor in FACTORS:
        try:
            with torch.no_grad():
                found.append(float(loss_of(items * factor).double().mean()))
        except Exception as error:  # noqa: BLE001 - a check that cannot be made says nothing
            log.debug("%s: %s", UNKNOWN, type(error).__name__)
            return None
    return scales_with_items(*found)


def scales_with_items(once: float, half: float, again: float) -> bool | None:
    """Whether losses with `FACTORS` times the items are divided by their number; None: not known."""
    if not abs(once) > 0 or abs(once - again) > 1e-3 * abs(once):  # nan, zero, or another one each time
        return None
    if abs(half / once - 0.5) < 0.05:
        return True
    return False if abs(half / once - 1.0) < 0.05 else None
