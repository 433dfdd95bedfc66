"""The memory of the program's device, as its probe limits and reads it: GPUs, or a CPU's virtual memory.

Rules:
- A GPU is limited at the first forward pass, when the program has chosen its device; what it holds by then
  counts. It may be any GPU, and several: those of the module's parameters and of its inputs.
- A CPU is limited from the same moment on; what lives by then counts. On a machine with GPUs it is from the
  end of the first step on, if no GPU was used until then.
- A process without a pass (a launcher, a loader's worker) is not limited: on a GPU it would be in RAM.
- Nothing of CUDA is initialized by the probe: a program may still choose its GPUs, or fork.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

import torch
from torch import nn

from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.virtual_memory.memory import VirtualMemory, is_innermost, virtual_memory

OnOom = Callable[[str], None]


class ProbeMemory(Protocol):
    """What the probe reads of a device."""

    @property
    def name(self) -> str:
        """As torch has it; empty while it is not known."""

    def begin(self) -> None:
        """A pass begins: limit the device, and begin the peak."""

    def read(self) -> dict[str, Any]:
        """Peaks since `begin`, and what is held now."""

    def read_at_end(self) -> dict[str, Any]:
        """What costs more to read, once the steps are over."""

    def step_ended(self, number: int) -> None:
        """A step has ended, after it was read."""

    def budget_bytes(self) -> int | None:
        """What the program may use, once `begin` was called."""

    @property
    def slows_steps(self) -> bool:
        """Whether counting takes so much of a step that its time is no time of the program's."""

    def leave(self) -> bool:
        """Count no more, where that takes time; whether anything has changed."""


@final
class CpuMemory:
    """Virtual memory on the CPU; `on_oom` is called where a request is refused, before the program sees."""

    name = "cpu"

    def __init__(self, budget_bytes: int, on_oom: OnOom) -> None:
        self._context = virtual_memory(budget_bytes)
        self._on_oom = on_oom
        self._memory: VirtualMemory | None = None
        self._left = False

    def begin(self) -> None:
        if self._memory is None:
            self._memory = self._context.__enter__()  # most often never left: the program ends with it
            self._memory.on_refused(lambda error: self._on_oom(str(error)))

    def read(self) -> dict[str, Any]:
        if self._memory is None:
            return {}
        if self._left:
            return {"peak_bytes": self._memory.peak_bytes}
        return {"peak_bytes": self._memory.peak_bytes, "held_bytes": self._memory.allocated_bytes}

    def read_at_end(self) -> dict[str, Any]:
        return {}

    def step_ended(self, number: int) -> None:
        """Nothing changes with it."""

    def budget_bytes(self) -> int | None:
        return None if self._memory is None else self._memory.limit_bytes

    @property
    def slows_steps(self) -> bool:
        return self._memory is not None and not self._left

    def leave(self) -> bool:
        if self._left or self._memory is None or not is_innermost():
            return False
        self._left = True
        self._context.__exit__(None, None, None)
        return True


