"""What the Trainer's loss of a part of a batch means for the loss of the batch.

Rules
- Two kinds. A loss divided by `num_items_in_batch` is a part of the batch's: parts add up. Any other is a
  mean of its own part, and counts by what it is a mean over: labels that are not -100, or samples.
- Which of them it is, is tried and not believed: Trainer takes any model whose `forward` has `**kwargs` for
  one that divides by `num_items_in_batch`, and many do not. What cannot be told counts as a mean where a
  batch is cut, and is given no number of items there, so that one that would divide by it is a mean too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

log = logging.getLogger("batchfit")

_IGNORED = -100


def rows_of(batch: Any) -> int:
    """How many samples a batch has: rows of its first tensor, or else items of its first list."""
    values = list(batch.values() if isinstance(batch, Mapping) else batch)
    for value in values:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return int(value.shape[0])
    for value in values:
        if isinstance(value, list):
            return len(value)
    raise TypeError(f"inputs must hold a tensor with one row a sample, not {type(batch).__name__}")


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


def shifts_labels(trainer: Any) -> bool:
    """Whether the first label of a sample is no target, as in causal language models."""
    if getattr(trainer, "_loss_shifts_labels", False):
        return True
    # Trainer's own answer goes by `config.loss_type`, which GPT-2, say, does not set.
    model = trainer.accelerator.unwrap_model(trainer.model)
    get_base = getattr(model, "get_base_model", None)  # of peft
    model = get_base() if callable(get_base) else model
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def count_labels(batch: Any, *, shifted: bool) -> Any:
    """What a mean loss of these samples divides by: labels that count, or samples where there are none."""
    labels = batch.get("shift_labels") if hasattr(batch, "get") else None
    if not isinstance(labels, torch.Tensor):
        labels = batch.get("labels") if hasattr(batch, "get") else None
        if shifted and isinstance(labels, torch.Tensor) and labels.dim() > 1:
            labels = labels[..., 1:]
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dim() == 0:
        return rows_of(batch)
    return labels.ne(_IGNORED).sum()


def divides_by_items(loss_of: Callable[[Any], torch.Tensor], items: Any) -> bool | None:
    """Whether a loss is divided by the number of items that it is given; None: it cannot be told.

    `loss_of(items)` is the loss of the same few samples each time, with the same random numbers.
    """
    found = []
    for factor in (1, 2, 1):
        try:
            with torch.no_grad():
                found.append(float(loss_of(items * factor).double().mean()))
        except Exception as error:  # noqa: BLE001 - a check that cannot be made says nothing
            log.debug(
                "whether the loss is divided by num_items_in_batch is not known: %s", type(error).__name__
            )
            return None
    once, half, again = found
    if not abs(once) > 0 or abs(once - again) > 1e-3 * abs(once):  # nan, zero, or another one each time
        return None
    if abs(half / once - 0.5) < 0.05:
        return True
    return False if abs(half / once - 1.0) < 0.05 else None
