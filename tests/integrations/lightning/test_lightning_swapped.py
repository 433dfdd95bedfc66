"""What users of Lightning's BatchSizeFinder and Tuner rely on holds after the import is swapped."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning")
pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")

import lightning.pytorch as pl
import lightning_cases as cases
import numpy as np
import pytorch_lightning as legacy
import torch
from lightning.pytorch.callbacks import BatchSizeFinder as Theirs
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.tuner import Tuner as TheirTuner
from lightning_cases import LegacyNet, Net, Own, data, seeded, trainer, weights
from torch.utils.data import DataLoader, random_split

from batchfit.integrations.lightning import BatchSizeFinder, BatchSizeSchedule, OomProofTraining, Tuner

pytestmark = [pytest.mark.filterwarnings(text) for text in cases.QUIET]


class Sized(pl.LightningDataModule):
    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        if batch_size is not None:
            self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(data(64), batch_size=getattr(self, "batch_size", 1))

    val_dataloader = train_dataloader


# --- a search without a run


@pytest.mark.parametrize("way", ["fit", "validate", "test", "predict"])
def test_a_tuner_finds_without_running(way: str, tmp_path: Path) -> None:
    module, noting = Own(batch_size=2, limit=None if way == "predict" else 100), Noting()
    before = weights(module)
    run = trainer(noting, max_epochs=3, default_root_dir=tmp_path)
    loops, callbacks = run.fit_loop.state_dict(), list(run.callbacks)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    found = Tuner(run).scale_batch_size(module, method=way, tolerance=0.0)
    assert found == (256 if way == "predict" else 100) == module.batch_size
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, weights(module)))
    assert run.fit_loop.state_dict() == loops
    assert run.callbacks == callbacks
    assert run.global_step == run.current_epoch == 0
    assert noting.calls == []
    assert not list(tmp_path.iterdir())
    assert not run.training
    module.sizes.clear()
    run.fit(module)
    assert module.sizes[0] == module.batch_size
    assert run.current_epoch == 3


class Noting(pl.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.calls.append("train")

    def on_validation_batch_start(self, *args: Any) -> None:
        self.calls.append("validation")


@pytest.mark.parametrize("package", [pl, legacy], ids=["lightning", "pytorch_lightning"])
def test_a_finder_searches_outside_of_a_run_with_the_loaders_that_it_is_given(package: Any) -> None:
    module: Any = Net(limit=70) if package is pl else LegacyNet(limit=70)
    finder, run = BatchSizeFinder(tolerance=0.0), trainer(package=package)
    given = DataLoader(data(), batch_size=2)
    assert finder.scale_batch_size(run, module, train_dataloaders=given) == 70
    assert finder.result is not None
    assert finder.result.survived_steps == 25
    assert run.train_dataloader.batch_size == 70
    assert given.batch_size == 2
    assert finder not in run.callbacks
    assert finder.scale_batch_size(run, module, method="test", dataloaders=given) == 70


@cases.SEARCH_OF_2_6
@pytest.mark.parametrize(("of_module", "of_data"), [(2, None), (2, 2), (None, 2), (16, 16)])
def test_module_and_datamodule_get_the_size_as_lightnings_do(
    of_module: int | None, of_data: int | None
) -> None:
    options: dict[str, Any] = {"mode": "binsearch", "init_val": 4, "max_trials": 2, "margin": 0.1}
    found = []
    for tuner in (TheirTuner, Tuner):
        module, datamodule = Net(batch_size=of_module), Sized(of_data)
        run = trainer(limit_train_batches=1, limit_val_batches=0)
        found.append(tuner(run).scale_batch_size(module, datamodule=datamodule, **options))
        assert getattr(module, "batch_size", found[-1]) == found[-1]
        if of_data is not None:
            assert datamodule.batch_size == found[-1] == run.train_dataloader.batch_size
    assert found == [7, 7]


def test_a_tuner_says_what_it_cannot_take() -> None:
    loader, module = DataLoader(data(), batch_size=2), Own(batch_size=2)
    for options, text in (
        ({"method": "prediction"}, "method must be one of fit, validate, test, predict, not 'prediction'"),
        ({"dataloaders": loader}, "dataloaders must be None with method='fit': give train_dataloaders"),
        (
            {"method": "test", "train_dataloaders": loader},
            "train_dataloaders must be None .*give dataloaders",
        ),
        ({"method": "test", "val_dataloaders": loader}, "val_dataloaders must be None with method='test'"),
        ({"mode": "none"}, "mode must be one of"),
    ):
        with pytest.raises(ValueError, match=text):
            Tuner(trainer()).scale_batch_size(module, **options)
    assert module.sizes == []
    for callback in (BatchSizeFinder(), Theirs()):
        with pytest.raises(ValueError, match=r"must not hold a BatchSizeFinder with Tuner\.scale_batch_size"):
            Tuner(trainer(callback)).scale_batch_size(module)


def test_an_error_in_a_search_without_a_run_leaves_the_trainer_as_it_was(tmp_path: Path) -> None:
    class Broken(Own):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise KeyError("a bug")

    run = trainer(default_root_dir=tmp_path)
    callbacks = list(run.callbacks)
    with pytest.raises(KeyError, match="a bug"):
        Tuner(run).scale_batch_size(Broken(batch_size=2))
    assert run.callbacks == callbacks
    assert not list(tmp_path.iterdir())
    assert Tuner(run).scale_batch_size(Own(batch_size=2), max_val=16) == 16


def test_nothing_is_searched_with_fast_dev_run() -> None:
    module = Own(batch_size=2)
    assert Tuner(trainer(fast_dev_run=True)).scale_batch_size(module) is None
    assert Tuner(trainer(fast_dev_run=True)).scale_batch_size(module, method="test") is None
    assert module.sizes == []


def test_lightnings_own_tuner_ends_after_our_search_too() -> None:
    """Where somebody has put our class in the place of Lightning's."""
    module, finder = Own(batch_size=2, limit=40), BatchSizeFinder(tolerance=0.0)
    finder._early_exit = True
    run = trainer(finder)
    run.fit(module)
    assert run.global_step == 0
    assert finder.optimal_batch_size == 40 == module.batch_size


