"""BatchSizeScheduler: the methods of its document, the loader and the learning rate, checkpoints."""

from __future__ import annotations

import io
import logging
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD, lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import batchfit
from batchfit import (
    BatchSizeScheduler,
    CustomBatchSizeConfig,
    IncreaseBatchSizeConfig,
    LinearBatchSizeConfig,
    MilestoneBatchSizeConfig,
    NoiseBatchSizeConfig,
    ScheduleEvent,
    StepBatchSizeConfig,
)
from batchfit._loader.pure.progress import EpochPlan, Progress
from batchfit._noise.pure.estimate import NoiseReading

STEP = StepBatchSizeConfig(step_size=20, gamma=2, max_batch_size=2048)
quick = examples(60)


class Settable:
    """The plainest loader that can change its size."""

    def __init__(self, batch_size: int = 256) -> None:
        self.sizes = [batch_size]

    @property
    def batch_size(self) -> int:
        return self.sizes[-1]

    @batch_size.setter
    def batch_size(self, size: int) -> None:
        self.sizes.append(size)


class Planned(Settable):
    """A loader that asks a plan, as ResizableLoader does, and counts what it has handed out."""

    def __init__(self, samples: int, batch_size: int = 256) -> None:
        super().__init__(batch_size)
        self.samples = samples
        self.schedule: EpochPlan | None = None
        self.progress = Progress()

    def __iter__(self) -> Any:
        left = self.samples
        while left > 0:
            wanted = self.batch_size if self.schedule is None else self.schedule.size_at(self.progress)
            size = min(wanted, left)
            left -= size
            now = self.progress
            self.progress = replace(now, step=now.step + 1, samples=now.samples + size)
            yield size
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1)


def optimizer_of(rate: float = 0.1) -> SGD:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)


def rate_of(optimizer: SGD) -> float:
    return float(optimizer.param_groups[0]["lr"])


