"""What TRL's losses count (`trainer._metrics`) for a batch that runs in microbatches, or on several ranks.

Rules
- One entry per batch, as without batchfit: means are weighed by what they are means over, tokens or samples;
  a minimum is the smallest of all microbatches and ranks.
- TRL gathers over ranks inside the loss. Ranks may have different numbers of microbatches, so a microbatch
  counts for its own rank, and one collective per batch joins the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from batchfit.integrations.transformers.losses import rows_of

# Means over tokens where the loss has one ratio per token; the others are always over tokens or samples.
_BY_TOKENS = ("entropy", "kl")
_BY_RATIO = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")

Found = dict[str, list[tuple[float, float]]]  # values and weights of microbatches, by metric


def token_mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """The tokens that count in the loss."""
    mask: torch.Tensor = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


@final
class MicrobatchMetrics:
    """The metrics of one batch, collected from its microbatches."""

    def __init__(self, trainer: Any) -> None:
        self._metrics = trainer._metrics
        self._ranks = trainer.args.world_size
        self._ratios_of_tokens = getattr(trainer, "importance_sampling_level", None) == "token"
        self._found: dict[int, Found] = {}  # by batch of the optimizer step

    def clear(self) -> None:
        """A pass begins, or failed."""
        self._found.clear()

    @contextmanager
    def collecting(self, micro: Mapping[str, Any], *, batch: int) -> Iterator[None]:
        """Take what one microbatch adds to the metrics out of them."""
        table, found = self._metrics["train"], self._found.setdefault(batch, {})
        before = {name: len(values) for name, values in table.items()}
        yield
        rows, tokens = float(rows_of(micro)), float(token_mask(micro).sum())
        for name, values in list(table.items()):
            new = values[before.get(name, 0) :]
            del values[len(values) - len(new) :]
            if name not in before:
                del table[name]
            for value in new:
                weight = tokens if self._is_by_tokens(name) else rows
                found.setdefault(name, []).append((float(value), weight))

    def _is_by_tokens(self, name: str) -> bool:
        return name in _BY_TOKENS or (self._ratios_of_tokens and name in _BY_RATIO)

    def write(self, accelerator: Any) -> None:
        """Add what was collected, as one entry of each batch."""
        for _, mine in sorted(self._found.items()):
            found = mine if self._ranks == 1 else self._of_all_ranks(mine, accelerator)
            for name, values in found.items():
                self._metrics["train"][name].append(_joined(name, values))
        self.clear()

    def _of_all_ranks(self, mine: Found, accelerator: Any) -> Found:
        names = list(mine)
        rows = [[_joined(name, mine[name]), sum(weight for _, weight in mine[name])] for name in names]
        sent = torch.tensor(rows, dtype=torch.float32, device=accelerator.device)
        gathered = accelerator.gather(sent).reshape(self._ranks, len(names), 2).tolist()
        return {name: [(row[at][0], row[at][1]) for row in gathered] for at, name in enumerate(names)}


def _joined(name: str, values: list[tuple[float, float]]) -> float:
    known = [(value, weight) for value, weight in values if not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith(("_min", "/min")):
        return min(value for value, _ in known)
    if name.endswith(("_max", "/max")):
        return max(value for value, _ in known)
    total = math.fsum(weight for _, weight in known)
    if total == 0:
        return math.fsum(value for value, _ in known) / len(known)
    return math.fsum(value * weight for value, weight in known) / total


@contextmanager
def on_this_rank(accelerator: Any) -> Iterator[None]:
    """Let the collectives of metrics answer for this rank alone."""

    with _answered(accelerator, lambda value: value):
        yield


@contextmanager
def no_metrics(accelerator: Any) -> Iterator[None]:
    """Let them answer zeros on the host: in a search nobody reads metrics, and a trace knows no values."""
    with _answered(accelerator, lambda value: torch.zeros(value.shape, dtype=value.dtype)):
        yield


@contextmanager
def _answered(accelerator: Any, answer: Callable[[Any], Any]) -> Iterator[None]:
    def answered(value: Any, *given: Any, **named: Any) -> Any:
        return answer(value)

    with ExitStack() as stack:
        for name in ("gather", "gather_for_metrics", "reduce", "pad_across_processes"):
            if name not in vars(accelerator):
                setattr(accelerator, name, answered)
                stack.callback(delattr, accelerator, name)
        yield
