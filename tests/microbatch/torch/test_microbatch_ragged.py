"""Ragged batches: packed and trimmed, with the gradients of the padded batch, whatever the plan."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from microbatcher import known_of, limit_microbatch, ragged_sizer, skip_loss_check
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import Microbatcher
from batchfit._engine.sizing import ragged
from batchfit._engine.sizing.pure.sizes import MicrobatchEvent
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.testing import FakeDevice, count_operations, fail_at, faulty, simulated_oom

WORDS = 23


class Reader(nn.Module):
    """Attention that looks at no padding, with positions counted from each sample's first token."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(8, WORDS)

    def forward(self, micro: dict[str, Any]) -> torch.Tensor:
        mask = micro["attention_mask"]
        place = mask.cumsum(1).to(self.head.weight.dtype).unsqueeze(-1)
        hidden = self.embed(micro["input_ids"]) + place / 10
        seen, _ = self.layer(hidden, hidden, hidden, key_padding_mask=mask == 0, need_weights=False)
        return self.head(self.drop(hidden + seen))

    def loss(self, micro: dict[str, Any]) -> torch.Tensor:
        logits = self(micro)
        return functional.cross_entropy(logits.transpose(1, 2), micro["labels"], ignore_index=-100)


def padded(lengths: list[int], width: int, side: str = "right", seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    counts, place = torch.tensor(lengths).unsqueeze(1), torch.arange(width)
    mask = place < counts if side == "right" else place >= width - counts
    ids = torch.randint(1, WORDS, mask.shape, generator=made) * mask
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
        "name": [f"sample {i}" for i in range(len(lengths))],
    }


def tokens(micro: dict[str, Any]) -> torch.Tensor:
    return (micro["labels"] != -100).sum()


def gradients(*models: nn.Module) -> torch.Tensor:
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for m in models for p in m.parameters()]
    return torch.cat([part.flatten() for part in parts]).clone()


def assert_close(ours: torch.Tensor, full: torch.Tensor) -> None:
    error = (ours - full).norm() / full.norm().clamp(min=1e-3)  # two samples that are equal: zero
    assert error <= {torch.float64: 1e-10, torch.float32: 1e-5}[full.dtype], float(error)


