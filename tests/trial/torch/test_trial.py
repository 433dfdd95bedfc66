"""The trial's own contract: what it counts, what it raises, what an interrupt cannot break."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, MiB
from torch import nn

from batchfit._engine.device.device import CpuDevice
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.tensors import optimizers_in
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.trial import run_trial
from batchfit._engine.workload import loop
from batchfit._find.driver import observation_of, worst
from batchfit.results import Trial
from batchfit.testing import FakeDevice, simulated_oom


def trial_of(step: Any, size: int = 4, **settings: Any) -> Trial:
    return run_trial(step, size, device=FakeDevice(1 << 20), snapshot=Snapshot.take([]), **settings)


def test_steps_are_counted_as_they_really_ran() -> None:
    calls = []

    def step(n: int) -> None:
        calls.append(n)
        if len(calls) == 3:
            loop.enter_phase("backward")
            raise simulated_oom("cuda")

    trial = trial_of(step, steps=5)
    assert (trial.outcome, trial.steps_run, trial.phase) == ("oom", 2, "backward")
    assert "out of memory" in trial.message
    assert calls == [4, 4, 4]
    assert loop.current_phase() is None


@pytest.mark.parametrize("device", [FakeDevice("1MiB"), CpuDevice()], ids=["fake", "cpu"])
def test_without_a_caching_allocator_a_soak_runs_all_its_steps(device: Any) -> None:
    with device.limit(1 << 20):
        trial = run_trial(
            lambda n: None, 4, device=device, snapshot=Snapshot.take([]), steps=14, soak=True, may_settle=True
        )
    assert (trial.steps_run, trial.settled, trial.largest_bytes) == (14, False, None)


@pytest.mark.parametrize(
    ("text", "outcome", "ambiguous"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 MiB", "oom", False),
        ("CUDA error: invalid configuration argument", "too_large", False),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR", "oom", True),
    ],
)
def test_verdicts_become_outcomes(text: str, outcome: str, ambiguous: bool) -> None:
    def step(n: int) -> None:
        raise RuntimeError(text)

    trial = trial_of(step)
    assert (trial.outcome, trial.ambiguous, trial.steps_run) == (outcome, ambiguous, 0)


def test_a_fatal_error_comes_out_with_what_it_means_and_nothing_is_touched() -> None:
    class Untouchable:
        def restore(self, *, cut_off: bool = True) -> None:
            raise AssertionError("a dead context must not be touched")

    def step(n: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    device = FakeDevice(1 << 20)
    with pytest.raises(RuntimeError, match="device-side assert") as caught:
        run_trial(step, 4, device=device, snapshot=Untouchable())  # type: ignore[arg-type]
    assert any("restart the process" in note for note in caught.value.__notes__)


def test_retries_count_as_settled_in_the_second_half_only() -> None:
    class Retrying(FakeDevice):
        retries = 0

        def alloc_retries(self) -> int:
            return self.retries

    def run(retry_at: set[int], *, soak: bool, **more: Any) -> Trial:
        device = Retrying(1 << 20)
        calls = 0

        def step(n: int) -> None:
            nonlocal calls
            calls += 1
            device.retries += calls in retry_at

        return run_trial(step, 4, device=device, snapshot=Snapshot.take([]), steps=10, soak=soak, **more)

    early = run({1, 2, 5}, soak=True)
    assert (early.alloc_retries, early.settled_retries, early.sustained) == (3, 0, True)
    late = run({1, 6, 10}, soak=True)
    assert (late.alloc_retries, late.settled_retries, late.sustained) == (3, 2, False)
    assert run({6}, soak=False).settled_retries == 0
    # Once it has retried there twice, more steps would change nothing.
    cut_short = run({1, 6, 8, 10}, soak=True, may_settle=True)
    assert (cut_short.steps_run, cut_short.settled_retries, cut_short.sustained) == (8, 2, False)
    assert run({1, 4, 5, 8}, soak=True, may_settle=True).steps_run == 10
    # A cache that grows outgrows blocks in every step; and a step has been through all its lengths.
    growing = run(set(range(11)), soak=True, generates=True)
    assert (growing.steps_run, growing.alloc_retries, growing.settled_retries) == (10, 10, 0)
    assert growing.sustained
    assert run(set(range(11)), soak=True, generates=True, may_settle=True).steps_run == 10


def test_the_largest_block_reaches_the_search_before_the_cache_is_gone() -> None:
    cuda = FakeCuda()

    def step(n: int) -> None:
        cuda.allocate(n * MiB)
        cuda.free(n * MiB)
        cuda.segments = [{"device": 0, "total_size": n * MiB, "is_expandable": False}]

    trial = run_trial(step, 40, device=CudaDevice(0, backend=cuda), snapshot=Snapshot.take([]))
    assert trial.largest_bytes == 40 * MiB
    assert observation_of(trial).largest_bytes == 40 * MiB
    other = trial.model_copy(update={"largest_bytes": 60 * MiB})
    assert worst([trial, other, trial]).largest_bytes == 60 * MiB


class Circling:
    """Steps on a card whose blocks lie elsewhere in each of the first `wanders` steps."""

    def __init__(
        self, *, wanders: int, lengths: Sequence[int] = (40,), retries_at: int | None = None
    ) -> None:
        self.cuda = FakeCuda()
        self.wanders, self.lengths, self.retries_at, self.steps = wanders, lengths, retries_at, 0

    def step(self, n: int) -> None:
        size = self.lengths[self.steps % len(self.lengths)] * MiB
        self.cuda.allocate(size)
        self.cuda.free(size)
        self.steps += 1
        self.cuda.retries[0] += self.steps == self.retries_at
        blocks = [{"size": 40 * MiB, "state": "inactive"}]
        self.cuda.segments = [
            {
                "device": 0,
                "address": min(self.steps, self.wanders),
                "segment_type": "large",
                "total_size": 40 * MiB,
                "blocks": blocks,
            }
        ]

    def soaked(self, *, may_settle: bool = True) -> Trial:
        return run_trial(
            self.step,
            4,
            device=CudaDevice(0, backend=self.cuda),
            snapshot=Snapshot.take([]),
            steps=25,
            soak=True,
            may_settle=may_settle,
        )


@pytest.mark.parametrize(("wanders", "steps"), [(1, 10), (4, 10), (8, 13), (20, 25)])
def test_a_soak_ends_where_the_allocator_goes_in_circles(wanders: int, steps: int) -> None:
    program = Circling(wanders=wanders)
    trial = program.soaked()
    assert (trial.steps_run, program.steps) == (steps, steps)
    assert (trial.settled, trial.sustained, trial.verdict) == (True, True, "sustained")


def test_a_soak_runs_to_its_end_where_it_does_not() -> None:
    ragged = Circling(wanders=1, lengths=[40, 30, 20, 35, 25, 15, 38])  # the same is left after each step
    told_to = Circling(wanders=1).soaked(may_settle=False)
    for trial in (Circling(wanders=25).soaked(), ragged.soaked(), told_to):
        assert (trial.steps_run, trial.settled, trial.sustained) == (25, False, True)


class Unseen(torch.optim.Optimizer):
    """As bitsandbytes and apex have it: kernels that torch does not see, and steps counted in a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"step": 0})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                parameter.data.sub_(0.1)


