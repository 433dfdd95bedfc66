"""OomProofTraining in a real Trainer: runs with an OOM end as those without."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from examples import examples

pytest.importorskip("lightning", reason="needs lightning")

import lightning.pytorch as pl
import lightning_cases as cases
import torch
import torchmetrics
from hypothesis import given
from hypothesis import strategies as st
from lightning_cases import LegacyNet, Net, data, legacy, seeded, trainer, weights
from torch import nn
from torch.utils.data import DataLoader

import batchfit
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.integrations.lightning import BatchSizeFinder, OomProofTraining
from batchfit.integrations.lightning.merging import Logged, merged
from batchfit.testing import count_operations, fail_at

pytestmark = [pytest.mark.filterwarnings(text) for text in cases.QUIET]


class Exact(Net):
    """In double precision: equal means equal. A sample takes 40 KiB and more, all parameters a few."""

    def __init__(self, *, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(dropout=dropout, width=8, **options)
        self.scale = nn.Parameter(torch.full((1024,), 0.5))
        self.double()
        self.logged: list[float] = []

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 64)

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        self.sizes.append(len(x))
        if self.limit is not None and len(x) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        hidden = self.net[2](torch.tanh(self.wide(x).view(len(x), -1, 1024) * self.scale))
        return (self.net(x)[:, 0] + hidden.square().mean((1, 2)) - x[:, 1]).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss_step"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)  # zero gradients stay small steps


MIB = 2**20


def loader(size: int = 64, samples: int = 256) -> Any:
    return DataLoader(data(samples, dtype=torch.float64), batch_size=size)


def fitted(module: Any, *callbacks: Any, size: int = 64, samples: int = 256, **options: Any) -> Any:
    run = trainer(*callbacks, **{"max_epochs": 2, **options})
    run.fit(module, loader(size, samples))
    return run


def same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(weights(one), weights(other), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["plain", "accumulated", "clipped", "clipped_by_value"],
)
def test_running_out_changes_neither_weights_nor_what_is_logged(
    options: dict[str, Any], living_bytes: int
) -> None:
    """Without us: Lightning #8028, #9625, #20231, the run ends with the error."""
    plain = seeded(Exact)
    run = fitted(plain, samples=250, **options)
    with (
        batchfit.virtual_memory(living_bytes + 2 * MIB),
        pytest.raises(torch.OutOfMemoryError),
    ):
        fitted(seeded(Exact), samples=250, **options)
    ours, module = OomProofTraining(), seeded(Exact)
    with batchfit.virtual_memory(living_bytes + 2 * MIB):
        proof = fitted(module, ours, samples=250, **options)
    assert ours.retries >= 1
    assert proof.global_step == run.global_step
    same(module, plain)
    assert module.logged == pytest.approx(plain.logged, abs=1e-12)
    both = proof.callback_metrics["loss_epoch"], run.callback_metrics["loss_epoch"]
    torch.testing.assert_close(*both, rtol=0, atol=1e-7)  # Lightning sums in single precision


class Single(Exact):
    """In single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss([one.float() for one in batch])


@pytest.mark.parametrize("kind", [Exact, Single])
def test_a_forced_split_ends_as_plain_training(kind: Any) -> None:
    plain, module = seeded(kind), seeded(kind)
    fitted(plain, samples=250)
    fitted(module, OomProofTraining(microbatch_size=15), samples=250)
    assert max(module.sizes) <= 15 < max(plain.sizes)
    mine, theirs = (torch.cat([one.flatten() for one in weights(each)]) for each in (module, plain))
    assert (mine - theirs).norm() < (1e-10 if kind is Exact else 1e-5) * theirs.norm()


class Ragged(Exact):
    """Whose last batch is much wider than the others."""

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(1, 512 if bool(x[0, 0] > 1e3) else 64)


def test_a_batch_that_is_out_of_memory_late_is_retried(living_bytes: int) -> None:
    """Lightning #20447: the largest sample comes last, long after a search has ended."""
    rows = data(256, dtype=torch.float64).tensors[0]
    rows[192:, 0] = 2e3

    def run(*callbacks: Any) -> tuple[Any, Any]:
        module = seeded(Ragged)
        done = trainer(*callbacks, max_epochs=2)
        done.fit(module, DataLoader(torch.utils.data.TensorDataset(rows), batch_size=64))
        return module, done

    plain, _ = run()
    ours = OomProofTraining()
    with batchfit.virtual_memory(living_bytes + 5 * MIB):
        module, _ = run(ours)
    assert ours.retries >= 1
    assert module.sizes[:3] == [64, 64, 64]  # whole, as long as that goes
    same(module, plain)


