"""Reward models in microbatches: TRL scores all completions of a generation at once.

Rules: each completion is scored by itself, so scores are those of the whole batch. Functions of the user's
are called once, as without batchfit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from torch import nn

from batchfit.integrations.transformers.rl.phases import phases_of


@contextmanager
def scoring_in_microbatches(trainer: Any) -> Iterator[None]:
    """Inside, each reward model scores as many completions at once as fit."""
    with ExitStack() as stack:
        for model in trainer.reward_funcs:
            if isinstance(model, nn.Module):
                stack.enter_context(_in_microbatches(trainer, model))
        yield


@contextmanager
def _in_microbatches(trainer: Any, model: nn.Module) -> Iterator[None]:
    own, table = model.forward, vars(model)
    before = table.get("forward")
    table["forward"] = _mapped(trainer, model, own)
    try:
        yield
    finally:
        if before is None:
            del table["forward"]
        else:
            table["forward"] = before


def _mapped(trainer: Any, model: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(**inputs: Any) -> Any:
        microbatcher = phases_of(trainer).without_gradients("rewards", trainer, model)
        return SimpleNamespace(logits=microbatcher.map(lambda micro: own(**micro).logits, inputs))

    return forward
