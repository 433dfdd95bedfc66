"""Ranks that work on one batch together: what `Microbatcher` does where a model is wrapped in DDP.

Rules
- A rank makes its gradients alone, without a collective of the model's; it retries alone where it runs out.
  Then all vote (`_engine.data_parallel.pure.protocol`), and then all reduce, once. Nobody waits for a rank
  that has given up: it votes too, with the text of its error, and all ranks raise with everything as before
  the call.
- An error between the vote and the end of the reduction is an error on all ranks, never a second try.
- Every share of a loss is of the global batch: what one process would have added for the joined batch.
  Losses are made as if all ranks had the same weight, and gradients are corrected after the vote where they
  have not: one agreement a batch, and no pass over the gradients in the usual case.
- The user's `ddp.no_sync()` is honoured: gradients stay local until a call outside of it reduces them all.
- In one process, and without DDP, `SingleProcess` does nothing. Models under FSDP2 are another protocol
  (`lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, Literal, final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.data_parallel.all_reduce import Reduction
from batchfit._engine.data_parallel.ddp_models import Wrapped
from batchfit._engine.data_parallel.fsdp import FsdpRanks
from batchfit._engine.data_parallel.pure.protocol import Settled, Vote, settle, settle_zeros, steps_differ
from batchfit._engine.data_parallel.step_vote import STEP, StepTurn
from batchfit._engine.data_parallel.steps_taken import StepsTaken, digest
from batchfit._engine.device import oom
from batchfit._engine.device.oom_guard import run_twice
from batchfit._engine.device.readings import recover
from batchfit._engine.device.resolve import Device
from batchfit._engine.distributed.collectives import begun_since, counts, is_lost_connection
from batchfit._engine.distributed.fsdp import sharded_modules
from batchfit._engine.distributed.lost_ranks import broken
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.snapshot.coverage import Look
from batchfit._engine.snapshot.rewind import Rewind
from batchfit.errors import BatchfitError, CollectivesError, RankFailedError, RanksDisagreeError

Outcome = Literal["kept", "nothing"]
Sync = Literal["safe", "overlap"]
Weigh = Callable[[], float]

_foreach_mul: Any = torch._foreach_mul_
_foreach_add: Any = torch._foreach_add_

# As long as nccl waits by default: a rank may compile its model while the others wait for its vote.
TIMEOUT_S: Final = 600.0
_BATCH: Final = "the gradients of a batch"
_HOW: Final = "how to reduce a batch"


@final
class SingleProcess:
    """One process, or models that are not wrapped: nobody to agree with."""

    in_step = False
    is_alone = True
    guess = 1.0
    joins_empty = False
    overlapped = False
    last = staticmethod(nullcontext)

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """All leaves are this process's own."""

    def check_reached(self, modules: Iterable[nn.Module]) -> None:
        """Refuse a function that runs a wrapped model which was not given: it would reduce by itself."""
        modules = list(modules)
        if any(sharded_modules(module.modules()) for module in modules):
            raise BatchfitError(
                "fn runs a model under FSDP2 that Microbatcher was not given: it talks to other ranks in "
                "every microbatch, and a rank that tries again would wait for the others. Pass it too"
            )
        if any(isinstance(module, DistributedDataParallel) for module in modules):
            raise BatchfitError(
                "fn runs a model in DistributedDataParallel, and Microbatcher was given the one inside: it "
                "would reduce in every microbatch, and a rank that tries again would wait for the others. "
                "Pass the wrapped model"
            )

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def turn(self, device: Device) -> Iterator[SingleProcess]:
        yield self

    @contextmanager
    def step(self) -> Iterator[None]:
        yield None

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """All gradients are this process's own."""

    def looking(self, look: Look) -> Look:
        """Nobody waits for what a function sends."""
        return look

    def refuse_sent(self) -> None:
        """Nobody waits for what a function sends."""

    def reserve(self, rewind: Rewind, leaves: Sequence[torch.Tensor]) -> None:
        """The try was right."""
        rewind.keep()

    def overlaps(self, rewind: Rewind, leaves: Sequence[torch.Tensor], weigh: Weigh | None) -> bool:
        """There is nothing to overlap with."""
        return False

    def settle(self, rewind: Rewind, weight: float, leaves: Sequence[torch.Tensor]) -> Outcome:
        return "kept" if weight else "nothing"


