"""Microbatches in a loop of Accelerate's: `backward`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from accelerate import Accelerator

import batchfit
from batchfit.results import StepReport

_REFUSED: Final = {
    "DEEPSPEED": "DeepSpeed's engine owns backward and the optimizer's step, and partitions gradients in "
    "them, so a batch cannot be repeated there. Find the size by whole steps, each in processes of its own: "
    "`batchfit find -- accelerate launch train.py --batch-size {}`. Or use FSDP2",
    "MEGATRON_LM": "Megatron-LM runs forward and backward itself",
    "FSDP": "FSDP1 reduces gradients in hooks that cannot be reset after a step that failed. Use FSDP2: "
    "FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_version: 2 in the config",
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

    The loss is divided by `gradient_accumulation_steps` and scaled as in `accelerator.backward`. Under FSDP2
    gradients are reduced in each microbatch, also while `accumulate` would wait: the least memory.

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
        ValueError: the accelerator runs DeepSpeed, Megatron-LM or FSDP1, which cannot repeat a batch.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not {accelerator!r:.80}")
    if not isinstance(microbatcher, batchfit.Microbatcher):
        raise TypeError(f"microbatcher must be a batchfit.Microbatcher, not {microbatcher!r:.80}")
    if "scaler" in options:
        raise TypeError("scaler must not be given: the accelerator has its own")
    kind = getattr(accelerator.distributed_type, "name", "")
    if kind in _REFUSED and not accelerator.is_fsdp2:
        raise ValueError(f"accelerator must not be one of {kind} with a Microbatcher: {_REFUSED[kind]}")
    parts = accelerator.gradient_accumulation_steps
    scaled = fn if parts == 1 else (lambda micro: _divided(fn(micro), parts))
    with _reducing(accelerator):
        report = microbatcher.backward(scaled, batch, scaler=accelerator.scaler, **options)
    return report if parts == 1 else dataclasses.replace(report, loss=report.loss * parts)


@contextmanager
def _reducing(accelerator: Accelerator) -> Iterator[None]:
    """Let FSDP2 reduce gradients inside, also within `accumulate`: unsharded ones could not be undone.

    What it has reduced adds up in the sharded gradients, so the sum is the same.
    """
    waits = accelerator.is_fsdp2 and not accelerator.sync_gradients
    models = (
        [one for one in accelerator._models if hasattr(one, "set_requires_gradient_sync")] if waits else []
    )
    for model in models:
        model.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        for model in models:
            model.set_requires_gradient_sync(False)


def _divided(found: Any, parts: int) -> Any:
    """The divided loss, beside the outputs where there are some."""
    if type(found) is tuple and len(found) == 2:
        return found[0] / parts, found[1]
    return found / parts
