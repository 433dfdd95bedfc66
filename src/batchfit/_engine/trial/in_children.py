"""Trials in child processes: a child that is killed, hangs or loses its device is an outcome.

Rules:
- One trial, one process: a fresh interpreter that makes the workload from an importable factory.
- A death that the size may explain is an outcome. Killed (-9) is what the kernel does when RAM is exhausted.
  Any other signal, or an exit, may be memory or not: it counts as too big only if a smaller size runs.
  A child that dies before its first step has not died of the size: that is an error.
- An error of the user's comes out as it would without a child: of its own type where that type is loaded
  here, with the child's traceback as a note.
- No child outlives the search: its whole process group is killed and reaped, on Ctrl-C too.
- Nothing of the user's is loaded here, no device is touched, and no file handle stays open.

`child_process.py` starts, reads and ends a process; `child_main.py` is what runs in it.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
import torch.distributed as dist

from batchfit._engine.distributed.collectives import reads_as_lost
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial import child_main as child_side
from batchfit._engine.trial.child_group import ChildGroup, CutOff
from batchfit._engine.trial.child_process import Child, ChildSilent, Message
from batchfit._engine.trial.factory import Factory
from batchfit._engine.trial.trial import RunTrial, TrialRequest
from batchfit._engine.virtual_memory.memory import active
from batchfit._engine.workload.user_errors import ChildTraceback
from batchfit.errors import BatchfitError, ChildDiedError, ChildRaisedError
from batchfit.results import Outcome, Trial

_START_S = 300.0  # to import torch, on a machine that is busy with other things
_READ_DEVICE_S = 60.0  # to read a device, and to wait for what the child before has held there
_FAREWELL_S = 5.0  # for the exit handlers of the user's code, once the answer is here


def _check_possible(device: object) -> str | None:
    """Refuse where children cannot run, before one is started; the device's name for the child."""
    if os.name != "posix":
        raise BatchfitError("isolate=True needs a POSIX system (Linux or macOS). Leave it out here.")
    if child_side.active:
        raise BatchfitError(
            "find_batch_size(isolate=True) was called again in a child that it had started. "
            'Put the call under if __name__ == "__main__".'
        )
    launched = os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")
    if launched and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "isolate must be False under torch.distributed while there is no process group, not True: the "
            'ranks have to agree. Call torch.distributed.init_process_group first; "gloo" will do'
        )
    if device is not None and not isinstance(device, str | torch.device):
        raise TypeError(f"device must be text such as 'cuda:0' with isolate=True, not {device!r}")
    return None if device is None else str(device)


@final
@dataclass(frozen=True, slots=True)
class ChildDevice:
    """The device that the children use, as the first of them saw it. This process does not touch it."""

    name: str
    available_bytes: int
    whole_bytes: int
    state_elements: int
    made_of: str = ""

    def budget_bytes(self) -> int:
        """Bytes that the program may use."""
        return self.available_bytes

    def total_bytes(self) -> int:
        """The memory of the device."""
        return self.whole_bytes

    @property
    def is_ram(self) -> bool:
        """Whether its memory is that of the machine."""
        return self.name.partition(":")[0] == "cpu"


def _device_of(loaded: Message) -> ChildDevice:
    available, total = loaded["available_bytes"], loaded["total_bytes"]
    around = active()
    if loaded["device"] == "cpu" and around is not None:  # a virtual memory does not reach into a child
        available, total = min(available, around.limit_bytes), min(total, around.limit_bytes)
    return ChildDevice(
        loaded["device"], available, total, loaded["state_elements"], made_of=loaded["made_of"]
    )


