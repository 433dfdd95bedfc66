"""The tools that users test with: each must fail where it says, only there, and leave nothing behind."""

from __future__ import annotations

import doctest
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

import batchfit._engine.trial.trial
import batchfit.testing
from batchfit._engine.device import oom
from batchfit._engine.device.device import Device, Peaks
from batchfit._engine.device.resolve import resolve_device
from batchfit.testing import (
    _OOM_TEXTS,
    FakeDevice,
    FaultSchedule,
    _made,
    count_operations,
    fail_at,
    faulty,
    simulated_oom,
    virtual_memory,
)

MiB = 2**20


def test_the_examples_in_the_docstrings_are_true() -> None:
    flags = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    found = doctest.testmod(batchfit.testing, optionflags=flags)
    assert found.attempted >= 12
    assert found.failed == 0


def test_all_names_are_there() -> None:
    assert set(batchfit.testing.__all__) == {
        name
        for name in vars(batchfit.testing)
        if not name.startswith("_") and getattr(batchfit.testing, name) in _own()
    }


def _own() -> list[Any]:
    home = "batchfit.testing"
    return [
        one
        for one in vars(batchfit.testing).values()
        if getattr(one, "__module__", "") == home or one is virtual_memory
    ]


# fail_at and count_operations


def train(steps: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_counting_changes_nothing_and_sees_backward_and_optimizer() -> None:
    expected = train()
    with count_operations() as seen:
        found = train()
    assert all(map(torch.equal, expected, found))
    with count_operations() as forward:
        model = torch.nn.Linear(4, 8)
        loss = model(torch.randn(3, 4)).sum()
    with count_operations() as backward:
        loss.backward()
    with count_operations() as optimizer:
        torch.optim.AdamW(model.parameters()).step()
    assert min(forward.operations, backward.operations, optimizer.operations) > 0
    assert not seen.fired
    assert seen.operations > forward.operations + backward.operations


def test_a_fault_at_every_point_comes_exactly_there() -> None:
    with count_operations() as all_of_them:
        train(1)
    names = []
    for n in range(all_of_them.operations):
        with fail_at(n) as seen, pytest.raises(torch.OutOfMemoryError, match="simulated"):
            train(1)
        assert seen.fired
        assert seen.operations == n
        names.append(seen.last)
    assert any("addmm" in name for name in names), names
    assert any("backward" in name for name in names), names
    with fail_at(all_of_them.operations) as seen:  # one past the end: nothing fails
        train(1)
    assert not seen.fired
    assert seen.operations == all_of_them.operations


def test_the_operation_that_fails_has_not_run_and_the_next_one_does() -> None:
    tensor = torch.zeros(3)
    with fail_at(1) as seen:
        tensor += 1
        with pytest.raises(torch.OutOfMemoryError):
            tensor += 10
        assert seen.operations == 1
        tensor += 100
        assert seen.operations == 2
    assert tensor.tolist() == [101.0] * 3
    tensor += 1000
    assert seen.operations == 2, "outside the block nothing is counted"


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OwnError("x"), OwnError),
        (OwnError, OwnError),
        (lambda: OwnError("made"), OwnError),
        ("interrupt", KeyboardInterrupt),
        ("error", RuntimeError),
        ("python", MemoryError),
    ],
)
def test_another_error_can_be_raised(error: Any, kind: type[BaseException]) -> None:
    with fail_at(0, error=error), pytest.raises(kind) as caught:
        torch.zeros(1)
    assert type(caught.value) is kind


def test_the_failed_operation_holds_no_tensor() -> None:
    def run() -> tuple[Any, torch.OutOfMemoryError]:
        big = torch.zeros(1000)
        gone = weakref.ref(big)
        try:
            with fail_at(0):
                torch.add(big, 1)
        except torch.OutOfMemoryError as error:
            del big
            return gone, error
        raise AssertionError("nothing failed")

    gone, error = run()
    gc.collect()
    assert gone() is None, f"{error!r} keeps the arguments of the operation alive"


@pytest.mark.parametrize("n", [-1, 1.5, True, "3", None])
def test_n_is_a_count(n: Any) -> None:
    with pytest.raises(ValueError, match="n must be an integer of at least 0, not"), fail_at(n):
        pass


