"""Which of TRL's trainers generate their batches, and settings of theirs that batchfit cannot work with.

Rules: refused before anything runs; an error names the setting, and what to do.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any, Final

from batchfit.errors import BatchfitError

log = logging.getLogger("batchfit")

_GENERATING: Final = ("GRPOTrainer", "RLOOTrainer")
_IMAGES: Final = ("pixel_values", "num_images", "image_grid_thw", "image_position_ids")


def generates(kind: type) -> bool:
    """Whether a trainer of this class generates completions, and trains on them."""
    return any(
        one.__name__ in _GENERATING and one.__module__.partition(".")[0] == "trl" for one in kind.__mro__
    )


def check_generating(trainer: Any, options: Any) -> None:
    """Refuse settings of a trainer that generates, where batchfit cannot work with them."""
    if not generates(type(trainer)):
        return
    name = next(one.__name__ for one in type(trainer).__mro__ if one.__name__ in _GENERATING)
    turn = getattr(type(trainer), "_generate_single_turn", None)
    if turn is None or "prompt_ids" not in inspect.signature(turn).parameters:
        raise BatchfitError(
            f"adapt() takes part in the phases of {name} as TRL 1.16 has them, and this one has no "
            "_generate_single_turn(prompt_ids, ...): pip install 'trl>=1.16', or train without adapt"
        )
    if getattr(trainer, "_batchfit_merges", False):
        raise BatchfitError(
            f"a {name} generates its batches, which BatchfitMixin alone does not know: make the trainer "
            "without it, and call batchfit.integrations.transformers.adapt(trainer)"
        )
    if trainer.is_fsdp_enabled:
        raise BatchfitError(
            f"under FSDP2 each token that {name} generates is a forward with collectives, and ranks that cut "
            "their prompts otherwise would wait for each other. Use DDP, or train without adapt"
        )
    why = {
        "schedule": f"the batches of {name} are parts of one generation, of whole groups of num_generations "
        "completions. Train without schedule=",
        "lengths": "prompts are padded on the left and completions on the right. Train without lengths=",
        "weight": f"microbatches are weighed by what the loss of {name} divides by. Train without weight=",
    }
    for option, reason in why.items():
        if getattr(options, option) is not None:
            raise ValueError(f"{option} must be None with {name}: {reason}")
    images = {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ())
    if images:
        raise _cannot_cut_images(min(images))
    if getattr(trainer, "use_vllm", False) and trainer.vllm_mode == "colocate" and options.budget is None:
        raise BatchfitError(
            "vllm_mode='colocate' takes vllm_gpu_memory_utilization of the GPU, and gives it back and takes "
            "it again where it sleeps, so what is free now is not what training may use. Pass "
            "adapt(trainer, budget=...), what vLLM leaves, or set vllm_mode='server'"
        )
    if trainer.args.world_size > 1 and needs_whole_loss(trainer):
        raise BatchfitError(
            "entropy_coef, use_adaptive_entropy and top_entropy_quantile < 1 compare all tokens of a batch, "
            "with collectives in the loss: on several ranks a rank that retries would wait for the others. "
            "Set entropy_coef=0.0, use_adaptive_entropy=False and top_entropy_quantile=1.0, or use one GPU"
        )
    if needs_whole_loss(trainer) and trainer.aux_loss_enabled:
        raise BatchfitError(
            "router_aux_loss_coef with entropy_coef, use_adaptive_entropy or top_entropy_quantile < 1: a "
            "batch with both cannot be run in microbatches. Set router_aux_loss_coef=0.0, or leave out the "
            "others"
        )


def needs_whole_loss(trainer: Any) -> bool:
    """Whether the loss has terms over the tokens of the whole batch, beside the one that divides it."""
    return bool(getattr(trainer, "_entropy_bonus_enabled", False)) or (
        getattr(trainer, "top_entropy_quantile", 1.0) < 1.0
    )


def check_images(inputs: Mapping[str, Any]) -> None:
    """Refuse batches with images, which tools may return too."""
    found = [name for name in _IMAGES if inputs.get(name) is not None]
    if found:
        raise _cannot_cut_images(found[0])


def _cannot_cut_images(name: str) -> BatchfitError:
    return BatchfitError(
        f"adapt() cannot cut batches with images ({name}) of a trainer that generates: their patches are not "
        "rows of the batch. Train without adapt; against an OOM lower per_device_train_batch_size and raise "
        "gradient_accumulation_steps by the same factor, or set gradient_checkpointing=True"
    )


def unguarded_generation(trainer: Any) -> str | None:
    """Why an OOM in generation is not batchfit's to survive; None where it is."""
    if getattr(trainer, "rollout_func", None) is not None:
        return "rollout_func generates"
    if trainer.use_vllm:
        return "vLLM generates, with memory of its own (vllm_gpu_memory_utilization)"
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "continuous batching sizes its cache itself (max_memory_percent)"
    return None