def test_a_fault_at_any_point_of_a_batch_is_survived() -> None:
    """Forward, backward, the gradients' sums: wherever the one failure comes, the weights are the same."""
    plain = seeded(Exact)
    fitted(plain, max_epochs=1, samples=128)

    class Faulty(pl.Callback):
        def __init__(self, at: int | None) -> None:
            self.at, self.context, self.seen = at, None, None

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.context: Any = count_operations() if self.at is None else fail_at(self.at)
                self.seen: Any = self.context.__enter__()

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
            if self.context is not None:
                self.context.__exit__(None, None, None)
                self.context = None

    counting = Faulty(None)
    fitted(seeded(Exact), OomProofTraining(), counting, max_epochs=1, samples=128)
    points = counting.seen.operations
    assert points > 30
    survived = 0
    for at in range(0, points, 3):
        ours, module, fault = OomProofTraining(), seeded(Exact), Faulty(at)
        fitted(module, ours, fault, max_epochs=1, samples=128)
        assert fault.seen.fired
        survived += ours.retries
        same(module, plain)
    assert survived > 3


def test_random_numbers_of_a_retried_batch_are_those_of_one_that_began_in_that_size(
    living_bytes: int,
) -> None:
    def run(ours: OomProofTraining, limit_bytes: int) -> Any:
        module = seeded(lambda: Exact(dropout=0.3))
        torch.manual_seed(2)
        with batchfit.virtual_memory(living_bytes + limit_bytes):
            fitted(module, ours, size=128, max_epochs=1)
        return module

    tight = OomProofTraining()
    retried = run(tight, 6 * MIB)
    assert tight.retries == 1
    assert all(map(torch.equal, weights(retried), weights(run(OomProofTraining(microbatch_size=64), 2**30))))


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_as_without(precision: str) -> None:
    def run(*callbacks: Any) -> tuple[Any, Any]:
        module = seeded(lambda: Net(dropout=0.0))
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
            if precision == "16-mixed"
            else None
        )
        plugin = pl.plugins.MixedPrecision(precision, "cpu", scaler=scaler)
        trainer(*callbacks, plugins=[plugin], gradient_clip_val=0.5).fit(
            module, DataLoader(data(), batch_size=64)
        )
        return module, scaler

    plain, scaler = run()
    module, ours = run(OomProofTraining(microbatch_size=64))
    assert all(map(torch.equal, weights(plain), weights(module)))
    if scaler is not None:
        assert scaler.get_scale() == ours.get_scale() == 2048.0
    halved, _ = run(OomProofTraining(microbatch_size=32))
    for mine, theirs in zip(weights(halved), weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-2)
        assert not torch.equal(mine, theirs) or mine.numel() == 1


