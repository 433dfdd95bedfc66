"""An OOM: which errors mean memory, and a guarded call that turns one into a value.

Rules:
- By type first, then by text, and text counts only in the types that torch and its libraries raise: a
  `ValueError` that quotes "out of memory" is the user's.
- The whole chain counts: `__cause__`, else `__context__` unless `from None` hid it (what a traceback
  would show), and the members of exception groups. The gravest verdict in the chain wins.
- `KeyboardInterrupt`, `SystemExit` and the like are never memory, whatever was being handled.
- What is kept of an error is one line of text (`describe`): its traceback holds the step's tensors.
- Errors that are not memory come out of a guarded call unchanged. So does an OOM of host memory, which a
  smaller microbatch does not cure, and an ambiguous error where no smaller size is left to prove it.
- Recovery (`recover`) happens after the `except` block has released the traceback.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar, final

import torch

from batchfit._engine.device.device import CpuDevice, Device, counts_memory
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.torch_private.dispatch import modes_disabled
from batchfit.errors import NothingFitsError

T = TypeVar("T")

Verdict = Literal["oom", "too_large", "ambiguous", "fatal", "error"]

# Grave first. A dead context outweighs the OOM that may have led to it, and an OOM explains any
# ambiguous error around it.
_GRAVITY: Final[tuple[Verdict, ...]] = ("fatal", "oom", "too_large", "ambiguous", "error")

# These are RuntimeErrors by inheritance only: none of them is raised by a full device, or cured by a retry.
_NEVER: Final = (NotImplementedError, RecursionError, NothingFitsError)

_DEVICE: Final = r"\b[A-Z][A-Z0-9]+(?: backend)?"  # any device's name: CUDA, HIP, XPU, NPU, CPU, MPS backend
_CALL: Final = (
    r"(?:\b(?:CUDA|HIP|MUSA)(?: driver| runtime)? error: |Triton Error \[\w+\]: |Cuda failure (?:\d+ )?')"
)
_END: Final = r"(?=[.,:;!'\"]|\s*\(|\s*$)"  # "out of memory-efficient ..." is another sentence


class _OomRule(NamedTuple):
    verdict: Verdict
    types: tuple[type[BaseException], ...]
    pattern: str  # searched in the text, "" fits any


_RUNTIME: Final = (RuntimeError,)
_RULES: Final = (
    # --- by type: the caching allocators of CUDA, ROCm and XPU, cudaMallocAsync, virtual_memory
    _OomRule("oom", (torch.OutOfMemoryError,), ""),
    # Python itself, NumPy (_ArrayMemoryError), CuPy's pool, C++ bad_alloc through pybind11
    _OomRule("oom", (MemoryError,), ""),
    # --- the context is dead: CUDA's sticky errors (driver documentation, cudaError_t 700 and on)
    _OomRule(
        "fatal",
        _RUNTIME,
        _CALL + r"(?:an illegal memory access was encountered|device-side assert triggered|misaligned address"
        r"|unspecified launch failure|an illegal instruction was encountered|invalid program counter"
        r"|hardware stack error|operation not supported on global/shared address space"
        r"|the launch timed out and was terminated|uncorrectable ECC error encountered)",
    ),
    # the same of XPU (pytorch #177714)
    _OomRule("fatal", _RUNTIME, r"\bUR_RESULT_ERROR_DEVICE_LOST\b"),
    # --- memory
    # allocators that raise a plain RuntimeError: torch < 2.4, MPS, torch_npu and other plug-ins
    _OomRule("oom", _RUNTIME, _DEVICE + " out of memory" + _END),
    # cudaMallocAsync back-end, raised again by someone as a plain error (ComfyUI-Sharp #24)
    _OomRule("oom", _RUNTIME, r"would exceed allowed memory\. \(out of memory\)"),
    # CUDA API calls before torch 2.8 (ComfyUI #13210), Triton launches, NCCL (lm-eval #2458)
    _OomRule("oom", _RUNTIME, _CALL + "out of memory" + _END),
    # NCCL's and RCCL's own buffers (slime #956); the CUDA error itself is not in the text
    _OomRule("oom", _RUNTIME, r"Failed to CUDA (?:[cm]alloc|host alloc)\b"),
    # spconv (CMT #15), CTranslate2, and torch before 1.5
    _OomRule("oom", _RUNTIME, r"(?i:\bcuda (?:execution )?failed with error )(?:2 )?out of memory" + _END),
    _OomRule("oom", _RUNTIME, r"cuda runtime error \(2\) : out of memory"),
    # the same by its symbol: Thrust, CuPy's runtime, HIP, CUDA's driver
    _OomRule(
        "oom", _RUNTIME, r"\b(?:cudaErrorMemoryAllocation|hipErrorOutOfMemory|CUDA_ERROR_OUT_OF_MEMORY)\b"
    ),
    # CUDA's and ROCm's libraries: cuBLAS (pytorch #128601), cuDNN (9 says which side), cuFFT, cuSOLVER, ...
    _OomRule("oom", _RUNTIME, r"\b(?:CU|HIP)[A-Z]+_(?:STATUS_)?(?:\w+_)?ALLOC(?:ATION)?_FAILED\b"),
    # ROCm's: rocBLAS, MIOpen
    _OomRule("oom", _RUNTIME, r"\b(?:rocblas_status_memory_error|miopenStatusAllocFailed)\b"),
    # Metal's command buffers
    _OomRule("oom", _RUNTIME, r"\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b"),
    # XPU: Unified Runtime, its predecessor PI, and Level Zero
    _OomRule("oom", _RUNTIME, r"\b(?:UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(?:DEVICE|HOST)_MEMORY\b"),
    # Habana's device memory (Accelerate's detector)
    _OomRule("oom", _RUNTIME, r"MODULE:PT_DEVMEM Allocation failed"),
    # XLA; a quota of some service is RESOURCE_EXHAUSTED too
    _OomRule("oom", _RUNTIME, r"RESOURCE_EXHAUSTED: (?:Out of memory|Attempting to (?:allocate|reserve))"),
    # torch's CPU allocator, Linux and Windows (c10/core/impl/alloc_cpu.cpp)
    _OomRule("oom", _RUNTIME, r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)"),
    # torch turns a C++ exception that it does not know into a RuntimeError with its what()
    _OomRule("oom", _RUNTIME, r"\bstd::bad_alloc\b"),
    # --- a limit on sizes, not on memory
    # one Metal buffer (torch-max-mem's detector)
    _OomRule("too_large", _RUNTIME, r"Invalid buffer size: "),
    # a grid dimension over 65535 (Lightning #20614, pytorch #142228)
    _OomRule("too_large", _RUNTIME, _CALL + "invalid configuration argument"),
    # 32-bit indices in a kernel
    _OomRule(
        "too_large", _RUNTIME, r"(?:more|larger|greater) than INT_MAX\b|INT_MAX elements|32-?bit index math"
    ),
    # sizes whose product overflows (c10 StorageImpl, alloc_cpu)
    _OomRule(
        "too_large",
        _RUNTIME,
        r"Storage size calculation overflowed|alloc_cpu\(\) seems to have been called with negative",
    ),
    # --- memory or not: only a smaller size that runs shows which
    # cuDNN reports a workspace that it could not get in all of these ways (Lightning #5897, Ultralytics)
    _OomRule("ambiguous", _RUNTIME, r"\bCUDNN_STATUS_(?:NOT_SUPPORTED|INTERNAL_ERROR|NOT_INITIALIZED)"),
    _OomRule("ambiguous", _RUNTIME, r"unable to find an engine to execute this computation"),
    _OomRule("ambiguous", _RUNTIME, r"Unable to find a valid cuDNN algorithm"),
    # a handle that could not get its workspace
    _OomRule("ambiguous", _RUNTIME, r"\bCUBLAS_STATUS_NOT_INITIALIZED\b|\bCUFFT_INTERNAL_ERROR\b"),
    # the allocator fell over its own bookkeeping, the driver could not answer (torch-max-mem's detector)
    _OomRule("ambiguous", _RUNTIME, r"INTERNAL ASSERT FAILED at .*CUDA(?:Caching|MallocAsync)Allocator"),
    _OomRule("ambiguous", _RUNTIME, r"CUDA driver error: device not ready"),
    _OomRule("ambiguous", _RUNTIME, r"\b(?:UR_RESULT|HSA_STATUS)_ERROR_OUT_OF_RESOURCES\b"),
    _OomRule("ambiguous", _RUNTIME, r"\bCUSPARSE_STATUS_INSUFFICIENT_RESOURCES\b"),
    # a worker ended by the kernel: the OOM killer, or shared memory was exhausted (bus error)
    _OomRule(
        "ambiguous",
        _RUNTIME,
        r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) is killed by signal: (?:Killed|Bus error)",
    ),
    _OomRule("ambiguous", _RUNTIME, r"DataLoader worker \(pid\(?s?\)? [\d, ]+\) exited unexpectedly"),
    # host memory, as mmap, fork and shared memory report it
    _OomRule(
        "ambiguous", _RUNTIME, r"unable to (?:mmap|allocate shared memory|resize|write).*(?:\(12\)|\(28\))"
    ),
    _OomRule("ambiguous", (OSError,), r"^\[Errno 12\]"),
)
_COMPILED: Final = tuple((rule, re.compile(rule.pattern, re.MULTILINE)) for rule in _RULES)

# torch.AcceleratorError came with torch 2.8 and carries the runtime's own code (pytorch #152023).
_ACCELERATOR: Final[type[BaseException] | None] = getattr(torch, "AcceleratorError", None)
_CODES: Final[dict[int, Verdict]] = {
    2: "oom",  # cudaErrorMemoryAllocation, hipErrorOutOfMemory
    9: "too_large",  # cudaErrorInvalidConfiguration
    # illegal address, timeout, assert, stack, instruction, alignment, address space, pc, launch failure
    **dict.fromkeys((700, 702, 710, 714, 715, 716, 717, 718, 719), "fatal"),
}

_LONGEST: Final = 200


class _FoundOom(NamedTuple):
    verdict: Verdict
    error: BaseException
    line: str  # the line of the text that decided, "" where the type did


def classify(error: BaseException, *, ambient: BaseException | None = None) -> Verdict:
    """What `error` says about memory.

    >>> classify(MemoryError())
    'oom'

    "oom": out of memory. "too_large": a limit on sizes that is not memory. "ambiguous": may be memory;
    it counts as too big only if a smaller size runs. "fatal": the device context is dead, and nothing
    can be retried in this process. "error": the user's own, to be raised unchanged.

    `ambient` is an error that was being handled when the work began: Python hangs it behind every error
    raised since, and it explains none of them.
    """
    return _decide(error, ambient).verdict


def is_oom(error: BaseException) -> bool:
    """Whether the error means out of memory."""
    return classify(error) == "oom"


def needs_two_samples(error: BaseException) -> bool:
    """Whether a step failed because batch normalization cannot train on one value per channel."""
    return "Expected more than 1 value per channel" in str(error)  # torch's own words


def describe(error: BaseException, *, ambient: BaseException | None = None) -> str:
    """The error that decided the verdict, as one line of at most 200 characters."""
    found = _decide(error, ambient)
    lines = [line.strip() for line in _text(found.error).splitlines() if line.strip()]
    text = ": ".join([type(found.error).__name__, *lines[:1]])
    if found.line and found.line != lines[0]:
        # "Caught RuntimeError in DataLoader worker process 0." says nothing by itself.
        text = f"{text} ... {found.line}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _decide(error: BaseException, ambient: BaseException | None = None) -> _FoundOom:
    found = [_judge(link) for link in _chain(error, ambient)]
    return min(found, key=lambda one: _GRAVITY.index(one.verdict))


def _chain(error: BaseException, ambient: BaseException | None) -> Iterator[BaseException]:
    """The error, its group's members, and what they were raised from; each once, the outermost first."""
    yield error
    seen = {id(error), id(ambient)}
    waiting = [error]
    while waiting:
        link = waiting.pop(0)
        if not isinstance(link, Exception):
            continue  # an interrupt was asked for by someone: it is not a consequence of what came before
        behind: list[BaseException] = list(link.exceptions) if isinstance(link, ExceptionGroup) else []
        if link.__cause__ is not None:
            behind.append(link.__cause__)
        elif link.__context__ is not None and not link.__suppress_context__:
            behind.append(link.__context__)
        for one in behind:
            if id(one) not in seen:
                seen.add(id(one))
                waiting.append(one)
                yield one