@final
class DdpRanks:
    """All ranks of the program, with models wrapped in DDP."""

    in_step = False
    joins_empty = True

    def __init__(
        self, wrapped: Sequence[DistributedDataParallel], *, sums: bool, sync: Sync, timeout_s: float
    ) -> None:
        self.wrapped = Wrapped(wrapped)
        self.overlaps = sync == "overlap"
        self.ranks = Ranks.current(timeout_s)
        # Losses that are means count one part in `world_size` each, those that are sums count fully.
        self.guess = 1.0 if sums else 1.0 / self.ranks.world_size
        self.sums = sums
        self.group: Any = wrapped[0].process_group
        self.steps = StepsTaken(self.wrapped.parameters())
        # Gradients that are local so far, by their leaf. Not held: `zero_grad` must free them.
        self.waiting: dict[int, ref[torch.Tensor]] = {}

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse leaves whose gradients nobody would reduce."""
        self.wrapped.check(leaves)

    def check_reached(self, modules: Iterable[nn.Module]) -> None:
        """Refuse a wrapped model that is not one of ours."""
        self.wrapped.check_reached(modules)

    def waits(self, leaf: torch.Tensor, gradient: torch.Tensor | None) -> bool:
        """Whether this gradient of the leaf has not been reduced."""
        left = self.waiting.get(id(leaf))
        return left is not None and gradient is not None and left() is gradient

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, forward and backward of the models have no collective."""
        return self.wrapped.quiet()

    @contextmanager
    def turn(self, device: Device) -> Iterator[DdpBatch]:
        """One batch: whatever happens inside, this rank votes."""
        turn = DdpBatch(self, device)
        try:
            yield turn
        except BaseException as error:
            turn.gave_up(error)
            raise

    def step(self) -> StepTurn:
        """One optimizer step."""
        return StepTurn(self.ranks, self.steps)

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """Refuse to step on gradients that differ from rank to rank."""
        if any(self.waits(one, one.grad) for one in parameters):
            raise BatchfitError(
                "gradients are local to each rank, since the last backward was under no_sync(): a step "
                "would make the ranks different. Call backward once outside of it first"
            )


