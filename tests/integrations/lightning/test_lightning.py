"""BatchSizeFinder in a real Trainer: what Lightning's own does wrong on the pinned version, ours right."""

from __future__ import annotations

import gc
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning")
pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")

import lightning.pytorch as pl
import lightning_cases as cases
import pytorch_lightning as legacy
import torch
from lightning.pytorch.callbacks import BatchSizeFinder as Theirs
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning_cases import LegacyNet, Net, Own, data, seeded, trainer, weights
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

import batchfit
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.integrations.lightning import BatchSizeFinder, BatchSizeSchedule, OomProofTraining, framework
from batchfit.integrations.lightning.loaders import largest_batch

pytestmark = [pytest.mark.filterwarnings(text) for text in cases.QUIET]


# --- complaints that reproduce without us, and are gone with us


@cases.SEARCH_OF_2_6
def test_lightning_sets_a_size_that_it_never_ran_and_ours_does_not() -> None:
    """No issue of theirs: `if new_size >= max_val: break` comes after the attribute was doubled."""
    module = Own(batch_size=2, limit=40)
    theirs = Theirs(max_val=64)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(theirs).fit(module)
    assert theirs.optimal_batch_size == 64
    assert max(size for size in module.sizes if size <= 40) == 32

    module = Own(batch_size=2, limit=40)
    ours = BatchSizeFinder(max_val=64, tolerance=0.0)
    trainer(ours).fit(module)
    assert ours.optimal_batch_size == 40 == module.batch_size
    assert module.sizes[-1] == 256 % 40
    assert module.sizes[-2] == 40


