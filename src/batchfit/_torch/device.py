"""The device whose memory is being measured, behind one small interface.

Rules
- A wrong device or budget is a `ValueError` before anything is allocated on a device.
- Readings are this process' own: live tensor bytes (`allocated`), and what the caching allocator took from
  the device to serve them (`reserved`). `budget_bytes()` also sees what other processes left free.
- `limit` never allows more than its budget, never more than a limit that is around it, and puts back what
  was set before. No device but its own is touched.
- cuda and cpu are tested on real hardware; mps and xpu only against a fake with honest books, and say so.

The limit of cuda and xpu is torch's per-process memory fraction: the allocator compares its own reserved
segments with it, so a big card imitates a small one exactly, whatever other processes do.

A CPU has no such allocator. Its memory is counted by `virtual_memory`, which `limit` enters: `held_bytes`,
`peaks` and `reset` work inside `limit` only, and outside they raise rather than answer 0.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Protocol, final, runtime_checkable

import torch

from batchfit._decide.units import format_bytes
from batchfit._torch.ram import read_ram
from batchfit._torch.virtual import VirtualMemory, active, virtual_memory
from batchfit.errors import BatchfitError


@dataclass(frozen=True, slots=True)
class Peaks:
    """The highest readings since `reset()`.

    `reserved_bytes` is what the caching allocator took from the device, `split_bytes` what lay in cached
    remainders of split blocks, which it cannot give back; None where the device has no such thing.
    """

    allocated_bytes: int
    reserved_bytes: int | None = None
    split_bytes: int | None = None


@runtime_checkable
class Device(Protocol):
    """What a search needs of a device. `batchfit.testing.FakeDevice` is one without hardware."""

    @property
    def name(self) -> str:
        """`cuda:0`, `cpu`."""

    def total_bytes(self) -> int:
        """The memory of the device; no budget may exceed it."""

    def budget_bytes(self) -> int:
        """The most this program may use now: what it holds and what is free, under any limit already set."""

    def held_bytes(self) -> int:
        """Live tensor bytes now."""

    def reset(self) -> None:
        """Give cached memory back to the device and begin the peaks anew."""

    def peaks(self) -> Peaks:
        """The highest readings since `reset()`."""

    def alloc_retries(self) -> int:
        """How often the allocator had to give its cache back to serve a request; only ever grows."""

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        """Inside, no more than that can be used; what was set before is put back."""


def check_budget(device: Device, budget_bytes: int) -> None:
    """Refuse a budget that is no number of bytes or that exceeds the device."""
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int):
        raise TypeError(f"budget must be a number of bytes, not {budget_bytes!r}")
    if budget_bytes <= 0:
        raise ValueError(f"budget must be positive, not {budget_bytes!r}")
    total = device.total_bytes()
    if budget_bytes > total:
        raise ValueError(
            f"budget must not exceed the {format_bytes(total)} of {device.name}, "
            f"not {budget_bytes!r} ({format_bytes(budget_bytes)})"
        )


# The fraction that a limit of ours has set, for a torch that cannot tell it: (back-end, index) -> fraction.
_set_by_us: dict[tuple[Any, int], float] = {}


def fraction_of(budget_bytes: int, total_bytes: int) -> float:
    """The fraction for which the allocator's `int(fraction * total)` is the budget, and never more."""
    fraction = math.nextafter(budget_bytes / total_bytes, 1.0)  # upwards: rounded down twice, a byte is lost
    while int(fraction * total_bytes) > budget_bytes:
        fraction = math.nextafter(fraction, 0.0)
    return fraction


