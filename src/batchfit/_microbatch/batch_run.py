"""One batch of one call of `Microbatcher`, from opening it to the pass that counts.

Rules
- A pass that fails with an OOM is undone as a whole (`BatchUndo`) and retried smaller: a retried call ends
  as one that began at that size. The OOM is handled outside `except`, with no frame of the user's alive.
- A batch that ran is never repeated; what it showed is for the next one (`SizedBatch`).
- A rank that raises reports it to the other ranks first: all that may fail is inside `RankBatch`'s block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, final

import torch
from torch import nn

from batchfit._engine.batch.padding import Lengths
from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch
from batchfit._engine.data_parallel.interface import DataParallel, Outcome, PlannedPass, RankBatch
from batchfit._engine.device.oom import Failure, recover
from batchfit._engine.device.tensors import check_loss, loss_and_outputs
from batchfit._engine.sizing.interface import PassWatch, SizedBatch
from batchfit._engine.sizing.memory_budget import DeviceReading, whole_sentences
from batchfit._engine.sizing.pure.sizes import oom_in_short
from batchfit._engine.snapshot.batch_undo import BatchUndo
from batchfit._engine.snapshot.coverage import modules_held
from batchfit._engine.torch_private.modules import BatchNorm
from batchfit._microbatch.checks import brief
from batchfit._microbatch.context import GraphCheck, MicrobatchContext, function_key
from batchfit.errors import BatchfitError, NothingFitsError
from batchfit.results import StepReport

Kind = Literal["backward", "cached", "map"]

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_CHANGED = (
    "fn changed the batch in place and then was out of memory: a retry would see the changed batch. Clone "
    "what fn writes into"
)


class MicrobatchPass(PlannedPass, Protocol):
    """One pass of a call over the microbatches of a plan."""

    in_loss: bool  # it is in a loss over the whole batch, which smaller microbatches leave as it is
    loss: Any  # of the batch, once the pass has run; None for a pass without one
    outputs: Any  # that the user's function has returned beside the loss


class MicrobatchCall(ABC):
    """What a call of `Microbatcher` does with a batch: `backward`, `backward_cached` or `map`."""

    kind: Kind
    functions: Mapping[str, Callable[[Any], Any]]  # the user's, by the names of their arguments
    scaler: Any = None
    done: Sequence[Microbatch] = ()  # microbatches that ran and are not repeated after an OOM

    def check(self, ranks: DataParallel) -> None:
        """Refuse wrong arguments, before anything runs."""
        for name, fn in self.functions.items():
            if not callable(
                fn
            ):  # its signature is not checked: that takes as long as all else before a batch
                raise TypeError(f"{name} must be a callable {name}(micro), not {brief(fn)}")
        if self.scaler is not None and not callable(getattr(self.scaler, "scale", None)):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {self.scaler!r:.80}")

    def grad_mode(self, ranks: DataParallel) -> AbstractContextManager[object]:
        """The mode of autograd in which the batch runs."""
        return nullcontext()

    @abstractmethod
    def weigh(self, whole: Batch, plan: Sequence[Microbatch]) -> float:
        """The weight of a batch. It cuts the batch, and may need memory."""

    def weigh_sample(self, micro: Any) -> float:
        """The weight of a microbatch of one sample."""
        return 1.0

    def needs_inspection(self, norms: Sequence[BatchNorm]) -> bool:
        """Whether the loss is inspected before the batch is cut."""
        return False

    def inspect(self, run: BatchRun, plan: Sequence[Microbatch]) -> None:  # noqa: B027 - most calls need none
        """Before a batch is cut: refuse a loss that cannot be."""

    @abstractmethod
    def prepare(
        self, whole: Batch, plan: Sequence[Microbatch], terms: PassTerms
    ) -> tuple[MicrobatchPass | None, float]:
        """A pass over a plan (None where the batch has no weight), and the weight of the batch."""

    def finish(self, run: BatchRun) -> None:  # noqa: B027 - most calls need none
        """The pass that counts has run."""


@final
@dataclass(frozen=True, slots=True)
class PassTerms:
    """What a pass needs beside the user's function and the plan."""

    run: BatchRun
    layers: Sequence[BatchNorm]  # whose running statistics are to be those of the full batch
    check_graph: GraphCheck | None
    watch: PassWatch | None

    def begin(self, index: int) -> None:
        """A microbatch begins."""
        self.run.ranks.begin_microbatch()
        if self.watch is not None:
            self.watch.begin(index)

    def ended(self, index: int) -> None:
        """It ran."""
        if self.watch is not None:
            self.watch.end(index)

    def backward(
        self, loss: Any, *, share: float = 1.0, check_graph: GraphCheck | None = None
    ) -> torch.Tensor:
        """Backward of a loss, which adds nothing without a graph; returns the loss, scaled and detached."""
        if check_graph is not None and loss.requires_grad:
            check_graph([loss])
        share *= self.run.ranks.scale
        if share != 1.0:
            loss = loss * share
        if loss.requires_grad:
            scaler = self.run.call.scaler
            (loss if scaler is None else scaler.scale(loss)).backward()
        kept: torch.Tensor = loss.detach()
        return kept.float() if kept.dtype in _LOW_PRECISION else kept

    def end_with(self, loss: Any) -> Any:
        """End the pass; the loss as the user knows it."""
        ranks = self.run.ranks
        if loss is not None and ranks.scale != 1.0:
            loss = loss / ranks.scale
        ranks.end_pass(self.run)  # which may allocate
        return loss


