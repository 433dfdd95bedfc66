"""Microbatcher: a loss that compares samples is refused before it is cut, and no other loss is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import some_slow
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import Microbatcher, virtual_memory
from batchfit.errors import BatchfitError

Loss = Callable[[nn.Module, Any], torch.Tensor]
SIZES = [1, 2, 3, 5, 8, 13]


def encoder(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))


def batch_of(count: int, classes: int = 4) -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(count, 6),
        "other": torch.randn(count, 6),
        "y": torch.arange(count) % classes,
        "target": torch.randn(count, 5),
        "mask": (torch.rand(count, 5) < 0.6).float().index_fill(1, torch.tensor(0), 1.0),
    }


# --- losses in which samples are compared


def info_nce(model: nn.Module, micro: Any) -> torch.Tensor:
    left, right = (functional.normalize(model(micro[name]), dim=1) for name in ("x", "other"))
    return functional.cross_entropy(left @ right.T * 20, torch.arange(len(left)))


def clip(model: nn.Module, micro: Any) -> torch.Tensor:
    left, right = (functional.normalize(model(micro[name]), dim=1) for name in ("x", "other"))
    scores, wanted = left @ right.T * 14, torch.arange(len(left))
    return (functional.cross_entropy(scores, wanted) + functional.cross_entropy(scores.T, wanted)) / 2


def hard_negatives(model: nn.Module, micro: Any) -> torch.Tensor:
    """One negative of its own for each sample, beside those of all others."""
    left, right, wrong = model(micro["x"]), model(micro["other"]), model(micro["target"] @ torch.ones(5, 6))
    return functional.cross_entropy(left @ torch.cat([right, wrong]).T, torch.arange(len(left)))


def distances(model: nn.Module, micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
    reps = functional.normalize(model(micro["x"]), dim=1)
    same = micro["y"][:, None] == micro["y"][None]
    return (reps[:, None] - reps[None]).square().sum(2).clamp_min(1e-12).sqrt(), same


def batch_hard(model: nn.Module, micro: Any) -> torch.Tensor:
    """As in sentence-transformers: the farthest of one's class, the nearest of another."""
    apart, same = distances(model, micro)
    farthest = (apart * same).amax(1)
    nearest = torch.where(same, apart.amax(1, keepdim=True), apart).amin(1)
    return functional.relu(farthest - nearest + 1.0).mean()


def mined_triplets(model: nn.Module, micro: Any) -> torch.Tensor:
    """All triplets that violate a margin; zero where there is none."""
    apart, same = distances(model, micro)
    positive = same & ~torch.eye(len(same), dtype=torch.bool)
    losses = functional.relu(apart[:, :, None] - apart[:, None, :] + 0.2)
    losses = losses * (positive[:, :, None] & ~same[:, None, :])
    return losses.sum() / (losses > 0).sum().clamp_min(1)


def sup_con(model: nn.Module, micro: Any) -> torch.Tensor:
    reps = functional.normalize(model(micro["x"]), dim=1)
    scores = reps @ reps.T / 0.1
    itself = torch.eye(len(reps), dtype=torch.bool)
    positive = (micro["y"][:, None] == micro["y"][None]) & ~itself
    logged = scores - scores.masked_fill(itself, -1e9).logsumexp(1, keepdim=True)
    return -((logged * positive).sum(1) / positive.sum(1).clamp_min(1)).mean()


def barlow_twins(model: nn.Module, micro: Any) -> torch.Tensor:
    left, right = (model(micro[name]) for name in ("x", "other"))
    left, right = ((one - one.mean(0)) / (one.std(0, correction=0) + 1e-3) for one in (left, right))
    crossed = left.T @ right / len(left)
    return (crossed - torch.eye(5)).square().sum()


