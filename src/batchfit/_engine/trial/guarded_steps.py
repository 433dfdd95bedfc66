"""The guarded runner of steps: steps at one size run, may fail, and the state is restored.

Trials and timings decide which steps run and what is read; what guards both is here.

Rules:
- An OOM is a value (`StepFailure`). Any other error comes out unchanged, with the size added as a note.
- State before = state after, on success, OOM, error and Ctrl-C alike. A Ctrl-C that arrives while the state
  is restored is raised after that.
- The state is restored outside `except`: inside, the exception's traceback still holds the step's tensors.
- A dead device context restores nothing: trying would hide the error.
- A step that ran nothing (a generator, a coroutine) is an error.
- The steps are those of one loop: what the loop's variables keep from step to step is dropped at its end.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from batchfit._engine.device import oom
from batchfit._engine.device.device import Device
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.tensors import bytes_of
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.workload import loop
from batchfit._engine.workload.user_errors import NOTE
from batchfit.errors import NothingRanError, SnapshotError
from batchfit.results import Outcome

Step = Callable[[int], object]


@final
@dataclass(frozen=True, slots=True)
class StepFailure:
    """How steps failed for want of memory: the text of the error, never the error, which holds tensors."""

    verdict: oom.Verdict
    message: str
    phase: str | None

    @property
    def outcome(self) -> Outcome:
        return "too_large" if self.verdict == "too_large" else "oom"


@final
class StepCalls:
    """Calls a step at one size, and counts the calls."""

    def __init__(self, step: Step, size: int) -> None:
        self._step, self._size = step, size
        self._begun = 0

    def __call__(self) -> None:
        loop.clear_phase()
        self._begun += 1
        unstarted = _unstarted_kind(self._step(self._size))
        if unstarted:
            raise NothingRanError(
                f"the step returned {unstarted} instead of running: nothing was measured. "
                "Give batchfit a plain function that runs one step when it is called."
            )

    def note(self, verdict: oom.Verdict, error: BaseException) -> str:
        """What is added to an error of the step: at which size, step and phase it was raised."""
        at = loop.current_phase()
        where = f"step {self._begun}, {at}" if at else f"step {self._begun}"
        note = f"{NOTE} {self._size} ({where})"
        if self._size == 1 and oom.needs_two_samples(error):
            note += "; batch normalization needs two samples in training mode"
        if verdict == "fatal":
            note += "; the device context is dead, so the state could not be restored: restart the process"
        if verdict == "ambiguous":
            note += "; this is the smallest size allowed, so the error does not come from the size"
        return note


@final
class GuardedSteps:
    """Runs steps within `guarded_steps`.

    `completed`: the last step has ended, so nothing was cut off in the middle of it.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self.completed = False

    def interruptible(self) -> contextlib.AbstractContextManager[None]:
        """Inside, Ctrl-C is raised at once."""
        return self._interrupts.opened()

    def run(
        self,
        steps: Callable[[loop.Loop], object],
        *,
        raise_ambiguous: bool,
        note: Callable[[oom.Verdict, BaseException], str] | None = None,
        most_passes: int | None = None,
    ) -> StepFailure | None:
        """Run steps as those of one loop; how they were out of memory, or None.

        `raise_ambiguous`: an error that may or may not mean memory comes out as an error.
        `most_passes`: of a step that accumulates gradients over many passes, this many are run.
        """
        ambient = sys.exception()
        with self.interruptible():
            try:
                with loop.running(most_passes=most_passes) as variables:
                    steps(variables)
            except Exception as error:
                verdict = oom.classify(error, ambient=ambient)
                if verdict in ("error", "fatal") or (verdict == "ambiguous" and raise_ambiguous):
                    if note is not None:
                        error.add_note(note(verdict, error))
                    raise
                return StepFailure(verdict, oom.describe(error, ambient=ambient), loop.current_phase())
        self.completed = True
        return None


@contextlib.contextmanager
def guarded_steps(snapshot: Snapshot, *, device: Device | None) -> Iterator[GuardedSteps]:
    """Inside, steps may change the state; at the end it is restored, and the device's cache is released.

    Signals are held back except where steps run. `device` is None where its memory is not counted.
    """
    ambient = sys.exception()
    raised: BaseException | None = None
    with Interrupts() as interrupts:
        guarded = GuardedSteps(interrupts)
        try:
            yield guarded
        except BaseException as error:
            raised = error
            raise
        finally:
            loop.clear_phase()
            if raised is None or oom.classify(raised, ambient=ambient) != "fatal":
                _restore(snapshot, device, raised, cut_off=raised is not None or not guarded.completed)
            raised = None  # or this frame and its exception would keep each other alive


def _restore(
    snapshot: Snapshot, device: Device | None, raised: BaseException | None, *, cut_off: bool
) -> None:
    """Free what the steps left, then restore the state."""
    # A failed step may have left cycles that hold its tensors, and restoring gradients needs memory.
    gc.collect()
    crowded = False
    try:
        snapshot.restore(cut_off=cut_off)
    except SnapshotError:
        if raised is None:
            raise
        crowded = True
    if crowded:
        # The error on its way out holds the step's tensors through its frames. They are dropped only
        # here, where the state would be lost otherwise: a debugger would like to see them.
        assert raised is not None
        traceback.clear_frames(raised.__traceback__)
        gc.collect()
        if device is not None:
            device.reset()
        snapshot.restore()
    if device is not None:
        device.reset()


def gradient_bytes(parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of the gradients that are there."""
    return sum(bytes_of(parameter.grad) for parameter in parameters if parameter.grad is not None)


def tunes_in_first_step(device: Device) -> bool:
    """Whether cuDNN tries all its algorithms in the first step of a size, with workspaces of their own."""
    return device.name.startswith("cuda") and torch.backends.cudnn.enabled and torch.backends.cudnn.benchmark


def _unstarted_kind(returned: object) -> str:
    """What kind of unstarted work a step returned, or "" when it ran."""
    if inspect.isgenerator(returned) or inspect.isasyncgen(returned):
        return "a generator"
    if inspect.iscoroutine(returned):
        returned.close()  # it will never be awaited; without this Python warns about it
        return "a coroutine"
    return ""
