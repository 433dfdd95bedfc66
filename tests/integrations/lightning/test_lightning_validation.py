"""Validation within `fit` under OomProofTraining: an OOM does not end the run, and values are the batch's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs lightning")
pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")

import lightning_cases as cases
import pytorch_lightning as legacy
import torch
from lightning_cases import LegacyNet, Net, data, seeded, trainer, weights
from torch.utils.data import DataLoader

from batchfit.errors import BatchfitError
from batchfit.integrations.lightning import OomProofTraining

torchmetrics = pytest.importorskip("torchmetrics")
pytestmark = [pytest.mark.filterwarnings(text) for text in cases.QUIET]


class Tried:
    """Sizes that were tried: nothing that a module is given back."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def append(self, size: int) -> None:
        self.sizes.append(size)


class Watched(Net):
    """Runs out of memory in validation alone, above `most` samples; leaves values behind in every way."""

    def __init__(self, *, most: int | None = None, **options: Any) -> None:
        super().__init__(dropout=0.0, width=8, **options)
        self.most = most
        self.metric = torchmetrics.MeanMetric()
        self.losses: list[Any] = []
        self.rows: dict[str, list[Any]] = {"predicted": []}
        self.right = 0
        self.tried = Tried()
        self.returned: list[Any] = []
        self.register_buffer("seen", torch.zeros(()))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        (x,) = batch
        self.tried.append(len(x))
        self.rows["predicted"].append(x[:, :1] * 1.0)
        if self.most is not None and len(x) > self.most:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        error = (self.net(x) - x[:, :1]).square()
        self.log("mean", error.mean())
        self.log("most", error.max(), reduce_fx="max")
        self.log("sum", error.sum(), reduce_fx="sum")
        self.metric.update(error.mean(), weight=len(x))
        self.log("val_metric", self.metric)
        self.losses.append(error.mean())
        self.right += len(x)
        self.seen += len(x)
        return {"error": error, "loss": error.mean()}

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.returned.append(outputs)


def run(module: Any, *callbacks: Any, size: int = 48, samples: int = 160, **options: Any) -> Any:
    made = trainer(*callbacks, max_epochs=2, **options)
    made.fit(module, DataLoader(data(64), batch_size=32), DataLoader(data(samples), batch_size=size))
    return made


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("most", [30, 7])
def test_a_validation_batch_that_does_not_fit_leaves_what_the_whole_would_have(
    most: int, sanity: int
) -> None:
    plain, cut = seeded(Watched), seeded(lambda: Watched(most=most))
    with pytest.raises(RuntimeError, match="out of memory"):
        run(seeded(lambda: Watched(most=most)))
    events: list[Any] = []
    whole = run(plain, num_sanity_val_steps=sanity)
    ours = run(cut, OomProofTraining(on_event=events.append), num_sanity_val_steps=sanity)
    assert events
    assert ours.current_epoch == 2
    assert all(map(torch.equal, weights(plain), weights(cut)))
    for name in ("mean", "most", "sum", "val_metric"):
        assert ours.callback_metrics[name].item() == pytest.approx(
            whole.callback_metrics[name].item(), rel=1e-5
        )
    assert len(cut.losses) == len(plain.losses)
    assert torch.stack(cut.losses).tolist() == pytest.approx(torch.stack(plain.losses).tolist(), rel=1e-5)
    assert [len(rows) for rows in cut.rows["predicted"]] == [len(rows) for rows in plain.rows["predicted"]]
    assert torch.equal(torch.cat(cut.rows["predicted"]), torch.cat(plain.rows["predicted"]))
    assert cut.right == plain.right
    assert cut.seen == plain.seen
    for one, other in zip(cut.returned, plain.returned, strict=True):
        assert torch.allclose(one["error"], other["error"], rtol=1e-4)
        assert one["loss"].item() == pytest.approx(other["loss"].item(), rel=1e-5)
    assert max(cut.tried.sizes) == 48
    assert cut.tried.sizes.count(48) == 1  # learned


def test_a_batch_that_fits_runs_once_and_whole() -> None:
    plain, ours = seeded(Watched), seeded(Watched)
    run(plain)
    run(ours, OomProofTraining())
    assert ours.tried.sizes == plain.tried.sizes
    for one, other in zip(ours.returned, plain.returned, strict=True):
        assert torch.equal(one["error"], other["error"])
    assert [loss.item() for loss in ours.losses] == [loss.item() for loss in plain.losses]


