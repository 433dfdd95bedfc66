"""Microbatches in a loop of Accelerate's: `backward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

from accelerate import Accelerator

import batchfit
from batchfit.results import StepReport

_REFUSED: Final = {
    "DEEPSPEED": "DeepSpeed's engine runs backward and step itself",
    "MEGATRON_LM": "Megatron-LM runs forward and backward itself",
}


def backward(
    accelerator: Accelerator,
    microbatcher: Any,
    fn: Callable[[Any], Any],
    batch: Any,
    **options: Any,
) -> StepReport:
    """`accelerator.backward` in microbatches that fit, with the gradients of the whole batch.

    ```python
    mb = batchfit.Microbatcher(model)                      # the prepared model
    for batch in loader:
        with accelerator.accumulate(model):
            report = backward(accelerator, mb, lambda micro: loss_fn(model, micro), batch)
            optimizer.step()
            optimizer.zero_grad()
    ```

    The loss is divided by `gradient_accumulation_steps` and scaled as in `accelerator.backward`.

    Args:
        accelerator: the Accelerator of the loop.
        microbatcher: a `Microbatcher` of the prepared model.
        fn: `fn(micro)` gets samples of the batch and returns their mean loss.
        batch: the local batch of this rank.
        **options: go to `Microbatcher.backward`.

    Returns:
        A `StepReport`, with the undivided loss.

    Raises:
        TypeError: an argument is of another type, or `scaler` was given: the accelerator has its own.
        ValueError: the accelerator runs DeepSpeed or Megatron-LM, which run backward themselves.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not {accelerator!r:.80}")
    if not isinstance(microbatcher, batchfit.Microbatcher):
        raise TypeError(f"microbatcher must be a batchfit.Microbatcher, not {microbatcher!r:.80}")
    if "scaler" in options:
        raise TypeError("scaler must not be given: the accelerator has its own")
    kind = getattr(accelerator.distributed_type, "name", "")
    if kind in _REFUSED:
        raise ValueError(f"accelerator must not be one of {kind} with a Microbatcher: {_REFUSED[kind]}")
    parts = accelerator.gradient_accumulation_steps
    scaled = fn if parts == 1 else (lambda micro: _divided(fn(micro), parts))
    report = microbatcher.backward(scaled, batch, scaler=accelerator.scaler, **options)
    return report if parts == 1 else dataclasses.replace(report, loss=report.loss * parts)


def _divided(found: Any, parts: int) -> Any:
    """The divided loss, beside the outputs where there are some."""
    if type(found) is tuple and len(found) == 2:
        return found[0] / parts, found[1]
    return found / parts
