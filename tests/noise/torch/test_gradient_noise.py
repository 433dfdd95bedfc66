"""GradientNoise against gradients made sample by sample: by hand, with Microbatcher, under faults."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from microbatcher import skip_loss_check
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import GradientNoise, Microbatcher
from batchfit._noise import gradient_norms
from batchfit._noise.pure.estimate import NoiseObservation, observe
from batchfit.testing import count_operations, fail_at

Batch = dict[str, torch.Tensor]


class World:
    """A small model in fp64, batches for it, and what the noise of a batch is by its per-sample gradients."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
        self.dtype = dtype

    def batch(self, count: int, seed: int = 1) -> Batch:
        made = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 4, generator=made, dtype=torch.float64).to(self.dtype)
        return {"x": x, "y": torch.randint(0, 3, (count,), generator=made)}

    def loss(self, micro: Batch) -> torch.Tensor:
        return functional.cross_entropy(self.model(micro["x"]), micro["y"])

    def per_sample(self, batch: Batch) -> torch.Tensor:
        rows = []
        for at in range(len(batch["x"])):
            loss = self.loss({name: part[at : at + 1] for name, part in batch.items()})
            gradients = torch.autograd.grad(loss, list(self.model.parameters()))
            rows.append(torch.cat([gradient.flatten() for gradient in gradients]).double())
        return torch.stack(rows)

    def expected(self, batch: Batch, sizes: Sequence[int], *, only_first: bool) -> NoiseObservation:
        rows = self.per_sample(batch)
        norms = [float(part.mean(0).square().sum()) for part in rows.split(list(sizes))]
        return observe(sizes, norms[:1] if only_first else norms, float(rows.mean(0).square().sum()))

    def by_hand(self, noise: GradientNoise, batch: Batch, sizes: Sequence[int], **more: Any) -> None:
        self.model.zero_grad()
        start = 0
        for size in sizes:
            micro = {name: part[start : start + size] for name, part in batch.items()}
            (self.loss(micro) * size / len(batch["x"])).backward()
            noise.microbatch(size)
            start += size
        noise.total(**more)


def reported(noise: GradientNoise) -> tuple[float, float, int]:
    state = noise.state_dict()
    return state["noise"], state["signal"], state["steps"]


def close(seen: NoiseObservation, rel: float = 1e-9) -> Any:
    return pytest.approx((seen.noise, seen.signal), rel=rel)


# ---- by hand


@examples(25)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=6),
    mode=st.sampled_from(["cheap", "exact"]),
    seed=st.integers(0, 99),
)
def test_a_step_by_hand_is_what_per_sample_gradients_say(sizes: list[int], mode: Any, seed: int) -> None:
    world, noise = World(seed), None
    batch = world.batch(sum(sizes), seed)
    noise = GradientNoise(world.model, mode=mode)
    for _ in range(2):  # the copies of the first step must not be in the way of the second
        world.by_hand(noise, batch, sizes)
    expected = world.expected(batch, sizes, only_first=mode == "cheap")
    assert reported(noise)[:2] == close(expected, rel=1e-7)
    assert reported(noise)[2] == 2


def test_the_norm_of_clipping_saves_making_it_again() -> None:
    world = World()
    batch, noise = world.batch(8), GradientNoise(world.model)
    world.model.zero_grad()
    for start in (0, 4):
        (world.loss({k: v[start : start + 4] for k, v in batch.items()}) / 2).backward()
        noise.microbatch(4)
    norm = nn.utils.clip_grad_norm_(world.model.parameters(), 1e-3)  # clipped hard: .grad is of no use now
    noise.total(norm=norm)
    assert reported(noise)[:2] == close(world.expected(batch, [4, 4], only_first=True), rel=1e-6)