class Counting(Exact):
    """With metrics of torchmetrics, several kinds of logged values, and more than a loss returned."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.mean = torchmetrics.SumMetric(), torchmetrics.MeanMetric()
        self.totals: list[tuple[float, ...]] = []
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (x,) = batch
        self.count(torch.ones(len(x)))
        self.mean(x[:, 0])
        self.log("count", self.count, on_step=False, on_epoch=True)
        options: Any = {"on_step": True, "on_epoch": True}
        self.log("samples", float(len(x)), reduce_fx="sum", batch_size=len(x), **options)
        self.log("highest", x.max(), reduce_fx="max", **options)
        self.log("lowest", x.min(), reduce_fx=torch.min, **options)
        return {"loss": loss, "rows": x[:, 0], "first": x.mean(), "by": {"rows": x[:, 1]}, "name": "step"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs)
        names = ("samples_step", "highest_step", "lowest_step")
        self.totals.append(tuple(float(self.trainer.callback_metrics[name]) for name in names))


def test_metrics_count_every_sample_once_and_values_are_those_of_the_batch(living_bytes: int) -> None:
    plain, module, ours = seeded(Counting), seeded(Counting), OomProofTraining()
    run = fitted(plain, max_epochs=1, samples=250)
    with batchfit.virtual_memory(living_bytes + 2 * MIB):
        proof = fitted(module, ours, max_epochs=1, samples=250)
    assert ours.retries >= 1
    assert float(proof.callback_metrics["count"]) == 250 == float(run.callback_metrics["count"])
    assert float(module.mean.compute()) == pytest.approx(float(plain.mean.compute()), abs=1e-6)
    for mine, theirs in zip(module.totals, plain.totals, strict=True):
        assert mine == pytest.approx(theirs)
    for name in ("samples_epoch", "highest_epoch", "lowest_epoch"):
        assert float(proof.callback_metrics[name]) == pytest.approx(float(run.callback_metrics[name]))
    for mine, theirs in zip(module.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(mine["loss"], theirs["loss"].detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(mine["rows"], theirs["rows"])
        torch.testing.assert_close(mine["by"]["rows"], theirs["by"]["rows"])
        torch.testing.assert_close(mine["first"], theirs["first"])
        assert mine["name"] in ("step", ["step"] * 2, ["step"] * 4)


class Thrashing(OomProofTraining):
    """Told to take smaller microbatches after one that ran: no try has failed then."""

    def _looked_at(self, micro: Any) -> torch.Tensor:
        self._happened(batchfit.MicrobatchEvent("shrunk", 32, 16, "allocations were retried"))
        return super()._looked_at(micro)


def test_a_size_lowered_after_a_batch_ran_takes_nothing_of_it_back() -> None:
    plain, module = seeded(Counting), seeded(Counting)
    fitted(plain, max_epochs=1)
    run = fitted(module, Thrashing(microbatch_size=32), max_epochs=1)
    assert float(run.callback_metrics["count"]) == 256
    assert [len(outputs["rows"]) for outputs in module.outputs] == [64] * 4
    same(module, plain)


def test_what_a_step_returns_holds_no_graph() -> None:
    class Returning(Exact):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            return {"loss": loss, "again": [loss, {"loss": (loss,)}]}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert len(outputs["again"]) == 4
            for first, rest in outputs["again"]:
                assert not first.requires_grad
                assert not rest["loss"][0].requires_grad

    fitted(seeded(Returning), OomProofTraining(microbatch_size=16), max_epochs=1)


class Output(dict[str, Any]):
    """As models return it: items are attributes too."""

    @property
    def logits(self) -> Any:
        return self["logits"]


class Shared(Mapping[str, Any]):
    """Copies of it would hold the same dict."""

    def __init__(self, **items: Any) -> None:
        self.items_held = items

    def __getitem__(self, name: str) -> Any:
        return self.items_held[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.items_held[name] = value

    def __iter__(self) -> Any:
        return iter(self.items_held)

    def __len__(self) -> int:
        return len(self.items_held)


class Pair(list[Any]):
    """Has arguments of its own."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__((first, second))


