"""A program's own steps under the recorder of traces: what they would allocate and free on a GPU.

Rules:
- The program runs as it is up to the first forward pass after it has made an optimizer (of a program that
  only evaluates: its first one). From there on parameters, buffers and optimizer state are fakes.
- What it reads of values is answered by what the same line read in a real run before.
- Nothing is restored: the process is ended once its steps are recorded.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import GPUS
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.recorded_reads import ReadsRecorder, RecordedReads
from batchfit._engine.trace.recorder import TraceRecorder
from batchfit._engine.trace.trace import module_classes, open_trace
from batchfit._engine.trace.untraceable import explained
from batchfit._program.probe.passes import has_weights, in_loader_worker
from batchfit._program.probe.state import dataset_samples, optimizers, program_state
from batchfit._program.pure.trace_file import trace_text
from batchfit.errors import UntraceableError

if TYPE_CHECKING:
    from batchfit._check.pure.record import TracedRecord


@final
class _AtFirstPass:
    """Calls `begin` at the first forward pass of all, or at the first one after an optimizer was made."""

    def __init__(self, begin: Callable[[], object], *, trains: bool) -> None:
        self._begin, self._trains = begin, trains
        self._handle = register_module_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, *_: Any) -> None:
        if not has_weights(module) or in_loader_worker() or (self._trains and not optimizers()):
            return
        self._handle.remove()
        self._begin()


class ProgramRecord(Protocol):
    """What a probe records beside steps and memory."""

    def end_step(self) -> None:
        """A step of the program is over."""

    def save(self) -> None:
        """Write it to its file, or raise an `UntraceableError`."""

    def explained(self, error: BaseException) -> UntraceableError | None:
        """What an error says about the recording; None where it is the program's own."""


def record_of(settings: dict[str, Any]) -> ProgramRecord:
    """What the parent wants to be recorded; its files lie in the probe's folder."""
    folder = Path(os.environ["BATCHFIT_PROBE_FOLDER"])
    if settings["kind"] == "reads":
        return ProgramReads(folder / "record")
    reads = json.loads((folder / "reads").read_text(encoding="utf-8"))
    return ProgramTrace(folder / "record", settings, RecordedReads(reads["reads"]))


@final
class ProgramReads:
    """What the program reads while it really runs, written to a file when it has taken its steps."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._recorder = ReadsRecorder()
        _AtFirstPass(self._recorder.__enter__, trains=False)
        # What an evaluation before the training reads, no trace of the training asks for.
        _AtFirstPass(self._recorder.by_line.clear, trains=True)

    def end_step(self) -> None:
        """A step of the program is over."""

    def save(self) -> None:
        """Write what was read, and how many samples there are."""
        found = {"reads": self._recorder.by_line, "samples": dataset_samples()}
        self._file.write_text(json.dumps(found), encoding="utf-8")

    def explained(self, error: BaseException) -> UntraceableError | None:
        """Nothing: whatever is raised in a real run is the program's own."""
        return None


@final
class ProgramTrace:
    """The trace of this process, written to a file when the program has taken its steps."""

    def __init__(self, file: Path, settings: dict[str, Any], recorded: RecordedReads) -> None:
        self._file = file
        self._size: int = settings["size"]
        self._limit_s: float | None = settings["limit_s"]
        self._rules = CudaRules(GPUS[settings["gpu"]], torch.device("cpu", 1))
        self._recorded = recorded
        self._open = contextlib.ExitStack()  # never closed: the process ends
        self._recorder: TraceRecorder | None = None
        self._classes: dict[str, str] = {}
        self._refused: UntraceableError | None = None
        self._root: str | None = settings.get("root")  # of the project, where lines are wanted
        self._parts: list[Any] = []
        self._made: Any = None  # which lines have made the optimizers
        if self._root is not None:
            from batchfit._check.optimizer_lines import OptimizerLines

            self._made = OptimizerLines()
            self._open.enter_context(self._made.noting())
        _AtFirstPass(self._begin, trains=settings["trains"])

    def _begin(self) -> None:
        state = program_state()
        self._classes, self._parts = module_classes(state.parts), state.parts
        faked = Faked(state.parts, self._rules.device, state.containers, state.places)
        recorder = self._recorder = open_trace(
            self._open,
            faked,
            self._rules,
            outside=_no_check.__code__,
            check=_no_check,
            limit_s=self._limit_s,
            recorded=self._recorded,
            detailed=self._root is not None,
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
        traced = self._recorder.trace(self._size)
        text = trace_text(traced, self._classes, self._record_of(traced))
        self._file.write_text(text, encoding="utf-8")

    def _record_of(self, traced: Trace) -> TracedRecord | None:
        """What a baseline keeps of it, where that is wanted."""
        if self._root is None:
            return None
        from batchfit._check.record import record_of_trace

        gpu_name, root = self._rules.gpu.name, Path(self._root)
        return record_of_trace(traced, self._parts, gpu_name, root, made=self._made)

    def explained(self, error: BaseException) -> UntraceableError | None:
        """What stood in the way of the trace; None for an error before it has begun."""
        if not isinstance(error, Exception):
            return None
        if isinstance(error, UntraceableError):
            return error
        if self._recorder is None:
            return None
        if self._recorder.refused:
            return self._recorder.refused[0]
        return explained(error, self._recorder.operation, self._rules.device)


def _no_check() -> None:
    """In the place of a check, and of the code that calls a step: no code of ours calls a program's."""