@final
class DdpBatch:
    """One batch of one rank, from its first sample to the reduction."""

    def __init__(self, together: DdpRanks, device: Device) -> None:
        self._all = together
        self._device = device
        self._voted = False
        self._asks = together.overlaps and together.ranks.world_size > 1
        self._asked = False  # how to reduce this batch
        self._reduction: Reduction | None = None
        self._buffers: list[torch.Tensor] = []
        self._before: dict[str, int] | None = None  # collectives so far, where a function is new
        self._arranged = 0
        self.overlapped = False
        self.syncs = True
        self.guess = together.guess
        self.is_alone = together.ranks.world_size == 1

    def quiet(self) -> AbstractContextManager[None]:
        """Inside, the models have no collective."""
        self.syncs = self._all.wrapped.syncs()
        return self._all.quiet()

    def looking(self, look: Look) -> Look:
        """A function runs for the first time: `look` at its loss, and refuse it if it talks to other ranks.

        Later calls are not looked at: a background thread (a checkpoint that is being saved) may send too.
        """
        self._before, self._arranged = counts(), self._all.wrapped.arranged()

        def looked(losses: Iterable[torch.Tensor]) -> None:
            self.refuse_sent()
            look(losses)

        return looked

    def refuse_sent(self) -> None:
        """Raise if the first try of a function had collectives that are not DDP's own."""
        if self._before is None or self.overlapped or self._arranged != self._all.wrapped.arranged():
            return
        sent = sum(begun_since(self._before).values())
        if sent:
            raise CollectivesError(
                f"fn talks to other ranks (collectives in its first microbatch: {sent}). A rank that runs "
                "out of memory and tries again, or has other microbatches than the rest, would leave them "
                "waiting. Reduce metrics after backward, from report.loss; layers that talk in forward "
                "(tensor, expert or pipeline parallelism) cannot run in microbatches under DDP"
            )

    def reserve(self, rewind: Rewind, leaves: Sequence[torch.Tensor]) -> None:
        """Take what the reduction needs; it may run out of memory, so this belongs to a try.

        `leaves` are the models', the same on all ranks.
        """
        self.refuse_sent()
        if self.overlapped:
            rewind.keep()
            return
        self._reduction = None
        for leaf in leaves:
            if leaf.grad is not None and leaf.grad.layout is not torch.strided:
                raise BatchfitError(
                    "sparse gradients are not reduced over ranks: use sparse=False for embeddings"
                )
        if not self.syncs or self._all.ranks.world_size == 1:
            return
        self._buffers = self._all.wrapped.buffers()
        for leaf, old in zip(leaves, rewind.old, strict=False):
            if leaf.grad is None and self._all.waits(leaf, old):
                leaf.grad = _zeros(leaf)
        note = "batchfit: raised while the reduction's buckets were allocated"
        group, bucket_bytes = self._all.group, self._all.wrapped.bucket_bytes
        self._reduction = run_twice(
            lambda: Reduction(leaves, self._buffers, group=group, cap_bytes=bucket_bytes),
            device=self._device,
            note=note,
        )

    def settle(self, rewind: Rewind, weight: float, leaves: Sequence[torch.Tensor]) -> Outcome:
        """Vote, and do what all have decided: afterwards gradients are those of the global batch."""
        if self.overlapped:
            return "kept"
        settled = self._vote(self._mine(rewind, weight, leaves))
        if settled.action == "nothing":
            return "nothing"
        if settled.action == "zeros":
            settled = self._with_zeros(settled, leaves)
        world_size = self._all.ranks.world_size
        correction = 1.0 if self._all.sums else weight * world_size / (settled.total or 1.0)
        try:
            self._finish(settled, rewind, leaves, correction)
        except Exception as error:
            raise broken(self._all.ranks, error) from error
        return "kept"

    def overlaps(self, rewind: Rewind, leaves: Sequence[torch.Tensor], weigh: Weigh | None) -> bool:
        """Whether DDP reduces this batch itself: agreed beforehand, where every rank's sizes have run before.

        `weigh` is None where a rank is not ready for it.
        """
        everybody = self._all
        world_size = everybody.ranks.world_size
        if not self._asks:
            return False
        pairs = zip(leaves, rewind.old, strict=False)
        # Gradients that are views of DDP's buckets, set aside now, would be written over.
        viewed = everybody.wrapped.views and any(old is not None for old in rewind.old)
        weight = 0.0
        waits = any(everybody.waits(leaf, old) for leaf, old in pairs)
        ready = self.syncs and everybody.wrapped.reduce_all(leaves)
        if weigh is not None and ready and not (viewed or waits):
            with suppress(Exception):  # it comes again where all are told of it
                weight = weigh()
        weights = self._ask_how("", weight)
        self.overlapped = all(weights)
        if self.overlapped:  # DDP divides by the number of ranks
            self.guess = float(world_size) if everybody.sums else weight * world_size / sum(weights)
        return self.overlapped

    def _ask_how(self, error: str, weight: float) -> list[float]:
        """Everybody's weights, before a batch that DDP might reduce; a rank that has given up comes too."""
        self._asked = self._voted = True  # where it fails, all know
        told = self._gather([error, weight, self._all.steps.count], doing=_HOW)
        failed = [(rank, text) for rank, (text, *_) in enumerate(told) if text]
        if failed:
            raise RankFailedError(failed, doing=_BATCH)
        steps = [taken for *_, taken in told]
        why = steps_differ(steps)
        if why:
            self._compare(steps, why)
        self._voted = False
        return [one for _, one, _ in told]

    def _gather(self, value: object, *, doing: str) -> list[Any]:
        """Everybody's values. Ranks at the step of the last batch get an error there, and then come here."""
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

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Inside, an error is one of all ranks: this one tells them, or finds out who is to blame."""
        self._voted = True
        ranks = self._all.ranks
        try:
            with self._all.wrapped.watched():
                yield
            self._all.wrapped.settle_buckets()
        except Exception as error:
            if is_lost_connection(error):
                raise broken(ranks, error) from error
            ranks.leave(f"{type(error).__name__}: {error}"[:500])
            raise
        except BaseException as error:
            ranks.leave(type(error).__name__)
            raise

    def last(self) -> AbstractContextManager[None]:
        """Around the last microbatch: where this batch overlaps, DDP reduces in it."""
        return self._all.wrapped.loud() if self.overlapped else nullcontext()

    def cut_off(self, message: str) -> BatchfitError:
        """The error where memory ran out in a batch that DDP reduces."""
        return BatchfitError(
            "memory ran out in a batch that was reduced while it ran (sync='overlap'), so no rank can do it "
            f"again: start from a checkpoint. sync='safe' survives this. ({message})"
        )

    def gave_up(self, error: BaseException) -> None:
        """This rank raises: the others are told, and nobody waits for it."""
        text = f"{type(error).__name__}: {error}"[:500].rstrip(": ")
        if not isinstance(error, Exception):  # Ctrl-C comes at any time, also while this rank waits in a vote
            self._all.ranks.leave(text)
            return
        if self._voted:
            return
        try:
            if self._asks and not self._asked:
                self._ask_how(text, 0.0)
            else:
                self._vote(Vote(error=text))
        except BatchfitError as other:
            if not isinstance(other, RankFailedError):
                error.add_note(f"batchfit: the other ranks could not be told: {other}")

    def _mine(self, rewind: Rewind, weight: float, leaves: Sequence[torch.Tensor]) -> Vote:
        new = waiting = reduced = 0
        for at, leaf in enumerate(leaves):
            old = rewind.old[at]
            new |= (leaf.grad is not None) << at
            if old is not None:
                waits = self._all.waits(leaf, old)
                waiting |= waits << at
                reduced |= (not waits) << at
        return Vote("", weight, len(leaves), new, waiting, reduced, self.syncs, self._all.steps.count)

    def _vote(self, mine: Vote) -> Settled:
        self._voted = True
        votes = [Vote.from_json(one) for one in self._gather(mine.to_json(), doing=_BATCH)]
        settled = settle(votes)
        if settled.action == "apart":
            self._compare([vote.steps for vote in votes], settled.why)
            settled = settle([replace(vote, steps=0) for vote in votes])
        return self._all_go(settled)

    def _all_go(self, settled: Settled) -> Settled:
        if settled.failed:
            raise RankFailedError(settled.failed, doing=_BATCH)
        if settled.action == "fail":
            raise BatchfitError(settled.why)
        return settled

    def _with_zeros(self, settled: Settled, leaves: Sequence[torch.Tensor]) -> Settled:
        """Zeros for gradients that only other ranks have; a second vote, for they may not fit here."""
        failed = ""
        for _ in range(2):
            failed = _made_zeros([leaf for at, leaf in enumerate(leaves) if settled.reduces >> at & 1])
            if not failed:
                break
            recover(self._device)
        errors = self._all.ranks.gather(failed, doing=_BATCH)
        return self._all_go(settle_zeros(errors, settled))

    def _finish(
        self, settled: Settled, rewind: Rewind, leaves: Sequence[torch.Tensor], correction: float
    ) -> None:
        """What follows a vote that all go on. Allocates nothing on the device."""
        gradients = [leaf.grad for leaf in rewind.leaves if leaf.grad is not None]
        if correction != 1.0 and gradients:
            with torch.no_grad():
                _foreach_mul(gradients, correction)
        world_size = self._all.ranks.world_size
        chosen = [at for at in range(len(leaves)) if settled.reduces >> at & 1]
        waiting = [at for at in chosen if self._all.waits(leaves[at], rewind.old[at])]
        if settled.action == "keep":
            self._keep_local(rewind, leaves, chosen, waiting)
            return
        if self._reduction is not None:
            if waiting:
                with torch.no_grad():
                    _foreach_add([leaves[at].grad for at in waiting], [rewind.old[at] for at in waiting])
            limit_s = self._all.ranks.timeout_s if _host_waits(self._all.group) else None
            self._reduction.run(
                [leaves[at] for at in chosen],
                [leaves[at].grad for at in chosen],  # type: ignore[misc]
                self._buffers,
                timeout_s=limit_s,
            )
            self._reduction = None
        rewind.keep(instead=waiting if world_size > 1 else ())
        for at in waiting:
            self._all.waiting.pop(id(leaves[at]), None)

    def _keep_local(
        self, rewind: Rewind, leaves: Sequence[torch.Tensor], chosen: list[int], waiting: list[int]
    ) -> None:
        """Gradients wait for a reduction: one that is reduced already becomes this rank's part of it."""
        parts = [rewind.old[at] for at in chosen if at not in waiting and rewind.old[at] is not None]
        if parts:
            with torch.no_grad():
                _foreach_mul(parts, 1.0 / self._all.ranks.world_size)
        rewind.keep()
        for at in chosen:
            gradient = leaves[at].grad
            if gradient is not None and self._all.ranks.world_size > 1:
                self._all.waiting[id(leaves[at])] = ref(gradient)


