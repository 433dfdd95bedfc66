"""Devices: the readings, the limit, the choice; cuda, xpu and mps against fakes that keep books honestly."""

from __future__ import annotations

import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import examples
from fake_cuda import AsyncCuda, FakeCuda, MiB, OldCuda, OldXpu
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from torch_private import C, subclass

from batchfit._engine.device import gpu as caching_memory
from batchfit._engine.device import resolve as device_module
from batchfit._engine.device.device import (
    CpuDevice,
    Device,
    Peaks,
    Ram,
    check_budget,
    physical_bytes,
    read_ram,
)
from batchfit._engine.device.gpu import CudaDevice, MpsDevice, XpuDevice, fraction_of, is_capped
from batchfit._engine.device.resolve import KnownDevice, known_devices, resolve_device
from batchfit._engine.device.tensors import own_bytes
from batchfit._engine.virtual_memory.memory import virtual_memory
from batchfit.errors import BatchfitError

CUDAS = pytest.mark.parametrize("cuda", [FakeCuda(), OldCuda()], ids=["new", "old"])


# cuda and xpu


def test_the_fakes_lack_what_they_should() -> None:
    assert not hasattr(OldCuda(), "get_per_process_memory_fraction")
    assert not hasattr(OldXpu(), "mem_get_info")
    assert hasattr(FakeCuda(), "mem_get_info")


def test_readings_are_the_allocators() -> None:
    cuda = FakeCuda(used_by_others=100 * MiB)
    device = CudaDevice(1, backend=cuda)
    assert (device.name, device.total_bytes()) == ("cuda:1", 1000 * MiB)
    cuda.allocate(301 * MiB, 1)
    cuda.free(200 * MiB, 1)
    assert device.held_bytes() == 101 * MiB
    assert device.peaks() == Peaks(301 * MiB, 302 * MiB, 77)
    # 598 MiB are free, and the 302 MiB that this process has reserved are its own to use
    assert device.budget_bytes() == 900 * MiB
    cuda.retries[1] = 5
    assert device.alloc_retries() == 5
    device.reset()
    assert device.peaks() == Peaks(101 * MiB, 102 * MiB, 77)
    assert device.budget_bytes() == 900 * MiB
    assert cuda.opened == {1}, "no context on a device that is not ours"


def test_a_device_is_capped_where_a_memory_fraction_is_or_would_be_set() -> None:
    device = CudaDevice(1, backend=FakeCuda())
    all_of_it = device.budget_bytes()
    assert not is_capped(device, all_of_it)
    assert is_capped(device, all_of_it - MiB)
    with device.limit(100 * MiB):
        assert is_capped(device, device.budget_bytes()), "a fraction is set, whoever set it"
    assert not is_capped(device, all_of_it)
    assert not is_capped(resolve_device("cpu"), 1), "nothing but a caching allocator has one"


def test_another_allocator_is_read_by_its_live_tensors() -> None:
    cuda = AsyncCuda()
    device = CudaDevice(0, backend=cuda)
    assert not device.is_torchs_own
    assert CudaDevice(0, backend=FakeCuda()).is_torchs_own
    assert device.budget_bytes() == 1000 * MiB
    with device.limit(100 * MiB):
        assert device.budget_bytes() == 100 * MiB
        cuda.allocate(100 * MiB)
        with pytest.raises(torch.OutOfMemoryError):
            cuda.allocate(1)
        assert device.peaks() == Peaks(100 * MiB, None, None)
        cuda.free(100 * MiB)
    assert cuda.allowed[0] == 1000 * MiB, "all of it: what was there before cannot be put back"


