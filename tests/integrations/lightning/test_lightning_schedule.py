"""BatchSizeSchedule in a real Trainer: sizes, epochs, learning rates, and runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning")

import lightning.pytorch as pl
import lightning_cases as cases
import torch
from lightning_cases import LegacyNet, Net, data, legacy, seeded, trainer, weights
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

import batchfit
from batchfit._noise.pure.estimate import NoiseReading
from batchfit.integrations.lightning import BatchSizeFinder, BatchSizeSchedule, OomProofTraining

pytestmark = [pytest.mark.filterwarnings(text) for text in cases.QUIET]


class Told(Net):
    """Keeps the learning rate and the rows of each batch, and when validation came."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dropout=0.2, width=8, **options)
        self.rates: list[float] = []
        self.rows: list[float] = []
        self.story: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.rows += batch[0][:, 0].tolist()
        self.story.append(f"{len(batch[0])}")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.story.append("val")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": decay, "interval": "epoch"}]


def loader(size: int = 32, *, shuffle: bool = False, **options: Any) -> Any:
    return DataLoader(data(160), batch_size=size, shuffle=shuffle, **options)


def fitted(module: Any, *callbacks: Any, train: Any = None, **options: Any) -> Any:
    run = trainer(*callbacks, **{"max_epochs": 3, **options})
    run.fit(module, loader() if train is None else train)
    return run


def test_lightning_ignores_a_size_that_is_set_while_it_fits() -> None:
    """Lightning #19286: `setup_data()` has no effect in the midst of `fit`. With us the size changes."""

    class Setting(pl.Callback):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            pl_module.batch_size = 80
            trainer.fit_loop.setup_data()

    class Module(Told):
        def train_dataloader(self) -> Any:
            return loader(self.batch_size)

    module = Module(batch_size=32)
    trainer(Setting(), max_epochs=2).fit(module)
    assert module.sizes == [32] * 10
    module = Module(batch_size=32)
    trainer(BatchSizeSchedule("0:32 1:80"), max_epochs=2).fit(module)
    assert module.sizes == [32] * 5 + [80] * 2


@pytest.mark.parametrize("package", [pl, legacy], ids=["lightning", "pytorch_lightning"])
def test_sizes_grow_and_shrink_and_validation_comes_at_each_epochs_end(package: Any) -> None:
    net: Any = Told() if package is pl else LegacyNet()
    run = trainer(BatchSizeSchedule("0:80 1:16 2:32"), package=package, max_epochs=3)
    run.fit(net, loader(80), loader(80))
    trained = [size for size in net.sizes]  # noqa: C416 - a copy
    if package is pl:
        assert trained == [80] * 2 + [16] * 10 + [32] * 5
        assert net.story == [*["80"] * 2, "val", *["16"] * 10, "val", *["32"] * 5, "val"]
    else:
        assert trained == [80] * 2 + [80] * 2 + [16] * 10 + [80] * 2 + [32] * 5 + [80] * 2
    assert run.global_step == 17
    assert run.current_epoch == 3


def test_learning_rates_follow_under_the_modules_own_scheduler() -> None:
    module = Told()
    run = fitted(module, BatchSizeSchedule("0:32 1:128 2:32", lr="sqrt"))
    assert module.rates == pytest.approx([0.1] * 5 + [0.1] * 2 + [0.025] * 5)
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0125)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({"type": "milestone", "milestones": "0:32 96:64", "unit": "samples"}, [32, 32, 32, 64, 64, 64, 32]),
        ({"type": "milestone", "milestones": "0:32 2:64", "unit": "step"}, [32, 32, 64, 32, 64, 64, 32]),
    ],
    ids=["samples", "steps"],
)
def test_sizes_change_within_an_epoch(config: dict[str, Any], sizes: list[int]) -> None:
    events: list[Any] = []
    module = Told()
    run = fitted(module, BatchSizeSchedule(config, lr="linear", on_event=events.append), max_epochs=2)
    expected = [32, 32, 32, 64, 64, 64, 32] if config["unit"] == "samples" else [32, 32, 64, 32, 64, 64, 32]
    assert module.sizes == expected == sizes
    assert run.global_step == len(sizes)
    assert [event.size_after for event in events] == [64]
    assert module.rates[0] == pytest.approx(0.1)
    assert module.rates[3] == pytest.approx(0.2)


