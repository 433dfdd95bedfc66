"""torchtune: its recipes for one device, with a batch size that is found, grows, and survives an OOM.

    tune run batchfit.integrations.torchtune --config my_config.yaml recipe=full use_maximum_batch_size=True

Keys that it reads beside the recipe's own
- `recipe`: `full` or `lora` (torchtune's `full_finetune_single_device`, `lora_finetune_single_device`).
- `use_maximum_batch_size: True` (default False): train with the largest batch that fits.
- `batch_increase_function: package.module.function`: `(epoch, current_batch_size) -> increase`, called before
  each epoch. A search finds the largest batch before training; an increase past it is skipped and logged.
- `split_on_out_of_memory` (default True): a batch that is out of memory is retried in microbatches.
- `batchfit`: keywords of `batchfit.find_batch_size` (`budget`, `power_of_two`, `soak_steps`, `key`, ...).

Rules
- The recipes are torchtune's own, subclassed: their loops, losses, checkpoints and logs. Without our keys,
  and without an OOM, the weights are theirs bit for bit.
- A search restores weights, optimizer and random numbers.
- Sizes of past epochs are in the checkpoint; a resumed run has the sizes of a run that was not stopped.
- Whatever depends on the number of steps (an LR scheduler's length, `global_step`) follows the sizes.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import torch

import batchfit
from batchfit.messages import say
from batchfit.workload import batches

try:
    import torchtune
    from omegaconf import DictConfig
    from torchtune import config, training, utils
except ImportError as error:
    raise ImportError('pip install "batchfit[torchtune]" to use batchfit.integrations.torchtune') from error

from batchfit.integrations.torchtune_settings import RecipeSettings

log = logging.getLogger("batchfit")

OLDEST: Final = (0, 6)
_RECIPES: Final = {
    "full": ("full_finetune_single_device.py", "FullFinetuneRecipeSingleDevice"),
    "lora": ("lora_finetune_single_device.py", "LoRAFinetuneRecipeSingleDevice"),
}
_OVERRIDDEN: Final = ("setup", "save_checkpoint", "_setup_data", "_setup_lr_scheduler", "_loss_step")
_STATE: Final = "batchfit"  # our part of the loader's state in a checkpoint


def _warn_of_version(version: str = torchtune.__version__) -> None:
    """Warn of an older version; `recipe_class` refuses one that lacks what is overridden."""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        warnings.warn(
            f"batchfit.integrations.torchtune is tested with torchtune {'.'.join(map(str, OLDEST))} and "
            f"later, and this is {version}",
            stacklevel=3,
        )


_warn_of_version()


class AdaptiveBatchSize:
    """Mixin for a recipe of torchtune's, before it among the bases (`recipe_class`).

    Args:
        cfg: the recipe's config.

    Attributes:
        batch_size_events: a `ScheduleEvent` for each change of the size.
    """

    # Of the recipe:
    _model: torch.nn.Module
    _optimizer: Any
    _loss_fn: Any
    _dataloader: Any
    _device: torch.device
    _gradient_accumulation_steps: int
    _metric_logger: Any
    _steps_per_epoch: int
    epochs_run: int
    total_epochs: int
    max_steps_per_epoch: int | None
    global_step: int

    def __init__(self, cfg: DictConfig) -> None:
        self._settings = RecipeSettings(cfg)
        self._scheduler: batchfit.BatchSizeScheduler | None = None
        self._largest: int | None = None
        self._mb: batchfit.Microbatcher | None = None
        self.batch_size_events: list[batchfit.ScheduleEvent] = []
        super().__init__(cfg=cfg)  # type: ignore[call-arg]

    def setup(self, cfg: DictConfig) -> None:
        """Set the recipe up; `_setup_data` finds the size, once model and optimizer are made.

        Args:
            cfg: the recipe's config.
        """
        super().setup(cfg=cfg)  # type: ignore[misc]
        self._ignore_labels(max(self._largest or 0, cfg.batch_size))
        if self._settings.split and not self._in_backward:
            ignored = self._loss_fn.ignore_index
            self._mb = batchfit.Microbatcher(
                self._model,
                weight=lambda micro: (micro["labels"][:, 1:] != ignored).sum(),
                on_zero_weight="skip",
                device=self._device,
            )
        if self._scheduler is not None:
            self._metric_logger.log_dict({"batch_size": self._scheduler.batch_size}, step=self.global_step)

    def save_checkpoint(self, epoch: int) -> None:
        """Save the recipe's checkpoint with the sizes so far; then set the next epoch's size.

        Args:
            epoch: the epoch that ended.
        """
        if self._scheduler is None:
            super().save_checkpoint(epoch=epoch)  # type: ignore[misc]
            return
        loader = self._dataloader
        self._dataloader = _WithState(loader, self._scheduler)
        try:
            super().save_checkpoint(epoch=epoch)  # type: ignore[misc]
        finally:
            self._dataloader = loader
        if epoch + 1 < self.total_epochs:
            size, changed = self._scheduler.step(epoch + 1)
            if changed:
                self._dataloader = _resized(loader, size)
                self._steps_per_epoch = self._steps_at(size)
                self._metric_logger.log_dict({"batch_size": size}, step=self.global_step)

    def _setup_data(
        self,
        cfg_dataset: Any,
        shuffle: bool,
        batch_size: int,
        collate_fn: str,
        dataloader_state_dict: dict[str, Any] | None = None,
    ) -> Any:
        theirs = dict(dataloader_state_dict or {})
        state = theirs.pop(_STATE, None)
        loader = super()._setup_data(  # type: ignore[misc]
            cfg_dataset=cfg_dataset,
            shuffle=shuffle,
            batch_size=batch_size,
            collate_fn=collate_fn,
            dataloader_state_dict=theirs or None,
        )
        settings = self._settings
        if not (settings.use_maximum or settings.increase):
            if state is not None:
                log.warning(
                    "the checkpoint was trained with batch sizes of batchfit's, last %d; now it is %d, as "
                    "neither use_maximum_batch_size nor batch_increase_function is set",
                    state["batch_size"],
                    batch_size,
                )
            return loader
        self._dataloader = loader
        self._largest = self._find_largest(loader)
        first = self._first_size(batch_size, state)
        self._scheduler = batchfit.BatchSizeScheduler(
            settings.increase,
            first,
            largest=self._largest,
            on_event=self.batch_size_events.append,
        )
        if state is not None:
            self._scheduler.load_state_dict(state)
        size, _ = self._scheduler.step(self.epochs_run)
        return _resized(loader, size)

    def _setup_lr_scheduler(
        self, cfg_lr_scheduler: DictConfig | None, num_training_steps: int, last_epoch: int
    ) -> Any:
        if self._scheduler is not None:
            # Call the function for all epochs now: the length of the schedule depends on its results.
            epochs = range(self.total_epochs if cfg_lr_scheduler is not None else self.epochs_run)
            steps = [self._steps_at(self._scheduler.get_batch_size(epoch)) for epoch in epochs]
            self.global_step = sum(steps[: self.epochs_run])
            num_training_steps, last_epoch = sum(steps), self.global_step - 1
        return super()._setup_lr_scheduler(  # type: ignore[misc]
            cfg_lr_scheduler=cfg_lr_scheduler, num_training_steps=num_training_steps, last_epoch=last_epoch
        )

    def _loss_step(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of the batch. With a Microbatcher the gradients are complete, and backward adds none."""
        theirs = self._stock_loss
        if self._mb is None:
            loss: torch.Tensor = theirs(batch)
            return loss
        # The recipe multiplies the returned loss by this number, and then calls backward.
        tokens = (batch["labels"] != self._loss_fn.ignore_index).sum()
        report = self._mb.backward(lambda micro: theirs(dict(micro)) * tokens, batch)
        mean: torch.Tensor = report.loss / tokens.clamp(min=1)
        return mean.requires_grad_()

    def _stock_loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The recipe's loss, without what a failed attempt has left in activation offloading."""
        self._reset_offloading()
        loss: torch.Tensor = super()._loss_step(batch)  # type: ignore[misc]
        return loss

    def _reset_offloading(self) -> None:
        """Reset activation offloading: it expects a backward after each forward, which an OOM prevents."""
        offloading: Any = getattr(self, "activations_handling_ctx", None)
        if not hasattr(offloading, "tracker"):
            return
        stashes = [getattr(offloading, name, {}) for name in ("fwd_stash", "bwd_tensor_stash")]
        if any(stashes) and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # its stream may still copy them
        for held in (offloading.tracker, *stashes, getattr(offloading, "bwd_ev_stash", {})):
            held.clear()
        offloading.is_first_forward_call = offloading.is_first_backward_call = True

    # --- the largest batch

    @property
    def _in_backward(self) -> bool:
        return bool(getattr(self, "_optimizer_in_bwd", False))

    def _find_largest(self, loader: Any) -> int:
        fit = batchfit.find_batch_size(
            self._workload(loader),
            max_size=max(1, len(loader.dataset) // self._gradient_accumulation_steps),
            device=self._device,
            **self._settings.search,
        )
        say(fit.summary)
        return fit.batch_size

    def _workload(self, loader: Any) -> batchfit.Workload:
        """A step of the recipe's loop, with the longest samples of its dataset."""
        make = batches(loader.dataset, collate_fn=loader.collate_fn)
        clip_norm = getattr(self, "_clip_grad_norm", None)

        def step(size: int) -> None:
            try:
                train(size)
            except BaseException:
                self._reset_offloading()  # the next trial would count what it holds
                raise

        def train(size: int) -> None:
            self._ignore_labels(size)
            running, tokens = torch.zeros((), device=self._device), torch.zeros((), device=self._device)
            # From the second batch of an accumulation on, gradients are allocated.
            for _ in range(min(2, self._gradient_accumulation_steps)):
                batch = make(size)
                utils.batch_to_device(batch, self._device)
                count = (batch["labels"] != self._loss_fn.ignore_index).sum()
                tokens = tokens + count
                loss = self._stock_loss(batch) * count
                running = running + loss
                loss.backward()
            if not self._in_backward:
                training.scale_grads(self._model, 1 / tokens)
                if clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm=float(clip_norm))
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)

        optimizers = [self._optimizer]
        if self._in_backward:
            optimizers = list(self._optim_ckpt_wrapper.optim_map.values())  # type: ignore[attr-defined]
        return batchfit.Workload(step, state=[self._model, *optimizers])

    def _first_size(self, batch_size: int, state: Mapping[str, Any] | None) -> int:
        """The size that training starts with: the checkpoint's, if any, the largest, or the config's."""
        largest = self._largest
        assert largest is not None
        if state is not None:
            size, now = int(state["initial_batch_size"]), int(state["batch_size"])
            if max(size, now) > largest:
                raise ValueError(
                    f"resume_from_checkpoint: the checkpoint was trained with a batch of {max(size, now)}, "
                    f"and {largest} is the largest that fits here"
                )
            return size
        if self._settings.use_maximum:
            say(f"use_maximum_batch_size: batch_size is {largest} (the config says {batch_size})")
            return largest
        if batch_size > largest:
            raise ValueError(
                f"batch_size must be at most {largest}, the largest that fits, where batch_increase_function "
                f"is set, not {batch_size}"
            )
        return batch_size

    def _steps_at(self, size: int) -> int:
        """Optimizer steps of an epoch at a size: the loader drops what does not fill a batch."""
        steps = len(self._dataloader.dataset) // size // self._gradient_accumulation_steps
        return steps if self.max_steps_per_epoch is None else min(steps, self.max_steps_per_epoch)

    def _ignore_labels(self, rows: int) -> None:
        self.ignore_labels_cache = torch.full((rows, 1), self._loss_fn.ignore_index, device=self._device)


