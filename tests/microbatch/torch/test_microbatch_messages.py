"""Microbatcher: what a newcomer gets wrong is said, with what to do about it."""

from __future__ import annotations

import functools
import logging
from copy import copy
from typing import Any

import pytest
import torch
from microbatcher import context_of
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import Microbatcher, MicrobatchEvent
from batchfit._engine.sizing.memory_budget import whole_sentences
from batchfit.errors import NothingFitsError
from batchfit.testing import FakeDevice, faulty


def untouched(*models: nn.Module) -> bool:
    return all(parameter.grad is None for model in models for parameter in model.parameters())


# --- parameters that nobody named


class Pair:
    """A training loop's own object."""

    def __init__(self) -> None:
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(micro)).square().mean()


def test_a_module_that_was_not_passed_is_named_before_anything_ran() -> None:
    body, head, pair = nn.Linear(3, 4), nn.Linear(4, 1), Pair()
    mb = Microbatcher(body, microbatch_size=2)
    with pytest.raises(ValueError, match=r"head\.weight of shape \(1, 4\).*Microbatcher\(\.\.\., head\)"):
        mb.backward(lambda micro: head(body(micro)).mean(), torch.randn(5, 3))
    assert untouched(body, head)
    with pytest.raises(ValueError, match=r"self\.head\.weight of shape \(1, 4\)"):
        Microbatcher(pair.body).backward(pair.loss, torch.randn(5, 3))
    with pytest.raises(ValueError, match=r"linear\.bias of shape \(1,\)"):
        Microbatcher(body).backward(
            functools.partial(lambda net, x: net(body(x)).mean(), head), torch.ones(2, 3)
        )
    hidden = {"deep": {"deeper": head}}
    with pytest.raises(ValueError, match=r"a parameter of shape \(1, 4\).*Pass their modules too"):
        Microbatcher(body).backward(lambda x: hidden["deep"]["deeper"](body(x)).mean(), torch.ones(2, 3))
    assert untouched(body, head, pair.body, pair.head)
    head.requires_grad_(False)
    mb.backward(lambda micro: head(body(micro)).mean(), torch.randn(5, 3))


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("left_out", ["encoder", "scale"])
def test_what_the_cached_loss_leaves_out_is_named_too(left_out: str, size: int) -> None:
    encoder, other = nn.Linear(3, 4), nn.Linear(3, 4)
    scale = nn.Parameter(torch.ones(()))
    models = [other, scale] if left_out == "encoder" else [other, encoder]

    def encode(micro: torch.Tensor) -> torch.Tensor:
        return encoder(micro) + other(micro)

    def compare(reps: torch.Tensor) -> torch.Tensor:
        return (reps @ reps.T * scale).logsumexp(0).mean()

    with pytest.raises(ValueError, match=f"not leave out {left_out}"):
        Microbatcher(*models, microbatch_size=size).backward_cached(encode, compare, torch.randn(5, 3))
    assert untouched(encoder, other)
    assert scale.grad is None


def test_tensors_that_are_no_parameters() -> None:
    model = nn.Linear(3, 1)
    noise = torch.zeros(3, requires_grad=True)
    batch = torch.randn(6, 3, requires_grad=True)

    def penalty(micro: torch.Tensor) -> torch.Tensor:
        inside = micro.detach().clone().requires_grad_()  # made anew in each call: its gradient is dropped
        (slope,) = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
        return model(inside).mean() + slope.square().mean()

    Microbatcher(model, microbatch_size=2).backward(penalty, batch)
    Microbatcher(model, microbatch_size=2).backward(lambda micro: model(micro).mean(), batch)
    assert batch.grad is not None
    with pytest.raises(ValueError, match=r"noise of shape \(3,\)"):
        Microbatcher(model, microbatch_size=2).backward(lambda micro: model(micro + noise).mean(), batch)
    Microbatcher(model, noise).backward(lambda micro: model(micro + noise).mean(), batch)
    assert noise.grad is not None