@final
class GpuMemory:
    """The CUDA devices of the program; readings are those of the fullest one."""

    def __init__(self, budget_bytes: int | None, on_oom: OnOom) -> None:
        self._asked = budget_bytes
        self._budget: int | None = None
        self._retries: dict[int, int] = {}  # by device, before the first pass
        self._watch = SwallowedOoms(on_oom)
        self._seen_ooms = 0

    @property
    def name(self) -> str:
        return f"cuda:{min(self._retries)}" if self._retries else ""

    def begin(self) -> None:
        """Take the current device, where the pass has shown none."""
        if torch.cuda.is_initialized() and not self._retries:  # type: ignore[no-untyped-call]
            self.use({torch.cuda.current_device()})

    def use(self, devices: set[int]) -> None:
        """Limit these devices, and begin their peaks."""
        for index in sorted(devices - self._retries.keys()):
            free, _ = torch.cuda.mem_get_info(index)
            available = free + torch.cuda.memory_reserved(index)
            budget = available if self._asked is None else min(self._asked, available)
            self._budget = budget if self._budget is None else min(budget, self._budget)
            if self._asked is not None:
                limit_gpu(index, self._asked)
            torch.cuda.reset_peak_memory_stats(index)
            self._retries[index] = _stats(index).get("num_alloc_retries", 0)
        self._watch.start()
        self._seen_ooms = self._ooms()

    def _ooms(self) -> int:
        return sum(_stats(index).get("num_ooms", 0) for index in self._retries)

    def read(self) -> dict[str, Any]:
        read = [self._read_one(index, before) for index, before in self._retries.items()]
        if not read:
            return {}
        fullest = max(read, key=lambda one: int(one["reserved_bytes"] or one["peak_bytes"]))
        return {
            **fullest,
            "alloc_retries": sum(one["alloc_retries"] for one in read),
            "held_bytes": fullest["held_bytes"],
        }

    def _read_one(self, index: int, retries_before: int) -> dict[str, Any]:
        stats = _stats(index)
        split = _of_all(stats, "inactive_split_bytes", "peak")
        return {
            "peak_bytes": _of_all(stats, "allocated_bytes", "peak") or 0,
            "reserved_bytes": _of_all(stats, "reserved_bytes", "peak"),
            "split_bytes": split,
            "held_bytes": _of_all(stats, "allocated_bytes", "current") or 0,
            "alloc_retries": stats.get("num_alloc_retries", 0) - retries_before,
            "index": index,
        }

    def read_at_end(self) -> dict[str, Any]:
        from batchfit._engine.device.gpu import CudaDevice

        largest = [CudaDevice(index).largest_bytes() for index in self._retries]
        known = [one for one in largest if one is not None]
        return {"largest_bytes": max(known) if len(known) == len(largest) and known else None}

    def step_ended(self, number: int) -> None:
        if self._retries and not self._watch.step_ended():
            ooms = self._ooms()
            if ooms > self._seen_ooms:
                self._seen_ooms = ooms
                self._watch.on_oom("CUDA out of memory; the program went on after it")
        if number == 1 and torch.backends.cudnn.benchmark:
            # The first step tries every algorithm, with workspaces that no later step takes.
            for index in self._retries:
                torch.cuda.reset_peak_memory_stats(index)

    def budget_bytes(self) -> int | None:
        return self._budget

    @property
    def slows_steps(self) -> bool:
        return False

    def leave(self) -> bool:
        return False


@final
class SwallowedOoms:
    """Sees the OOMs that a program catches, and not those that a library of CUDA handles by itself.

    cuDNN tries algorithms until one gets its workspace: the allocator reports these as it does an OOM of the
    program's. Only if Python then sees the error was it the program's. Python 3.11 has no way to watch that;
    there each of them counts.
    """

    def __init__(self, on_oom: OnOom) -> None:
        self.on_oom = on_oom
        self._suspected = ""
        self._tool: int | None = None
        self._observes = False

    def start(self) -> None:
        """Watch from now on; CUDA is initialized."""
        from batchfit._engine.torch_private.allocator import observe_ooms

        if self._observes:
            return
        self._observes = observe_ooms(self._refused)
        monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12
        if not self._observes or monitoring is None:
            return
        free = [number for number in (4, 3) if monitoring.get_tool(number) is None]
        if free:
            self._tool = free[0]
            monitoring.use_tool_id(self._tool, "batchfit")
            monitoring.register_callback(self._tool, monitoring.events.RAISE, self._raised)

    def _refused(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by the allocator, before it raises."""
        self._suspected = f"CUDA out of memory: {asked} bytes were requested, and {free} were free"
        if self._tool is None:
            self.on_oom(self._suspected)
        else:
            self._watch_raises(True)

    def _raised(self, code: object, offset: int, error: BaseException) -> None:
        if self._suspected and isinstance(error, torch.OutOfMemoryError):
            text, self._suspected = self._suspected, ""
            self._watch_raises(False)
            self.on_oom(text)

    def _watch_raises(self, on: bool) -> None:
        monitoring: Any = getattr(sys, "monitoring", None)
        monitoring.set_events(self._tool, monitoring.events.RAISE if on else 0)

    def step_ended(self) -> bool:
        """Forget what a library has handled by itself; False where nothing can be observed here."""
        if self._suspected and self._tool is not None:
            self._suspected = ""
            self._watch_raises(False)
        return self._observes


def limit_gpu(index: int, budget_bytes: int) -> None:
    """Let this process use no more of a GPU."""
    from batchfit._engine.device.gpu import fraction_of

    _, total = torch.cuda.mem_get_info(index)
    if budget_bytes < total:
        torch.cuda.set_per_process_memory_fraction(fraction_of(budget_bytes, total), index)


def gpus_of(module: nn.Module, values: Iterable[object]) -> set[int]:
    """The CUDA devices of a module's parameters and of the tensors that it is called with."""
    devices = {one.device for one in (*module.parameters(), *tensors_in(values))}
    return {device.index or 0 for device in devices if device.type == "cuda"}


def _stats(index: int) -> dict[str, Any]:
    """The allocator's counts, in one call of few microseconds."""
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(index)
    return stats


def _of_all(stats: dict[str, Any], name: str, which: str) -> int | None:
    value = stats.get(name, {}).get("all", {}).get(which)
    return None if value is None else int(value)
