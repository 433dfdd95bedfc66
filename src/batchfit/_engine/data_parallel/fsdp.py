"""Ranks that run a batch in step: what `Microbatcher` does with models under FSDP2 (`fully_shard`).

Rules
- Every microbatch has collectives, so all ranks run the same number of them: agreed before each try, as many
  as the rank has that needs most. The others cut their batch finer, and join what is still missing with one
  sample whose loss counts nothing, before their own and with buffers and random numbers put back after it.
- Gradients are reduced in each microbatch, as FSDP2 does: the least memory. Losses are scaled by the rank's
  part of the global weight, so that FSDP2's mean over ranks is what one process would have made.
- A rank that fails sends zeros in place of the rest of its try, so that nobody waits for it; what its
  peers make of them is thrown away. Then all vote (`_engine.data_parallel.pure.protocol`), and all take the
  try back.
- What a microbatch sends is recorded once a function, with one sample, before its first try. Process groups
  count their collectives; after each try the count must be what was recorded.
- Doing a batch again needs FSDP2 put at rest: only where `fsdp.self_test` has shown that it works here.
  Otherwise running out is an error on all ranks, and sizes grow with care beforehand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Final, Literal, final

import torch
from torch import nn

from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.structure import mapped
from batchfit._engine.batch.transfer import feed
from batchfit._engine.data_parallel.fsdp_batch import FsdpPass, FsdpWork, cut, is_plain, learn, take_care
from batchfit._engine.data_parallel.fsdp_models import Shards
from batchfit._engine.data_parallel.pure.protocol import InStep, Offer, Tried, settle_offers, settle_try
from batchfit._engine.data_parallel.step_vote import StepTurn
from batchfit._engine.device import oom_guard as trying
from batchfit._engine.device import readings
from batchfit._engine.device.resolve import Device
from batchfit._engine.distributed import fsdp
from batchfit._engine.distributed.collectives import CollectiveCall as Sent
from batchfit._engine.distributed.collectives import (
    StepSends,
    Unservable,
    begun_since,
    counts,
    is_lost_connection,
    recording,
)
from batchfit._engine.distributed.lost_ranks import broken
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.sizing.watch import PassWatch
from batchfit._engine.snapshot.coverage import Look, _code
from batchfit._engine.snapshot.rewind import Rewind
from batchfit.errors import BatchfitError, CollectivesError, RankFailedError

_BATCH: Final = "the microbatches of a sharded model"
_MOST_FUNCTIONS: Final = 64
# What FSDP2 sends: gathers parameters, scatters sums of gradients, and under HSDP sums these over replicas.
_KINDS: Final = ("allgather", "all_gather", "reduce_scatter", "allreduce", "all_reduce")


@final
class FsdpRanks:
    """All ranks of the program, with models under FSDP2."""

    in_step = True
    joins_empty = True

    def __init__(self, modules: Sequence[nn.Module], *, sums: bool, timeout_s: float) -> None:
        self.ranks = Ranks.current(timeout_s)
        self.models = Shards(modules, self.ranks)
        self.sums = sums
        self.sends: dict[Hashable, StepSends] = {}
        self.spares: dict[Hashable, Any] = {}

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse leaves whose gradients nobody would reduce."""
        self.models.check(leaves)

    def check_reached(self, modules: Iterable[nn.Module]) -> None:
        """Refuse a model that talks to other ranks and is not one of ours."""
        self.models.check_reached(modules)

    def twins(self) -> list[torch.Tensor]:
        """What stands for the parameters in a graph."""
        return self.models.twins()

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def turn(self, device: Device) -> Iterator[FsdpBatch]:
        """One batch: as long as others wait for this rank's vote, it votes."""
        turn = FsdpBatch(self, device)
        try:
            self.models.check_flags()
            self.models.rest()
            yield turn
        except BaseException as error:
            turn.gave_up(error)
            raise

    def step(self) -> StepTurn:
        """One optimizer step."""
        return StepTurn(self.ranks)

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """All gradients are reduced in the microbatch that made them."""


@final
class Between:
    """Around each microbatch: the models are at rest when it begins."""

    def __init__(self, everybody: FsdpRanks, inner: PassWatch) -> None:
        self._all = everybody
        self._inner = inner

    def begin(self, index: int) -> None:
        self._all.models.rest()
        self._inner.begin(index)

    def end(self, index: int) -> None:
        self._inner.end(index)


