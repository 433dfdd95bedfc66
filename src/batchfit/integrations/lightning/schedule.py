"""BatchSizeSchedule: the batch size changes while `fit` runs, and the learning rate with it.

Rules
- The user's train loader is replaced by a `ResizableLoader` over the same dataset for as long as `fit` runs.
  Sizes are those of all ranks; each rank loads its part, without a DistributedSampler.
- Lightning counts an epoch's batches when it loads data. Here they are counted again for each epoch, and when
  a size changes that was not planned, so that epochs end and validation begins where they should.
- Schedule and loader are in the callback's state: a resumed run has the sizes, samples and learning
  rates of one that was never stopped. With another Trainer and no checkpoint it starts from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch

import batchfit
from batchfit.integrations.lightning.finder import BatchSizeFinder
from batchfit.integrations.lightning.framework import (
    Callback,
    ShownValues,
    check_trainer,
    refuse_beside,
    write,
)
from batchfit.integrations.lightning.loaders import leaves, requested, resizable, size_of
from batchfit.integrations.lightning.microbatches import OomProofTraining
from batchfit.schedules import load_schedule


class BatchSizeSchedule(Callback):
    """Moves the batch size by a schedule, and the learning rate by a rule.

        config = batchfit.StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048)
        Trainer(callbacks=[BatchSizeSchedule(config, lr="sqrt")]).fit(module, loader)

    Sizes are of all ranks together. Beside a `BatchSizeFinder` (listed before it) they are capped by what was
    found, unless `OomProofTraining` runs whatever does not fit in microbatches.

    Args:
        config: a schedule, its text or mapping: see `batchfit.BatchSizeScheduler`.
        initial_batch_size: the size to start with; default: the loader's, times the ranks.
        lr: how the learning rate follows: "linear", "sqrt", "power(0.6)", "seesaw" or "none", or one for each
            parameter group.
        largest: the largest batch that fits.
        tokens_per_sample: for schedules in tokens.
        noise: for `NoiseBatchSizeConfig`: a `GradientNoise`; give the same one to `OomProofTraining(noise=)`.
        throughput: for `NoiseBatchSizeConfig`: `throughput(size)` gives samples per second.
        on_event: called with each `batchfit.ScheduleEvent`.

    Attributes:
        scheduler: the `BatchSizeScheduler`; None before `fit`.
    """

    def __init__(
        self,
        config: Any,
        initial_batch_size: int | None = None,
        *,
        lr: str | Sequence[str] | None = None,
        largest: int | None = None,
        tokens_per_sample: int | None = None,
        noise: batchfit.GradientNoise | None = None,
        throughput: Callable[[int], float] | None = None,
        on_event: Callable[[batchfit.ScheduleEvent], object] | None = None,
    ) -> None:
        config = load_schedule(config, name="config")
        self.scheduler: batchfit.BatchSizeScheduler | None = None
        self._config = config
        self._initial = initial_batch_size
        self._lr = lr
        self._largest = largest
        self._on_event = on_event
        self._shown = ShownValues()
        self._options: dict[str, Any] = {
            "tokens_per_sample": tokens_per_sample,
            "noise": noise,
            "throughput": throughput,
        }
        if largest is not None and (type(largest) is not int or largest < 1):
            raise ValueError(f"largest must be a positive integer or None, not {largest!r}")
        # Wrong sizes and rules raise here, not after the set-up.
        if initial_batch_size is not None or getattr(config, "starts_by_itself", False):
            options = {"largest": largest, "on_event": on_event, **self._options}
            batchfit.BatchSizeScheduler(config, initial_batch_size, **options)
        if lr is not None:
            rules = [lr] if isinstance(lr, str) or not isinstance(lr, Sequence) else lr
            groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in rules]
            optimizer = torch.optim.SGD(groups, lr=1.0)
            batchfit.BatchSizeScheduler(None, 1, lr=lr, optimizer=optimizer, world_size=1).close()
        self._feed: _Feed | None = None
        self._saved: Mapping[str, Any] | None = None  # of a checkpoint, for the `fit` that comes
        self._left: tuple[Any, dict[str, Any]] | None = None  # where the last `fit` ended, and whose it was
        self._trainer: Any = None

    # --- hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Refuse settings that contradict a schedule."""
        check_trainer(trainer, self)
        if stage != "fit":
            return
        refuse_beside(trainer, self, "BatchSizeFinder", why="it sets a size of its own. Use batchfit's")
        own = next(place for place, one in enumerate(trainer.callbacks) if one is self)
        if any(isinstance(one, BatchSizeFinder) for one in trainer.callbacks[own + 1 :]):
            raise ValueError(
                "callbacks must not hold BatchSizeSchedule before BatchSizeFinder, which searches with the "
                "loader that the schedule replaces: list the finder first"
            )
        why = "both would change the batch of an optimizer step. Keep one of them"
        refuse_beside(trainer, self, "GradientAccumulationScheduler", why=why)
        for name, value in (
            ("reload_dataloaders_every_n_epochs", trainer.reload_dataloaders_every_n_epochs),
            ("overfit_batches", trainer.overfit_batches),
        ):
            if value:
                raise ValueError(
                    f"{name} must be 0 with BatchSizeSchedule, not {value!r}: reloaded ones would "
                    "replace the loader whose size changes"
                )
        if trainer.accumulate_grad_batches != 1 and getattr(self._config, "unit", "step") == "step":
            raise ValueError(
                "accumulate_grad_batches must be 1 with a BatchSizeSchedule that counts steps, not "
                f"{trainer.accumulate_grad_batches}: the loader would count batches. Count samples or epochs"
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The train loader becomes one whose size can change."""
        loop = trainer.fit_loop
        given, _ = requested(trainer, loop)
        loaders = leaves(given)
        if len(loaders) != 1:
            raise ValueError(f"there must be one train loader with BatchSizeSchedule, not {len(loaders)}")
        own = size_of(loaders[0], world_size=1)
        if own is None:
            raise TypeError(f"the train loader must have a batch size, not {loaders[0]!r:.80}")
        if not isinstance(loaders[0], batchfit.ResizableLoader):
            own *= trainer.world_size
        loader = resizable(loaders[0], batch_size=max(own, trainer.world_size))
        self._trainer, self._shown = trainer, ShownValues()
        self.scheduler = self._made(trainer, loader, own)
        saved, self._saved = self._saved, None
        if saved is None and self._left is not None and self._left[0] is loop.epoch_progress:
            saved = self._left[1]  # `fit` again with the same Trainer, which goes on counting epochs
        if saved is not None:
            loader.load_state_dict(saved["loader"])
            self.scheduler.load_state_dict(saved["scheduler"])
        self._feed = _Feed(loader, lambda: int(loop.epoch_progress.current.processed), self._begun)
        loop._data_source.instance = self._feed
        loop._combined_loader = None  # code that read the number of steps has loaded the user's

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """The pass of this epoch begins, before Lightning sets its limits and its progress bar."""
        assert self._feed is not None
        self._feed.begin()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A schedule that does not count epochs moves here, after an optimizer step."""
        assert self.scheduler is not None
        self._shown.show(trainer, pl_module, batch_size=self.scheduler.batch_size)
        if self._unit == "epoch" or trainer.fit_loop._should_accumulate():
            return
        _, changed = self.scheduler.step()
        if changed and (count := self._count(trainer)) is not None:
            loop = trainer.fit_loop
            if loop._data_fetcher.fetched >= count:  # what is left is dropped: this was the last batch
                loop._data_fetcher.done = loop.epoch_loop.batch_progress.is_last_batch = True

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Let go of the optimizers and the loader."""
        self._let_go()

    def teardown(self, trainer: Any, pl_module: Any, stage: str | None = None) -> None:
        """Let go of the optimizers and the loader."""
        self._let_go()

    def state_dict(self) -> dict[str, Any]:
        """Where schedule and loader stand."""
        if self.scheduler is None or self._feed is None:
            return dict(self._saved or (self._left[1] if self._left is not None else {}))
        return {"scheduler": self.scheduler.state_dict(), "loader": self._feed.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there, when `fit` begins."""
        self._saved = state_dict or None

    # --- how

    @property
    def _unit(self) -> str:
        return str(getattr(self._config, "unit", "epoch"))

    def _made(self, trainer: Any, loader: batchfit.ResizableLoader, own: int) -> batchfit.BatchSizeScheduler:
        initial = self._initial
        if initial is None and not getattr(self._config, "starts_by_itself", False):
            initial = own
        rule: dict[str, Any] = {}
        if self._lr is not None:
            if len(trainer.optimizers) != 1:
                raise ValueError(
                    f"lr must be None with {len(trainer.optimizers)} optimizers, not {self._lr!r}"
                )
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            rule = {"lr": self._lr, "optimizer": trainer.optimizers[0], "lr_scheduler": schedulers or None}
        return batchfit.BatchSizeScheduler(
            self._config,
            initial,
            loader=loader,
            largest=self._cap(trainer),
            world_size=trainer.world_size if trainer.world_size > 1 else None,
            on_event=self._log_event,
            **rule,
            **self._options,
        )

    def _cap(self, trainer: Any) -> int | None:
        found = next((one for one in trainer.callbacks if isinstance(one, BatchSizeFinder)), None)
        if found is None or found.optimal_batch_size is None:
            return self._largest
        if any(isinstance(one, OomProofTraining) for one in trainer.callbacks):
            return self._largest
        most: int = found.optimal_batch_size * trainer.world_size
        return most if self._largest is None else min(most, self._largest)

    def _log_event(self, event: batchfit.ScheduleEvent) -> None:
        if event.kind == "changed":
            write(self._trainer, {"batchfit/batch_size": event.size_after})
        if self._on_event is not None:
            self._on_event(event)

    def _begun(self, epoch: int) -> None:
        """A pass of the loader begins. An epoch that Lightning goes on with has no other hook."""
        assert self.scheduler is not None
        if self._unit == "epoch":
            self.scheduler.step(epoch)
        self._count(self._trainer)

    def _count(self, trainer: Any) -> int | None:
        """Set the number of batches of this epoch in all parts of Lightning that keep it."""
        loop = trainer.fit_loop
        combined, fetcher = loop._combined_loader, loop._data_fetcher
        if combined is None or self._feed is None:
            return None
        try:
            total = len(self._feed)
        except (TypeError, NotImplementedError):  # a stream: Lightning fetches one batch ahead
            return None
        limit = trainer.limit_train_batches
        count = min(total, limit) if isinstance(limit, int) else int(total * limit)
        combined.limits = [count]
        if combined._iterator is not None:
            combined._iterator.limits = [count]
        loop.max_batches = count
        known = getattr(trainer, "val_check_batch", None)  # not before Lightning has loaded data once
        if isinstance(trainer.val_check_interval, float) and isinstance(known, int):
            trainer.val_check_batch = max(1, int(count * trainer.val_check_interval))
        if fetcher is not None and fetcher.length is not None:
            fetcher.length = count
        return count

    def _let_go(self) -> None:
        self._saved = None  # a `test` has loaded it too, and the next `fit` may be of another Trainer
        if self.scheduler is None:
            return
        if self._feed is not None:
            self._left = (self._trainer.fit_loop.epoch_progress, self.state_dict())
            self._feed.end()
        self.scheduler.close()
        self.scheduler = self._feed = self._trainer = None


@final
class _Feed:
    """What Lightning iterates over: the passes of a ResizableLoader, at Lightning's epochs.

    Lightning makes more iterators than it uses: an iterator from which no batch was taken is used again.
    """

    def __init__(
        self, loader: batchfit.ResizableLoader, epoch: Callable[[], int], begun: Callable[[int], None]
    ) -> None:
        self.loader = loader
        self.epoch = epoch
        self.begun = begun
        self._pass: _LoaderPass | None = None

    @property
    def dataset(self) -> Any:
        """What is loaded."""
        return self.loader.dataset

    @property
    def batch_size(self) -> int:
        """Samples of the next batch, over all ranks."""
        return self.loader.batch_size

    def begin(self) -> _LoaderPass:
        """The pass of this epoch."""
        if self._pass is None or self._pass.is_begun or self._pass.epoch != self.epoch():
            self.end()
            self._pass = _LoaderPass(self)
        return self._pass

    def end(self) -> None:
        """End the workers now, not when Lightning's loops release the loader."""
        if self._pass is not None:
            self._pass.end()
            self._pass = None

    def __iter__(self) -> _LoaderPass:
        return self.begin()

    def __len__(self) -> int:
        return len(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """The loader's: Lightning keeps those of loaders that have one."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The loader's."""
        self.end()
        self.loader.load_state_dict(state)


@final
class _LoaderPass(Iterator[Any]):
    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self.is_begun = False
        self._start()

    def _start(self) -> None:
        self.epoch = self._feed.epoch()
        self._feed.loader.set_epoch(self.epoch)
        self._batches: Iterator[Any] = iter(self._feed.loader)
        self._feed.begun(self.epoch)

    def end(self) -> None:
        self._batches = iter(())

    def __next__(self) -> Any:
        if not self.is_begun and self.epoch != self._feed.epoch():
            self._start()  # Lightning found that the epoch it went on with had ended
        self.is_begun = True
        return next(self._batches)