def test_the_graph_is_walked_once_for_a_function_that_is_made_again() -> None:
    model = nn.Linear(3, 1)
    context = context_of(Microbatcher(model))
    checks = []
    for _ in range(3):
        fn = lambda micro: model(micro).mean()  # noqa: E731
        checks.append(context.graph_check([fn], list(model.parameters()), "backward"))
        if checks[-1] is not None:
            checks[-1]([fn(torch.ones(1, 3))])
    assert checks[0] is not None
    assert checks[1:] == [None, None]
    other = context.graph_check([lambda micro: model(micro).sum()], list(model.parameters()), "backward")
    assert other is not None
    model.bias.requires_grad_(False)
    assert context.graph_check([fn], [model.weight], "backward") is not None


def test_the_same_code_with_another_module_is_inspected_again() -> None:
    def loss_of(net: nn.Module) -> Any:
        return lambda micro: net(micro).mean()

    one, two = nn.Linear(3, 1), nn.Linear(3, 1)
    mb = Microbatcher(one)
    mb.backward(loss_of(one), torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"net\.weight"):
        mb.backward(loss_of(two), torch.ones(2, 3))
    first, second = Pair(), Pair()
    mb = Microbatcher(first.body, first.head)
    mb.backward(first.loss, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"self\.body"):
        mb.backward(second.loss, torch.ones(2, 3))


# --- losses over tokens without a weight


def token_batch(dims: int = 2, ignored: bool = True, on: str = "cpu") -> dict[str, torch.Tensor]:
    labels = torch.randint(0, 5, (6, 4)[:dims])
    if ignored:
        labels[0] = -100
    return {"x": torch.randint(0, 5, (6, 4)[:dims]), "labels": labels.to(on)}


def tokens_warned(
    caplog: pytest.LogCaptureFixture, batches: list[dict[str, Any]], **options: Any
) -> list[str]:
    model = nn.Embedding(5, 5)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(micro["x"]).flatten(0, -2), micro["labels"].flatten())

    mb = Microbatcher(model, **{"microbatch_size": 3, **options})
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for batch in batches:
            mb.backward(fn, batch)
    return [record.getMessage() for record in caplog.records if "mean over tokens" in record.getMessage()]


def test_ignored_labels_without_a_weight_are_reported_once_with_the_line_to_pass(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (said,) = tokens_warned(caplog, [token_batch(), token_batch()])
    assert "labels hold -100" in said
    assert "weight=lambda micro: (micro['labels'][:, 1:] != -100).sum() for a causal model" in said
    (flat,) = tokens_warned(caplog, [token_batch(1)])
    assert "[:, 1:]" not in flat
    (late,) = tokens_warned(caplog, [token_batch(ignored=False)] * 3 + [token_batch()])
    assert late == said


def test_no_weight_is_asked_for_where_samples_count_alike(caplog: pytest.LogCaptureFixture) -> None:
    assert not tokens_warned(caplog, [token_batch()], microbatch_size=6)
    assert not tokens_warned(caplog, [token_batch(ignored=False)])
    assert not tokens_warned(caplog, [token_batch()], weight=lambda micro: (micro["labels"] != -100).sum())
    assert not tokens_warned(caplog, [token_batch()], reduction="sum")


@pytest.mark.parametrize(("dims", "count"), [(1, 0), (2, 1)])
def test_ragged_batches_need_a_weight_unless_there_is_one_label_a_sample(
    caplog: pytest.LogCaptureFixture, dims: int, count: int
) -> None:
    lengths = [4, 1, 2, 4, 1, 3]
    batch = {"x": torch.ones(6, 4).cumsum(1), "labels": torch.ones((6, 4)[:dims])}
    model = nn.Linear(1, 1)
    mb = Microbatcher(model, lengths=lambda batch: lengths, microbatch_size=2)
    with caplog.at_level(logging.WARNING, logger="batchfit"):
        for _ in range(2):
            mb.backward(lambda micro: model(micro["x"].unsqueeze(-1)).mean(), batch)
    assert sum("batches are ragged" in record.getMessage() for record in caplog.records) == count


# --- lists of tensors


def images(count: int, rows: int = 3) -> list[torch.Tensor]:
    return [torch.randn(rows, 4, 4) for _ in range(count)]


@pytest.mark.parametrize(
    "batch",
    [
        images(5),
        images(9, rows=20),
        images(2),
        (images(3), torch.zeros(3)),
        {"images": images(4, rows=4), "labels": torch.zeros(4)},
        (torch.zeros(3, 2), [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(0.0)]),
        [torch.zeros(512) for _ in range(64)],
    ],
)
def test_a_list_that_may_hold_one_tensor_a_sample_is_refused(batch: Any) -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r"can be read in two ways: .* [Pp]ass parts as a dict"):
        Microbatcher(model).backward(lambda micro: model(torch.ones(1, 4)).mean(), batch)


