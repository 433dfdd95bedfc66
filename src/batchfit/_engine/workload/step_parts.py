"""What a step of `training`, `inference` and `generation` does to its model.

Rules: a model is left in the mode in which it was found; its device is read at each step, since it may have
moved. A scaled loss dies where it is used, as in a loop written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from batchfit._engine.batch.sources import takes_arguments


def backward(loss: Any, scaler: Any) -> None:
    """In a call of its own: the scaled loss is gone when it returns, as after `scale(loss).backward()`."""
    (loss if scaler is None else scaler.scale(loss)).backward()


def update(model: nn.Module, optimizer: Any, *, scaler: Any, clip_norm: float | None) -> None:
    """What a step does once the gradients are there."""
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    elif optimizer is not None:
        optimizer.step()


def call_model(model: Any, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def in_mode(model: Any, *, training: bool) -> Iterator[None]:
    """The model in that mode. One that is in it already is left alone, frozen parts and all."""
    if not isinstance(model, nn.Module) or model.training is training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in before:
            module.training = flag


def device_of(model: Any) -> torch.device | None:
    """Where the model's batches go: to its first parameter or buffer; None where it says nothing."""
    if isinstance(model, nn.Module):
        for tensors in (model.parameters(), model.buffers()):
            for tensor in tensors:
                return tensor.device
        return None
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else None


def autocast_context(autocast: Any, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    if autocast is None:
        return nullcontext
    if isinstance(autocast, torch.dtype):
        if autocast not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast must be torch.bfloat16 or torch.float16 as a dtype, not {autocast!r}")

        # The device is asked for at each step: the model may have moved since.
        def lowered() -> AbstractContextManager[Any]:
            device = device_of(model)
            return torch.autocast("cpu" if device is None else device.type, dtype=autocast)

        return lowered
    if isinstance(autocast, torch.autocast):
        return lambda: autocast  # may be entered repeatedly, unlike other contexts
    # A context itself (`__enter__`) can as a rule be entered only once, and is callable as a decorator.
    is_context = hasattr(autocast, "__enter__") and not isinstance(autocast, type)
    if is_context or not callable(autocast) or not takes_arguments(autocast, 0):
        raise TypeError(
            "autocast must be None, a dtype or a function without arguments that makes a context, "
            f"not {autocast!r}"
        )
    make: Callable[[], AbstractContextManager[Any]] = autocast
    return make
