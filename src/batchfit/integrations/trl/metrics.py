"""Metrics that TRL's losses compute beside the loss, while batchfit runs them.

Rules
- What a loss gathers from all ranks is this rank's: ranks run different numbers of microbatches, and would
  wait for each other.
- In a search metrics are numbers that nobody reads. They are zeros on the host there, so that nothing reads a
  tensor's value: a step that does cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch

from batchfit.integrations.trl.terms import patched
from batchfit.integrations.trl.trainers import name_of


@contextmanager
def local_metrics(trainer: Any, *_: Any) -> Iterator[None]:
    """Inside, what is gathered is this rank's, as often as there are ranks."""
    ranks = int(getattr(trainer.args, "world_size", 1))
    if ranks == 1:
        yield
        return

    def repeated(value: torch.Tensor) -> torch.Tensor:
        return torch.cat([value.reshape(1) if value.dim() == 0 else value] * ranks)

    with _gathering(trainer, repeated):
        yield


@contextmanager
def no_metrics(trainer: Any, model: torch.nn.Module) -> Iterator[None]:
    """Inside, what is gathered is zero."""
    if name_of(trainer) is None:
        yield
        return
    inner = trainer.accelerator.unwrap_model(model)
    handle = inner.register_forward_hook(_without_mean_logits)
    try:
        with _gathering(trainer, lambda value: torch.zeros(value.shape, dtype=value.dtype)):
            yield
    finally:
        handle.remove()


@contextmanager
def _gathering(trainer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    def changed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        if type(value) in (list, tuple):
            return type(value)(changed(one) for one in value)
        return {name: changed(one) for name, one in value.items()} if isinstance(value, dict) else value

    def gathered(value: Any, *_: Any, **__: Any) -> Any:
        return changed(value)

    with ExitStack() as stack:
        for name in ("gather", "gather_for_metrics"):
            stack.enter_context(patched(trainer.accelerator, name, gathered))
        yield


def _without_mean_logits(_: Any, __: Any, outputs: Any) -> Any:
    """The mean logits of each token are for a metric alone, and are picked by a mask that is not known."""
    if isinstance(getattr(outputs, "mean_logits", None), torch.Tensor):
        outputs.mean_logits = NoLogits()
    return outputs


@final
class NoLogits:
    """In place of a tensor: whatever is picked out of it adds up to zero."""

    def __getitem__(self, _: Any) -> NoLogits:
        return self

    def chunk(self, count: int, dim: int = 0) -> tuple[NoLogits, ...]:
        return (self,) * count

    def index_select(self, dim: int, index: Any) -> NoLogits:
        return self

    def sum(self) -> torch.Tensor:
        return torch.zeros(())