class Late:
    """The finder of Lightning's own documentation, which searches again at an epoch's start."""

    def on_fit_start(self, *args: Any, **kwargs: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.sizes.append(-1)
            self.scale_batch_size(trainer, pl_module)  # type: ignore[attr-defined]
            pl_module.sizes.append(-2)


class LateTheirs(Late, Theirs):
    pass


class LateOurs(Late, BatchSizeFinder):
    pass


@cases.SEARCH_OF_2_6
def test_a_late_search_runs_no_batch_in_lightning_and_finds_the_size_in_ours() -> None:
    """Lightning #21903: `max_steps` is set as if training began."""
    module = Own(batch_size=8, limit=100)
    theirs = LateTheirs(max_val=64)
    trainer(theirs, max_epochs=3).fit(module)
    tried = module.sizes[module.sizes.index(-1) + 1 :]
    assert theirs.optimal_batch_size in (64, 8)
    assert not [size for size in tried if size > 8]

    module = Own(batch_size=8, limit=100)
    ours = LateOurs(tolerance=0.0)
    run = trainer(ours, max_epochs=3)
    run.fit(module)
    assert ours.optimal_batch_size == 100
    assert module.sizes[module.sizes.index(-2) + 1 :] == [100, 100, 56] * 4  # and validation
    assert run.global_step == 32 + 3 + 3


def test_lightning_refuses_loaders_given_to_fit_and_ours_takes_them(living_bytes: int) -> None:
    """Lightning #4040."""
    loader = DataLoader(data(), batch_size=2)
    with pytest.raises(MisconfigurationException, match="passed directly"):
        trainer(Theirs()).fit(Net(batch_size=2), loader)

    module, ours = Net(), BatchSizeFinder(tolerance=0.0)
    with batchfit.virtual_memory(living_bytes + 200 * 1024):
        run = trainer(ours)
        run.fit(module, loader)
        assert run.train_dataloader.batch_size == ours.optimal_batch_size
    assert ours.result is not None
    assert 32 < ours.optimal_batch_size < 256
    assert ours.result.survived_steps == 25
    assert module.sizes[-2:] == [ours.optimal_batch_size, 256 % ours.optimal_batch_size]
    assert loader.batch_size == 2  # the user's own is not touched


def test_lightning_leaves_other_random_numbers_and_ours_a_run_as_if_it_had_not_searched() -> None:
    """Their own comment: "There are more states that needs to be reset (#4512 and #4870)"."""

    class Looking(Own):
        def on_train_start(self) -> None:
            self.seen = torch.get_rng_state()

    def run(*callbacks: Any, size: int) -> tuple[Any, Any]:
        module = seeded(lambda: Looking(batch_size=size, limit=50))
        torch.manual_seed(5)
        trainer(*callbacks, max_epochs=2).fit(module)
        return module.seen, weights(module)

    plain, after = run(size=32)
    theirs, _ = run(Theirs(), size=2)
    assert not torch.equal(plain, theirs)
    ours, trained = run(BatchSizeFinder(power_of_two=True), size=2)
    assert torch.equal(plain, ours)
    assert all(map(torch.equal, after, trained))


def test_nothing_fits_is_an_error_about_a_sampler_in_lightning_and_says_so_in_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size should be a positive integer"):
        trainer(Theirs(), default_root_dir=tmp_path).fit(Own(batch_size=2, limit=0))
    assert list(tmp_path.glob(".scale_batch_size_*.ckpt"))  # and its checkpoint stays
    with pytest.raises(NothingFitsError, match="a batch of 1 does not fit"):
        trainer(BatchSizeFinder()).fit(Own(batch_size=2, limit=0))


def test_several_evaluation_loaders_are_refused_by_lightning_and_searched_by_ours() -> None:
    class Two(Own):
        def val_dataloader(self) -> Any:
            return [self.train_dataloader(), self.train_dataloader()]

    with pytest.raises(MisconfigurationException, match="multiple"):
        trainer(Theirs()).validate(Two(batch_size=2), verbose=False)
    module, ours = Two(batch_size=2, limit=70), BatchSizeFinder(tolerance=0.0)
    trainer(ours).validate(module, verbose=False)
    assert ours.optimal_batch_size == 70
    assert module.sizes[-8:] == [70, 70, 70, 46] * 2


def test_the_size_is_half_of_what_fits_in_lightning() -> None:
    module = Own(batch_size=2, limit=63)
    theirs = Theirs()
    trainer(theirs).fit(module)
    assert theirs.optimal_batch_size == 32
    ours = BatchSizeFinder(tolerance=0.0)
    trainer(ours).fit(Own(batch_size=2, limit=63))
    assert ours.optimal_batch_size == 63


# --- what a search promises


@pytest.mark.parametrize("way", ["validate", "test", "predict"])
@pytest.mark.parametrize("package", [pl, legacy], ids=["lightning", "pytorch_lightning"])
def test_every_way_of_running_has_its_size(way: str, package: Any, living_bytes: int) -> None:
    module: Any = LegacyNet() if package is legacy else Net()
    ours = BatchSizeFinder()
    with batchfit.virtual_memory(living_bytes + 120 * 1024):
        run = trainer(ours, package=package)
        done = getattr(run, way)(
            module, DataLoader(data(), batch_size=2), **{} if way == "predict" else {"verbose": False}
        )
    assert ours.result is not None
    assert 16 < ours.optimal_batch_size < 256
    assert module.sizes[-1] == 256 % ours.optimal_batch_size
    assert module.sizes[-2] == ours.optimal_batch_size
    assert module.training
    if way == "predict":
        assert sum(len(rows) for rows in done) == 256


def test_a_trainer_of_pytorch_lightning_takes_the_callback_alone() -> None:
    ours = BatchSizeFinder(max_val=16)
    assert isinstance(ours, pl.Callback)
    assert isinstance(ours, legacy.Callback)
    run = legacy.Trainer(callbacks=ours, accelerator="cpu", logger=False, enable_checkpointing=False)
    assert ours in run.callbacks


class Module(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=self.batch_size, shuffle=True)


def test_a_datamodule_and_hparams_get_the_size() -> None:
    datamodule, ours = Module(), BatchSizeFinder(max_val=48)
    trainer(ours).fit(Net(), datamodule=datamodule)
    assert datamodule.batch_size == 48

    class Kept(Net):
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(data(), batch_size=self.hparams.batch_size)

    module = Kept(batch_size=2)
    trainer(BatchSizeFinder(max_val=48)).fit(module)
    assert module.hparams.batch_size == 48
    assert module.sizes[-2:] == [48, 16]


def test_an_attribute_that_no_loader_uses_is_reported_and_the_loader_gets_the_size(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fixed(Own):
        def train_dataloader(self) -> Any:
            return DataLoader(data(), batch_size=4)

    module = Fixed(batch_size=2)
    trainer(BatchSizeFinder(max_val=48)).fit(module)
    assert module.sizes[-2:] == [48, 16]
    assert "train_dataloader does not use it" in caplog.text
    with pytest.raises(ValueError, match=r"reload_dataloaders_every_n_epochs.*BatchSizeFinder"):
        trainer(BatchSizeFinder(max_val=48), reload_dataloaders_every_n_epochs=1).fit(Fixed(batch_size=2))


def test_loaders_of_any_nesting_get_the_size() -> None:
    class Pairs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"][0])

    class Batches(BatchSampler):
        """A batch sampler of the user's own."""

    own = Batches(SequentialSampler(data(64)), 2, drop_last=True)
    loaders = {"a": DataLoader(data(), batch_size=2), "b": [DataLoader(data(64), batch_sampler=own)]}
    module = Pairs()
    trainer(BatchSizeFinder(max_val=32)).fit(module, CombinedLoader(loaders, "min_size"))
    assert module.sizes[-4:] == [32] * 4
    assert own.batch_size == 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(data())


def test_streams_and_loaders_that_only_the_user_knows() -> None:
    module = Net()
    trainer(BatchSizeFinder(max_val=32)).fit(module, DataLoader(Stream(), batch_size=2))
    assert module.sizes[-1] == 32

    class Strange:
        batch_size = 2

        def __iter__(self) -> Any:
            yield (torch.ones(self.batch_size, 16),)

    with pytest.raises(TypeError, match=r"make_batch must be given.*Strange"):
        trainer(BatchSizeFinder(max_val=32)).fit(Net(), Strange())
    module = Net()
    finder = BatchSizeFinder(max_val=32, make_batch=lambda n: [torch.ones(n, 16)])
    trainer(finder).fit(module, Strange())
    assert module.sizes[-1] == 32
    with pytest.raises(TypeError, match="batch_size=None"):
        trainer(finder).fit(Net(), DataLoader(data(), batch_size=None))


class Plain:
    """A loader that has no size to set."""

    def __iter__(self) -> Any:
        return iter([(torch.ones(8, 16),)])


class Bucket:
    """A batch sampler that makes its batches when it is made."""

    def __init__(self, samples: int, batch_size: int) -> None:
        self.batch_size = batch_size
        self.batches = torch.arange(samples).split(batch_size)

    def __iter__(self) -> Any:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Fixed:
    """One that has no size at all."""

    def __iter__(self) -> Any:
        return iter([list(range(8))] * 4)

    def __len__(self) -> int:
        return 4


class Sized(Fixed):
    """One whose size cannot be set."""

    @property
    def batch_size(self) -> int:
        return 8


@pytest.mark.parametrize(
    ("loader", "options", "text"),
    [
        (Plain, {}, "must be a DataLoader or have a batch_size that can be set"),
        (lambda: DataLoader(data(), batch_sampler=Bucket(256, 8)), {}, "Bucket makes one of 8 samples"),
        (lambda: DataLoader(data(), batch_sampler=Fixed()), {}, "integer batch_size .* Fixed"),
        (lambda: DataLoader(data(), batch_sampler=Sized()), {}, "can be set, and that of Sized cannot"),
        (lambda: DataLoader(data(), 8), {"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every"),
    ],
)
def test_a_loader_that_would_not_have_the_size_is_refused_before_the_first_trial(
    loader: Any, options: dict[str, Any], text: str
) -> None:
    module = Net(batch_size=4)  # an attribute that no loader uses
    make_batch = (lambda size: [torch.ones(size, 16)]) if loader is Plain else None
    with pytest.raises((TypeError, ValueError), match=text):
        trainer(BatchSizeFinder(make_batch=make_batch), **options).fit(module, loader())
    assert module.sizes == []
    assert module.batch_size == 4


def test_an_attribute_that_makes_the_batch_sampler_is_enough() -> None:
    class Made(Own):
        def train_dataloader(self) -> Any:
            return DataLoader(data(), batch_sampler=Bucket(256, self.batch_size))

    module, ours = Made(batch_size=2), BatchSizeFinder(max_val=64)
    run = trainer(ours, reload_dataloaders_every_n_epochs=1, max_epochs=2)
    run.fit(module)
    assert ours.optimal_batch_size == 64 == module.batch_size
    assert run.global_step == 8


def test_a_resizable_loader_is_resized() -> None:
    loader = batchfit.ResizableLoader(data(), 4)
    module = Net()
    trainer(BatchSizeFinder(max_val=32)).fit(module, loader)
    assert loader.batch_size == 32 == module.sizes[-1]


def test_a_size_leaves_a_batch_of_every_loader() -> None:
    """Samples are the sampler's, and a loader that drops its last batch must have a whole one."""
    module, ours = Net(), BatchSizeFinder()
    some = SubsetRandomSampler(range(50))
    run = trainer(ours)
    run.fit(module, DataLoader(data(), batch_size=2, sampler=some, drop_last=True))
    assert ours.optimal_batch_size == 50 == module.sizes[-1]
    assert run.global_step == 1

    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.loss(batch["a"]) + self.loss(batch["b"])

    for drop_last, found in ((True, 24), (False, 60)):
        ours = BatchSizeFinder()
        loaders = {
            "a": DataLoader(data(60), batch_size=2),
            "b": DataLoader(data(24), batch_size=2, drop_last=drop_last),
        }
        run = trainer(ours)
        run.fit(Both(), loaders)
        assert ours.optimal_batch_size == found
        assert run.global_step == -(-60 // found)
    sampler = BatchSampler(SubsetRandomSampler(range(20)), 2, drop_last=True)
    trainer(ours).fit(Net(), DataLoader(data(), batch_sampler=sampler))
    assert ours.optimal_batch_size == 20


def test_the_samples_of_a_rank_are_counted_once() -> None:
    own = DistributedSampler(data(100), num_replicas=4, rank=0)  # one rank's part already
    assert largest_batch(DataLoader(data(100), sampler=own), world_size=4) == 25
    assert largest_batch(DataLoader(data(101)), world_size=4) == 26
    assert largest_batch(DataLoader(data(101), drop_last=True), world_size=4) == 25
    assert largest_batch([DataLoader(data(8)), DataLoader(Stream())], world_size=1) == math.inf
    drops = [DataLoader(data(8), drop_last=True), DataLoader(Stream())]
    assert largest_batch(drops, world_size=1) == 8


@pytest.mark.parametrize(
    ("mode", "limit", "found"), [("power", 100, 64), ("binsearch", 100, 100), ("GROW", 60, 60)]
)
def test_modes_of_lightning_and_of_ours(mode: str, limit: int, found: int) -> None:
    ours = BatchSizeFinder(mode, init_val=40 if mode == "GROW" else None, max_val=200)
    trainer(ours).fit(Own(batch_size=2, limit=limit))
    assert found - 2 <= ours.optimal_batch_size <= found


def test_a_margin_is_run_too() -> None:
    module, ours = Own(batch_size=2, limit=100), BatchSizeFinder(margin=0.1, tolerance=0.0)
    trainer(ours).fit(module)
    assert ours.optimal_batch_size == 90
    assert ours.result is not None
    assert ours.result.trials[-1].size == 90
    assert ours.result.survived_steps == 25


class Noting(pl.Callback):
    """A callback that must not see a trial."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls.append("zero_grad")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls.append("step")


def test_a_schedule_made_for_the_old_number_of_steps_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Asking(Own):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            steps = self.trainer.estimated_stepping_batches
            decay = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(steps))
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    module = Asking(batch_size=2)
    trainer(BatchSizeFinder(max_val=64)).fit(module)
    assert module.sizes[:4] == [64] * 4
    assert "an epoch had 128 batches when the LR schedulers were made, and has 4 now" in caplog.text


def test_an_answer_is_stored_by_its_key_and_confirmed_by_one_trial() -> None:
    seen: list[Any] = []
    for trials in (range(2, 20), range(1, 2)):
        ours = BatchSizeFinder(key="net", budget="256KiB", on_trial=lambda trial, _: seen.append(trial.size))
        trainer(ours).fit(Net(), DataLoader(data(), batch_size=2))
        assert ours.result is not None
        assert len(ours.result.trials) in trials
        assert seen[-len(ours.result.trials) :] == [trial.size for trial in ours.result.trials]
    assert ours.result.from_store


def test_the_peak_of_a_trial_is_that_of_training(living_bytes: int) -> None:
    class Peak(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            self.memory.reset_peak()

        def on_train_batch_end(self, *args: Any) -> None:
            self.peaks.append(self.memory.peak_bytes)

    peak, ours = Peak(), BatchSizeFinder(max_val=64)
    with batchfit.virtual_memory("1GiB") as memory:
        peak.memory, peak.peaks = memory, []
        trainer(peak, ours).fit(Net(), DataLoader(data(), batch_size=2))
    assert ours.result is not None
    assert ours.result.peak_bytes == max(peak.peaks)


@pytest.mark.parametrize("width", [32, 64])
def test_the_size_trains_and_little_more_would(width: int) -> None:
    """Lightning keeps gradients through forward, and the optimizer's state comes with the first step."""
    samples = data(4000)

    def run(size: int, *callbacks: pl.Callback, room_bytes: int = 2**29) -> int:
        """Train five batches; what they needed beside what was there."""
        gc.collect()
        with batchfit.virtual_memory("1GiB") as memory:
            before = memory.allocated_bytes
            with memory.lowered(before + room_bytes):
                trainer(*callbacks, limit_train_batches=5).fit(
                    Net(width=width), DataLoader(samples, batch_size=size)
                )
            return memory.peak_bytes - before

    ours, room_bytes = BatchSizeFinder(), 10 * 4 * width * width + 200 * 1024
    run(2, ours, room_bytes=room_bytes)
    found = ours.optimal_batch_size
    assert found is not None
    assert 100 < found < 800
    assert run(found) <= room_bytes < run(math.ceil(found / 0.95))


def test_a_search_is_seen_by_nobody_and_reported_once(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    noting, ours = Noting(), BatchSizeFinder(max_val=128)
    run = trainer(noting, ours, logger=logger, log_every_n_steps=1)
    run.fit(Own(batch_size=2))
    assert noting.calls == ["zero_grad", "step"] * 2
    assert run.global_step == 2
    assert not list(tmp_path.rglob("*.ckpt"))
    logger.save()
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = rows[0].split(",")
    assert [row.split(",")[columns.index("batchfit/batch_size")] for row in rows[1:]].count("128") == 1
    assert sum(bool(row.split(",")[columns.index("loss_step")]) for row in rows[1:]) == 2


def test_manual_optimization_accumulation_clipping_and_scalers_are_searched_as_they_train() -> None:
    class Manual(Own):
        def __init__(self) -> None:
            super().__init__(batch_size=2, limit=50)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    ours, run = BatchSizeFinder(tolerance=0.0), trainer(BatchSizeFinder(tolerance=0.0))
    run.fit(Manual())
    assert run.callbacks[0].optimal_batch_size == 50
    assert run.global_step == 6
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    run = trainer(ours, accumulate_grad_batches=2, gradient_clip_val=0.1, plugins=[plugin])
    run.fit(Own(batch_size=2, limit=50))
    assert ours.optimal_batch_size == 50
    assert run.global_step == 3
    assert scaler.get_scale() == 4.0


def test_a_run_that_goes_on_keeps_its_size(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="batchfit")
    run = trainer(BatchSizeFinder(max_val=100), max_epochs=1)
    run.fit(Own(batch_size=2))
    run.save_checkpoint(tmp_path / "one.ckpt")
    for fresh, size in ((False, 100), (True, 40)):
        module = Own(batch_size=2, limit=100 if size == 100 else 40)
        run = trainer(BatchSizeFinder(max_val=100, tolerance=0.0, fresh=fresh), max_epochs=2)
        run.fit(module, ckpt_path=tmp_path / "one.ckpt")
        assert run.callbacks[0].optimal_batch_size == size
        assert module.sizes[-2] == size
        tried = [trial.size for trial in run.callbacks[0].result.trials]
        assert (set(tried) == {100}) is not fresh  # a trial and its soak, or a search
    assert "batch size 100 for train_dataloader: as in the checkpoint" in caplog.text


def test_a_checkpoint_counts_for_the_run_that_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    run = trainer(BatchSizeFinder(max_val=64))
    run.fit(Own(batch_size=2))
    run.save_checkpoint(path)
    ours = BatchSizeFinder(max_val=100)
    trainer(ours, max_epochs=2).fit(Own(batch_size=2), ckpt_path=path)
    assert ours.optimal_batch_size == 64
    trainer(ours).fit(Own(batch_size=2))  # no checkpoint
    assert ours.optimal_batch_size == 100
    trainer(ours).test(Own(batch_size=2), ckpt_path=path, verbose=False)
    trainer(ours).fit(Own(batch_size=2))
    assert ours.optimal_batch_size == 100


@pytest.mark.parametrize(
    ("change", "options", "size", "text"),
    [
        ({"device": "NVIDIA H200"}, {}, 128, "found on NVIDIA H200, and this is cpu"),
        ({"budget": "1GiB"}, {}, 128, "budget was 1GiB, and is None"),
        ({}, {"max_val": 40}, 40, "sizes are from 1 to 40 now"),
        ({}, {"min_val": 80}, 128, "sizes are from 80 to 128 now"),
        ({}, {}, 64, ""),
    ],
)
def test_a_checkpoints_size_for_something_else_is_searched_again(
    change: dict[str, Any], options: dict[str, Any], size: int, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours = BatchSizeFinder(**{"max_val": 128, **options})
    ours.load_state_dict({"batch_size": 64, "device": "cpu", "budget": None, **change})
    trainer(ours).fit(Own(batch_size=2))
    assert ours.optimal_batch_size == size
    assert text in caplog.text
    assert ("searched for again" in caplog.text) is bool(text)


def test_a_checkpoints_size_is_run_before_it_is_set() -> None:
    """Another program has the memory now, or the module has grown."""
    module, ours = Own(batch_size=2, limit=40), BatchSizeFinder(tolerance=0.0)
    ours.load_state_dict({"batch_size": 64, "device": "cpu", "budget": None})
    trainer(ours).fit(module)
    assert ours.optimal_batch_size == 40
    assert module.sizes[-2:] == [40, 256 % 40]


def test_an_error_of_the_users_comes_out_and_the_trainer_is_as_before() -> None:
    class Broken(Own):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("a bug")

    noting = Noting()
    run = trainer(noting, BatchSizeFinder())
    with pytest.raises(KeyError, match="a bug"):
        run.fit(Broken(batch_size=2))
    assert noting in run.callbacks
    assert run.global_step == 0


def test_fast_dev_run_searches_nothing() -> None:
    module = Own(batch_size=2)
    trainer(BatchSizeFinder(), fast_dev_run=True).fit(module)
    assert module.sizes == [2, 2]  # a batch, and one of validation


# --- bad input


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "fast"}, "mode must be one of power, binsearch"),
        ({"margin": 1.0}, "margin must be a number from 0 to below 1, not 1.0"),
        ({"max_val": 0}, "max_val must be a positive integer, not 0"),
        ({"min_val": True}, "min_val must be a positive integer, not True"),
        ({"make_batch": 3}, "make_batch must be a callable"),
        ({"steps_per_trial": 0}, "steps_per_trial must be a positive integer, not 0"),
        ({"init_val": 0}, "init_val must be a positive integer, not 0"),
        ({"max_trials": -1}, "max_trials must be an integer of at least 0, not -1"),
        ({"max_trials": 2.0}, "max_trials must be an integer of at least 0, not 2.0"),
        ({"multiple_of": 0}, "multiple_of must be a positive integer, not 0"),
        ({"power_of_two": 1}, "power_of_two must be True or False, not 1"),
        ({"power_of_two": True, "multiple_of": 3}, "multiple_of must be a power of two with power_of_two"),
        ({"min_val": 10, "max_val": 5}, r"max_val must leave an allowed size \(the smallest is 10\), not 5"),
        ({"min_val": 33, "max_val": 63, "power_of_two": True}, r"\(the smallest is 64\), not 63"),
        ({"multiple_of": 8, "max_val": 7}, r"\(the smallest is 8\), not 7"),
        ({"soak_steps": 2}, r"soak_steps must be 0 or at least the steps of a trial \(3\), not 2"),
        ({"tolerance": 1.0}, "tolerance must be at least 0 and below 1, not 1.0"),
        ({"time_limit_s": 0}, "time_limit_s must be a positive number of seconds, not 0"),
        ({"on_trial": 3}, "on_trial must be a callable"),
        ({"budget": "lots"}, "budget must be bytes or text such as '24GiB' or '800MiB', not 'lots'"),
        ({"budget": -1}, "budget must be positive, not -1"),
        ({"key": 3}, "key must be a name or None, not 3"),
        ({"fresh": "yes"}, "fresh must be True or False, not 'yes'"),
        ({"batch_arg_name": ""}, "batch_arg_name must be the name of an attribute, not ''"),
    ],
)
def test_wrong_arguments_are_reported_when_the_callback_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        BatchSizeFinder(**options)


def test_contradictions_name_both_sides() -> None:
    with pytest.raises(ValueError, match="Lightning's BatchSizeFinder beside batchfit's BatchSizeFinder"):
        trainer(BatchSizeFinder(), Theirs()).fit(Own(batch_size=2))
    with pytest.raises(ValueError, match="Lightning's BatchSizeFinder beside batchfit's BatchSizeFinder"):
        pl.tuner.Tuner(trainer(BatchSizeFinder())).scale_batch_size(Own(batch_size=2))
    with pytest.raises(ValueError, match="Lightning's BatchSizeFinder beside batchfit's BatchSizeSchedule"):
        trainer(BatchSizeSchedule("0:2 1:4"), Theirs()).fit(Own(batch_size=2))
    module = Own(batch_size=2)
    with pytest.raises(ValueError, match=r"BatchSizeSchedule before BatchSizeFinder.*list the finder first"):
        trainer(BatchSizeSchedule("0:2 1:4"), BatchSizeFinder()).fit(module)
    assert module.sizes == []
    run = trainer(OomProofTraining())
    run.strategy.__class__ = pl.strategies.FSDPStrategy
    for name, way in (
        ("FSDPStrategy", r"ModelParallelStrategy\(data_parallel_size=1, tensor_parallel_size=1\)"),
        (
            "DeepSpeedStrategy",
            r"cannot be repeated there.*`batchfit find -- python train.py --batch-size {}`",
        ),
    ):
        run.strategy.__class__ = getattr(pl.strategies, name)
        with pytest.raises(BatchfitError, match=f"not under {name}: .*{way}"):
            run.callbacks[0].setup(run, Own(batch_size=2), "fit")


def test_a_missing_framework_is_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ModuleNotFoundError, match=r'pip install "batchfit\[lightning\]"'):
        framework.callback_bases()


def test_an_older_version_is_reported_once_and_a_newer_one_only_where_it_lacks_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lightning.pytorch.trainer import call

    with pytest.warns(UserWarning, match=r"lightning 2\.3\.1 is not known .* tested with 2\.5 and later"):
        framework.check_version("lightning.pytorch", "2.3.1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        framework.check_version("lightning.pytorch", "2.3.1")
        framework.check_version("lightning.pytorch", "9.0.1")
    monkeypatch.delattr(call, "_call_callback_hooks")
    with pytest.warns(UserWarning, match=r"9\.0\.1 .* it lacks trainer\.call\._call_callback_hooks, which"):
        framework.check_version("lightning.pytorch", "9.0.1")


class Wide(pl.LightningModule):
    """Large outputs beside weights whose gradients count."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1024))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> Any:
        dataset = torch.utils.data.TensorDataset(torch.randn(4000, 64), torch.randint(0, 1024, (4000,)))
        return DataLoader(dataset, batch_size=self.batch_size)


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_the_size_found_lasts_where_gradients_are_accumulated(accumulate: int) -> None:
    options = {"max_epochs": 2, "limit_train_batches": 4, "accumulate_grad_batches": accumulate}

    def fit(module: Wide) -> None:
        with batchfit.virtual_memory("24MiB"):
            trainer(**options).fit(module)

    ours = BatchSizeFinder(budget="24MiB")
    trainer(ours, **options).fit(Wide(2))
    size = ours.optimal_batch_size
    assert size is not None
    del ours  # all of the first run is gone when the second begins: what is alive counts
    gc.collect()
    fit(Wide(size))
    gc.collect()
    with pytest.raises(torch.OutOfMemoryError):
        fit(Wide(round(1.1 * size)))
