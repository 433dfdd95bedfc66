"""The largest `max_tokens` that fits: for few long samples, for many short ones, and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import batchfit
from batchfit import ResizableLoader, TokenBatchSampler

LENGTHS = [4 + number * 37 % 61 for number in range(1500)]  # 4 to 64
DATA = [torch.ones(length) for length in LENGTHS]


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


SEEN: list[tuple[int, ...]] = []  # no part of a model, which a search restores


class Costs(nn.Module):
    """Takes memory by the tokens, by the samples, or by the square of the length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        SEEN.append(tuple(batch.shape))
        rows = batch.sum(1)
        if self.kind == "tokens":
            return (batch[..., None] * self.weight).square().mean()
        if self.kind == "samples":
            return (rows[:, None].repeat(1, 8)[..., None] * self.weight).square().mean()
        return ((batch[:, :, None] * batch[:, None])[..., None] * self.weight[:8]).square().mean()


def workload(kind: str, **settings: Any) -> tuple[batchfit.Workload, ResizableLoader, Costs]:
    sampler = TokenBatchSampler(LENGTHS, 64, **settings)
    loader = ResizableLoader(DATA, batch_sampler=sampler, collate_fn=padded)
    model = Costs(kind)
    optimizer = torch.optim.Adam(model.parameters())
    return batchfit.training(model, optimizer, lambda model, batch: model(batch), loader), loader, model


def train(work: batchfit.Workload, loader: ResizableLoader, budget: int) -> None:
    """An epoch of plain training in that memory, the plan of its batches not counted."""
    assert loader.batch_sampler is not None
    plan = list(loader.batch_sampler)
    with batchfit.virtual_memory(budget):
        for indices in plan:
            batch = padded([DATA[index] for index in indices])
            work.optimizer.zero_grad()
            work.model(batch).backward()
            work.optimizer.step()


@pytest.mark.parametrize("kind", ["tokens", "samples", "squares"])
@pytest.mark.slow
def test_an_epoch_trains_with_what_is_found_and_not_with_much_more(kind: str) -> None:
    SEEN.clear()
    work, loader, _ = workload(kind)
    fit = batchfit.find_batch_size(work, budget="4MiB")
    assert fit.unit == "tokens"
    assert fit.max_tokens == fit.batch_size
    assert fit.sustained
    # Each step ran the batch of the longest samples and the batch of the most.
    at_best = [shape for shape in SEEN if shape[0] * shape[1] <= fit.max_tokens]
    assert max(width for _, width in at_best) == 64
    assert max(rows for rows, width in at_best) == max(
        len(batch)
        for batch in loader.batch_sampler.extremes(fit.max_tokens)  # type: ignore[union-attr]
    )
    # A step has six tensors of its size here: whether one is freed a moment later is a sixth of the memory.
    loader.max_tokens = int(0.8 * fit.max_tokens)
    train(work, loader, fit.budget_bytes)
    loader.max_tokens = int(1.5 * fit.max_tokens)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(work, loader, fit.budget_bytes)


def test_the_answer_says_what_was_run() -> None:
    work, loader, _ = workload("tokens")
    fit = batchfit.find_batch_size(work, budget="4MiB", max_size=640, soak_steps=0)
    assert fit.max_tokens == 640
    assert fit.made_of == "at most 640 tokens: 10 x 64, 91 x 7 (samples x tokens)"
    assert fit.summary.startswith("max_tokens 640 on cpu")
    assert fit.summary.endswith("; batches of at most 640 tokens: 10 x 64, 91 x 7 (samples x tokens)")
    assert batchfit.FitResult.from_json(fit.to_json()) == fit
    sampler = loader.batch_sampler
    assert sampler is not None
    for indices in sampler.extremes(640):
        own = [LENGTHS[index] for index in indices]
        assert max(own) * len(own) <= 640


def test_torchs_loader_packed_batches_and_inference() -> None:
    sampler = TokenBatchSampler(LENGTHS, 64, packed=True, max_rows=40)
    loader: Any = DataLoader(DATA, batch_sampler=sampler, collate_fn=lambda samples: torch.cat(samples)[None])
    SEEN.clear()
    model = Costs("tokens")
    fit = batchfit.find_batch_size(batchfit.inference(model, loader), budget="4MiB", soak_steps=0)
    assert fit.max_tokens is not None
    assert fit.max_tokens >= 40 * 64 - 64
    assert max(width for _, width in SEEN) <= fit.max_tokens
    assert sampler.max_tokens == 64