# --- beside the search for a learning rate


class Rated(Own):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.lr = 1e-3

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("first", ["size", "rate"])
def test_the_learning_rate_is_searched_at_the_new_size(first: str) -> None:
    sizes: list[int] = []

    class Watched(LearningRateFinder):
        def lr_find(self, trainer: Any, pl_module: Any) -> None:
            before = len(pl_module.sizes)
            super().lr_find(trainer, pl_module)
            sizes.extend(pl_module.sizes[before:])

    ours, theirs = BatchSizeFinder(max_val=64), Watched(num_training_steps=8, update_attr=False)
    module = Rated(batch_size=2)
    run = trainer(*((ours, theirs) if first == "size" else (theirs, ours)))
    run.fit(module)
    assert ours.optimal_batch_size == 64
    assert set(sizes) == {64}
    if cases.LIGHTNING >= (2, 6):  # 2.5.0 goes on in the middle after its own search of learning rates
        assert run.global_step == 4


# --- the attribute


class Uses(Own):
    """A step that needs the batch size to be right, as one with a hidden state does."""

    def loss(self, batch: Any) -> torch.Tensor:
        hidden = torch.zeros(self.batch_size, 16)
        return super().loss([batch[0] + hidden])


@pytest.mark.parametrize("way", ["fit", "validate", "test"])
def test_a_step_that_uses_the_attribute_sees_the_size_of_its_trial(way: str) -> None:
    module, ours = Uses(batch_size=2, limit=64), BatchSizeFinder(power_of_two=True)
    getattr(trainer(ours), way)(module)
    assert ours.optimal_batch_size == 64 == module.batch_size


