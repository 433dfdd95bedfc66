"""Traces a workload with fake tensors: what its steps allocate and free, at one size, without memory.

Rules:
- The device is fake, the host is real. Tensors on the traced device have shapes and no memory; what a
  program computes on the host (its data, its random decisions) is really computed, on the small batches of a
  trace, so that no branch is guessed.
- Nothing of the user's is changed: parameters, buffers and optimizer state are replaced by fakes for the
  trace and restored after it, random states too, and host tensors that the step writes into.
- What cannot be traced is an `UntraceableError` that names the operation and the line.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, Protocol, final

import torch
from torch import nn

from batchfit import workload as workloads
from batchfit._engine.allocator.footprint import ShapeChangedError, Trace
from batchfit._engine.batch import sources
from batchfit._engine.cuda_model.autocast_check import autocast_caveat
from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.device.interrupts import TraceInterrupts
from batchfit._engine.snapshot.rng import UndoStack, global_states
from batchfit._engine.torch_private.allocator import keeps_cublas_workspaces
from batchfit._engine.torch_private.dynamo import is_compiled_model, original
from batchfit._engine.torch_private.modules import flex_attention_check
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.blocks import counts_of_one_holder
from batchfit._engine.trace.communication import followed
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.generation import Generating, short_generation
from batchfit._engine.trace.held_tensors import caveats_of, is_paged
from batchfit._engine.trace.program_lines import HERE, TORCH
from batchfit._engine.trace.recorded_reads import RecordedReads
from batchfit._engine.trace.recorder import TraceRecorder
from batchfit._engine.trace.torchao_updates import TORCHAO, like_updates_repeated
from batchfit._engine.trace.untraceable import explained
from batchfit._engine.trace.values import values_unread
from batchfit._engine.virtual_memory.memory import eagerly
from batchfit._engine.workload import loop
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._engine.workload.user_errors import NOTE
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

STEPS = 2
# Files of torch's and batchfit's own that run the program's functions in plain Python.
_PLAIN = frozenset({str(torch.nn.modules.module.__file__), str(sources.__file__), str(workloads.__file__)})


class TraceSource(Protocol):
    """Where traces come from: a workload in this process, or a program in one of its own."""

    @property
    def rules(self) -> CudaRules:
        """The GPU that is traced for."""

    @property
    def steps(self) -> int:
        """How many steps a whole trace has."""

    @property
    def may_retry(self) -> bool:
        """Whether retries of the allocator are no reason against a size, as in a step that generates."""

    @property
    def samples(self) -> int | None:
        """How many samples there are at most, where that is known."""

    @property
    def made_of(self) -> str:
        """What batches are made of, where it is not the longest samples of all."""

    @property
    def most_size(self) -> int | None:
        """The largest size that can be traced; lines go on beyond it."""

    def trace(self, size: int, *, steps: int, limit_s: float | None = None) -> Trace:
        """The allocations and frees of some steps; `UntraceableError` where they cannot be traced."""

    def caveats(self) -> tuple[str, ...]:
        """What no trace of this source shows."""


@final
@dataclass(frozen=True, slots=True)
class WorkloadTraces:
    """Traces of a workload, in this process."""

    reach: StepReach
    rules: CudaRules
    changes: tuple[Any, ...] = ()  # contexts of each trace, as `trace` takes them
    notes: tuple[str, ...] = ()  # what no trace with these changes shows

    @property
    def steps(self) -> int:
        """What one step leaves makes the next another, but for those that leave nothing."""
        return 1 if self.may_retry else STEPS

    @property
    def may_retry(self) -> bool:
        return self.reach.workload.kind == "generation"

    @property
    def samples(self) -> int | None:
        return self.reach.workload._samples

    @property
    def made_of(self) -> str:
        return self.reach.workload._made_of(1)

    @property
    def most_size(self) -> None:
        """A batch is made by repeating samples where there are too few."""

    def trace(self, size: int, *, steps: int, limit_s: float | None = None) -> Trace:
        workload, reach = self.reach.workload, self.reach
        rules, changes = self.rules, self.changes
        return trace(workload, size, rules=rules, steps=steps, changes=changes, limit_s=limit_s, reach=reach)

    def caveats(self) -> tuple[str, ...]:
        return (*trace_caveats(self.reach.parts), *self.notes)


def module_classes(parts: Iterable[Any]) -> dict[str, str]:
    """The class of each module by its path, as traces name them; the first model's under "" ."""
    found: dict[str, str] = {}
    for part in parts:
        if isinstance(part, nn.Module):
            for path, module in part.named_modules():
                found.setdefault(path, type(module).__name__)
    return found