def _judge(error: BaseException) -> _FoundOom:
    """The verdict on one error, without its chain."""
    if not isinstance(error, Exception) or isinstance(error, _NEVER):
        return _FoundOom("error", error, "")
    if _ACCELERATOR is not None and isinstance(error, _ACCELERATOR):
        verdict = _CODES.get(getattr(error, "error_code", None) or 0)
        if verdict is not None:
            return _FoundOom(verdict, error, "")
    text: str | None = None
    for rule, pattern in _COMPILED:
        if isinstance(error, rule.types):
            text = _text(error) if text is None else text
            match = pattern.search(text)
            if match is not None:
                return _FoundOom(rule.verdict, error, _line_at(text, match.start()) if rule.pattern else "")
    return _FoundOom("error", error, "")


def _line_at(text: str, position: int) -> str:
    start = text.rfind("\n", 0, position) + 1
    return text[start:].split("\n", 1)[0].strip()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ of the user's must not hide the user's error
        return ""


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

    verdict: Verdict
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
        verdict = classify(error, ambient=ambient)
        message = describe(error, ambient=ambient)
        ours = verdict in ("oom", "too_large", "ambiguous") and not (verdict == "ambiguous" and last)
        if not ours or (verdict != "too_large" and _is_host(message, device)):
            error.add_note(note())
            if needs_two_samples(error):
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


def recover(device: Device) -> None:
    """Release what a failed call left: half a backward, cycles, cast copies of weights, cached blocks."""
    torch.clear_autocast_cache()
    _forget_unfinished_backward()
    gc.collect()
    if counts_memory(device):
        device.reset()


def _forget_unfinished_backward() -> None:
    """What a failed backward had still to do waits in torch's queue of this thread, with its activations,
    until the next backward: here is one, of no elements."""
    with modes_disabled(), torch.inference_mode(False), torch.enable_grad():
        nothing = torch.empty(0, device="cpu", requires_grad=True)
        torch.autograd.backward(nothing * 1, torch.empty(0, device="cpu"))


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
