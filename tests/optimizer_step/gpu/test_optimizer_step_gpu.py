"""The atomic step on a real allocator: as by hand, whole or undone at every cap, never waiting."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_private import gpu_sleep

from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.optimizer_step import step as stepping
from batchfit._engine.optimizer_step.step import step
from batchfit.errors import StepInterruptedError

pytestmark = pytest.mark.gpu

MiB = 2**20
OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "single": {"foreach": False},
    "fused": {"fused": True},
    "capturable": {"foreach": True, "capturable": True},
}


@pytest.fixture(autouse=True)
def device(caplog: pytest.LogCaptureFixture) -> Iterator[CudaDevice]:
    caplog.set_level(logging.ERROR, logger="batchfit")
    gc.collect()
    found = CudaDevice(0)
    found.reset()
    yield found
    gc.collect()
    found.reset()


def made(count: int = 12, **options: Any) -> torch.optim.AdamW:
    torch.manual_seed(0)
    shapes = [(1024, 1024 * (1 + i % 3)) if i % 3 else (1024,) for i in range(count)]
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    half = count // 2
    groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 1e-2}]
    return torch.optim.AdamW(groups, **options)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def give_gradients(optimizer: torch.optim.Optimizer, seed: int, scaler: Any = None) -> None:
    torch.manual_seed(seed)
    if scaler is not None:
        scaler.scale(torch.ones((), device="cuda"))  # it makes its scale when it is first asked
    for parameter in parameters_of(optimizer):
        parameter.grad = torch.randn_like(parameter)


def values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that a step may move, in host memory."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().cpu() for tensor in [*parameters_of(optimizer), *states]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("scaled", [False, True])
def test_equals_a_step_by_hand(name: str, scaled: bool) -> None:
    optimizers = [made(**OPTIONS[name]) for _ in range(2)]
    scalers = [torch.amp.GradScaler("cuda", init_scale=4.0) if scaled else None for _ in range(2)]
    for number in range(3):
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            give_gradients(optimizer, number, scaler)
        ours = step(optimizers[0], scaler=scalers[0], clip_norm=1.0, rollback=number == 1)
        if scalers[1] is not None:
            scalers[1].unscale_(optimizers[1])
        theirs = torch.nn.utils.clip_grad_norm_(parameters_of(optimizers[1]), 1.0)
        if scalers[1] is None:
            optimizers[1].step()
        else:
            scalers[1].step(optimizers[1])
            scalers[1].update()
        assert ours is not None
        assert torch.equal(ours, theirs)
        assert same(values(optimizers[0]), values(optimizers[1]))


@pytest.mark.parametrize("name", ["foreach", "single", "fused"])
@pytest.mark.parametrize("steps", [0, 2])
def test_every_cap_ends_in_a_whole_step_or_none(name: str, steps: int, device: CudaDevice) -> None:
    judged = made(**OPTIONS[name])
    for number in range(steps + 1):
        give_gradients(judged, number)
        judged.step()
    expected = values(judged)
    del judged
    seen: Counter[str] = Counter()
    for spare in range(0, 400, 20):
        optimizer = made(**OPTIONS[name])
        for number in range(steps):
            give_gradients(optimizer, number)
            step(optimizer)
        give_gradients(optimizer, steps)
        before = values(optimizer)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved()
        with device.limit(held + spare * MiB):
            try:
                step(optimizer)
            except StepInterruptedError:
                seen["interrupted"] += 1
                continue
            except torch.OutOfMemoryError:
                seen["unchanged"] += 1
                assert same(values(optimizer), before)
                continue
        seen["stepped"] += 1
        assert same(values(optimizer), expected)
        del optimizer
    print(f"{name}, after {steps} steps: {dict(seen)}")
    assert seen["stepped"]
    assert not seen["interrupted"], "what was reserved was not what the step took"


def test_nothing_waits_in_the_steady_state() -> None:
    """A kernel that spins for a second is queued first: a step that waited would come back after it."""
    for name in ("foreach", "fused"):
        optimizer = made(**OPTIONS[name])
        give_gradients(optimizer, 0)
        for _ in range(stepping.RECORDED_STEPS + 1):
            step(optimizer, clip_norm=1.0)
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        gpu_sleep(2_000_000_000)
        done.record()
        step(optimizer, clip_norm=1.0)
        assert not done.query(), "the step has waited for the device"
        torch.cuda.synchronize()


def test_what_it_costs() -> None:
    """Printed, not judged: host time per step beside a plain step, 148 tensors as in GPT-2 small."""
    shapes = [(50257, 768), (1024, 768)] + 12 * [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    shapes += 12 * [(2304,), (768,), (3072,), (768,), (768,), (768,), (768,), (768,)] + [(768,), (768,)]
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda")) for shape in shapes]
    assert len(parameters) == 148
    for name in ("foreach", "fused"):
        optimizer = torch.optim.AdamW(parameters, **OPTIONS[name])
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        for _ in range(10):
            step(optimizer)
        times: dict[str, list[float]] = {"plain": [], "ours": [], "rollback": []}
        for number in range(60):
            for kind in times:
                if kind == "rollback" and number >= 3:
                    continue
                torch.cuda.synchronize()
                begun = time.perf_counter()
                if kind == "plain":
                    optimizer.step()
                else:
                    step(optimizer, rollback=kind == "rollback")
                times[kind].append(time.perf_counter() - begun)
        figures = {kind: f"{statistics.median(some) * 1e6:.0f} us" for kind, some in times.items()}
        stats = [torch.cuda.memory_reserved() // MiB, torch.cuda.memory_allocated() // MiB]
        print(f"{name}: {figures}; reserved, allocated MiB: {stats}")
        del optimizer
