"""The strategy for models in DistributedDataParallel: local passes, a vote, then the reduction.

Rules
- A rank computes its gradients alone, without a collective of the model's; after an OOM it retries alone.
  Then all vote (`pure/protocol.py`), and then all reduce, once. A rank that has given up votes too, with the
  text of its error, so that no rank waits for it; all ranks raise, with everything as before the call.
- An error between the vote and the end of the reduction is an error on all ranks, never a retry.
- Every share of a loss is of the global batch: what one process would have added for the joined batch.
  Losses are scaled as if all ranks had the same weight, and gradients are corrected after the vote where they
  have not: one vote per batch, and no kernel over the gradients in the usual case.
- The user's `ddp.no_sync()` is honoured: gradients stay local until a call outside of it reduces them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, Literal, final
from weakref import ref

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.data_parallel.all_reduce import Reduction
from batchfit._engine.data_parallel.ddp_models import Wrapped
from batchfit._engine.data_parallel.interface import BatchWork, Collectives, Outcome
from batchfit._engine.data_parallel.pure.protocol import Settled, Vote, settle, settle_zeros, steps_differ
from batchfit._engine.data_parallel.rank_errors import give_up, in_collectives
from batchfit._engine.data_parallel.single import SINGLE_PROCESS, SingleProcessBatch
from batchfit._engine.data_parallel.step_vote import STEP, RankStep
from batchfit._engine.data_parallel.steps_taken import StepsTaken, digest
from batchfit._engine.device import oom
from batchfit._engine.device.device import Device
from batchfit._engine.device.oom import run_twice
from batchfit._engine.distributed.collectives import begun_since, counts
from batchfit._engine.distributed.ranks import Ranks, broken
from batchfit._engine.snapshot.batch_undo import BatchUndo
from batchfit._engine.torch_private import foreach
from batchfit.errors import BatchfitError, CollectivesError, RankFailedError, RanksDisagreeError

_BATCH: Final = "the gradients of a batch"
_HOW: Final = "how to reduce a batch"


@final
class DdpRanks:
    """A `DataParallel` of all ranks of the program, with models in DDP."""

    shards = None

    def __init__(
        self,
        wrapped: Sequence[DistributedDataParallel],
        *,
        sums: bool,
        sync: Literal["safe", "overlap"],
        timeout_s: float,
    ) -> None:
        self.wrapped = Wrapped(wrapped)
        self.overlaps = sync == "overlap"
        self.ranks = Ranks.current(timeout_s)
        # Losses that are means count one part in `world_size` each, those that are sums count fully.
        self.scale = 1.0 if sums else 1.0 / self.ranks.world_size
        self.sums = sums
        self.group: Any = wrapped[0].process_group
        self.steps = StepsTaken(self.wrapped.parameters())
        # Gradients that are local so far, by their leaf. Not held: `zero_grad` must free them.
        self.waiting: dict[int, ref[torch.Tensor]] = {}

    def takes_empty(self, *, trains: bool) -> bool:
        return trains

    def check_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        self.wrapped.check(leaves)

    def is_local(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether this gradient of the leaf has not been reduced."""
        left = self.waiting.get(id(leaf))
        return left is not None and gradient is not None and left() is gradient

    @contextmanager
    def batch(self, device: Device) -> Iterator[DdpBatch]:
        rank_batch = DdpBatch(self, device)
        try:
            yield rank_batch
        except BaseException as error:
            rank_batch.give_up(error)
            raise

    @contextmanager
    def evaluation(self, device: Device) -> Iterator[SingleProcessBatch]:
        with SINGLE_PROCESS.batch(device) as rank_batch, self.wrapped.without_collectives():
            yield rank_batch

    def step(self) -> RankStep:
        return RankStep(self.ranks, self.steps)

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        if any(self.is_local(one, one.grad) for one in parameters):
            raise BatchfitError(
                "gradients are local to each rank, since the last backward was under no_sync(): a step "
                "would make the ranks different. Call backward once outside of it first"
            )


