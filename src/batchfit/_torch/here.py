"""Trials in this process, on the caller's own objects, which are put back.

Rules: what is garbage before the first trial does not count as memory in use; a trial collects only what came
after that, and all of it where it ran out.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Self, final

from batchfit._torch.child import count_elements
from batchfit._torch.device import Device, tensors_in
from batchfit._torch.isolate import RunOne
from batchfit._torch.snapshot import Snapshot
from batchfit._torch.trial import run_trial
from batchfit.results import Trial
from batchfit.workload import Workload


@final
class Here:
    """Runs trials in this process, on the caller's own objects, and puts them back."""

    def __init__(self, work: Workload, place: Device) -> None:
        self.place = place
        self.state_elements = count_elements(work.state)
        self.work = work

    def reachable_bytes(self, least_bytes: int) -> int:
        """What a trial may use now. No process of ours has just ended: `least_bytes` is not waited for."""
        return self.place.budget_bytes()

    def reachable_after_bytes(self) -> int:
        """What was reachable when the last trial had ended: nothing has run since."""
        return self.place.budget_bytes()

    @contextlib.contextmanager
    def trying(self, budget_bytes: int) -> Iterator[RunOne]:
        """Inside, a function that runs one trial under the budget."""
        work, first = self.work, True
        snapshot = Snapshot.take(work.state)
        parameters = list({id(one): one for one in tensors_in(work.state) if one.requires_grad}.values())

        def run_one(size: int, *, steps: int, soak: bool, smallest: bool) -> Trial:
            nonlocal first
            trial = run_trial(
                work.step,
                size,
                device=self.place,
                snapshot=snapshot,
                parameters=parameters,
                steps=steps,
                soak=soak,
                raise_ambiguous=smallest,
            )
            if first or not trial.fits:
                collections.thorough()
            first = False
            return trial

        gc.collect()  # before memory is counted: what is garbage already must not count
        with self.place.limit(budget_bytes), QuickCollections() as collections:
            yield run_one


@final
class QuickCollections:
    """Lets each trial's garbage collection look only at what came after this point.

    A program with torch and transformers loaded has a million objects, and walking them takes longer
    than a small trial. What is garbage should be collected before. Nothing is frozen where the program has
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
        """Collect what was alive at the beginning too: a trial may have let go of it."""
        if self._ours:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