@dataclass(frozen=True)
class _CachingDevice:
    """A device with torch's caching allocator: cuda and xpu share its functions."""

    index: int
    backend: Any = field(repr=False)
    kind: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    def total_bytes(self) -> int:
        return int(self.backend.get_device_properties(self.index).total_memory)

    def budget_bytes(self) -> int:
        free, total = self._memory_info()
        reachable = free + int(self.backend.memory_reserved(self.index))
        return min(reachable, int(self._fraction() * total))

    def held_bytes(self) -> int:
        return int(self.backend.memory_allocated(self.index))

    def reset(self) -> None:
        self.synchronize()
        self._empty_cache()
        self.backend.reset_peak_memory_stats(self.index)

    def peaks(self) -> Peaks:
        stats = self.backend.memory_stats(self.index)
        split = stats.get("inactive_split_bytes.all.peak")
        return Peaks(
            allocated_bytes=int(stats.get("allocated_bytes.all.peak", 0)),
            reserved_bytes=int(stats.get("reserved_bytes.all.peak", 0)),
            split_bytes=int(split) if split is not None and self._counts_splits() else None,
        )

    def alloc_retries(self) -> int:
        return int(self.backend.memory_stats(self.index).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        self.backend.synchronize(self.index)

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        # What lies in the cache is no longer asked for from the device, so no limit would hold it back.
        self.synchronize()
        self._empty_cache()
        if budget_bytes >= self.budget_bytes():
            yield
            return
        if not hasattr(self.backend, "set_per_process_memory_fraction"):
            raise BatchfitError(
                f"torch {torch.__version__} cannot limit the memory of {self.name}. "
                "Leave the budget out, or upgrade torch."
            )
        # The allocator multiplies by one of two totals, depending on the version: the larger one is safe.
        total = max(self._memory_info()[1], self.total_bytes())
        before = self._fraction()
        if before < 1.0:  # read back rounded: put back as it was, again and again, it would shrink by bytes
            before = fraction_of(round(before * total), total)
        ours_before = _set_by_us.get((self.backend, self.index))
        self._set_fraction(fraction_of(budget_bytes, total))
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # of a dead context: it must not hide the error that killed it
                self._set_fraction(before, forget=ours_before is None)
            raise
        self._set_fraction(before, forget=ours_before is None)

    def _set_fraction(self, fraction: float, *, forget: bool = False) -> None:
        if forget:
            _set_by_us.pop((self.backend, self.index), None)
        else:
            _set_by_us[self.backend, self.index] = fraction
        self.backend.set_per_process_memory_fraction(fraction, self.index)

    def _fraction(self) -> float:
        """The fraction that is set now. An older torch cannot tell: then ours, or all of it."""
        if hasattr(self.backend, "get_per_process_memory_fraction"):
            return float(self.backend.get_per_process_memory_fraction(self.index))
        return _set_by_us.get((self.backend, self.index), 1.0)

    def _memory_info(self) -> tuple[int, int]:
        if hasattr(self.backend, "mem_get_info"):
            free, total = self.backend.mem_get_info(self.index)
            return int(free), int(total)
        total = self.total_bytes()  # an older xpu: what others use cannot be seen
        return total - int(self.backend.memory_reserved(self.index)), total

    def _empty_cache(self) -> None:
        with self.backend.device(self.index):  # on another current device this would open a context there
            self.backend.empty_cache()

    def _counts_splits(self) -> bool:
        return True


@final
@dataclass(frozen=True)
class CudaDevice(_CachingDevice):
    """An NVIDIA GPU, or an AMD one: torch calls both cuda."""

    index: int = 0
    backend: Any = field(default=torch.cuda, repr=False)
    kind: ClassVar[str] = "cuda"

    def _counts_splits(self) -> bool:
        # cudaMallocAsync keeps its own pools: its 0 means "not counted"
        backend = getattr(self.backend, "get_allocator_backend", None)
        return backend is None or backend() == "native"


@final
@dataclass(frozen=True)
class XpuDevice(_CachingDevice):
    """An Intel GPU. Written against a fake: untested on real hardware."""

    index: int = 0
    backend: Any = field(default=torch.xpu, repr=False)
    kind: ClassVar[str] = "xpu"


@final
class MpsDevice:
    """An Apple GPU. Written against a fake: untested on real hardware.

    Metal keeps no peak. `allocated_bytes` is therefore the highest of the moments at which we looked (after
    each step), and understates what a step needs in its middle; `reserved_bytes` is nearly true, for the
    allocator keeps what it took until `reset()`. The bracket of a search is right all the same: what runs out
    runs out. The budget is what Metal recommends; torch alone would go 1.7 times as far, into swapping.
    """

    name = "mps"

    def __init__(self, *, backend: Any = torch.mps) -> None:
        self._backend = backend
        self._highest = Peaks(0, 0)

    def total_bytes(self) -> int:
        return int(self._backend.recommended_max_memory())

    def budget_bytes(self) -> int:
        total = self.total_bytes()
        return min(total, int(_set_by_us.get((self._backend, 0), 1.0) * total))

    def held_bytes(self) -> int:
        self._look()
        return int(self._backend.current_allocated_memory())

    def reset(self) -> None:
        self.synchronize()
        self._backend.empty_cache()
        self._highest = Peaks(0, 0)
        self._look()

    def peaks(self) -> Peaks:
        self._look()
        return self._highest

    def alloc_retries(self) -> int:
        return 0

    def synchronize(self) -> None:
        self._backend.synchronize()
        self._look()

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        self.reset()
        before = _set_by_us.get((self._backend, 0))
        fraction = fraction_of(min(budget_bytes, self.budget_bytes()), self.total_bytes())
        self._backend.set_per_process_memory_fraction(fraction)
        _set_by_us[self._backend, 0] = fraction
        try:
            yield
        finally:
            if before is None:
                del _set_by_us[self._backend, 0]
                # what torch starts with; it cannot be read back
                before = float(os.environ.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1.7"))
            else:
                _set_by_us[self._backend, 0] = before
            self._backend.set_per_process_memory_fraction(before)

    def _look(self) -> None:
        self._highest = Peaks(
            max(self._highest.allocated_bytes, int(self._backend.current_allocated_memory())),
            max(self._highest.reserved_bytes or 0, int(self._backend.driver_allocated_memory())),
        )


@final
@dataclass(frozen=True)
class CpuDevice:
    """The CPU, whose memory runs out like a GPU's inside `limit`. Nothing is reserved, nothing is retried.

    Outside any virtual memory `budget_bytes()` is the RAM that the system and the container leave to new
    allocations. What the process' tensors hold already is not added, though a virtual memory will count it:
    RAM that runs out kills the process, so the figure errs on the low side.
    """

    name: ClassVar[str] = "cpu"

    def total_bytes(self) -> int:
        memory = active()
        return read_ram().total_bytes if memory is None else memory.limit_bytes

    def budget_bytes(self) -> int:
        memory = active()
        return read_ram().available_bytes * 9 // 10 if memory is None else memory.limit_bytes

    def held_bytes(self) -> int:
        return self._counted().allocated_bytes

    def reset(self) -> None:
        self._counted().reset_peak()

    def peaks(self) -> Peaks:
        return Peaks(self._counted().peak_bytes)

    def alloc_retries(self) -> int:
        return 0

    def synchronize(self) -> None:
        """A CPU has done its work when the call returns."""

    def limit(self, budget_bytes: int) -> AbstractContextManager[None]:
        check_budget(self, budget_bytes)
        return self._limited(budget_bytes)

    @contextmanager
    def _limited(self, budget_bytes: int) -> Iterator[None]:
        memory = active()
        with virtual_memory(budget_bytes) if memory is None else memory.lowered(budget_bytes):
            yield

    def _counted(self) -> VirtualMemory:
        memory = active()
        if memory is None:
            raise RuntimeError(
                "the memory of a CPU is only counted inside device.limit(...) or virtual_memory(...), "
                "in the thread that entered it"
            )
        return memory


@dataclass(frozen=True, slots=True)
class KnownDevice:
    """One line of `batchfit doctor`; None where the system does not tell."""

    name: str
    description: str
    total_bytes: int | None
    free_bytes: int | None
    tested: bool
    note: str = ""


def known_devices() -> list[KnownDevice]:
    """Every device that this torch can reach, the CPU last."""
    found = []
    for device, tested in _accelerators():
        try:
            total, free = device.total_bytes(), device.budget_bytes()
        except RuntimeError as error:  # one broken device must not hide the others
            text = str(error).partition("\n")[0]
            found.append(KnownDevice(device.name, "cannot be reached", None, None, tested, text))
            continue
        note = "" if tested else "untested on real hardware"
        found.append(KnownDevice(device.name, _description(device), total, free, tested, note))
    ram = read_ram()
    cores = f"{os.cpu_count()} cores, {platform.machine()}"
    return [*found, KnownDevice("cpu", cores, ram.total_bytes, ram.available_bytes, True)]


def _accelerators() -> Iterator[tuple[Device, bool]]:
    if torch.cuda.is_available():
        yield from ((CudaDevice(index), True) for index in range(torch.cuda.device_count()))
    if torch.xpu.is_available():
        yield from ((XpuDevice(index), False) for index in range(torch.xpu.device_count()))
    if torch.backends.mps.is_available():
        yield MpsDevice(), False


def _description(device: Device) -> str:
    if isinstance(device, CudaDevice | XpuDevice):
        return str(device.backend.get_device_name(device.index))
    return "Apple GPU"


def resolve_device(spec: str | torch.device | Device | None, *, near: Iterable[object] = ()) -> Device:
    """The device to measure: the one named, else where the tensors of `near` are, else the accelerator.

        resolve_device("cuda:1")
        resolve_device(None, near=[model, optimizer])

    `near` may hold modules, optimizers, tensors and lists or dicts of them; anything else is passed over. A
    tensor on an accelerator decides before one on the CPU, wherever it stands: an average of the weights that
    is kept in RAM says nothing about where the model runs.
    """
    if isinstance(spec, Device):
        return spec
    wanted = _device_near(near) if spec is None else _parse(spec)
    if wanted is None:
        return _counting(next((device for device, _ in _accelerators()), CpuDevice()))
    if wanted.type == "cpu":
        return CpuDevice()
    index: int | None = wanted.index  # torch's stubs say int, and "cuda" has None
    if index is None:
        index = torch.cuda.current_device() if wanted.type == "cuda" and torch.cuda.is_available() else 0
    for device, _ in _accelerators():
        if device.name in (f"{wanted.type}:{index}", wanted.type):
            return _counting(device)
    raise ValueError(f"device must be {_available()}, not {str(wanted)!r}{_remedy(wanted.type)}")


def _parse(spec: object) -> torch.device:
    if not isinstance(spec, str | torch.device):
        raise TypeError(f"device must be text such as 'cuda:0' or a torch.device, not {spec!r}")
    try:
        return torch.device(spec)
    except RuntimeError:
        raise ValueError(f"device must be {_available()}, not {spec!r}") from None


def _counting(device: Device) -> Device:
    """The device, unless a setting has switched off the counters that everything here reads."""
    if isinstance(device, CudaDevice) and "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        raise ValueError(
            f"device must be one whose memory torch counts, not {device.name!r} while "
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set. Unset it"
        )
    return device


def _available() -> str:
    names = [device.name for device, _ in _accelerators()] + ["cpu"]
    return "'cpu'" if len(names) == 1 else f"one of {', '.join(map(repr, names))}"


def _remedy(kind: str) -> str:
    if kind != "cuda" or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f". torch {torch.__version__} was built without CUDA: install a build with it"
    return ". torch finds no GPU: look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def _device_near(near: Iterable[object]) -> torch.device | None:
    first: torch.device | None = None
    for tensor in tensors_in(near):
        if tensor.device.type not in ("cpu", "meta"):
            return tensor.device
        if tensor.device.type == "cpu" and first is None:
            first = tensor.device
    return first


def tensors_in(things: Iterable[object], *, depth: int = 4) -> Iterator[torch.Tensor]:
    """Parameters, buffers and tensors of the modules, optimizers and containers among `things`."""
    for thing in things:
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, torch.nn.Module):
            yield from chain(thing.parameters(), thing.buffers())
        elif isinstance(groups := getattr(thing, "param_groups", None), list):
            yield from chain.from_iterable(group["params"] for group in groups)
        elif depth and isinstance(thing, Mapping):
            yield from tensors_in(thing.values(), depth=depth - 1)
        elif depth and isinstance(thing, list | tuple | set | frozenset):
            yield from tensors_in(thing, depth=depth - 1)
