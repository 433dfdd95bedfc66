"""KTO: an estimate of the KL divergence over all samples of a batch is part of the loss of each.

Rules
- The estimate has no gradient. It is computed first, for the whole batch in microbatches without a graph, by
  the trainer's own function; then the batch is cut, and each microbatch gets the estimate of all.
- Over ranks it is their mean, as in TRL: gathered once per batch, never inside a microbatch.
"""

from __future__ import annotations

from typing import Any

import torch

from batchfit.integrations.trl.terms import samples_of

_KL = "KL_"


def kl_of_batch(trainer: Any, model: Any, inputs: dict[str, Any], *, trains: bool) -> torch.Tensor | None:
    """The estimate for this batch, before it is clamped; None where the loss has none."""
    if not getattr(trainer, "calculate_KL", False):
        return None
    run = trainer._batchfit
    if trains:
        model.train()
    policy = trainer.accelerator.unwrap_model(model)

    def differences(micro: Any) -> torch.Tensor:
        with torch.inference_mode(mode=False), torch.no_grad(), trainer.compute_loss_context_manager():
            batch = trainer._prepare_inputs(dict(micro))
            return trainer._compute_kl_logps(policy, batch) - _reference(trainer, batch)

    rows = run.evaluator_of(trainer, model).map(differences, _kl_part(inputs))
    kl = rows.mean()
    if trainer.args.world_size > 1:
        kl = trainer.accelerator.gather(kl).mean()
    return kl


def _reference(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities of the reference: in the batch, of a model, or of this one without its adapter."""
    if trainer.precompute_ref_logps:
        return batch["ref_KL_logps"]
    if trainer.ref_model is not None:
        return trainer._compute_kl_logps(trainer.ref_model, batch)
    from trl.trainer.utils import use_adapter

    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        return trainer._compute_kl_logps(trainer.model, batch)


def _kl_part(inputs: dict[str, Any]) -> dict[str, Any]:
    """What the estimate is computed from: the other columns are no input of it."""
    kept = {name: one for name, one in inputs.items() if _KL in name or not _is_answer(name)}
    return kept


def _is_answer(name: str) -> bool:
    return name in ("input_ids", "attention_mask", "completion_mask", "ref_logps")


def without_kl(inputs: dict[str, Any]) -> dict[str, Any]:
    """The batch without what the estimate was computed from."""
    return {name: one for name, one in inputs.items() if _KL not in name}


def with_kl(cut: dict[str, Any]) -> dict[str, Any]:
    """A microbatch with the reference's part of the estimate, which is zero: the estimate is a difference."""
    zeros = torch.zeros(samples_of(cut), device=cut["label"].device)
    return {**cut, "ref_KL_logps": zeros}
