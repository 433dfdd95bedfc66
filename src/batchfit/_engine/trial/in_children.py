"""Trials in child processes: what kills, hangs or poisons a child is an outcome, and the search goes on.

Rules:
- One trial, one process: a fresh interpreter that makes the workload from an importable factory. What
  cannot be named cannot be made again in a child, and is a `TypeError`; nothing runs here instead.
- A death that the size may explain is an outcome. Killed (-9) is what the kernel does when memory runs out.
  Any other signal, or an exit, may be memory or not: it counts as too big only if a smaller size runs.
  A child that dies before its first step has not died of the size: that is an error.
- An error of the user's comes out as it would without a child: of its own type where that type is loaded
  here, with the child's traceback as a note.
- No child outlives the search: its whole process group is killed and its end is waited for, on Ctrl-C too.
- Nothing of the user's is loaded here, no device is touched, and no file handle stays open.

`process.py` starts, reads and ends a process; `child.py` is what runs in it.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
import io
import operator
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple, Self, final

import torch
import torch.distributed as dist

from batchfit._engine.distributed.collectives import reads_as_lost
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.trial import child_main as child_side
from batchfit._engine.trial.child_group import ChildGroup, CutOff
from batchfit._engine.trial.child_process import Child, ChildSilent, Message, OnOutput
from batchfit._engine.trial.interface import RunTrial, TrialRequest
from batchfit._engine.virtual_memory.memory import active
from batchfit._engine.workload.target import parse_target
from batchfit._engine.workload.user_errors import ChildTraceback
from batchfit.errors import BatchfitError, ChildDiedError, ChildRaisedError
from batchfit.results import Outcome, Trial
from batchfit.workload import Workload

_START_S = 300.0  # to import torch, on a machine that is busy with other things
_LOOK_S = 60.0  # to look at a device, and to wait for what the child before has held there
_FAREWELL_S = 5.0  # for the exit handlers of the user's code, once the answer is here


@final
@dataclass(frozen=True, slots=True)
class Factory:
    """A function that a child can find again: by module and name, or as the text of a target.

    `arguments` are those of the target's script.
    `on_loaded(device, available_bytes)` and `on_step(size, number)` are told what children do, and
    `on_output(text, is_error)` what they print: without it that goes where this process' output goes.
    """

    text: str
    module: str | None = None
    function: str = ""
    on_loaded: Callable[[str, int], object] | None = None
    on_step: Callable[[int, int], object] | None = None
    on_output: OnOutput | None = None
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, workload: object) -> Factory:
        """The factory that the caller of `find_batch_size(isolate=True)` has given."""
        if isinstance(workload, Factory):
            return workload
        if isinstance(workload, str):
            parse_target(workload)
            return cls(workload)
        why = _why_not_a_factory(workload)
        if why:
            raise TypeError(
                "workload must be, with isolate=True, a module-level step(batch_size), a module-level "
                "function without required arguments that returns the workload, or 'file.py:name' or "
                "'package.module:name': each trial makes the workload again, in a child process. "
                f"Not {why}"
            )
        return cls._named(workload)

    @classmethod
    def _named(cls, function: Any) -> Factory:
        module, name = function.__module__, function.__qualname__
        if module != "__main__":
            return cls(f"{module}:{name}", module, name)
        main: Any = sys.modules["__main__"]
        if main.__spec__ is not None:  # python -m package.module
            return cls(f"{main.__spec__.name}:{name}", main.__spec__.name, name)
        return cls(f"{main.__file__}:{name}")


def _why_not_a_factory(given: Any) -> str:
    if isinstance(given, Workload):
        return f"{given!r}, which lives in this process"
    if not inspect.isfunction(given):
        return f"{given!r}"
    name, module = given.__qualname__, sys.modules.get(given.__module__)
    if "<" in name:
        return f"{name!r}, which no other process can import: move it to the top of its module"
    try:
        found = operator.attrgetter(name)(module)
    except AttributeError:
        found = None
    if found is not given:
        if module is None or found is None:  # made by exec, or by a tool that runs cells
            return f"{name!r}, which is in no module that a child could import: put it into a file"
        return f"{given!r}: {given.__module__}:{name} is something else"
    if given.__module__ == "__main__" and not _main_can_be_loaded(module):
        return f"{name!r} of an interactive session: put it into a file"
    needed = [p.name for p in inspect.signature(given).parameters.values() if _is_required(p)]
    if len(needed) > 1:
        return f"{name!r}, which needs arguments ({', '.join(needed)})"
    return ""


def _is_required(parameter: inspect.Parameter) -> bool:
    optional = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in optional


def _main_can_be_loaded(main: Any) -> bool:
    return main.__spec__ is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _check_possible(device: object) -> str | None:
    """Refuse where children cannot be, before one is started; the device as a child is told of it."""
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

    def budget_bytes(self) -> int:
        """What the program may use."""
        return self.available_bytes

    def total_bytes(self) -> int:
        """The memory of the device."""
        return self.whole_bytes

    @property
    def is_ram(self) -> bool:
        """Whether its memory is that of the machine."""
        return self.name.partition(":")[0] == "cpu"


def _place(loaded: Message) -> ChildDevice:
    available, total = loaded["available_bytes"], loaded["total_bytes"]
    around = active()
    if loaded["device"] == "cpu" and around is not None:  # a virtual memory does not reach into a child
        available, total = min(available, around.limit_bytes), min(total, around.limit_bytes)
    return ChildDevice(loaded["device"], available, total, loaded["state_elements"])


@final
class InChildren:
    """Runs trials, each in a child of its own, one at a time.

        with InChildren(Factory.of(make), device=None, timeout_s=60) as children:
            with children.trying(2**30) as run_one:
                trial = run_one(TrialRequest(8, steps=3))

    While a trial runs, the next child already imports torch; it loads nothing of the user's before its turn.
    """

    def __init__(
        self, factory: Factory, *, device: object, timeout_s: float | None, ranks: Ranks | None = None
    ) -> None:
        self._company = ChildGroup(ranks or Ranks.current())
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
        """Where the workload runs. Starts the first child, which then waits for its trial."""
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

    @property
    def samples(self) -> None:
        """Not known: the dataset is in the children."""
        return None

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Do nothing: a child whose peer failed is ended, so no rank waits in a collective."""

    def reachable_bytes(self, least_bytes: int) -> int:
        """What the next trial may use, as the child sees it that will run it.

        It waits a while for `least_bytes`: what the child before has held may be on its way back. RAM comes
        and goes all the time, and a trial there has the budget for itself: the first figure stands.
        """
        if not self.device.is_ram:
            child = self._loaded = self._loaded or self._load()
            child.send(least_bytes=least_bytes)
            doing = f"looking at {self.device.name}"
            seen = self._await(child, "reachable", doing=doing, timeout_s=_LOOK_S)
            self._seen_bytes = seen["available_bytes"]
        return self._seen_bytes

    def reachable_after_bytes(self) -> int:
        """What was reachable when the last trial had ended, if it could still tell; else before it."""
        return self._seen_bytes

    def regroup(self) -> None:
        """Nothing of a trial outlives its process."""

    @contextlib.contextmanager
    def trying(self, budget_bytes: int) -> Iterator[RunTrial]:
        """Inside, a function that runs one trial under the budget."""
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
                self._company.tell_failed()
            child.end(after_s=_FAREWELL_S)
        except CutOff:
            return None
        except BaseException:
            self._company.tell_failed()
            raise
        finally:
            child.end()
        return trial.model_copy(update={"elapsed_s": time.perf_counter() - begun})

    def _load(self) -> Child:
        """A child that has made the workload and waits for its trial."""
        factory = self._factory
        child = self._started()
        try:
            child.send(
                text=factory.text,
                module=factory.module,
                function=factory.function,
                arguments=factory.arguments,
                device=self._device_name,
                **self._company.invite(),
            )
            doing = f"loading {factory.text}"
            loaded = self._await(child, "loaded", doing=doing, timeout_s=self._timeout_s)
            if self._first is None:
                self._first = _place(loaded)
                self._seen_bytes = self._first.available_bytes
                if factory.on_loaded is not None:
                    factory.on_loaded(self._first.name, self._first.available_bytes)
        except CutOff:
            child.end()
            self._company.ask_why()
            raise
        except BaseException:
            self._company.tell_failed()
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
            message = child.receive(timeout_s, look=self._company.look())
        except ChildSilent:
            raise ChildDiedError(f"was still {doing} after {timeout_s:g} s") from None
        if message is None:
            raise ChildDiedError(
                f"{_ending(child.exit_code()).text} while {doing}", exit_code=child.exit_code()
            )
        if message["kind"] == "raised":
            self._blame_others(message)
            raise _rebuilt(message)
        assert message["kind"] == kind, message
        return message

    def _follow(self, child: Child, request: TrialRequest) -> Trial:
        """Read what the child says of its trial until that ends, one way or another."""
        size, number = request.size, 0
        ending: _Ending | None = None
        while ending is None:
            try:
                message = child.receive(self._timeout_s, look=self._company.look())
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
                self._blame_others(message)
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

    def _blame_others(self, message: Message) -> None:
        """A child that lost a connection has not failed itself, if another rank says that its own has."""
        if not self._company.is_alone and reads_as_lost(message["text"]) and self._company.fails_soon():
            raise CutOff


class _Ending(NamedTuple):
    """How a child that gave no answer ended."""

    outcome: Outcome
    text: str
    ambiguous: bool


def _ending(exit_code: int) -> _Ending:
    if exit_code == -signal.SIGKILL:
        return _Ending("killed", "was killed (SIGKILL, as the system does when RAM runs out)", False)
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
    """The error that a child told of, to be raised here."""
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
    except Exception:  # noqa: BLE001  its type may look different in this process, in whatever way
        return None
    return error if isinstance(error, BaseException) else None
