"""The strategy for models under FSDP2 (`fully_shard`): all ranks run the same number of microbatches.

Rules
- Every microbatch has collectives, so all ranks run the same number of them: agreed before each pass, as many
  as the rank has that needs most. The others cut their batch finer, and fill up with one sample whose loss
  has no weight, before their own microbatches; buffers and random numbers are restored after it.
- Gradients are reduced in each microbatch, as FSDP2 does: the least memory. Losses are scaled by the rank's
  part of the global weight, so that FSDP2's mean over ranks is what one process would have computed.
- A rank that fails sends zeros in place of the rest of its pass, so that no rank waits for it; what the
  others compute from them is discarded. Then all vote (`pure/protocol.py`), and all undo the pass.
- The collectives of a microbatch are recorded once per function, with one sample, before its first pass.
  Process groups count their collectives; after each pass the count must be what was recorded.
- A retry needs FSDP2 in its initial state: only where `fsdp_reset.self_test` has shown that it works here.
  Otherwise an OOM is an error on all ranks, and untested sizes grow slowly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Final, final

import torch
from torch import nn

from batchfit._engine.batch.structure import mapped
from batchfit._engine.batch.transfer import feed
from batchfit._engine.data_parallel.fsdp_batch import FsdpPass
from batchfit._engine.data_parallel.fsdp_models import Shards
from batchfit._engine.data_parallel.interface import BatchWork, Collectives, Outcome
from batchfit._engine.data_parallel.pure.protocol import InStep, Offer, PassVote, settle_offers, settle_pass
from batchfit._engine.data_parallel.rank_errors import give_up, in_collectives
from batchfit._engine.data_parallel.step_vote import RankStep
from batchfit._engine.device.device import Device
from batchfit._engine.device.oom import Failure, recover, run_guarded, run_twice
from batchfit._engine.distributed.collectives import CollectiveCall as Sent
from batchfit._engine.distributed.collectives import (
    StepSends,
    Unservable,
    begun_since,
    counts,
    is_lost_connection,
    recording,
)
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.torch_private import fsdp2
from batchfit.errors import BatchfitError, CollectivesError, RankFailedError

_BATCH: Final = "the microbatches of a sharded model"
_FILLING: Final = "batchfit: raised in a microbatch of one sample, for a rank that has none of its own"
_MOST_FUNCTIONS: Final = 64
_HEADROOM: Final = 0.05  # of the memory: left free where a batch cannot be retried
# What FSDP2 sends: gathers parameters, scatters sums of gradients, and under HSDP sums these over replicas.
_KINDS: Final = ("allgather", "all_gather", "reduce_scatter", "allreduce", "all_reduce")


@final
class FsdpRanks:
    """A `DataParallel` of all ranks of the program, with models under FSDP2."""

    def __init__(self, modules: Sequence[nn.Module], *, sums: bool, timeout_s: float) -> None:
        self.ranks = Ranks.current(timeout_s)
        self.models = Shards(modules, self.ranks)
        self.sums = sums
        self.sends: dict[Hashable, StepSends] = {}
        self.spares: dict[Hashable, Any] = {}

    @property
    def shards(self) -> int:
        return self.ranks.world_size

    def takes_empty(self, *, trains: bool) -> bool:
        return True

    def check_leaves(self, leaves: Sequence[torch.Tensor]) -> None:
        self.models.check(leaves)

    @contextmanager
    def batch(self, device: Device) -> Iterator[FsdpBatch]:
        rank_batch = FsdpBatch(self, device)
        try:
            self.models.check_flags()
            self.models.reshard()
            yield rank_batch
        except BaseException as error:
            rank_batch.give_up(error)
            raise

    evaluation = batch

    def step(self) -> RankStep:
        return RankStep(self.ranks)

    def check_reduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """All gradients are reduced in the microbatch that made them."""


@final
class FsdpBatch:
    """A `RankBatch` under FSDP2."""

    is_alone: Final = False
    collectives: Final[Collectives] = "every"

    def __init__(self, together: FsdpRanks, device: Device) -> None:
        self._all = together
        self._device = device
        self._awaited = True  # the others wait for a vote of this rank
        self.scale = 1.0

    def begin_microbatch(self) -> None:
        self._all.models.reshard()

    def last_microbatch(self) -> AbstractContextManager[None]:
        return nullcontext()

    def check_collectives(self) -> None:
        """Collectives of a function are recorded before it runs."""

    def end_pass(self, work: BatchWork) -> None:
        """Gradients are reduced already."""

    def run(self, work: BatchWork) -> Outcome:
        if not self._run_on_all(work):
            return "nothing"
        undo = work.undo
        own = [leaf.grad for leaf in undo.leaves[len(work.shared_leaves) :] if leaf.grad is not None]
        for gradient in own:  # of the batch itself: FSDP2 has not divided it
            gradient.div_(self._all.models.factor())
        undo.keep()
        return "kept"

    def _run_on_all(self, work: BatchWork) -> bool:
        """Run passes until one fits on all ranks; False where the batch has no weight on any of them."""
        sized = work.sized
        while True:
            with work.limits():
                offer = self._offer(work)
                agreed = self._agree(offer)
                if agreed.action == "nothing":
                    return False
                # From here to the vote others may wait in a collective: only `_attempt` may have an OOM.
                weight = offer.weight
                self.scale = self._all.models.factor() * (1.0 if self._all.sums else weight / agreed.total)
                if agreed.rehearse:
                    self._rehearse(work)
                plan = () if sized is None else sized.plan_finer(agreed.count, work.least_samples)
                versions = None if sized is None else sized.whole.versions()
                run = FsdpPass(
                    work,
                    plan if weight else (),
                    agreed.count,
                    spare=self._all.spares.get(work.key),
                    models=self._all.models,
                )
                vote, failure, error = self._attempt(work, run)
            if self._is_kept(vote, error):
                if run.made is not None and sized is not None:
                    sized.finish(plan)
                work.finish(plan if weight else (), run.made)
                return True
            at = max(run.at, 0)
            del run, error
            self._awaited = True
            work.undo.restore()
            self._all.models.reshard()
            if sized is not None and versions != sized.whole.versions():
                raise BatchfitError(
                    "fn changed the batch in place and then a rank was out of memory: a retry would see the "
                    "changed batch. Clone what fn writes into"
                )
            self._shrink(work, failure, at)

    def _offer(self, work: BatchWork) -> Offer:
        """What this rank needs; to cut and weigh a batch may need memory."""
        rehearsed = work.key in self._all.sends
        if not rehearsed:
            self._all.models.check_reached(work.modules_held())
        sized = work.sized
        if sized is None:
            return Offer(rehearsed=rehearsed, spare=work.key in self._all.spares)
        note = "batchfit: raised while a batch was cut and weighed"
        if not (fsdp2.can_reset() or sized.retries):
            sized.limit_untested(_HEADROOM)
        weight = run_twice(work.weigh, device=self._device, note=note)
        if not rehearsed and work.key not in self._all.spares:
            spare = run_twice(work.sample, device=self._device, note=note)
            if spare is not None:
                if len(self._all.spares) >= _MOST_FUNCTIONS:
                    self._all.spares.clear()
                    self._all.sends.clear()
                self._all.spares[work.key] = mapped(spare, _on_host)
        count = len(sized.plan()) if weight else 0
        return Offer("", count, weight, rehearsed, work.key in self._all.spares)

    def _agree(self, offer: Offer) -> InStep:
        self._awaited = False
        offers = self._all.ranks.gather(asdict(offer), doing=_BATCH)
        agreed = settle_offers([Offer(**one) for one in offers])
        if agreed.failed:
            raise RankFailedError(agreed.failed, doing=_BATCH)
        if agreed.action == "fail":
            raise BatchfitError(agreed.why)
        return agreed

    def _rehearse(self, work: BatchWork) -> None:
        """Record the collectives of a microbatch, with one sample. An error here cannot be retried."""
        before = counts()
        calls: list[Sent] = []
        with in_collectives(self._all.ranks):
            self._all.models.reshard()
            (micro,) = feed([self._all.spares[work.key]], work.device)
            with recording() as calls:
                work.run_without_weight(micro, self._all.models.gathered_parameters)
            del micro
            self._all.models.reshard()
        begun = {name: count for name, count in begun_since(before).items() if count}
        work.undo.restore()
        whys = self._all.ranks.gather(
            self._keep_sends(work.key, calls, begun), doing="what a microbatch sends"
        )
        if any(whys):
            self._all.sends.pop(work.key, None)
            raise CollectivesError(
                f"fn cannot run in microbatches on several ranks: {next(filter(None, whys))}. A rank that is "
                "out of memory alone would leave the others waiting"
            )

    def _keep_sends(self, key: Hashable, calls: list[Sent], begun: dict[str, int]) -> str:
        """Keep what was recorded; returns why no rank could send zeros in its place, or ""."""
        try:
            self._all.sends[key] = StepSends.learn({1: calls})
        except Unservable as error:
            return str(error)
        names = [call.op._schema.name.partition("::")[2].lstrip("_") for call in calls]
        odd = sorted({name for name in names if not name.startswith(_KINDS)})
        if odd:
            return f"it has collectives beside FSDP2 ({', '.join(odd)})"
        if begun != Counter(call.group for call in calls):
            return "it has collectives that cannot be recorded"
        return ""

    def _attempt(self, work: BatchWork, run: FsdpPass) -> tuple[PassVote, Failure | None, Exception | None]:
        """One pass; whether it fails or not, this rank has sent all that the others wait for."""
        sends, before = self._all.sends[work.key], counts()
        failure: Failure | None = None
        kept: Exception | None = None
        with in_collectives(self._all.ranks):
            try:
                if work.sized is None:
                    failure = run_guarded(run, device=self._device, last=True, note=lambda: _FILLING)
                else:
                    failure = work.sized.attempt(run)
            except Exception as error:
                if is_lost_connection(error):
                    raise
                kept = error
            if failure is None and kept is None:
                self._check_sent(sends, run.count, begun_since(before))
                return PassVote(), None, None
            text = failure.message if failure is not None else f"{type(kept).__name__}: {kept}"
            work.undo.restore()
            recover(self._device)
            is_reset = self._all.models.reset()
            _send_zeros(sends, run.count, begun_since(before))
        return PassVote("raised" if failure is None else "oom", text[:500], is_reset), failure, kept

    def _check_sent(self, sends: StepSends, count: int, begun: dict[str, int]) -> None:
        owed = Counter(call.group for call in sends.records[0])
        wanted = {name: one * count for name, one in owed.items()}
        sent = {name: one for name, one in begun.items() if one}
        if sent != wanted:
            raise CollectivesError(
                f"{count} microbatches had {sum(sent.values())} collectives, and {sum(wanted.values())} were "
                "expected from the first one: the collectives of fn must not depend on the data"
            )

    def _is_kept(self, own: PassVote, error: Exception | None) -> bool:
        """Vote: whether the pass ran on all ranks; False: retry it, an error where that is not possible."""
        votes = [PassVote(**one) for one in self._all.ranks.gather(asdict(own), doing=_BATCH)]
        action = settle_pass(votes)
        if action == "keep":
            return True
        why = self._all.models.can_retry()
        failed = [(rank, vote.text) for rank, vote in enumerate(votes) if vote.outcome != "ran"]
        if action == "retry" and not why:
            return False
        if error is not None:
            raise error
        if action == "fail" and not why:
            raise RankFailedError(failed, doing=_BATCH)
        named = "; ".join(f"rank {rank}: {text}" for rank, text in failed)
        why = why or "this version of torch cannot reset FSDP2 after a step that failed in it"
        raise BatchfitError(
            f"a batch of a sharded model failed and cannot be retried ({why}), so all ranks stop: {named}. "
            "Start from a checkpoint, with a smaller microbatch_size"
        )

    def _shrink(self, work: BatchWork, failure: Failure | None, at: int) -> None:
        """After an OOM on some rank: `failure` is this rank's, if it had one."""
        if work.sized is None:
            if failure is not None:
                raise work.shortage("a microbatch of one sample", failure.message)
        elif failure is None:
            work.sized.retries += 1
        else:
            work.sized.shrink(failure, at)

    def give_up(self, error: BaseException) -> None:
        """This rank raises: report it to the other ranks."""
        vote = (lambda text: self._agree(Offer(error=text))) if self._awaited else None
        give_up(self._all.ranks, error, vote)


def _send_zeros(sends: StepSends, count: int, begun: dict[str, int]) -> None:
    """Send zeros for what is left of `count` microbatches."""
    had, one = Counter(begun), Counter(call.group for call in sends.records[0])
    for _ in range(count):
        sends.serve(1, had)
        had = had - one


def _on_host(leaf: Any) -> Any:
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else leaf