class TestTheDocument:
    """Seed 003: `get_batch_size(epoch)`, `step(epoch) -> (size, changed)`, `should_update(epoch)`."""

    def test_the_three_methods(self) -> None:
        scheduler = BatchSizeScheduler(STEP, initial_batch_size=256)
        assert [scheduler.get_batch_size(epoch) for epoch in (0, 19, 20, 40, 60, 80)] == [
            256, 256, 512, 1024, 2048, 2048,
        ]  # fmt: skip
        assert not scheduler.should_update(19)
        assert scheduler.should_update(20)
        assert scheduler.batch_size == 256, "asking changes nothing"
        assert scheduler.step(19) == (256, False)
        assert scheduler.step(20) == (512, True)
        assert scheduler.step(20) == (512, False), "twice changes nothing"
        assert not scheduler.should_update(20)
        changes = [epoch for epoch in range(100) if scheduler.step(epoch)[1] and epoch > 20]
        assert changes == [40, 60]

    def test_the_loop_of_the_document(self) -> None:
        data = TensorDataset(torch.arange(64))
        scheduler = BatchSizeScheduler(StepBatchSizeConfig(step_size=2, gamma=2), initial_batch_size=8)
        loader = DataLoader(data, batch_size=8)
        seen = []
        for epoch in range(6):
            new_batch_size, should_recreate = scheduler.step(epoch)
            if should_recreate:
                loader = DataLoader(data, batch_size=new_batch_size)
            seen.append(len(next(iter(loader))[0]))
        assert seen == [8, 8, 16, 16, 32, 32]

    def test_the_lines(self, caplog: pytest.LogCaptureFixture) -> None:
        scheduler = BatchSizeScheduler(STEP, 256)
        with caplog.at_level(logging.INFO, logger="batchfit"):
            for epoch in range(100):
                scheduler.step(epoch)
        assert [record.getMessage() for record in caplog.records] == [
            "Epoch 20: Updating batch size from 256 to 512",
            "Epoch 40: Updating batch size from 512 to 1024",
            "Epoch 60: Updating batch size from 1024 to 2048",
        ]

    @pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
    def test_on_stdout_where_nobody_listens(
        self, rank: str, lines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", rank)
        scheduler = BatchSizeScheduler(STEP, 256)
        scheduler.step(20)
        assert capsys.readouterr().out == "Epoch 20: Updating batch size from 256 to 512\n" * lines

    def test_no_schedule_is_a_constant_size(self) -> None:
        scheduler = BatchSizeScheduler(None, 512)
        assert [scheduler.step(epoch) for epoch in (0, 50, 999)] == [(512, False)] * 3
        assert repr(scheduler) == "BatchSizeScheduler(constant, initial 512, now 512)"

    def test_from_text_and_mappings(self) -> None:
        assert BatchSizeScheduler("0:256 20:512").step(20) == (512, True)
        reported = {"type": "step", "step_size": 20, "gamma": 2}
        assert BatchSizeScheduler(reported, 256).config == StepBatchSizeConfig(step_size=20, gamma=2)


class TestUnits:
    @pytest.mark.parametrize("unit", ["step", "samples", "tokens"])
    def test_each_counts_its_own(self, unit: str) -> None:
        config = StepBatchSizeConfig(step_size=1000, gamma=2, unit=unit)  # type: ignore[arg-type]
        scheduler = BatchSizeScheduler(config, 64)
        assert scheduler.step(**{unit: 999}) == (64, False)
        assert scheduler.should_update(**{unit: 1000})
        assert scheduler.step(**{unit: 1000}) == (128, True)
        assert scheduler.get_batch_size(**{unit: 3000}) == 512
        with pytest.raises(ValueError, match=rf"{unit} must be given, as in step\({unit}=...\)"):
            scheduler.step(3)
        with pytest.raises(ValueError, match=rf"{unit} must be 0 or more, not -1"):
            scheduler.step(**{unit: -1})

    def test_the_epoch_must_be_given(self) -> None:
        with pytest.raises(ValueError, match=r"epoch must be given, as in step\(epoch\)"):
            BatchSizeScheduler(STEP, 256).step()
        with pytest.raises(ValueError, match=r"epoch must be an integer, not 2\.5"):
            BatchSizeScheduler(STEP, 256).step(2.5)  # type: ignore[arg-type]

    def test_tokens_from_samples(self) -> None:
        config = MilestoneBatchSizeConfig(milestones="0:8 1M:16", unit="tokens")
        scheduler = BatchSizeScheduler(config, tokens_per_sample=1000)
        assert scheduler.step(samples=999) == (8, False)
        assert scheduler.step(samples=1000) == (16, True)

    def test_a_loader_that_counts(self) -> None:
        loader = Planned(samples=1000, batch_size=32)
        config = MilestoneBatchSizeConfig(milestones="0:32 300:64 1500:128", unit="samples")
        events: list[ScheduleEvent] = []
        scheduler = BatchSizeScheduler(config, loader=loader, on_event=events.append)
        assert loader.schedule is scheduler.plan
        sizes = []
        for _ in range(2):
            for size in loader:
                assert size == scheduler.batch_size or loader.progress.samples % 1000 == 0
                sizes.append(size)
                scheduler.step()  # after optimizer.step()
        assert sizes == [32] * 10 + [64] * 10 + [40] + [64] * 8 + [128] * 3 + [104]
        assert [(e.size_before, e.size_after, e.progress.samples) for e in events] == [
            (32, 64, 320),
            (64, 128, 1512),
        ]
        assert loader.sizes == [32], "it changed by itself"


class TestLoaders:
    def test_a_plain_one_is_reported_at_the_change(self) -> None:
        loader = Settable(256)
        scheduler = BatchSizeScheduler(STEP, loader=loader)
        for epoch in range(70):
            scheduler.step(epoch)
        assert loader.sizes == [256, 512, 1024, 2048]

    def test_one_that_begins_with_another_size_is_set(self) -> None:
        loader = Settable(8)
        BatchSizeScheduler(STEP, 256, loader=loader)
        assert loader.sizes == [8, 256]

    def test_a_dataloader_is_refused_with_the_way_out(self) -> None:
        loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
        with pytest.raises(
            TypeError, match=r"not a DataLoader\. Use batchfit.ResizableLoader, or leave loader out"
        ):
            BatchSizeScheduler(STEP, 256, loader=loader)
        with pytest.raises(TypeError, match="loader must have an attribute batch_size, not"):
            BatchSizeScheduler(STEP, 256, loader=object())

    @pytest.mark.parametrize(("epochs", "reported"), [((0, 1, 1, 2), 0), ((50, 51), 1), ((0, 3), 1)])
    def test_a_loader_at_another_epoch_is_noticed_once(
        self, epochs: tuple[int, ...], reported: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        loader = Planned(samples=100, batch_size=256)
        scheduler = BatchSizeScheduler(STEP, loader=loader)
        with caplog.at_level(logging.WARNING, logger="batchfit"):
            for number, epoch in enumerate(epochs):
                scheduler.step(epoch)
                loader.progress = Progress(epoch=number)
        assert len([r for r in caplog.records if "the loader is at epoch" in r.getMessage()]) == reported

    def test_increase_sets_the_size_of_a_planned_one(self) -> None:
        loader = Planned(samples=100, batch_size=10)
        config = IncreaseBatchSizeConfig(function=lambda epoch, size: 5 * (epoch == 2))
        scheduler = BatchSizeScheduler(config, loader=loader)
        for epoch in range(4):
            scheduler.step(epoch)
        assert loader.schedule is None
        assert loader.sizes == [10, 15]

    def test_the_real_one(self) -> None:
        loader = batchfit.ResizableLoader(range(50_000), 128, collate_fn=len)
        config = MilestoneBatchSizeConfig(milestones="0:128 2:640 4:3200 5:16000")
        optimizer = optimizer_of()
        scheduler = BatchSizeScheduler(config, loader=loader, lr="sqrt", optimizer=optimizer)
        updates = 0
        for epoch in range(6):
            scheduler.step(epoch)
            for size in loader:
                updates += 1
                assert size in (scheduler.batch_size, 50_000 % scheduler.batch_size)
            assert rate_of(optimizer) == pytest.approx(0.1 * (scheduler.batch_size / 128) ** 0.5)
        assert updates == scheduler.updates(samples=50_000, epochs=6) == 2 * 391 + 2 * 79 + 16 + 4


class TestLimits:
    def test_what_fits_caps_the_schedule_and_is_said_once(self) -> None:
        events: list[ScheduleEvent] = []
        scheduler = BatchSizeScheduler(STEP, 256, largest=600, on_event=events.append)
        assert [scheduler.step(epoch)[0] for epoch in (0, 20, 40, 41, 42)] == [256, 512, 600, 600, 600]
        assert [(e.kind, e.size_after) for e in events] == [
            ("changed", 512),
            ("changed", 600),
            ("limited", 600),
        ]
        assert events[1].why == "the schedule wants 1024, and the largest that fits is 600"

    def test_an_increase_past_it_is_skipped_with_an_event(self) -> None:
        events: list[ScheduleEvent] = []
        config = IncreaseBatchSizeConfig(function=lambda epoch, size: size)
        scheduler = BatchSizeScheduler(config, 100, largest=500, on_event=events.append)
        assert [scheduler.step(epoch)[0] for epoch in range(5)] == [200, 400, 400, 400, 400]
        assert [event.kind for event in events] == ["changed", "changed", "skipped"]
        assert events[-1].why == "an increase by 400 to 800 is more than the limit of 500"
        clamped = BatchSizeScheduler(config.model_copy(update={"clamp": True}), 100, largest=500)
        assert [clamped.step(epoch)[0] for epoch in range(5)] == [200, 400, 500, 500, 500]

    def test_ranks_are_those_of_the_loader_or_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        data = TensorDataset(torch.arange(50))
        loader = batchfit.ResizableLoader(data, 8, rank=1, world_size=4)
        with pytest.raises(ValueError, match="world_size must be that of the loader, 4, not 2"):
            BatchSizeScheduler("0:8", loader=loader, world_size=2)
        with pytest.raises(ValueError, match="milestones must be at least 4, so that no rank of 4"):
            BatchSizeScheduler("0:8 5:2", loader=loader)
        # The last batch is one short, or a rank would have no sample.
        scheduler = BatchSizeScheduler("0:7 1:9", loader=loader)
        assert scheduler.updates(samples=50, epochs=2) == sum(len(list(loader)) for _ in range(2))
        # A microbatch is of one rank, whoever says how many there are.
        assert BatchSizeScheduler("0:64 1:100", loader=loader, microbatch_size=8).get_batch_size(1) == 96
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        assert BatchSizeScheduler("0:64 1:100", microbatch_size=8).get_batch_size(1) == 96
        assert BatchSizeScheduler("0:64 1:100").get_batch_size(1) == 100

    def test_ranks_and_microbatches_round(self) -> None:
        config = LinearBatchSizeConfig(final_batch_size=1000, over=10)
        scheduler = BatchSizeScheduler(config, 250, world_size=4, microbatch_size=8)
        sizes = [scheduler.step(epoch)[0] for epoch in range(11)]
        assert sizes[0] == 224
        assert all(size % 32 == 0 for size in sizes)
        assert sizes[-1] == 992

    @pytest.mark.parametrize(
        ("keywords", "words"),
        [
            (
                {"initial_batch_size": 4096},
                "max_batch_size must be at least the initial batch size 4096, not 2048",
            ),
            ({"initial_batch_size": None}, "initial_batch_size must be a positive integer, not None"),
            ({"initial_batch_size": True}, "initial_batch_size must be a positive integer, not True"),
            ({"world_size": 0}, "world_size must be a positive integer, not 0"),
            ({"largest": 2.5}, "largest must be a positive integer, not 2.5"),
            ({"largest": 8}, "largest must be at least the initial batch size 256, not 8"),
            ({"microbatch_size": -1}, "microbatch_size must be a positive integer, not -1"),
            ({"tokens_per_sample": 0}, "tokens_per_sample must be a positive integer, not 0"),
            ({"world_size": 512}, "initial_batch_size must be at least 512, so that no rank of 512"),
            ({"lr": "sqrt"}, "optimizer must be given with lr='sqrt', not None"),
            ({"lr": "cubic", "optimizer": optimizer_of()}, "lr must be 'none', .* not 'cubic'"),
            ({"optimizer": optimizer_of()}, "lr must be a rule such as 'none' or 'sqrt'"),
            ({"lr_scheduler": 3}, "optimizer must be given with lr_scheduler"),
            ({"noise": 3}, "noise and throughput must be given with a NoiseBatchSizeConfig only"),
        ],
    )
    def test_bad_input(self, keywords: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            BatchSizeScheduler(STEP, **{"initial_batch_size": 256, **keywords})

    def test_wrong_types(self) -> None:
        with pytest.raises(TypeError, match="on_event must be a callable"):
            BatchSizeScheduler(STEP, 256, on_event=3)  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match="noise must be a GradientNoise for a NoiseBatchSizeConfig, not None"
        ):
            BatchSizeScheduler(NoiseBatchSizeConfig(), 256)

    def test_a_function_that_fails_leaves_everything_as_it_was(self) -> None:
        loader, optimizer = Settable(64), optimizer_of()
        config = CustomBatchSizeConfig(function=lambda p: 64 if p.epoch < 3 else 2.5)
        scheduler = BatchSizeScheduler(config, loader=loader, lr="linear", optimizer=optimizer)
        scheduler.step(2)
        with pytest.raises(
            ValueError, match=r"function returns at epoch 3 must be a positive integer, not 2\.5"
        ):
            scheduler.step(3)
        assert (scheduler.batch_size, loader.sizes, rate_of(optimizer)) == (64, [64], 0.1)
        assert scheduler.step(1) == (64, False)


class TestLearningRate:
    @pytest.mark.parametrize(
        ("rule", "exponent"), [("none", 0), ("linear", 1), ("sqrt", 0.5), ("seesaw", -0.5)]
    )
    def test_size_loader_and_rate_move_together(self, rule: str, exponent: float) -> None:
        optimizer = optimizer_of()
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
        decay = lr_scheduler.ExponentialLR(optimizer, 0.97)
        both = lr_scheduler.SequentialLR(optimizer, [warm_up, decay], milestones=[10])
        alone = optimizer_of()
        reference = lr_scheduler.SequentialLR(
            alone,
            [lr_scheduler.LinearLR(alone, 0.1, total_iters=10), lr_scheduler.ExponentialLR(alone, 0.97)],
            milestones=[10],
        )
        loader = Settable(256)
        events: list[ScheduleEvent] = []
        scheduler = BatchSizeScheduler(
            STEP, loader=loader, lr=rule, optimizer=optimizer, lr_scheduler=both, on_event=events.append
        )
        for epoch in range(70):
            size, _ = scheduler.step(epoch)
            assert loader.batch_size == size
            assert rate_of(optimizer) == rate_of(alone) * (size / 256) ** exponent
            for one, its in ((optimizer, both), (alone, reference)):
                one.step()
                its.step()
        assert [event.lr_factors for event in events] == [(r**exponent,) for r in (2, 4, 8)]
        assert scheduler.lr_factors == (8**exponent,)
        scheduler.close()
        assert rate_of(optimizer) == rate_of(alone)
        assert scheduler.lr_factors == ()

    def test_several_lr_schedulers(self) -> None:
        optimizer, alone = optimizer_of(), optimizer_of()

        def two(one: SGD) -> list[Any]:
            return [lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.StepLR(one, 3, gamma=0.5)]

        ours, theirs = two(optimizer), two(alone)
        scheduler = BatchSizeScheduler("0:8 4:32", lr="sqrt", optimizer=optimizer, lr_scheduler=ours)
        for epoch in range(8):
            size, _ = scheduler.step(epoch)
            assert rate_of(optimizer) == rate_of(alone) * (size / 8) ** 0.5
            optimizer.step()
            alone.step()
            for one in (*ours, *theirs):
                one.step()

    def test_untouched_for_one_that_was_not_given(self) -> None:
        optimizer, alone = optimizer_of(), optimizer_of()
        decay, reference = (lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, alone))
        scheduler = BatchSizeScheduler(STEP, 256, lr="sqrt", optimizer=optimizer)
        for epoch in range(45):
            size, _ = scheduler.step(epoch)
            assert rate_of(optimizer) == rate_of(alone) * (size / 256) ** 0.5
            optimizer.step()
            alone.step()
            with scheduler.lr_untouched():
                decay.step()
            reference.step()

    @pytest.mark.parametrize("kind", ["batch", "epoch", "plateau", "constant", "known"])
    def test_a_clock_in_batches_is_reported_once(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = optimizer_of()
        decay: Any = lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        if kind == "plateau":
            decay = lr_scheduler.ReduceLROnPlateau(optimizer)
        config = None if kind == "constant" else STEP
        known = kind == "known"  # the LR scheduler was made for as many steps as there will be
        scheduler = BatchSizeScheduler(
            config, 256, lr="sqrt", optimizer=optimizer, lr_scheduler=decay, updates_known=known
        )
        with caplog.at_level(logging.WARNING, logger="batchfit"):
            for epoch in range(5):
                scheduler.step(epoch)
                for _ in range(1 if kind == "epoch" else 3):
                    optimizer.step()
                    decay.step(*([1.0] if kind == "plateau" else []))
        reported = [record.getMessage() for record in caplog.records]
        if kind != "batch":
            assert reported == []
            return
        (text,) = reported
        assert text.startswith("CosineAnnealingLR is stepped once per batch, and the batch size changes")
        assert "scheduler.updates(samples=..., epochs=...), and say so with updates_known=True" in text

    @pytest.mark.parametrize(("unit", "often"), [("step", True), ("samples", True), ("samples", False)])
    def test_the_clock_without_epochs(self, unit: str, often: bool, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = optimizer_of()
        decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
        config = StepBatchSizeConfig(step_size=10**6, gamma=2, unit=unit)  # type: ignore[arg-type]
        scheduler = BatchSizeScheduler(config, 64, lr="none", optimizer=optimizer, lr_scheduler=decay)
        apart = (1 if unit == "step" else 64) if often else 50_000
        with caplog.at_level(logging.WARNING, logger="batchfit"):
            for number in range(4):
                optimizer.step()
                decay.step()
                scheduler.step(**{unit: number * apart})
        assert len(caplog.records) == often

    def test_an_epoch_that_was_left_early_is_no_batch(self, caplog: pytest.LogCaptureFixture) -> None:
        optimizer = optimizer_of()
        decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = batchfit.ResizableLoader(TensorDataset(torch.arange(60)), 10)
        scheduler = BatchSizeScheduler(
            "0:10 2:20", loader=loader, lr="linear", optimizer=optimizer, lr_scheduler=decay
        )
        for epoch in range(3):
            scheduler.step(epoch)
            for number, _ in enumerate(loader):
                optimizer.step()
                if epoch == 1 and number == 2:
                    break
            decay.step()
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize("drop_last", [False, True])
    def test_updates_are_those_of_the_loader(self, drop_last: bool) -> None:
        loader = batchfit.ResizableLoader(TensorDataset(torch.arange(50)), 8, drop_last=drop_last)
        scheduler = BatchSizeScheduler("0:8 1:20", loader=loader)
        count = scheduler.updates(samples=50, epochs=2)
        assert count == sum(len(list(loader)) for _ in range(2)) == (8 if drop_last else 10)
        assert scheduler.updates(samples=50, epochs=2, drop_last=not drop_last) != count

    def test_the_remedy(self) -> None:
        scheduler = BatchSizeScheduler(STEP, 256)
        assert scheduler.updates(samples=50_000, epochs=100) == 20 * (196 + 98 + 49) + 40 * 25
        assert scheduler.updates(samples=50_000, epochs=100, drop_last=True) == 20 * (195 + 97 + 48) + 40 * 24


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class TestCheckpoints:
    @quick
    @given(
        st.integers(0, 69),
        st.permutations(["scheduler", "optimizer", "lr"]),
        st.sampled_from(["sqrt", "linear", "seesaw"]),
    )
    def test_a_resumed_run_is_one_that_was_never_stopped(
        self, stop: int, order: list[str], rule: str
    ) -> None:
        def made() -> dict[str, Any]:
            optimizer = optimizer_of()
            decay = lr_scheduler.ExponentialLR(optimizer, 0.97)
            loader = Settable(256)
            scheduler = BatchSizeScheduler(
                STEP, loader=loader, lr=rule, optimizer=optimizer, lr_scheduler=decay
            )
            return {"optimizer": optimizer, "lr": decay, "scheduler": scheduler}

        def epoch_of(run: dict[str, Any], epoch: int) -> tuple[int, float]:
            size, _ = run["scheduler"].step(epoch)
            rate = rate_of(run["optimizer"])
            run["optimizer"].step()
            run["lr"].step()
            return size, rate

        run = made()
        whole = [epoch_of(run, epoch) for epoch in range(stop)]
        state = through_a_file({name: part.state_dict() for name, part in run.items()})
        whole += [epoch_of(run, epoch) for epoch in range(stop, 70)]
        again = made()
        for name in order:
            again[name].load_state_dict(state[name])
        assert again["scheduler"].batch_size == (whole[stop - 1][0] if stop else 256)
        assert [epoch_of(again, epoch) for epoch in range(stop, 70)] == whole[stop:]

    def test_increases_go_on_from_their_size(self) -> None:
        config = IncreaseBatchSizeConfig(function=lambda epoch, size: 10)
        first = BatchSizeScheduler(config, 100)
        for epoch in range(4):
            first.step(epoch)
        asked: list[int] = []
        again = BatchSizeScheduler(
            IncreaseBatchSizeConfig(function=lambda epoch, size: asked.append(epoch) or 10), 100
        )
        again.load_state_dict(through_a_file(first.state_dict()))
        assert again.batch_size == first.batch_size == 140
        assert again.step(4) == first.step(4) == (150, True)
        assert asked == [4]

    def test_other_limits_than_before_are_reported(self) -> None:
        first = BatchSizeScheduler(STEP, 256)
        first.step(40)
        events: list[ScheduleEvent] = []
        loader = Settable(256)
        again = BatchSizeScheduler(STEP, loader=loader, largest=600, on_event=events.append)
        again.load_state_dict(first.state_dict())
        assert (again.batch_size, loader.batch_size) == (600, 600)
        assert [(e.size_before, e.size_after) for e in events] == [(1024, 600)]
        assert "others than in the checkpoint" in events[0].why

    @pytest.mark.parametrize("loader_first", [False, True])
    @pytest.mark.parametrize("config", [None, MilestoneBatchSizeConfig(milestones="0:8 3:16")])
    def test_a_size_that_was_set_by_hand_counts_until_the_schedule_changes_it(
        self, config: Any, loader_first: bool
    ) -> None:
        def make() -> tuple[Any, BatchSizeScheduler]:
            loader = batchfit.ResizableLoader(torch.utils.data.TensorDataset(torch.arange(24)), 8)
            return loader, BatchSizeScheduler(config, 8, loader=loader)

        def epochs(loader: Any, scheduler: BatchSizeScheduler, which: range) -> list[list[int]]:
            found = []
            for epoch in which:
                scheduler.step(epoch)
                found.append([len(samples) for (samples,) in loader])
            return found

        straight = make()
        epochs(*straight, range(1))
        straight[0].batch_size = 6
        parts = make()
        saved = [part.state_dict() for part in straight]
        order = (0, 1) if loader_first else (1, 0)
        for which in order:
            parts[which].load_state_dict(saved[which])
        expected = epochs(*straight, range(1, 4))
        assert expected[:2] == [[6, 6, 6, 6]] * 2
        assert epochs(*parts, range(1, 4)) == expected

    @pytest.mark.parametrize("keywords", [{}, {"tokens_per_sample": 4}])
    def test_a_state_from_before_the_first_step(self, keywords: dict[str, Any]) -> None:
        scheduler, again = (BatchSizeScheduler("0:8 1k:16 tokens", **keywords) for _ in range(2))
        again.load_state_dict(through_a_file(scheduler.state_dict()))
        assert again.batch_size == 8

    def test_what_is_no_state(self) -> None:
        scheduler = BatchSizeScheduler(STEP, 256)
        for wrong in ({}, {"version": 99}, 3):
            with pytest.raises(ValueError, match=r"state must be what state_dict\(\) returned, not"):
                scheduler.load_state_dict(wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="initial_batch_size must be 128, as in the checkpoint"):
            scheduler.load_state_dict(BatchSizeScheduler(STEP, 128).state_dict())


class TestTogether:
    """A loader changes by itself: the rate must be that of the batch which is trained with."""

    @staticmethod
    def made(config: Any, **keywords: Any) -> tuple[Any, BatchSizeScheduler, torch.optim.Optimizer]:
        optimizer = optimizer_of()
        loader = batchfit.ResizableLoader(TensorDataset(torch.arange(100)), 10, **keywords)
        return loader, BatchSizeScheduler(config, loader=loader, lr="linear", optimizer=optimizer), optimizer

    @pytest.mark.parametrize("config", [{"type": "step", "step_size": 30, "gamma": 2, "multiple_of": 4}, "f"])
    def test_the_first_batch_has_its_rate(self, config: Any) -> None:
        if config == "f":
            config = CustomBatchSizeConfig(
                function=lambda progress: 8 + progress.samples // 25, unit="samples"
            )
        else:
            config = {**config, "unit": "samples"}
        loader, scheduler, optimizer = self.made(config)
        for (x,) in loader:
            wanted = scheduler.plan.size_at(loader.current_progress)
            assert len(x) <= wanted
            assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * wanted / 10)
            scheduler.step()

    def test_a_rate_that_comes_late_is_reported_once(self, caplog: pytest.LogCaptureFixture) -> None:
        config = CustomBatchSizeConfig(function=lambda progress: 10 if progress.samples < 50 else 20)
        loader, scheduler, _ = self.made(config)
        for epoch in range(3):  # right for a schedule by epochs, and this one is not
            scheduler.step(epoch)
            list(loader)
        said = [record.message for record in caplog.records if "was at a batch size of 20" in record.message]
        assert len(said) == 1
        assert "call scheduler.step() after each optimizer.step()" in said[0]

    @pytest.mark.parametrize("unit", ["epoch", "step", "samples"])
    def test_a_rate_in_time_is_not(self, unit: str, caplog: pytest.LogCaptureFixture) -> None:
        count = {"epoch": 1, "step": 7, "samples": 45}[unit]
        loader, scheduler, _ = self.made({"type": "step", "step_size": count, "gamma": 2, "unit": unit})
        for epoch in range(3):
            scheduler.step(epoch)
            for _ in loader:
                if unit != "epoch":
                    scheduler.step()
        assert scheduler.batch_size > 20
        assert not [record for record in caplog.records if "was at a batch size" in record.message]


class TestNoise:
    class Readings:
        def __init__(self, scale: float | None) -> None:
            self.scale = scale
            self.asked = 0

        def reading(self) -> Any:
            self.asked += 1
            return replace(_reading(NoiseReading, self.scale), steps=self.asked)

    def test_the_size_follows_the_noise_in_ratios(self) -> None:
        noise, events = self.Readings(10_000.0), []
        config = NoiseBatchSizeConfig(max_batch_size=1024, min_steps=20)
        loader = Settable(64)
        scheduler = BatchSizeScheduler(config, loader=loader, noise=noise, on_event=events.append)
        sizes = [scheduler.step(step=step)[0] for step in range(200)]
        assert loader.sizes == [64, 128, 256, 512, 1024]
        assert sizes[0] == 128
        assert sizes[-1] == 1024
        assert noise.asked == 20, "every tenth step"
        assert scheduler.get_batch_size(step=5) == 1024
        assert not scheduler.should_update(step=5)
        changes = [event for event in events if event.kind == "changed"]
        assert [event.progress.step for event in changes] == [0, 20, 40, 60]
        assert all("noise scale" in event.why for event in changes)
        again = BatchSizeScheduler(config, 64, noise=noise)
        again.load_state_dict(through_a_file(scheduler.state_dict()))
        assert again.batch_size == 1024

    def test_sizes_are_shared_by_the_ranks(self) -> None:
        noise = self.Readings(1.0)  # so little that a batch of 1 would do
        config = NoiseBatchSizeConfig(min_steps=0)
        scheduler = BatchSizeScheduler(config, 96, noise=noise, world_size=3, microbatch_size=4)
        assert {scheduler.step(step=step)[0] for step in range(90)} == {48, 24, 12}
        with pytest.raises(ValueError, match="initial_batch_size must be a multiple of 32, not 100"):
            BatchSizeScheduler(config, 100, noise=noise, world_size=4, microbatch_size=8)

    def test_no_estimate_no_change(self) -> None:
        events: list[ScheduleEvent] = []
        scheduler = BatchSizeScheduler(
            NoiseBatchSizeConfig(), 64, noise=self.Readings(None), on_event=events.append
        )
        assert {scheduler.step(step=step) for step in range(50)} == {(64, False)}
        assert {event.kind for event in events} == {"kept"}
        with pytest.raises(ValueError, match="must be a schedule that can be foreseen, not one by noise"):
            scheduler.updates(samples=10, epochs=1)

    def test_a_reading_to_which_nothing_is_added_changes_nothing(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        noise, events = self.Readings(10_000.0), []
        noise.reading = lambda: _reading(NoiseReading, 10_000.0)  # type: ignore[method-assign]
        config = NoiseBatchSizeConfig(min_steps=0)
        scheduler = BatchSizeScheduler(config, 64, noise=noise, on_event=events.append)
        assert [scheduler.step(step=step)[0] for step in range(200)] == [128] * 200
        assert "no step was measured since step 0" in events[-1].why
        (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
        assert "the noise was not measured in 50 steps, and the batch size stays 128" in said
        assert "microbatch_size=...) with at most half" in said

    def test_a_noise_that_nobody_reports_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        noise = batchfit.GradientNoise(torch.nn.Linear(2, 1))
        scheduler = BatchSizeScheduler(NoiseBatchSizeConfig(), 64, noise=noise)
        for step in range(60):
            scheduler.step(step=step)
        assert [record.message for record in caplog.records if "was not measured in 50" in record.message]

    def test_a_lower_bound_is_enough_where_that_is_asked_for(self) -> None:
        class Bound(self.Readings):  # type: ignore[name-defined, misc]
            def reading(self) -> Any:
                return replace(super().reading(), low=9_000.0)

        for use_bound, size in ((False, 64), (True, 128)):
            config = NoiseBatchSizeConfig(use_bound=use_bound, max_batch_size=128)
            scheduler = BatchSizeScheduler(config, 64, noise=Bound(None))
            assert [scheduler.step(step=step)[0] for step in range(20)][-1] == size

    @pytest.mark.parametrize(
        ("keywords", "size"),
        [
            ({}, 256),  # four times as many samples/s at 256 as at 64
            ({"microbatch_size": 64}, 64),  # accumulated: no faster
            ({"world_size": 4}, 1024),  # 256 on each
        ],
    )
    def test_samples_per_second_of_a_profile(self, keywords: dict[str, Any], size: int) -> None:
        points = [
            {"size": n, "step_s": t, "step_s_low": t, "step_s_high": t, "samples_per_s": n / t}
            for n, t in ((512, 2.0), (64, 1.0), (256, 1.0))
        ]
        profile = batchfit.ThroughputProfile(
            points=points, recommended=256, largest=512, within=0.05, reason="", budget_bytes=1, device="cpu"
        )
        config = NoiseBatchSizeConfig(min_steps=0, max_batch_size=4096, can_shrink=False)
        scheduler = BatchSizeScheduler(
            config, 64, noise=self.Readings(10_000.0), throughput=profile, **keywords
        )
        assert [scheduler.step(step=step)[0] for step in range(0, 200, 10)][-1] == size


def _reading(kind: Any, scale: float | None) -> Any:
    """A reading with a narrow interval, whatever else the type holds."""
    import dataclasses

    known: dict[str, Any] = {
        "scale": scale,
        "low": None if scale is None else scale * 0.9,
        "high": None if scale is None else scale * 1.1,
        "reason": "too few steps",
    }
    values = {}
    for one in dataclasses.fields(kind):
        if one.name in known:
            values[one.name] = known[one.name]
        elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            values[one.name] = 1
    return kind(**values)


def test_the_example() -> None:
    path = Path(__file__).parents[3] / "examples" / "schedule.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 150
    state = torch.get_rng_state()
    try:
        done = runpy.run_path(str(path))["train"](epochs=8)
    finally:
        torch.set_rng_state(state)
    assert done["resumed"] == done["losses"]
    assert done["updates"] == done["planned"] < done["constant"]
    assert done["losses"][-1] < done["losses"][0]
    assert [event.size_after for event in done["events"]] == [128, 256, 512]
