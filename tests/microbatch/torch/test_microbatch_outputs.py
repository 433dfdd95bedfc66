"""Microbatcher: outputs beside the loss, and microbatches whose loss has no graph."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from batchfit import Microbatcher, StepReport
from batchfit.errors import NothingFitsError
from batchfit.testing import faulty


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])  # type: ignore[union-attr]


# --- outputs


@examples(60)
@given(
    n=st.integers(1, 17), size=st.integers(1, 17), fail=st.sets(st.integers(0, 6)), seed=st.integers(0, 99)
)
def test_outputs_come_once_for_each_sample_in_order(n: int, size: int, fail: set[int], seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Linear(3, 4).double()
    batch = {"x": torch.randn(n, 3).double(), "y": torch.randint(0, 4, (n,)), "at": torch.arange(n)}

    def fn(micro: Any) -> Any:
        logits = model(micro["x"])
        found = {"logits": logits, "at": micro["at"], "right": (logits.argmax(1) == micro["y"]).tolist()}
        return functional.cross_entropy(logits, micro["y"]), found

    whole = fn(batch)
    whole[0].backward()
    full = gradient(model)
    model.zero_grad()
    faults: Any = dict.fromkeys(fail, "oom")
    mb = Microbatcher(model, microbatch_size=size, compared="ignore")
    try:
        report = mb.backward(faulty(fn, faults), batch)
    except NothingFitsError:  # one sample failed too
        return
    assert torch.allclose(gradient(model), full, atol=1e-12)
    assert report.outputs["at"].tolist() == list(range(n))
    assert report.outputs["right"] == whole[1]["right"]
    assert torch.allclose(report.outputs["logits"], whole[1]["logits"], atol=1e-12)
    assert not report.outputs["logits"].requires_grad


def test_outputs_are_not_counted_twice_by_the_inspection_of_the_loss_or_by_retries() -> None:
    model = nn.Linear(3, 4)
    batch = (torch.randn(64, 3), torch.arange(64))

    def fn(micro: Any) -> Any:
        return model(micro[0]).square().mean(), micro[1]

    mb = Microbatcher(model)
    for _ in range(2):
        report = mb.backward(faulty(fn, {0: "oom", 12: "oom"}), batch)
        assert report.outputs.tolist() == list(range(64))
    assert mb.backward(lambda micro: fn(micro)[0], batch).outputs is None


def test_outputs_of_ragged_batches_come_in_the_batchs_order() -> None:
    model = nn.Linear(1, 1)
    mask = (torch.arange(8) < torch.tensor([7, 2, 5, 8, 1, 3, 8, 4])[:, None]).float()
    batch = {"x": torch.randn(8, 8) * mask, "mask": mask, "at": torch.arange(8)}
    mb = Microbatcher(model, microbatch_size=2, lengths="mask", weight="mask")

    def fn(micro: Any) -> Any:
        found = model(micro["x"][..., None])[..., 0] * micro["mask"]
        return found.sum() / micro["mask"].sum(), {"at": micro["at"], "tokens": found}

    report = mb.backward(fn, batch)
    assert report.outputs["at"].tolist() == list(range(8))
    assert report.outputs["tokens"].shape == (8, 8)
    assert torch.allclose(report.outputs["tokens"], fn(batch)[1]["tokens"])


def test_microbatches_without_weight_have_outputs_too() -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.randn(6, 2), "mask": torch.tensor([0, 0, 1, 1, 0, 0])}

    def fn(micro: Any) -> Any:
        found = model(micro["x"])[:, 0]
        return (found * micro["mask"]).sum() / micro["mask"].sum(), found

    report = Microbatcher(model, microbatch_size=2, weight="mask").backward(fn, batch)
    assert torch.allclose(report.outputs, model(batch["x"])[:, 0])
    assert torch.isfinite(report.loss)
    assert torch.isfinite(gradient(model)).all()


def test_outputs_that_cannot_be_joined_leave_everything_as_it_was() -> None:
    model = nn.Linear(2, 1)
    for outputs in (
        lambda micro: torch.tensor(len(micro)),
        lambda micro: len(micro) if micro[0, 0] else None,
    ):
        batch = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
        mb = Microbatcher(model, microbatch_size=2)
        with pytest.raises((TypeError, ValueError), match="fn"):
            mb.backward(lambda micro, outputs=outputs: (model(micro).mean(), outputs(micro)), batch)  # type: ignore[misc]
        assert model.weight.grad is None


def test_the_loss_of_a_cached_batch_has_outputs() -> None:
    model = nn.Linear(3, 4)

    def loss_fn(reps: torch.Tensor) -> Any:
        scores = reps @ reps.T
        return functional.cross_entropy(scores, torch.arange(len(reps))), scores

    report = Microbatcher(model, microbatch_size=3).backward_cached(model, loss_fn, torch.randn(7, 3))
    assert report.outputs.shape == (7, 7)
    assert not report.outputs.requires_grad


def test_a_report_with_outputs_can_be_pickled() -> None:
    model = nn.Linear(3, 4)
    mb = Microbatcher(model, microbatch_size=2)
    report = mb.backward(lambda micro: (model(micro).mean(), model(micro)), torch.randn(4, 3))
    copied = pickle.loads(pickle.dumps(report))
    assert isinstance(copied, StepReport)
    assert torch.equal(copied.outputs, report.outputs)


# --- losses without a graph


def masked(model: nn.Module, micro: Any) -> torch.Tensor:
    """Nothing is run where no row counts, as many a loss over masks does."""
    rows = micro["x"][micro["mask"]]
    return model(rows).square().sum() if len(rows) else torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("mask", [[1, 1, 0, 0, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_microbatch_whose_rows_are_all_masked_counts_as_zero(mask: list[int], size: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    batch = {"x": torch.randn(5, 3).double(), "mask": torch.tensor(mask).bool()}
    masked(model, batch).backward()
    full = gradient(model)
    model.zero_grad()
    report = Microbatcher(model, microbatch_size=size, reduction="sum").backward(
        lambda micro: masked(model, micro), batch
    )
    assert torch.allclose(gradient(model), full, atol=1e-12)
    assert torch.allclose(report.loss, masked(model, batch))


def test_a_parameter_that_was_left_out_is_named_by_the_first_loss_with_a_graph() -> None:
    model, other = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
    batch = {"x": torch.randn(4, 3).double(), "mask": torch.tensor([0, 0, 1, 1]).bool()}
    with pytest.raises(ValueError, match=r"other\.weight"):
        Microbatcher(model, microbatch_size=2, reduction="sum").backward(
            lambda micro: masked(lambda x: model(x) + other(x), micro),  # type: ignore[arg-type]
            batch,
        )
    assert other.weight.grad is None


@pytest.mark.parametrize("size", [1, 4])
def test_a_batch_without_any_graph_is_refused(size: int) -> None:
    model = nn.Linear(3, 1).double()
    batch = {"x": torch.randn(4, 3).double(), "mask": torch.zeros(4).bool()}
    with pytest.raises(ValueError, match="a loss that requires grad, not one without"):
        Microbatcher(model, microbatch_size=size).backward(lambda micro: masked(model, micro), batch)
    with pytest.raises(
        ValueError, match=r"encode must return tensors that require grad|a loss that requires grad"
    ):
        Microbatcher(model, microbatch_size=size).backward_cached(
            lambda micro: model(micro["x"]).detach(), lambda reps: reps.sum(), batch
        )


def test_a_chunk_without_a_graph_adds_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    batch = {"x": torch.randn(6, 3).double(), "mask": torch.tensor([0, 0, 1, 1, 1, 0]).bool()}

    def encode(micro: Any) -> torch.Tensor:
        if not micro["mask"].any():
            return torch.zeros(len(micro["x"]), 2).double()
        return model(micro["x"]) * micro["mask"][:, None]

    def loss_fn(reps: torch.Tensor) -> torch.Tensor:
        return (reps @ reps.T).logsumexp(1).mean()

    loss_fn(encode(batch)).backward()
    full = gradient(model)
    model.zero_grad()
    Microbatcher(model, microbatch_size=2).backward_cached(encode, loss_fn, batch)
    assert torch.allclose(gradient(model), full, atol=1e-12)