@final
class DdpBatch:
    """A `RankBatch` under DDP."""

    def __init__(self, together: DdpRanks, device: Device) -> None:
        self._all = together
        self._device = device
        self._voted = False
        self._asks = together.overlaps and together.ranks.world_size > 1
        self._asked = False  # how to reduce this batch
        self._reduction: Reduction | None = None
        self._buffers: list[torch.Tensor] = []
        self._begun_before: dict[str, int] | None = None  # collectives so far, where a function is new
        self._rebuilt_before = 0
        self._overlapped = False
        self._syncs = True
        self.scale = together.scale
        self.is_alone = together.ranks.world_size == 1

    @property
    def collectives(self) -> Collectives:
        return "last" if self._overlapped else "none"

    def run(self, work: BatchWork) -> Outcome:
        wrapped = self._all.wrapped
        if work.is_new_function:
            wrapped.check_reached(work.modules_held())
            # Later calls are not checked: a background thread (a checkpoint that is saved) may send too.
            self._begun_before, self._rebuilt_before = counts(), wrapped.rebuilt()
        self._syncs = wrapped.syncs()
        with wrapped.without_collectives():
            if self._agree_to_overlap(work):
                self._run_overlapped(work)
            elif work.sized is None:
                self.end_pass(work)
            else:
                work.run_until_it_fits()
        return "kept" if self._overlapped else self._settle(work)

    def begin_microbatch(self) -> None: ...

    def last_microbatch(self) -> AbstractContextManager[None]:
        """Where this batch overlaps, DDP reduces in its last microbatch."""
        return self._all.wrapped.with_collectives() if self._overlapped else nullcontext()

    def check_collectives(self) -> None:
        before, wrapped = self._begun_before, self._all.wrapped
        if before is None or self._overlapped or self._rebuilt_before != wrapped.rebuilt():
            return
        begun = sum(begun_since(before).values())
        if begun:
            raise CollectivesError(
                f"fn issues collectives (in its first microbatch: {begun}). A rank that retries after an "
                "OOM, or has other microbatches than the others, would leave them waiting. Reduce "
                "metrics after backward, from report.loss; layers with collectives in forward (tensor, "
                "expert or pipeline parallelism) cannot run in microbatches under DDP"
            )

    def end_pass(self, work: BatchWork) -> None:
        self.check_collectives()
        if self._overlapped:
            work.undo.keep()
            return
        leaves = work.shared_leaves
        self._reduction = None
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.layout is not torch.strided:
                raise BatchfitError(
                    "sparse gradients are not reduced over ranks: use sparse=False for embeddings"
                )
        if not self._syncs or self._all.ranks.world_size == 1:
            return
        self._buffers = self._all.wrapped.buffers()
        for leaf, old in zip(leaves, work.undo.old, strict=False):
            if leaf.grad is None and self._all.is_local(leaf, old):
                leaf.grad = _zeros(leaf)
        group, bucket_bytes = self._all.group, self._all.wrapped.bucket_bytes
        self._reduction = run_twice(
            lambda: Reduction(leaves, self._buffers, group=group, cap_bytes=bucket_bytes),
            device=self._device,
            note="batchfit: raised while the reduction's buckets were allocated",
        )

    def _settle(self, work: BatchWork) -> Outcome:
        """Vote, and do what all have decided: afterwards gradients are those of the global batch."""
        leaves = work.shared_leaves
        settled = self._vote(self._own_vote(work))
        if settled.action == "nothing":
            return "nothing"
        if settled.action == "zeros":
            settled = self._with_zeros(settled, leaves)
        world_size = self._all.ranks.world_size
        correction = 1.0 if self._all.sums else work.weight * world_size / (settled.total or 1.0)
        try:
            self._reduce(settled, work.undo, leaves, correction)
        except Exception as error:
            raise broken(self._all.ranks, error) from error
        return "kept"

    def _agree_to_overlap(self, work: BatchWork) -> bool:
        """Agree whether DDP reduces this batch itself: where the sizes of every rank have run before."""
        together = self._all
        world_size = together.ranks.world_size
        if not self._asks:
            return False
        old = work.undo.old
        # Gradients that are views of DDP's buckets, set aside now, would be written over.
        viewed = together.wrapped.views and any(one is not None for one in old)
        weight = 0.0
        waits = any(together.is_local(leaf, one) for leaf, one in zip(work.shared_leaves, old, strict=False))
        ready = self._syncs and together.wrapped.reduce_all(work.shared_leaves)
        if work.is_proven() and ready and not (viewed or waits):
            with suppress(Exception):  # it is raised again in the pass, where all ranks get it
                weight = work.weigh()
        weights = self._ask_how("", weight)
        self._overlapped = all(weights)
        if self._overlapped:  # DDP divides by the number of ranks
            self.scale = float(world_size) if together.sums else weight * world_size / sum(weights)
        return self._overlapped

    def _ask_how(self, error: str, weight: float) -> list[float]:
        """All ranks' weights, before a batch that DDP might reduce; a rank that gives up takes part too."""
        self._asked = self._voted = True  # where it fails, all ranks raise
        answers = self._gather([error, weight, self._all.steps.count], doing=_HOW)
        failed = [(rank, text) for rank, (text, *_) in enumerate(answers) if text]
        if failed:
            raise RankFailedError(failed, doing=_BATCH)
        steps = [taken for *_, taken in answers]
        why = steps_differ(steps)
        if why:
            self._compare(steps, why)
        self._voted = False
        return [one for _, one, _ in answers]

    def _gather(self, value: object, *, doing: str) -> list[Any]:
        """All ranks' values. Ranks at the step of the last batch get an error there, and then arrive here."""
        while True:
            try:
                return self._all.ranks.gather(value, doing=doing)
            except RanksDisagreeError as error:
                if STEP not in error.places:
                    raise

    def _compare(self, steps: Sequence[int], why: str) -> None:
        """Raise where parameters differ; they may have been loaded since, or restored after a search."""
        held = digest(self._all.wrapped.parameters())
        if len(set(self._all.ranks.gather(held, doing="whether parameters are the same"))) > 1:
            raise RanksDisagreeError(why)
        self._all.steps.count = max(steps)

    def _run_overlapped(self, work: BatchWork) -> None:
        """One pass in sizes that have run before; DDP reduces in its last microbatch.

        An error here is one of all ranks: this rank reports it, or finds out which rank has left.
        """
        self._voted = True
        with in_collectives(self._all.ranks):
            with self._all.wrapped.must_be_called():
                failure = work.run_once()
                if failure is not None:
                    raise BatchfitError(
                        "out of memory in a batch that was reduced while it ran (sync='overlap'), so no "
                        "rank can retry it: start from a checkpoint. sync='safe' survives this. "
                        f"({failure.message})"
                    )
            self._all.wrapped.rebuild_buckets()

    def give_up(self, error: BaseException) -> None:
        """This rank raises: report it to the other ranks."""
        give_up(self._all.ranks, error, None if self._voted else self._vote_error)

    def _vote_error(self, text: str) -> None:
        if self._asks and not self._asked:
            self._ask_how(text, 0.0)
        else:
            self._vote(Vote(error=text))

    def _own_vote(self, work: BatchWork) -> Vote:
        leaves, new, waiting, reduced = work.shared_leaves, 0, 0, 0
        for at, leaf in enumerate(leaves):
            old = work.undo.old[at]
            new |= (leaf.grad is not None) << at
            if old is not None:
                is_local = self._all.is_local(leaf, old)
                waiting |= is_local << at
                reduced |= (not is_local) << at
        return Vote("", work.weight, len(leaves), new, waiting, reduced, self._syncs, self._all.steps.count)

    def _vote(self, mine: Vote) -> Settled:
        self._voted = True
        votes = [Vote.from_json(one) for one in self._gather(mine.to_json(), doing=_BATCH)]
        settled = settle(votes)
        if settled.action == "apart":
            self._compare([vote.steps for vote in votes], settled.why)
            settled = settle([replace(vote, steps=0) for vote in votes])
        return self._checked(settled)

    def _checked(self, settled: Settled) -> Settled:
        """Raise where the ranks have decided to fail."""
        if settled.failed:
            raise RankFailedError(settled.failed, doing=_BATCH)
        if settled.action == "fail":
            raise BatchfitError(settled.why)
        return settled

    def _with_zeros(self, settled: Settled, leaves: Sequence[torch.Tensor]) -> Settled:
        """Zeros for gradients that only other ranks have; a second vote, for they may not fit here."""
        wanted = [leaf for at, leaf in enumerate(leaves) if settled.reduces >> at & 1]
        note, failed = "batchfit: raised while zeros were allocated for gradients", ""
        try:
            run_twice(lambda: _add_zeros(wanted), device=self._device, note=note)
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks must get it
            failed = oom.describe(error)
        errors = self._all.ranks.gather(failed, doing=_BATCH)
        return self._checked(settle_zeros(errors, settled))

    def _reduce(
        self, settled: Settled, undo: BatchUndo, leaves: Sequence[torch.Tensor], correction: float
    ) -> None:
        """Correct, reduce and keep the gradients, after a vote. Allocates nothing on the device."""
        gradients = [leaf.grad for leaf in undo.leaves if leaf.grad is not None]
        if correction != 1.0 and gradients:
            with torch.no_grad():
                foreach.mul_(gradients, correction)
        world_size = self._all.ranks.world_size
        chosen = [at for at in range(len(leaves)) if settled.reduces >> at & 1]
        waiting = [at for at in chosen if self._all.is_local(leaves[at], undo.old[at])]
        if settled.action == "keep":
            self._keep_local(undo, leaves, chosen, waiting)
            return
        if self._reduction is not None:
            if waiting:
                with torch.no_grad():
                    foreach.add_([leaves[at].grad for at in waiting], [undo.old[at] for at in waiting])
            limit_s = self._all.ranks.timeout_s if _host_waits(self._all.group) else None
            self._reduction.run(
                [leaves[at] for at in chosen],
                [leaves[at].grad for at in chosen],  # type: ignore[misc]
                self._buffers,
                timeout_s=limit_s,
            )
            self._reduction = None
        undo.keep(instead=waiting if world_size > 1 else ())
        for at in waiting:
            self._all.waiting.pop(id(leaves[at]), None)

    def _keep_local(
        self, undo: BatchUndo, leaves: Sequence[torch.Tensor], chosen: list[int], waiting: list[int]
    ) -> None:
        """Gradients wait for a reduction: one that is reduced already becomes this rank's part of it."""
        parts = [undo.old[at] for at in chosen if at not in waiting and undo.old[at] is not None]
        if parts:
            with torch.no_grad():
                foreach.mul_(parts, 1.0 / self._all.ranks.world_size)
        undo.keep()
        for at in chosen:
            gradient = leaves[at].grad
            if gradient is not None and self._all.ranks.world_size > 1:
                self._all.waiting[id(leaves[at])] = ref(gradient)


def _zeros(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, requires_grad=False)


def _add_zeros(leaves: Sequence[torch.Tensor]) -> None:
    """Give all of them a gradient."""
    for leaf in leaves:
        if leaf.grad is None:
            leaf.grad = _zeros(leaf)


def _host_waits(group: Any) -> bool:
    """Whether the host waits for a collective anyhow: with nccl, a time-out is what would make it wait."""
    return str(dist.get_backend(group)) == "gloo"
