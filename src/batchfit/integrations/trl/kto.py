"""KTO: an estimate of the KL divergence over all samples of a batch is part of the loss of each.

Rules
- The estimate has no gradient. It is computed first, in microbatches without a graph, by the trainer's own
  function; then the batch is cut, and each microbatch gets the estimate of all.
- It is of `per_device_train_batch_size` samples, as without batchfit: gradient accumulation loads several
  such batches as one, and each has an estimate of its own. A microbatch with samples of two is two losses.
- Over ranks it is their mean, as in TRL: gathered once per batch, never inside a microbatch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from batchfit.integrations.trl.terms import patched

_KL = "KL_"
_GROUP = "kl_group"  # the estimate that belongs to a sample, by number
# What is no input of the estimate.
_ANSWERS = ("input_ids", "attention_mask", "completion_mask", "ref_logps")


@final
@dataclass(frozen=True, slots=True)
class KlEstimates:
    """The estimates of a batch, before they are clamped."""

    values: torch.Tensor
    group: int  # samples that share one

    def of(self, micro: Any) -> torch.Tensor:
        """The estimate of a microbatch whose samples have one."""
        return self.values[micro[_GROUP][0] if _GROUP in micro else 0]


def estimates_of(trainer: Any, model: Any, inputs: dict[str, Any], *, trains: bool) -> KlEstimates | None:
    """The estimates for this batch; None where the loss has none."""
    if not getattr(trainer, "calculate_KL", False):
        return None
    run = trainer._batchfit
    if trains:
        model.train()
    policy = trainer.accelerator.unwrap_model(model)

    def differences(micro: Any) -> torch.Tensor:
        with torch.inference_mode(mode=False), torch.no_grad(), trainer.compute_loss_context_manager():
            batch = trainer._prepare_inputs(dict(micro))
            found: torch.Tensor = trainer._compute_kl_logps(policy, batch) - _reference(trainer, batch)
            return found

    used = {name: one for name, one in inputs.items() if name not in _ANSWERS}
    rows = run.evaluator_of(trainer, model).map(differences, used)
    group = len(rows)
    if trains and run.given is not None and run.options.schedule is None:
        group = run.given[0]
    values = torch.stack([one.mean() for one in rows.split(group)])
    if trainer.args.world_size > 1:
        values = trainer.accelerator.gather(values).reshape(-1, len(values)).mean(0)
    return KlEstimates(values, group)


def _reference(trainer: Any, batch: dict[str, Any]) -> Any:
    """Log-probabilities of the reference: in the batch, of a model, or of this one without its adapter."""
    if trainer.precompute_ref_logps:
        return batch["ref_KL_logps"]
    if trainer.ref_model is not None:
        return trainer._compute_kl_logps(trainer.ref_model, batch)
    from trl.trainer.utils import use_adapter

    model = trainer.accelerator.unwrap_model(trainer.model)
    with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
        return trainer._compute_kl_logps(trainer.model, batch)


def without_kl(inputs: dict[str, Any], estimates: KlEstimates) -> dict[str, Any]:
    """The batch as it is cut: without what the estimates were computed from."""
    found = {name: one for name, one in inputs.items() if _KL not in name}
    count = len(inputs["label"])
    if estimates.group < count:
        found[_GROUP] = [number // estimates.group for number in range(count)]
    return found


def parts_of(micro: dict[str, Any]) -> list[tuple[Any, float]]:
    """The samples of a microbatch by their estimate, and what each group counts in its mean."""
    groups = micro.get(_GROUP)
    if groups is None or len(set(groups)) == 1:
        return [(micro, 1.0)]
    found = []
    for group in sorted(set(groups)):
        chosen = [number for number, one in enumerate(groups) if one == group]
        found.append((rows_of_kto(micro, chosen), len(chosen) / len(groups)))
    return found


def rows_of_kto(micro: dict[str, Any], chosen: slice | list[int]) -> dict[str, Any]:
    """Some samples of a microbatch."""

    def some(value: Any) -> Any:
        if isinstance(value, list):
            return value[chosen] if isinstance(chosen, slice) else [value[number] for number in chosen]
        return value[chosen] if isinstance(value, torch.Tensor) and value.dim() > 0 else value

    return {name: some(value) for name, value in micro.items()}


def all_desirable(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch for the search, whose labels are all true.

    The model runs all samples whatever their labels are; these pick one number per sample afterwards. A trace
    knows no values of a batch but those that are the same for all samples.
    """
    label = batch.get("label")
    return {**batch, "label": torch.ones_like(label)} if isinstance(label, torch.Tensor) else batch


def with_kl(micro: dict[str, Any]) -> dict[str, Any]:
    """A microbatch as TRL takes it, with zero for the reference's part: an estimate is a difference."""
    found = {name: one for name, one in micro.items() if name != _GROUP}
    return {**found, "ref_KL_logps": torch.zeros(len(micro["label"]), device=micro["label"].device)}


@contextmanager
def known_kl(trainer: Any, estimate: torch.Tensor) -> Iterator[None]:
    """Inside, the trainer finds this estimate."""
    calls: list[None] = []

    def logps(_: Any, inputs: Any) -> torch.Tensor:
        rows = estimate.expand(len(inputs["label"]))
        calls.append(None)
        return rows if len(calls) == 1 else torch.zeros_like(rows)  # the second call is for the reference

    with patched(trainer, "_compute_kl_logps", logps):
        yield
