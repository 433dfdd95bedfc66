"""A child process that runs configurations of a sweep, as its parent sees it.

Rules:
- A child that ends without an answer is a `Death`, with how it ended; who asked decides what then.
- The functions of a job are found again by name in a child: what no other process can import is refused, with
  its name, before any process is started. What a child cannot load all the same ends the sweep.
- What a child prints goes through this process' own streams, so that a picture on the terminal makes way.
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import pickletools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from batchfit._engine.trial import child_main as child_side
from batchfit._engine.trial.child_process import Child, ChildSilent
from batchfit._engine.trial.in_children import ending_text
from batchfit._engine.workload.target import NamedFunction
from batchfit._sweep.child_main import MODULE, packed, unpacked
from batchfit._sweep.job import Job
from batchfit._sweep.pure.events import SweepEvent
from batchfit._sweep.pure.grid import Entry
from batchfit.errors import BatchfitError
from batchfit.results import Trial
from batchfit.results._sweep import Stage, SweepRecord

_STAGES: dict[str, Stage] = {"begin": "factory", "measure": "measure", "measure_oom": "measure"}


@final
@dataclass(frozen=True, slots=True)
class Death:
    """A child ended instead of answering; `started`: it had come as far as taking a request."""

    text: str
    started: bool


@final
class Worker:
    """One child at a time, started when there is something to run and again after a death."""

    def __init__(self, job: str, *, environment: Mapping[str, str] | None = None) -> None:
        self._job = job
        self._environment = environment
        self._started = False
        self.child: Child | None = None
        self.entry: Entry | None = None  # what it runs now
        self.stage: Stage = "factory"
        self.trials: list[Trial] = []

    def begin(self, entry: Entry, invitation: Mapping[str, Any] | None = None) -> None:
        """Have a configuration run. `invitation`: how a child that is started now finds other ranks'."""
        if self.child is None:
            self._started = False
            self.child = Child(on_output=_print, module=MODULE, environment=self._environment)
            found = invitation or {"environment": {}, "backend": None}
            self.child.send(job=self._job, **found)
        self.entry, self.stage, self.trials = entry, "factory", []
        self.child.send(configuration=packed(dict(entry.configuration)))

    def said(self) -> Iterator[SweepEvent | SweepRecord | Death]:
        """What has come since the last look; after a record or a death the worker is free."""
        while self.child is not None and self.entry is not None:
            try:
                message = self.child.receive(0.0)
            except ChildSilent:
                return
            if message is None:
                text = ending_text(self.child.exit_code())
                self.child = self.entry = None
                yield Death(text, self._started)
            elif message["kind"] == "started":
                self._started = True
            elif message["kind"] == "unloadable":
                raise BatchfitError(
                    f"a child process of the sweep cannot load its functions: {message['text']}. They must "
                    "stand at the top of a module that it can import, or be named as 'file.py:function'"
                )
            elif message["kind"] == "event":
                event: SweepEvent = unpacked(message["event"])
                self.stage = _STAGES.get(event.kind, "search")
                if event.trial is not None:
                    self.trials.append(event.trial)
                yield event
            else:
                record: SweepRecord = unpacked(message["record"])
                self.entry = None
                yield record

    def failed(self, entry: Entry, error: str) -> SweepRecord:
        """The record of a configuration that has none of its own, with what is known of it."""
        return SweepRecord(
            knobs=json.loads(json.dumps(dict(entry.configuration))),
            trials=tuple(self.trials),
            error=error,
            failed_in=self.stage,
        )

    def end(self, *, gently: bool = False) -> None:
        """No process is left. `gently`: it may run its exit handlers."""
        child, self.child, self.entry = self.child, None, None
        if child is not None:
            if gently:
                child.send(end=True)
            child.end(after_s=5.0 if gently else 0.0)


def check_may_have_children() -> None:
    """Refuse where children cannot be, before one is started."""
    if os.name != "posix":
        raise BatchfitError("a sweep on several processes needs a POSIX system (Linux or macOS)")
    if child_side.active:
        raise BatchfitError(
            "sweep was called again in a child process that it had started. "
            'Put the call under if __name__ == "__main__".'
        )


def portable(job: Job) -> str:
    """The job as a child can load it."""
    settings = job.settings
    named = {name: _importable(name, getattr(settings, name)) for name in ("measure", "estimate")}
    return packed(Job(_importable("factory", job.factory), replace(settings, **named)))


def _importable(name: str, part: Any) -> Any:
    """A function of a job as a child can load it; what cannot be loaded there is refused."""
    target = _target(name, part)
    if target:
        part = target if name == "measure" else NamedFunction(target)
    try:
        pickled = pickle.dumps(part)
    except Exception as error:  # noqa: BLE001  pickling fails with errors of many types
        raise TypeError(_refusal(name, part, f": {type(error).__name__}: {error}")) from None
    # An object of the main module, or with a function of it inside: `_engine.workload.target` knows
    # functions only.
    if any(argument == "__main__" for _, argument, _ in pickletools.genops(pickled)):
        raise TypeError(_refusal(name, part, " with something of the main module in it"))
    return part


def _target(name: str, function: Any) -> str:
    """How a child finds a function of the main module; empty where pickling knows."""
    if not inspect.isfunction(function):
        return ""
    if "<" in function.__qualname__:
        raise TypeError(_refusal(name, function))
    if function.__module__ != "__main__":
        return ""
    main: Any = sys.modules["__main__"]
    if main.__spec__ is not None:  # python -m package.module
        return f"{main.__spec__.name}:{function.__qualname__}"
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        raise TypeError(_refusal(name, function, " of an interactive session"))
    return f"{os.path.abspath(file)}:{function.__qualname__}"


def _refusal(name: str, given: object, why: str = "") -> str:
    shown = getattr(given, "__qualname__", None) or f"{given!r:.80}"
    return (
        f"{name} must be a function at the top of a module, or its name as 'file.py:function', where other "
        f"processes run it, not {shown}{why}"
    )


def _print(text: str, is_error: bool) -> None:
    (sys.stderr if is_error else sys.stdout).write(text)