@final
class _WithState:
    """A loader whose `state_dict` holds the scheduler's state, too, for a checkpoint."""

    def __init__(self, loader: Any, scheduler: batchfit.BatchSizeScheduler) -> None:
        self._loader = loader
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return {**self._loader.state_dict(), _STATE: self._scheduler.state_dict()}


def _resized(loader: Any, size: int) -> Any:
    """A loader like this one with another batch size: a new one costs nothing without workers."""
    if loader.batch_size == size:
        return loader
    return type(loader)(
        dataset=loader.dataset,
        batch_size=size,
        sampler=loader.sampler,
        collate_fn=loader.collate_fn,
        drop_last=loader.drop_last,
    )


@cache
def recipe_class(name: str) -> type[Any]:
    """torchtune's recipe of that name ("full" or "lora") with `AdaptiveBatchSize`.

    Args:
        name: "full" or "lora".

    Returns:
        The class, which is torchtune's recipe with `AdaptiveBatchSize` before it.

    Raises:
        ValueError: there is no recipe of that name.
        ImportError: this torchtune has no such recipe, or lacks what is overridden.
    """
    if name not in _RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(_RECIPES)}, not {name!r}")
    file, class_name = _RECIPES[name]
    # Not importable: `recipes` raises on import, by design.
    path = Path(torchtune.__file__).parent.parent / "recipes" / file
    spec = importlib.util.spec_from_file_location(f"batchfit_torchtune_{name}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError(f"torchtune {torchtune.__version__} has no recipe {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    recipe: Any = getattr(module, class_name, None)
    missing = [one for one in _OVERRIDDEN if not hasattr(recipe, one)]
    if missing:
        raise ImportError(
            f"the recipe {file} of torchtune {torchtune.__version__} has no {', '.join(missing)}, which "
            "batchfit.integrations.torchtune replaces: pip install torchtune==0.6.1"
        )
    return type(class_name, (AdaptiveBatchSize, recipe), {"__module__": __name__})


def run(cfg: DictConfig) -> Any:
    """Set a recipe up, train, and return it.

    Args:
        cfg: the config, with batchfit's keys.

    Returns:
        The recipe, after its training.
    """
    made: Callable[..., Any] = recipe_class(cfg.get("recipe", "full"))
    config.log_config(recipe_name=made.__name__, cfg=cfg)
    recipe = made(cfg=cfg)
    recipe.setup(cfg=cfg)
    recipe.train()
    recipe.cleanup()
    return recipe


@config.parse  # type: ignore[untyped-decorator]
def recipe_main(cfg: DictConfig) -> None:
    """Run a recipe of torchtune's for one device, with batchfit's keys.

    Args:
        cfg: the config, as `tune run` reads it.
    """
    run(cfg)


if __name__ == "__main__":
    sys.exit(recipe_main())