@pytest.mark.parametrize(
    "batch",
    [
        images(2, rows=6),
        tuple(images(5)),
        {"views": images(12, rows=6), "labels": torch.zeros(6)},
        [torch.zeros(6, 2), torch.zeros(6, dtype=torch.long)],
        (torch.zeros(6, 2), [torch.tensor(1.0), torch.tensor(2.0)]),
    ],
)
def test_lists_of_parts_are_cut_by_rows(batch: Any) -> None:
    model = nn.Linear(4, 1)
    found = Microbatcher(model, microbatch_size=3).backward(
        lambda micro: model(torch.ones(1, 4)).mean(), batch
    )
    assert sum(found.microbatch_sizes) == (3 if isinstance(batch, tuple) and len(batch) == 5 else 6)


def test_the_last_batch_of_views_may_have_fewer_rows_than_there_are_views() -> None:
    model = nn.Linear(4, 1)
    mb = Microbatcher(model)
    fn = lambda micro: sum(model(view).mean() for view in micro)  # noqa: E731
    for rows in (8, 1):
        assert mb.backward(fn, images(3, rows=rows)).microbatch_sizes == (rows,)
    with pytest.raises(ValueError, match=r"can be read in two ways: 1 samples, .* or 3 samples"):
        Microbatcher(model).backward(fn, images(3, rows=1))


# --- running out: where, and who holds the memory