def test_shares_are_for_losses_that_are_not_weighted_by_samples() -> None:
    """A plain sum of two means: the noise scale does not care about the factor, the averages do."""
    world = World()
    batch, noise = world.batch(9), GradientNoise(world.model)
    for rows in (slice(0, 3), slice(3, 9)):
        world.loss({name: part[rows] for name, part in batch.items()}).backward()
        noise.microbatch(rows.stop - rows.start, share=1.0)
    noise.total()
    rows = world.per_sample(batch)
    first, second = rows[:3].mean(0), rows[3:].mean(0)
    mean = float(((first + second) / 2).square().sum())
    expected = observe([3, 6], [float(first.square().sum())], mean, weights=[1.0, 1.0])
    assert reported(noise)[:2] == close(expected)


def test_a_scaler_changes_nothing_even_when_its_scale_moves() -> None:
    world = World(dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(world.model.parameters(), lr=0.0)
    batch, noise = world.batch(8), GradientNoise(world.model, mode="exact")
    for _ in range(3):
        optimizer.zero_grad()
        for start in (0, 4):
            micro = {name: part[start : start + 4] for name, part in batch.items()}
            scaler.scale(world.loss(micro) / 2).backward()
            noise.microbatch(4, scaler=scaler)
        scaler.unscale_(optimizer)
        noise.total()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() > 1024.0
    assert reported(noise)[:2] == close(world.expected(batch, [4, 4], only_first=False), rel=1e-4)


def test_gradients_that_are_not_finite_are_skipped() -> None:
    world = World()
    noise = GradientNoise(world.model)
    world.by_hand(noise, world.batch(8), [4, 4])
    before = reported(noise)
    broken = world.batch(8)
    broken["x"][0, 0] = float("inf")
    world.by_hand(noise, broken, [4, 4])
    assert reported(noise) == before
    assert noise.reading().skipped == 1


def test_one_microbatch_is_no_estimate_and_says_what_to_do() -> None:
    world = World()
    noise = GradientNoise(world.model)
    world.by_hand(noise, world.batch(8), [8])
    assert noise.reading().scale is None
    assert "microbatch_size" in noise.reading().reason


def test_a_microbatch_with_nearly_all_the_weight_is_no_part_to_compare() -> None:
    world = World()
    noise = GradientNoise(world.model)
    batch = world.batch(17)
    for rows, share in ((slice(0, 16), 0.1), (slice(16, 17), 0.9)):
        (world.loss({k: v[rows] for k, v in batch.items()}) * share).backward()
        noise.microbatch(rows.stop - rows.start, share=share)
    noise.total()
    assert noise.state_dict()["single"] == 1


def test_a_step_that_is_discarded_leaves_nothing() -> None:
    world = World()
    noise = GradientNoise(world.model, mode="exact")
    world.loss(world.batch(4)).backward()
    noise.microbatch(4)
    noise.discard()
    world.by_hand(noise, world.batch(8), [4, 4])
    assert reported(noise)[:2] == close(world.expected(world.batch(8), [4, 4], only_first=False))


@pytest.mark.parametrize("mode", ["cheap", "exact"])
def test_parameters_that_get_no_gradient_or_get_it_late(mode: Any) -> None:
    used, late, never = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(3))
    noise = GradientNoise(used, late, never, mode=mode)
    for _ in range(2):
        for one in (used, late):
            one.grad = None
        (used * torch.tensor([1.0, 0.0, 0.0])).sum().div(2).backward()
        noise.microbatch(1)
        ((used * torch.tensor([0.0, 2.0, 0.0])).sum() + late.sum()).div(2).backward()
        noise.microbatch(1)
        noise.total()
    # gradients: (1, 0, 0 | 0) and (0, 2, 0 | 1, 1, 1); their mean has a squared norm of 8 / 4
    assert reported(noise)[:2] == close(observe([1, 1], [1.0] if mode == "cheap" else [1.0, 7.0], 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_gradients_are_summed_in_fp32(dtype: torch.dtype) -> None:
    tensors = [torch.full((1000,), 1.0078125, dtype=dtype), torch.full((7,), 3.0, dtype=dtype)]
    norm = gradient_norms.squared_norm(tensors, torch.device("cpu"))
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(1000 * 1.0078125**2 + 63, rel=1e-5)


def test_sparse_and_mixed_gradients() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    bias = nn.Parameter(torch.ones(4, dtype=torch.float64))
    (table(torch.tensor([1, 1, 3])).double() * bias).sum().backward()
    expected = float(table.weight.grad.to_dense().square().sum()) + float(bias.grad.square().sum())
    found = gradient_norms.gradients_of([table.weight, bias])
    assert float(gradient_norms.squared_norm(found, torch.device("cpu"))) == pytest.approx(expected)
    noise = GradientNoise(table, mode="exact")
    with pytest.raises(TypeError, match="gradients must be dense with mode='exact'"):
        noise.microbatch(1)


# ---- with Microbatcher


def run_mb(world: World, noise: GradientNoise, batch: Batch, size: int, **options: Any) -> Microbatcher:
    mb = Microbatcher(world.model, microbatch_size=size, noise=noise, **options)
    world.model.zero_grad()
    mb.backward(world.loss, batch)
    return mb


@pytest.mark.parametrize("mode", ["cheap", "exact"])
@pytest.mark.parametrize(("count", "size"), [(8, 4), (17, 5), (9, 2)])
def test_with_microbatcher_nothing_else_is_to_be_written(mode: Any, count: int, size: int) -> None:
    world = World()
    batch, noise = world.batch(count), GradientNoise(world.model, mode=mode)
    mb = Microbatcher(world.model, microbatch_size=size, noise=noise)
    optimizer = torch.optim.SGD(world.model.parameters(), lr=0.0)
    for _ in range(3):
        optimizer.zero_grad()
        report = mb.backward(world.loss, batch)
        mb.step(optimizer, clip_norm=1e-4)
    expected = world.expected(batch, report.microbatch_sizes, only_first=mode == "cheap")
    assert reported(noise)[:2] == close(expected)
    assert reported(noise)[2] == 3


def test_gradients_are_the_same_with_and_without() -> None:
    world, other = World(), World()
    run_mb(world, GradientNoise(world.model, mode="exact"), world.batch(8), 3)
    Microbatcher(other.model, microbatch_size=3).backward(other.loss, other.batch(8))
    for one, two in zip(world.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("mode", ["cheap", "exact"])
def test_accumulated_calls_and_old_gradients_are_each_seen_alone(mode: Any) -> None:
    world = World()
    batch, noise = world.batch(8), GradientNoise(world.model, mode=mode)
    mb = Microbatcher(world.model, microbatch_size=4, noise=noise)
    world.loss(world.batch(5, seed=9)).backward()  # of someone else
    for _ in range(2):
        mb.backward(world.loss, batch)
    assert reported(noise)[:2] == close(world.expected(batch, [4, 4], only_first=mode == "cheap"))
    assert reported(noise)[2] == 2


def test_a_sum_is_seen_as_the_mean_that_it_is_made_of() -> None:
    world = World()
    batch, noise = world.batch(7), GradientNoise(world.model, mode="exact")
    mb = Microbatcher(world.model, microbatch_size=4, reduction="sum", noise=noise)
    mb.backward(lambda micro: world.loss(micro) * len(micro["y"]), batch)
    assert reported(noise)[:2] == close(world.expected(batch, [4, 3], only_first=False))


def test_a_scaler_and_weights_of_tokens() -> None:
    world = World(dtype=torch.float32)
    batch, noise = world.batch(8), GradientNoise(world.model)
    batch["y"][:3] = -100
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    mb = Microbatcher(
        world.model, microbatch_size=4, weight=lambda micro: (micro["y"] != -100).sum(), noise=noise
    )
    mb.backward(world.loss, batch, scaler=scaler)
    rows = world.per_sample({name: part[3:] for name, part in batch.items()})
    first = float(rows[:1].mean(0).square().sum())
    expected = observe([4, 4], [first], float(rows.mean(0).square().sum()), weights=[1.0, 4.0])
    assert reported(noise)[:2] == close(expected, rel=1e-4)


def test_a_microbatch_without_weight_is_left_out() -> None:
    world = World()
    batch, noise = world.batch(9), GradientNoise(world.model, mode="exact")
    batch["y"][:3] = -100
    mb = Microbatcher(
        world.model, microbatch_size=3, weight=lambda micro: (micro["y"] != -100).sum(), noise=noise
    )
    mb.backward(world.loss, batch)
    rest = {name: part[3:] for name, part in batch.items()}
    assert reported(noise)[:2] == close(world.expected(rest, [3, 3], only_first=False))


@pytest.mark.parametrize("mode", ["cheap", "exact"])
def test_a_fault_anywhere_leaves_only_the_try_that_stayed(mode: Any) -> None:
    world = World()
    batch = world.batch(8)
    with count_operations() as seen:
        run_mb(world, GradientNoise(world.model, mode=mode), batch, 4)
    retried = 0
    for number in range(1, seen.operations + 1, 2):
        noise = GradientNoise(world.model, mode=mode)
        mb = Microbatcher(world.model, microbatch_size=4, noise=noise)
        world.model.zero_grad()
        skip_loss_check(mb)
        with fail_at(number):
            try:
                report = mb.backward(world.loss, batch)
            except (torch.OutOfMemoryError, batchfit.errors.BatchfitError):
                assert noise.state_dict()["steps"] == 0
                continue
        expected = world.expected(batch, report.microbatch_sizes, only_first=mode == "cheap")
        assert reported(noise)[:2] == close(expected)
        assert reported(noise)[2] == 1
        retried += report.retries
    assert retried > 5


def test_ragged_batches_are_measured_as_they_are_cut_and_the_order_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(20, 3).double()
    lengths = [8, 2, 5, 3, 8, 1]
    mask = torch.tensor([[1] * length + [0] * (8 - length) for length in lengths])
    ids = torch.randint(1, 20, (6, 8)) * mask
    batch = {"ids": ids, "mask": mask}

    def loss(micro: Batch) -> torch.Tensor:
        values = model(micro["ids"]).square().sum(-1) * micro["mask"]
        return values.sum() / micro["mask"].sum()

    micros: list[Batch] = []

    def fn(micro: Batch) -> torch.Tensor:
        micros.append(micro)
        return loss(micro)

    noise = GradientNoise(model, mode="exact")
    mb = Microbatcher(model, lengths="mask", weight="mask", microbatch_size=3, noise=noise)
    skip_loss_check(mb)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for _ in range(2):
            micros.clear()
            model.zero_grad()
            mb.backward(fn, batch)
    assert caplog.text.count("microbatches are sorted by length") == 1
    assert len(micros) > 1
    norms = [float(torch.autograd.grad(loss(micro), model.weight)[0].square().sum()) for micro in micros]
    weights = [float(micro["mask"].sum()) for micro in micros]
    assert len(set(weights)) > 1
    whole = float(model.weight.grad.square().sum())
    expected = observe([len(micro["ids"]) for micro in micros], norms, whole, weights=weights)
    assert reported(noise)[:2] == close(expected)


def test_one_microbatch_with_microbatcher() -> None:
    world = World()
    noise = GradientNoise(world.model)
    run_mb(world, noise, world.batch(8), 8)
    assert noise.state_dict()["single"] == 1
    assert noise.state_dict()["steps"] == 0


def test_an_error_of_the_users_leaves_nothing() -> None:
    world = World()
    noise = GradientNoise(world.model)
    calls = []

    def loss(micro: Batch) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("mine")
        return world.loss(micro)

    mb = Microbatcher(world.model, microbatch_size=4, noise=noise, compared="ignore")
    with pytest.raises(KeyError):
        mb.backward(loss, world.batch(8))
    assert noise.state_dict()["steps"] == 0
    mb.backward(world.loss, world.batch(8))
    assert reported(noise)[:2] == close(world.expected(world.batch(8), [4, 4], only_first=True))


# ---- the whole of it


def test_a_planted_noise_scale_is_found_in_training() -> None:
    """Gradients are the samples themselves: mean (1, 0, ...), variance 1 in 40 dimensions: a scale of 40."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(40))
    noise = GradientNoise(weight, mode="exact")
    mb = Microbatcher(weight, microbatch_size=8, noise=noise)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    mean = torch.zeros(40)
    mean[0] = 1.0
    for _ in range(80):
        optimizer.zero_grad()
        mb.backward(lambda micro: (micro @ weight).mean(), torch.randn(32, 40) + mean)
        mb.step(optimizer, clip_norm=0.1)
    reading = noise.reading()
    assert reading.scale == pytest.approx(40, rel=0.1)
    assert reading.low is not None
    assert reading.low < 40 < (reading.high or 0)
    assert reading.samples == 80 * 32


def test_the_state_survives_a_checkpoint() -> None:
    world, kept = World(), {}
    noise = GradientNoise(world.model, decay_samples=300)
    for seed in range(30):
        world.by_hand(noise, world.batch(12, seed), [4, 8])
        if seed == 9:
            kept = json.loads(json.dumps(noise.state_dict()))
    again = GradientNoise(world.model)
    again.load_state_dict(kept)
    for seed in range(10, 30):
        world.by_hand(again, world.batch(12, seed), [4, 8])
    assert again.reading() == noise.reading()
    with pytest.raises(ValueError, match="steps must be a number, not 'x'"):
        again.load_state_dict({**kept, "steps": "x"})
    assert again.reading() == noise.reading()


def test_nothing_is_read_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No `.item()` and no `.tolist()` in the step that made the numbers."""
    world = World()
    noise = GradientNoise(world.model)
    reads: list[str] = []
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)

        def spy(
            self: torch.Tensor, *args: Any, _original: Callable[..., Any] = original, _name: str = name
        ) -> Any:
            reads.append(_name)
            return _original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, spy)
    world.by_hand(noise, world.batch(8), [4, 4])
    assert reads == []
    world.by_hand(noise, world.batch(8), [4, 4])
    assert reads == ["tolist"]  # the numbers of the step before; on a GPU when they have arrived
    noise.reading()
    assert reads == ["tolist", "tolist"]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m: GradientNoise(), TypeError, "models must be at least one"),
        (lambda m: GradientNoise("x"), TypeError, "models must be modules or parameters, not 'x'"),  # type: ignore[arg-type]
        (lambda m: GradientNoise(m, mode="fast"), ValueError, "mode must be 'cheap' or 'exact', not 'fast'"),  # type: ignore[arg-type]
        (lambda m: GradientNoise(m, min_steps=1), ValueError, "min_steps must be an integer of at least 2"),
        (lambda m: GradientNoise(m, decay_samples=0), ValueError, "decay_samples must be a number above 0"),
        (lambda m: GradientNoise(m, decay_samples="1"), TypeError, "decay_samples must be a number, not '1'"),  # type: ignore[arg-type]
        (lambda m: GradientNoise(m).microbatch(0), ValueError, "samples must be an integer of at least 1"),
        (lambda m: GradientNoise(m).microbatch(4, share=0.0), ValueError, "share must be a number above 0"),
        (lambda m: GradientNoise(m).total(), RuntimeError, "call that after each backward"),
        (lambda m: GradientNoise(m).watch_ranks(m), TypeError, "model must be a DistributedDataParallel"),
        (lambda m: Microbatcher(m, noise=3), TypeError, "noise must be a GradientNoise, not 3"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments(make: Callable[[nn.Module], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make(nn.Linear(2, 2))


def test_shares_for_some_microbatches_only_are_refused() -> None:
    noise = GradientNoise(nn.Linear(2, 2))
    noise.microbatch(4, share=0.5)
    with pytest.raises(ValueError, match="share must be given for all microbatches of a step or for none"):
        noise.microbatch(4)


def test_sharded_gradients_are_refused_with_the_reason() -> None:
    class DTensor(torch.Tensor):
        pass

    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.zeros(2).as_subclass(DTensor)
    with pytest.raises(TypeError, match="no rank the norm of its own batch's"):
        GradientNoise(parameter).microbatch(1)
