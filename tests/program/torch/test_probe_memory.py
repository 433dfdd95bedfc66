"""How the probe limits and reads GPUs, on a fake of torch.cuda; which OOMs count as the program's."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import FakeCuda, MiB

from batchfit._engine.torch_private import allocator
from batchfit._program.probe.memory import GpuMemory, SwallowedOoms, gpus_of

Observer = Callable[[int, int, int, int], None]


class CountingCuda(FakeCuda):
    """With the counts as torch nests them."""

    ooms = 0

    def memory_stats_as_nested_dict(self, index: int) -> dict[str, Any]:
        peak, reserved = self.peak[index]
        return {
            "allocated_bytes": {"all": {"peak": peak, "current": self.live[index]}},
            "reserved_bytes": {"all": {"peak": reserved}},
            "num_alloc_retries": self.retries[index],
            "num_ooms": self.ooms,
        }

    def is_initialized(self) -> bool:
        return bool(self.opened)

    def current_device(self) -> int:
        return self.current


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> CountingCuda:
    """A fake in the place of torch.cuda's functions."""
    fake = CountingCuda()
    for name in (
        "memory_stats_as_nested_dict",
        "is_initialized",
        "current_device",
        "mem_get_info",
        "memory_reserved",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    ):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Observer]:
    """Those that were given to the allocator."""
    found: list[Observer] = []

    def observe(call: Observer) -> bool:
        found.append(call)
        return True

    monkeypatch.setattr(allocator, "observe_ooms", observe)
    return found


def test_several_gpus_are_limited_and_the_fullest_is_read(
    cuda: CountingCuda, observers: list[Observer]
) -> None:
    memory = GpuMemory(500 * MiB, lambda text: None)
    assert (memory.name, memory.read(), memory.budget_bytes()) == ("", {}, None)
    memory.use({1, 0})
    assert cuda.allowed == {0: 500 * MiB, 1: 500 * MiB}
    cuda.allocate(100 * MiB, 0)
    cuda.allocate(300 * MiB, 1)
    cuda.free(200 * MiB, 1)
    cuda.retries[0] = 2
    read = memory.read()
    assert (read["peak_bytes"], read["reserved_bytes"]) == (300 * MiB, 300 * MiB)
    assert (read["held_bytes"], read["alloc_retries"], read["index"]) == (100 * MiB, 2, 1)
    assert (memory.name, memory.budget_bytes()) == ("cuda:0", 500 * MiB)
    assert len(observers) == 1


def test_the_current_gpu_where_no_pass_has_shown_one(cuda: CountingCuda, observers: list[Observer]) -> None:
    memory = GpuMemory(None, lambda text: None)
    memory.begin()
    assert memory.name == ""  # nothing runs on a GPU: it is not initialized
    cuda.current = 1
    cuda.allocate(10 * MiB, 1)
    cuda.opened.add(1)
    memory.begin()
    assert (memory.name, memory.budget_bytes(), cuda.allowed) == ("cuda:1", 1000 * MiB, {})


def test_where_the_allocator_cannot_be_observed_its_count_of_ooms_is_read(
    cuda: CountingCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocator, "observe_ooms", lambda call: False)
    texts: list[str] = []
    memory = GpuMemory(500 * MiB, texts.append)
    memory.use({0})
    memory.step_ended(1)
    assert texts == []
    cuda.ooms = 1
    memory.step_ended(2)
    memory.step_ended(3)
    assert texts == ["CUDA out of memory; the program went on after it"]


class Monitoring:
    """`sys.monitoring` as far as it is used."""

    events = types.SimpleNamespace(RAISE=512)

    def __init__(self) -> None:
        self.on = 0
        self.call: Any = None

    def get_tool(self, number: int) -> str | None:
        return "coverage" if number == 4 else None

    def use_tool_id(self, number: int, name: str) -> None:
        assert number == 3

    def register_callback(self, number: int, event: int, call: Any) -> None:
        self.call = call

    def set_events(self, number: int, events: int) -> None:
        self.on = events


def test_what_a_library_handles_by_itself_is_no_oom_of_the_program(
    observers: list[Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitoring, texts = Monitoring(), []
    monkeypatch.setattr(sys, "monitoring", monitoring, raising=False)
    watch = SwallowedOoms(texts.append)
    watch.start()
    watch.start()
    observers[0](0, 4096, 2**30, 12)
    assert monitoring.on == 512
    monitoring.call(None, 0, KeyError())
    assert watch.step_ended()
    assert (texts, monitoring.on) == ([], 0)
    observers[0](0, 4096, 2**30, 12)
    monitoring.call(None, 0, torch.OutOfMemoryError())
    assert texts == ["CUDA out of memory: 4096 bytes were requested, and 12 were free"]
    assert monitoring.on == 0
    assert len(observers) == 1


def test_before_python_3_12_every_one_counts(
    observers: list[Observer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "monitoring", None, raising=False)
    texts: list[str] = []
    watch = SwallowedOoms(texts.append)
    watch.start()
    observers[0](0, 4096, 2**30, 12)
    assert len(texts) == 1


def test_the_gpus_of_a_module_are_those_of_its_weights_and_inputs() -> None:
    assert gpus_of(torch.nn.Linear(2, 2), [{"x": torch.ones(1)}]) == set()
