"""Contexts for steps that are not the training's: a search, a probe of the loss.

Rules: inside, random numbers, the model's mode, counts and logs change for nobody; all of them are restored.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from batchfit.integrations.transformers.counters import save_counts


@contextmanager
def same_random_numbers(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random states, which datasets, collators and losses may draw from (masks, noise)."""
    devices = [device] if device is not None and device.type == "cuda" else []
    numpy: Any = sys.modules.get("numpy")
    before = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(before[0])
        if numpy is not None:
            numpy.random.set_state(before[1])


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Drop what steps log, and restore what they count."""
    restore = save_counts(trainer)
    try:
        with trainer._batchfit.quiet():
            yield
    finally:
        restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off, so that a loss is the same twice; restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def keeping_mode(model: nn.Module) -> Iterator[None]:
    """Let `model.train()`, which every training step calls, do nothing."""
    vars(model)["train"] = lambda mode=True: model
    try:
        yield
    finally:
        del vars(model)["train"]