def together(
    modules: Sequence[nn.Module], *, sums: bool, sync: Sync, timeout_s: float | None
) -> DdpRanks | FsdpRanks | SingleProcess:
    """Who takes part, from the modules of a Microbatcher; refuses what cannot be done together."""
    if sync not in ("safe", "overlap"):
        raise ValueError(f"sync must be one of 'safe', 'overlap', not {sync!r}")
    if timeout_s is not None:
        Ranks.current(timeout_s)  # refuses what is no time
    limit_s = TIMEOUT_S if timeout_s is None else timeout_s
    if sharded_modules(modules):
        if sync != "safe":
            raise ValueError(
                f"sync must be 'safe' for models under FSDP2, which overlap anyhow, not {sync!r}"
            )
        return FsdpRanks(modules, sums=sums, timeout_s=limit_s)
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if not wrapped:
        return SingleProcess()
    return DdpRanks(wrapped, sums=sums, sync=sync, timeout_s=limit_s)


def _zeros(leaf: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(leaf, requires_grad=False)


def _made_zeros(leaves: Sequence[torch.Tensor]) -> str:
    """Give all of them a gradient; the text of the error where that fails."""
    try:
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = _zeros(leaf)
    except Exception as error:  # noqa: BLE001 - whatever it is, all ranks must hear of it
        return oom.describe(error)
    return ""


def _host_waits(group: Any) -> bool:
    """Whether the host waits for a collective anyhow: with nccl, a time-out is what would make it wait."""
    return str(dist.get_backend(group)) == "gloo"