@pytest.mark.parametrize("microbatch_size", [None, 32])
def test_what_a_step_returns_keeps_its_type(microbatch_size: int | None) -> None:
    class Returning(Exact):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss, (x,) = self.loss(batch), batch
            rows = x[:, 0] * self.scale[0]
            self.shared = Shared(rows=rows)
            out, frozen = Output(logits=rows, inner=Output(logits=rows)), MappingProxyType({"rows": rows})
            whole: Any = {"shape": x.shape, "pair": Pair(rows, 1), "plain": Shared(rows=x)}
            return {"loss": loss, "out": out, "shared": self.shared, "frozen": frozen, **whole}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen = outputs

    module = seeded(Returning)
    fitted(module, OomProofTraining(microbatch_size=microbatch_size), max_epochs=1)
    out = module.seen["out"]
    assert (type(out), type(out["inner"])) == (Output, Output)
    assert out.logits.shape == out["inner"].logits.shape == (64,)
    assert not out.logits.requires_grad
    assert module.shared["rows"].requires_grad  # the user's own is as it was
    for name in ("shared", "frozen"):  # could not be made again
        assert type(module.seen[name]) is dict
        assert not module.seen[name]["rows"].requires_grad
    if microbatch_size is None:
        assert type(module.seen["shape"]) is torch.Size
        assert type(module.seen["plain"]) is Shared
        assert type(module.seen["pair"]) is list


def test_a_mean_over_tokens_is_exact_with_its_weight() -> None:
    class Tokens(Exact):
        def loss(self, batch: Any) -> torch.Tensor:
            (x,) = batch
            kept = x[:, 1] > 0
            return (self.net(x)[:, 0] * kept).sum() / kept.sum() + 0.0 * self.scale.sum()

    def count(micro: Any) -> torch.Tensor:
        return (micro[0][:, 1] > 0).sum()

    plain, module = seeded(Tokens), seeded(Tokens)
    fitted(plain)
    fitted(module, OomProofTraining(weight=count, microbatch_size=20))
    same(module, plain)
    assert module.logged == pytest.approx(plain.logged, abs=1e-12)


