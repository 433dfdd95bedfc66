"""`Microbatcher.map`: evaluation of a batch in microbatches, outputs joined in the batch's order.

Rules
- After an OOM only microbatches that have not run are run, so that nothing is counted twice; the microbatch
  that failed draws the same random numbers, and finds buffers as they were when it began.
- Inference mode, but for sharded models: parameters gathered there could not be trained afterwards.
- A batch that was written into by a microbatch that failed is not retried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch
from batchfit._engine.data_parallel.interface import DataParallel
from batchfit._engine.device.oom import run_twice
from batchfit._microbatch.batch_run import BatchRun, MicrobatchCall, PassTerms
from batchfit.errors import BatchfitError


@final
class MapCall(MicrobatchCall):
    """One call of `Microbatcher.map`."""

    kind = "map"

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.functions = {"fn": fn}
        self.done: list[Microbatch] = []
        self.joined: Any = None  # the outputs of all microbatches
        self._fn = fn
        self._outputs: list[Any] = []

    def grad_mode(self, ranks: DataParallel) -> AbstractContextManager[object]:
        return torch.inference_mode() if ranks.shards is None else torch.no_grad()

    def weigh(self, whole: Batch, plan: Sequence[Microbatch]) -> float:
        return float(whole.length)

    def prepare(
        self, whole: Batch, plan: Sequence[Microbatch], terms: PassTerms
    ) -> tuple[ForwardPass, float]:
        if terms.run.ranks.collectives == "every":  # ranks retry the whole batch together
            self._outputs.clear()
            self.done.clear()
        return ForwardPass(self._fn, whole, plan, terms, self._outputs, self.done), float(whole.length)

    def finish(self, run: BatchRun) -> None:
        """Join the outputs, which needs memory too."""
        if run.sized is None:
            return
        whole = run.whole
        note = "batchfit: raised while the outputs of all microbatches were joined"
        self.joined = run_twice(
            lambda: whole.joined(self._outputs, self.done),
            device=run.context.device,
            note=note,
            failed=lambda why: BatchfitError(
                f"the joined outputs do not fit: {why}. Return them on the host (.cpu()) from fn"
            ),
        )
        run.undo.keep()


@final
class ForwardPass:
    """Calls of `fn` for what is left of a batch; outputs are kept as they come."""

    in_loss = False
    loss = None
    outputs = None

    def __init__(
        self,
        fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Microbatch],
        terms: PassTerms,
        outputs: list[Any],
        done: list[Microbatch],
    ) -> None:
        self._fn = fn
        self._whole = whole
        self._plan = plan
        self._terms = terms
        self._outputs = outputs
        self._done = done
        self.at = -1
        self.count = len(plan)

    def __call__(self) -> None:
        terms = self._terms
        micros = self._whole.micros(self._plan, self._done)
        for index, micro in enumerate(self._whole.fed(micros, terms.run.device)):
            self.at = index
            terms.run.mark()
            terms.begin(index)
            output = self._fn(micro)
            terms.ended(index)  # nothing is out of memory once the microbatch is done
            self._outputs.append(output)
            self._done.append(self._plan[index])
            del micro
