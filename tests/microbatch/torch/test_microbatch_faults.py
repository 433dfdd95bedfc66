"""A fault at every operation of a call: it ends bit for bit as if it had begun at the final size."""

from __future__ import annotations

import gc
import logging
import random
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from microbatcher import limit_microbatch, skip_loss_check, uniform_sizer
from state_judge import fingerprint
from torch import nn
from torch.nn import functional

import batchfit
from batchfit import Microbatcher
from batchfit._engine.sizing.pure.sizes import Learned
from batchfit._engine.sizing.ragged import RaggedBatch
from batchfit.errors import BatchfitError, StepInterruptedError
from batchfit.testing import count_operations, fail_at, faulty

KINDS = ["plain", "old", "scaler", "old,exact", "cached", "cached,old,exact"]


class World:
    """A model with everything that a try changes: dropout, buffers, generators, old gradients, a scaler."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.kind = kind
        self.model = nn.Sequential(
            nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Tanh(), nn.Linear(6, 3)
        )
        self.own = torch.Generator().manual_seed(3)
        self.model[3].own = self.own
        self.batch = {"x": torch.randn(8, 5), "y": torch.randint(0, 3, (8,))}
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaler" in kind else None
        if "old" in kind:
            self.loss(self.batch).backward()

    def loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        noise = random.random() + np.random.rand() + torch.rand(1, generator=self.own)
        return functional.cross_entropy(self.model(micro["x"]), micro["y"]) * noise.sum()

    def microbatcher(self, size: int | None) -> Microbatcher:
        exact: Any = "exact" if "exact" in self.kind else "ignore"
        mb = Microbatcher(self.model, microbatch_size=size, batch_norm=exact)
        skip_loss_check(mb)
        return mb

    def call(self, mb: Microbatcher) -> Any:
        if "cached" in self.kind:
            return mb.backward_cached(
                lambda micro: self.model(micro["x"]), lambda reps: (reps @ reps.T).square().mean(), self.batch
            )
        return mb.backward(self.loss, self.batch, scaler=self.scaler)

    def state(self) -> list[Any]:
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return [
            *[None if p.grad is None else p.grad.numpy().tobytes() for p in self.model.parameters()],
            *[b.numpy().tobytes() for b in self.model.buffers()],
            *[p.detach().numpy().tobytes() for p in self.model.parameters()],
            *[g.get_state().numpy().tobytes() for g in (torch.default_generator, self.own)],
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            scaler,
            [m.momentum for m in self.model.modules() if isinstance(m, nn.BatchNorm1d)],
        ]


class Run:
    """One call in a new world: what it left, with what it was watched by, and what stays behind in memory."""

    def __init__(self, kind: str, size: int | None, *, warm: bool) -> None:
        self.world = World(kind)
        self.mb = self.world.microbatcher(size)
        if warm:
            self.world.call(self.mb)
        self.sizes: tuple[int, ...] = ()

    def go(self, around: AbstractContextManager[Any]) -> Any:
        with around as seen:
            report = self.world.call(self.mb)
        self.sizes, self.retries = report.microbatch_sizes, report.retries
        self.left = (self.world.state(), float(report.loss))
        return seen

    def at(self, sizes: tuple[int, ...]) -> Run:
        """Where nothing fails and `sizes` are what it begins with."""
        limit_microbatch(uniform_sizer(self.mb), sizes[0])
        self.go(nullcontext())
        assert (self.sizes, self.retries) == (sizes, 0)
        return self


@pytest.mark.parametrize(
    ("size", "warm", "kind"),
    [
        *((None, False, kind) for kind in KINDS),
        (4, True, "cached,old,exact"),  # all at once; the others one by one are slow
        *(pytest.param(4, True, kind, marks=pytest.mark.slow) for kind in KINDS[:-1]),
    ],
)
def test_a_fault_at_every_operation(kind: str, size: int | None, warm: bool) -> None:
    seen = Run(kind, size, warm=warm).go(count_operations())
    expected: dict[tuple[int, ...], Any] = {}
    for point in range(seen.operations):
        tried = Run(kind, size, warm=warm)
        faults = tried.go(fail_at(point))
        assert faults.fired
        if tried.sizes not in expected:
            expected[tried.sizes] = Run(kind, size, warm=warm).at(tried.sizes).left
        assert tried.left == expected[tried.sizes], (point, faults.last)
    # all but the few before the first try: the copies of the buffers
    assert len(expected) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_stays_behind(kind: str) -> None:
    seen = Run(kind, None, warm=False).go(count_operations())

    def behind(point: int | None) -> tuple[int, tuple[int, ...]]:
        gc.collect()
        with batchfit.virtual_memory("8GiB") as memory:
            start = memory.allocated_bytes
            tried = Run(kind, None, warm=False)
            tried.go(nullcontext() if point is None else fail_at(point))
            gc.collect()
            return memory.allocated_bytes - start, tried.sizes

    (clean, _), shrunk = behind(None), 0
    for point in range(3, seen.operations, 11):
        left, sizes = behind(point)
        assert left == clean, point
        shrunk += sizes == (4, 4)
    assert shrunk > 3


@pytest.mark.parametrize("error", ["error", "interrupt"])
@pytest.mark.parametrize("kind", ["old", "cached,old,exact"])
def test_an_error_at_every_operation_leaves_the_state_of_before(kind: str, error: str) -> None:
    world = World(kind)
    mb = world.microbatcher(4)
    before = world.state()
    with count_operations() as seen:
        world.call(mb)
    for point in range(0, seen.operations, 3):
        world = World(kind)
        mb = world.microbatcher(4)
        with fail_at(point, error=error), pytest.raises((RuntimeError, KeyboardInterrupt)):
            world.call(mb)
        assert world.state() == before, point


def test_running_out_again_and_again() -> None:
    world = World("old")
    mb = world.microbatcher(None)
    fn = faulty(world.loss, {0: "oom", 2: "oom"})  # at 8, and in the second microbatch of 4
    report = mb.backward(fn, world.batch)
    assert report.retries == 2
    assert report.microbatch_sizes == (2,) * 4
    other = World("old")
    other.microbatcher(2).backward(other.loss, other.batch)
    assert world.state() == other.state()


def test_no_frame_of_the_user_is_alive_in_a_retry() -> None:
    """One that were would take the memory of a try: sizes would go further down than they must."""
    model = nn.Linear(64, 64)
    batch = torch.randn(64, 64)

    def fn(micro: torch.Tensor) -> torch.Tensor:
        hidden = model(micro)
        for _ in range(6):
            hidden = torch.tanh(hidden)
        return hidden.mean()

    def needed() -> int:
        with batchfit.virtual_memory("8GiB") as memory:
            for part in batch.split(32):
                (fn(part) * 0.5).backward()
            model.zero_grad()
            return memory.peak_bytes

    gc.collect()
    cap = needed() + 4096
    with batchfit.virtual_memory(cap):
        report = Microbatcher(model).backward(fn, batch)
    assert (report.microbatch_sizes, report.retries) == ((32, 32), 1)


def test_a_batch_that_fn_changes_in_place_cannot_be_retried() -> None:
    model = nn.Linear(3, 1)

    def fn(micro: torch.Tensor) -> torch.Tensor:
        micro.mul_(2)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")

    with pytest.raises(BatchfitError, match="fn changed the batch in place"):
        Microbatcher(model).backward(fn, torch.ones(4, 3))


@pytest.mark.parametrize("writes", [True, False])
def test_what_map_has_not_done_must_be_as_it_was(writes: bool) -> None:
    """A microbatch that ran may have been written into; one that ran out is done again."""
    model, calls = nn.Linear(3, 1), 0

    def fn(micro: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if writes or calls != 2:
            micro.mul_(2)
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
        return micro.clone()

    mb = Microbatcher(model, microbatch_size=4)
    if writes:
        with pytest.raises(BatchfitError, match="fn changed the batch in place"):
            mb.map(fn, torch.ones(8, 3))
    else:
        assert torch.equal(mb.map(fn, torch.ones(8, 3)), torch.full((8, 3), 2.0))
        assert calls == 4


def test_a_cached_encoder_must_not_change_the_batch_in_place() -> None:
    model = nn.Linear(3, 2)

    def encode(micro: torch.Tensor) -> Any:
        return model(micro.mul_(2))

    def loss_fn(rows: torch.Tensor) -> torch.Tensor:
        return (rows @ rows.T).mean()

    batch = torch.ones(8, 3)
    Microbatcher(model).backward_cached(encode, loss_fn, batch)  # in one microbatch it is called once
    assert torch.equal(batch, torch.full((8, 3), 2.0))
    with pytest.raises(
        BatchfitError, match="encode changed the batch in place, and each chunk is encoded tw"
    ):
        Microbatcher(model, microbatch_size=4).backward_cached(encode, loss_fn, batch)


def test_buffers_that_are_rebound_or_added_are_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("late", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + len(x)
            if self.late is None:
                self.late = torch.zeros(())
            self.late.add_(1)
            return (x * self.scale).mean()

    model = Counting()
    before = model.seen
    mb = Microbatcher(model, microbatch_size=2, compared="ignore")
    with pytest.raises(ValueError, match="mine"):
        mb.backward(faulty(model, {2: ValueError("mine")}), torch.ones(8))
    assert model.seen is before
    assert model.late is None
    mb = Microbatcher(model, compared="ignore")
    mb.backward(faulty(model, {0: "oom", 2: "oom"}, after=True), torch.ones(8))
    assert (float(model.seen), float(model.late)) == (8, 4)
    mb.backward(faulty(model, {1: "oom"}, after=True), torch.ones(8))  # twins follow what was rebound
    assert float(model.seen) == 16


def test_a_map_inside_a_backward_does_not_disturb_its_way_back() -> None:
    teacher = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    batch = torch.randn(8, 3)

    def run(fail: bool) -> list[bytes]:
        for module in (teacher, model):
            module[1].reset_running_stats()
        mb = Microbatcher(model, teacher, batch_norm="ignore", microbatch_size=None if fail else 4)
        skip_loss_check(mb)

        def fn(micro: torch.Tensor) -> torch.Tensor:
            found = model(micro)
            return (found - mb.map(teacher, micro).clone()).square().mean()

        mb.backward(faulty(fn, {0: "oom"} if fail else {}, after=True), batch)
        return [buffer.numpy().tobytes() for module in (teacher, model) for buffer in module.buffers()]

    assert run(True) == run(False)


@pytest.mark.filterwarnings("ignore")  # tracing warns of itself and of a size that it makes constant
def test_scripted_modules_are_restored_too() -> None:
    example = torch.randn(8, 3)
    model = torch.jit.trace(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), example)
    counts = [buffer for name, buffer in model.named_buffers() if "num_batches" in name]
    before = int(counts[0])
    mb = Microbatcher(model, batch_norm="ignore")
    skip_loss_check(mb)
    report = mb.backward(faulty(lambda x: model(x).mean(), {0: "oom"}, after=True), example)
    assert report.microbatch_sizes == (4, 4)
    assert int(counts[0]) == before + 2
    assert all(p.grad is not None for p in model.parameters())


def test_sparse_gradients_are_added_to_old_ones() -> None:
    model = nn.Embedding(6, 2, sparse=True).double()
    batch = torch.tensor([0, 1, 1, 5])

    def fn(micro: torch.Tensor) -> torch.Tensor:
        return model(micro).square().mean()

    fn(batch[:2]).backward()
    fn(batch).backward()
    assert model.weight.grad is not None
    full = model.weight.grad.to_dense()
    model.zero_grad()
    fn(batch[:2]).backward()
    Microbatcher(model, microbatch_size=3).backward(fn, batch)
    assert torch.allclose(model.weight.grad.to_dense(), full)


# --- backward and step together


class Training:
    """Two whole training steps: backward in microbatches, clipping, the optimizer, an LR schedule."""

    def __init__(self, kind: str, size: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.4), nn.Linear(6, 3))
        make: Any = torch.optim.SGD if "sgd" in kind else torch.optim.AdamW
        options: dict[str, Any] = {"momentum": 0.9} if "sgd" in kind else {"fused": "fused" in kind}
        self.optimizer = make(self.model.parameters(), lr=0.1, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if "scaler" in kind else None
        self.clip_norm = 0.5 if "clip" in kind else None
        self.mb = Microbatcher(self.model, microbatch_size=size, batch_norm="ignore")
        skip_loss_check(self.mb)
        self.batches = [{"x": torch.randn(8, 5), "y": torch.randint(0, 3, (8,))} for _ in range(2)]
        self.sizes: list[tuple[int, ...]] = []

    def loss(self, micro: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(self.model(micro["x"]), micro["y"])

    def backward(self, number: int) -> None:
        self.optimizer.zero_grad()
        report = self.mb.backward(self.loss, self.batches[number], scaler=self.scaler)
        self.sizes.append(report.microbatch_sizes)

    def step(self, *, rollback: bool) -> None:
        self.mb.step(self.optimizer, scaler=self.scaler, clip_norm=self.clip_norm, rollback=rollback)
        self.schedule.step()

    def run(self, *, rollback: bool) -> None:
        for number in range(2):
            self.backward(number)
            self.step(rollback=rollback)

    def by_hand(self, sizes: list[tuple[int, ...]]) -> Training:
        for number, some in enumerate(sizes):
            limit_microbatch(uniform_sizer(self.mb), some[0])
            uniform_sizer(self.mb).learned = Learned()
            self.backward(number)
            assert self.sizes[-1] == some
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            if self.clip_norm is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            self.schedule.step()
        return self

    def state(self) -> object:
        parts = [self.model, self.optimizer, self.scaler, self.schedule.state_dict()]
        return fingerprint(*parts, identities=False), torch.get_rng_state().tolist()


@pytest.mark.parametrize("rollback", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        "adamw,clip,scaler",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adamw", "fused", "sgd,clip")),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # a step that the scaler may skip
@pytest.mark.slow
def test_a_fault_at_every_operation_of_two_training_steps(
    kind: str, rollback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As training by hand in the final sizes; without a copy to go back to, perhaps told to be half done."""
    caplog.set_level(logging.ERROR, logger="batchfit")
    world = Training(kind)
    with count_operations() as seen:
        world.run(rollback=rollback)
    expected: dict[Any, object] = {}
    ended: Counter[str] = Counter()
    for point in range(seen.operations):
        tried = Training(kind)
        error: BaseException | None = None
        with fail_at(point) as faults:
            try:
                tried.run(rollback=rollback)
            except (StepInterruptedError, torch.OutOfMemoryError) as caught:
                error = caught.with_traceback(None)
        assert faults.fired
        if error is not None:
            assert isinstance(error, StepInterruptedError)
            assert not rollback
            ended["interrupted"] += 1
            continue
        key = tuple(tried.sizes)
        if key not in expected:
            expected[key] = Training(kind).by_hand(tried.sizes).state()
        assert tried.state() == expected[key], (point, faults.last)
        ended["retried" if len(key[0]) + len(key[1]) > 2 else "same sizes"] += 1
    assert ended["retried"] > 50
    assert ended["same sizes"] > 3  # in the step: it is tried again, or was prepared again
    assert (ended["interrupted"] == 0) == rollback


def test_an_oom_after_the_last_sample_of_map_repeats_that_microbatch_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To read the memory of a microbatch that ran may raise what an earlier kernel has left."""
    left, sizes = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")], []

    def end(sized: RaggedBatch, index: int) -> None:
        if left and index == len(sized.planned) - 1:
            raise left.pop()

    monkeypatch.setattr(RaggedBatch, "watch", property(lambda sized: sized))
    monkeypatch.setattr(RaggedBatch, "begin", lambda sized, index: None)
    monkeypatch.setattr(RaggedBatch, "end", end)
    mb = Microbatcher(nn.Linear(3, 1), microbatch_size=2)

    def fn(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        sizes.append(len(micro["x"]))
        return micro["n"].clone()

    batch = {"x": torch.ones(4, 64), "n": torch.arange(4)}
    assert mb.map(fn, batch, lengths=[64] * 4).tolist() == [0, 1, 2, 3]
    assert sizes == [2, 2, 1, 1]