@final
class InChildren:
    """Runs trials, each in a child of its own, one at a time.

        with InChildren(Factory.of(make), device=None, timeout_s=60) as children:
            with children.trying(2**30) as run_one:
                trial = run_one(TrialRequest(8, steps=3))

    While a trial runs, the next child already imports torch; it loads user code for its own trial only.
    """

    def __init__(
        self, factory: Factory, *, device: object, timeout_s: float | None, ranks: Ranks | None = None
    ) -> None:
        self._group = ChildGroup(ranks or Ranks.current())
        self._device_name = _check_possible(device)
        self._factory = factory
        self._timeout_s = timeout_s
        self._first: ChildDevice | None = None
        self._seen_bytes = 0
        self._loaded: Child | None = None
        self._spare: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self._loaded, self._spare):
            if child is not None:
                child.end()
        self._loaded = self._spare = None

    @property
    def device(self) -> ChildDevice:
        """Where the workload runs; starts the first child, which then waits for its trial."""
        if self._first is None:
            self._loaded = self._load()
        assert self._first is not None
        return self._first

    @property
    def state_elements(self) -> int:
        """How many numbers the workload's state holds."""
        return self.device.state_elements

    @property
    def state_bytes(self) -> None:
        """Not known: the state is in the children."""
        return None

    further = ""

    def holders(self, live_bytes: int | None) -> list[tuple[str, int]]:
        """Not known: the state is in the children."""
        return []

    def call(self, name: str, arguments: Message, *, timeout_s: float) -> Any:
        """What the function "module:function" says of the workload, called in a child that has made it."""
        child, self._loaded = self._loaded or self._load(), None
        try:
            child.send(call=name, arguments=arguments)
            answer = self._await(child, "called", doing=f"calling {name}", timeout_s=timeout_s)
            return answer["value"]
        finally:
            child.end()

    @property
    def samples(self) -> None:
        """Not known: the dataset is in the children."""
        return None

    def made_of(self, size: int) -> str:
        """What the first child has said of its batches."""
        return self.device.made_of

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Do nothing: a child whose peer failed is ended, so no rank waits in a collective."""

    def reachable_bytes(self, least_bytes: int) -> int:
        """Bytes that the next trial may use, as the child reads them that will run it.

        It waits a while for `least_bytes`: what the child before has held may not be released yet. Free RAM
        changes all the time, and a trial there has the budget for itself: the first figure stands.
        """
        if not self.device.is_ram:
            child = self._loaded = self._loaded or self._load()
            child.send(least_bytes=least_bytes)
            doing = f"reading the memory of {self.device.name}"
            seen = self._await(child, "reachable", doing=doing, timeout_s=_READ_DEVICE_S)
            self._seen_bytes = seen["available_bytes"]
        return self._seen_bytes

    def reachable_after_bytes(self) -> int:
        """Bytes that were reachable after the last trial, or before it where its child had died."""
        return self._seen_bytes

    def regroup(self) -> None:
        """Do nothing: no state of a trial outlives its process."""

    @contextlib.contextmanager
    def trying(self, budget_bytes: int) -> Iterator[RunTrial]:
        """A context with a function that runs one trial under the budget."""
        yield partial(self._run, budget_bytes=budget_bytes)

    def _run(self, request: TrialRequest, *, budget_bytes: int) -> Trial | None:
        """One trial in a fresh process, start to end; None where it was cut off, as another rank's failed."""
        begun = time.perf_counter()
        child, self._loaded = self._loaded or self._load(), None
        try:
            child.send(trial=asdict(request), budget_bytes=budget_bytes)
            if not request.soak:  # after a soak there is most likely nothing more to try
                self._spare = self._spare or Child(spare=True, on_output=self._factory.on_output)
            trial = self._follow(child, request)
            if not trial.fits:
                self._group.report_failed()
            child.end(after_s=_FAREWELL_S)
        except CutOff:
            return None
        except BaseException:
            self._group.report_failed()
            raise
        finally:
            child.end()
        return trial.model_copy(update={"elapsed_s": time.perf_counter() - begun})

    def _load(self) -> Child:
        """A child that has made the workload and waits for its trial."""
        factory = self._factory
        child = self._started()
        try:
            child.send(target=asdict(factory.target), device=self._device_name, **self._group.rendezvous())
            doing = f"loading {factory.target.text}"
            loaded = self._await(child, "loaded", doing=doing, timeout_s=self._timeout_s)
            if self._first is None:
                self._first = _device_of(loaded)
                self._seen_bytes = self._first.available_bytes
                if factory.on_loaded is not None:
                    factory.on_loaded(self._first.name, self._first.available_bytes)
        except CutOff:
            child.end()
            self._group.raise_cause()
            raise
        except BaseException:
            self._group.report_failed()
            child.end()
            raise
        return child

    def _started(self) -> Child:
        """A child that has imported torch: the spare one, unless something has killed it meanwhile."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(ChildDiedError):
                return self._when_started(spare)
        return self._when_started(Child(on_output=self._factory.on_output))

    def _when_started(self, child: Child) -> Child:
        try:
            self._await(child, "started", doing="starting", timeout_s=_START_S)
        except BaseException:
            child.end()
            raise
        return child

    def _await(self, child: Child, kind: str, *, doing: str, timeout_s: float | None) -> Message:
        """The next message, which must be of that kind; a death here has nothing to do with the size."""
        try:
            message = child.receive(timeout_s, check=self._group.failure_check())
        except ChildSilent:
            raise ChildDiedError(f"was still {doing} after {timeout_s:g} s") from None
        if message is None:
            raise ChildDiedError(
                f"{_ending(child.exit_code()).text} while {doing}", exit_code=child.exit_code()
            )
        if message["kind"] == "raised":
            self._raise_if_cut_off(message)
            raise _rebuilt(message)
        assert message["kind"] == kind, message
        return message

    def _follow(self, child: Child, request: TrialRequest) -> Trial:
        """Read what the child says of its trial until that ends, one way or another."""
        size, number = request.size, 0
        ending: _Ending | None = None
        while ending is None:
            try:
                message = child.receive(self._timeout_s, check=self._group.failure_check())
            except ChildSilent:
                ending = _Ending(
                    "timeout", f"was stopped after {self._timeout_s:g} s without an answer (timeout_s)", False
                )
                child.end()  # no use in waiting for it any longer
                break
            if message is None:
                ending = _ending(child.exit_code())
            elif message["kind"] == "step":
                number = message["number"]
                if self._factory.on_step is not None:
                    self._factory.on_step(size, number)
            elif message["kind"] == "trial":
                if not self.device.is_ram and message["available_bytes"] is not None:
                    self._seen_bytes = message["available_bytes"]
                return Trial.model_validate(message["trial"])
            else:
                self._raise_if_cut_off(message)
                raise _rebuilt(message)
        where = (
            f"in step {number} of batch size {size}" if number else f"before the first step of size {size}"
        )
        if number == 0 or (ending.ambiguous and request.is_smallest):
            exit_code = None if ending.outcome == "timeout" else child.exit_code()
            raise ChildDiedError(f"{ending.text} {where}", exit_code=exit_code, smallest=bool(number))
        return Trial(
            size=size,
            outcome=ending.outcome,
            steps_run=number - 1,
            soak=request.soak,
            ambiguous=ending.ambiguous,
            message=f"the child process {ending.text} {where}",
        )

    def _raise_if_cut_off(self, message: Message) -> None:
        """Raise `CutOff` where a child lost its connection because another rank's child has failed."""
        text = f"{message['type']}: {message['text']}"
        if not self._group.is_alone and reads_as_lost(text) and self._group.fails_soon():
            raise CutOff