@final
class BatchRun:
    """One batch of one call; a `BatchWork` that the strategy for the ranks runs (`RankBatch.run`)."""

    undo: BatchUndo
    ranks: RankBatch

    def __init__(
        self,
        context: MicrobatchContext,
        call: MicrobatchCall,
        batch: Any,
        *,
        lengths: Lengths | None,
    ) -> None:
        self.context = context
        self.call = call
        self.device = context.target
        self.plan: tuple[Microbatch, ...] = ()  # of the pass that counts
        # Not the pass itself: it refers to this object, and such a cycle would keep the batch allocated.
        self.has_run = False  # False: the batch has no weight here
        self.loss: Any = None
        self.outputs: Any = None
        self.weight = 0.0
        self.outcome: Outcome = "nothing"
        self._batch = batch
        self._lengths = lengths
        self._mark: BatchUndo | None = None
        self._versions: list[int] = []
        self._is_inspected = False
        self._trains = call.kind != "map"

    def execute(self) -> None:
        """Run the batch, on this rank and together with the others."""
        context, call, ranks = self.context, self.call, self.context.ranks
        open_batch = ranks.batch if self._trains else ranks.evaluation
        with open_batch(context.device) as self.ranks:
            call.check(ranks)
            fns = list(call.functions.values())
            opened = self.opened = context.open(self._batch, call.kind, fns, self._lengths)
            self.sized: SizedBatch | None = opened.sized
            self.shared_leaves: Sequence[torch.Tensor] = opened.leaves[: opened.shared]
            leaves = opened.leaves if self._trains else []
            self._check = context.graph_check(fns, leaves, call.kind) if self._trains else None
            self.is_new_function = self._check is not None
            self._marks = None if self._trains else context.free_buffers(context.marks)
            with call.grad_mode(ranks), context.undoing(opened, leaves, call.scaler) as self.undo:
                self.outcome = self.ranks.run(self)

    def modules_held(self) -> Iterable[nn.Module]:
        return modules_held(self.call.functions.values())

    @property
    def whole(self) -> Batch:
        """The batch of this rank, which has samples."""
        assert self.sized is not None
        return self.sized.whole

    # --- passes on this rank alone

    def run_until_it_fits(self) -> None:
        assert self.sized is not None
        sized, loss_failed = self.sized, False
        with self.limits():
            while True:
                plan = sized.plan(self.call.done)
                if self._is_to_inspect(plan):
                    self._inspect(plan)
                self._versions, self._mark = sized.whole.versions(), self.undo if self._trains else None
                run = _LazyPass(self.prepare, plan)
                failure = sized.attempt(run)
                if failure is None:
                    self._finish_alone(sized, plan, run.made)
                    return
                at, in_loss = max(run.at, 0), run.in_loss and failure.verdict != "ambiguous"
                del run
                self._undo_pass()
                if in_loss:
                    self._retry_loss(plan, failure, is_second=loss_failed)
                    loss_failed = True
                else:
                    sized.shrink(failure, at)

    def run_once(self) -> Failure | None:
        assert self.sized is not None
        plan = self.sized.plan()
        run = _LazyPass(self.prepare, plan)
        with self.limits():
            failure = self.sized.attempt(run)
        if failure is None:
            self._finish_alone(self.sized, plan, run.made)
        return failure

    def _finish_alone(
        self, sized: SizedBatch, plan: tuple[Microbatch, ...], made: MicrobatchPass | None
    ) -> None:
        if made is not None:
            plan = (*self.call.done,) or plan
            sized.finish(plan)
        self.finish(plan, made)

    def _undo_pass(self) -> None:
        """Undo what a pass has changed, to its mark; none: nothing of the user's has run."""
        if self._mark is None:
            return
        if self._versions != self.whole.versions():
            raise BatchfitError(_CHANGED)
        self._mark.restore()

    def mark(self) -> None:
        """Microbatches so far stay: after an OOM, what follows is undone to here."""
        if not self._in_step:
            self._versions = self.whole.versions()
            self._mark = self.context.undoing(self.opened, [], None, self._marks)

    @property
    def _in_step(self) -> bool:
        """Whether all ranks run the same microbatches, and retry the whole batch together."""
        return self.ranks.collectives == "every"

    def _retry_loss(self, plan: Sequence[Microbatch], failure: Failure, *, is_second: bool) -> None:
        """An OOM in a loss over the whole batch: retry it once; smaller microbatches do not help it."""
        context, sized = self.context, self.sized
        assert sized is not None
        recover(context.device)
        if is_second:
            raise NothingFitsError(
                sized.whole.length,
                device=context.device.name,
                budget_bytes=context.memory.limit(fresh=True),
                detail=whole_sentences(failure.message),
                holders=context.memory.holders(sized.whole, failure.message),
                advice="loss_fn is out of memory over the representations of the whole batch, which smaller "
                "chunks of the encoder do not change: use a smaller batch, or a loss that needs less memory.",
            )
        size = max(microbatch.size for microbatch in plan)
        sized.retries += 1
        context.events.report(
            "retry", size, size, f"out of memory in loss_fn: {oom_in_short(failure.message)}"
        )

    def _is_to_inspect(self, plan: Sequence[Microbatch]) -> bool:
        return (
            len(plan) > 1
            and not self._is_inspected
            and self.call.needs_inspection(self.context.norms(self.opened.modules))
        )

    def _inspect(self, plan: Sequence[Microbatch]) -> None:
        """Inspect the loss once, and undo what that has changed."""
        self._is_inspected = True
        self.call.inspect(self, plan)
        self.undo.restore()
        self.context.memory.ignore_retries()

    def check_collectives(self) -> None:
        """Refuse a new function that has had collectives of its own."""
        self.ranks.check_collectives()

    def is_proven(self) -> bool:
        if self.call.kind != "backward" or self.sized is None:
            return False
        plan = self.sized.plan()  # a split in equal parts may be smaller than the largest that is allowed
        return not self._is_to_inspect(plan) and self.sized.is_proven()

    def weigh(self) -> float:
        assert self.sized is not None
        plan = self.sized.plan()
        self._exact_layers(plan)
        self.weight = self.call.weigh(self.whole, plan)
        return self.weight

    def _exact_layers(self, plan: Sequence[Microbatch]) -> Sequence[BatchNorm]:
        if not self._trains or len(plan) == 1:
            return ()
        return self.context.layers(self.whole, self.opened.modules, plan)

    def prepare(self, plan: Sequence[Microbatch]) -> MicrobatchPass | None:
        assert self.sized is not None
        terms = PassTerms(
            self,
            layers=self._exact_layers(plan),
            check_graph=self._check_graph if self.is_new_function and not self._in_step else None,
            watch=self.sized.watch,
        )
        made, self.weight = self.call.prepare(self.whole, plan, terms)
        if made is None:
            self.ranks.end_pass(self)
        return made

    def _check_graph(self, losses: Iterable[torch.Tensor]) -> None:
        """Before the first backward of a new function: are all tensors known that get gradients?"""
        self.ranks.check_collectives()
        if self._check is not None:
            self._check(losses)

    def finish(self, plan: tuple[Microbatch, ...], made: Any) -> None:
        self.plan, self.has_run = plan, made is not None
        if made is not None:
            self.loss, self.outputs = made.loss, made.outputs
        self.call.finish(self)

    def report(self) -> StepReport:
        """How the batch ended, once it has run on all ranks."""
        sized = self.sized
        if sized is None or not self.has_run:
            return StepReport(torch.zeros((), device=self.device), (), skipped=self.outcome == "nothing")
        sizes = tuple(microbatch.size for microbatch in self.plan)
        return StepReport(self.loss, sizes, sized.retries, sized.peak_bytes, outputs=self.outputs)

    def limits(self) -> AbstractContextManager[None]:
        return nullcontext() if self.sized is None else self.context.limits(self.sized)

    def shortage(self, what: str, message: str) -> NothingFitsError:
        held_bytes = DeviceReading.of(self.context.device).held_bytes
        return self.context.memory.shortage(what, held_bytes, message, whole=self.whole)

    # --- passes of ranks that run the same number of microbatches (FSDP2)

    @cached_property
    def key(self) -> Hashable:
        fn = next(iter(self.call.functions.values()))
        return self.context.mode(self.call.kind), len(self.shared_leaves), function_key(fn)

    @cached_property
    def least_samples(self) -> int:
        return 2 if self.context.norms(self.opened.modules) else 1

    def sample(self) -> Any:
        from batchfit._engine.data_parallel.fsdp_batch import sample_of

        weigh = self.call.weigh_sample if self._trains else None
        return None if self.sized is None else sample_of(self.whole, weigh, times=self.least_samples)

    def run_without_weight(self, micro: Any, gathered: Callable[[], Sequence[torch.Tensor]]) -> None:
        (fn,) = self.call.functions.values()
        found = fn(micro)
        if not self._trains:
            return
        found, _ = loss_and_outputs(found)
        check_loss(found, "fn")
        # Sharded parameters are in a graph as gathered ones only.
        leaves = [*self.opened.leaves, *gathered()]
        check = self.context.graph_check([fn], leaves, self.call.kind)
        if check is not None:
            check([found])
        (found * 0.0).backward()


@final
class _LazyPass:
    """A pass that is prepared where it runs: to cut a batch and to weigh its microbatches may need memory."""

    __slots__ = ("_plan", "_prepare", "made")

    def __init__(
        self, prepare: Callable[[Sequence[Microbatch]], MicrobatchPass | None], plan: Sequence[Microbatch]
    ) -> None:
        self._prepare = prepare
        self._plan = plan
        self.made: MicrobatchPass | None = None

    def __call__(self) -> None:
        self.made = self._prepare(self._plan)
        if self.made is not None:
            self.made()

    @property
    def at(self) -> int:
        return -1 if self.made is None else self.made.at

    @property
    def in_loss(self) -> bool:
        return self.made is not None and self.made.in_loss
