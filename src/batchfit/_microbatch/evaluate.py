"""Evaluation of a batch in microbatches: outputs joined in its order.

Rules
- After an out-of-memory only what has not been done is done again, so that nothing is counted twice; the
  microbatch that failed draws its random numbers again, and finds buffers as they were when it began.
- Inference mode, but for sharded models: parameters gathered there could not be trained afterwards.
- What was written into by a microbatch that failed is not tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.split import Batch
from batchfit._engine.data_parallel.fsdp import FsdpRanks
from batchfit._engine.device.oom_guard import run_guarded
from batchfit._engine.device.readings import recover
from batchfit._engine.sizing.watch import NOBODY
from batchfit._engine.snapshot.rewind import Buffers, Rewind
from batchfit._microbatch.backward import work_in_step
from batchfit._microbatch.checks import check_callable
from batchfit._microbatch.context import CHANGED, MicrobatchContext
from batchfit._microbatch.passes import ForwardPass
from batchfit.errors import BatchfitError


def map_batch(
    setting: MicrobatchContext, fn: Callable[[Any], Any], batch: Any, lengths: Lengths | None
) -> Any:
    """The outputs of `fn` for the whole batch, in its order."""
    if isinstance(setting.sync, FsdpRanks):
        return _map_in_step(setting, setting.sync, fn, batch, lengths)
    check_callable(fn, "fn")
    opened = setting.open(batch, "map", [fn], lengths)
    call = opened.call
    assert call is not None
    sizer = setting.sizer(call)
    outputs: list[Any] = []
    done: list[Piece] = []
    marks = Buffers() if setting.buffers.busy else setting.marks
    versions: list[int] = []

    def begin() -> Rewind:
        versions[:] = call.whole.versions()
        return setting.rewinding(opened, [], None, marks)

    with (
        torch.inference_mode(),
        setting.sync.quiet(),
        setting.rewinding(opened, [], None) as rewind,
        setting.inside(call),
    ):
        while sum(piece.size for piece in done) < call.whole.length:
            plan = sizer.plan(call, done)
            run = ForwardPass(
                fn, call.whole, plan, setting.target, begin, outputs, done, call.watch or NOBODY
            )
            failure = sizer.attempt(call, run)
            mark, at = run.mark, max(run.at, 0)
            del run
            if failure is not None:
                if mark is not None:
                    if versions != call.whole.versions():
                        raise BatchfitError(CHANGED)
                    mark.back()
                sizer.shrink(call, failure, at)
        sizer.finish(call, done)
        answer = _joined(setting, call.whole, outputs, done)
        rewind.keep()
        return answer


def _map_in_step(
    setting: MicrobatchContext,
    everybody: FsdpRanks,
    fn: Callable[[Any], Any],
    batch: Any,
    lengths: Lengths | None,
) -> Any:
    """`map` of a sharded model: all ranks call it, in as many microbatches; None for no samples."""
    with everybody.turn(setting.device) as turn:
        check_callable(fn, "fn")
        opened = setting.open(batch, "map", [fn], lengths)
        call = opened.call
        outputs: list[Any] = []
        marks = Buffers()

        def prepare(plan: Sequence[Piece]) -> ForwardPass:
            assert call is not None
            outputs.clear()
            watch = turn.watching(call.watch or NOBODY)
            begin = partial(setting.rewinding, opened, [], None, marks)
            return ForwardPass(fn, call.whole, plan, setting.target, begin, outputs, [], watch)

        def weigh() -> float:
            return 0.0 if call is None else float(call.whole.length)

        # Not in inference mode: parameters that FSDP2 gathers there could not be trained afterwards.
        with torch.no_grad(), setting.rewinding(opened, [], None) as rewind:
            plan, _ = turn.run(work_in_step(setting, opened, "map", fn, rewind, prepare, weigh))
            answer = None if call is None else _joined(setting, call.whole, outputs, plan)
            rewind.keep()
            return answer


def _joined(setting: MicrobatchContext, whole: Batch, outputs: list[Any], plan: Sequence[Piece]) -> Any:
    """What all microbatches returned, as one; that takes memory, too."""
    answer: list[Any] = []
    why = ""
    for _ in range(2):
        failure = run_guarded(
            lambda: answer.append(whole.joined(outputs, plan)),
            device=setting.device,
            last=True,
            note=lambda: "batchfit: raised while the outputs of all microbatches were joined",
        )
        if failure is None:
            return answer[0]
        why = failure.message
        recover(setting.device)
    raise BatchfitError(f"the joined outputs do not fit: {why}. Return them on the host (.cpu()) from fn")