@pytest.mark.parametrize(("accumulated", "steps"), [(1, 10), (2, 10), (16, 25)])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
        Unseen,
    ],
)
def test_a_soak_does_not_end_before_the_optimizer_has_stepped(
    make: Callable[[Any], Any], accumulated: int, steps: int
) -> None:
    """It makes its state in its first step: ten steps of forward and backward say nothing about that."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = make([weight])
    program = Circling(wanders=1)

    def step(n: int) -> None:
        program.step(n)
        weight.sum().backward()
        if program.steps % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()

    trial = run_trial(
        step,
        4,
        device=CudaDevice(0, backend=program.cuda),
        snapshot=Snapshot.take([weight, optimizer]),
        steps=25,
        soak=True,
        may_settle=True,
        optimizers=optimizers_in([weight, optimizer]),
    )
    assert (trial.steps_run, trial.settled) == (steps, steps < 25)


def test_a_retry_puts_the_end_of_a_soak_off() -> None:
    trial = Circling(wanders=1, retries_at=8).soaked()
    assert (trial.steps_run, trial.alloc_retries, trial.settled_retries) == (14, 1, 0)
    assert trial.sustained


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)
def test_an_interrupt_while_state_is_put_back_waits_until_it_is_done() -> None:
    model = nn.Linear(4, 4)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    real = Snapshot.take([model])

    class Interrupted:
        finished = False

        def restore(self, *, cut_off: bool = True) -> None:
            os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C at the worst moment
            real.restore()
            self.finished = True

    def step(n: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1

    snapshot = Interrupted()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_trial(step, 4, device=FakeDevice(1 << 20), snapshot=snapshot)  # type: ignore[arg-type]
    assert snapshot.finished
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert signal.getsignal(signal.SIGINT) is handler


def test_gradients_are_not_part_of_the_floor() -> None:
    """zero_grad frees them before the forward pass, so they are not live at every moment."""
    from batchfit import virtual_memory

    model = nn.Linear(256, 256, bias=False)

    def step(n: int) -> None:
        model.zero_grad(set_to_none=True)
        model(torch.ones(n, 256)).sum().backward()

    snapshot = Snapshot.take([model])
    with virtual_memory("64MiB"):
        trial = run_trial(step, 2, device=CpuDevice(), snapshot=snapshot, parameters=list(model.parameters()))
        blind = run_trial(step, 2, device=CpuDevice(), snapshot=snapshot)
    assert trial.held_bytes is not None
    assert blind.held_bytes is not None
    assert abs(blind.held_bytes - trial.held_bytes - 256 * 256 * 4) <= 4096