@pytest.fixture(autouse=True)
def _fine_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths in steps of 4, so that short samples are ragged too."""
    real = ragged.pack
    monkeypatch.setattr(ragged, "MULTIPLE", 4)
    monkeypatch.setattr(ragged, "pack", lambda *args, **options: real(*args, multiple=4, **options))


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=14)
SIDES = st.sampled_from(["left", "right"])


@examples(60)
@given(
    lengths=LENGTHS,
    extra=st.integers(0, 9),
    side=SIDES,
    size=st.integers(1, 6),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    given_as=st.sampled_from(["mask", "numbers", "callable"]),
    seed=st.integers(0, 10**6),
)
def test_gradients_equal_those_of_the_padded_batch(
    lengths: list[int], extra: int, side: str, size: int, dtype: torch.dtype, given_as: str, seed: int
) -> None:
    torch.manual_seed(seed)
    model = Reader().to(dtype)
    batch = padded(lengths, max(lengths) + extra, side, seed)
    model.loss(batch).backward()
    full = gradients(model)
    model.zero_grad()
    seen: list[str] = []

    def fn(micro: dict[str, Any]) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.extend(micro["name"])
        return model.loss(micro)

    ways: dict[str, Any] = {"mask": "attention_mask", "callable": lambda one: one["attention_mask"].sum(1)}
    mb = Microbatcher(model, lengths=ways.get(given_as), weight=tokens, microbatch_size=size)
    report = mb.backward(fn, batch, lengths=lengths if given_as == "numbers" else None)
    assert_close(gradients(model), full)
    with torch.no_grad():
        assert torch.allclose(report.loss, model.loss(batch))
    assert Counter(seen) == Counter(batch["name"])
    assert sum(report.microbatch_sizes) == len(lengths)
    assert max(report.microbatch_sizes) <= size


@examples(60)
@given(lengths=LENGTHS, extra=st.integers(0, 9), side=SIDES, size=st.integers(1, 6), fails=st.integers(0, 3))
def test_map_puts_outputs_back_in_order_and_width(
    lengths: list[int], extra: int, side: str, size: int, fails: int
) -> None:
    torch.manual_seed(0)
    model = Reader().double().eval()
    batch = padded(lengths, max(lengths) + extra, side)
    done: list[str] = []

    def fn(micro: dict[str, Any]) -> dict[str, Any]:
        nonlocal fails
        logits = model(micro)
        if len(micro["name"]) > 1 and fails:
            fails -= 1
            raise simulated_oom()
        done.extend(micro["name"])
        pooled = (logits * micro["attention_mask"].unsqueeze(-1)).sum(1)
        return {"logits": logits, "pooled": pooled, "names": micro["name"], "kind": "a"}

    mb = Microbatcher(model, lengths="attention_mask", microbatch_size=size)
    found = mb.map(fn, batch)
    with torch.no_grad():
        expected = model(batch)
    mask = batch["attention_mask"].bool()
    assert found["logits"].shape == expected.shape
    assert torch.allclose(found["logits"][mask], expected[mask])
    assert torch.allclose(found["pooled"], (expected * mask.unsqueeze(-1)).sum(1))
    assert found["names"] == batch["name"]
    assert found["kind"] == "a"
    assert Counter(done) == Counter(batch["name"])  # nothing twice


@examples(40)
@given(lengths=LENGTHS, extra=st.integers(0, 9), side=SIDES, size=st.integers(1, 14), late=st.booleans())
def test_cached_representations_are_exact(
    lengths: list[int], extra: int, side: str, size: int, late: bool
) -> None:
    """In-batch negatives, `late`: one representation a token, compared token by token."""
    torch.manual_seed(0)
    model = Reader().double()
    batch = padded(lengths, max(lengths) + extra, side)
    mask = batch["attention_mask"].unsqueeze(-1)

    def encode(micro: dict[str, Any]) -> torch.Tensor:
        out = torch.tanh(model(micro)) * micro["attention_mask"].unsqueeze(-1)
        return out if late else out.sum(1)

    def loss_fn(reps: torch.Tensor) -> torch.Tensor:
        if late:
            reps = (reps * mask).amax(1)  # needs the batch's own width and order
        target = torch.arange(len(reps)).roll(1)
        return functional.cross_entropy(reps @ reps.T, target)

    loss_fn(encode(batch)).backward()
    full = gradients(model)
    model.zero_grad()
    mb = Microbatcher(model, lengths="attention_mask", microbatch_size=size)
    report = mb.backward_cached(encode, loss_fn, batch)
    assert_close(gradients(model), full)
    with torch.no_grad():
        assert torch.allclose(report.loss, loss_fn(encode(batch)))


# --- running out


class World:
    """A model with everything that a try changes, and a ragged batch."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = Reader(dropout=0.4)
        self.model.register_buffer("calls", torch.zeros(()))
        self.batch = padded([3, 11, 7, 1, 16, 5, 9, 14], 20, "left")
        self.mb = Microbatcher(self.model, lengths="attention_mask", weight=tokens)
        skip_loss_check(self.mb)
        if "old" in kind:
            self.model.loss(self.batch).backward()

    def loss(self, micro: dict[str, Any]) -> torch.Tensor:
        self.model.calls.add_(1)
        return self.model.loss(micro)

    def call(self) -> Any:
        if "cached" in self.kind:
            encode = lambda micro: self.model(micro).amax(1)  # noqa: E731
            return self.mb.backward_cached(encode, lambda reps: (reps @ reps.T).square().mean(), self.batch)
        return self.mb.backward(self.loss, self.batch)

    def state(self) -> list[Any]:
        return [
            *[None if p.grad is None else p.grad.numpy().tobytes() for p in self.model.parameters()],
            self.model.calls.numpy().tobytes(),
            torch.get_rng_state().numpy().tobytes(),
        ]