class Hooked(pl.Callback):
    """Sees the gradients of whole batches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.norms: list[float] = []

    def on_before_zero_grad(self, *args: Any) -> None:
        self.calls.append("zero_grad")

    def on_before_backward(self, *args: Any) -> None:
        self.calls.append("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.calls.append("after")
        self.norms.append(float(sum(p.grad.square().sum() for p in pl_module.parameters())))

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.calls.append("step")


def test_hooks_come_once_a_batch_with_its_gradients() -> None:
    plain, split = Hooked(), Hooked()
    fitted(seeded(Exact), plain, max_epochs=1, accumulate_grad_batches=2)
    fitted(
        seeded(Exact), split, OomProofTraining(microbatch_size=32), max_epochs=1, accumulate_grad_batches=2
    )
    assert split.norms == pytest.approx(plain.norms, rel=1e-9)
    assert (
        split.calls
        == ["zero_grad", "backward", "backward", "after", "backward", "backward", "after", "step"] * 2
    )


def test_an_optimizer_step_that_is_out_of_memory_is_undone_and_retried() -> None:
    plain = seeded(Exact)
    fitted(plain, max_epochs=1)

    class Failing(torch.optim.AdamW):
        failures = 0

        def step(self, closure: Any = None) -> Any:
            if Failing.failures == 2:
                Failing.failures += 1
                with torch.no_grad():
                    self.param_groups[0]["params"][0].zero_()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            Failing.failures += 1
            return super().step()

    class Stepping(Exact):
        def configure_optimizers(self) -> Any:
            return Failing(self.parameters(), lr=1e-2, eps=1e-3)

    module = seeded(Stepping)
    fitted(module, OomProofTraining(rollback=True), max_epochs=1)
    assert Failing.failures == 5
    same(module, plain)


def test_what_was_learned_is_in_the_checkpoint_and_the_trainer_is_lightnings_again(
    tmp_path: Path, living_bytes: int
) -> None:
    ours, module = OomProofTraining(), seeded(Exact)
    with batchfit.virtual_memory(living_bytes + 2 * MIB):
        run = fitted(module, ours, max_epochs=1)
        assert "_make_closure" not in vars(run.fit_loop.epoch_loop.automatic_optimization)
        assert "optimizer_step" not in vars(run.precision_plugin)
        run.save_checkpoint(tmp_path / "one.ckpt")
        before = ours.retries
        assert before >= 1
        later = OomProofTraining()
        run = trainer(later, max_epochs=2)
        run.fit(seeded(Exact), loader(), ckpt_path=tmp_path / "one.ckpt")
    assert later.retries == before


def test_sizes_and_retries_are_logged(tmp_path: Path, living_bytes: int) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    events: list[str] = []
    ours = OomProofTraining(on_event=lambda event: events.append(event.kind))
    with batchfit.virtual_memory(living_bytes + 2 * MIB):
        run = trainer(ours, logger=logger, log_every_n_steps=1)
        run.fit(seeded(Exact), loader())
    logger.save()
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    columns = rows[0].split(",")
    sizes = [row.split(",")[columns.index("microbatch_size")] for row in rows[1:]]
    assert [float(size) for size in sizes if size] == [32.0] * 4
    assert run.progress_bar_metrics["microbatch_retries"] == ours.retries == events.count("shrunk")


def test_what_has_not_changed_is_logged_once_an_epoch_and_shown_in_every_row(tmp_path: Path) -> None:
    logger = pl.loggers.CSVLogger(tmp_path)
    logged: list[str] = []

    class Counting(Exact):
        def log(self, name: str, *args: Any, **options: Any) -> None:
            logged.append(name)
            super().log(name, *args, **options)

    run = trainer(OomProofTraining(), logger=logger, log_every_n_steps=1, max_epochs=2)
    run.fit(seeded(Counting), loader())
    run.fit_loop.max_epochs = 3
    run.fit(run.lightning_module, loader())
    assert logged.count("microbatch_size") == logged.count("microbatch_retries") == 3
    logger.save()
    rows = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("microbatch_size")
    sizes = [row.split(",")[column] for row in rows[1:]]  # a row at the end of an epoch has other columns
    assert [size for size in sizes if size] == ["64.0"] * 12


def test_a_finder_beside_it_sees_steps_run_out(living_bytes: int) -> None:
    class Late(BatchSizeFinder):
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.current_epoch == 1:
                self.scale_batch_size(trainer, pl_module)

    finder, module = Late(tolerance=0.0), Exact(limit=50)
    run = fitted(module, OomProofTraining(), finder)
    assert finder.optimal_batch_size == 50
    assert run.callbacks[0].retries == 0


def test_a_trainer_of_pytorch_lightning() -> None:
    plain, module = (
        seeded(lambda: LegacyNet(dropout=0.0).double()),
        seeded(lambda: LegacyNet(dropout=0.0).double()),
    )
    trainer(package=legacy).fit(plain, loader())
    trainer(OomProofTraining(microbatch_size=16), package=legacy).fit(module, loader())
    for mine, theirs in zip(weights(module), weights(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-8)


@examples(60)
@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), min_size=1, max_size=5),
    st.sampled_from(["mean", "sum", "min", "max", torch.max]),
)
def test_values_of_parts_are_merged_to_that_of_the_whole(parts: list[list[float]], how: Any) -> None:
    rule = getattr(torch, how) if isinstance(how, str) else how
    logs = [
        [
            Logged(
                ("fx", "x"),
                rule(torch.tensor(part, dtype=torch.float64)),
                {"reduce_fx": how, "batch_size": len(part)},
            )
        ]
        for part in parts
    ]
    (whole,) = merged(logs, [len(part) for part in parts])
    every = torch.tensor([value for part in parts for value in part], dtype=torch.float64)
    torch.testing.assert_close(whole.value, rule(every))
    assert whole.options["batch_size"] == len(every)


# --- bad input


def test_what_cannot_be_run_in_microbatches_is_refused_before_training() -> None:
    class Manual(Exact):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Backward(Exact):
        def backward(self, loss: Any) -> None:
            loss.backward()

    class Nothing(Exact):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    class Iterating(Exact):
        def training_step(self, dataloader_iter: Any) -> Any:
            return self.loss(next(dataloader_iter)[0])

    class Closed(Exact):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    for kind, text in (
        (Manual, "needs automatic optimization"),
        (Backward, "Backward has a backward of its own"),
        (Nothing, "training_step must return a loss"),
        (Iterating, "dataloader_iter"),
        (Closed, "LBFGS"),
    ):
        with pytest.raises(BatchfitError, match=text):
            fitted(kind(), OomProofTraining())
    with pytest.raises(ValueError, match="microbatch_size must"):
        OomProofTraining(microbatch_size=0)
    with pytest.raises(ValueError, match="budget must be bytes or text"):
        OomProofTraining(budget="lots")
    with pytest.raises(TypeError, match="rollback must be True or False, not 1"):
        OomProofTraining(rollback=1)  # type: ignore[arg-type]


def test_a_loss_that_is_no_mean_is_reported_with_what_can_be_done(caplog: pytest.LogCaptureFixture) -> None:
    class Summing(Exact):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * len(batch[0])

    with caplog.at_level("WARNING", "batchfit"):
        fitted(Summing(), OomProofTraining(microbatch_size=8))
    (text,) = [line for line in caplog.messages if "returns a sum" in line]
    assert text.endswith("Return the mean from training_step: the loss divided by its samples")


def test_an_error_of_the_users_leaves_a_trainer_that_is_lightnings() -> None:
    class Broken(Exact):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx == 1:
                raise KeyError("a bug")
            return super().training_step(batch, batch_idx)

    run = trainer(OomProofTraining())
    with pytest.raises(KeyError, match="a bug"):
        run.fit(Broken(), loader())
    assert "_make_closure" not in vars(run.fit_loop.epoch_loop.automatic_optimization)
    assert type(run.fit_loop.epoch_loop._results).__name__ == "_ResultCollection"


class Tasks(Exact):
    """Two tasks at once, as a CombinedLoader gives them: a list with a batch of each."""

    def loss(self, batch: Any) -> torch.Tensor:
        assert type(batch) is list
        return sum((super(Tasks, self).loss(task) for task in batch), torch.zeros(()))


@pytest.mark.parametrize("size", [None, 3, 1])
def test_tasks_are_cut_by_their_samples(size: int | None) -> None:
    modules = [seeded(Tasks), seeded(Tasks)]
    ours = OomProofTraining(microbatch_size=size, compared="ignore")
    for module, callbacks in zip(modules, ([], [ours]), strict=True):
        trainer(*callbacks, max_epochs=2).fit(module, [loader(8, 32), loader(8, 32)])
    same(*modules)
    if size is not None:
        assert max(modules[1].sizes) == size


def test_tasks_of_other_sizes_are_refused() -> None:
    run = trainer(OomProofTraining(microbatch_size=3), max_epochs=1)
    with pytest.raises(ValueError, match=r"in two ways|one number of samples in all its parts"):
        run.fit(seeded(Tasks), [loader(8, 32), loader(4, 32)])


def test_an_oom_that_ends_the_training_leaves_a_snapshot(tmp_path: Path) -> None:
    path = tmp_path / "oom.pickle"
    module = seeded(Exact)
    with batchfit.virtual_memory("1GiB"):
        fitted(module, OomProofTraining(record_oom=path), max_epochs=1, samples=64)
        assert not path.exists()
        module = seeded(Exact)
        module.limit = 0
        with pytest.raises(NothingFitsError) as refused:
            fitted(module, OomProofTraining(record_oom=path), size=32, max_epochs=1, samples=64)
    found = batchfit.explain_oom(path)
    assert found.step == 0
    assert found.batch_size == 32
    assert any("batchfit why" in one for one in refused.value.__notes__)
    with pytest.raises(TypeError, match="record_oom must be a file or None"):
        OomProofTraining(record_oom=True)  # type: ignore[arg-type]