def test_a_loss_over_the_whole_batch_that_does_not_fit_is_not_blamed_on_the_encoder() -> None:
    encoder = nn.Linear(4, 4)
    sizes: list[int] = []
    events: list[MicrobatchEvent] = []

    def encode(micro: torch.Tensor) -> torch.Tensor:
        sizes.append(len(micro))
        return encoder(micro)

    def compare(reps: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")

    mb = Microbatcher(encoder, microbatch_size=16, on_event=events.append)
    with pytest.raises(
        NothingFitsError, match=r"a batch of 64 does not fit.*loss_fn is out of memory over the rep"
    ):
        mb.backward_cached(encode, compare, torch.randn(64, 4))
    assert sizes == [16] * 8  # once, and once more with memory freed
    assert [(event.kind, event.size_after) for event in events] == [("retry", 16)]
    assert untouched(encoder)


def test_a_loss_that_fits_the_second_time_or_in_chunks() -> None:
    encoder = nn.Linear(4, 4)
    calls: list[int] = []

    def compare(reps: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        return (reps @ reps.T).logsumexp(0).mean()

    points = torch.randn(8, 4)
    report = Microbatcher(encoder, microbatch_size=4).backward_cached(encoder, compare, points)
    assert (report.microbatch_sizes, report.retries) == ((4, 4), 1)
    calls.clear()  # in one microbatch the encoder's graph is there too: chunks may help
    report = Microbatcher(encoder).backward_cached(encoder, compare, points)
    assert (report.microbatch_sizes, report.retries) == ((4, 4), 1)


@pytest.mark.parametrize("ragged", [False, True])
def test_where_others_hold_the_budget_nothing_is_tried(living_bytes: int, ragged: bool) -> None:
    model = nn.Linear(16, 16)
    others = torch.zeros(256 * 1024)  # 1 MiB
    calls: list[int] = []
    options: dict[str, Any] = {"lengths": lambda batch: [16] * 8} if ragged else {}

    def fn(micro: torch.Tensor) -> torch.Tensor:
        calls.append(len(micro))
        return model(micro).mean()

    mb = Microbatcher(model, budget=living_bytes + 512 * 1024, **options)
    with pytest.raises(NothingFitsError, match=r"Free other tensors.*by the models and 1\.\d+ MiB by oth"):
        mb.backward(fn, torch.randn(8, 16))
    assert calls == []
    del others
    assert mb.backward(fn, torch.randn(8, 16)).retries == 0


def test_one_sample_that_does_not_fit_says_who_holds_the_memory(living_bytes: int) -> None:
    model = nn.Linear(16, 16)
    with batchfit.virtual_memory(living_bytes + 512 * 1024):
        others = torch.zeros(100 * 1024)
        mb = Microbatcher(model)
        with pytest.raises(NothingFitsError) as raised:
            mb.backward(lambda x: model(x).mean() + torch.zeros(100 * 1024).sum(), torch.randn(4, 16))
    said = str(raised.value)
    assert "1.06 KiB by the models" in said  # 16 * 16 + 16 numbers
    assert "by other tensors" in said
    assert "..." not in said
    del others


def test_the_batch_and_the_optimizer_of_the_model_are_holders(living_bytes: int) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    with batchfit.virtual_memory(living_bytes + 1024 * 1024):
        batch = torch.randn(4, 32 * 1024)
        mb = Microbatcher(model)
        with pytest.raises(NothingFitsError) as raised:
            mb.backward(lambda x: model(x[:, :64]).mean() + torch.zeros(1024 * 1024).sum(), batch)
    held = dict(raised.value.holders)
    assert held["the batch"] == batch.nbytes
    state = [one for values in optimizer.state.values() for one in values.values()]
    assert held["state of AdamW"] == sum(one.nbytes for one in state)


def test_a_message_that_was_cut_off_ends_with_a_sentence() -> None:
    assert whole_sentences("one. two; live tensors hold ...") == "one. two"
    assert whole_sentences("one. two; three") == "one. two; three"
    assert whole_sentences("one...") == "one..."


# --- sizes that are lowered before anything runs out


class Numbers:
    """A model on a device where a microbatch takes 100 + 10 bytes a sample and element."""

    def __init__(self, capacity: int) -> None:
        self.device = FakeDevice(capacity)
        self.model = nn.Linear(1, 1)
        self.events: list[MicrobatchEvent] = []
        self.mb = Microbatcher(self.model, device=self.device, on_event=self.events.append)

    def run(self, n: int, length: int = 1) -> Any:
        def fn(micro: torch.Tensor) -> torch.Tensor:
            self.device.use(100 + 10 * micro.numel())
            return self.model(micro.mean(1, keepdim=True)).mean()

        return self.mb.backward(fn, torch.ones(n, length))


def test_a_size_that_is_lowered_before_an_oom_is_an_event(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Numbers(1000)
    assert job.run(64).microbatch_sizes == (64,)
    assert job.events == []
    monkeypatch.setattr(job.device, "held_bytes", lambda: 500)
    with caplog.at_level(logging.INFO, logger="batchfit"):
        report = job.run(64)
        job.run(64)
    assert report.retries == 0
    (event,) = job.events
    assert (event.kind, event.size_before) == ("lowered", 64)
    assert event.size_after >= max(report.microbatch_sizes) > 1
    assert event.why == "less memory is free than when it was learned"
    assert [record.levelname for record in caplog.records if "less memory" in record.getMessage()] == ["INFO"]
    job.run(64, length=8)
    assert job.events[-1].kind == "lowered"
    assert "other shapes" in job.events[-1].why


# --- BatchNorm


def test_batch_norm_on_one_sample_is_explained() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    mb = Microbatcher(model, microbatch_size=1, batch_norm="ignore")
    with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
        mb.backward(lambda micro: model(micro).mean(), torch.randn(4, 3))
    assert any(
        "BatchNorm cannot train on a microbatch of one sample" in note for note in raised.value.__notes__
    )


@pytest.mark.parametrize(("norm", "sizes"), [(True, (8, 7, 2)), (False, (8, 8, 1))])
def test_compiled_microbatches_leave_no_remainder_of_one_for_batch_norm(norm: bool, sizes: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if norm else nn.LayerNorm(4))
    mb = Microbatcher(model, microbatch_size=8, batch_norm="ignore")
    context_of(mb).compiled = True
    assert mb.backward(lambda micro: model(micro).mean(), torch.randn(17, 3)).microbatch_sizes == sizes


# --- words


def test_an_error_before_any_microbatch_is_not_laid_on_the_first() -> None:
    model = nn.Linear(3, 1)
    mb = Microbatcher(model, weight=lambda micro: 1 / 0, microbatch_size=2)
    with pytest.raises(ZeroDivisionError) as raised:
        mb.backward(lambda micro: model(micro).mean(), torch.ones(4, 3))
    assert "before the first microbatch ran" in raised.value.__notes__[-1]
    mb = Microbatcher(model, microbatch_size=1)
    with pytest.raises(ZeroDivisionError) as raised:
        mb.map(lambda micro: 1 / 0, torch.ones(4, 3))
    assert "in microbatch 1, of at most 1 sample" in raised.value.__notes__[-1]
    assert "samples" not in raised.value.__notes__[-1]


def test_swapped_arguments_are_refused_in_a_line() -> None:
    model = nn.Linear(3, 1)
    with pytest.raises(
        TypeError, match=r"fn must be a callable fn\(micro\), not a tensor of shape \(512, 3\)$"
    ):
        Microbatcher(model).backward(torch.ones(512, 3), lambda micro: micro)  # type: ignore[arg-type]
    with pytest.raises(TypeError) as raised:
        Microbatcher(model).backward({"x": torch.ones(512, 3)}, model)  # type: ignore[arg-type]
    assert len(str(raised.value)) < 140


def test_a_report_prints_as_one_line() -> None:
    report = batchfit.StepReport(torch.tensor(2.5), (9, 8, 8), 2, 3 * 2**20)
    assert str(report) == "loss 2.5, microbatches 1 x 9 + 2 x 8, 2 OOM retries, peak 3.00 MiB"
    assert str(batchfit.StepReport(torch.tensor(0.5), (4,), 1)) == "loss 0.5, microbatches 1 x 4, 1 OOM retry"
    assert "skipped" in str(batchfit.StepReport(torch.tensor(0.0), (), skipped=True))
    assert repr(report).startswith("StepReport(loss=tensor(2.5000), microbatch_sizes=(9, 8, 8), retries=2")


# --- evaluation


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_error_inside_map_leaves_random_numbers_and_buffers_as_they_were(error: BaseException) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = [buffer.clone() for buffer in model.buffers()]
    state = torch.get_rng_state()
    mb = Microbatcher(model, microbatch_size=4, batch_norm="ignore")
    with pytest.raises(type(error)):
        mb.map(
            faulty(model, {2: copy(error)}), torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.buffers(), before))
    # and one that runs out in between goes on from where the last microbatch ended
    found = mb.map(
        faulty(model, {2: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")}),
        torch.ones(16, 3),
    )
    assert len(found) == 16
    assert int(model[1].num_batches_tracked) == 6  # 4 + 4, then 2 four times
