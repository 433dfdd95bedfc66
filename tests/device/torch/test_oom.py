"""The verdict on every kind of error that means memory, and on those that only sound like it."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import subprocess
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._engine.device import oom
from batchfit._engine.device.device import CpuDevice
from batchfit._engine.device.oom import classify, describe, is_oom
from batchfit._engine.virtual_memory.memory import virtual_memory
from batchfit.errors import NothingFitsError

KINDS = json.loads((Path(__file__).parents[2] / "data" / "oom_kinds.json").read_text())
CUDA_TEXT = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB"


def class_named(name: str) -> type[BaseException]:
    """`torch.distributed.DistBackendError`; AcceleratorError is a RuntimeError before torch 2.8."""
    module, _, last = name.rpartition(".")
    owner = importlib.import_module(module or "builtins")
    return getattr(owner, last, RuntimeError) if last == "AcceleratorError" else getattr(owner, last)


def raised(error: BaseException, *, inside: BaseException, hide: bool = False) -> BaseException:
    """`error` as it comes out when it is raised while `inside` is being handled."""

    def fail() -> None:
        try:
            raise inside
        except type(inside):
            if hide:
                raise error from None
            raise error  # noqa: B904 - the implicit context is what is tested

    with pytest.raises(type(error)) as caught:
        fail()
    assert caught.value.__context__ is inside
    return caught.value


def test_the_file_has_all_kinds() -> None:
    assert [kind["n"] for kind in KINDS["memory"]] == list(range(1, 44))
    assert len(KINDS["controls"]) == 13


@pytest.mark.parametrize("kind", KINDS["memory"], ids=lambda kind: f"{kind['n']}-{kind['name']}")
def test_each_kind_has_its_verdict(kind: dict[str, Any]) -> None:
    error = class_named(kind["type"])(kind["text"])
    if kind["verdict"].startswith("oom, through"):
        for inner in (torch.OutOfMemoryError(CUDA_TEXT), MemoryError()):
            assert classify(error) == "error"
            error.__cause__ = inner
            assert classify(error) == "oom"
            error.__cause__ = None
            assert classify(raised(ValueError(kind["text"]), inside=inner)) == "oom"
        return
    assert classify(error) == kind["verdict"]
    assert is_oom(error) == (kind["verdict"] == "oom")


@pytest.mark.parametrize("kind", KINDS["controls"], ids=lambda kind: kind["name"])
def test_each_control_has_its_verdict(kind: dict[str, Any]) -> None:
    error = class_named(kind["type"])(kind["text"])
    assert classify(error) == kind["verdict"]
    assert not is_oom(error)


def turned_into_an_error() -> BaseException:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning) as caught:
            warnings.warn(CUDA_TEXT, UserWarning, stacklevel=1)
    return caught.value


CONTROLS: list[BaseException] = [
    NothingFitsError(1, device="cuda:0", budget_bytes=1, detail=CUDA_TEXT),  # no second try
    ValueError("CUDA out of memory-efficient attention is not supported"),
    ValueError(CUDA_TEXT),
    RuntimeError("CUDA out of memory-efficient attention is not supported"),
    RuntimeError("the replay memory ran out of memory slots"),
    RuntimeError("required rank 4 tensor to use channels_last memory format"),
    RuntimeError("unable to open file </data/out_of_memory.log> in read-only mode: No such file (2)"),
    RuntimeError("RESOURCE_EXHAUSTED: quota of 100 requests a minute exceeded"),
    RuntimeError("DataLoader worker (pid 7) is killed by signal: Segmentation fault. "),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: invalid device ordinal"),
    RuntimeError("the user killed the worker: Killed"),
    RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"),
    RuntimeError("trying to allocate a cudnn descriptor failed: bad alloc policy 'OOM'"),
    NotImplementedError(CUDA_TEXT),
    RecursionError("maximum recursion depth exceeded while out of memory."),
    KeyError("out of memory"),
    FileNotFoundError(2, "No such file or directory", "out_of_memory.log"),
    OSError("libgomp.so.1: cannot allocate memory in static TLS block"),
    ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
    AssertionError(f"expected {CUDA_TEXT!r}"),
    TypeError("alloc_failed() got an unexpected keyword argument 'oom'"),
    subprocess.CalledProcessError(-9, "train.py", stderr=CUDA_TEXT),
    SystemExit(CUDA_TEXT),
    KeyboardInterrupt(CUDA_TEXT),
    asyncio.CancelledError(CUDA_TEXT),
    torch.linalg.LinAlgError(
        "linalg.cholesky: the factorization could not be completed, out of memory bounds"
    ),
    turned_into_an_error(),
]


@pytest.mark.parametrize("error", CONTROLS, ids=lambda error: f"{type(error).__name__}-{error}"[:60])
def test_our_own_controls_are_the_users_errors(error: BaseException) -> None:
    assert len(CONTROLS) >= 18
    assert classify(error) == "error"


# The same kinds as they read elsewhere, and others that users meet.
MORE: list[tuple[BaseException, str]] = [
    (RuntimeError("CUDA out of memory"), "oom"),
    (RuntimeError("CUDA error: out of memory"), "oom"),
    (RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"), "oom"),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "oom"),
    (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate`"), "oom"),
    (RuntimeError("HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), "oom"),
    (RuntimeError("radix_sort: failed on 2nd step: cudaErrorMemoryAllocation: out of memory"), "oom"),
    (RuntimeError("std::bad_alloc"), "oom"),
    (RuntimeError("Cuda failure 'out of memory'"), "oom"),
    (RuntimeError(f"step failed: {CUDA_TEXT}"), "oom"),
    (
        RuntimeError(
            "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):"
            '\n  File "loop.py", line 1, in work\nRuntimeError: [enforce fail at alloc_cpu.cpp:127] '
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."
        ),
        "oom",
    ),
    (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), "fatal"),
    (RuntimeError("ncclUnhandledCudaError\nLast error:\nCuda failure 700 'an illegal memory access was "
                  "encountered'"), "fatal"),
    (RuntimeError("HIP error: unspecified launch failure"), "fatal"),
    (RuntimeError("CUDA error: misaligned address"), "fatal"),
    (RuntimeError("Storage size calculation overflowed with sizes=[4611686018427387904]"), "too_large"),
    (RuntimeError("batch_norm: input tensor must fit into 32-bit index math"), "too_large"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate`"), "ambiguous"),
    (RuntimeError("DataLoader worker (pid 3) is killed by signal: Bus error. It is possible that "
                  "dataloader's workers are out of shared memory."), "ambiguous"),
    (RuntimeError("unable to mmap 512 bytes from file </torch_1>: Cannot allocate memory (12)"), "ambiguous"),
    (RuntimeError("unable to write to file </torch_1>: No space left on device (28)"), "ambiguous"),
    (OSError(12, "Cannot allocate memory"), "ambiguous"),
]  # fmt: skip


@pytest.mark.parametrize(("error", "verdict"), MORE, ids=lambda value: str(value)[:50])
def test_other_wordings(error: BaseException, verdict: str) -> None:
    assert classify(error) == verdict


@pytest.mark.parametrize(
    "provoke",
    [
        lambda: torch.empty(10**15),
        lambda: np.empty(10**15),
        lambda: bytearray(10**15),
        lambda: torch.zeros(1).expand(10**15).contiguous(),
    ],
    ids=["torch", "numpy", "python", "clone"],
)
def test_real_ones(provoke: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        provoke()
    assert classify(caught.value) == "oom"


def test_a_real_one_from_virtual_memory() -> None:
    with virtual_memory("1MiB"), pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(2**20)
    assert is_oom(caught.value)


def test_a_real_size_overflow_is_too_large() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**62)
    assert classify(caught.value) == "too_large"


class Coded(RuntimeError):
    """Stands in for torch.AcceleratorError, whose code only C++ can set on older versions."""

    def __init__(self, text: str, error_code: int | None) -> None:
        super().__init__(text)
        self.error_code = error_code


@pytest.mark.parametrize(
    ("code", "text", "verdict"),
    [
        (2, "CUDA error: (no text)", "oom"),
        (700, "CUDA error: (no text)", "fatal"),
        (710, "CUDA error: (no text)", "fatal"),
        (9, "CUDA error: (no text)", "too_large"),
        (101, "CUDA error: invalid device ordinal", "error"),
        (None, "CUDA error: out of memory", "oom"),
        (None, "CUDA error: something new", "error"),
    ],
)
def test_the_code_of_an_accelerator_error(
    monkeypatch: pytest.MonkeyPatch, code: int | None, text: str, verdict: str
) -> None:
    monkeypatch.setattr(oom, "_ACCELERATOR", Coded)
    assert classify(Coded(text, code)) == verdict


def test_a_torch_without_accelerator_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oom, "_ACCELERATOR", None)
    assert classify(RuntimeError("CUDA error: out of memory")) == "oom"
    assert classify(Coded("CUDA error: something new", 2)) == "error"


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch.AcceleratorError came with 2.8")
def test_the_real_accelerator_error_is_the_one_that_is_looked_for() -> None:
    error = torch.AcceleratorError("CUDA error: (no text)")
    assert classify(error) == "error"
    error.error_code = 2
    assert classify(error) == "oom"


def test_from_none_hides_the_context() -> None:
    assert classify(raised(ValueError("bad config"), inside=MemoryError())) == "oom"
    assert classify(raised(ValueError("bad config"), inside=MemoryError(), hide=True)) == "error"


def test_an_explicit_cause_is_the_reason_and_not_the_context() -> None:
    error = raised(ValueError("bad config"), inside=MemoryError())
    error.__cause__ = KeyError("lr")
    assert classify(error) == "error"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_interrupt_while_an_oom_is_handled_is_not_an_oom(stop: type[BaseException]) -> None:
    error = raised(stop(), inside=torch.OutOfMemoryError(CUDA_TEXT))
    assert error.__context__ is not None
    assert classify(error) == "error"
    # Nor is what was raised while that interrupt was handled.
    assert classify(raised(ValueError("cleanup failed"), inside=error)) == "error"


def test_cycles_end() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) == "error"
    first.__context__ = first
    assert classify(first) == "error"
    second.__cause__ = MemoryError()
    second.__cause__.__cause__ = first
    assert classify(first) == "oom"


def test_groups_are_searched() -> None:
    memory = RuntimeError("wrapped")
    memory.__cause__ = torch.OutOfMemoryError(CUDA_TEXT)
    group = ExceptionGroup("tasks", [ValueError("x"), ExceptionGroup("inner", [KeyError("y"), memory])])
    assert classify(group) == "oom"
    assert classify(raised(ValueError("outside"), inside=group)) == "oom"
    assert classify(ExceptionGroup("tasks", [ValueError("x")])) == "error"
    assert classify(BaseExceptionGroup("tasks", [KeyboardInterrupt(), MemoryError()])) == "error"


def test_the_gravest_verdict_of_the_chain_wins() -> None:
    fatal = RuntimeError("CUDA error: device-side assert triggered")
    ambiguous = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    large = RuntimeError("Invalid buffer size: 33.92 GiB")
    # (not a MemoryError: CPython recycles those with the `from None` mark of an earlier one)
    assert classify(raised(torch.OutOfMemoryError(), inside=fatal)) == "fatal"
    assert classify(raised(RuntimeError("CUDA error: misaligned address"), inside=MemoryError())) == "fatal"
    assert classify(raised(ambiguous, inside=MemoryError())) == "oom"
    assert classify(raised(ValueError("x"), inside=large)) == "too_large"
    assert classify(raised(RuntimeError("CUFFT_INTERNAL_ERROR"), inside=large)) == "too_large"


class Unprintable(RuntimeError):
    def __str__(self) -> str:
        raise AttributeError("no text yet")


def test_an_error_without_a_text() -> None:
    assert classify(Unprintable()) == "error"
    assert describe(Unprintable()) == "Unprintable"
    assert describe(MemoryError()) == "MemoryError"


def test_describe_shows_the_error_that_decided() -> None:
    error = raised(ValueError("training_step failed"), inside=torch.OutOfMemoryError(CUDA_TEXT + "\nmore"))
    assert describe(error) == f"OutOfMemoryError: {CUDA_TEXT}"
    assert describe(raised(ValueError("a\nb"), inside=KeyError("x"))) == "ValueError: a"
    assert describe(ValueError("\n\n  indented\n")) == "ValueError: indented"


def test_describe_cuts_a_long_line() -> None:
    line = describe(RuntimeError("x" * 500))
    assert len(line) == 200
    assert line.startswith("RuntimeError: xxx")
    assert line.endswith("xxx...")
    assert describe(RuntimeError("x" * 186)) == "RuntimeError: " + "x" * 186


def test_describe_shows_the_line_that_decided() -> None:
    nccl = next(kind["text"] for kind in KINDS["memory"] if kind["name"] == "NCCL")
    text = describe(RuntimeError("NCCL error\n" + nccl.splitlines()[-1]))
    assert text == "RuntimeError: NCCL error ... Cuda failure 2 'out of memory'"


@examples(100)
@given(
    text=st.text(max_size=400),
    kind=st.sampled_from([ValueError, RuntimeError, MemoryError, OSError, KeyError]),
)
def test_describe_is_one_short_line_and_any_text_has_a_verdict(text: str, kind: type[Exception]) -> None:
    error = kind(text)
    line = describe(error)
    assert len(line) <= 200
    assert line.splitlines() == [line]
    assert line.startswith(kind.__name__)
    assert classify(error) == ("oom" if kind is MemoryError else "error")


def test_nothing_of_the_error_is_kept() -> None:
    def fails() -> None:
        held = torch.ones(3)
        watched.append(weakref.ref(held))
        raise torch.OutOfMemoryError(CUDA_TEXT)

    watched: list[weakref.ref[torch.Tensor]] = []
    kept: list[object] = []
    try:
        fails()
    except RuntimeError as error:
        kept = [classify(error), describe(error)]
    gc.collect()
    assert watched[0]() is None
    assert kept == ["oom", f"OutOfMemoryError: {CUDA_TEXT}"]


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(CUDA_TEXT)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_activations_of_a_backward_that_failed_are_released(mode: Callable[[], Any]) -> None:
    """On a CPU torch itself keeps them until the next backward: another branch was ready and waits."""

    def failed() -> weakref.ref[torch.Tensor]:
        x = torch.ones(64, requires_grad=True)
        other = x.exp().tanh()
        loss = other.sin().sum() + _Fails.apply(x.sin()).sum()
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        return weakref.ref(other)

    left = failed()
    with mode():
        oom.recover(CpuDevice())
    assert left() is None
