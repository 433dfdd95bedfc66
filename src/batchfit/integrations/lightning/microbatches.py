"""OomProofTraining: training steps that survive an OOM.

Rules
- A batch runs through `batchfit.Microbatcher`: whole where it fits, otherwise in microbatches, with the
  gradients of the whole. A batch that is out of memory is retried from its beginning.
- What the module logs for microbatches is logged once, as the batch would have logged it.
- Clipping, accumulation, precision, hooks around backward and the optimizer's step stay Lightning's. Where
  they cannot (manual optimization, a `backward` of the user's), that is said before training.
- Validation within `fit` runs in microbatches too, where a batch of it does not fit (`evaluation`).
- Outside of `fit` the Trainer is as if the callback had never been there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.lightning.evaluation import Evaluation
from batchfit.integrations.lightning.framework import (
    Callback,
    ShownValues,
    call_step,
    check_budget,
    check_trainer,
    overrides,
    part,
)
from batchfit.integrations.lightning.merging import (
    Record,
    detached,
    joined,
    log_merged,
    metrics_in,
    recording,
    restore_metrics,
    saved_metrics,
)

_AMP = "plugins.precision.amp"
_ADVICE = {  # what can be done in a LightningModule, where the loss is no mean of its samples
    "sum": "Return the mean from training_step: the loss divided by its samples",
    "compared": "Use backward_cached of a Microbatcher with manual optimization, which is exact, or batches "
    "that fit whole. compared='warn' cuts it all the same",
}


class OomProofTraining(Callback):
    """Runs `training_step` in microbatches that fit, with the gradients and logged values of the whole batch.

        Trainer(callbacks=[OomProofTraining()]).fit(module, loader)      # a loader with batches of any size

    For automatic optimization, on one device or under DDP. `training_step` must return the mean loss of its
    batch, and may be called several times for one. What it learned is kept in checkpoints.

    Args:
        weight: what a microbatch counts in the batch's mean, as in `Microbatcher`; give it for a mean over
            tokens.
        split: `split(batch, sizes)`, for batches that cannot be cut by rows, as in `Microbatcher`.
        count: `count(batch)`, where a batch can be read in two ways, as in `Microbatcher`.
        lengths: for padded batches, as in `Microbatcher`.
        pad_keys: names of the padded parts, where shapes do not show them.
        pad_dim: their padded dimension, where shapes do not show it.
        padding_side: "left" or "right", where masks do not show it.
        microbatch_size: the most samples a microbatch may have; default: the whole batch.
        budget: bytes that the program may use ("20GiB").
        batch_norm: "warn", "error", "exact" or "ignore", as in `Microbatcher`.
        compared: "error", "warn" or "ignore", for losses that compare samples, as in `Microbatcher`.
        on_event: called with each `MicrobatchEvent`.
        noise: a `GradientNoise` that measures the noise scale.
        sync: under DDP, "safe" or "overlap", as in `Microbatcher`.
        timeout_s: under DDP, seconds that this rank waits for others; default: 600.
        rollback: copy what an optimizer step moves to host memory first, so that it can always be undone.
        record_oom: a file for the memory snapshot of an OOM that ends the training, for `batchfit why`; off
            by default.

    Attributes:
        retries: OOM retries over the whole run.
    """

    def __init__(
        self,
        *,
        weight: Callable[[Any], Any] | str | None = None,
        split: Callable[[Any, Any], Any] | None = None,
        count: Callable[[Any], int] | None = None,
        lengths: str | Callable[[Any], Any] | None = None,
        pad_keys: Sequence[str | int] | None = None,
        pad_dim: int | None = None,
        padding_side: Literal["left", "right"] | None = None,
        microbatch_size: int | None = None,
        budget: int | str | None = None,
        batch_norm: Literal["warn", "error", "exact", "ignore"] = "warn",
        compared: Literal["error", "warn", "ignore"] = "error",
        on_event: Callable[[batchfit.MicrobatchEvent], object] | None = None,
        noise: batchfit.GradientNoise | None = None,
        sync: Literal["safe", "overlap"] = "safe",
        timeout_s: float | None = None,
        rollback: bool = False,
        record_oom: str | Path | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "weight": weight,
            "split": split,
            "count": count,
            "lengths": lengths,
            "pad_keys": pad_keys,
            "pad_dim": pad_dim,
            "padding_side": padding_side,
            "microbatch_size": microbatch_size,
            "batch_norm": batch_norm,
            "compared": compared,
            "on_event": on_event,
            "noise": noise,
            "sync": sync,
            "timeout_s": timeout_s,
        }
        batchfit.Microbatcher(nn.Identity(), **options)  # wrong ones are refused here, not after the set-up
        check_budget(budget)
        if not isinstance(rollback, bool):
            raise TypeError(f"rollback must be True or False, not {rollback!r}")
        if record_oom is not None and not isinstance(record_oom, str | Path):
            raise TypeError(f"record_oom must be a file or None, not {record_oom!r}")
        self._record_oom = record_oom
        self._recorder: batchfit.OomRecorder | None = None
        self.retries = 0  # over the whole run
        self._options = {**options, "budget": budget, "advice": _ADVICE}
        self._weight = weight
        self._rollback = rollback
        self._microbatcher: batchfit.Microbatcher | None = None
        self._learned: Mapping[str, Any] | None = None
        self._evaluation: Evaluation | None = None
        self._evaluated: Mapping[str, Any] | None = None  # what it learned
        self._largest = 0  # microbatch of the last batch
        self._shown = ShownValues()
        self._is_paused = self._is_tasks = False
        self._records: list[Record] = []
        self._metrics: list[nn.Module] = []
        self._trainer: Any = None
        self._kwargs: dict[str, Any] = {}

    # --- hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Refuse what could not be run in microbatches."""
        check_trainer(trainer, self)
        if stage != "fit":
            return
        if not pl_module.automatic_optimization:
            raise BatchfitError(
                "OomProofTraining needs automatic optimization: in a training_step with manual optimization "
                "call backward and step of a batchfit.Microbatcher in place of manual_backward and "
                "optimizer.step"
            )
        precision = part(trainer, "plugins.precision")
        kind = type(trainer.precision_plugin)
        if overrides(pl_module, "backward", trainer) or kind.backward is not precision.Precision.backward:
            owner = (
                kind.__name__ if not overrides(pl_module, "backward", trainer) else type(pl_module).__name__
            )
            raise BatchfitError(
                f"OomProofTraining runs backward itself, and {owner} has a backward of its own: take it out, "
                "or use batchfit.Microbatcher with manual optimization"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on, the sanity check included, batches of validation that do not fit are cut."""
        if self._record_oom is not None:
            self._recorder = batchfit.record_oom(self._record_oom)
        options = {name: self._options[name] for name in ("split", "budget", "sync", "timeout_s", "on_event")}
        self._evaluation = Evaluation(trainer, options, self._evaluated)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """From here on batches go through the Microbatcher."""
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in trainer.optimizers):
            raise BatchfitError("OomProofTraining cannot run LBFGS, which runs the model inside its step")
        self._trainer, self._metrics, self._shown = trainer, metrics_in(pl_module), ShownValues()
        self._microbatcher = batchfit.Microbatcher(trainer.strategy.model, **self._options)
        self._microbatcher._also_restores(self._begun)
        if self._learned is not None:
            self._microbatcher.load_state_dict(self._learned)
        loop, plugin = trainer.fit_loop.epoch_loop.automatic_optimization, trainer.precision_plugin
        loop._make_closure = partial(self._closure, loop._make_closure)
        plugin.optimizer_step = partial(self._optimizer_step, plugin.optimizer_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note which batch runs, for a snapshot."""
        if self._recorder is not None:
            self._recorder.note(step=trainer.global_step, batch=batch)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show how the batch ran."""
        self._shown.show(trainer, pl_module, microbatch_size=self._largest, microbatch_retries=self.retries)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Lightning's own way again."""
        self._let_go()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Lightning's own way again; an OOM leaves its snapshot, if that was asked for."""
        if self._recorder is not None:
            self._recorder.failed(exception)
        self._let_go()
        self._let_evaluation_go()

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Lightning's own way again."""
        self._let_evaluation_go()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None

    def state_dict(self) -> dict[str, Any]:
        """The sizes that were learned, and how often a batch was retried."""
        learned = self._learned if self._microbatcher is None else self._microbatcher.state_dict()
        evaluated = self._evaluated if self._evaluation is None else self._evaluation.state_dict()
        return {"learned": learned, "retries": self.retries, "evaluation": evaluated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what was learned."""
        self._learned, self.retries = state_dict["learned"], state_dict["retries"]
        self._evaluated = state_dict.get("evaluation")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run steps as without this callback: a search must see their OOMs."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _let_evaluation_go(self) -> None:
        if self._evaluation is not None:
            self._evaluated = self._evaluation.state_dict()
            self._evaluation.end()
            self._evaluation = None

    # --- one batch

    def _let_go(self) -> None:
        if self._microbatcher is None:
            return
        trainer, self._learned = self._trainer, self._microbatcher.state_dict()
        vars(trainer.fit_loop.epoch_loop.automatic_optimization).pop("_make_closure", None)
        vars(trainer.precision_plugin).pop("optimizer_step", None)
        self._microbatcher = self._trainer = None
        self._records, self._metrics, self._kwargs = [], [], {}

    def _closure(self, make: Callable[..., Any], kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        """Lightning's closure, with the whole of a batch (zero_grad, forward, backward) as its step."""
        closure = make(kwargs, optimizer, batch_idx)
        if self._is_paused or closure._backward_fn is None:
            return closure
        if "batch" not in kwargs:
            raise BatchfitError(
                "OomProofTraining needs a training_step(batch), not one with a dataloader_iter"
            )
        closure._step_fn = partial(self._batch, kwargs, closure._zero_grad_fn)
        closure._backward_fn = closure._zero_grad_fn = None
        return closure

    def _batch(self, kwargs: Any, zero_grad: Callable[[], None] | None) -> Any:
        trainer, microbatcher = self._trainer, self._microbatcher
        assert microbatcher is not None
        if zero_grad is not None:
            zero_grad()
        self._kwargs, self._records = kwargs, []
        batch = kwargs["batch"]
        self._is_tasks = _is_tasks(trainer, batch) and self._options["split"] is None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        try:
            with recording(trainer.fit_loop.epoch_loop, lambda: self._records[-1]) as results:
                whole = tuple(batch) if self._is_tasks else batch  # a list could be one of samples
                report = microbatcher.backward(self._micro, whole, scaler=scaler)
            records = self._records
        finally:
            self._kwargs, self._records = {}, []
        self.retries += report.retries
        self._largest = max(report.microbatch_sizes, default=0)
        self._call_hooks("on_after_backward")
        sizes = list(report.microbatch_sizes)
        weights = [float(record.weight) for record in records] if self._weight is not None else sizes
        log_merged(results, records, weights)
        extra = joined([record.extra for record in records], sizes, weights)
        times = trainer.accumulate_grad_batches
        kind = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls
        return kind.from_training_step_output({"loss": report.loss * times, **extra}, times)

    def _micro(self, micro: Any) -> torch.Tensor:
        """The loss of one microbatch, as `training_step` gives it."""
        if not torch.is_grad_enabled():
            return self._looked_at(micro)
        record = Record(None if self._weight is None else _weight_of(self._weight, micro))
        self._records.append(record)
        loss, extra = self._step_of(micro)
        record.extra = detached(extra)
        self._call_hooks("on_before_backward", loss)
        scaled: torch.Tensor = loss / self._trainer.accumulate_grad_batches
        return scaled

    def _begun(self) -> Callable[[], None]:
        """A batch begins; what undoes an attempt at it: what its microbatches left behind does not count."""
        saved = saved_metrics(self._metrics)

        def restore() -> None:
            self._records.clear()
            restore_metrics(saved)

        return restore

    def _looked_at(self, micro: Any) -> torch.Tensor:
        """The Microbatcher asks what kind of mean the loss is: nothing of it stays."""
        saved = saved_metrics(self._metrics)
        self._records.append(Record(None))
        try:
            return self._step_of(micro)[0]
        finally:
            self._records.pop()
            restore_metrics(saved)

    def _step_of(self, micro: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The module's own step: its loss, and what it returns beside it."""
        micro = list(micro) if self._is_tasks else micro
        output = call_step(self._trainer, "training_step", *{**self._kwargs, "batch": micro}.values())
        found = dict(output) if isinstance(output, Mapping) else {"loss": output}
        loss = found.pop("loss", None)
        if loss is None:
            raise BatchfitError(
                "training_step must return a loss with OomProofTraining, not None: a part of a batch cannot "
                "be left out"
            )
        return loss, found

    def _call_hooks(self, name: str, *args: Any) -> None:
        calls = part(self._trainer, "trainer.call")
        calls._call_callback_hooks(self._trainer, name, *args)
        calls._call_lightning_module_hook(self._trainer, name, *args)

    def _optimizer_step(
        self, plain: Callable[..., Any], optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Replace the precision plugin's step by one in the same order that an OOM cannot leave half done."""
        if self._is_paused or kwargs:
            return plain(optimizer, model=model, closure=closure, **kwargs)
        assert self._microbatcher is not None
        plugin = self._trainer.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        result = closure()
        # As the plugin asks: a fused optimizer unscales in its own step.
        if scaler is not None and not part(self._trainer, _AMP)._optimizer_handles_unscaling(optimizer):
            scaler.unscale_(optimizer)
        plugin._after_closure(model, optimizer)
        self._microbatcher.step(optimizer, scaler=scaler, rollback=self._rollback)
        return result


def _is_tasks(trainer: Any, batch: Any) -> bool:
    """A list with one batch of each of several loaders."""
    combined = trainer.fit_loop._combined_loader
    loaders = () if combined is None else combined.iterables
    return type(batch) is list and isinstance(loaders, list) and len(loaders) == len(batch) > 1


def _weight_of(weight: Callable[[Any], Any] | str, micro: Any) -> Any:
    return micro[weight].sum() if isinstance(weight, str) else weight(micro)