@pytest.mark.parametrize("error", ["boom", 3, "OOM"])
def test_an_unknown_fault_is_refused(error: Any) -> None:
    with pytest.raises(ValueError, match=f"error must be .* not {error!r}"), fail_at(0, error=error):
        pass
    with pytest.raises(ValueError, match=f"error must be .* not {error!r}"):
        FaultSchedule({0: error})


def test_faults_inside_virtual_memory() -> None:
    with virtual_memory("64MiB") as memory:
        with count_operations() as first:
            train(1)
        with count_operations() as second:
            train(1)
        assert first.operations == second.operations > 0
        gc.collect()
        before = memory.allocated_bytes
        with fail_at(first.operations // 2), pytest.raises(torch.OutOfMemoryError, match="simulated"):
            train(1)
        gc.collect()
        assert memory.allocated_bytes == before


def test_faults_around_virtual_memory() -> None:
    with virtual_memory("64MiB"), count_operations() as inside:
        train(1)
    for _ in range(2):  # the second time virtual memory knows the sizes: that must not change the count
        with count_operations() as around, virtual_memory("64MiB"):
            train(1)
        more = around.operations - inside.operations
        # torch 2.6 shows an outer mode one aten.detach more for each result of an operation in place.
        assert more == (12 if torch.__version__.startswith("2.6.") else 0)
    with (
        fail_at(7) as seen,
        virtual_memory("64MiB"),
        pytest.raises(torch.OutOfMemoryError, match="simulated"),
    ):
        train(1)
    assert seen.operations == 7


# faulty and FaultSchedule


def test_a_faulty_step_fails_in_the_calls_named_before_it_does_anything() -> None:
    done: list[int] = []
    step = faulty(done.append, {1: "oom", 3: OwnError("x")})
    step(10)
    with pytest.raises(torch.OutOfMemoryError):
        step(11)
    step(12)
    with pytest.raises(OwnError):
        step(13)
    step(14)
    assert done == [10, 12, 14]
    assert step.calls == 5


def test_or_after_it_has_done_everything() -> None:
    done: list[int] = []
    step = faulty(done.append, FaultSchedule({0: "interrupt"}), after=True)
    with pytest.raises(KeyboardInterrupt):
        step(10)
    step(11)
    assert done == [10, 11]


def test_a_step_keeps_its_result_and_arguments() -> None:
    step = faulty(lambda size, *, scale: size * scale, {})
    assert step(3, scale=4) == 12


@given(faults=st.sets(st.integers(0, 20)), numbers=st.lists(st.integers(0, 20)))
@examples(50)
def test_a_schedule_raises_for_its_numbers_and_no_others(faults: set[int], numbers: list[int]) -> None:
    schedule = FaultSchedule(dict.fromkeys(faults, "oom"))
    for number in numbers:
        try:
            schedule.check(number)
        except torch.OutOfMemoryError:
            assert number in faults
        else:
            assert number not in faults


def test_faults_are_numbered() -> None:
    with pytest.raises(TypeError, match="faults must map integers to errors, not 'three'"):
        FaultSchedule({"three": "oom"})  # type: ignore[dict-item]


# simulated_oom


@pytest.mark.parametrize("kind", list(_OOM_TEXTS))
def test_every_kind_is_one_that_we_see_as_out_of_memory(kind: str) -> None:
    error = simulated_oom(kind)
    assert oom.classify(error) == "oom"
    with pytest.raises(type(error)):
        raise error


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of cuda, .* not 'tpu'"):
        simulated_oom("tpu")


def test_the_other_fault_is_no_memory_error() -> None:
    assert oom.classify(_made("error")) == "error"


# FakeDevice


def test_a_fake_device_is_a_device() -> None:
    device = FakeDevice("1GiB")
    assert isinstance(device, Device)
    assert resolve_device(device) is device
    assert (device.name, device.total_bytes(), device.budget_bytes()) == ("fake:0", 2**30, 2**30)


@given(
    capacity=st.integers(1, 10_000),
    held=st.integers(0, 10_000),
    uses=st.lists(st.integers(0, 10_000), max_size=8),
    split=st.sampled_from([0.0, 0.1, 0.5]),
    cached=st.sampled_from([0.0, 0.2]),
    budget=st.integers(1, 10_000),
)
@examples(200)
def test_its_books_are_honest(
    capacity: int, held: int, uses: list[int], split: float, cached: float, budget: int
) -> None:
    device = FakeDevice(capacity, split=split, cached=cached)
    budget, held = min(budget, capacity), min(held, capacity)
    with device.limit(budget):
        if held + int(held * split) > budget:
            with pytest.raises(torch.OutOfMemoryError):
                device.hold(held)
            assert device.held_bytes() == 0
            return
        device.hold(held)
        device.reset()
        highest = held
        for count in uses:
            live = held + count
            if live + int(live * split) > budget:
                with pytest.raises(torch.OutOfMemoryError):
                    device.use(count)
            else:
                device.use(count)
                highest = max(highest, live)
            peaks = device.peaks()
            assert peaks.allocated_bytes == highest
            assert peaks.reserved_bytes is not None
            assert highest <= peaks.reserved_bytes <= budget
            assert device.held_bytes() == held
        device.release(held)
    assert device.held_bytes() == 0
    assert device.budget_bytes() == capacity


def test_retries_come_when_the_cache_is_in_the_way_and_settle() -> None:
    device = FakeDevice(1000, cached=0.5, settles_after=2)
    device.use(600)
    assert (device.alloc_retries(), device.peaks()) == (0, Peaks(600, 900, 0))
    for expected in (0, 1, 1, 1):  # the second use since reset still retries, later ones don't
        assert device.alloc_retries() == expected
        device.use(900)
    assert device.peaks().reserved_bytes == 1000
    device.reset()
    device.use(900)
    assert device.alloc_retries() == 2, "after a reset the cache grows again"
    never = FakeDevice(1000, cached=0.5, settles_after=None)
    for _ in range(7):
        never.use(900)
    assert never.alloc_retries() == 7


def test_a_soak_can_fail() -> None:
    device = FakeDevice(1000, creep_bytes=10)
    for _ in range(10):
        device.use(900)
    with pytest.raises(torch.OutOfMemoryError):
        device.use(900)
    device.reset()
    device.use(900)


def test_a_device_like_a_cpu_reads_live_bytes_only() -> None:
    device = FakeDevice(1000, reserves=False, split=0.5, cached=0.5)
    device.use(1000)
    assert device.peaks() == Peaks(1000, None, None)
    assert device.alloc_retries() == 0


def test_limits_nest_and_go_back() -> None:
    device = FakeDevice(1000)
    with device.limit(600):
        with device.limit(300), pytest.raises(torch.OutOfMemoryError):
            device.use(301)
        with device.limit(900):
            assert device.budget_bytes() == 600
        device.use(600)
    device.use(1000)
    with pytest.raises(ValueError, match="budget must not exceed the 1000 B of fake:0, not 1001"):
        device.limit(1001)


def test_wrong_use_is_reported() -> None:
    with pytest.raises(ValueError, match="capacity_bytes must be bytes or text"):
        FakeDevice("much")
    device = FakeDevice(1000)
    with pytest.raises(TypeError, match="peak must be given"):
        device.step(1)
    with pytest.raises(ValueError, match="count_bytes must not be negative, not -1"):
        device.use(-1)
    device.hold(10)
    with pytest.raises(ValueError, match="count_bytes must be at most the 10 held, not 11"):
        device.release(11)


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        ({}, 274),  # (1024 - 200) / 3
        ({"cached": 0.2}, 274),  # retries, but they settle
        ({"creep_bytes": MiB}, 266),  # 25 steps creep by 25 MiB: what passes 3 steps dies in the soak
    ],
)
def test_a_search_runs_on_a_fake_device_without_tensors(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any], expected: int
) -> None:
    # no tensors, no garbage: collecting it 4 times a trial is all the time that this would take
    monkeypatch.setattr("batchfit._engine.trial.guarded_steps.gc", types.SimpleNamespace(collect=lambda: 0))
    device = FakeDevice("1GiB", peak=lambda size: 200 * MiB + size * 3 * MiB, **knobs)
    workload = batchfit.Workload(device.step, state=())
    with count_operations() as seen:
        fit = batchfit.find_batch_size(workload, device=device, tolerance=0.0)
    assert fit.batch_size == expected
    assert fit.sustained
    assert fit.peak_bytes == (200 + 3 * expected) * MiB
    assert fit.device == "fake:0"
    assert fit.budget_bytes == 2**30
    assert seen.operations == 0


def test_a_step_reads_exactly_what_peak_says() -> None:
    device = FakeDevice("1GiB", peak=lambda size: 100 * MiB + size * MiB)
    device.hold(50 * MiB)
    device.step(7)
    assert device.peaks().allocated_bytes == 107 * MiB
    assert device.held_bytes() == 50 * MiB
