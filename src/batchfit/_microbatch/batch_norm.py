"""BatchNorm in microbatches: found, and its running statistics made those of the full batch.

Rules
- What normalises a sample is always the statistics of its own microbatch: that is what splitting changes, and
  nothing here can undo it. The running statistics, which evaluation uses, can be made exact.
- Exact: during the call each layer runs with momentum 1, so that its running buffers hold the statistics of
  the last microbatch; those are combined over all microbatches, and the layer's own momentum is applied
  once. A layer that runs several times in one forward has one set of statistics for each of its runs.
- A forward that activation checkpointing repeats inside backward is not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch

from batchfit._engine.torch_private.autograd import in_backward
from batchfit._engine.torch_private.modules import BatchNorm


def uses_batch_statistics(layer: BatchNorm) -> bool:
    """Whether it normalises with statistics of the batch it is given."""
    return layer.training or layer.running_mean is None


def warning(sizes: Sequence[int], total: int, layers: int) -> str:
    """What splitting a batch of `total` into these sizes means for so many layers, and what to do."""
    least, most = min(sizes), max(sizes)
    return (
        f"{layers} BatchNorm {'layer sees' if layers == 1 else 'layers see'} microbatches of "
        f"{most if least == most else f'{least} to {most}'} instead of the batch of {total}, which changes "
        f"the result: other statistics normalise, and running ones are updated {len(sizes)} times per batch. "
        "Use GroupNorm, a smaller batch, or batch_norm='exact' for exact running statistics"
    )


class _Run:
    """Count, mean and sum of squared deviations of what one run of a layer saw, over all microbatches."""

    __slots__ = ("count", "mean", "squares")

    def __init__(self) -> None:
        self.count = 0
        self.mean: Any = None
        self.squares: Any = None

    def add(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Chan's rule for combining two sets; `variance` is the unbiased one that torch keeps."""
        squares = variance * (count - 1)
        if self.mean is None:
            self.count, self.mean, self.squares = count, mean.clone(), squares
            return
        total = self.count + count
        gap = mean - self.mean
        self.squares = self.squares + squares + gap * gap * (self.count * count / total)
        self.mean = self.mean + gap * (count / total)
        self.count = total


@final
class ExactStatistics:
    """Inside, running statistics are gathered; `apply` writes those of the full batch.

    Each microbatch begins with `next_microbatch`. The caller restores buffers (`BatchUndo`).
    """

    def __init__(self, layers: Iterable[BatchNorm]) -> None:
        self._layers = [layer for layer in layers if layer.training and layer.running_mean is not None]
        self._momenta: list[Any] = []
        self._before: list[list[Any]] = []
        self._runs: list[list[_Run]] = []
        self._calls: list[int] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> ExactStatistics:
        with torch.no_grad():
            self._before = [
                [None if one is None else one.clone() for one in _statistics(layer)] for layer in self._layers
            ]
        self._runs = [[] for _ in self._layers]
        for index, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_hook(self._gather(index)))
            self._momenta.append(layer.momentum)
            layer.momentum = 1.0
        return self

    def next_microbatch(self) -> None:
        """A microbatch begins: each layer is before its first run."""
        self._calls = [0] * len(self._layers)

    def _gather(self, index: int) -> Any:
        def hook(layer: Any, args: tuple[Any, ...], output: Any) -> None:
            if not layer.training or in_backward():  # where checkpointing repeats forward
                return
            run = self._calls[index]
            self._calls[index] += 1
            if run == len(self._runs[index]):
                self._runs[index].append(_Run())
            count = output.numel() // max(output.shape[1], 1)
            with torch.no_grad():
                self._runs[index][run].add(count, layer.running_mean, layer.running_var)

        return hook

    def apply(self) -> None:
        """Write what the full batch would have left."""
        with torch.no_grad():
            for layer, momentum, before, runs in zip(
                self._layers, self._momenta, self._before, self._runs, strict=True
            ):
                mean, variance, tracked = before
                layer_any: Any = layer
                for number, run in enumerate(runs, start=1):
                    factor = momentum
                    if momentum is None:  # a plain average over all batches so far
                        factor = 1.0 if tracked is None else (tracked + number).to(mean.dtype).reciprocal()
                    mean = mean + (run.mean - mean) * factor
                    variance = variance + (run.squares / max(run.count - 1, 1) - variance) * factor
                layer_any.running_mean.copy_(mean)
                layer_any.running_var.copy_(variance)
                if tracked is not None:
                    layer_any.num_batches_tracked.copy_(tracked + len(runs))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer, momentum in zip(self._layers, self._momenta, strict=False):
            layer.momentum = momentum
        self._runs, self._before, self._hooks, self._momenta = [], [], [], []


def _statistics(layer: Any) -> tuple[Any, Any, Any]:
    return layer.running_mean, layer.running_var, layer.num_batches_tracked