def test_an_attribute_that_alone_says_when_memory_is_out() -> None:
    class Asking(Own):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.batch_size > 100:
                raise RuntimeError("CUDA error: out of memory")
            return super().training_step(batch, batch_idx)

    for mode, found in (("power", 64), ("binsearch", 100)):
        module = Asking(batch_size=16)
        size = Tuner(trainer()).scale_batch_size(module, mode=mode, init_val=500, steps_per_trial=1)
        assert size == found == module.batch_size


def test_each_holder_has_its_own_value_again_where_a_search_fails() -> None:
    class Kept(Own):
        def __init__(self, batch_size: int, **options: Any) -> None:
            super().__init__(batch_size=batch_size, **options)
            self.save_hyperparameters("batch_size")
            self.batch_size = 4

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert self.batch_size == self.hparams.batch_size == datamodule.batch_size == len(batch[0])
            if len(batch[0]) > 8:
                raise KeyError("a bug")
            return super().training_step(batch, batch_idx)

    module, datamodule = Kept(batch_size=2), Sized(6)
    with pytest.raises(KeyError, match="a bug"):
        trainer(BatchSizeFinder()).fit(module, datamodule=datamodule)
    assert (module.batch_size, module.hparams.batch_size, datamodule.batch_size) == (4, 2, 6)


# --- the arguments


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"mode": "power", "max_trials": 3}, 8),
        ({"mode": "power", "max_trials": 1, "init_val": 4}, 4),
        ({"mode": "power", "max_trials": 0}, 2),
        ({"mode": "power", "max_trials": 0, "init_val": 8}, 8),
        ({"mode": "binsearch", "max_trials": 3, "margin": 0.05}, 7),
        ({"mode": "power", "max_trials": 3, "margin": 0.05}, 8),
        ({"mode": "power", "max_trials": 5, "max_val": 8}, 8),
    ],
)
@pytest.mark.parametrize(
    "tuner",
    [pytest.param(TheirTuner, id="lightning", marks=cases.SEARCH_OF_2_6), pytest.param(Tuner, id="batchfit")],
)
def test_trials_are_counted_as_lightning_counts_them(tuner: Any, options: dict[str, Any], found: int) -> None:
    """The stability check is one trial more, at the size that is the answer."""
    module = Own(batch_size=2)
    size = tuner(trainer()).scale_batch_size(module, steps_per_trial=1, **options)
    assert size == found == module.batch_size
    if options["max_trials"] == 0 and tuner is Tuner:
        assert module.sizes == []


def test_a_trial_of_one_step_runs_two() -> None:
    """Adam allocates its state in the first: one step would understate."""
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=1, soak_steps=0)
    finder.scale_batch_size(trainer(), Own(batch_size=2))
    assert finder.result is not None
    assert [trial.steps_run for trial in finder.result.trials] == [2]


def test_without_trials_the_present_size_stays() -> None:
    class Made(Net):
        def train_dataloader(self) -> Any:
            size = self.batch_size or 1
            return DataLoader(data(), batch_size=size)

    module = Made()
    module.batch_size = None  # type: ignore[assignment]
    trainer(BatchSizeFinder(max_trials=0)).fit(module)
    assert module.batch_size == 1  # that of its loader


# --- random numbers


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]


@pytest.mark.parametrize(
    "make",
    [
        OomProofTraining,
        lambda: OomProofTraining(budget="1GiB", batch_norm="exact"),
        BatchSizeFinder,
        lambda: BatchSizeFinder(budget="1GiB"),
        lambda: BatchSizeSchedule("0:32 1:64", lr=["sqrt", "linear"]),
    ],
)
def test_making_a_callback_draws_no_random_number(make: Any) -> None:
    before = states()
    make()
    assert states() == before


