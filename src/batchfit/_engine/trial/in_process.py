"""Trials in this process, on the caller's own objects, whose state is restored.

Rules: what is garbage before the first trial does not count as memory in use; a trial collects only what came
after that, and all of it after an OOM. Where steps issue collectives, a rank whose step failed goes on
issuing those that the others wait for (`collectives`), so that all ranks end the trial.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Self, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.device import oom
from batchfit._engine.device.device import Device
from batchfit._engine.device.gpu import CudaDevice
from batchfit._engine.device.tensors import count_elements, own_bytes, top_holders, trained_in
from batchfit._engine.distributed.collectives import CountedStep, ExpectedCollectives, is_lost_connection
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.trial.rehearsal import rehearse
from batchfit._engine.trial.trial import RunTrial, TrialRequest, run_request, run_trial
from batchfit.results import Trial
from batchfit.workload import Workload

_NEGLIGIBLE_BYTES = 2**20  # no answer depends on so few

# Kinds of devices that tensors lie on; a fake one of a test is none.
_KINDS = ("cpu", "cuda", "xpu", "mps")


@final
class InProcess:
    """Runs trials in this process, on the caller's own objects, and restores their state."""

    def __init__(self, work: Workload, device: Device) -> None:
        self.device = device
        self.state_elements = count_elements(work.state)
        self.work = work
        self._expected: ExpectedCollectives | None = None  # the collectives that a step issues
        self._snapshot: Snapshot | None = None  # while trials are run
        self._low = 1  # a small size that all ranks have run

    def rehearse(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """Record which collectives a step issues, at a few small sizes, on all ranks together.

        In one process there is nothing to record.
        """
        if ranks.world_size == 1:
            return
        self._low = sizes[0]
        run = partial(
            run_trial,
            device=self.device,
            snapshot=Snapshot.take(self.work.state),
            parameters=trained_in(self.work.state),
        )
        gc.collect()
        with self.device.limit(self.device.budget_bytes()), FrozenGarbage():
            self._expected, failed = rehearse(
                self.work.step, run, ranks, sizes=sizes, device=self.device.name
            )
            if failed:
                self.regroup()

    further = ""

    def holders(self, live_bytes: int | None) -> list[tuple[str, int]]:
        """The modules and optimizers of the state that hold the most, and the rest of the live bytes."""
        kind = self.device.name.partition(":")[0]
        if kind not in _KINDS:
            return []
        return top_holders(self.work.state, on=torch.device(kind), live_bytes=live_bytes)

    @property
    def state_bytes(self) -> int | None:
        """Bytes of weights, gradients and present optimizer state; the optimizer may add more.

        None for steps of the user's own: which gradients they keep is not known.
        """
        trained = trained_in(self.work.state)
        if self.work.kind != "training" or self.work.optimizer is None or not trained:
            return None
        on = trained[0].device
        if on.type != self.device.name.partition(":")[0]:
            return None
        without = [one for one in trained if one.grad is None]  # its gradient will be as large as it is
        return own_bytes(self.work._held, on=on) + own_bytes(without, on=on)

    @property
    def samples(self) -> int | None:
        """How many samples the workload's dataset has; None where that is not known."""
        return self.work._samples

    def made_of(self, size: int) -> str:
        """What batches of that size are made of, where that is not plain; empty where it is."""
        return self.work._made_of(size)

    def reachable_bytes(self, least_bytes: int) -> int:
        """Bytes that a trial may use now. No child has just ended, so nothing is awaited."""
        return self.device.budget_bytes()

    def reachable_after_bytes(self) -> int:
        """Bytes that were reachable when the last trial had ended: nothing has run since."""
        return self.device.budget_bytes()

    @contextlib.contextmanager
    def trying(self, budget_bytes: int) -> Iterator[RunTrial]:
        """A context with a function that runs one trial under the budget."""
        work, first = self.work, True
        snapshot = Snapshot.take(work.state)

        def run_one(request: TrialRequest) -> Trial:
            nonlocal first
            size, steps = request.size, request.steps_of(work.kind)
            step = work.step if self._expected is None else CountedStep(work.step, steps=steps)
            try:
                trial = run_request(request, work, step=step, device=self.device, snapshot=snapshot)
            except Exception as error:
                if not is_lost_connection(error) and oom.classify(error) != "fatal":
                    with contextlib.suppress(Exception):  # the step's own error is the one to raise
                        self._serve(step, size, snapshot)
                raise
            if not trial.fits:
                self._serve(step, size, snapshot)
            left = held_bytes is None or _held_bytes(self.device) != held_bytes
            if not trial.fits or (first and left):
                collections.thorough()
            first = False
            return trial

        collect_garbage(work, self.device)
        with self.device.limit(budget_bytes), FrozenGarbage() as collections:
            held_bytes = _held_bytes(self.device)
            self._snapshot = snapshot
            try:
                yield run_one
            finally:
                self._snapshot = None

    def run_shortened(self, shortened: Workload, size: int) -> Trial:
        """Run one step that generates fewer tokens, over the same state, inside `trying`."""
        if self._snapshot is None:
            raise RuntimeError("a shortened step needs `trying`, which holds the snapshot")
        return run_request(TrialRequest(size, 1), shortened, device=self.device, snapshot=self._snapshot)

    def regroup(self) -> None:
        """Have DDP rebuild its buckets on all ranks, after a trial that failed on any rank.

        DDP forgets its layout when it is reset, and rebuilds its buckets in its second step. All ranks do it
        now, in small steps: an OOM there, in a trial, could not be undone.
        """
        modules = (one for part in self.work.state if isinstance(part, nn.Module) for one in part.modules())
        if self._expected is None or not any(isinstance(one, DistributedDataParallel) for one in modules):
            return
        snapshot = Snapshot.take(self.work.state)
        snapshot.restore()
        run_trial(
            self.work.step,
            self._low,
            device=self.device,
            snapshot=snapshot,
            parameters=trained_in(self.work.state),
            steps=2,
        )

    def _serve(self, step: object, size: int, snapshot: Snapshot) -> None:
        """Issue the collectives that the other ranks wait for, then restore what they changed here."""
        if self._expected is None or not isinstance(step, CountedStep):
            return
        step.serve(self._expected, size)
        snapshot.restore(cut_off=False)


def collect_garbage(work: Workload, device: Device) -> None:
    """Collect garbage before memory is counted.

    A collection walks all objects, a fifth of a second in a program with torch and transformers loaded. It is
    skipped where nothing is live on a GPU but the workload's own state. Requested bytes are compared, not
    allocated ones: the rounding of blocks under 70 GiB of weights could hide some hundred MiB of garbage.
    """
    asked_bytes = device.requested_bytes() if isinstance(device, CudaDevice) else None
    if asked_bytes is not None:
        own = own_bytes(work._held, on=torch.device(device.name))
        if asked_bytes <= own + _NEGLIGIBLE_BYTES:
            return
    gc.collect()


def _held_bytes(device: Device) -> int | None:
    """Live bytes on a GPU now; None on another device, where no reading shows that nothing was left."""
    return device.held_bytes() if isinstance(device, CudaDevice) else None


@final
class FrozenGarbage:
    """Limits each trial's garbage collection to what came after this point.

    A program with torch and transformers loaded has a million objects, and walking them takes longer
    than a small trial. Garbage should be collected before. Nothing is frozen where the program has
    frozen objects of its own.
    """

    def __enter__(self) -> Self:
        self._ours = gc.get_freeze_count() == 0
        if self._ours:
            gc.freeze()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            gc.unfreeze()

    def thorough(self) -> None:
        """Collect what was alive at the beginning too: a trial may have released it."""
        if self._ours:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