def test_the_largest_block_is_the_largest_segment_of_the_device() -> None:
    cuda = FakeCuda()
    device = CudaDevice(1, backend=cuda)
    assert device.largest_bytes() is None, "nothing was allocated"
    cuda.segments = [
        {"device": index, "total_size": size * MiB, "is_expandable": False}
        for index, size in ((0, 900), (1, 20), (1, 300), (1, 2))
    ]
    assert device.largest_bytes() == 300 * MiB
    cuda.segments.append({"device": 1, "total_size": 8 * MiB, "is_expandable": True})
    assert device.largest_bytes() is None, "a segment that grows is no block"
    assert CudaDevice(0, backend=cuda).largest_bytes() == 900 * MiB


def segment(address: int, *blocks: tuple[int, str], kind: str = "large", index: int = 0) -> dict[str, Any]:
    return {
        "device": index,
        "address": address,
        "segment_type": kind,
        "total_size": sum(size for size, _ in blocks),
        "blocks": [{"size": size, "state": state, "address": 0} for size, state in blocks],
    }


def test_a_mark_is_where_large_blocks_are_and_what_was_asked_for() -> None:
    cuda = FakeCuda()
    device = CudaDevice(0, backend=cuda)
    large = segment(4096, (20 * MiB, "active_allocated"), (10 * MiB, "inactive"))
    small = segment(512, (MiB, "inactive"), (MiB, "active_allocated"), kind="small")
    cuda.segments = [small, large]
    mark = device.mark()
    assert mark is not None
    cuda.segments = [large, segment(512, (MiB, "active_allocated"), (MiB, "inactive"), kind="small")]
    assert device.mark() == mark, "small blocks may lie where they like"
    cuda.live[0] += 512
    assert device.mark() != mark, "but not become more and more"
    cuda.live[0] -= 512
    cuda.others = 990 * MiB
    tight = device.mark()
    cuda.segments[1] = small
    assert tight != device.mark(), "where there is no room for more segments, they count"
    cuda.others = 0
    others = {
        "a larger piece": segment(4096, (21 * MiB, "active_allocated"), (9 * MiB, "inactive")),
        "freed": segment(4096, (20 * MiB, "inactive"), (10 * MiB, "inactive")),
        "elsewhere": segment(8192, (20 * MiB, "active_allocated"), (10 * MiB, "inactive")),
    }
    for why, other in others.items():
        cuda.segments = [small, other]
        assert getattr(device.mark(), "layout", None) != mark.layout, why
    cuda.segments = [small, segment(600, (2 * MiB, "inactive"), kind="small"), large]
    assert getattr(device.mark(), "layout", None) != mark.layout, "one more segment for small blocks"
    cuda.allocate(5)
    cuda.allocate(7)
    cuda.retries[0] += 1
    counted = device.mark()
    assert counted is not None
    assert (counted.retries, counted.requests, counted.requested_bytes) == (1, 2, 12)


def test_a_mark_is_of_all_devices_that_the_process_uses() -> None:
    """Layers on several of them: any may still wander, retry, or be asked for more each time."""
    cuda = FakeCuda()
    device = CudaDevice(0, backend=cuda)
    own = segment(4096, (20 * MiB, "inactive"))
    seen = set()
    for other in ((9 * MiB, "active_allocated"), (9 * MiB, "inactive")):
        cuda.segments = [own, segment(8192, other, index=1)]
        seen.add(device.mark())
    cuda.allocate(5 * MiB, 1)
    cuda.free(5 * MiB, 1)
    seen.add(device.mark())
    cuda.retries[1] += 1
    seen.add(device.mark())
    assert len(seen) == 4
    assert cuda.opened <= {0, 1}
    cuda.segments = [own]
    assert device.mark() == device.mark()


