"""What each microbatch counts in the batch's mean.

Rules
- All shares are known before the first backward, and add up to one: what the microbatches add to the
  gradients is then what the batch would have added.
- Weights that are on a device are fetched together: at most one synchronization per batch, and
  none for host batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, final

import torch

from batchfit._engine.batch.pure.pieces import Piece
from batchfit.errors import BatchfitError

log = logging.getLogger("batchfit")

_IGNORED = -100  # the label that torch's and Hugging Face's losses leave out
# How many batches are checked for it: to read labels on a device synchronizes.
_HOST_CHECKS = 8
_DEVICE_CHECKS = 2
# What to do, by what an inspection of the loss has shown.
_ADVICE = {
    "compared": "Use backward_cached(encode, loss_fn, batch), which is exact for any loss over the outputs "
    "of a batch, or a batch that fits whole. compared='warn' cuts it all the same",
    "mean": "Pass reduction='mean'",
    "sum": "Pass reduction='sum'",
}

Weight = Callable[[Any], Any] | str
Reduction = Literal["mean", "sum"]


@final
class Weighing:
    """How the microbatches of one Microbatcher are weighed."""

    def __init__(self, weight: Weight | None, *, reduction: Reduction, skips: bool) -> None:
        self._weight = weight
        self.sums = reduction == "sum"  # losses are sums over samples, not means
        self._skips = skips
        self._checks = 0  # of `advice`

    def advice(self, batch: Any, *, is_ragged: bool) -> str:
        """Advice on the first batches that were cut; "" for none."""
        if self._weight is not None or self.sums or self._checks > _HOST_CHECKS:
            return ""
        self._checks += 1
        return _advice_on_tokens(batch, is_ragged=is_ragged, checks=self._checks)

    def shares(self, micros: Sequence[Any], plan: Sequence[Piece]) -> tuple[list[float] | None, float]:
        """The share of each microbatch in the batch's mean, None where it has no weight; and that weight."""
        if self.sums or (self._weight is None and len(plan) == 1):
            return [1.0] * len(plan), float(sum(piece.size for piece in plan))
        if self._weight is None:
            weights = [float(piece.size) for piece in plan]
        else:
            weights = _numbers([self._weigh(micro) for micro in micros])
        total = math.fsum(weights)
        if total == 0:
            return None, 0.0
        return [weight / total for weight in weights], total

    def weight_of(self, micro: Any) -> float:
        """What a microbatch of one sample counts."""
        return self.shares([micro], [Piece(slice(0, 1), 1)])[1]

    def check_zero(self) -> None:
        """A batch has no weight, on any rank: an error unless such batches are skipped."""
        if not self._skips:
            raise BatchfitError(
                "the weight of the batch is zero, so its mean is not defined. Leave such batches out, or "
                "pass on_zero_weight='skip'"
            )

    def _weigh(self, micro: Any) -> Any:
        if callable(self._weight):
            return self._weight(micro)
        name = cast(str, self._weight)
        try:
            part = micro[name] if hasattr(micro, "keys") else getattr(micro, name)
        except (KeyError, AttributeError):
            parts = f" ({', '.join(map(str, micro))})" if hasattr(micro, "keys") else ""
            raise ValueError(f"weight must name a part of the batch{parts}, not {name!r}") from None
        return part.sum() if hasattr(part, "sum") else sum(part)


def _numbers(weights: Sequence[Any]) -> list[float]:
    """As plain numbers; those on a device are fetched together."""
    for one in weights:
        if isinstance(one, torch.Tensor) and one.numel() != 1:
            raise ValueError(f"weight must be one number, not a tensor of shape {tuple(one.shape)}")
    if all(isinstance(one, torch.Tensor) for one in weights):
        values = torch.stack([one.detach().double().reshape(()) for one in weights]).tolist()
    else:
        values = [_number(one) for one in weights]
    for value in values:
        if not 0 <= value < math.inf:
            raise ValueError(f"weight must be a finite number of at least 0, not {value!r}")
    return cast(list[float], values)


def _number(weight: Any) -> float:
    try:
        return float(weight)
    except (TypeError, ValueError):
        raise TypeError(f"weight must be a number, not {weight!r:.80}") from None


def _advice_on_tokens(batch: Any, *, is_ragged: bool, checks: int) -> str:
    """For samples that count alike and a loss that is likely a mean over tokens."""
    labels: Any = batch.get("labels") if hasattr(batch, "get") else getattr(batch, "labels", None)
    shown = "batches are ragged"
    has_rows = isinstance(labels, torch.Tensor) and labels.dim() > 0
    if has_rows and checks <= (_HOST_CHECKS if labels.device.type == "cpu" else _DEVICE_CHECKS):
        if bool((labels == _IGNORED).any()):
            shown, is_ragged = f"labels hold {_IGNORED}", True
        elif labels.dim() == 1:  # one per sample
            is_ragged = False
    elif has_rows:
        return ""
    if not is_ragged:
        return ""
    plain, causal = (f"weight=lambda micro: (micro['labels']{at} != -100).sum()" for at in ("", "[:, 1:]"))
    both = f"{causal} for a causal model, {plain} for others"
    line = plain if has_rows and labels.dim() == 1 else both
    return (
        f"microbatches are weighted by their samples, but {shown}: if the loss is a mean over tokens, as "
        f"Hugging Face's is, the gradients are not those of the batch. Pass {line}"
    )


def checked_advice(advice: Mapping[str, str] | None) -> Mapping[str, str]:
    """What warnings advise: ours, or what a framework has given in its place."""
    if advice is None:
        return _ADVICE
    if not isinstance(advice, Mapping):
        raise TypeError(f"advice must be a mapping or None, not {advice!r:.80}")
    for name, text in advice.items():
        if name not in _ADVICE or not isinstance(text, str):
            raise ValueError(f"advice must hold texts for {', '.join(_ADVICE)}, not {name!r}: {text!r:.80}")
    return {**_ADVICE, **advice}