def trace_caveats(parts: Iterable[Any]) -> Iterator[str]:
    """What a trace cannot see of the parts of a workload."""
    if counts_of_one_holder() is None:
        yield (
            f"torch {torch.__version__} does not say who holds a gradient: sums that a GPU makes in place "
            "are counted as copies"
        )
    if autocast_caveat():
        yield autocast_caveat()
    if not keeps_cublas_workspaces():
        yield (
            f"cuBLAS: torch {torch.__version__} takes a workspace per product, and two are counted as kept "
            "(measured with torch 2.11): up to 65 MiB too many"
        )
    for part in parts:
        yield from caveats_of(part)
        if is_paged(part):
            yield (
                "paged optimizer state: managed memory, which the driver moves to the GPU by pages and back; "
                "not counted"
            )
        if not isinstance(part, nn.Module):
            continue
        for name, module in part.named_modules():
            if is_compiled_model(module):
                kind = type(original(module)).__name__
                yield f"torch.compile of {name or kind}: traced as if not compiled"


def trace(
    workload: Workload,
    size: int,
    *,
    rules: CudaRules,
    steps: int = STEPS,
    changes: tuple[Any, ...] = (),
    limit_s: float | None = None,
    reach: StepReach | None = None,
    detailed: bool = False,
) -> Trace:
    """The allocations and frees of `steps` steps of `size` samples.

    `changes` are contexts that change the step for the trace only: `change(workload, faked)`. A trace that
    has not ended after `limit_s` is given up (`UntraceableError`). `reach` is what the step can reach, where
    a caller has walked it already. `detailed`: origins say what `Origin` has of a detailed trace.
    """
    undo = UndoStack()
    # Neither while state is replaced, nor in Python that is called by C++, where it would end the process.
    with TraceInterrupts(_run.__code__, (*TORCH, *HERE), _PLAIN) as interrupts:
        for name, again in global_states():
            undo.push(name, again)
        try:
            reach = reach_of(workload) if reach is None else reach
            return _traced(reach, size, rules, steps, changes, limit_s, interrupts, detailed=detailed)
        finally:
            undo.run()


def _traced(
    reach: StepReach,
    size: int,
    rules: CudaRules,
    steps: int,
    changes: tuple[Any, ...],
    limit_s: float | None,
    interrupts: TraceInterrupts,
    *,
    detailed: bool,
) -> Trace:
    workload = reach.workload
    with contextlib.ExitStack() as stack:
        faked = Faked.of(reach, device=rules.device)
        recorder = open_trace(
            stack,
            faked,
            rules,
            outside=_run.__code__,
            check=interrupts.check,
            limit_s=limit_s,
            counts_host=workload.kind == "step",
            changes=[partial(change, workload, faked) for change in changes],
            detailed=detailed,
        )
        if workload.kind == "generation":
            recorder.generating = Generating()
            stack.enter_context(short_generation(workload, recorder.blocks, recorder.generating))
        # What its variables keep is still there when the trace is taken: no step has let go of it.
        stack.enter_context(loop.running(most_passes=loop.PASSES))
        with recorder.watching():
            for _ in range(steps):
                interrupts.check()
                _run(workload, size, recorder)
                recorder.end_step()
        try:
            return recorder.trace(size)
        except ShapeChangedError as error:
            raise UntraceableError("generate", "", str(error)) from error


