"""Traces of a program: each is a run of its command, whose steps are recorded in its own process.

Rules:
- First the program really runs a few steps at a small size: what it reads of its tensors' values then is what
  it is answered in traces, so that it takes the same way. A program that fails there fails as it would alone.
- A trace is a run on the CPU with fakes for the state: it takes the time of the start, whatever the size.
- What the program does only where it sees a GPU, a trace does not show, and says so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, final

import torch

from batchfit._check.pure.record import TracedRecord
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.trace.trace import STEPS, trace_caveats
from batchfit._explain.pure.holders import Peak
from batchfit._program.command_run import CommandRun
from batchfit._program.probe_run import check_seen, start_run
from batchfit._program.pure.size_use import SizeUse, note_use
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.pure.trace_file import read_record, read_trace
from batchfit._program.rank_reports import Reports
from batchfit.errors import ProgramError, UntraceableError

Answer = TypeVar("Answer")
SMALL = 2  # the size that is really run
_NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
_SILENT_S = 1800.0  # without a word
CAVEAT = (
    "it ran on a CPU: what the program does only where it sees a GPU is not in this (another dtype, a fused "
    "optimizer, torch.compile)"
)


class TooFewSamplesError(Exception):
    """The program has no two batches of this size; `most` is the next size to try."""

    def __init__(self, most: int) -> None:
        self.most = most
        super().__init__(f"the program has too few samples for two batches: {most} each at most")


@final
@dataclass(slots=True)
class _Recorded:
    """What one run has left."""

    text: str
    reports: Reports


@final
@dataclass(slots=True)
class ProgramTraces:
    """The traces of one command for one GPU; each size is run once."""

    template: CommandTemplate
    gpu: Gpu
    timeout_s: float | None = None
    on_run: Callable[[str, int], object] | None = None  # what for, and the size
    samples: int | None = None  # of its dataset
    most_size: int | None = None  # that can be traced
    made_of: str = ""  # the program makes its own batches
    classes: dict[str, str] = field(default_factory=dict)
    _reads: str | None = None  # as JSON
    _trains: bool = True
    _samples_of_pass: int = 1
    _traces: dict[int, Trace] = field(default_factory=dict)
    _uses: list[SizeUse] = field(default_factory=list)

    @property
    def rules(self) -> CudaRules:
        """The GPU that is traced for."""
        return CudaRules(self.gpu, torch.device("cpu", 1))

    @property
    def steps(self) -> int:
        """How many steps a whole trace has."""
        return STEPS

    @property
    def may_retry(self) -> bool:
        """A program is no generation that is known to end: its retries count."""
        return False

    def for_gpu(self, gpu: Gpu) -> ProgramTraces:
        """Traces for another GPU, which need no new run of the program itself."""
        return replace(self, gpu=gpu, _traces={}, _uses=[one for one in self._uses if one.peak_bytes is None])

    def caveats(self) -> tuple[str, ...]:
        """What no trace of a program shows."""
        return (CAVEAT, *trace_caveats(()))

    def trace(self, size: int, *, steps: int, limit_s: float | None = None) -> Trace:
        """Run the command at a size with its steps recorded; one run serves any number of steps."""
        if size not in self._traces:
            self._traces[size] = self._traced(size, limit_s)
        return self._traces[size].beginning(steps)

    def _traced(self, size: int, limit_s: float | None) -> Trace:
        if self._reads is None:
            self._run_really()
        recorded = self._run(size, STEPS, self._recording(size, limit_s), {"reads": self._reads or ""})
        found, classes = read_trace(recorded.text)
        self.classes = self.classes or classes
        self._note_use(recorded.reports, size, peak_bytes=found.peak_bytes)
        return found

    def _run_really(self) -> None:
        """The program as it is, for a few steps of a small size."""
        recorded = self._run(SMALL, STEPS + 1, {"kind": "reads"})
        self._reads, self._trains = recorded.text, not recorded.reports.is_evaluation
        self._samples_of_pass = max(1, recorded.reports.use(SMALL).samples)
        self._note_use(recorded.reports, SMALL, peak_bytes=None)
        self.samples = json.loads(recorded.text)["samples"]
        if self.samples is not None:
            self.most_size = max(self.samples // STEPS, SMALL + 1)  # as many whole batches as there are steps

    def _note_use(self, reports: Reports, size: int, *, peak_bytes: int | None) -> None:
        largest = note_use(self._uses, replace(reports.use(size), peak_bytes=peak_bytes))
        if largest is not None:
            self.samples = self.samples or largest
            raise TooFewSamplesError(largest // STEPS)

    def recorded_at(self, size: int | None, root: Path) -> TracedRecord:
        """The record of its peak by lines, files named from `root`; None: at the size that it has."""
        if self._reads is None:
            self._run_really()
        size = self._samples_of_pass if size is None else size
        record = {**self._recording(size, None), "root": str(root)}
        recorded = self._run(size, STEPS, record, {"reads": self._reads or ""})
        found, classes = read_trace(recorded.text)
        self.classes = self.classes or classes
        if not self.template.is_fixed:
            self._note_use(recorded.reports, size, peak_bytes=found.peak_bytes)
        return read_record(recorded.text, Peak.of(found))

    def _recording(self, size: int, limit_s: float | None) -> dict[str, Any]:
        return {
            "kind": "trace",
            "gpu": self.gpu.name,
            "size": size,
            "limit_s": limit_s,
            "trains": self._trains,
        }

    # --- one run

    def _run(
        self, size: int, steps: int, record: dict[str, Any], inputs: dict[str, str] | None = None
    ) -> _Recorded:
        if self.on_run is not None:
            self.on_run("running" if record["kind"] == "reads" else "tracing", size)
        settings = {"steps": steps, "device": "cpu", "budget_bytes": None, "record": record}
        run = start_run(self.template, size, settings, variables=_NO_GPU, inputs=inputs)
        reports = Reports()
        try:
            code = self._follow(run, reports, size)
            check_seen(run, self.template.words, heard=reports.heard, code=code)
            text = run.found("record")
            if text is None and code == 0 and size > SMALL + 1 and reports.failure is None:
                raise TooFewSamplesError(size // STEPS)
            if text is None:
                raise self._failed(run, reports, code, size)
            return _Recorded(text, reports)
        finally:
            run.end()

    def _follow(self, run: CommandRun, reports: Reports, size: int) -> int | None:
        """Listen until its steps are recorded, or it has ended: its exit code."""
        silent_s = self.timeout_s or _SILENT_S
        for event in run.events():
            kind, now = event["kind"], time.monotonic()
            if kind == "untraceable":
                raise UntraceableError(
                    event["operation"], event["where"], event["why"], raised=event["raised"]
                )
            if kind == "not_started":
                raise self.template.not_started(event["error"][1])
            if kind == "ended":
                for late in run.drain():
                    reports.take(late, now)
                return int(event["code"])
            reports.take(event, now)
            if kind == "hello" and event["world_size"] > 1:
                raise ProgramError(
                    f"the program has {event['world_size']} ranks, and one process is traced: leave out its "
                    "launcher (python train.py in the place of torchrun train.py)"
                )
            if kind == "reached":
                return None
            if now - run.silent_since_s >= silent_s:
                raise ProgramError(
                    f"the program took no step within {silent_s:g} s, at batch size {size}",
                    lines=run.tail.lines(),
                )
        return None

    def _failed(self, run: CommandRun, reports: Reports, code: int | None, size: int) -> ProgramError:
        failure = reports.failure
        lines = reports.last_lines(run.tail.lines())
        if failure is not None:
            return ProgramError(f"the program raised {failure.text}, at batch size {size}", lines=lines)
        how = "ended" if code == 0 else f"ended with exit code {code}"
        steps = f"after {reports.steps_run} steps" if reports.steps_run else "before its first step"
        return ProgramError(f"the program {how} {steps}, at batch size {size}", lines=lines)


@contextmanager
def whole_batches(size: int | None) -> Iterator[None]:
    """Inside, a program that has no two batches of `size` is an error of that size."""
    try:
        yield
    except TooFewSamplesError as error:
        raise ProgramError(
            f"batch_size must leave the program two whole batches, not {size}: it has samples for two of "
            f"{error.most}"
        ) from None


def lines_from_what_there_is(traces: ProgramTraces, ask: Callable[[], Answer]) -> Answer:
    """What `ask` gives, which traces sizes: smaller ones where the program has too few samples."""
    while True:
        try:
            return ask()
        except TooFewSamplesError as error:
            if error.most <= SMALL:
                raise ProgramError("the program has too few samples for two steps of 3 samples") from None
            traces.most_size = error.most
