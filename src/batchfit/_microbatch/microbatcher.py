"""Microbatcher: a batch of any size, in microbatches that fit, with the gradients of the whole batch.

Rules
- `backward` adds to `.grad` what the full batch would have added. The weights of all microbatches are known
  before the first backward.
- A pass that fails with an OOM is undone as a whole and retried smaller (`batch_run`): a retried call ends
  as one that began at that size.
- Nothing synchronizes in the steady state: no `.item()`, no `empty_cache`, one memory reading per batch.
- Where splitting would change the result, that is said (BatchNorm) or refused (collectives, captured graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, final

import torch
from torch import nn
from torch.optim import Optimizer

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.sample_count import Count
from batchfit._engine.batch.user_split import Cutter, Split
from batchfit._engine.data_parallel.strategy import data_parallel_of
from batchfit._engine.device.device import Device, check_budget
from batchfit._engine.device.living import model_holders
from batchfit._engine.device.resolve import resolve_device
from batchfit._engine.device.tensors import leaves_of
from batchfit._engine.optimizer_step.step import step
from batchfit._engine.sizing.memory_budget import MemoryBudget, owned_bytes
from batchfit._engine.sizing.pure.sizes import EventLog, MicrobatchEvent
from batchfit._engine.sizing.ragged import RaggedSizer
from batchfit._engine.sizing.uniform import UniformSizer
from batchfit._microbatch.backward import BackwardCall, Weighing, Weight
from batchfit._microbatch.batch_run import BatchRun
from batchfit._microbatch.cached import CachedCall
from batchfit._microbatch.checks import check_generators, check_models, check_options, check_ragged, where
from batchfit._microbatch.context import MicrobatchContext
from batchfit._microbatch.evaluate import MapCall
from batchfit._microbatch.loss_check import LossCheck
from batchfit._noise.gradient_noise import GradientNoise
from batchfit._units import parse_bytes
from batchfit.errors import BatchfitError
from batchfit.results import StepReport


@final
class Microbatcher:
    """Runs a batch in microbatches that fit, exactly; learns which sizes do.

        mb = Microbatcher(model)
        for batch in loader:
            optimizer.zero_grad()
            report = mb.backward(lambda micro: loss_fn(model, micro), batch)   # batch of any size
            mb.step(optimizer)

    Pass every model (or parameter) that gets gradients in `backward`: gradients of a model that
    is not passed could not be undone after an OOM, so that is an error. The device's peak memory counters
    are reset when a size runs for the first time.

    Models wrapped in DistributedDataParallel: each rank calls with its local batch, and gradients are those
    of one process with the joined batch, whatever the sizes. A rank without samples passes None. Models under
    FSDP2 too: all ranks then run the same number of microbatches, and retry a batch together.

    Args:
        models: the modules that `fn` runs; single parameters too (a learned temperature).
        weight: what a microbatch counts in the batch's mean: `weight(micro) -> number`, or the name of a part
            of the batch whose sum it is. Count what the loss divides by: for a causal language model `lambda
            micro: (micro["labels"][:, 1:] != -100).sum()`, since the first token has no target. Evaluated
            where the batch is, before it is copied: keep batches on the host, or each batch forces one
            synchronization. Default: its samples.
        split: `split(batch, sizes) -> list of microbatches`, for batches that cannot be cut by rows. The
            first ones are checked: together they are the batch.
        count: `count(batch) -> number of samples`, where a batch can be read in two ways (an error names
            them), and for `split` where trial cuts do not say it. With `split` also called for microbatches.
        lengths: for padded batches: the name of a part (a mask such as "attention_mask", or the lengths), or
            a callable that takes the batch. Samples of about one length then share a microbatch and are
            trimmed to it, in few shapes. A mean over tokens needs `weight` too. Keep batches on the host,
            padded to multiples of 64.
        pad_keys: names of the padded parts, where shapes do not show them.
        pad_dim: their padded dimension, where shapes do not show it.
        padding_side: "left" or "right", where masks do not show it.
        microbatch_size: the most samples a microbatch may have; default: the whole batch.
        budget: bytes that the program may use ("20GiB"). Enforced while a size is new, trusted afterwards.
        reduction: what `fn` returns for a microbatch, the "mean" or the "sum" of its losses.
        on_zero_weight: "raise" or "skip" a batch whose weight is zero.
        batch_norm: "warn" once, "error", "exact" (running statistics of the full batch; normalisation is
            still that of each microbatch), or "ignore".
        compared: what to do with a loss that is neither a mean nor a sum over samples (in-batch negatives)
            where a batch has to be cut: "error", "warn" once and cut it, or "ignore" without a check.
        on_event: called with each `MicrobatchEvent` (a size changed, and why), for TensorBoard or W&B.
        noise: a `GradientNoise` that measures the noise scale from the microbatches of `backward`.
        device: where microbatches go and whose memory counts; default: where the models are.
        sync: under DDP, "safe": an OOM on any rank is survived; gradients are reduced once all ranks have
            theirs, which took 4 % of a step with many microbatches, and 19 % with one. "overlap": a batch
            whose sizes have run before is reduced while the last microbatch is in backward, and an OOM there
            is an error on all ranks.
        timeout_s: under DDP or FSDP2, how long this rank waits for others' work on a batch; default: 600.
        generators: `torch.Generator`s of your own that `fn` draws from (of NumPy and `random` too), so that
            they are restored when a batch is retried. Those that `fn` or the models hold are found.
        advice: for frameworks whose users set other things: what to do where a loss is found to be a "mean"
            or a "sum" against `reduction`, or "compared" between samples, in place of the texts here.
    """

    def __init__(
        self,
        *models: nn.Module | torch.Tensor,
        weight: Weight | None = None,
        split: Split | None = None,
        count: Count | None = None,
        lengths: str | Callable[[Any], Any] | None = None,
        pad_keys: Sequence[str | int] | None = None,
        pad_dim: int | None = None,
        padding_side: Literal["left", "right"] | None = None,
        microbatch_size: int | None = None,
        budget: int | str | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        on_zero_weight: Literal["raise", "skip"] = "raise",
        batch_norm: Literal["warn", "error", "exact", "ignore"] = "warn",
        compared: Literal["error", "warn", "ignore"] = "error",
        on_event: Callable[[MicrobatchEvent], object] | None = None,
        noise: GradientNoise | None = None,
        device: str | torch.device | Device | None = None,
        sync: Literal["safe", "overlap"] = "safe",
        timeout_s: float | None = None,
        generators: Sequence[object] = (),
        advice: Mapping[str, str] | None = None,
    ) -> None:
        check_models(models)
        check_options(
            weight, split, count, microbatch_size, reduction, on_zero_weight, batch_norm, compared, on_event
        )
        check_generators(generators)
        check_ragged(lengths, split, pad_keys, pad_dim, padding_side)
        if noise is not None and not isinstance(noise, GradientNoise):
            raise TypeError(f"noise must be a GradientNoise, not {noise!r:.80}")
        budget_bytes = None if budget is None else parse_bytes(budget)
        self._device = resolve_device(device, near=models)
        if budget_bytes is not None:
            check_budget(self._device, budget_bytes)
        self._weighing = Weighing(weight, reduction=reduction, skips=on_zero_weight == "skip")
        self._noise = noise
        target = where(device, models)
        kind = "cpu" if target is None else target.type
        memory = MemoryBudget(
            self._device,
            budget_bytes,
            models_bytes=lambda: owned_bytes(models, kind),
            holders=partial(model_holders, models, kind),
        )
        events = EventLog(on_event)
        self._uniform = UniformSizer(memory, events, most=microbatch_size)
        self._ragged = RaggedSizer(
            memory,
            events,
            most=microbatch_size,
            pad_keys=pad_keys,
            pad_dim=pad_dim,
            padding_side=padding_side,
        )
        modules = leaves_of(models)[2]
        ranks = data_parallel_of(modules, sums=reduction == "sum", sync=sync, timeout_s=timeout_s)
        if ranks.shards is not None:
            self._uniform.shards = ranks.shards
        if noise is not None and ranks.shards is not None:
            raise BatchfitError(
                "noise is not measured under FSDP2: each rank holds a part of each gradient, and no rank the "
                "norm of its own batch's"
            )
        self._context = MicrobatchContext(
            models,
            device=self._device,
            target=target,
            cutter=Cutter(split, count),
            lengths=lengths,
            batch_norm=batch_norm,
            uniform=self._uniform,
            ragged=self._ragged,
            ranks=ranks,
            generators=generators,
        )
        loss_check = LossCheck(reduction=reduction, on_compared=compared, advice=advice)
        self._loss_check = None if compared == "ignore" else loss_check

    def backward(
        self, fn: Callable[[Any], Any], batch: Any, *, lengths: Lengths | None = None, scaler: Any = None
    ) -> StepReport:
        """Forward and backward of the whole batch, in microbatches; adds to `.grad` what the batch would.

            report = mb.backward(lambda micro: criterion(model(micro["x"]), micro["y"]), batch)

        A microbatch whose loss has no graph (all its rows are masked) adds nothing.
        `fn` may be called twice with the same samples: after an OOM the whole batch is retried,
        with gradients, random numbers, buffers and scaler where they were. Before the first batch is cut,
        `fn` is also called without gradients, with models in eval mode, for sets of up to 8 samples: ten
        times, more where the loss is random. A loss that is neither a mean nor a sum over samples is refused
        (`compared`). Hooks on parameters see the gradient of each microbatch. An error of your own leaves
        everything as the call found it.

        Args:
            fn: `fn(micro)` gets samples of the batch, on the device, and returns their loss, or `(loss,
                outputs)`.
            batch: the local batch of this rank, of any size and structure; None on a rank without samples.
            lengths: lengths of this batch's samples; goes before the `lengths` of `Microbatcher`.
            scaler: the `GradScaler` with which the loss is scaled.

        Returns:
            A `StepReport`. Outputs of all microbatches are joined there in the batch's order, each sample
            once.
        """
        call = BackwardCall(
            fn, scaler=scaler, weighing=self._weighing, loss_check=self._loss_check, noise=self._noise
        )
        run = BatchRun(self._context, call, batch, lengths=lengths)
        run.execute()
        return call.report(run)

    def backward_cached(
        self,
        encode: Callable[[Any], Any],
        loss_fn: Callable[[Any], Any],
        batch: Any,
        *,
        lengths: Lengths | None = None,
        scaler: Any = None,
    ) -> StepReport:
        """An exact loss over all representations of a batch (in-batch negatives), encoded in microbatches.

            report = mb.backward_cached(lambda micro: encoder(micro), contrastive_loss, batch)

        More than one microbatch costs one forward more, without a graph; dropout is the same in both.
        Parameters of `loss_fn` get gradients too: pass them to `Microbatcher`.

        Args:
            encode: `encode(micro)` returns tensors with one row per sample, alone or in tuples and dicts.
            loss_fn: gets those of the whole batch, in its order; returns the loss, or `(loss, outputs)`. With
                `lengths`, one value per token is padded to the batch's width.
            batch: the local batch of this rank, of any size and structure.
            lengths: lengths of this batch's samples; goes before the `lengths` of `Microbatcher`.
            scaler: the `GradScaler` with which the loss is scaled.

        Returns:
            A `StepReport`.
        """
        run = BatchRun(self._context, CachedCall(encode, loss_fn, scaler=scaler), batch, lengths=lengths)
        run.execute()
        return run.report()

    def map(self, fn: Callable[[Any], Any], batch: Any, *, lengths: Lengths | None = None) -> Any:
        """`fn` of each microbatch under `torch.inference_mode`, the outputs joined in the batch's order.

            model.eval()
            logits = mb.map(model, batch)

        The mode of the model is yours to set. Tensors are joined along their first dimension, in any
        structure; lists have one item per sample; a value of the whole batch (a mean, a number) is an error,
        also for a batch that is not cut; outputs stay where `fn` left them. After an OOM
        only microbatches that have not run are run, so nothing is counted twice. Sizes are learned apart from
        those of training, so they may be larger. With `lengths`, outputs with one value per token are filled
        with zeros up to the batch's width.

        Args:
            fn: `fn(micro)` gets samples of the batch, on the device, and returns one output per sample.
            batch: the batch, of any size and structure.
            lengths: lengths of this batch's samples; goes before the `lengths` of `Microbatcher`.

        Returns:
            The outputs of the whole batch, in its order.
        """
        call = MapCall(fn)
        BatchRun(self._context, call, batch, lengths=lengths).execute()
        return call.joined

    def step(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scaler: torch.amp.GradScaler | None = None,
        clip_norm: float | None = None,
        rollback: bool = False,
    ) -> torch.Tensor | None:
        """An optimizer step that an OOM cannot leave half done; returns the gradient norm.

            norm = mb.step(optimizer, scaler=scaler, clip_norm=1.0)

        Unscales, clips, steps and updates the scaler; several optimizers step together. An OOM before
        anything has moved is a `torch.OutOfMemoryError` that says so, and otherwise a `StepInterruptedError`.
        `rollback=True` copies what a step changes to host memory first, so that it can always be undone.

        Args:
            optimizer: the optimizer, or several that step together.
            scaler: the `GradScaler` with which losses were scaled; it is updated.
            clip_norm: the gradient norm to clip at; None: gradients are not clipped.
            rollback: copy what a step changes to host memory first, so that it can always be undone.

        Returns:
            The gradient norm before clipping; None without `clip_norm`.

        Raises:
            StepInterruptedError: an OOM after something may have moved; says what to do.
        """
        ranks = self._context.ranks
        norm = step(optimizer, scaler=scaler, clip_norm=clip_norm, rollback=rollback, ranks=ranks)
        gathered: Any = getattr(norm, "full_tensor", None)  # of shards: a sum over the ranks, on all of them
        return norm if gathered is None else gathered()

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as plain data."""
        return {**self._uniform.state_dict(), "ragged": self._ragged.to_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what was learned; on another device or budget nothing is loaded, and that is logged.

        Under FSDP2 with another number of ranks too: each then holds other shards.

        Args:
            state: what `state_dict()` returned.

        Raises:
            ValueError: `state` is damaged, or something else.
        """
        before = self._uniform.learned
        try:
            if self._uniform.load_state_dict(state):
                self._ragged.load(state.get("ragged", {}))
            else:
                self._ragged.forget()
        except (KeyError, TypeError, AttributeError) as error:
            self._uniform.learned = before
            raise ValueError(
                f"state must be what state_dict() returned, not one that is damaged ({error!r:.80})"
            ) from None

    def _also_restores(self, take: Callable[[], Callable[[], None]]) -> None:
        """For frameworks: `take()` is called when a call begins, what it returns where a pass is undone."""
        self._context.also_restores.append(take)

    def _nothing_larger(self) -> None:
        """For frameworks that have searched: what ran so far is the largest that fits."""
        self._uniform.learned.nothing_larger()
