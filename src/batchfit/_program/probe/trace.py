"""A program's own steps under the recorder of traces: what they would allocate and free on a GPU.

Rules:
- The program runs as it is up to the first forward pass after it has made an optimizer (of a program that only
  evaluates: its first one). From there on its parameters, buffers and optimizer state are fakes, and it goes on.
- What it reads of values is answered by what the same line read in a real run before.
- Nothing is restored: the process is ended once its steps are recorded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import GPUS
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.recorded_reads import ReadsRecorder, RecordedReads
from batchfit._engine.trace.recorder import TraceRecorder
from batchfit._engine.trace.trace import module_classes, open_trace
from batchfit._engine.trace.untraceable import explained
from batchfit._program.probe.state import optimizer_exists, program_state
from batchfit.errors import UntraceableError


@final
class BeginsWithTraining:
    """Calls `begin` at the first forward pass after an optimizer was made, or at the first one of all."""

    def __init__(self, begin: Callable[[], None], *, trains: bool) -> None:
        self._begin, self._trains = begin, trains
        self._handle = register_module_forward_pre_hook(self._before)

    def _before(self, *_: Any) -> None:
        if self._trains and not optimizer_exists():
            return
        self._handle.remove()
        self._begin()


@final
class ProgramReads:
    """What the program reads while it really runs, written to a file when it has taken its steps."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._file = Path(settings["file"])
        self._recorder = ReadsRecorder()
        BeginsWithTraining(self._recorder.__enter__, trains=settings["trains"])

    def end_step(self) -> None:
        """A step of the program is over."""

    def save(self) -> None:
        """Write what was read."""
        self._file.write_text(json.dumps(self._recorder.by_line), encoding="utf-8")

    def explained(self, error: Exception) -> UntraceableError | None:
        """Nothing: whatever is raised in a real run is the program's own."""
        return None


@final
class ProgramTrace:
    """The trace of this process, written to a file when the program has taken its steps."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._file = Path(settings["file"])
        self._size: int = settings["size"]
        self._limit_s: float | None = settings["limit_s"]
        self._rules = CudaRules(GPUS[settings["gpu"]], torch.device("cpu", 1))
        self._recorded = RecordedReads(settings["reads"])
        self._open = contextlib.ExitStack()  # never closed: the process ends
        self._recorder: TraceRecorder | None = None
        self._classes: dict[str, str] = {}
        self._refused: UntraceableError | None = None
        BeginsWithTraining(self._begin, trains=settings["trains"])

    def _begin(self) -> None:
        state = program_state()
        self._classes = module_classes(state.parts)
        faked = Faked(state.parts, self._rules.device, state.containers, state.places)
        recorder = self._recorder = open_trace(
            self._open,
            faked,
            self._rules,
            outside=_nobody.__code__,
            check=_nobody,
            limit_s=self._limit_s,
            recorded=self._recorded,
        )
        self._open.enter_context(recorder.watching())
        self._open.enter_context(faked.mode)
        self._open.enter_context(recorder)

    def end_step(self) -> None:
        """A step of the program is over."""
        if self._recorder is not None:
            self._recorder.end_step()

    def save(self) -> None:
        """Write the trace; `UntraceableError` where the program went another way than it would have gone."""
        if self._recorder is None:
            raise UntraceableError("", "", "the program took its steps before it made an optimizer")
        if self._recorder.refused:
            raise self._recorder.refused[0]
        trace: Trace = self._recorder.trace(self._size)
        self._file.write_text(json.dumps({**trace.to_dict(), "classes": self._classes}), encoding="utf-8")

    def explained(self, error: Exception) -> UntraceableError | None:
        """What stood in the way of the trace; None for an error before it has begun."""
        if isinstance(error, UntraceableError):
            return error
        if self._recorder is None:
            return None
        if self._recorder.refused:
            return self._recorder.refused[0]
        return explained(error, self._recorder.operation, self._rules.device)


def _nobody() -> None:
    """No code calls the step of a program, and nobody wants its trace to end."""