def test_no_size_is_below_the_longest_sample_or_above_all_of_them() -> None:
    work, _, _ = workload("tokens")
    fit = batchfit.find_batch_size(work, budget="1GiB", soak_steps=0)
    assert fit.max_tokens == 64 * len(LENGTHS)
    assert min(trial.size for trial in fit.trials) >= 64
    with pytest.raises(ValueError, match="max_size must be at least 64, the longest sample, not 50"):
        batchfit.find_batch_size(work, budget="4MiB", max_size=50)
    with pytest.raises(batchfit.errors.NothingFitsError):
        batchfit.find_batch_size(work, budget="40KiB")
    capped, _, _ = workload("tokens", max_rows=8)
    assert batchfit.find_batch_size(capped, budget="1GiB", soak_steps=0).max_tokens == 8 * 64
    short, _, _ = workload("tokens", drop_longer=True)
    assert batchfit.find_batch_size(short, budget="1GiB", max_size=32, soak_steps=0).max_tokens == 32


def test_what_counts_samples_refuses_batches_by_tokens() -> None:
    SEEN.clear()
    work, loader, _ = workload("tokens")
    for verb in (batchfit.predict_batch_size, batchfit.profile_throughput):
        with pytest.raises(TypeError, match=f"by samples for {verb.__name__}, not by tokens"):
            verb(work, budget="1GiB")  # type: ignore[operator]
    with pytest.raises(TypeError, match="must have batches by samples for explain_memory"):
        batchfit.explain_memory(work, batch_size=64)
    generation = batchfit.generation(lambda batch, max_new_tokens: batch, loader, max_new_tokens=2)
    with pytest.raises(TypeError, match="make_batch must be by samples here"):
        batchfit.find_batch_size(generation, budget="4MiB")
    assert not SEEN


def test_an_answer_is_stored_by_the_shapes(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHFIT_STORE", str(tmp_path / "store.sqlite"))
    found = [
        batchfit.find_batch_size(workload("tokens", max_rows=most)[0], budget="4MiB", store=True)
        for most in (None, None, 8)
    ]
    assert [fit.from_store for fit in found] == [False, True, False]
    assert found[0].max_tokens == found[1].max_tokens


# --- the Microbatcher with such batches


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("lengths", [None, "mask"])
def test_microbatches_of_batches_by_tokens_are_learned_in_tokens(lengths: str | None) -> None:
    """Within what fits nothing is cut; four times as much is cut, with few OOMs for hundreds of shapes."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(1, 64), nn.GELU(), nn.Linear(64, 1)).double()

    def with_mask(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": padded(samples).double(), "mask": (padded(samples) > 0).long()}

    def mean(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        out = model(batch["x"][..., None])[..., 0].square() * batch["mask"]
        return out.sum() / batch["mask"].sum()

    budget = 4 * 2**20
    sampler = TokenBatchSampler(LENGTHS, 64)
    loader = ResizableLoader(DATA, batch_sampler=sampler, collate_fn=with_mask)
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    fit = batchfit.find_batch_size(batchfit.training(model, optimizer, mean, loader), budget=budget)
    assert fit.max_tokens is not None
    for factor in (0.8, 4):
        loader.max_tokens = int(factor * fit.max_tokens)
        mb = batchfit.Microbatcher(model, lengths=lengths, weight="mask", budget=budget)
        retries = cut = count = 0
        for batch in loader:
            model.zero_grad()
            mean(model, batch).backward()
            whole = gradients(model)
            model.zero_grad()
            with batchfit.virtual_memory(budget):
                report = mb.backward(lambda micro: mean(model, micro), batch)
            assert (gradients(model) - whole).norm() <= 1e-10 * whole.norm()
            retries += report.retries
            cut += len(report.microbatch_sizes) > 1
            count += 1
        if factor < 1:
            assert retries == 0
            assert lengths or cut == 0  # with `lengths` a batch is trimmed in microbatches of its own
        else:
            assert cut > 0.8 * count
            assert retries <= 4
