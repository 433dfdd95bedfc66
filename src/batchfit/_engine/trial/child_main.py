"""The child's side of `isolate`: a process that runs one trial and ends.

Rules:
- It ends when its parent does, whatever it is doing: the kernel sees to it on Linux, and everywhere a
  thread that reads the parent's pipe to its end.
- It reports each event once, as a line of JSON: started, loaded, reachable bytes, each step that begins, the
  trial. What the user's code prints goes to its stdout and stderr, never into that pipe.
- Where RAM is exhausted, the kernel shall kill this process and not the parent.
- A dead device context is an outcome here: the next trial has a process, and a context, of its own.
- No state is restored: it ends with the process.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

import torch.distributed

from batchfit._engine.device import oom
from batchfit._engine.device.device import Device
from batchfit._engine.device.resolve import device_to_run, resolve_device
from batchfit._engine.device.tensors import count_elements
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.child_process import Message
from batchfit._engine.trial.trial import TrialRequest, run_request
from batchfit._engine.workload import user_errors as failure
from batchfit._engine.workload.target import Target, home_of, load_target, make_workload
from batchfit.results import Trial
from batchfit.workload import Workload

# This process is such a child: it may not start children of its own.
active = False

_PR_SET_PDEATHSIG = 1
_LONGEST_PICKLE = 2**20  # an error that holds a model must not travel
PATIENCE_S = 10.0  # for the memory of the child before this one to come back


def serve(requests: BinaryIO, answers_fd: int, *, parent_pid: int, spare: bool) -> NoReturn:
    """Do what the parent requests: load a factory, run one trial of what it makes.

    A `spare` child has time until its trial: it imports what most workloads will need.
    """
    asked, say = stand_by(requests, answers_fd, parent_pid)
    if spare:
        with contextlib.suppress(Exception):
            importlib.import_module("torch._dynamo")  # a second, which any optimizer takes when it is made
    say("started")
    request = asked.get()
    be_taken_first()
    target = Target(**request["target"])
    stage, made_at = "place", ""
    try:
        join(request)
        if request["device"] is not None:  # a wrong one is refused before the user's code runs
            resolve_device(request["device"])
        stage = "load"
        loaded = load_target(target)
        made_at = loaded.line
        work = make_workload(target, loaded)
        work._check_by_samples("isolate=True")
        stage = "place"
        device = device_to_run(work._held, request["device"])
        say(
            "loaded",
            device=device.name,
            available_bytes=device.budget_bytes(),
            total_bytes=device.total_bytes(),
            state_elements=count_elements(work.state),
            made_of=work._made_of(1),
        )
        request = asked.get()
        while "least_bytes" in request:
            say("reachable", available_bytes=_once_reachable(device, request["least_bytes"]))
            request = asked.get()
        if "call" in request:
            say("called", value=_called(request["call"], work, request["arguments"]))
            leave()
        stage = "step"
        trial = _run(work, device, TrialRequest(**request["trial"]), request["budget_bytes"], say)
        say("trial", trial=trial.model_dump(), available_bytes=_reachable_after(device))
    except BaseException as error:  # noqa: BLE001  the parent raises it, whatever it is
        say("raised", stage=stage, **_error_message(error, home=home_of(target), made_at=made_at))
    leave()


def _called(name: str, work: Workload, arguments: Message) -> Any:
    """What a function of a package above says of the workload, as plain data; `name` is "module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(work, **arguments)


def stand_by(
    requests: BinaryIO, answers_fd: int, parent_pid: int
) -> tuple[queue.SimpleQueue[Message], Callable[..., None]]:
    """Connect to the parent; returns the queue of its requests and the function that sends it messages."""
    global active
    active = True
    _die_with(parent_pid)
    for fd in (requests.fileno(), answers_fd):
        os.set_inheritable(fd, False)  # a program that the user's code starts has no business with them
    asked: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests, asked), name="batchfit-parent", daemon=True).start()

    def say(kind: str, **rest: Any) -> None:
        whole = json.dumps({"kind": kind, **rest}).encode() + b"\n"
        while whole:
            whole = whole[os.write(answers_fd, whole) :]

    with contextlib.suppress(Exception):  # a process that is killed shall have said all that it had printed
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return asked, say


def join(request: Message) -> None:
    """Be one of the children of all ranks, as if a launcher had started them."""
    os.environ.update(request["environment"])
    if request["backend"] is not None:
        torch.distributed.init_process_group(request["backend"])


def leave() -> NoReturn:
    """End now: with the user's exit handlers, without the half second in which torch is taken apart.

    Threads of the user's are not joined, and an exit handler that raises is the interpreter's to report.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have closed or replaced it
            stream.flush()
    os._exit(0)


def _run(
    work: Workload, device: Device, request: TrialRequest, budget_bytes: int, say: Callable[..., None]
) -> Trial:
    number = 0

    def step(batch_size: int) -> object:
        nonlocal number
        number += 1
        say("step", number=number)
        return work.step(batch_size)

    begun = time.perf_counter()
    message = ""
    if request.is_smallest:
        faulthandler.enable()  # a crash here ends the search: the user will want to know where it was
    try:
        with device.limit(budget_bytes):
            return run_request(request, work, step=step, device=device, snapshot=Snapshot.take(()))
    except Exception as error:
        if request.is_smallest or oom.classify(error) != "fatal":
            raise
        message = oom.describe(error)
    return Trial(
        size=request.size,
        outcome="killed",
        steps_run=number - 1,
        elapsed_s=time.perf_counter() - begun,
        soak=request.soak,
        ambiguous=True,
        message=message,
    )


def _error_message(error: BaseException, *, home: str | None, made_at: str) -> Message:
    """An error as text, and as itself where it can travel."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not make a crash of the user's error
        text = ""
    return {
        "type": type(error).__name__,
        "text": text,
        "headline": failure.headline(error, what="", home=home, made_at=made_at).strip(),
        "short": failure.details(error, home=home, full=False),
        "full": failure.details(error, home=home, full=True),
        "pickle": _pickled(error),
    }


def _pickled(error: BaseException) -> str | None:
    try:
        data = pickle.dumps(error)
        if len(data) > _LONGEST_PICKLE or type(pickle.loads(data)) is not type(error):
            return None
    except Exception:  # noqa: BLE001  whatever the user's error cannot do, its text is enough
        return None
    return base64.b64encode(data).decode()


def _once_reachable(device: Device, least_bytes: int) -> int:
    """Reachable bytes, once enough or after a time-out: a driver releases memory after the exit."""
    deadline = time.monotonic() + PATIENCE_S
    while (available := device.budget_bytes()) < least_bytes and time.monotonic() < deadline:
        time.sleep(0.05)
    return available


def _reachable_after(device: Device) -> int | None:
    try:
        return device.budget_bytes()
    except RuntimeError:  # the trial has left a dead device context
        return None


def _listen(requests: BinaryIO, asked: queue.SimpleQueue[Message]) -> None:
    for line in requests:
        asked.put(json.loads(line))
    os.killpg(0, signal.SIGKILL)  # the parent is gone; our group is all that we have started


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went while we started
        os._exit(1)


def be_taken_first() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
