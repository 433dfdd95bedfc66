"""Factories for tests of child processes: workloads whose steps kill, hang or poison them above a size.

What goes wrong, and above which size, is read from the environment, which a child process inherits.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fake_cuda import FakeCuda, MiB
from launch import end_process

import batchfit
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.trial import child_main


class OwnError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise LookupError


def make() -> batchfit.Workload:
    """A sample is 256 KiB and a step holds two such tensors: 15 fit into 8 MiB.

    No optimizer of torch's: the first one in a process imports its compiler, for a second.
    """
    weight = torch.ones(8, requires_grad=True)

    def step(batch_size: int) -> None:
        leave_word(f"step {batch_size}")
        batch = torch.ones(batch_size, 2**16)
        doubled = batch * 2
        weight.grad = None
        (weight.sum() * doubled[0, 0]).backward()
        weight.data.sub_(weight.grad, alpha=0.1)

    return batchfit.Workload(step, state=[weight])


def on_a_shared_card() -> batchfit.Workload:
    """10 MiB held and 2 MiB a sample, on a fake card of 1000 MiB; others have as many MiB as a file says."""

    class Shared(FakeCuda):
        others: Any = property(
            lambda self: int(Path(os.environ["OTHERS"]).read_text()) * MiB, lambda *_: None
        )

    cuda = Shared()
    device = CudaDevice(0, backend=cuda)
    cuda.allocate(10 * MiB)
    child_main.PATIENCE_S = 0.1
    child_main.device_to_run = lambda *_, **__: device

    def step(batch_size: int) -> None:
        leave_word(f"step {batch_size}")
        if "SPIKE" in os.environ and os.path.exists(os.environ["SPIKE"]):  # others have much, for one trial
            os.unlink(os.environ["SPIKE"])
            Path(os.environ["OTHERS"]).write_text("800")
            atexit.register(Path(os.environ["OTHERS"]).write_text, "0")
        cuda.allocate(2 * batch_size * MiB)
        cuda.free(2 * batch_size * MiB)

    return batchfit.Workload(step, state=[])


def faulty() -> batchfit.Workload:
    work = make()

    def step(batch_size: int) -> None:
        work.step(batch_size)
        if batch_size > int(os.environ["ABOVE"]):
            FAULTS[os.environ["FAULT"]]()

    return work.with_step(step)


def talks() -> batchfit.Workload:
    """Prints more than a pipe holds and ends none of its last lines; may be killed."""
    work = faulty()
    print("x" * 2**17)

    def step(batch_size: int) -> None:
        print(f"out {batch_size}")
        print("no end of a line: é", end="", file=sys.stderr, flush=True)
        work.step(batch_size)

    atexit.register(print, "goodbye", end="")
    return work.with_step(step)


def plain_step(batch_size: int) -> None:
    make().step(batch_size)


def two_arguments(batch_size: int, more: int) -> None:
    """No step, and nothing that makes one."""


def kills_itself_while_it_loads() -> batchfit.Workload:
    FAULTS[os.environ["FAULT"]]()
    return make()


def leave_word(text: str) -> None:
    """Tell the test what runs, in which process."""
    if "DIARY" in os.environ:
        with open(os.environ["DIARY"], "a") as file:
            file.write(f"{os.getpid()} {text}\n")


def hang() -> None:
    leave_word("hangs")
    time.sleep(600)


def poison() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def raise_value_error() -> None:
    raise ValueError("mine")


def raise_own_error() -> None:
    raise OwnError("nobody else knows me")


def raise_exit() -> None:
    sys.exit(7)


def start_a_program_and_hang() -> None:
    program = subprocess.Popen(["sleep", "600"])
    leave_word(f"program {program.pid}")
    hang()


def fork_and_exit() -> None:
    """What is left holds the pipe that the parent reads."""
    if os.fork() == 0:
        leave_word("left over")
        time.sleep(600)
    time.sleep(0.2)
    end_process(3)


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], None]] = {
    "SIGKILL": signalled(signal.SIGKILL),
    "SIGILL": signalled(signal.SIGILL),
    "exit": lambda: end_process(3),
    "hang": hang,
    "poison": poison,
    "value": raise_value_error,
    "own": raise_own_error,
    "sys.exit": raise_exit,
    "program": start_a_program_and_hang,
    "fork": fork_and_exit,
    "none": lambda: None,
}
FILE = str(Path(__file__))