def advantages(model: nn.Module, micro: Any) -> torch.Tensor:
    """Policy gradient with rewards that are normalised over the batch."""
    reward = micro["target"][:, 0]
    wanted = (reward - reward.mean()) / (reward.std(correction=0) + 1e-3)
    return -(wanted * functional.log_softmax(model(micro["x"]), 1)[:, 0]).mean()


def partly_compared(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"]) + 0.2 * info_nce(model, micro)


def mean_and_sum(model: nn.Module, micro: Any) -> torch.Tensor:
    """As in many a VAE: no cut of it adds up either."""
    found = model(micro["x"])
    return functional.mse_loss(found, micro["target"]) + 0.1 * found.square().sum()


COMPARED = [
    info_nce,
    clip,
    hard_negatives,
    batch_hard,
    mined_triplets,
    sup_con,
    barlow_twins,
    advantages,
    partly_compared,
    mean_and_sum,
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss", COMPARED)
def test_a_loss_that_compares_samples_is_refused_before_anything_is_cut(loss: Loss, size: int) -> None:
    torch.manual_seed(0)
    model, batch = encoder(), batch_of(26)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.random.get_rng_state()
    mb = Microbatcher(model, microbatch_size=size)
    for _ in range(2):  # and when it comes again
        with pytest.raises(BatchfitError, match=r"neither a mean nor a sum.*Use backward_cached\("):
            mb.backward(lambda micro: loss(model, micro), batch)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(random, torch.random.get_rng_state())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("loss", [info_nce, clip, hard_negatives, sup_con, barlow_twins, partly_compared])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_a_small_batch_is_enough(loss: Loss, count: int) -> None:
    torch.manual_seed(1)
    model = encoder()
    with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
        Microbatcher(model, microbatch_size=1).backward(
            lambda micro: loss(model, micro), batch_of(count, classes=2)
        )


def test_a_batch_that_is_run_whole_is_not_inspected() -> None:
    torch.manual_seed(0)
    model, calls = encoder(), []

    def fn(micro: Any) -> torch.Tensor:
        calls.append(len(micro["x"]))
        return info_nce(model, micro)

    mb = Microbatcher(model)
    mb.backward(fn, batch_of(26))
    assert calls == [26]
    with virtual_memory(400_000), pytest.raises(BatchfitError, match="neither a mean nor a sum"):
        mb.backward(fn, batch_of(2600))  # cut for want of memory


def test_it_can_be_cut_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, calls = encoder(), []

    def fn(micro: Any) -> torch.Tensor:
        calls.append(len(micro["x"]))
        return info_nce(model, micro)

    with caplog.at_level(logging.WARNING, logger="batchfit"):
        mb = Microbatcher(model, microbatch_size=13, compared="warn")
        for _ in range(3):
            mb.backward(fn, batch_of(26))
    assert len(caplog.records) == 1
    assert "26 samples" not in caplog.text
    assert "4 samples give" in caplog.text
    calls.clear()
    Microbatcher(model, microbatch_size=13, compared="ignore").backward(fn, batch_of(26))
    assert calls == [13, 13]


@pytest.mark.parametrize("loss", [info_nce, clip, sup_con, batch_hard])
@pytest.mark.parametrize("noise", ["dropout", "functional", "inputs"])
def test_randomness_hides_no_comparison(loss: Loss, noise: str) -> None:
    """Dropout layers, dropout that eval mode does not reach, and noise that `fn` draws."""
    for seed in range(5):
        torch.manual_seed(seed)
        model = encoder(0.3 if noise == "dropout" else 0.0)

        def run(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            if noise == "inputs":
                x = x + 0.3 * torch.randn_like(x)
            return functional.dropout(model(x), 0.2) if noise == "functional" else model(x)

        with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
            Microbatcher(model, microbatch_size=1).backward(
                lambda micro, run=run: loss(run, micro),  # type: ignore[misc]
                batch_of(26, classes=2),
            )


def test_the_second_function_of_a_microbatcher_is_inspected_too() -> None:
    model, batch = encoder(), batch_of(8)
    mb = Microbatcher(model, microbatch_size=2)

    def train(loss: Loss) -> None:
        mb.backward(lambda micro: loss(model, micro), batch)

    train(cross_entropy)
    with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
        train(info_nce)


def test_a_split_of_the_users_own_is_inspected_in_order() -> None:
    model = encoder()

    def split(batch: Any, sizes: list[int]) -> list[Any]:
        parts = {name: value.split(sizes) for name, value in batch.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(len(sizes))]

    for loss in (info_nce, clip, hard_negatives, barlow_twins):
        mb = Microbatcher(model, microbatch_size=2, split=split)
        with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
            mb.backward(lambda micro, loss=loss: loss(model, micro), batch_of(8))  # type: ignore[misc]
    Microbatcher(model, microbatch_size=2, split=split).backward(
        lambda micro: cross_entropy(model, micro), batch_of(8)
    )


def test_ragged_batches_are_inspected() -> None:
    torch.manual_seed(0)
    model = nn.Linear(1, 4)
    lengths = torch.tensor([7, 2, 5, 8, 1, 3, 8, 4])
    mask = (torch.arange(8) < lengths[:, None]).float()
    batch = {"x": torch.randn(8, 8) * mask, "mask": mask}

    def compares(micro: Any) -> torch.Tensor:
        hidden = model(micro["x"][..., None]) * micro["mask"][..., None]
        reps = functional.normalize(hidden.sum(1), dim=1)
        return functional.cross_entropy(reps @ reps.T * 5, torch.arange(len(reps)))

    with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
        Microbatcher(model, microbatch_size=1, lengths="mask").backward(compares, batch)


def test_out_of_memory_in_the_inspection_means_fewer_samples() -> None:
    torch.manual_seed(0)
    model, seen = encoder(), []

    def fn(micro: Any) -> torch.Tensor:
        seen.append(len(micro["x"]))
        if len(micro["x"]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return info_nce(model, micro)

    with pytest.raises(BatchfitError, match="2 samples give"):
        Microbatcher(model, microbatch_size=1).backward(fn, batch_of(26))
    assert max(seen) == 8


def test_compiled_code_is_inspected_as_it_was_written() -> None:
    torch.manual_seed(0)
    model = encoder()
    compiled: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    wrapped = torch.compile(model, backend=backend, dynamic=False)
    for loss, refused in ((info_nce, True), (cross_entropy, False)):
        torch.compiler.reset()
        compiled.clear()
        mb = Microbatcher(wrapped, microbatch_size=4)
        if refused:
            with pytest.raises(BatchfitError, match="neither a mean nor a sum"):
                mb.backward(lambda micro, loss=loss: loss(wrapped, micro), batch_of(8))  # type: ignore[misc]
            assert not compiled
        else:
            mb.backward(lambda micro, loss=loss: loss(wrapped, micro), batch_of(8))  # type: ignore[misc]
            assert len(compiled) == 1


# --- losses that can be cut


def cross_entropy(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"])


def smoothed(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.cross_entropy(model(micro["x"]), micro["y"], label_smoothing=0.1)


def with_a_penalty(model: nn.Module, micro: Any) -> torch.Tensor:
    return cross_entropy(model, micro) + 0.1 * sum(one.square().sum() for one in model.parameters())


def squares(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.mse_loss(model(micro["x"]), micro["target"])


def absolute(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.smooth_l1_loss(model(micro["x"]), micro["target"])


def binary(model: nn.Module, micro: Any) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(model(micro["x"]), micro["mask"])


def triplets_of_its_own(model: nn.Module, micro: Any) -> torch.Tensor:
    """Anchor, positive and negative are one sample's: nobody is compared with others."""
    return functional.triplet_margin_loss(
        model(micro["x"]), model(micro["other"]), model(micro["target"] @ torch.ones(5, 6))
    )


def preferences(model: nn.Module, micro: Any) -> torch.Tensor:
    """As in DPO."""
    return -functional.logsigmoid(model(micro["x"])[:, 0] - model(micro["other"])[:, 0]).mean()


def policy(model: nn.Module, micro: Any) -> torch.Tensor:
    """Around zero, of both signs."""
    return (micro["target"][:, 0] * functional.log_softmax(model(micro["x"]), 1)[:, 0]).mean()


def ctc(model: nn.Module, micro: Any) -> torch.Tensor:
    steps = torch.stack([model(micro["x"] * scale) for scale in (0.5, 1.0, 2.0, -1.0)])
    lengths = 1 + micro["y"] % 2
    wanted = torch.stack([micro["y"] % 4 + 1, (micro["y"] + 1) % 4 + 1], 1)
    return functional.ctc_loss(steps.log_softmax(2), wanted, torch.full_like(lengths, 4), lengths)


def zero(model: nn.Module, micro: Any) -> torch.Tensor:
    """A margin that all samples keep."""
    return functional.relu(model(micro["x"]).tanh() - 2).mean()


def rounded(model: nn.Module, micro: Any) -> torch.Tensor:
    """Zero, but for what rounding leaves of it."""
    found = model(micro["x"])
    return (found - found.mean(1, keepdim=True)).mean()


def diffusion(model: nn.Module, micro: Any) -> torch.Tensor:
    """Noise that is drawn in `fn`, and much of it."""
    noise, when = torch.randn_like(micro["x"]), torch.rand(len(micro["x"]), 1)
    return functional.mse_loss(model(micro["x"] * (1 - when) + noise * when), 3 * noise[:, :5])


def few_masked(model: nn.Module, micro: Any) -> torch.Tensor:
    """Masked modelling with masks drawn in `fn`: what it divides by is random."""
    found = model(micro["x"])
    mask = (torch.rand_like(found) < 0.3).float()
    return ((found - micro["target"]).square() * mask).sum() / mask.sum().clamp_min(1)


def added(loss: Loss) -> Loss:
    def summed(model: nn.Module, micro: Any) -> torch.Tensor:
        return loss(model, micro) * len(micro["x"])

    return summed


ORDINARY: list[Any] = [
    cross_entropy,
    smoothed,
    with_a_penalty,
    squares,
    absolute,
    binary,
    triplets_of_its_own,
    preferences,
    policy,
    ctc,
    zero,
    rounded,
    diffusion,
    few_masked,
]


# With each loss both kinds of dropout and both reductions; the other pairs belong to `make test-all`.
PAIRS = some_slow(
    [(0.0, "mean"), (0.5, "sum"), (0.5, "mean"), (0.0, "sum")],
    is_slow=lambda pair: pair in [(0.5, "mean"), (0.0, "sum")],
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("loss", ORDINARY)
def test_ordinary_losses_are_cut_without_a_word(
    loss: Loss, pair: tuple[float, Any], caplog: pytest.LogCaptureFixture
) -> None:
    dropout, reduction = pair
    if loss is with_a_penalty and reduction == "sum":
        pytest.skip("a penalty for each microbatch is not a sum over samples")
    wanted = added(loss) if reduction == "sum" else loss
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for seed in range(12):
            torch.manual_seed(seed)
            model = encoder(dropout)
            if seed % 2:
                model.append(nn.BatchNorm1d(5))
            mb = Microbatcher(model, microbatch_size=3 + seed % 6, reduction=reduction, batch_norm="ignore")
            mb.backward(
                lambda micro, model=model: wanted(model, micro),  # type: ignore[misc]
                batch_of(6 + 2 * seed),
            )
    assert not caplog.records


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss", [cross_entropy, squares, binary, preferences])
def test_rounding_is_no_comparison(loss: Loss, low: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for seed in range(20):
            torch.manual_seed(seed)
            model = encoder()

            def fn(micro: Any, model: nn.Module = model) -> torch.Tensor:
                with torch.autocast("cpu", low):
                    return loss(model, micro)

            Microbatcher(model, microbatch_size=3).backward(fn, batch_of(12))
    assert not caplog.records


@pytest.mark.parametrize("ignored", [0, -100])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_mean_over_labels_is_seen_where_all_losses_are_alike(
    ignored: int, weighted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A new language model loses log(vocabulary) for each token: the losses of two sets say nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    lengths = torch.arange(1, 13)
    labels = torch.randint(1, 64, (12, 12)).masked_fill(torch.arange(12) >= lengths[:, None], ignored)
    batch = {"x": torch.randn(12, 12, 4), "y": labels}

    def fn(micro: Any) -> torch.Tensor:
        logits = model(micro["x"]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, micro["y"].flatten(), ignore_index=ignored)

    weight = (lambda micro: (micro["y"] != ignored).sum()) if weighted else None
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        Microbatcher(model, microbatch_size=4, weight=weight).backward(fn, batch)
    found = [one.getMessage() for one in caplog.records]
    if weighted:
        assert found == []
    else:
        (text,) = found
        assert "3 labels count in one half of 4 samples and 23 in the other" in text


def masked_mean(model: nn.Module, micro: Any) -> torch.Tensor:
    """A mean over what counts, as over tokens."""
    found = (model(micro["x"]) - micro["target"]).square() * micro["mask"]
    return found.sum() / micro["mask"].sum()


def class_weights(model: nn.Module, micro: Any) -> torch.Tensor:
    weights = torch.tensor([1.0, 8.0, 0.1, 3.0, 1.0])
    return functional.cross_entropy(model(micro["x"]), micro["y"], weight=weights)


def some_ignored(model: nn.Module, micro: Any) -> torch.Tensor:
    labels = torch.where(micro["mask"] > 0, 3, -100)
    tokens = model(micro["x"])[:, None] * torch.arange(1.0, 6.0)[:, None]
    return functional.cross_entropy(tokens.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("loss", [masked_mean, class_weights, some_ignored])
def test_a_mean_over_something_else_is_a_warning_and_no_refusal(
    loss: Loss, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for seed in range(12):
            torch.manual_seed(seed)
            model = encoder(0.1)
            Microbatcher(model, microbatch_size=3).backward(
                lambda micro, model=model: loss(model, micro),  # type: ignore[misc]
                batch_of(12),
            )
    assert caplog.records
    assert all("Pass weight=, which counts what" in record.getMessage() for record in caplog.records)
    caplog.clear()
    mb = Microbatcher(model, microbatch_size=3, weight="mask")
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        mb.backward(lambda micro: masked_mean(model, micro), batch_of(12))
    assert not caplog.records


def test_models_that_cannot_run_in_eval_mode_are_inspected_in_training_mode() -> None:
    """As torchvision's detection models, which return no losses in eval mode."""

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))

        def forward(self, micro: Any) -> Any:
            found = self.body(micro["x"])
            return {"loss": functional.cross_entropy(found, micro["y"])} if self.training else found

    model = Detector()
    mb = Microbatcher(model, microbatch_size=2, batch_norm="ignore")
    mb.backward(lambda micro: model(micro)["loss"], batch_of(8))
    assert model.body[2].training


def test_the_inspection_leaves_no_trace_and_gradients_are_exact() -> None:
    torch.manual_seed(0)
    model, batch = encoder().double(), batch_of(26)
    batch = {name: one.double() if one.is_floating_point() else one for name, one in batch.items()}
    cross_entropy(model, batch).backward()
    full = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    batchfit.Microbatcher(model, microbatch_size=3).backward(lambda m: cross_entropy(model, m), batch)
    for wanted, parameter in zip(full, model.parameters(), strict=True):
        assert torch.allclose(wanted, parameter.grad, rtol=1e-10, atol=1e-12)  # type: ignore[arg-type]
