"""The CUDA device against a real allocator: the limit limits, the readings are torch's, all is put back."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from batchfit._engine.device import gpu as caching_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.resolve import KnownDevice, known_devices, resolve_device

pytestmark = pytest.mark.gpu

MiB = 2**20
GiB = 2**30


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    """The first GPU, with nothing of an earlier test in its cache, and nothing left by this one."""
    gc.collect()
    found = CudaDevice(0)
    found.reset()
    held, budget = found.held_bytes(), allowed_bytes()
    yield found
    gc.collect()
    found.reset()
    assert found.held_bytes() == held, "the test has leaked tensors"
    assert allowed_bytes() == budget, "the limit was not put back"
    assert caching_memory.limits_set_by_us == {}


def allowed_bytes() -> int:
    """What the allocator would let this process reserve, where torch can tell."""
    total = torch.cuda.mem_get_info(0)[1]
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        return total
    return round(torch.cuda.get_per_process_memory_fraction(0) * total)


def block(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cuda:0")


def fill(kept: list[torch.Tensor]) -> None:
    while True:
        kept.append(block(20 * MiB))


def test_the_limit_limits_to_the_segment(device: CudaDevice) -> None:
    budget = torch.cuda.memory_reserved(0) + 512 * MiB
    with device.limit(budget):
        assert budget - 1 <= device.budget_bytes() <= budget
        kept: list[torch.Tensor] = []
        with pytest.raises(torch.OutOfMemoryError):
            fill(kept)
        # all but less than one more block could be had, and never more than the budget
        assert budget - 22 * MiB < torch.cuda.memory_reserved(0) <= budget
        del kept
        gc.collect()
    beyond = block(600 * MiB)
    assert beyond.nbytes == 600 * MiB


def test_an_odd_budget_is_not_rounded_up(device: CudaDevice) -> None:
    base = torch.cuda.memory_reserved(0)
    for budget, fits in ((256 * MiB - 1, False), (256 * MiB, True), (256 * MiB + 1, True)):
        with device.limit(base + budget):
            smaller = block(254 * MiB)
            assert torch.cuda.memory_reserved(0) <= base + budget
            del smaller
            if fits:
                assert block(256 * MiB).nbytes == 256 * MiB
                continue
            with pytest.raises(torch.OutOfMemoryError):
                block(256 * MiB)


def test_memory_in_the_cache_does_not_slip_past_the_limit(device: CudaDevice) -> None:
    cached = block(1 * GiB)
    del cached
    assert torch.cuda.memory_reserved(0) >= 1 * GiB
    with device.limit(device.held_bytes() + 256 * MiB), pytest.raises(torch.OutOfMemoryError):
        block(1 * GiB)


def test_nested_limits_and_errors_put_back_what_was(device: CudaDevice) -> None:
    base = torch.cuda.memory_reserved(0)
    with device.limit(base + 512 * MiB):
        with pytest.raises(AssertionError, match="on purpose"), device.limit(base + 256 * MiB):
            assert device.budget_bytes() > base + 256 * MiB, "on purpose"
        with device.limit(base + 768 * MiB):
            assert device.budget_bytes() <= base + 512 * MiB
        assert base + 512 * MiB - 1 <= device.budget_bytes() <= base + 512 * MiB


def test_a_fraction_of_the_users_stays(device: CudaDevice) -> None:
    if not hasattr(torch.cuda, "get_per_process_memory_fraction"):
        pytest.skip("needs a torch that can read the fraction")
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    try:
        before = allowed_bytes()
        assert before - 1 <= device.budget_bytes() <= before
        for _ in range(5):
            with device.limit(1 * GiB):
                assert device.budget_bytes() <= 1 * GiB
        assert allowed_bytes() == before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)


def test_peaks_are_torchs_own(device: CudaDevice) -> None:
    weights = torch.randn(1024, 1024, device="cuda:0", requires_grad=True)  # 4 MiB
    device.reset()
    loss = weights.sin().square().sum()  # no matrix product: cuBLAS would keep a workspace
    loss.backward()
    device.synchronize()
    peaks = device.peaks()
    assert peaks.allocated_bytes == torch.cuda.max_memory_allocated(0)
    assert peaks.reserved_bytes == torch.cuda.max_memory_reserved(0)
    assert device.held_bytes() == torch.cuda.memory_allocated(0)
    assert peaks.allocated_bytes >= device.held_bytes() + 8 * MiB
    assert peaks.split_bytes == torch.cuda.memory_stats(0)["inactive_split_bytes.all.peak"]
    del loss
    weights.grad = None
    device.reset()
    assert device.peaks().allocated_bytes == device.held_bytes()


def test_the_largest_block_is_read_while_it_is_cached(device: CudaDevice) -> None:
    blocks = [torch.empty(size * MiB, dtype=torch.uint8, device="cuda:0") for size in (40, 700, 3)]
    del blocks
    assert 700 * MiB <= (device.largest_bytes() or 0) <= 702 * MiB
    device.reset()
    assert (device.largest_bytes() or 0) < 700 * MiB


def test_the_budget_counts_what_this_process_has_reserved(device: CudaDevice) -> None:
    before = device.budget_bytes()
    big = block(4 * GiB)
    held = device.budget_bytes()
    assert abs(held - before) < 256 * MiB, "our own tensors are part of our budget"
    del big
    assert abs(device.budget_bytes() - before) < 256 * MiB, "and so is our cache"
    assert torch.cuda.memory_reserved(0) >= 4 * GiB
    assert device.budget_bytes() <= device.total_bytes()


def test_retries_are_counted(device: CudaDevice) -> None:
    before = device.alloc_retries()
    with device.limit(torch.cuda.memory_reserved(0) + 512 * MiB):
        first = block(300 * MiB)
        assert device.alloc_retries() == before
        del first  # stays in the cache, and is too small for the next
        second = block(400 * MiB)
        assert device.alloc_retries() == before + 1
        del second
    assert device.alloc_retries() == before + 1


def test_a_budget_beyond_the_gpu_is_refused(device: CudaDevice) -> None:
    with pytest.raises(ValueError, match=r"budget must not exceed the .* of cuda:0, not"):
        device.limit(device.total_bytes() + 1)
    with device.limit(device.total_bytes()):  # more than is free: nothing is switched
        pass


def test_the_device_is_found(device: CudaDevice) -> None:
    assert resolve_device("cuda") == CudaDevice(torch.cuda.current_device())
    assert resolve_device("cuda:0") == device
    model = torch.nn.Linear(2, 2).to("cuda:0")
    assert resolve_device(None, near=[torch.zeros(1), model]) == device
    with pytest.raises(ValueError, match=r"device must be one of 'cuda:0', .*'cpu', not 'cuda:99'"):
        resolve_device("cuda:99")
    first = known_devices()[0]
    assert isinstance(first, KnownDevice)
    assert first.description == torch.cuda.get_device_name(0)
    assert first.tested
    assert first.free_bytes is not None
    assert first.total_bytes is not None
    assert 0 < first.free_bytes <= first.total_bytes