def test_half_an_epoch_is_half_at_every_size_and_validation_comes_in_the_midst() -> None:
    module = Told()
    run = trainer(
        BatchSizeSchedule("0:16 1:8"), max_epochs=2, limit_train_batches=0.5, val_check_interval=0.4
    )
    run.fit(module, loader(16), loader(80))
    assert module.story == [*["16", "16", "val"] * 2, "16", *[*["8"] * 4, "val"] * 2, *["8"] * 2]


def test_an_increase_is_asked_for_at_each_epoch_and_capped_by_what_was_found() -> None:
    config = batchfit.IncreaseBatchSizeConfig(function=_grow, clamp=True)
    module = Told(limit=100)
    finder = BatchSizeFinder(tolerance=0.0)
    fitted(module, finder, BatchSizeSchedule(config, 32))
    assert finder.optimal_batch_size == 100
    assert module.sizes == [32] * 5 + [72] * 2 + [16] + [100, 60]
    module = Told(limit=100)
    fitted(
        module,
        BatchSizeFinder(tolerance=0.0),
        BatchSizeSchedule(config, 32),
        OomProofTraining(compared="ignore"),
    )
    assert module.story[8:11] == ["112", "56", "56"]  # more than fits, in microbatches


def _grow(epoch: int, current: int) -> int:
    return 40 if epoch else 0


class Readings:
    """A noise scale that speaks for large batches from the first reading on."""

    def reading(self) -> Any:
        error = None
        return NoiseReading(1e4, 9e3, 1.1e4, 1.0, 1.0, error, error, 100, 1e4, 100.0, 0, "")


def test_a_size_that_nobody_could_foresee_moves_the_epochs_end_and_its_validation() -> None:
    config = batchfit.NoiseBatchSizeConfig(max_batch_size=64, min_steps=2)
    module, readings = Told(), Readings()
    schedule = BatchSizeSchedule(config, 16, noise=readings)  # type: ignore[arg-type]
    run = trainer(schedule, max_epochs=2, limit_val_batches=1)
    run.fit(module, loader(16), loader(80))
    epochs = " ".join(module.story).split("val")
    assert [sum(map(int, epoch.split())) for epoch in epochs] == [160, 160, 0]
    assert module.story[0] == "16"
    assert "32" in module.story


class Stop(pl.Callback):
    """Saves a checkpoint after so many batches, and ends the run there."""

    def __init__(self, path: Path, after: int) -> None:
        self.path, self.after = path, after

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.path)
            raise TimeoutError("the job's time is up")


@pytest.mark.parametrize(
    "shuffle", [pytest.param(False, marks=pytest.mark.slow), True], ids=["in_order", "shuffled"]
)
@pytest.mark.parametrize(
    "config", ["0:32 1:80 2:16", {"type": "milestone", "milestones": "0:32 200:48", "unit": "samples"}]
)
@pytest.mark.parametrize("after", [2, 5, 6, 8])
def test_a_run_that_goes_on_is_the_run_that_was_never_stopped(
    after: int, config: Any, shuffle: bool, tmp_path: Path
) -> None:
    """In the midst of an epoch, and after the last batch of one."""

    def module() -> Any:
        made = seeded(Told)
        made.net[2].p = 0.0  # Lightning does not keep random numbers
        return made

    whole = module()
    trainer(BatchSizeSchedule(config, lr="sqrt"), max_epochs=3).fit(whole, loader(shuffle=shuffle), loader())
    part, rest = module(), module()
    stop = Stop(tmp_path / "a.ckpt", after)
    run = trainer(BatchSizeSchedule(config, lr="sqrt"), stop, max_epochs=3)
    with pytest.raises(TimeoutError, match="time is up"):
        run.fit(part, loader(shuffle=shuffle), loader())
    run = trainer(BatchSizeSchedule(config, lr="sqrt"), max_epochs=3)
    run.fit(rest, loader(shuffle=shuffle), loader(), ckpt_path=tmp_path / "a.ckpt")
    assert [one for one in part.story + rest.story if one != "val"] == [
        one for one in whole.story if one != "val"
    ]
    tail = min(8, len(rest.story))
    assert rest.story[-tail:] == whole.story[-tail:]
    assert part.rows + rest.rows == whole.rows
    assert part.rates + rest.rates == pytest.approx(whole.rates)
    assert all(map(torch.equal, weights(rest), weights(whole)))