def test_no_mark_while_history_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot then carries a stack for each block: seconds, after every step."""
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    for recorded in (True, False):
        monkeypatch.setattr(C, "_cuda_isHistoryEnabled", lambda now=recorded: now, raising=False)
        assert (CudaDevice(0, backend=cuda).mark() is None) is recorded


def test_who_has_no_such_allocator_has_no_mark() -> None:
    assert CudaDevice(0, backend=AsyncCuda()).mark() is None
    assert XpuDevice(0, backend=OldXpu()).mark() is None, "it does not count what is asked for"


def test_another_allocator_is_not_asked_about_its_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> bool:
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory")

    cuda = AsyncCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(C, "_cuda_isHistoryEnabled", refused, raising=False)
    assert CudaDevice(0, backend=cuda).mark() is None


def test_who_cannot_tell_the_largest_block_says_none() -> None:
    assert CudaDevice(0, backend=AsyncCuda()).largest_bytes() is None


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [
        ("nt", "10", True),
        ("posix", "5.15.153.1-microsoft-standard-WSL2", True),
        ("posix", "4.4.0-19041-Microsoft", True),
        ("posix", "6.8.0-45-generic", False),
    ],
)
def test_where_a_driver_gives_out_ram(system: str, release: str, spills: bool) -> None:
    assert caching_memory.spills_to_ram(system, release) is spills


def test_a_driver_that_gives_out_ram_is_held_to_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(used_by_others=100 * MiB)
    cuda.may_reserve = lambda segments, index: segments <= cuda.allowed.get(index, 2**60)  # type: ignore[method-assign]
    device = CudaDevice(0, backend=cuda)
    cuda.allocate(2000 * MiB)  # the card has 1000 MiB
    cuda.free(2000 * MiB)
    device.reset()
    monkeypatch.setattr(caching_memory, "spills_to_ram", lambda: True)
    for budget in (900 * MiB, 1000 * MiB):  # all that is free, and more than that
        with device.limit(budget):
            assert cuda.allowed[0] == 900 * MiB
            with pytest.raises(torch.OutOfMemoryError):
                cuda.allocate(901 * MiB)
        assert cuda.allowed[0] == 1000 * MiB
    other = FakeCuda()
    with XpuDevice(0, backend=other).limit(1000 * MiB):
        assert other.allowed == {}, "another driver, which is not known to do so"


@pytest.mark.parametrize("make", [FakeCuda, OldCuda])
def test_limit_holds_and_is_put_back(make: type[FakeCuda]) -> None:
    cuda = make()
    device = CudaDevice(1, backend=cuda)
    with device.limit(100 * MiB):
        assert device.budget_bytes() == 100 * MiB
        cuda.allocate(100 * MiB, 1)
        with pytest.raises(torch.OutOfMemoryError):
            cuda.allocate(1, 1)
        cuda.allocate(500 * MiB, 0)  # the other device is not limited
    assert device.budget_bytes() == 1000 * MiB
    cuda.allocate(500 * MiB, 1)
    assert caching_memory.limits_set_by_us == {}


def test_a_fraction_that_was_set_caps_the_budget_and_comes_back_exactly() -> None:
    cuda = FakeCuda(total=139 * 1024 * MiB + 12345)
    cuda.set_per_process_memory_fraction(0.63, 0)  # reads back a byte short
    allowed = cuda.allowed[0]
    device = CudaDevice(0, backend=cuda)
    for _ in range(100):
        assert allowed - 1 <= device.budget_bytes() <= allowed
        with device.limit(100 * MiB):
            assert cuda.allowed[0] == 100 * MiB
        assert cuda.allowed[0] == allowed
    with device.limit(allowed + 5 * MiB):  # the limit around it stays
        assert cuda.allowed[0] == allowed


@CUDAS
def test_nested_limits_only_go_down(cuda: FakeCuda) -> None:
    device, again = CudaDevice(0, backend=cuda), CudaDevice(0, backend=cuda)
    with device.limit(400 * MiB):
        with again.limit(100 * MiB):
            assert device.budget_bytes() == 100 * MiB
            with again.limit(300 * MiB):
                assert device.budget_bytes() == 100 * MiB
        assert device.budget_bytes() == 400 * MiB
    assert device.budget_bytes() == 1000 * MiB


@CUDAS
@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_limit_is_put_back_after_an_error(cuda: FakeCuda, error: BaseException) -> None:
    device = CudaDevice(0, backend=cuda)
    with pytest.raises(type(error)), device.limit(100 * MiB):
        raise error
    assert device.budget_bytes() == 1000 * MiB
    assert caching_memory.limits_set_by_us == {}


def test_a_dead_context_does_not_hide_the_error_that_killed_it() -> None:
    cuda = FakeCuda()

    def die() -> None:
        with CudaDevice(0, backend=cuda).limit(100 * MiB):
            cuda.dead = True
            raise RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        die()
    assert caching_memory.limits_set_by_us == {}


def test_nothing_is_switched_when_the_budget_is_all_there_is() -> None:
    cuda = FakeCuda(used_by_others=100 * MiB)
    with CudaDevice(0, backend=cuda).limit(900 * MiB):
        assert cuda.allowed == {}
    with CudaDevice(0, backend=cuda).limit(900 * MiB - 1):
        assert cuda.allowed == {0: 900 * MiB - 1}


def test_limit_gives_the_cache_back_first() -> None:
    cuda = FakeCuda()
    cuda.allocate(500 * MiB)
    cuda.free(500 * MiB)
    with CudaDevice(0, backend=cuda).limit(100 * MiB), pytest.raises(torch.OutOfMemoryError):
        cuda.allocate(200 * MiB)  # would have come out of the cache, which no limit sees


@given(total=st.integers(1, 2**42), share=st.floats(0, 1))
@examples(300)
def test_rounding_never_allows_more_than_the_budget_nor_a_byte_less(total: int, share: float) -> None:
    budget = max(1, int(total * share))
    fraction = fraction_of(budget, total)
    assert 0 <= fraction <= 1
    assert int(fraction * total) == budget


def test_the_larger_of_two_totals_is_the_safe_one() -> None:
    cuda = FakeCuda(total=1000 * MiB)
    cuda.get_device_properties = lambda index: types.SimpleNamespace(  # type: ignore[method-assign]
        total_memory=1010 * MiB
    )
    with CudaDevice(0, backend=cuda).limit(500 * MiB):
        assert cuda.allowed[0] <= 500 * MiB
        assert cuda.get_per_process_memory_fraction(0) * 1010 * MiB <= 500 * MiB


def test_xpu_does_what_its_torch_can() -> None:
    device = XpuDevice(0, backend=FakeCuda())
    with device.limit(100 * MiB):
        assert device.budget_bytes() == 100 * MiB
    old = OldXpu()
    device = XpuDevice(0, backend=old)
    old.allocate(100 * MiB)
    assert device.budget_bytes() == 1000 * MiB
    assert device.peaks() == Peaks(100 * MiB, 100 * MiB, None)
    assert device.alloc_retries() == 0
    with device.limit(1000 * MiB):
        pass
    with pytest.raises(BatchfitError, match="cannot limit the memory of xpu:0"), device.limit(10 * MiB):
        pass


# mps


class FakeMps:
    """torch.mps: what the driver gave stays with the process until the cache is emptied; no peak is kept."""

    def __init__(self, recommended: int = 1000 * MiB) -> None:
        self.recommended = recommended
        self.live = 0
        self.driver = 0
        self.allowed = int(1.7 * recommended)
        self.syncs = 0

    def allocate(self, size: int) -> None:
        if max(self.driver, self.live + size) > self.allowed:
            raise RuntimeError("MPS backend out of memory")
        self.live += size
        self.driver = max(self.driver, self.live)

    def free(self, size: int) -> None:
        self.live -= size

    def current_allocated_memory(self) -> int:
        return self.live

    def driver_allocated_memory(self) -> int:
        return self.driver

    def recommended_max_memory(self) -> int:
        return self.recommended

    def empty_cache(self) -> None:
        self.driver = self.live

    def synchronize(self) -> None:
        self.syncs += 1

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        assert isinstance(fraction, float)
        assert 0 <= fraction <= 2
        self.allowed = int(fraction * self.recommended)


def test_mps_peaks_are_those_of_the_moments_it_looked_at() -> None:
    mps = FakeMps()
    device = MpsDevice(backend=mps)
    mps.allocate(100 * MiB)
    device.reset()
    mps.allocate(300 * MiB)
    mps.free(250 * MiB)
    device.synchronize()  # the step's end
    mps.free(50 * MiB)
    assert device.held_bytes() == 100 * MiB
    assert device.peaks() == Peaks(150 * MiB, 400 * MiB)
    assert device.alloc_retries() == 0
    assert mps.syncs == 2
    device.reset()
    assert device.peaks() == Peaks(100 * MiB, 100 * MiB)


def test_mps_limit_holds_and_torchs_own_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    mps = FakeMps()
    device = MpsDevice(backend=mps)
    assert device.total_bytes() == device.budget_bytes() == 1000 * MiB
    with device.limit(1000 * MiB):  # all that is recommended: torch alone would go further
        assert mps.allowed == 1000 * MiB
        with device.limit(200 * MiB):
            assert mps.allowed == device.budget_bytes() == 200 * MiB
            with device.limit(500 * MiB):
                assert mps.allowed == 200 * MiB
            with pytest.raises(RuntimeError, match="out of memory"):
                mps.allocate(200 * MiB + 1)
        assert mps.allowed == 1000 * MiB
    assert mps.allowed == 1700 * MiB
    assert caching_memory.limits_set_by_us == {}
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.2")
    with pytest.raises(ValueError, match="x"), device.limit(200 * MiB):
        raise ValueError("x")
    assert mps.allowed == 1200 * MiB


# cpu


def test_the_cpu_counts_inside_its_limit_only() -> None:
    device = CpuDevice()
    for reading in (device.held_bytes, device.peaks, device.reset):
        with pytest.raises(RuntimeError, match=r"only counted inside device\.limit"):
            reading()
    with device.limit(64 * MiB):
        before = device.held_bytes()
        device.reset()
        tensor = torch.zeros(2 * MiB, dtype=torch.uint8)
        assert device.held_bytes() - before == 2 * MiB
        del tensor
        assert device.held_bytes() == before
        assert device.peaks() == Peaks(before + 2 * MiB, None, None)
        device.reset()
        assert device.peaks().allocated_bytes == before
        assert device.budget_bytes() == device.total_bytes() == 64 * MiB
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(65 * MiB, dtype=torch.uint8)
    assert torch.zeros(65 * MiB, dtype=torch.uint8).nbytes == 65 * MiB
    assert device.alloc_retries() == 0
    device.synchronize()


def test_the_cpu_limit_lowers_a_virtual_memory_that_is_there() -> None:
    device = CpuDevice()
    with virtual_memory(64 * MiB) as memory:
        assert device.budget_bytes() == 64 * MiB
        with device.limit(32 * MiB):
            assert memory.limit_bytes == 32 * MiB == device.budget_bytes()
        assert memory.limit_bytes == 64 * MiB
        with pytest.raises(ValueError, match=r"budget must not exceed the 64\.0 MiB of cpu, not 67108865"):
            device.limit(64 * MiB + 1)


def test_another_thread_is_reported_that_nothing_is_counted_there() -> None:
    said: list[str] = []

    def look() -> None:
        try:
            CpuDevice().held_bytes()
        except RuntimeError as error:
            said.append(str(error))

    with CpuDevice().limit(64 * MiB):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert "in the thread that entered it" in said[0]


def test_the_budget_of_a_cpu_is_what_the_system_leaves() -> None:
    ram = read_ram()
    assert 0 < CpuDevice().budget_bytes() <= ram.total_bytes == CpuDevice().total_bytes()
    physical = physical_bytes()
    assert ram.total_bytes <= physical + 2**30


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:  1000 kB\nMemFree:  100 kB\nMemAvailable:  800 kB\nHugePages_Total:  0\n"


def test_ram_without_containers(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/\n")
    assert read_ram(tmp_path) == Ram(1000 * 1024, 800 * 1024)


def test_ram_under_cgroup_2_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/outer/inner\n")
    for group, limit, used in (("outer", "512000", "300000"), ("outer/inner", "max", "100000")):
        folder = tmp_path / "sys/fs/cgroup" / group
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(used + "\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    # of the 300,000 in use 100,000 are cached files, which the system gives back
    assert read_ram(tmp_path) == Ram(512000, 312000)


def test_ram_under_cgroup_1(tmp_path: Path) -> None:
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="9:cpu:/x\n4:hugetlb,memory:/job\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory"
    (folder / "job").mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder / "memory.usage_in_bytes").write_text("900000\n")
    (folder / "job/memory.limit_in_bytes").write_text("600000\n")
    (folder / "job/memory.usage_in_bytes").write_text("700000\n")
    assert read_ram(tmp_path) == Ram(600000, 0)


def test_ram_where_there_is_no_proc(tmp_path: Path) -> None:
    physical = physical_bytes()
    assert read_ram(tmp_path) == Ram(physical, physical)
    assert physical > 2**28


# the budget


@pytest.mark.parametrize("wrong", [True, 1.5, "24GiB", None])
def test_a_budget_is_a_number_of_bytes(wrong: Any) -> None:
    with pytest.raises(TypeError, match="budget must be a number of bytes, not"):
        check_budget(CpuDevice(), wrong)


@pytest.mark.parametrize("device", [CudaDevice(0, backend=FakeCuda()), MpsDevice(backend=FakeMps())])
def test_a_budget_beyond_the_device_is_refused_before_any_work(device: Any) -> None:
    with pytest.raises(ValueError, match=r"budget must not exceed the 1000\.0 MiB of .*, not 1048576001 \("):
        device.limit(1000 * MiB + 1)
    with pytest.raises(ValueError, match="budget must be positive, not 0"):
        device.limit(0)
    backend = device.backend
    assert getattr(backend, "opened", set()) == set()
    assert getattr(backend, "syncs", 0) == 0


def test_a_budget_beyond_the_ram_is_refused() -> None:
    with pytest.raises(ValueError, match=r"budget must not exceed the .* of cpu, not"):
        CpuDevice().limit(2**60)


# the choice


def pretend(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, xpu: int = 0, mps: bool = False) -> None:
    monkeypatch.delenv("PYTORCH_NO_CUDA_MEMORY_CACHING", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: cuda - 1)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu > 0)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: xpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("cuda", "cuda:1"),  # the current one
        ("cuda:0", "cuda:0"),
        (torch.device("cuda", 1), "cuda:1"),
        ("xpu", "xpu:0"),
        ("mps", "mps"),
        ("cpu", "cpu"),
        ("cpu:0", "cpu"),
        (None, "cuda:0"),
    ],
)
def test_a_device_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, spec: Any, name: str) -> None:
    pretend(monkeypatch, cuda=2, xpu=1, mps=True)
    found = resolve_device(spec)
    assert found.name == name
    assert isinstance(found, Device)
    assert resolve_device(found) is found


@pytest.mark.parametrize(
    "wrong", ["foo", "cuda:2", "cuda:-1", "cuda:x", "", "meta", "CUDA", torch.device("meta")]
)
def test_an_unknown_device_names_those_that_are_there(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    pretend(monkeypatch, cuda=2)
    with pytest.raises(ValueError, match="device must be one of 'cuda:0', 'cuda:1', 'cpu', not '") as caught:
        resolve_device(wrong)
    assert f"not {str(wrong)!r}" in str(caught.value)


@pytest.mark.parametrize("wrong", [True, 1.5, ["cuda:0"]])
def test_a_device_is_a_name_or_an_index(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"device must be text such as 'cuda:0', an index, a UUID or"):
        resolve_device(wrong)


@pytest.mark.parametrize("spec", [1, "1"])
def test_an_index_is_that_of_the_accelerator(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    pretend(monkeypatch, cuda=2)
    assert resolve_device(spec).name == "cuda:1"
    pretend(monkeypatch, xpu=2)
    assert resolve_device(spec).name == "xpu:1"


@pytest.mark.parametrize("wrong", [2, "2", -1, "-1", "1.0", "²"])
def test_a_wrong_index_names_those_that_are_there(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    pretend(monkeypatch, cuda=2)
    with pytest.raises(ValueError, match="device must be one of 'cuda:0', 'cuda:1', 'cpu', not"):
        resolve_device(wrong)


UUIDS = ("8932f937-d72c-4106-c12f-20bd9faed9f6", "89aaaaaa-0000-1111-2222-333333333333")


def pretend_uuids(monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...] = UUIDS) -> None:
    """CUDA devices with these UUIDs, as torch gives them: without a prefix, not as text."""
    pretend(monkeypatch, cuda=len(uuids))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    class Uuid:
        def __init__(self, text: str) -> None:
            self.text = text

        def __str__(self) -> str:
            return self.text

    def properties_of(index: int) -> Any:
        return types.SimpleNamespace(uuid=Uuid(uuids[index]), total_memory=MiB)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties_of)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (f"GPU-{UUIDS[0]}", "cuda:0"),
        (f"GPU-{UUIDS[1]}", "cuda:1"),
        (f"GPU-{UUIDS[1].upper()}", "cuda:1"),
        ("GPU-893", "cuda:0"),
        ("GPU-89a", "cuda:1"),
    ],
)
def test_a_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, spec: str, name: str) -> None:
    pretend_uuids(monkeypatch)
    assert resolve_device(spec).name == name


@pytest.mark.parametrize(
    ("spec", "visible", "why"),
    [
        ("GPU-89", "", "not 'GPU-89', which is the beginning of 2 UUIDs"),
        ("GPU-7", "", "not 'GPU-7'$"),
        ("GPU-7", "GPU-89,GPU-8", "not 'GPU-7'. CUDA_VISIBLE_DEVICES=GPU-89,GPU-8 hides all others$"),
        (
            "MIG-5c89",
            "",
            "not 'MIG-5c89'. A MIG slice is chosen before a program starts: CUDA_VISIBLE_DEVICES=MIG-5c89$",
        ),
    ],
)
def test_a_wrong_uuid_lists_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch, spec: str, visible: str, why: str
) -> None:
    pretend_uuids(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    both = rf"device must be one of 'cuda:0' \(GPU-{UUIDS[0]}\), 'cuda:1' \(GPU-{UUIDS[1]}\), 'cpu', "
    with pytest.raises(ValueError, match=both + why):
        resolve_device(spec)


def test_a_uuid_without_a_gpu_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_uuids(monkeypatch, ())
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r"must be 'cpu', not 'GPU-8'\. torch .* was built without CUDA"):
        resolve_device("GPU-8")


def test_a_slice_that_the_environment_shows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_uuids(monkeypatch, UUIDS[:1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5c89")
    assert resolve_device("MIG-5c89").name == "cuda:0"


def test_an_older_torch_has_no_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_uuids(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace())
    with pytest.raises(ValueError, match="device must be one of 'cuda:0', 'cuda:1', 'cpu', not 'GPU-89'"):
        resolve_device("GPU-89")


def test_a_missing_cuda_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(
        ValueError, match=r"device must be 'cpu', not 'cuda'\. torch .* was built without CUDA"
    ):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ValueError, match="torch finds no GPU: check nvidia-smi and"):
        resolve_device("cuda:0")


@pytest.mark.parametrize("spec", ["cuda", None])
def test_a_cuda_that_does_not_count_is_refused(monkeypatch: pytest.MonkeyPatch, spec: Any) -> None:
    pretend(monkeypatch, cuda=1)
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    with pytest.raises(ValueError, match=r"PYTORCH_NO_CUDA_MEMORY_CACHING is set\. Unset it"):
        resolve_device(spec)
    assert resolve_device("cpu").name == "cpu"


class Elsewhere(torch.Tensor):
    """A tensor that says it is on another device, as far as a machine without one can."""

    where = torch.device("cuda", 1)
    device = property(lambda self: self.where)  # type: ignore[assignment]

    @staticmethod
    def __new__(cls) -> Elsewhere:
        return subclass(cls, torch.zeros(1))  # type: ignore[attr-defined,no-any-return]


def test_the_device_is_where_the_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    only_buffers = torch.nn.Module()
    only_buffers.register_buffer("mean", torch.zeros(2))
    assert Elsewhere().device.type == "cuda"
    for near in ([model], [optimizer], [torch.zeros(1)], [only_buffers], [{"ema": [torch.zeros(1)]}]):
        assert resolve_device(None, near=near).name == "cpu"
    far = [[[[[[torch.zeros(1)]]]]]]
    for near in ([], ["text", 3, None, object()], [torch.zeros(1, device="meta")], far):
        assert resolve_device(None, near=near).name == "cuda:0", "nothing was found, so the accelerator"
    # what is on the accelerator decides, wherever it stands
    assert resolve_device(None, near=[model, {"x": [Elsewhere()]}]).name == "cuda:1"
    elsewhere = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    elsewhere.param_groups[0]["params"] = [Elsewhere()]
    assert resolve_device(None, near=[model, elsewhere]).name == "cuda:1"
    assert resolve_device("cpu", near=[elsewhere]).name == "cpu", "what is named comes first"


def test_what_a_workload_holds_is_counted_on_its_own_device_whatever_its_tensors_are() -> None:
    """Half of the state on another device must not make room for garbage on this one."""
    cpu = torch.device("cpu")
    layer = torch.nn.Linear(8, 8, bias=False)
    layer(torch.ones(1, 8)).sum().backward()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    optimizer.step()
    assert own_bytes([layer, optimizer, layer.weight.view(-1)], on=cpu) == 3 * 256
    assert own_bytes([layer, torch.ones(1000, device="meta")], on=cpu) == 2 * 256
    wrapped = torch.nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))  # as DTensor and torchao have it
    assert own_bytes([wrapped], on=cpu) == 2 * 16
    table = torch.nn.Embedding(16, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    assert own_bytes([table, torch.nn.LazyLinear(3)], on=cpu) == 256


def test_tensors_on_a_device_that_is_not_supported_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    monkeypatch.setattr(Elsewhere, "where", torch.device("hpu", 0))
    with pytest.raises(ValueError, match="device must be 'cpu', not 'hpu:0'"):
        resolve_device(None, near=[Elsewhere()])


def test_doctor_sees_every_device_and_survives_a_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, cuda=1, xpu=1, mps=True)
    fake, broken = FakeCuda(used_by_others=100 * MiB), FakeCuda()
    broken.dead = True
    fake.get_device_name = lambda index: "NVIDIA Something"  # type: ignore[attr-defined]
    devices = [
        (CudaDevice(0, backend=fake), True),
        (XpuDevice(0, backend=broken), False),
        (MpsDevice(backend=FakeMps()), False),
    ]
    monkeypatch.setattr(device_module, "_accelerators", lambda: iter(devices))
    first, second, third, cpu = known_devices()
    assert first == KnownDevice(
        "cuda:0", "NVIDIA Something", 1000 * MiB, 900 * MiB, tested=True, uuid="GPU-00000000-fa4e"
    )
    assert (second.name, second.total_bytes, second.tested) == ("xpu:0", None, False)
    assert "illegal memory access" in second.note
    assert (third.name, third.tested, third.note) == ("mps", False, "untested on real hardware")
    assert (cpu.name, cpu.tested, cpu.total_bytes) == ("cpu", True, read_ram().total_bytes)