def test_a_value_that_is_no_mean_is_refused_by_its_name() -> None:
    class Perplexed(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            error = super().validation_step(batch, batch_idx)["error"]
            self.log("perplexity", (3 * error.mean()).exp())

    text = r"'perplexity' is no mean over samples.*microbatches of 24.*batch_size of at most 24"
    with pytest.raises(BatchfitError, match=text):
        run(Perplexed(most=30), OomProofTraining())
    run(Perplexed(), OomProofTraining())  # whole, it is right

    class Kept(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            error = super().validation_step(batch, batch_idx)["error"]
            self.losses.append((3 * error.mean()).exp())

    with pytest.raises(BatchfitError, match="item 1 that it appends to losses is no mean"):
        run(Kept(most=30), OomProofTraining())


def test_a_step_that_draws_random_numbers_is_taken_as_it_is() -> None:
    class Noisy(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            super().validation_step(batch, batch_idx)
            self.log("noise", torch.rand(()))

    made = run(Noisy(most=30), OomProofTraining())
    assert 0 <= made.callback_metrics["noise"] <= 1


class Words:
    """A loader whose batches have no samples that anybody could count."""

    def __iter__(self) -> Any:
        return iter([{"a": 1}, {"a": 2}])


def test_a_batch_that_cannot_be_cut_runs_as_without() -> None:
    class Texts(Watched):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            self.tried.append(len(batch))
            if self.most is not None:
                raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
            self.log("mean", torch.ones(()), batch_size=1)

    def fitted(module: Any) -> Any:
        made = trainer(OomProofTraining(), max_epochs=1)
        made.fit(module, DataLoader(data(64), batch_size=32), Words())
        return made

    assert fitted(Texts()).callback_metrics["mean"] == 1
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        fitted(Texts(most=1))
    assert "this batch was not run in microbatches" in "".join(caught.value.__notes__)


def test_several_loaders_a_user_who_wants_gradients_and_the_other_package() -> None:
    class Grads(Watched):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            with torch.enable_grad():
                x = batch[0].clone().requires_grad_()
                (grad,) = torch.autograd.grad(self.net(x).sum(), x)
            self.log("grad", grad.square().mean())
            super().validation_step(batch, batch_idx, dataloader_idx)

    def fitted(module: Any, *callbacks: Any) -> Any:
        made = trainer(*callbacks, max_epochs=1, inference_mode=False)
        loaders = [DataLoader(data(40), batch_size=40), DataLoader(data(25), batch_size=25)]
        made.fit(module, DataLoader(data(64), batch_size=32), loaders)
        return made.callback_metrics

    whole, cut = fitted(seeded(Grads)), fitted(seeded(lambda: Grads(most=16)), OomProofTraining())
    assert {name for name in whole if "grad" in name} == {"grad/dataloader_idx_0", "grad/dataloader_idx_1"}
    for name, value in whole.items():
        assert cut[name].item() == pytest.approx(value.item(), rel=1e-4), name
    old = LegacyNet(limit=40)
    made = trainer(OomProofTraining(), package=legacy)
    made.fit(old, DataLoader(data(64), batch_size=32), DataLoader(data(), batch_size=64))
    assert max(old.sizes) == 32
    assert made.current_epoch == 1


def test_the_trainer_is_lightnings_again_and_what_was_learned_is_kept(tmp_path: Any) -> None:
    proof, module = OomProofTraining(), Watched(most=30)
    made = run(module, proof)
    assert "validation_step" not in vars(made.strategy)
    made.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(RuntimeError, match="out of memory"):
        made.validate(module, DataLoader(data(), batch_size=48), verbose=False)
    again, fresh = Watched(most=30), OomProofTraining()
    made = trainer(fresh, max_epochs=3)
    loaders = DataLoader(data(64), batch_size=32), DataLoader(data(160), batch_size=48)
    made.fit(again, *loaders, ckpt_path=tmp_path / "a.ckpt")
    assert 48 not in again.tried.sizes
    with pytest.raises(KeyError, match="a bug"):
        run(Broken(), OomProofTraining())


class Broken(Watched):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        raise KeyError("a bug")
