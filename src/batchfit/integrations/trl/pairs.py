"""Batches of DPO and reward trainers: a chosen and a rejected row per pair, which stay together.

Rules
- TRL puts all chosen rows first, and all rejected ones after them. A microbatch has the same order.
- What has one row per pair (log-probabilities of the reference, margins) is cut with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from batchfit.errors import BatchfitError
from batchfit.integrations.trl.terms import patched, share_of
from batchfit.integrations.trl.trainers import name_of

# Losses of DPO that sort the log-probabilities of a batch.
_SORTING = ("aot", "aot_unpaired")


def paired(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch with one row per pair; rows that come in twos have two as their second dimension."""
    rows = len(inputs["input_ids"])
    found = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == rows:
            value = value.reshape(2, rows // 2, *value.shape[1:]).transpose(0, 1)
        found[name] = value
    return found


def unpaired(cut: dict[str, Any]) -> dict[str, Any]:
    """Some pairs, as TRL takes them: chosen rows first."""
    rows = len(cut["input_ids"])
    twos = cut["input_ids"].dim()  # of what is one row per sequence: pair, two, tokens
    found = {}
    for name, value in cut.items():
        if isinstance(value, torch.Tensor) and value.dim() >= twos and value.shape[1] == 2:
            value = value.transpose(0, 1).reshape(2 * rows, *value.shape[2:])
        found[name] = value
    return found


def pair_terms(trainer: Any, cut: dict[str, Any]) -> Callable[[Any], AbstractContextManager[None]] | None:
    """What makes DPO's loss of a microbatch exact; None where it is a mean over pairs as it stands."""
    if name_of(trainer) != "DPOTrainer" or "sft" not in trainer.loss_types:
        return None
    tokens = cut["completion_mask"][:, 0, 1:].sum(1)
    counts: list[int] = []

    @contextmanager
    def terms(micro: Any) -> Iterator[None]:
        if not counts:
            counts.extend(tokens.tolist())
        count = int(micro["completion_mask"][:, 0, 1:].sum())
        scale = share_of(count, sum(counts), len(micro["completion_mask"]), len(counts))
        pairs = list(zip(trainer.loss_types, trainer.loss_weights, strict=True))
        # A mean over no tokens is no number.
        kept = [(kind, one) for kind, one in pairs if kind != "sft" or count > 0]
        with ExitStack() as stack:
            stack.enter_context(patched(trainer, "loss_types", [kind for kind, _ in kept]))
            scaled = [one * scale if kind == "sft" else one for kind, one in kept]
            stack.enter_context(patched(trainer, "loss_weights", scaled))
            yield

    return terms


def refuse_sorting(trainer: Any) -> None:
    """Refuse to cut a batch with a loss of DPO that compares its pairs."""
    name = next((one for one in getattr(trainer, "loss_types", ()) if one in _SORTING), None)
    if name is None:
        return
    raise BatchfitError(
        f"loss_type={name!r} sorts the log-probabilities of a batch, so its pairs are compared with each "
        "other, and the batch cannot be cut with the same gradients. Lower per_device_train_batch_size until "
        "it fits whole (precompute_ref_log_probs=True and gradient_checkpointing=True save memory), or use a "
        "loss over single pairs ('sigmoid')"
    )
