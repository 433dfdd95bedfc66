"""Which trainers of TRL are known, and what is refused before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from batchfit.errors import BatchfitError

KNOWN = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "ORPOTrainer", "CPOTrainer")
_GENERATES = "a step generates completions, and keeps them for later steps"
_REFUSED = dict.fromkeys(("DistillationTrainer", "GKDTrainer", "OnlineDPOTrainer"), _GENERATES)
_PAIRS = ("DPOTrainer", "RewardTrainer")


def name_of(trainer: Any) -> str | None:
    """The class of TRL that a trainer is, or is made from; None for any other trainer."""
    for kind in type(trainer).__mro__:
        if kind.__module__.partition(".")[0] == "trl" and not kind.__name__.startswith("_"):
            return str(kind.__name__)
    return None


def trains_on_pairs(trainer: Any) -> bool:
    """Whether each sample is two rows of a batch."""
    return name_of(trainer) in _PAIRS


def has_pairs(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the rows of this batch are pairs; an error where they should be, and are not."""
    if not trains_on_pairs(trainer):
        return False
    ids = inputs.get("input_ids")
    if not isinstance(ids, torch.Tensor) or len(ids) % 2:
        raise BatchfitError(
            f"a batch of {name_of(trainer)} must hold input_ids with the chosen rows first and the rejected "
            "ones after them, as TRL 1.16 makes it. With another version, or a collator of your own, train "
            "without adapt"
        )
    return True


def flattens(trainer: Any) -> bool:
    """Whether the collator of this trainer joins all samples of a batch in one row."""
    collator = getattr(trainer, "data_collator", None)
    if type(collator).__name__ == "DataCollatorWithFlattening":
        return True
    return any(getattr(one, "padding_free", False) is True for one in (trainer, collator))


def check_trl(trainer: Any, *, weight: object, lengths: object) -> None:
    """Refuse trainers of TRL whose batches cannot be cut, and options that cannot be meant for theirs."""
    name = name_of(trainer)
    if name is not None and name not in KNOWN:
        why = _REFUSED.get(name, "batchfit does not know how its batches are made")
        raise BatchfitError(
            f"adapt() cannot cut the batches of {name} into microbatches: {why}. Train without adapt; "
            "against an OOM lower per_device_train_batch_size and raise gradient_accumulation_steps by the "
            "same factor, or set gradient_checkpointing=True"
        )
    if trains_on_pairs(trainer) or flattens(trainer):
        what = "sequences joined in one row" if flattens(trainer) else "pairs"
        for option, given in (("weight", weight), ("lengths", lengths)):
            if given is not None:
                raise ValueError(
                    f"{option} must be None where batches are of {what}, not {given!r:.80}: they are "
                    "weighted and cut as the trainer's loss requires"
                )
    if trains_on_pairs(trainer):
        _check_pairs(trainer)


def _check_pairs(trainer: Any) -> None:
    """Refuse what cannot be exact in the batches of a trainer that compares two answers."""
    if getattr(trainer, "_is_vision_dataset", False):
        raise BatchfitError(
            "images of a batch of pairs are not rows of it, so it cannot be cut. Train without adapt; "
            "against an OOM lower per_device_train_batch_size and raise gradient_accumulation_steps by the "
            "same factor"
        )
    if getattr(trainer, "use_weighting", False) and "sft" in getattr(trainer, "loss_types", ()):
        raise BatchfitError(
            "use_weighting=True multiplies the mean of loss_type 'sft' by weights of single pairs, so a "
            "batch cannot be cut with the same gradients. Leave one of them out"
        )
