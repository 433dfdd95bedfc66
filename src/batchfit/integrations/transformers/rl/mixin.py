"""What `adapt` makes of a trainer that generates: TRL's GRPOTrainer, RLOOTrainer, and classes made from them.

Rules
- Batches are those of the plain trainer: `per_device_train_batch_size`, `gradient_accumulation_steps`,
  `steps_per_generation` and `num_generations` keep their meaning, and nothing is loaded as one.
- Each phase of a step is cut by itself, and where it has to be only (`generation.py`, `loss_phase.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchfit.integrations.transformers.rl.generation import generate, log_probabilities, say_unguarded
from batchfit.integrations.transformers.rl.loss_phase import LossStep
from batchfit.integrations.transformers.rl.peaks import find_peaks
from batchfit.integrations.transformers.rl.phases import phases_of
from batchfit.integrations.transformers.rl.rewards import scoring_in_microbatches
from batchfit.integrations.transformers.trainer import BatchfitMixin


class GenerationMixin(BatchfitMixin):
    """Adds batchfit to a trainer that generates its batches."""

    _batchfit_merges = False

    @property
    def found_generation(self) -> Any:
        """The `FitResult` of the search for the most prompts that generate at once, or None."""
        return self._batchfit.generation_fit

    def _batchfit_find(self: Any, loader: Any, optimizer: Any) -> None:
        say_unguarded(self)
        find_peaks(
            self,
            self.model_wrapped,
            optimizer,
            generate=super()._generate_single_turn,  # type: ignore[misc]
            compute=super().compute_loss,  # type: ignore[misc]
        )

    # --- a step

    def training_step(self: Any, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = LossStep(self, phases_of(self))
        with step.open():
            self._batchfit_own_step(model, inputs, num_items_in_batch)
        return step.loss

    def compute_loss(self: Any, model: nn.Module, inputs: Any, *given: Any, **named: Any) -> Any:
        own = super().compute_loss  # type: ignore[misc]
        phases = self._batchfit.phases
        if phases is None or phases.step is None:
            return own(model, inputs, *given, **named)
        return phases.step.hold(model, inputs, lambda micro: own(model, dict(micro), *given, **named))

    def _generate_single_turn(
        self: Any, prompt_ids: Any, images: Any, multimodal_fields: Any, *given: Any, **named: Any
    ) -> Any:
        own = super()._generate_single_turn  # type: ignore[misc]
        if self._batchfit.searches:
            return own(prompt_ids, images, multimodal_fields, *given, **named)
        return generate(self, own, prompt_ids, images, multimodal_fields, given, named)

    def _get_per_token_logps_and_entropies(
        self: Any,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **more: Any,
    ) -> Any:
        own = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        phases = self._batchfit.phases
        given = {name: value for name, value in more.items() if value is not None}
        if phases is not None and phases.replayed is not None:
            found = phases.replayed
            return found["logps"], found["entropies"], None
        if torch.is_grad_enabled() or compute_aux_loss or given or self._batchfit.searches:
            return own(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **more,
            )
        return log_probabilities(
            self,
            own,
            model,
            input_ids,
            attention_mask,
            logits_to_keep,
            most=batch_size,
            entropy=compute_entropy,
        )

    def _calculate_rewards(self: Any, *given: Any, **named: Any) -> Any:
        with scoring_in_microbatches(self):
            return super()._calculate_rewards(*given, **named)  # type: ignore[misc]

    # --- evaluation

    def prediction_step(self: Any, *given: Any, **named: Any) -> Any:
        # Not by samples: completions of one prompt are compared. Each phase is cut by itself.
        return super(BatchfitMixin, self).prediction_step(*given, **named)  # type: ignore[misc]