@pytest.mark.parametrize(
    "config", ["0:32 1:80 2:16", {"type": "milestone", "milestones": "0:32 200:48", "unit": "samples"}]
)
def test_a_checkpoint_at_an_epochs_end_goes_on_with_the_next(config: Any, tmp_path: Path) -> None:
    whole, part, rest = Told(), Told(), Told()
    fitted(whole, BatchSizeSchedule(config))
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    fitted(part, BatchSizeSchedule(config), saving, max_epochs=1, enable_checkpointing=True)
    again = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    run = trainer(BatchSizeSchedule(config), again, max_epochs=3, enable_checkpointing=True)
    run.fit(rest, loader(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert part.sizes + rest.sizes == whole.sizes
    assert part.rows + rest.rows == whole.rows


def test_fit_again_goes_on() -> None:
    module, schedule = Told(), BatchSizeSchedule("0:32 1:80 2:16")
    run = fitted(module, schedule, max_epochs=1)
    run.fit_loop.max_epochs = 3
    run.fit(module, loader())
    assert module.sizes == [32] * 5 + [80] * 2 + [16] * 10


@pytest.mark.parametrize(
    "config", ["0:32 1:80", {"type": "milestone", "milestones": "0:32 2:64", "unit": "step"}]
)
def test_another_trainer_begins_again(config: Any, tmp_path: Path) -> None:
    """The folds of a cross-validation, with one callback."""
    schedule, stories = BatchSizeSchedule(config), []
    for _ in range(2):
        module = Told()
        run = fitted(module, schedule, max_epochs=2)
        stories.append(module.sizes)
        run.save_checkpoint(tmp_path / "a.ckpt")  # after `fit`, and yet complete
    assert stories[0] == stories[1]
    assert sum(stories[0]) == 320
    run.test(Told(), loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)  # loads callbacks too
    module = Told()
    fitted(module, schedule, max_epochs=2)
    assert module.sizes == stories[0]
    module = Told()
    run = trainer(schedule, max_epochs=3)
    run.fit(module, loader(), ckpt_path=tmp_path / "a.ckpt")
    assert module.sizes == ([80] * 2 if isinstance(config, str) else [64] * 2 + [32])


def test_workers_samplers_and_a_resizable_loader_of_the_users() -> None:
    module = Told()
    fitted(module, BatchSizeSchedule("0:40 1:80"), train=loader(40, num_workers=1), max_epochs=2)
    assert module.sizes == [40] * 4 + [80] * 2
    for sampler in (WeightedRandomSampler([1.0] * 160, 160), RandomSampler(data(160), num_samples=160)):
        module = Told()
        fitted(
            module,
            BatchSizeSchedule("0:40 1:80"),
            train=DataLoader(data(160), 40, sampler=sampler),
            max_epochs=2,
        )
        assert module.sizes == [40] * 4 + [80] * 2
    module = Told()
    fitted(
        module, BatchSizeSchedule("0:40 1:80"), train=batchfit.ResizableLoader(data(160), 40), max_epochs=2
    )
    assert module.sizes == [40] * 4 + [80] * 2


def test_a_loader_with_its_own_way_of_iterating_is_refused_and_other_kinds_are_taken() -> None:
    class Scaled(DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((batch[0] * 100,) for batch in super().__iter__())

    class Inner(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    class Named(DataLoader[Any]):
        """Only its arguments are its own."""

    for kind, name in ((Scaled, "__iter__"), (Inner, "_get_iterator")):
        module = Told()
        with pytest.raises(TypeError, match=f"{kind.__name__} has its own {name}"):
            fitted(module, BatchSizeSchedule("0:32 1:80"), train=kind(data(160), 32))
        assert module.sizes == []
    module = Told()
    fitted(module, BatchSizeSchedule("0:32 1:80"), train=Named(data(160), 32), max_epochs=2)
    assert module.sizes == [32] * 5 + [80] * 2


def test_who_asks_for_the_number_of_steps_does_not_keep_the_old_loader() -> None:
    class Asking(Told):
        def configure_optimizers(self) -> Any:
            self.steps = self.trainer.estimated_stepping_batches
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Asking()
    fitted(module, BatchSizeSchedule("0:32 1:80"), max_epochs=2)
    assert module.steps == 10
    assert module.sizes == [32] * 5 + [80] * 2


def test_the_size_is_logged(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    run = fitted(Told(), BatchSizeSchedule("0:32 1:80"), logger=logger, log_every_n_steps=1, max_epochs=2)
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("batch_size")
    assert [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]] == [32.0] * 5 + [
        80.0
    ] * 2
    assert run.progress_bar_metrics["batch_size"] == 80


# --- bad input


def test_settings_that_contradict_a_schedule_are_named() -> None:
    for options, text in (
        (
            {"reload_dataloaders_every_n_epochs": 1},
            "reload_dataloaders_every_n_epochs must be 0 with BatchSizeSchedule",
        ),
        ({"overfit_batches": 2}, "overfit_batches must be 0 with BatchSizeSchedule"),
    ):
        with pytest.raises(ValueError, match=text):
            fitted(Told(), BatchSizeSchedule("0:32 1:80"), **options)
    steps = {"type": "milestone", "milestones": "0:32 2:64", "unit": "step"}
    with pytest.raises(ValueError, match="accumulate_grad_batches must be 1"):
        fitted(Told(), BatchSizeSchedule(steps), accumulate_grad_batches=2)
    theirs = pl.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(ValueError, match="GradientAccumulationScheduler beside batchfit's BatchSizeSchedule"):
        fitted(Told(), BatchSizeSchedule("0:32 1:80"), theirs)
    with pytest.raises(ValueError, match="one train loader with BatchSizeSchedule, not 2"):
        fitted(Told(), BatchSizeSchedule("0:32 1:80"), train=[loader(), loader()])
    with pytest.raises(TypeError, match="the train loader must have a batch size"):
        fitted(Told(), BatchSizeSchedule("0:32 1:80"), train=[torch.ones(2, 16)])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BatchSizeSchedule("0:32 0:80"), "milestones"),
        (lambda: BatchSizeSchedule("0:32 1:80", largest=0), "largest must be a positive integer"),
        (lambda: BatchSizeSchedule("0:32 1:80", lr="cubic"), "lr must"),
        (lambda: BatchSizeSchedule("0:32 1:80", lr=["sqrt", "cubic"]), "lr must"),
        (lambda: BatchSizeSchedule("0:32 1:80", lr=3), "lr must"),  # type: ignore[arg-type]
        (lambda: BatchSizeSchedule(3), "must be a file, text, a mapping or a schedule, not 3"),
        (lambda: BatchSizeSchedule("0:32 1:80", 64), "initial_batch_size must be 32"),
        (lambda: BatchSizeSchedule(None, 0), "initial_batch_size must"),
    ],
)
def test_wrong_arguments_are_reported_when_the_callback_is_made(make: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        make()
