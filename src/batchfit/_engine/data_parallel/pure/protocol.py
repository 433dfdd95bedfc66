"""What ranks decide together about one batch and one optimizer step: pure functions of all ranks' votes.

Rules
- All ranks hold the same list of votes and call the same function, so all take the same branch.
- Between two votes a rank works alone: no collective, nothing that another rank can see. It may retry
  after an OOM as often as it likes; the others wait in the vote, and no other rank has to repeat
  anything. A vote is cast when the work is done, or when the rank has given up.
- A vote that ends well is followed by the collectives, on all ranks, the same ones in the same order: which
  ones is a function of the votes. What they need in memory was taken before the vote.
- A batch has one vote, and a second one only where ranks have gradients for different parameters. A step has
  one, and one more after each attempt where a host copy protects it.
- Sharded models (FSDP2) have collectives in every microbatch, so no rank works alone: ranks agree on a number
  of microbatches before each pass (`settle_offers`), and vote on how it ended (`settle_pass`). A rank
  that fails in between goes on sending, so that all arrive at the second vote.

`docs/explanation/ranks.md` says the same in words, and `tests/data_parallel/pure/test_protocol.py` runs every
interleaving of 2 and 3 ranks with a failure at every point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

Action = Literal["fail", "apart", "zeros", "reduce", "keep", "nothing"]
PassAction = Literal["keep", "retry", "fail", "stuck"]
StepAction = Literal["fail", "protect", "go", "retry", "undo", "done"]


@final
@dataclass(frozen=True, slots=True)
class Vote:
    """How a rank's own work on a batch ended. A set of parameters is a number: bit 0 is the first one."""

    error: str = ""  # why it has given up
    weight: float = 0.0  # of its local batch
    parameters: int = 0  # how many get gradients here
    new: int = 0  # those that this batch gave a gradient
    waiting: int = 0  # those with gradients of earlier batches that have not been reduced so far
    reduced: int = 0  # those with gradients that are the same on all ranks already
    syncs: bool = True  # False under the user's `no_sync()`
    steps: int = 0  # optimizer steps so far

    def to_json(self) -> dict[str, Any]:
        """As it travels; what is as usual is left out."""
        usual = Vote(parameters=self.parameters, new=(1 << self.parameters) - 1)
        return {
            name: f"{value:x}" if name in _SETS else value
            for name, value in asdict(self).items()
            if value != getattr(usual, name) or name == "parameters"
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Vote:
        """What `to_json` wrote."""
        usual = {"new": (1 << stored["parameters"]) - 1}
        return cls(**{**usual, **{name: int(v, 16) if name in _SETS else v for name, v in stored.items()}})


_SETS = ("new", "waiting", "reduced")


@final
@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks do next.

    `fail`: all raise, and everything is as before the call. `apart`: ranks have taken other numbers of steps,
    and all raise unless their parameters are found to be the same. `zeros`: some rank must make zeros for
    `reduces` first, and then all vote once more. `reduce`: sum the gradients of `reduces` over the ranks.
    `keep`: leave them local (the user's `no_sync`). `nothing`: the batch has no weight on any rank.
    """

    action: Action
    reduces: int = 0
    total: float = 0.0
    why: str = ""  # of `fail`, where no rank has an error of its own
    failed: tuple[tuple[int, str], ...] = ()


def settle(votes: Sequence[Vote]) -> Settled:
    """What follows from the votes on a batch."""
    failed = tuple((rank, vote.error) for rank, vote in enumerate(votes) if vote.error)
    if failed:
        return Settled("fail", failed=failed)
    why = steps_differ([vote.steps for vote in votes])
    if why:
        return Settled("apart", why=why)
    why = _out_of_step(votes)
    if why:
        return Settled("fail", why=why)
    syncs, total = votes[0].syncs, sum(vote.weight for vote in votes)
    waiting = _union(vote.waiting for vote in votes)
    if total == 0 and not (syncs and waiting):
        return Settled("nothing")
    new = _union(vote.new for vote in votes)
    if not new and not waiting and votes[0].parameters:
        return Settled(
            "fail",
            why="no rank has a loss that requires grad: is the model frozen, or the loss detached or made "
            "under torch.no_grad?",
        )
    if not syncs:
        return Settled("keep", new, total)
    wanted = new | waiting
    lacking = any(wanted & ~vote.new for vote in votes)
    return Settled("zeros" if lacking else "reduce", wanted, total)


def steps_differ(steps: Sequence[int]) -> str:
    """The text of the error where ranks have taken other numbers of optimizer steps; "" where not."""
    if len(set(steps)) == 1:
        return ""
    counts = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(steps))
    return (
        f"ranks are not at the same batch: optimizer steps taken so far are {counts}, and their parameters "
        "differ. A rank has left out a step, perhaps after an error between backward and step. Load "
        "one checkpoint on all ranks, or broadcast parameters and optimizer state from one of them. With "
        "mb.step all ranks step, or none"
    )


def settle_zeros(errors: Sequence[str], before: Settled) -> Settled:
    """What follows when all have made the zeros that they lack, or not ("" for made)."""
    failed = tuple((rank, error) for rank, error in enumerate(errors) if error)
    return Settled("fail", failed=failed) if failed else Settled("reduce", before.reduces, before.total)


@final
@dataclass(frozen=True, slots=True)
class Offer:
    """What a rank brings to a batch that all ranks run together."""

    error: str = ""  # why it gives up
    microbatches: int = 0  # that it needs; 0: it has nothing that counts
    weight: float = 0.0  # of its local batch
    rehearsed: bool = True  # it knows what a microbatch sends
    spare: bool = True  # it has a sample to join with where it has fewer microbatches than others


@final
@dataclass(frozen=True, slots=True)
class InStep:
    """What all ranks do: `count` microbatches each, after a rehearsal where one of them needs that."""

    action: Literal["fail", "nothing", "run"]
    count: int = 0
    total: float = 0.0
    rehearse: bool = False
    why: str = ""
    failed: tuple[tuple[int, str], ...] = ()


def settle_offers(offers: Sequence[Offer]) -> InStep:
    """What follows from what all ranks bring: as many microbatches as the one has that needs most."""
    failed = tuple((rank, offer.error) for rank, offer in enumerate(offers) if offer.error)
    if failed:
        return InStep("fail", failed=failed)
    total = sum(offer.weight for offer in offers)
    count = max(offer.microbatches for offer in offers)
    if total == 0 or count == 0:
        return InStep("nothing")
    rehearse = not all(offer.rehearsed for offer in offers)
    lacking = [rank for rank, offer in enumerate(offers) if not offer.spare]
    if rehearse and lacking:
        return InStep(
            "fail",
            why=f"ranks {lacking} have no sample that counts in the first batch of this function, and a "
            "sharded model needs one on every rank to join the others with. Begin with a batch that all "
            "have a part of",
        )
    return InStep("run", count, total, rehearse)


@final
@dataclass(frozen=True, slots=True)
class PassVote:
    """How a rank's pass ended; `is_reset`: its model can run another one."""

    outcome: Literal["ran", "oom", "raised"] = "ran"
    text: str = ""
    is_reset: bool = True


def settle_pass(votes: Sequence[PassVote]) -> PassAction:
    """What follows a pass that all ranks ran together.

    `retry`: one had an OOM, so all retry the batch. An error beside that may come of the zeros that the
    failed rank has sent; a real one is raised by the retry too. `stuck`: a model could not be reset.
    """
    if not all(vote.is_reset for vote in votes):
        return "stuck"
    outcomes = {vote.outcome for vote in votes}
    return "retry" if "oom" in outcomes else "fail" if "raised" in outcomes else "keep"


def _out_of_step(votes: Sequence[Vote]) -> str:
    counts = [vote.parameters for vote in votes]
    if len(set(counts)) > 1:
        return f"ranks give gradients to different numbers of parameters ({counts}): freeze them alike"
    if len({vote.syncs for vote in votes}) > 1:
        inside = [rank for rank, vote in enumerate(votes) if not vote.syncs]
        return f"only some ranks are inside no_sync() ({inside}): all or none must be"
    waiting = _union(vote.waiting for vote in votes)
    if waiting & _union(vote.reduced for vote in votes):
        return "gradients wait for a reduction on some ranks, and are reduced on others: call zero_grad alike"
    return ""


def _union(sets: Any) -> int:
    found = 0
    for one in sets:
        found |= one
    return found


@final
@dataclass(frozen=True, slots=True)
class StepVote:
    """How far a rank is with an optimizer step."""

    error: str = ""
    out_of_memory: bool = False  # the error is that, and nothing of this rank has moved
    protected: bool = False  # it holds a host copy to restore


def settle_ready(votes: Sequence[StepVote]) -> StepAction:
    """Before anything changes. A rank that may restore a host copy needs all others to be able to."""
    if any(vote.error for vote in votes):
        return "fail"
    protected = [vote.protected for vote in votes]
    return "protect" if any(protected) and not all(protected) else "go"


def settle_attempt(votes: Sequence[StepVote], *, attempts: int) -> StepAction:
    """After an attempt with a host copy: done on all ranks, or on none."""
    if not any(vote.error for vote in votes):
        return "done"
    memory_only = all(vote.out_of_memory for vote in votes if vote.error)
    return "retry" if memory_only and attempts == 1 else "undo"
