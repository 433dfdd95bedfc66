"""Why nothing fits: how much memory is held already, and by which tensors.

Rules
- Where tensors that are no part of the batch hold all that may be used, no size is run.
- The models' own memory (weights, gradients, buffers) is counted apart from that of other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from batchfit._engine.device.tensors import leaves_of
from batchfit._units import format_bytes
from batchfit.errors import NothingFitsError

_OTHERS = "Free other tensors (optimizer state counts too), or raise the budget."


def owned_bytes(models: Sequence[Any], kind: str) -> int:
    """What the models hold on devices of that kind: each storage once."""
    _, tables, modules = leaves_of(models)
    tensors = [model for model in models if isinstance(model, torch.Tensor)]
    tensors += [one for module in modules for one in module._parameters.values() if one is not None]
    tensors += [one.grad for one in tensors if one.grad is not None]
    tensors += [one for table in tables for one in table.values() if isinstance(one, torch.Tensor)]
    sizes: dict[int, int] = {}
    for held in tensors:
        tensor = getattr(held, "_local_tensor", held)  # of a DTensor, this rank's part
        if tensor.device.type == kind and tensor.layout is torch.strided and not tensor.is_nested:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def nothing_fits(
    what: str, *, device: str, limit_bytes: int, held_bytes: int | None, models_bytes: int, message: str = ""
) -> NothingFitsError:
    """The error for `what` (a batch and its shape), with what holds the memory."""
    parts, advice = [], ""
    if held_bytes is not None:
        others = max(0, held_bytes - models_bytes)
        parts.append(
            f"{format_bytes(held_bytes)} was held before it began, {format_bytes(models_bytes)} by the "
            f"models and {format_bytes(others)} by other tensors"
        )
        # Where the larger part is not the models', a smaller model is not what helps.
        if others > max(models_bytes, limit_bytes // 2) or held_bytes >= limit_bytes:
            advice = _OTHERS
    parts.append(what)
    if message:
        parts.append(whole_sentences(message))
    return NothingFitsError(
        1, device=device, budget_bytes=limit_bytes, detail="; ".join(parts), advice=advice
    )


def whole_sentences(text: str) -> str:
    """Without the last sentence or clause where the text was cut off inside it."""
    if not text.endswith("..."):
        return text
    end = max(text.rfind(". ", 0, -3), text.rfind("; ", 0, -3))
    return text if end < 0 else text[:end]
