"""The outputs of an evaluation's microbatches, joined to those of their batch.

Rules
- Rows are joined in order (by `Microbatcher.map`). The loss and other single values of a microbatch (a
  router's `aux_loss`) are repeated per sample, and reduced to one value of the batch.
- Losses are weighted by labels, or added up where they are divided by the batch's number of items. Other
  single values are means over samples.
- Generated sequences have different lengths per microbatch, and are padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def per_sample(node: Any, count: int) -> Any:
    """The outputs of a microbatch, its single values repeated per sample in a mapping that marks them."""
    if isinstance(node, torch.Tensor) and node.dim() == 0:
        return {_SINGLE: node.detach().expand(count)}
    has_rows = isinstance(node, torch.Tensor) and len(node) % count == 0 and len(node) > 0
    if not has_rows and node is not None and type(node) not in (list, tuple, dict):
        return {_WHOLE: [node] * count}
    return _inside(node, lambda one: per_sample(one, count))


def of_the_batch(node: Any) -> Any:
    """The joined outputs, with single values where the microbatches had some."""
    if isinstance(node, Mapping) and set(node) == {_SINGLE}:
        values = node[_SINGLE]
        if (values == values[0]).all():  # one microbatch, or the same value in all: bit for bit
            return values[0]
        return values.double().mean().to(values.dtype)
    if isinstance(node, Mapping) and set(node) == {_WHOLE}:
        values = node[_WHOLE]
        if any(value is not values[0] for value in values):
            raise ValueError(
                "outputs must have one row per sample where a batch is cut, and a "
                f"{type(values[0]).__name__} has not: name it in ignore_keys"
            )
        return values[0]
    return _inside(node, of_the_batch)


_SINGLE = "batchfit: one value of the whole batch"
_WHOLE = "batchfit: not one row per sample"  # kept where a batch is not cut


def _inside(node: Any, change: Callable[[Any], Any]) -> Any:
    """The same nesting of tuples, lists and dicts, as Trainer supports."""
    if type(node) in (list, tuple):
        return type(node)(change(one) for one in node)
    if type(node) is dict:
        return {name: change(one) for name, one in node.items()}
    return node


def loss_rows(loss: torch.Tensor, weight: Any, count: int) -> torch.Tensor:
    """The loss of a microbatch per sample, beside the sample's share of the microbatch's weight."""
    # A bfloat16 cannot count, and a float32 would round the loss of a batch that is not cut.
    kind = torch.float32 if loss.device.type == "mps" else torch.float64
    share = torch.as_tensor(weight, device=loss.device, dtype=kind) / count
    return torch.stack([loss.detach().to(kind), share]).expand(count, 2)


def loss_of_rows(rows: torch.Tensor, *, adds: bool, dtype: torch.dtype) -> torch.Tensor:
    """The loss of the batch, in the dtype of the microbatches' losses."""
    losses, shares = rows.unbind(1)
    total = torch.where(shares == 0, 0.0, losses * shares).sum()
    return (total if adds else total / shares.sum()).to(dtype)


def padded_rows(trainer: Any, rows: list[torch.Tensor]) -> torch.Tensor:
    """Generated sequences as one tensor, padded as the trainer pads them."""
    widest = max(row.shape[-1] for row in rows)
    padded = [
        row[None] if row.shape[-1] == widest else trainer._pad_tensors_to_max_len(row[None], widest)
        for row in rows
    ]
    return torch.cat(padded)