@pytest.mark.parametrize("kind", ["plain", pytest.param("old", marks=pytest.mark.slow), "cached,old"])
def test_a_fault_at_every_operation(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends bit for bit as a call that began with the final plan."""
    used: list[Any] = []
    forced: Any = None
    real = ragged.RaggedBatch.plan

    def plan(self: Any, done: Any = ()) -> Any:
        if forced is not None:
            self.planned = forced
        used.append(real(self, done))
        return used[-1]

    monkeypatch.setattr(ragged.RaggedBatch, "plan", plan)
    world = World(kind)
    with count_operations() as seen:
        world.call()
    first = used[-1]
    expected: dict[Any, Any] = {}
    for point in range(seen.operations):
        world = World(kind)
        with fail_at(point) as faults:
            report = world.call()
        assert faults.fired
        final = used[-1]
        if final not in expected:
            forced, other = final, World(kind)
            assert other.call().retries == 0
            forced, expected[final] = None, other.state()
        assert world.state() == expected[final], (point, faults.last)
        assert report.retries == (final != first)
    assert len(expected) > 1


def test_the_whole_batch_begins_again_and_an_error_leaves_what_was() -> None:
    world = World("old")
    before = world.state()
    fn = faulty(world.loss, {1: ValueError("mine")})
    limit_microbatch(ragged_sizer(world.mb), 3)
    with pytest.raises(ValueError, match="mine") as raised:
        world.mb.backward(fn, world.batch)
    assert raised.value.__notes__ == ["batchfit: raised in microbatch 2, 2 samples of length 16"]
    assert world.state() == before


class Job:
    """A model on a device where a microbatch takes 50 + 10 bytes a token."""

    def __init__(self, capacity: int, **options: Any) -> None:
        self.device = FakeDevice(capacity, reserves=options.pop("reserves", False))
        self.model = nn.Linear(1, 1)
        self.events: list[MicrobatchEvent] = []
        self.shapes: set[tuple[int, ...]] = set()
        self.mb = Microbatcher(
            self.model,
            lengths=lambda x: (x != 0).sum(1),
            device=self.device,
            on_event=self.events.append,
            **options,
        )
        skip_loss_check(self.mb)

    def loss(self, micro: torch.Tensor) -> torch.Tensor:
        self.device.use(50 + 10 * micro.numel())
        self.shapes.add(tuple(micro.shape))
        return self.model(micro.mean(1, keepdim=True)).mean()

    def run(self, lengths: list[int], *, width: int | None = None) -> Any:
        rows = torch.arange(width or max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        return self.mb.backward(self.loss, rows.float())


def test_memory_is_learned_as_a_function_of_the_shape() -> None:
    job = Job(20_000)
    draw = random.Random(0)
    reports = [job.run([draw.randint(1, 40) for _ in range(32)]) for _ in range(40)]
    assert sum(report.retries for report in reports) <= 2
    assert all(sum(report.microbatch_sizes) == 32 for report in reports)
    assert reports[-1].peak_bytes is not None
    assert reports[-1].peak_bytes > 0.5 * 20_000  # memory is used, not only kept free
    # Ten times as long as anything seen: cut smaller before it runs out.
    longer = job.run([400, 390, 380, 100, 20])
    assert longer.retries == 0
    with pytest.raises(NothingFitsError, match="one sample of length 4000;"):
        job.run([4000, 3])
    assert job.run([40] * 32).retries == 0


def test_shapes_recur_from_batch_to_batch() -> None:
    job = Job(10**6)
    draw = random.Random(1)
    for _ in range(30):
        job.run([draw.randint(1, 60) for _ in range(40)], width=64)
    early = set(job.shapes)
    for _ in range(30):
        job.run([draw.randint(1, 60) for _ in range(40)], width=64)
    assert len(job.shapes - early) <= 0.2 * len(early)


def test_running_out_again_and_again_halves() -> None:
    job = Job(10**6)
    report = job.mb.backward(faulty(job.loss, {0: "oom", 1: "oom", 2: "oom"}), torch.ones(64, 8))
    assert report.retries == 3
    assert max(report.microbatch_sizes) <= 8
    assert [event.kind for event in job.events] == ["shrunk"] * 3
    assert job.events[0].size_after < job.events[0].size_before
    assert "at length 8" in job.events[0].why
    assert all(event.shape for event in job.events)


def test_a_sample_in_a_longer_known_shape_is_trimmed_more_before_nothing_fits() -> None:
    job = Job(10**6)
    job.run([24])  # known: one sample of 24
    job.device._limits[-1] = 50 + 10 * 22
    report = job.run([20], width=25)
    assert (report.microbatch_sizes, report.retries) == ((1,), 1)
    assert (1, 20) in job.shapes
    with pytest.raises(NothingFitsError, match="one sample of length 24"):
        job.run([23], width=25)


def test_gradients_that_appear_while_a_batch_runs_are_counted() -> None:
    job = Job(20_000)
    begun: list[int] = []

    def loss(micro: torch.Tensor) -> torch.Tensor:
        found = job.loss(micro)
        if not begun:
            begun.append(9000)
            job.device.hold(9000)
        return found

    limit_microbatch(ragged_sizer(job.mb), 20)
    for count in (40, *[64] * 8):
        report = job.mb.backward(loss, torch.ones(count, 40))
        job.device.release(begun.pop())  # zero_grad
        assert report.retries == 0
        limit_microbatch(ragged_sizer(job.mb), None)
    known = known_of(job.mb)
    another: Any = SimpleNamespace(known=known, held_bytes=300, sizer=ragged_sizer(job.mb))
    memory, _ = ragged.RaggedBatch.memory_model(another)
    assert memory.held_bytes == 9300  # what another batch would find held after its first microbatch
    assert memory.readings[0].used_bytes <= 50 + 400 * 20  # the gradients are in no reading


def test_fragmented_memory_is_tried_once_more_with_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchfit._engine.device.oom._is_fragmented", lambda device: True)
    job = Job(10**6)
    report = job.mb.backward(faulty(job.loss, {0: "oom"}), torch.ones(8, 8))
    assert (report.retries, report.microbatch_sizes) == (1, (8,))
    assert [event.kind for event in job.events] == ["retry"]


def test_allocation_retries_leave_more_room_and_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(20_000, reserves=True)
    monkeypatch.setattr(ragged, "_expandable", lambda device: False)
    with caplog.at_level(logging.INFO, logger="batchfit"):
        for _ in range(8):
            job.run([40] * 32)
        known = known_of(job.mb)
        assert known.headroom.share == 0.9
        before = known.peaks
        job.device.cached, job.device.settles_after = 0.9, None
        most = max(before)
        for _ in range(8):
            report = job.run([40] * 32)
    assert known.headroom.share < 0.9
    assert max(report.microbatch_sizes) <= most[0]
    assert caplog.text.count("expandable_segments:True") == 1


def test_what_was_learned_survives_a_checkpoint_on_the_same_device_only() -> None:
    job = Job(20_000)
    for _ in range(5):
        job.run([40, 30, 20, 10] * 16)
    state = job.mb.state_dict()
    twin, other = Job(20_000), Job(40_000)
    twin.mb.load_state_dict(state)
    assert twin.mb.state_dict() == state
    assert twin.run([40, 30, 20, 10] * 16).microbatch_sizes == job.run([40, 30, 20, 10] * 16).microbatch_sizes
    other.mb.load_state_dict(state)
    assert other.mb.state_dict()["ragged"] == {}
    del state["ragged"]  # as an earlier version wrote it
    twin.mb.load_state_dict(state)
    assert twin.mb.state_dict()["ragged"] == {}


def test_a_budget_is_kept() -> None:
    job = Job(10**6, budget=5000)
    for _ in range(3):
        report = job.run([40, 30, 20, 10] * 16)
        assert report.peak_bytes is not None
        assert report.peak_bytes <= 5000


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"lengths": [1, 2]}, TypeError, "lengths must be the name of a part of the batch or a callable"),
        ({"lengths": torch.ones(2)}, TypeError, "lengths must be"),
        ({"lengths": "x", "split": lambda b, s: []}, ValueError, "split must be None where lengths is given"),
        ({"pad_keys": "x"}, TypeError, "pad_keys must be a list of names"),
        ({"pad_dim": 0}, ValueError, "pad_dim must be at least 1"),
        ({"pad_dim": True}, TypeError, "pad_dim must be an integer"),
        ({"padding_side": "up"}, ValueError, "padding_side must be 'left', 'right' or None, not 'up'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        Microbatcher(nn.Linear(1, 1), **options)


def test_wrong_lengths_of_a_call() -> None:
    model = nn.Linear(4, 1)
    mb = Microbatcher(model)
    for lengths, match in (([1, 2], "lengths must be one for each sample"), ([1, 2, 9], "must not exceed")):
        with pytest.raises(ValueError, match=match):
            mb.backward(lambda x: model(x).mean(), torch.ones(3, 4), lengths=lengths)
    cut = Microbatcher(model, split=lambda batch, sizes: list(batch.split(sizes)))
    with pytest.raises(ValueError, match="lengths must be None where split is given"):
        cut.backward(lambda x: model(x).mean(), torch.ones(3, 4), lengths=[1, 2, 3])
    assert model.weight.grad is None


def test_names_settle_what_shapes_do_not() -> None:
    model = nn.Linear(1, 1)
    seen: list[Any] = []

    def fn(micro: Any) -> torch.Tensor:
        seen.append({name: tuple(part.shape) for name, part in micro.items()})
        return model(micro["x"].mean(dim=(1, 2), keepdim=True)[:, 0]).mean()

    batch = {"x": torch.ones(4, 12, 12), "speaker": torch.ones(4, 12)}
    mb = Microbatcher(model, lengths=lambda one: [3, 4, 3, 2], pad_keys=["x"], pad_dim=1)
    skip_loss_check(mb)
    mb.backward(fn, batch)
    assert seen == [{"x": (4, 4, 12), "speaker": (4, 12)}]


@pytest.mark.parametrize("cap", range(10))
def test_caps(cap: int, living_bytes: int) -> None:
    """Real memory: every batch steps once, and the gradients are those of the padded batch."""
    torch.manual_seed(cap)
    model = Reader().double()
    mb = Microbatcher(model, lengths="attention_mask", weight=tokens)
    draw, retried = random.Random(cap), 0
    for step in range(6):
        batch = padded([draw.randint(1, 30) for _ in range(24)], 30, seed=step)
        model.zero_grad()
        model.loss(batch).backward()
        full = gradients(model)
        model.zero_grad()
        gc.collect()
        with batchfit.virtual_memory("8GiB") as memory:
            held = memory.allocated_bytes
            with memory.lowered(held + (60 + 40 * cap) * 1024):
                report = mb.backward(model.loss, batch)
            retried += report.retries
            del report
        assert_close(gradients(model), full)
    assert retried <= 8


def test_a_cached_loss_that_does_not_fit_says_so() -> None:
    world = World("cached")
    with pytest.raises((NothingFitsError, BatchfitError)):
        world.mb.backward_cached(
            lambda micro: world.model(micro).amax(1),
            faulty(lambda reps: reps.sum(), dict.fromkeys(range(50), "oom")),
            world.batch,
        )


def test_attention_that_plans_is_off_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import contextmanager

    inside: list[bool] = []

    @contextmanager
    def off(device: Any) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr("batchfit._microbatch.context.attention_without_plans", off)
    world = World("plain")
    seen: list[int] = []

    def fn(micro: Any) -> torch.Tensor:
        seen.append(len(inside))
        return world.loss(micro)

    world.mb.backward(fn, world.batch)
    assert set(seen) == {1}
    assert not inside
    seen.clear()
    Microbatcher(world.model).backward(fn, world.batch)
    assert seen == [0]


def test_widths_that_make_a_new_shape_each_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(10**6)
    with caplog.at_level(logging.INFO, logger="batchfit"):
        for width in (12, 16, 13, 13, 16):
            job.run([10, 3], width=width)
        assert not caplog.text
        for width in (13, 14, 15):
            job.run([10, 3], width=width)
    assert caplog.text.count("Pad to multiples of 4") == 1
    assert "padded to 13, 14" in caplog.text