class Drawing(Own):
    """Asks for the number of steps, shuffles, and draws numbers where loaders are made."""

    asks = draws = follows = False

    def train_dataloader(self) -> Any:
        samples: Any = data()
        if self.draws:
            samples, _ = random_split(samples, [200, 56])
            random.random()
            np.random.rand()
        size = self.batch_size if self.follows else self.fixed
        return DataLoader(samples, batch_size=size, shuffle=True, generator=self.generator)

    def configure_optimizers(self) -> Any:
        if self.asks:
            _ = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def on_train_start(self) -> None:
        self.seen = states()
        self.own = None if self.generator is None else self.generator.get_state()


# Every pair of these; `make test-all` has all sixteen.
PAIRS = {(True, True, True, True), (True, False, False, False), (False, True, False, False)}
PAIRS |= {(False, False, True, False), (False, False, False, True)}


@pytest.mark.parametrize(
    ("follows", "asks", "draws", "owned"),
    [
        pytest.param(*row, marks=() if row in PAIRS else pytest.mark.slow)
        for row in itertools.product((True, False), repeat=4)
    ],
)
def test_no_generator_moves_for_a_search(follows: bool, asks: bool, draws: bool, owned: bool) -> None:
    def run(*callbacks: Any, size: int) -> Drawing:
        module = seeded(lambda: Drawing(batch_size=size, limit=50))
        module.follows, module.asks, module.draws, module.fixed = follows, asks, draws, size
        module.generator = torch.Generator().manual_seed(9) if owned else None
        torch.manual_seed(5)
        random.seed(6)
        np.random.seed(7)
        trainer(*callbacks, max_epochs=2).fit(module)
        return module

    plain, ours = run(size=32), run(BatchSizeFinder(power_of_two=True), size=2)
    assert ours.sizes[-1] <= 32
    assert ours.seen == plain.seen
    if owned:
        assert torch.equal(ours.own, plain.own)
    if not (asks and draws):  # a split drawn again is another split
        assert all(map(torch.equal, weights(plain), weights(ours)))


# --- what is said, and BatchNorm


def test_the_size_found_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    trainer(BatchSizeFinder(tolerance=0.0)).fit(Own(batch_size=2, limit=40))
    assert capsys.readouterr().out.splitlines() == ["batch size 40 for train_dataloader"]
    trainer(BatchSizeFinder(max_val=16)).test(Own(batch_size=2), verbose=False)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("batch size")]
    assert line.startswith("batch size 16 for test_dataloader: no larger one is allowed, by max_val or ")
    Tuner(trainer()).scale_batch_size(Own(batch_size=2), max_trials=2, mode="power")
    line = "batch size 4 for train_dataloader: max_trials was reached, larger ones were not tried"
    assert capsys.readouterr().out.splitlines() == [line]


def test_a_program_that_logs_says_it_in_its_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="batchfit"):
        trainer(BatchSizeFinder(tolerance=0.0)).fit(Own(batch_size=2, limit=40))
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("batch size 40 for train_dataloader") == 1
    assert capsys.readouterr().out == ""


class Normed(Own):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


@pytest.mark.parametrize(
    ("mode", "limit"),
    [
        *(("guided", 50), ("power", 50), ("binsearch", 2)),
        *(
            pytest.param(mode, limit, marks=pytest.mark.slow)
            for mode, limit in (("guided", 2), ("power", 2), ("binsearch", 50))
        ),
        *(
            pytest.param(mode, limit, marks=pytest.mark.slow)
            for mode, limit in itertools.product(("powers", "bisect"), (50, 2))
        ),
    ],
)
def test_batch_norm_does_not_end_a_search(mode: str, limit: int) -> None:
    module, ours = Normed(batch_size=2, limit=limit), BatchSizeFinder(mode, tolerance=0.0, margin=0.0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert ours.scale_batch_size(trainer(), module) == (32 if limit == 50 and "power" in mode else limit)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_batch_norm_and_a_single_sample_name_our_own_argument() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel") as caught:
        trainer(BatchSizeFinder(max_val=1)).fit(Normed(batch_size=2))
    notes = "".join(caught.value.__notes__)
    assert "max_val or the samples of the loaders allow one" in notes
    assert "min_size" not in notes
