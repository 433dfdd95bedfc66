"""Losses that compare the samples of a batch: the loss of the whole batch, however it is encoded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import batchfit  # noqa: E402
from batchfit.errors import BatchfitError  # noqa: E402

Make = Callable[[Any, Any], Any]  # a loss of `losses` (the library's module), for a model
slow = pytest.mark.slow  # each proves for one more loss what the first ones prove


@pytest.fixture(autouse=True)
def _library() -> None:
    """Imported here: every process of the tests collects this file, and the import takes seconds."""
    pytest.importorskip("sentence_transformers", reason="needs sentence_transformers")


def library() -> Any:
    import sentence_transformers.sentence_transformer.losses as losses

    return losses


def adapt(trainer: Any, **options: Any) -> Any:
    from batchfit.integrations import transformers

    return transformers.adapt(trainer, **options)


def three(index: int) -> int:
    return index % 3


def graded(index: int) -> float:
    return index % 5 / 5


def in_batch(losses: Any, model: Any) -> Any:
    return losses.MultipleNegativesRankingLoss(model)


COMPARING: list[Any] = [
    ("MultipleNegativesRanking", in_batch, {}),
    (
        "CachedMultipleNegativesRanking",
        lambda of, model: of.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
        {"columns": 3},
    ),
    (
        "Matryoshka",
        lambda of, model: of.MatryoshkaLoss(model, of.MultipleNegativesRankingLoss(model), [16, 8]),
        {},
    ),
    *(
        pytest.param(*one, marks=slow)
        for one in (
            (
                "MatryoshkaOfCached",
                lambda of, model: of.MatryoshkaLoss(
                    model, of.CachedMultipleNegativesRankingLoss(model, mini_batch_size=4), [16, 8]
                ),
                {},
            ),
            ("Symmetric", lambda of, model: of.MultipleNegativesSymmetricRankingLoss(model), {}),
            (
                "CachedSymmetric",
                lambda of, model: of.CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=3),
                {},
            ),
            (
                "MegaBatchMargin",
                lambda of, model: of.MegaBatchMarginLoss(model, mini_batch_size=4),
                {},
            ),
            (
                "PlainMegaBatchMargin",
                lambda of, model: of.MegaBatchMarginLoss(model, use_mini_batched_version=False),
                {},
            ),
            ("CoSENT", lambda of, model: of.CoSENTLoss(model), {"labels": graded}),
            ("AnglE", lambda of, model: of.AnglELoss(model), {"labels": graded}),
            (
                "OnlineContrastive",
                lambda of, model: of.OnlineContrastiveLoss(model),
                {"labels": lambda index: index % 2},
            ),
            (
                "BatchAll",
                lambda of, model: of.BatchAllTripletLoss(model),
                {"columns": 1, "labels": three},
            ),
            (
                "BatchHard",
                lambda of, model: of.BatchHardTripletLoss(model),
                {"columns": 1, "labels": three},
            ),
            (
                "BatchSemiHard",
                lambda of, model: of.BatchSemiHardTripletLoss(model),
                {"columns": 1, "labels": three},
            ),
            ("Orthogonal", lambda of, model: of.GlobalOrthogonalRegularizationLoss(model), {}),
        )
    ),
]
ALONE: list[Any] = [
    ("CosineSimilarity", lambda of, model: of.CosineSimilarityLoss(model), {"labels": graded}),
    ("Softmax", lambda of, model: of.SoftmaxLoss(model, 16, 3).double(), {"labels": three}),
    pytest.param("Triplet", lambda of, model: of.TripletLoss(model), {"columns": 3}, marks=slow),
    pytest.param(
        "Contrastive",
        lambda of, model: of.ContrastiveLoss(model),
        {"labels": lambda index: index % 2},
        marks=slow,
    ),
]


def trained(
    folder: Path,
    loss: Make,
    data: dict[str, Any],
    *,
    size: int | None,
    dropout: float = 0.0,
    dtype: Any = torch.float64,
    **more: Any,
) -> tuple[Any, Any]:
    """Parameters after three steps, and the mean training loss; `size` of microbatches, None: plain."""
    from hf_models import parameters_of, run_of
    from sentences import encoder, pairs, trainer_of

    model = encoder(folder, dropout=dropout).to(dtype)
    trainer = trainer_of(model, loss(library(), model), pairs(**{"count": 22, **data}), folder, **more)
    if size is not None:
        run_of(adapt(trainer)).microbatch_size = size
    torch.manual_seed(3)
    found = trainer.train()
    return torch.cat([parameters_of(one) for one in (model, trainer.loss)]), found.training_loss


@pytest.mark.filterwarnings("ignore:The .*SymmetricRankingLoss is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("name", "loss", "data"), [*COMPARING, *ALONE])
def test_a_batch_in_microbatches_has_the_loss_of_the_batch(
    name: str, loss: Make, data: dict[str, Any], tmp_path: Path
) -> None:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if name == "CosineSimilarity" and release < (2, 12):
        pytest.skip("mse_loss of torch 2.11 and before has no backward for fp64 outputs and fp32 labels")
    whole, plain = trained(tmp_path, loss, data, size=None)
    found, mean = trained(tmp_path, loss, data, size=5)
    assert mean == pytest.approx(plain, rel=1e-6)
    assert float((found - whole).norm() / whole.norm()) < 1e-10


@pytest.mark.parametrize("name", ["MultipleNegativesRanking", "CachedMultipleNegativesRanking"])
def test_a_batch_in_microbatches_in_float32(name: str, tmp_path: Path) -> None:
    loss, data = next((loss, data) for one, loss, data in COMPARING[:2] if one == name)
    whole, _ = trained(tmp_path, loss, data, size=None, dtype=torch.float32)
    found, _ = trained(tmp_path, loss, data, size=5, dtype=torch.float32)
    assert float((found - whole).norm() / whole.norm()) < 1e-5


def test_accumulated_batches_are_compared_within_themselves(tmp_path: Path) -> None:
    """Four at a time, three times: a plain Trainer compares no sample with one of another four."""
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    whole, plain = trained(tmp_path, in_batch, {"count": 24}, size=None, **given)
    for size in (12, 5):
        found, mean = trained(tmp_path, in_batch, {"count": 24}, size=size, **given)
        assert mean == pytest.approx(plain, rel=1e-6)
        assert float((found - whole).norm() / whole.norm()) < 1e-10


def test_the_size_is_found_and_an_out_of_memory_is_retried(tmp_path: Path, living_bytes: int) -> None:
    def train(budget: int | None) -> Any:
        from sentences import encoder, pairs, trainer_of

        model = encoder(tmp_path, dropout=0.1)
        loss = in_batch(library(), model)
        trainer = trainer_of(model, loss, pairs(64), tmp_path, per_device_train_batch_size=64, max_steps=2)
        adapt(trainer, find=budget is not None)
        if budget is None:
            trainer.train()
            return trainer
        with batchfit.virtual_memory(living_bytes + budget):
            trainer.train()
        return trainer

    trainer = train(2**19)
    assert 1 < trainer.found.batch_size < 64
    first = next(entry for entry in trainer.state.log_history if "microbatch_size" in entry)
    assert first["microbatch_size"] == trainer.found.batch_size
    assert all(torch.isfinite(one).all() for one in trainer.model.parameters())


def test_an_evaluation_in_microbatches_has_the_loss_of_the_batch(tmp_path: Path) -> None:
    from sentences import encoder, pairs, trainer_of

    found = []
    for size in (None, 3):
        model = encoder(tmp_path)
        trainer = trainer_of(
            model,
            in_batch(library(), model),
            pairs(),
            tmp_path,
            eval_dataset=pairs(10),
            per_device_eval_batch_size=10,
        )
        if size is not None:
            adapt(trainer)
            with batchfit.testing.fail_at(30) as seen:
                found.append(trainer.evaluate()["eval_loss"])
            assert seen.fired == 1
        else:
            found.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_a_guide_runs_in_microbatches_too(tmp_path: Path) -> None:
    from sentences import encoder

    def loss(losses: Any, model: Any) -> Any:
        guide = encoder(tmp_path)
        rows: list[int] = seen
        guide.register_forward_pre_hook(lambda _, given: rows.append(len(given[0]["input_ids"])))
        return losses.GISTEmbedLoss(model, guide)

    seen: list[int] = []
    whole, _ = trained(tmp_path, loss, {}, size=None)
    assert max(seen) == 12
    seen.clear()
    found, _ = trained(tmp_path, loss, {}, size=5)
    assert float((found - whole).norm() / whole.norm()) < 1e-10


@slow  # the sparse encoders' losses take the same way
def test_sparse_losses(tmp_path: Path) -> None:
    from sentence_transformers.sparse_encoder import losses as sparse

    def loss(losses: Any, model: Any) -> Any:
        return sparse.SpladeLoss(model, sparse.SparseMultipleNegativesRankingLoss(model), 0.1, 0.1)

    whole, _ = trained(tmp_path, loss, {}, size=None)
    found, _ = trained(tmp_path, loss, {}, size=5)
    assert float((found - whole).norm() / whole.norm()) < 1e-10


def test_a_loss_that_cannot_be_encoded_in_microbatches_says_what_can(tmp_path: Path) -> None:
    from hf_models import run_of
    from sentences import encoder, pairs, trainer_of

    model = encoder(tmp_path)
    loss = library().CachedGISTEmbedLoss(model, encoder(tmp_path), mini_batch_size=4)
    trainer = adapt(trainer_of(model, loss, pairs(), tmp_path, max_steps=1), find=False)
    trainer.train()  # whole
    run_of(trainer).microbatch_size = 5
    with pytest.raises(BatchfitError, match=r"CachedGISTEmbedLoss.* Use GISTEmbedLoss"):
        trainer.train()


def test_a_loss_of_the_users_own_that_compares_is_refused_or_runs_by_its_class(tmp_path: Path) -> None:
    class Mine(torch.nn.Module):
        def __init__(self, losses: Any, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, features: Any, labels: Any = None) -> Any:
            a, b = (self.model(one)["sentence_embedding"] for one in features)
            return torch.nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))

    with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
        trained(tmp_path, Mine, {}, size=5)

    class Ours(library().MultipleNegativesRankingLoss):  # type: ignore[misc]
        pass

    whole, found = (trained(tmp_path, lambda _, model: Ours(model), {}, size=size)[0] for size in (None, 5))
    assert float((found - whole).norm() / whole.norm()) < 1e-10


def test_what_is_done_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="batchfit"):
        trained(tmp_path, in_batch, {"count": 24}, size=5)
    said = [one.getMessage() for one in caplog.records if "compares the samples" in one.getMessage()]
    assert len(said) == 1