def open_trace(
    stack: contextlib.ExitStack,
    faked: Faked,
    rules: CudaRules,
    *,
    outside: CodeType,
    check: Callable[[], None],
    limit_s: float | None = None,
    counts_host: bool = False,
    changes: Sequence[Callable[[], contextlib.AbstractContextManager[Any]]] = (),
    recorded: RecordedReads | None = None,
    detailed: bool = False,
) -> TraceRecorder:
    """A recorder of what runs from now on with fakes for the state, until the stack is closed.

    `changes` are contexts that are entered once the state is fake. `outside` is the code that calls the
    step: lines beyond it are not the program's. `recorded` is what the program read in a real run.
    """
    stack.enter_context(uncollected())  # a collection would free things at moments of its own
    stack.enter_context(faked)
    stack.enter_context(rules.active())
    stack.enter_context(eagerly())
    stack.enter_context(_error_is_not_logged())
    for change in changes:
        stack.enter_context(change())
    recorder = TraceRecorder(
        faked,
        rules,
        outside=outside,
        check=check,
        limit_s=limit_s,
        counts_host=counts_host,
        detailed=detailed,
    )
    recorder.recorded = recorded
    stack.enter_context(recorder.in_place.active(rules.autograd_key))
    stack.enter_context(recorder.resizes_seen())
    if faked.communication is not None:
        stack.enter_context(followed(faked.communication))
    if TORCHAO in sys.modules:
        stack.enter_context(like_updates_repeated(recorder.blocks, recorder.host.adopt))
    stack.callback(recorder.host.restore)
    stack.enter_context(not_called_a_trace(recorder.knows))
    stack.enter_context(saved_on_the_host())
    stack.enter_context(flex_refused())
    # A fused kernel of TorchScript would really run, on the addresses of tensors that have none.
    jit: Any = torch.jit
    stack.enter_context(jit.optimized_execution(False))
    stack.enter_context(
        values_unread(
            recorder.knows, recorder.answers, recorder.reads, recorder.refused, recorder.read_in_a_real_run
        )
    )
    return recorder


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, Python collects no garbage by itself."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _error_is_not_logged() -> Iterator[None]:
    """Inside, torch does not log the traceback of an operation's error, which it raises as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _run(workload: Workload, size: int, recorder: TraceRecorder) -> None:
    try:
        with recorder.faked.mode, recorder, warnings.catch_warnings():
            # nn.LSTM asks whether its weights lie side by side, and is answered that they do not.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            workload.step(size)
        if recorder.refused:  # and the program went another way than it would have gone
            raise recorder.refused[0]
    except UntraceableError:
        raise
    except Exception as error:
        if _is_argument_error(error):
            error.add_note(f"{NOTE} {size} (traced)")
            raise
        raise explained(error, recorder.operation, recorder.rules.device) from error
    finally:
        loop.clear_phase()


def _is_argument_error(error: Exception) -> bool:
    """batchfit's own complaint about what it was given (a loss that is no scalar): not about tracing."""
    raised = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    inside = raised.startswith(HERE) and Path(raised) != Path(__file__)  # `_run` calls the step
    return inside and isinstance(error, TypeError | ValueError)


@contextlib.contextmanager
def not_called_a_trace(known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, transformers takes its decisions as in an eager run, about values that are `known`."""
    module: Any = sys.modules.get("transformers.utils.import_utils")
    before = getattr(module, "is_fake_tensor", None)
    if before is None:
        yield
        return
    with replaced(module, "is_fake_tensor", lambda value: before(value) and not known(value)):
        yield


@contextlib.contextmanager
def saved_on_the_host() -> Iterator[None]:
    """Inside, `save_on_cpu(pin_memory=True)` copies as without: pinned or not, it is no memory of the GPU.

    It fills a tensor that it makes without naming a device; without a GPU that would stand for the device.
    """
    kind: Any = torch.autograd.graph.save_on_cpu
    made = kind.__init__

    def make(self: Any, pin_memory: bool = False, *args: Any, **kwargs: Any) -> None:
        made(self, False, *args, **kwargs)

    with replaced(kind, "__init__", make):
        yield


@contextlib.contextmanager
def flex_refused() -> Iterator[None]:
    """Inside, FlexAttention refuses to run, with a reason that `trace` names.

    Without its compiler it makes all scores; with it, which a trace leaves out, it makes none.
    """
    place = flex_attention_check()
    if place is None:
        yield
        return

    def refuse(*_: Any) -> None:
        raise NotImplementedError("FlexAttention is a compiled kernel")

    with replaced(*place, refuse):
        yield