class _Ending(NamedTuple):
    """How a child that gave no answer ended."""

    outcome: Outcome
    text: str
    ambiguous: bool


def _ending(exit_code: int) -> _Ending:
    if exit_code == -signal.SIGKILL:
        return _Ending("killed", "was killed (SIGKILL, as the system does when RAM is exhausted)", False)
    if exit_code >= 0:
        return _Ending("killed", f"exited by itself with code {exit_code}", True)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return _Ending("killed", f"was ended by {name} ({signal.strsignal(-exit_code)})", True)


def ending_text(exit_code: int) -> str:
    """`was killed (SIGKILL, ...)`: how a child ended that gave no answer."""
    return _ending(exit_code).text


def _rebuilt(message: Message) -> BaseException:
    """The error that a child has reported, to be raised here."""
    error = _unpickled(message["pickle"])
    if error is None:
        error = ChildRaisedError(message["type"], message["text"])
    error.add_note("batchfit: the traceback in the child process:\n" + message["full"])
    with contextlib.suppress(AttributeError):  # an error with slots: then the note has to do
        ChildTraceback(message["stage"], message["headline"], message["short"], message["full"]).put_on(error)
    return error


class _OfLoadedModules(pickle.Unpickler):
    """An error must not bring the user's modules into this process: some touch a device on import."""

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise pickle.UnpicklingError(f"{module} is not loaded here")
        return super().find_class(module, name)


def _unpickled(text: str | None) -> BaseException | None:
    if text is None:
        return None
    try:
        error = _OfLoadedModules(io.BytesIO(base64.b64decode(text))).load()
    except Exception:  # noqa: BLE001  its type may differ in this process, in whatever way
        return None
    return error if isinstance(error, BaseException) else None
