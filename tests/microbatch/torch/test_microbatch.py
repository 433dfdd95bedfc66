"""Microbatcher: gradients of the full batch, whatever the split; what is said, refused and learned."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from microbatcher import context_of, skip_loss_check, uniform_sizer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_private import dynamo, forward_hooks

import batchfit
from batchfit import Microbatcher
from batchfit._engine.sizing.pure.sizes import MicrobatchEvent, balanced
from batchfit._engine.torch_private.dynamo import compilations
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.testing import FakeDevice, faulty

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids)))


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, width, 3), nn.GroupNorm(2, width), nn.GELU())
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean(-1))


def gradients(*models: nn.Module) -> torch.Tensor:
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for m in models for p in m.parameters()]
    return torch.cat([part.to_dense().flatten() for part in parts]).clone()


def assert_close(ours: torch.Tensor, full: torch.Tensor) -> None:
    error = (ours - full).norm() / full.norm().clamp(min=1e-30)
    assert error <= TOLERANCE[full.dtype], float(error)


def clear(*models: nn.Module) -> None:
    for model in models:
        model.zero_grad(set_to_none=True)


def rows(dtype: torch.dtype, n: int, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(n, 3, 8, generator=made, dtype=dtype),
        "y": torch.randint(0, 4, (n,), generator=made),
    }


@examples(60)
@given(
    n=st.integers(1, 20),
    size=st.integers(1, 20),
    dtype=st.sampled_from(list(TOLERANCE)),
    reduction=st.sampled_from(["mean", "sum"]),
    before=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_gradients_equal_those_of_the_full_batch(
    n: int, size: int, dtype: torch.dtype, reduction: Any, before: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Conv(4).to(dtype)
    batch = rows(dtype, n, seed)
    seen: list[int] = []

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(len(micro["y"]))
        return functional.cross_entropy(model(micro["x"]), micro["y"], reduction=reduction)

    if before:
        fn(rows(dtype, 3, seed + 1)).backward()
    fn(batch).backward()
    full = gradients(model)
    clear(model)
    if before:
        fn(rows(dtype, 3, seed + 1)).backward()
        held = [p.grad for p in model.parameters()]
    seen.clear()
    mb = Microbatcher(model, microbatch_size=size, reduction=reduction, compared="ignore")
    report = mb.backward(fn, batch)
    assert_close(gradients(model), full)
    if before:  # the very tensors, for others may hold them
        assert all(p.grad is old for p, old in zip(model.parameters(), held, strict=True))
    with torch.no_grad():
        assert torch.allclose(report.loss, fn(batch))
    assert sum(report.microbatch_sizes) == n
    assert max(report.microbatch_sizes) <= size
    assert tuple(seen[: len(report.microbatch_sizes)]) == report.microbatch_sizes
    assert not report.loss.requires_grad


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 7), min_size=1, max_size=12).filter(any),
    size=st.integers(1, 12),
    dtype=st.sampled_from(list(TOLERANCE)),
    by_name=st.booleans(),
)
def test_weights_are_valid_tokens(lengths: list[int], size: int, dtype: torch.dtype, by_name: bool) -> None:
    torch.manual_seed(len(lengths))
    model = Attention(8).to(dtype)
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    ids = torch.randint(0, 11, mask.shape)
    batch = {"ids": ids, "labels": ids.masked_fill(~mask, -100), "mask": mask}

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(micro["ids"])
        return functional.cross_entropy(logits.transpose(1, 2), micro["labels"], ignore_index=-100)

    fn(batch).backward()
    full = gradients(model)
    clear(model)
    weight = "mask" if by_name else lambda micro: (micro["labels"] != -100).sum()
    mb = Microbatcher(model, microbatch_size=size, weight=weight)
    report = mb.backward(fn, batch)
    assert_close(gradients(model), full)
    with torch.no_grad():
        assert torch.allclose(report.loss, fn(batch))


def test_a_batch_without_weight_is_an_error_or_skipped() -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.ones(4, 2), "mask": torch.zeros(4)}
    with pytest.raises(BatchfitError, match="the weight of the batch is zero"):
        Microbatcher(model, weight="mask").backward(lambda micro: model(micro["x"]).sum(), batch)
    model.weight.grad = torch.ones(1, 2)
    events: list[MicrobatchEvent] = []
    mb = Microbatcher(model, weight="mask", on_zero_weight="skip", on_event=events.append)
    report = mb.backward(lambda micro: model(micro["x"]).sum(), batch)
    assert report.skipped
    assert (float(report.loss), report.microbatch_sizes) == (0.0, ())
    assert model.weight.grad.tolist() == [[1, 1]]
    assert [event.kind for event in events] == ["skipped"]
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="weight must be a finite number of at least 0"):
            Microbatcher(model, weight=lambda micro, wrong=wrong: wrong).backward(lambda m: None, batch)
    with pytest.raises(ValueError, match=r"weight must name a part of the batch \(x, mask\), not 'tokens'"):
        Microbatcher(model, weight="tokens").backward(lambda m: None, batch)


def test_microbatches_without_weight_are_left_out_and_the_failing_one_is_named() -> None:
    model = nn.Linear(2, 1)
    batch = {"x": torch.ones(6, 2), "mask": torch.tensor([0, 0, 1, 1, 0, 1])}
    seen: list[int] = []

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.append(int(micro["mask"].sum()))
        if len(seen) == 2:
            raise ValueError("mine")
        return model(micro["x"]).mean()

    with pytest.raises(ValueError, match="mine") as raised:
        Microbatcher(model, microbatch_size=2, weight="mask", compared="ignore").backward(fn, batch)
    assert seen == [2, 1]
    assert raised.value.__notes__ == ["batchfit: raised in microbatch 3, of at most 2 samples"]


def test_a_gan_with_two_models_and_two_optimizers() -> None:
    def run(size: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        maker, judge = (
            nn.Linear(3, 5).double(),
            nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double(),
        )
        make, watch = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), lr=0.1)
        mb = Microbatcher(maker, judge, microbatch_size=size)
        for _ in range(3):
            batch = (torch.randn(10, 3).double(), torch.randn(10, 5).double())
            watch.zero_grad()
            mb.backward(lambda m: judge(maker(m[0]).detach()).mean() - judge(m[1]).mean(), batch)
            watch.step()
            make.zero_grad()
            judge.requires_grad_(False)
            mb.backward(lambda m: -judge(maker(m[0])).mean(), batch)
            judge.requires_grad_(True)
            make.step()
        return [p.detach() for p in (*maker.parameters(), *judge.parameters())]

    for one, two in zip(run(None), run(3), strict=True):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-12)


def test_accumulation_over_batches_with_a_scaler_and_clipping() -> None:
    def run(size: int | None) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = Conv(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        mb = Microbatcher(model, microbatch_size=size)

        def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
            return functional.cross_entropy(model(micro["x"]).float(), micro["y"])

        for step in range(2):
            optimizer.zero_grad()
            for part in range(3):
                mb.backward(fn, rows(torch.float32, 8, 10 * step + part), scaler=scaler)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    for one, two in zip(run(None), run(3), strict=True):
        assert torch.allclose(one, two, rtol=1e-4, atol=1e-6)


def test_autocast_around_the_call_trains_all_weights_in_every_microbatch() -> None:
    torch.manual_seed(0)
    model, other = nn.Linear(6, 6), nn.Linear(6, 2)
    batch = torch.randn(8, 6)
    mb = Microbatcher(model, other, microbatch_size=2)
    for call in (
        lambda: mb.backward(lambda x: other(model(x)).float().square().mean(), batch),
        lambda: mb.backward_cached(model, lambda r: other(r).float().square().mean(), batch),
    ):
        clear(model, other)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            call()
        ours = gradients(model, other)
        clear(model, other)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            other(model(batch)).float().square().mean().backward()
        full = gradients(model, other)
        assert (ours - full).norm() < 0.02 * full.norm()


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Dropout(dropout), nn.Linear(9, 4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.normalize(self.body(x), dim=-1)


def contrast(one: torch.Tensor, two: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(one @ two.T * temperature.exp(), torch.arange(len(one)))


@pytest.mark.parametrize("kind", ["tuple", "dict", "tensor"])
@pytest.mark.parametrize("size", [1, 3, 5, 11])
def test_in_batch_negatives_are_exact(kind: str, size: int) -> None:
    torch.manual_seed(0)
    model, temperature = Encoder(0.0), nn.Parameter(torch.tensor(0.3).double())
    batch = {"a": torch.randn(11, 5).double(), "b": torch.randn(11, 5).double()}

    def encode(micro: Any) -> Any:
        one, two = model(micro["a"]), model(micro["b"])
        if kind == "tensor":
            return torch.stack([one, two], 1)
        return (one, two) if kind == "tuple" else {"one": one, "two": two, "ids": torch.arange(len(one))}

    def loss_fn(reps: Any) -> torch.Tensor:
        if kind == "tensor":
            return contrast(reps[:, 0], reps[:, 1], temperature)
        one, two = reps if kind == "tuple" else (reps["one"], reps["two"])
        return contrast(one, two, temperature)

    loss_fn(encode(batch)).backward()
    full, full_temperature = gradients(model), temperature.grad
    clear(model)
    temperature.grad = None
    mb = Microbatcher(model, temperature, microbatch_size=size)
    report = mb.backward_cached(encode, loss_fn, batch)
    assert_close(gradients(model), full)
    assert full_temperature is not None
    assert torch.allclose(temperature.grad, full_temperature, rtol=1e-10)
    with torch.no_grad():
        assert torch.allclose(report.loss, loss_fn(encode(batch)), rtol=1e-12)


def test_cached_representations_use_the_same_dropout_twice() -> None:
    torch.manual_seed(0)
    model, temperature = Encoder(0.5), torch.tensor(0.3).double()
    batch = torch.randn(6, 5).double()
    kept: list[torch.Tensor] = []

    def encode(micro: torch.Tensor) -> torch.Tensor:
        kept.append(model(micro))
        return kept[-1]

    mb = Microbatcher(model, microbatch_size=2)
    mb.backward_cached(encode, lambda reps: contrast(reps, reps.roll(1, 0), temperature), batch)
    after = torch.get_rng_state()
    assert len(kept) == 6
    assert all(torch.equal(one, two) for one, two in zip(kept[:3], kept[3:], strict=True))
    torch.manual_seed(0)
    Encoder(0.5)
    torch.randn(6, 5).double()
    for start in (0, 2, 4):
        model(batch[start : start + 2])
    assert torch.equal(after, torch.get_rng_state())  # as after one forward


def test_cached_errors_of_the_user() -> None:
    model = Encoder(0.0)
    batch = torch.randn(4, 5).double()
    mb = Microbatcher(model, microbatch_size=2)
    with pytest.raises(ValueError, match="encode's output must have one row per sample"):
        mb.backward_cached(lambda x: model(x).sum(), lambda reps: reps.sum(), batch)
    with pytest.raises(ValueError, match="loss_fn must return a scalar loss"):
        mb.backward_cached(model, lambda reps: reps, batch)
    for size in (2, 4):  # in chunks as in one microbatch
        with pytest.raises(ValueError, match=r"must return .* require.* grad, .*not .* without"):
            Microbatcher(model, microbatch_size=size).backward_cached(
                lambda x: model(x).detach(), lambda reps: reps.square().sum(), batch
            )
    head = nn.Linear(4, 1).double()  # a frozen encoder under a head that is trained
    frozen = Microbatcher(head, microbatch_size=2)
    frozen.backward_cached(lambda x: model(x).detach(), lambda reps: head(reps).sum(), batch)
    assert head.weight.grad is not None
    rows_seen = iter([2, 2, 1])
    with pytest.raises(ValueError, match="the same rows when it is called twice"):
        mb.backward_cached(lambda x: model(x)[: next(rows_seen)], lambda reps: reps.sum(), batch)


def test_what_the_batch_itself_gets_in_gradients() -> None:
    model = nn.Linear(3, 1).double()
    batch = torch.randn(5, 3, dtype=torch.double, requires_grad=True)
    model(batch).mean().backward()
    full = batch.grad
    batch.grad = None
    Microbatcher(model, microbatch_size=2).backward(lambda x: model(x).mean(), batch)
    assert torch.allclose(batch.grad, full)
    with pytest.raises(ValueError, match="batch must not carry a graph, and batch requires grad"):
        Microbatcher(model).backward(lambda x: model(x).mean(), batch * 2)


def test_a_batch_that_only_the_user_can_cut() -> None:
    class Graphs:
        def __init__(self, graphs: list[torch.Tensor]) -> None:
            self.graphs = graphs

        def __len__(self) -> int:
            return len(self.graphs)

    def split(batch: Graphs, sizes: list[int]) -> list[Graphs]:
        graphs = iter(batch.graphs)
        return [Graphs([next(graphs) for _ in range(size)]) for size in sizes]

    model = nn.Linear(2, 1).double()
    batch = Graphs([torch.full((n, 2), float(n)).double() for n in (1, 2, 3, 4, 5)])

    def fn(micro: Graphs) -> torch.Tensor:
        return torch.stack([model(graph).sum() for graph in micro.graphs]).mean()

    fn(batch).backward()
    full = gradients(model)
    clear(model)
    mb = Microbatcher(model, split=split)
    report = mb.backward(faulty(fn, {0: "oom"}), batch)
    assert (report.microbatch_sizes, report.retries) == ((3, 2), 1)
    assert_close(gradients(model), full)
    sizes = mb.map(faulty(lambda micro: [len(graph) for graph in micro.graphs], {0: "oom", 2: "oom"}), batch)
    assert sizes == [1, 2, 3, 4, 5]


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("kind", ["tuple", "named", "dataclass", "encoding", "samples"])
def test_batches_of_any_structure(kind: str) -> None:
    torch.manual_seed(0)
    model = Conv(4).double()
    plain = rows(torch.float64, 11, 0)
    x, y = plain["x"], plain["y"]
    batch: Any = {
        "tuple": lambda: (x, y),
        "named": lambda: Pair(x, y),
        "dataclass": lambda: Record(x, y),
        "encoding": lambda: pytest.importorskip("transformers").BatchEncoding(plain),
        "samples": lambda: [{"x": x[i], "y": y[i]} for i in range(11)],
    }[kind]()

    def parts(micro: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if kind == "samples":
            return torch.stack([one["x"] for one in micro]), torch.stack([one["y"] for one in micro])
        if kind == "dataclass":
            return micro.x, micro.y
        return (micro[0], micro[1]) if kind in ("tuple", "named") else (micro["x"], micro["y"])

    def fn(micro: Any) -> torch.Tensor:
        assert type(micro) is type(batch)
        inputs, labels = parts(micro)
        return functional.cross_entropy(model(inputs), labels)

    fn(batch).backward()
    full = gradients(model)
    clear(model)
    mb = Microbatcher(model, microbatch_size=4)
    assert mb.backward(fn, batch).microbatch_sizes == (4, 4, 3)
    assert_close(gradients(model), full)


# --- map


def test_map_and_backward_take_turns_with_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    mb = Microbatcher(model, microbatch_size=8, batch_norm="ignore", compared="ignore")
    batch = torch.randn(16, 3)
    for _ in range(2):
        mb.map(faulty(model, {1: "oom"}), batch)
        mb.backward(faulty(lambda x: model(x).mean(), {1: "oom"}), batch)
    assert model[1].num_batches_tracked == (1 + 2) + 4 + (1 + 6) + 8


def test_map_joins_outputs_in_order() -> None:
    model = nn.Linear(3, 2)
    batch = {"x": torch.randn(7, 3), "name": [f"n{i}" for i in range(7)], "scale": 2.0}

    def fn(micro: Any) -> Any:
        assert torch.is_inference_mode_enabled()
        return {"y": model(micro["x"]) * micro["scale"], "name": micro["name"], "fixed": "abc"}

    out = Microbatcher(model, microbatch_size=3).map(fn, batch)
    with torch.no_grad():
        assert torch.allclose(out["y"], model(batch["x"]) * 2.0)
    assert out["name"] == batch["name"]
    assert out["fixed"] == "abc"


@pytest.mark.parametrize("fault", range(6))
def test_map_repeats_only_what_was_not_done(fault: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    batch = torch.arange(24.0).view(8, 3)
    done: list[int] = []

    def fn(micro: torch.Tensor) -> torch.Tensor:
        return model(micro)

    calls = faulty(fn, {fault: "oom"}, after=True)

    def counted(micro: torch.Tensor) -> torch.Tensor:
        out = calls(micro)
        done.extend(int(row[0]) // 3 for row in micro)
        return out

    events: list[MicrobatchEvent] = []
    mb = Microbatcher(model, microbatch_size=2, on_event=events.append)
    torch.manual_seed(5)
    out = mb.map(counted, batch)
    assert done == list(range(8))
    assert out.shape == (8, 3)
    fired = calls.calls > fault
    assert [event.kind for event in events] == (["shrunk"] if fired else [])
    # the failed microbatch drew its random numbers again
    torch.manual_seed(5)
    sizes = [2] * min(fault, 4) + ([1] * (8 - 2 * fault) if fault < 4 else [])
    with torch.no_grad():
        again = torch.cat([model(part) for part in batch.split(sizes)])
    assert torch.equal(out, again)


def test_map_learns_its_own_sizes() -> None:
    device = FakeDevice(1000)
    model = nn.Linear(1, 1)

    def fn(cost: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(micro: torch.Tensor) -> torch.Tensor:
            device.use(cost * len(micro))
            return model(micro).mean() if cost > 50 else model(micro)

        return run

    mb = Microbatcher(model, device=device)
    batch = torch.ones(16, 1)
    assert max(mb.backward(fn(200), batch).microbatch_sizes) == 4
    used: list[int] = []

    def evaluate(micro: torch.Tensor) -> torch.Tensor:
        used.append(len(micro))
        return fn(50)(micro)

    mb.map(evaluate, batch)
    assert used == [16]


# --- what is said and what is refused


@pytest.mark.parametrize(
    ("returns", "says", "warned"),
    [("sum", "mean", True), ("mean", "sum", True), ("sum", "sum", False), ("mean", "mean", False)],
)
@pytest.mark.parametrize("size", [1, 3, 6, 9])
def test_the_reduction_is_checked_once(
    returns: Any, says: Any, warned: bool, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.01), nn.Linear(4, 2))
    batch = (torch.randn(18, 3), torch.randint(0, 2, (18,)))
    calls: list[int] = []

    def fn(micro: Any) -> torch.Tensor:
        calls.append(len(micro[0]))
        return functional.cross_entropy(model(micro[0]), micro[1], reduction=returns)

    mb = Microbatcher(model, microbatch_size=size, reduction=says)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for _ in range(2):
            mb.backward(fn, batch)
    sizes = list(balanced(18, size))
    inspected = [4, 4, 2, 2, 8, 6, 1, 1, 1, 1]  # before the first batch that is cut, and not again
    assert calls == [*inspected, *sizes, *sizes]
    told = [f"Pass reduction={returns!r}" in record.message for record in caplog.records]
    assert told == [True] * warned


def test_dropout_is_not_taken_for_another_reduction(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for seed in range(40):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 1))
            Microbatcher(model, microbatch_size=4).backward(
                lambda micro, model=model: functional.mse_loss(model(micro[0]), micro[1]),  # type: ignore[misc]
                (torch.randn(8, 8), torch.randn(8, 1)),
            )
    assert not caplog.records


def test_a_check_of_the_reduction_leaves_no_trace() -> None:
    def run(checked: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
        mb = Microbatcher(model, microbatch_size=4, batch_norm="ignore")
        if not checked:
            skip_loss_check(mb)
        mb.backward(lambda x: model(x).square().mean(), torch.randn(12, 3))
        return gradients(model).tolist(), [b.tolist() for b in model.buffers()], torch.rand(1).item()

    assert run(True) == run(False)


def test_batch_norm_is_reported_once_refused_or_ignored(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batch = torch.randn(12, 3)

    def fn(micro: torch.Tensor) -> torch.Tensor:
        return model(micro).square().mean()

    mb = Microbatcher(model, microbatch_size=8)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        mb.backward(fn, batch[:8])  # not split
        assert not caplog.records
        mb.backward(fn, batch)
        mb.backward(fn, batch)
    assert len(caplog.records) == 1
    assert "1 BatchNorm layer sees microbatches of 6 instead of the batch of 12" in caplog.text
    caplog.clear()
    with pytest.raises(BatchfitError, match="which changes the result"):
        Microbatcher(model, microbatch_size=8, batch_norm="error").backward(fn, batch)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        Microbatcher(model, microbatch_size=8, batch_norm="ignore").backward(fn, batch)
        Microbatcher(model.eval(), microbatch_size=8).backward(fn, batch)
    assert not caplog.records


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("call", ["backward", "cached", "twice", "checkpoint"])
def test_exact_running_statistics(momentum: float | None, call: str) -> None:
    def run(size: int | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(3, momentum=momentum).double()
        model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 2).double())
        mb = Microbatcher(model, microbatch_size=size, batch_norm="exact")
        for _ in range(3):
            batch = torch.randn(10, 3, 2, 2).double() * 3 + 1
            if call == "cached":
                mb.backward_cached(model, lambda reps: (reps @ reps.T).mean(), batch)
            elif call == "twice":
                mb.backward(lambda x: model(x).mean() + model(x * 2).mean(), batch)
            elif call == "checkpoint":
                # repeated beyond the norm, so that its hooks run again
                mb.backward(lambda x: checkpoint(model, x, use_reentrant=False).square().mean(), batch)
            else:
                mb.backward(lambda x: model(x).square().mean(), batch)
        assert norm.momentum == momentum
        assert not forward_hooks(norm)
        return [buffer.double() for buffer in norm.buffers()]

    found = run(3)
    if call == "checkpoint":  # unsplit, torch itself moves the statistics twice a batch
        call = "backward"
    for one, two in zip(run(None), found, strict=True):
        assert torch.allclose(one, two, rtol=1e-10)


def test_a_wrapped_model_of_one_rank_is_as_the_bare_one() -> None:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        as_the_bare_one()
        refused_as_wrapped()
    finally:
        distributed.destroy_process_group()


def as_the_bare_one() -> None:
    bare = nn.Linear(2, 1)
    wrapped = nn.parallel.DistributedDataParallel(copy.deepcopy(bare))
    batch = torch.randn(5, 2)
    for model in (bare, wrapped):
        mb = Microbatcher(model, microbatch_size=2)
        for _ in range(2):
            mb.backward(lambda x: model(x).square().mean(), batch)  # noqa: B023
        mb.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.equal(bare.weight, wrapped.module.weight)
    with pytest.raises(BatchfitError, match="2 of the parameters that get gradients are in no Distributed"):
        Microbatcher(wrapped, bare).backward(lambda x: (wrapped(x) + bare(x)).mean(), batch)
    with pytest.raises(BatchfitError, match="Pass the wrapped model"):
        Microbatcher(wrapped.module).backward(lambda x: wrapped(x).mean(), batch)
    other = nn.parallel.DistributedDataParallel(nn.Linear(2, 1).requires_grad_())
    with pytest.raises(BatchfitError, match="that Microbatcher was not given"):
        Microbatcher(wrapped).backward(lambda x: (wrapped(x) + other(x)).mean(), batch)
    with pytest.raises(ValueError, match="sync must be one of 'safe', 'overlap', not 'fast'"):
        Microbatcher(wrapped, sync="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_s must be positive, not 0"):
        Microbatcher(wrapped, timeout_s=0)


def refused_as_wrapped() -> None:
    with pytest.raises(BatchfitError, match="static_graph=True"):
        Microbatcher(nn.parallel.DistributedDataParallel(nn.Linear(2, 1), static_graph=True))
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    mb = Microbatcher(model)
    batch = torch.randn(5, 2)
    with model.join(), pytest.raises(BatchfitError, match=r"ddp.join\(\) puts collectives into forward"):
        mb.backward(lambda x: model(x).mean(), batch)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(BatchfitError, match="a communication hook is registered"):
        mb.backward(lambda x: model(x).mean(), batch)


def test_models_that_talk_to_other_ranks_are_refused() -> None:
    with pytest.raises(BatchfitError, match="SyncBatchNorm has collectives"):
        Microbatcher(nn.Sequential(nn.SyncBatchNorm(3)))
    with pytest.raises(TypeError, match="at least one module, not none"):
        Microbatcher()
    with pytest.raises(TypeError, match="models must be modules or parameters, not 'model'"):
        Microbatcher("model")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"weight": 3}, TypeError, "weight must be"),
        ({"split": 3}, TypeError, "split must be a callable or None, not 3"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be a positive integer or None, not 0"),
        ({"microbatch_size": True}, TypeError, "microbatch_size must be"),
        ({"budget": "much"}, ValueError, "budget must be"),
        ({"reduction": "max"}, ValueError, "reduction must be one of 'mean', 'sum', not 'max'"),
        ({"on_zero_weight": "x"}, ValueError, "on_zero_weight must be"),
        ({"advice": "x"}, TypeError, "advice must be a mapping or None, not 'x'"),
        ({"advice": {"maen": "x"}}, ValueError, "advice must hold texts for compared, mean, sum, not 'maen'"),
        ({"advice": {"mean": 3}}, ValueError, "advice must hold texts for .* not 'mean': 3"),
        ({"batch_norm": "x"}, ValueError, "batch_norm must be"),
        ({"reduction": "sum", "weight": "mask"}, ValueError, "weight must be None where reduction is 'sum'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Microbatcher(nn.Linear(1, 1), **options)


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (lambda x: 3.0, TypeError, "fn must return the loss as a tensor, not float"),
        (lambda x: x, ValueError, "fn must return a scalar loss, not a tensor of shape"),
        (lambda x: x.mean(), ValueError, "fn must return a loss that requires grad"),
        (3, TypeError, r"fn must be a callable fn\(micro\), not 3"),
    ],
)
def test_wrong_functions(fn: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Microbatcher(nn.Linear(1, 1)).backward(fn, torch.ones(4, 1))


@pytest.mark.parametrize(
    ("weight", "error", "match"),
    [
        (lambda micro: "many", TypeError, "weight must be a number, not 'many'"),
        (lambda micro: None, TypeError, "weight must be a number, not None"),
        (lambda micro: micro["x"], ValueError, r"weight must be one number, not a tensor of shape \(2, 1\)"),
        (lambda micro: -1, ValueError, "weight must be a finite number of at least 0, not -1.0"),
        ("mask", ValueError, r"weight must name a part of the batch \(x\), not 'mask'"),
    ],
)
def test_wrong_weights(weight: Any, error: type[Exception], match: str) -> None:
    model = nn.Linear(1, 1)
    mb = Microbatcher(model, weight=weight, microbatch_size=2)
    with pytest.raises(error, match=match):
        mb.backward(lambda micro: model(micro["x"]).mean(), {"x": torch.ones(4, 1)})


def test_a_wrong_scaler_is_refused_before_anything_runs() -> None:
    ran: list[Any] = []
    with pytest.raises(TypeError, match=r"scaler must be a torch.amp.GradScaler or None, not True"):
        Microbatcher(nn.Linear(1, 1)).backward(ran.append, torch.ones(4, 1), scaler=True)
    assert not ran


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Microbatcher(nn.Linear(1, 1)).backward(lambda x: x.sum(), torch.ones(0, 1))


def test_a_hook_that_may_step_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1)
    model.weight.register_post_accumulate_grad_hook(lambda p: None)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for _ in range(2):
            Microbatcher(model).backward(lambda x: model(x).mean(), torch.ones(4, 2))
    assert [record.message[:46] for record in caplog.records[:1]] == [
        "a parameter has a post-accumulate-grad hook, w"
    ]


# --- errors of the user's own leave everything as it was


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), RuntimeError("an error of mine")])
def test_an_error_comes_out_and_leaves_everything_as_it_was(error: BaseException) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model(torch.randn(4, 3)).sum().backward()
    held = [p.grad for p in model.parameters()]
    before = ([h.clone() for h in held], [b.clone() for b in model.buffers()])
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    fn = faulty(lambda x: model(x).mean() * random.random() * np.random.rand(), {2: copy.copy(error)})
    mb = Microbatcher(model, microbatch_size=2, batch_norm="ignore", compared="ignore")
    with pytest.raises(type(error)) as raised:
        mb.backward(fn, torch.ones(8, 3))
    if isinstance(error, Exception):
        assert "microbatch 3, of at most 2 samples" in raised.value.__notes__[-1]
    assert all(p.grad is old for p, old in zip(model.parameters(), held, strict=True))
    assert all(map(torch.equal, held, before[0]))
    assert all(map(torch.equal, model.buffers(), before[1]))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


# --- learning, on a device of numbers


class Job:
    """A model on a device where a microbatch takes 100 + 10 bytes a sample and element."""

    def __init__(self, capacity: int, **options: Any) -> None:
        self.device = FakeDevice(capacity, reserves=options.pop("reserves", False))
        self.model = nn.Linear(1, 1)
        self.events: list[MicrobatchEvent] = []
        self.mb = Microbatcher(self.model, device=self.device, on_event=self.events.append, **options)
        skip_loss_check(self.mb)

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        self.device.use(100 + 10 * micro.numel())
        return self.model(micro.mean(1, keepdim=True)).mean()

    def run(self, n: int, length: int = 1) -> Any:
        return self.mb.backward(self.loss, torch.ones(n, length))


def test_sizes_are_learned_after_one_oom() -> None:
    job = Job(1000)
    first = job.run(256)
    assert (first.retries, first.microbatch_sizes) == (2, (64,) * 4)
    assert first.peak_bytes == 740
    later = [job.run(256) for _ in range(5)]
    assert [report.retries for report in later] == [0] * 5
    assert max(later[-1].microbatch_sizes) == 64  # 4 microbatches; 86 would leave no margin
    assert later[-1].peak_bytes == 740
    small = job.run(9)
    assert small.microbatch_sizes == (9,)
    longer = job.run(64, length=4)
    assert (longer.retries, max(longer.microbatch_sizes)) == (0, 16)
    assert [event.kind for event in job.events] == ["shrunk", "shrunk", "lowered"]
    assert job.events[0].size_before == 256


def test_at_one_sample_nothing_fits() -> None:
    job = Job(105)
    with pytest.raises(
        NothingFitsError, match=r"a batch of 1 does not fit on fake:0 .*one sample of a batch of 4"
    ) as raised:
        job.run(4)
    assert raised.value.size == 1
    assert "float32(" not in str(raised.value)  # what sizes are kept under is nobody's business
    assert all(p.grad is None for p in job.model.parameters())


def test_an_ambiguous_error_counts_only_if_a_smaller_size_runs() -> None:
    text = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"
    model = nn.Linear(1, 1)

    def fn(largest: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(micro: torch.Tensor) -> torch.Tensor:
            if len(micro) > largest:
                raise RuntimeError(text)
            return model(micro).mean()

        return run

    mb = Microbatcher(model)
    assert mb.backward(fn(3), torch.ones(8, 1)).microbatch_sizes == (2,) * 4
    other = Microbatcher(model)
    with pytest.raises(RuntimeError, match=text):
        other.backward(fn(0), torch.ones(8, 1))
    assert len(uniform_sizer(other).learned) == 0


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."),
    ],
)
def test_fatal_errors_and_host_memory_do_not_shrink(error: Exception) -> None:
    model = nn.Linear(1, 1)
    mb = Microbatcher(model, device=FakeDevice(1000))
    calls = faulty(lambda x: model(x).mean(), {0: copy.copy(error)})
    with pytest.raises(type(error)):
        mb.backward(calls, torch.ones(8, 1))
    assert calls.calls == 1


def test_allocation_retries_lower_the_size_of_the_next_batch() -> None:
    job = Job(1000, reserves=True)
    job.device.cached, job.device.settles_after = 0.5, None
    reports = [job.run(64) for _ in range(4)]  # 740 live, 370 cached: over 1000 every time
    assert [report.microbatch_sizes for report in reports[:2]] == [(64,), (64,)]
    assert max(reports[2].microbatch_sizes) == 32
    assert [report.retries for report in reports] == [0] * 4
    assert "allocations were retried" in job.events[0].why


def test_running_out_is_no_thrashing() -> None:
    job = Job(1000)
    fails = job.device.use

    def counted(count_bytes: int) -> None:
        job.device._retries += count_bytes > 1000  # a real allocator gives its cache back first
        fails(count_bytes)

    job.device.use = counted  # type: ignore[method-assign]
    job.run(256)
    job.run(256)
    (bounds,) = uniform_sizer(job.mb).learned._bounds.values()
    assert job.device.alloc_retries() == 2
    assert bounds.thrash == 0


def test_fragmented_memory_is_tried_once_more_at_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchfit._engine.device.oom._is_fragmented", lambda device: True)
    for faults, sizes, kinds in (({0}, (8,), ["retry"]), ({0, 1}, (4, 4), ["retry", "shrunk"])):
        job = Job(1000)
        report = job.mb.backward(faulty(job.loss, dict.fromkeys(faults, "oom")), torch.ones(8, 1))
        assert (report.microbatch_sizes, report.retries) == (sizes, len(faults))
        assert [event.kind for event in job.events] == kinds


def test_a_budget_is_kept_while_sizes_are_new() -> None:
    job = Job(10**6, budget=1000)
    report = job.run(128)
    assert report.microbatch_sizes == (64, 64)
    assert job.device.budget_bytes() == 10**6
    with pytest.raises(ValueError, match="budget must not exceed"):
        Job(1000, budget=2000)


def test_a_budget_on_a_cpu_is_virtual_memory(living_bytes: int) -> None:
    model = nn.Linear(32, 256)
    batch = torch.randn(128, 32)
    mb = Microbatcher(model, budget=living_bytes + 32 * 1024 + 128 * 1024 + 64 * 1024)
    for _ in range(2):
        clear(model)
        report = mb.backward(lambda x: model(x).square().mean(), batch)
        assert len(report.microbatch_sizes) > 1


def test_what_was_learned_survives_a_checkpoint_on_the_same_device_only() -> None:
    job = Job(1000)
    job.run(256)
    state = job.mb.state_dict()
    twin = Job(1000)
    twin.mb.load_state_dict(state)
    assert twin.run(256).retries == 0
    other = Job(2000)
    other.mb.load_state_dict(state)
    assert [event.kind for event in other.events] == ["relearned"]
    assert "total_bytes was 1000 and is 2000" in other.events[0].why
    assert other.run(128).microbatch_sizes == (128,)
    whole = twin.mb.state_dict()
    damaged: list[Any] = [{}, {**whole, "learned": None}, {**whole, "learned": {"shapes": [{}]}}]
    damaged += [{**whole, "learned": {"shapes": []}, "ragged": {"x": {}}}, {**whole, "ragged": None}]
    for state in damaged:
        with pytest.raises(ValueError, match="state must be what state_dict"):
            twin.mb.load_state_dict(state)
        assert twin.mb.state_dict() == whole  # nothing of it was taken over


def test_compiled_models_get_few_sizes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(1000)
    context_of(job.mb).compiled = True
    assert job.run(100).microbatch_sizes == (32, 32, 32, 4)
    sizes = {size for n in (100, 100, 96, 256) for size in job.run(n).microbatch_sizes}
    assert sizes <= {4, 32, 64, 36, 100}
    monkeypatch.setattr("batchfit._engine.sizing.uniform.recompile_limit", lambda: 4)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        job.run(99)
        assert "gives up" not in caplog.text  # sizes of one program that takes any number
        uniform_sizer(job.mb)._compiled_before = compilations() - 5
        job.run(99)
    assert "torch compile 5 times, and it gives up at 4" in caplog.text


@pytest.mark.slow
def test_a_compiled_model_is_exact_and_compiled_few_times() -> None:
    dynamo.reset()
    model = Conv(4).double()
    batch = rows(torch.float64, 20, 0)
    counts: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(1)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend)
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    full = gradients(model)
    clear(model)
    mb = Microbatcher(compiled, microbatch_size=8, compared="ignore")
    fn = faulty(lambda m: functional.cross_entropy(compiled(m["x"]), m["y"]), {1: "oom"})
    assert mb.backward(fn, batch).microbatch_sizes == (4,) * 5
    assert_close(gradients(model), full)
    for n in (20, 17, 19):
        mb.backward(fn, rows(torch.float64, n, 1))
    assert sum(counts) <= 4  # 8, then any number, and 1, which torch always compiles by itself
    dynamo.reset()


def test_a_compiled_function_is_reported() -> None:
    from batchfit._engine.torch_private.dynamo import is_compiled

    model = nn.Linear(1, 1)
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="eager"))
    assert is_compiled(torch.compile(lambda x: x, backend="eager"))


# --- real memory


@pytest.mark.parametrize("cap", range(20))
def test_twenty_caps(cap: int, living_bytes: int) -> None:
    torch.manual_seed(cap)
    model = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.3), nn.Tanh(), nn.Linear(64, 4))
    batch = {"x": torch.randn(257, 16), "y": torch.randint(0, 4, (257,))}
    optimizer = torch.optim.AdamW(model.parameters())
    mb = Microbatcher(model)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(micro["x"]), micro["y"])

    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *batch.values()))
    room = 4 * held + (4 + 14 * cap) * 1024
    with batchfit.virtual_memory(living_bytes + held + room) as memory:
        for _ in range(4):
            optimizer.zero_grad()
            before = memory.allocated_bytes
            report = mb.backward(fn, batch)
            assert sum(report.microbatch_sizes) == 257
            # what stays behind: the gradients and the loss
            grads = sum(-(-p.grad.untyped_storage().nbytes() // 512) * 512 for p in model.parameters())
            report_bytes = 512
            assert memory.allocated_bytes <= before + grads + report_bytes
            optimizer.step()
        last = report.microbatch_sizes
    # as an uncapped run in the same microbatches
    state = torch.get_rng_state()
    clear(model)
    again = Microbatcher(model, microbatch_size=max(last))
    assert again.backward(fn, batch).microbatch_sizes == last
    ours = gradients(model)
    clear(model)
    torch.set_rng_state(state)
    for part in zip(batch["x"].split(last), batch["y"].split(last), strict=True):
        (fn(dict(zip("xy", part, strict=True))) * (len(part[0]) / 257)).backward()
    assert_close(ours, gradients(model))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(ids)))


def test_random_shapes_under_a_cap_follow_the_uncapped_run(living_bytes: int) -> None:
    def run(cap_bytes: int) -> tuple[list[float], int, int]:
        model = Tagger()
        optimizer = torch.optim.AdamW(model.parameters())
        mb = Microbatcher(model)
        draw = random.Random(0)
        losses, retried = [], 0

        def fn(ids: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

        with batchfit.virtual_memory(living_bytes + cap_bytes) as memory:
            for step in range(50):
                n, length = draw.randint(4, 32), draw.choice([8, 16, 24, 32, 48])
                batch = torch.randint(0, 50, (n, length), generator=torch.Generator().manual_seed(step))
                optimizer.zero_grad()
                report = mb.backward(fn, batch)
                optimizer.step()
                assert sum(report.microbatch_sizes) == n
                losses.append(float(report.loss))
                retried += report.retries > 0
            return losses, retried, memory.peak_bytes - living_bytes

    free, none, needed = run(2**30)
    assert none == 0
    for share in (0.6, 0.3):
        tight, retried, used = run(int(share * needed))
        assert used <= share * needed
        assert 1 <= retried <= 4  # of 50: what one shape taught, the others were spared
        assert all(abs(one - two) < 1e-5 * one for one, two in zip(free, tight, strict=True))