@final
class FsdpBatch:
    """One batch of one rank."""

    overlapped = False
    is_alone = False
    last = staticmethod(nullcontext)

    def __init__(self, everybody: FsdpRanks, device: Device) -> None:
        self._all = everybody
        self._device = device
        self._awaited = True  # the others wait for a vote of this rank
        self.guess = 1.0
        self.outcome: Literal["kept", "nothing"] = "nothing"

    def quiet(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserve(self, rewind: Rewind, leaves: Sequence[torch.Tensor]) -> None:
        """Gradients are reduced already."""

    def overlaps(self, rewind: Rewind, leaves: Sequence[torch.Tensor], weigh: Any) -> bool:
        return False

    def looking(self, look: Look) -> Look:
        """What a function sends is recorded before it runs."""
        return look

    def watching(self, watch: PassWatch) -> PassWatch:
        """Who is told of each microbatch."""
        return Between(self._all, watch)

    def settle(self, rewind: Rewind, weight: float, leaves: Sequence[torch.Tensor]) -> Any:
        """All ranks have decided: keep what was made."""
        if self.outcome == "kept":
            own = [leaf.grad for leaf in rewind.leaves[len(leaves) :] if leaf.grad is not None]
            for gradient in own:  # of the batch itself: nobody has divided it
                gradient.div_(self._all.models.factor())
            rewind.keep()
        return self.outcome

    def run(self, work: FsdpWork) -> tuple[tuple[Piece, ...], Any]:
        """Try until it fits on all ranks: (this rank's plan, its try), or (..., None) for no weight here."""
        while True:
            with work.inside():
                offer = self._offer(work)
                agreed = self._agree(offer)
                if agreed.action == "nothing":
                    return (), None
                # From here to the vote others may wait in a collective: only `_try` may run out of memory.
                weight = offer.weight
                self.guess = self._all.models.factor() * (1.0 if self._all.sums else weight / agreed.total)
                if agreed.rehearse:
                    self._rehearse(work)
                plan, own = cut(work, agreed.count)
                versions = None if work.call is None else work.call.whole.versions()
                run = FsdpPass(
                    work,
                    plan if weight else (),
                    agreed.count,
                    spare=self._all.spares.get(work.key),
                    rest=self._all.models.rest,
                )
                tried, failure, error = self._try(work, run)
            if self._go_on(work, tried, error):
                self.outcome = "kept"
                if run.made is not None:
                    learn(work, plan, own)
                return plan if weight else (), run.made
            at = max(run.at, 0)
            del run, error
            self._awaited = True
            work.rewind.back()
            self._all.models.rest()
            if work.call is not None and versions != work.call.whole.versions():
                raise BatchfitError(
                    "fn changed the batch in place and then a rank ran out of memory: a second try would see "
                    "the changed batch. Clone what fn writes into"
                )
            self._shrink(work, failure, at)

    def _offer(self, work: FsdpWork) -> Offer:
        """What this rank needs; cutting and weighing may need memory."""
        rehearsed = work.key in self._all.sends
        if not rehearsed:
            work.check()
        call = work.call
        if call is None:
            return Offer(rehearsed=rehearsed, spare=work.key in self._all.spares)
        note = "batchfit: raised while a batch was cut and weighed"
        if not (fsdp.can_reset() or call.retries) and is_plain(call):
            take_care(work)
        weight = trying.run_twice(work.weigh, device=self._device, note=note)
        if not rehearsed and work.key not in self._all.spares:
            spare = trying.run_twice(work.spare, device=self._device, note=note)
            if spare is not None:
                if len(self._all.spares) >= _MOST_FUNCTIONS:
                    self._all.spares.clear()
                    self._all.sends.clear()
                self._all.spares[work.key] = mapped(spare, _on_host)
        pieces = len(work.sizer.plan(call)) if weight else 0
        return Offer("", pieces, weight, rehearsed, work.key in self._all.spares)

    def _agree(self, offer: Offer) -> InStep:
        self._awaited = False
        told = self._all.ranks.gather(asdict(offer), doing=_BATCH)
        agreed = settle_offers([Offer(**one) for one in told])
        if agreed.failed:
            raise RankFailedError(agreed.failed, doing=_BATCH)
        if agreed.action == "fail":
            raise BatchfitError(agreed.why)
        return agreed

    def _rehearse(self, work: FsdpWork) -> None:
        """Record what a microbatch sends, with one sample. Who fails here cannot stand in for the rest."""
        before = counts()
        calls: list[Sent] = []
        with self._told():
            self._all.models.rest()
            (micro,) = feed([self._all.spares[work.key]], work.device)
            with recording() as calls:
                work.idle(micro)
            del micro
            self._all.models.rest()
        begun = {name: count for name, count in begun_since(before).items() if count}
        work.rewind.back()
        whys = self._all.ranks.gather(
            self._keep_sends(work.key, calls, begun), doing="what a microbatch sends"
        )
        if any(whys):
            self._all.sends.pop(work.key, None)
            raise CollectivesError(
                f"fn cannot run in microbatches on several ranks: {next(filter(None, whys))}. A rank that "
                "runs out of memory alone would leave the others waiting"
            )

    def _keep_sends(self, key: Hashable, calls: list[Sent], begun: dict[str, int]) -> str:
        """Keep what was recorded; why nobody could stand in for it otherwise."""
        try:
            self._all.sends[key] = StepSends.learn({1: calls})
        except Unservable as error:
            return str(error)
        names = [call.op._schema.name.partition("::")[2].lstrip("_") for call in calls]
        odd = sorted({name for name in names if not name.startswith(_KINDS)})
        if odd:
            return f"it talks to other ranks beside FSDP2 ({', '.join(odd)})"
        return "" if begun == Counter(call.group for call in calls) else "it has collectives out of sight"

    def _try(self, work: FsdpWork, run: FsdpPass) -> tuple[Tried, Any, Exception | None]:
        """One try; whatever becomes of it, this rank has sent all that the others wait for."""
        sends, before = self._all.sends[work.key], counts()
        failure: Any = None
        kept: Exception | None = None
        with self._told():
            try:
                if work.call is None:
                    failure = trying.run_guarded(run, device=self._device, last=True, note=lambda: run.note)
                else:
                    failure = work.sizer.attempt(work.call, run)
            except Exception as error:
                if is_lost_connection(error):
                    raise
                kept = error
            if failure is None and kept is None:
                self._check_sent(sends, run.count, begun_since(before))
                return Tried(), None, None
            text = failure.message if failure is not None else f"{type(kept).__name__}: {kept}"
            work.rewind.back()
            readings.recover(self._device)
            at_rest = self._all.models.reset()
            _stand_in(sends, run.count, begun_since(before))
        return Tried("raised" if failure is None else "ran_out", text[:500], at_rest), failure, kept

    def _check_sent(self, sends: StepSends, count: int, begun: dict[str, int]) -> None:
        owed = Counter(call.group for call in sends.records[0])
        wanted = {name: one * count for name, one in owed.items()}
        sent = {name: one for name, one in begun.items() if one}
        if sent != wanted:
            raise CollectivesError(
                f"{count} microbatches had {sum(sent.values())} collectives, and {sum(wanted.values())} were "
                "expected from the first one: what fn sends to other ranks must not depend on the data"
            )

    def _go_on(self, work: FsdpWork, tried: Tried, error: Exception | None) -> bool:
        """Vote: whether the try was right on all ranks; False to do it again, an error where nobody can."""
        votes = [Tried(**one) for one in self._all.ranks.gather(asdict(tried), doing=_BATCH)]
        action = settle_try(votes)
        if action == "keep":
            return True
        why = self._all.models.can_retry()
        failed = [(rank, vote.text) for rank, vote in enumerate(votes) if vote.outcome != "ran"]
        if action == "again" and not why:
            return False
        if error is not None:
            raise error
        if action == "fail" and not why:
            raise RankFailedError(failed, doing=_BATCH)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed)
        why = why or "this version of torch cannot put FSDP2 at rest after a step that failed in it"
        raise BatchfitError(
            f"a batch of a sharded model failed and cannot be done again ({why}), so all ranks stop: {told}. "
            "Start from a checkpoint, with a smaller microbatch_size"
        )

    def _shrink(self, work: FsdpWork, failure: Any, at: int) -> None:
        """After a try that ran out somewhere."""
        if failure is None:
            if work.call is not None:
                work.call.retries += 1
            return
        if work.call is None:
            held = readings.read(self._device).held_bytes
            raise work.sizing.shortage("a microbatch of one sample", held, failure.message)
        work.sizer.shrink(work.call, failure, at)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Inside, others may wait for this rank in a collective: an error makes it leave, or name who did."""
        ranks = self._all.ranks
        try:
            yield
        except Exception as error:
            if is_lost_connection(error):
                raise broken(ranks, error) from error
            ranks.leave(f"{type(error).__name__}: {error}"[:500])
            raise
        except BaseException as error:
            ranks.leave(type(error).__name__)
            raise

    def gave_up(self, error: BaseException) -> None:
        """This rank raises: the others are told, and nobody waits for it."""
        text = f"{type(error).__name__}: {error}"[:500].rstrip(": ")
        if not isinstance(error, Exception):  # Ctrl-C comes at any time, also while this rank waits in a vote
            self._all.ranks.leave(text)
            return
        if not self._awaited:
            return
        try:
            self._agree(Offer(error=text))
        except BatchfitError as other:
            if not isinstance(other, RankFailedError):
                error.add_note(f"batchfit: the other ranks could not be told: {other}")


def _stand_in(sends: StepSends, count: int, begun: dict[str, int]) -> None:
    """Send zeros for what is left of `count` microbatches."""
    had, one = Counter(begun), Counter(call.group for call in sends.records[0])
    for _ in range(count):
        sends.serve(1, had)
        had = had - one


def code_of(fn: Any) -> Hashable:
    """What stays the same for a function that is made anew for each batch."""
    return _code(fn)


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
