"""A guarded call: runs some work, and turns an OOM into a value.

Rules
- An OOM is a value; the text of the error is kept, never the error, whose traceback holds tensors.
- Errors that are not memory come out unchanged. An OOM of host memory comes out too, for a smaller
  microbatch does not cure it; so does an ambiguous error where no smaller size is left to prove it.
- Recovery (`recover`) happens after the `except` block has released the traceback.
- Reading the device is one call and forces no CUDA synchronization.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, final

import torch

from batchfit._engine.device import oom
from batchfit._engine.device.readings import recover
from batchfit._engine.device.resolve import CpuDevice, CudaDevice, Device

T = TypeVar("T")

# Part of the reserved memory in free blocks of the wrong size: a second call may be laid out better.
_FRAGMENTED = 0.15

_ABOUT_BATCH_NORM = (
    "batchfit: BatchNorm cannot train on a microbatch of one sample, and the batch was cut that small since "
    "there was an OOM or microbatch_size says so, or it has one sample. Use GroupNorm, or put the layer into "
    "eval mode"
)

_HOST_TYPES = ("MemoryError", "_ArrayMemoryError")
_HOST_TEXTS = ("DefaultCPUAllocator", "std::bad_alloc", "[Errno 12]")


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """How a call was out of memory."""

    verdict: oom.Verdict
    message: str
    fragmented: bool


def run_guarded(
    run: Callable[[], object], *, device: Device, last: bool, note: Callable[[], str]
) -> Failure | None:
    """Call `run`; returns how it was out of memory, or None. `last`: no smaller size is left."""
    ambient = sys.exception()
    try:
        run()
    except Exception as error:
        verdict = oom.classify(error, ambient=ambient)
        message = oom.describe(error, ambient=ambient)
        ours = verdict in ("oom", "too_large", "ambiguous") and not (verdict == "ambiguous" and last)
        if not ours or (verdict != "too_large" and _is_host(message, device)):
            error.add_note(note())
            if oom.needs_two_samples(error):
                error.add_note(_ABOUT_BATCH_NORM)
            raise
        return Failure(verdict, message, _is_fragmented(device))
    return None


def run_twice(
    run: Callable[[], T], *, device: Device, note: str, failed: Callable[[str], Exception] | None = None
) -> T:
    """What `run` returns; after an OOM, memory is released and `run` is called once more.

    `failed` makes the error to raise from the text of a second OOM; default: the OOM itself.
    """
    answer: list[T] = []
    failure = run_guarded(lambda: answer.append(run()), device=device, last=False, note=lambda: note)
    if failure is None:
        return answer[0]
    recover(device)
    if failed is None:
        return run()
    failure = run_guarded(lambda: answer.append(run()), device=device, last=True, note=lambda: note)
    if failure is not None:
        raise failed(failure.message)
    return answer[0]


def _is_host(message: str, device: Device) -> bool:
    """Whether RAM was exhausted, and the model is not on the CPU. A pool of a GPU may say bad_alloc too."""
    if isinstance(device, CpuDevice) or "CUDA" in message:
        return False
    return message.partition(":")[0] in _HOST_TYPES or any(text in message for text in _HOST_TEXTS)


def _is_fragmented(device: Device) -> bool:
    if not isinstance(device, CudaDevice):
        return False
    stats = torch.cuda.memory_stats(device.index)
    reserved = int(stats.get("reserved_bytes.all.current", 0))
    return reserved - int(stats.get("allocated_bytes.all.current", 0)) > _FRAGMENTED * reserved
