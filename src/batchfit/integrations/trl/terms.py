"""Losses with several terms, each a mean over something else: what a microbatch adds to each of them.

Rules
- Microbatches are weighted by one thing, samples. A term that is a mean over tokens is scaled by what it
  misses, so that terms of all microbatches add up to that of the batch.
- A term that is no mean of anything (a router's load balance) is refused where a batch is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from batchfit.errors import BatchfitError
from batchfit.integrations.trl.trainers import name_of


@contextmanager
def patched(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an object has this attribute; afterwards the one of its own that it had, if any."""
    table, nothing = vars(holder), object()
    before = table.get(name, nothing)
    table[name] = value
    try:
        yield
    finally:
        if before is nothing:
            table.pop(name, None)
        else:
            table[name] = before


def samples_of(cut: Any) -> int:
    """The rows of a batch that has one per sample."""
    return next(len(one) for one in cut.values() if isinstance(one, torch.Tensor) and one.dim() > 0)


@contextmanager
def refuse_aux_loss(trainer: Any, cut: Any, micro: Any) -> Iterator[None]:
    """Refuse a load-balancing loss, or average it over microbatches where the user wants it cut."""
    if not getattr(trainer, "aux_loss_enabled", False):
        yield
        return
    if trainer._batchfit.options.compared == "error":
        raise BatchfitError(
            "the load-balancing loss of a mixture of experts compares all tokens of a batch, so this batch "
            "cannot be cut with the same gradients. Set router_aux_loss_coef=0.0, lower "
            "per_device_train_batch_size until a batch fits whole, or pass compared='warn' to adapt(): it is "
            "then the mean over microbatches, as with gradient accumulation"
        )
    # Where losses add up, TRL divides it by this; where they are means, by nothing, as is right.
    steps = samples_of(cut) / samples_of(micro)
    with patched(trainer, "current_gradient_accumulation_steps", steps):
        yield


def several_means(trainer: Any, inputs: Any) -> Callable[[Any, Any], AbstractContextManager[None]]:
    """ORPO and CPO: a mean over the tokens of chosen answers beside a mean over pairs."""
    whole = _chosen_tokens(trainer, inputs)
    pairs = len(inputs["chosen_labels"])

    @contextmanager
    def terms(_: Any, micro: Any) -> Iterator[None]:
        count, rows = _chosen_tokens(trainer, micro), len(micro["chosen_labels"])
        scale = share_of(count, whole, rows, pairs)
        forward = trainer.concatenated_forward

        def scaled(*given: Any, **named: Any) -> Any:
            found = list(forward(*given, **named))
            # A mean over no tokens is no number.
            found[4] = found[4].new_zeros(()) if count == 0 else found[4] * scale
            return tuple(found)

        with patched(trainer, "concatenated_forward", scaled):
            yield

    return terms


def share_of(tokens: int, all_tokens: int, rows: int, all_rows: int) -> float:
    """What a mean over tokens counts in the batch's, of a microbatch that counts by its rows."""
    return tokens * all_rows / (max(all_tokens, 1) * rows)


def _chosen_tokens(trainer: Any, inputs: Any) -> int:
    """What the mean over tokens of this trainer's loss divides by."""
    if name_of(trainer) == "ORPOTrainer" and not trainer.is_encoder_decoder:
        counted = inputs["chosen_attention_mask"].eq(1)  # prompt and answer
    else:
        counted = inputs["chosen_labels"].ne(-100)
    if not trainer.is_encoder_decoder:
        counted = counted[:, 1:]
    return int(counted.sum())
