"""An optimizer step that an OOM cannot leave half done.

Rules:
- Before anything changes, optimizer state is made and the step's temporaries are reserved (`memory`). An OOM
  there is harmless: memory is freed, it is retried once, then a `torch.OutOfMemoryError` says that nothing
  has changed, and nothing has, bit for bit: what was made is removed.
- A step whose memory could not be promised (the reservation failed, or nothing is known of the optimizer
  yet) runs under a host copy, and so does every step with `rollback=True`. After an OOM the copy is
  restored, memory is freed, the step is retried once, then the OOM is raised as above.
- Any other step that has an OOM all the same raises `StepInterruptedError`. Never a silent half step.
- Steps are taken with the public `optimizer.step` and `scaler.step`: hooks, counters of LR schedulers and
  compiled steps stay what they are. Errors that are not memory come out unchanged.
- In the steady state nothing synchronizes and nothing is copied.
- Ranks (`data_parallel`): a vote before anything moves, so that all step or none does; where one needs a
  host copy all take one, and vote after the step too. A rank whose step was interrupted without one reports
  that to the others, which raise at their next vote.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.optim import Optimizer

from batchfit._engine.data_parallel.interface import DataParallel
from batchfit._engine.data_parallel.pure.protocol import StepVote, settle_attempt, settle_ready
from batchfit._engine.data_parallel.single import SINGLE_PROCESS
from batchfit._engine.data_parallel.step_vote import RankStep
from batchfit._engine.device import oom
from batchfit._engine.device.device import read_ram
from batchfit._engine.optimizer_step.memory import Need, StorageRecorder, free_memory, guess
from batchfit._engine.optimizer_step.run import StepRun
from batchfit._engine.optimizer_step.state import Undo, can_make_state, remembered, undo_all
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private.dynamo import is_compiled_function
from batchfit._engine.torch_private.optimizers import make_state
from batchfit._units import format_bytes
from batchfit.errors import BatchfitError, SnapshotError

logger = logging.getLogger("batchfit")

# RAdam takes more from its sixth step on, when its variance is tractable.
RECORDED_STEPS: Final = 8


def step(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    rollback: bool = False,
    ranks: DataParallel = SINGLE_PROCESS,
) -> torch.Tensor | None:
    """Clip and step, all of it or nothing: `unscale_`, clip, `optimizer.step()`, `scaler.update()`.

        norm = step(optimizer, scaler=scaler, clip_norm=1.0)

    Returns the norm of the gradients before clipping, as `clip_grad_norm_` does (a tensor: reading it is
    what would synchronize), or None without `clip_norm`. Several optimizers are prepared together
    and stepped one after another; `clip_norm` is then the norm over the parameters of all of them.

    An OOM before anything moved, or one that could be undone, is a `torch.OutOfMemoryError` that says so:
    parameters, gradients, optimizer state and scaler are as before the call. Otherwise it is a
    `StepInterruptedError`. `rollback=True` makes sure that every OOM can be undone: parameters, gradients
    and optimizer state are copied to host memory before each step (for AdamW four times the parameters, at
    the speed of the bus, and the copy synchronizes). Without it only a step whose memory cannot be
    reserved is copied, and the first one of an optimizer that is not torch's own.

    A step that is retried after a rollback runs the optimizer's step hooks twice. A first step that
    the scaler skips leaves the new optimizer state behind, untouched (its moments are zero).
    """
    with ranks.step() as rank_step:
        optimizers = _checked(optimizer, scaler, clip_norm, rollback)
        if rank_step is not None:
            rank_step.check(optimizers)
        work = StepRun(optimizers, scaler if scaler is not None and scaler.is_enabled() else None, clip_norm)
        ranks.check_reduced(parameter for some in work.parameters for parameter in some)
        plan = _plan_of(work)
        learned = plan.need if plan.covers(work) else None
        made = [] if learned is not None else _prepared(work)
        snapshot = _protection(work, plan, learned, made, rollback=rollback)
        if rank_step is not None:
            snapshot = _agreed(work, rank_step, snapshot, made)
        recording = plan.steps < RECORDED_STEPS and not any(map(_is_compiled, optimizers))
        if snapshot is not None:
            _protected(work, snapshot, plan, made, rank_step, recording=recording)
            return work.norm
        if rank_step is not None:
            rank_step.moves()
        failed = _attempt(work, None, plan, recording=recording)
        if failed is not None:
            raise work.interrupted(failed) from torch.OutOfMemoryError(failed)
        return work.norm


def _agreed(
    work: StepRun, rank_step: RankStep, snapshot: Snapshot | None, made: list[Undo]
) -> Snapshot | None:
    """All ranks are ready, or all raise; a host copy on all of them, or on none."""
    votes = rank_step.vote(StepVote(protected=snapshot is not None))
    action = settle_ready(votes)
    if action == "protect":
        if snapshot is None:
            try:
                snapshot = copy_state(work)
            except (SnapshotError, TypeError) as error:
                undo_all(made)
                why = f"another rank needs a host copy on all of them, and here: {oom.describe(error)}"
                raise _nothing_moved(why, None) from error
        votes = rank_step.vote(StepVote(protected=True))
        action = settle_ready(votes)
    if action == "fail":
        rank_step.over()
        undo_all(made)
        raise _failed_elsewhere(votes, rank_step)
    return snapshot


def _protected(
    work: StepRun,
    snapshot: Snapshot,
    plan: _StepPlan,
    made: list[Undo],
    rank_step: RankStep | None,
    *,
    recording: bool,
) -> None:
    """Take a step that can be undone: on all ranks, after at most two attempts, or on none."""
    failed: str | None = None
    votes: list[StepVote] = []
    for attempts in (1, 2):
        failed = _attempt(work, snapshot, plan, recording=recording)
        votes = [StepVote(failed or "", failed is not None, True)]
        if rank_step is not None:
            votes = _votes_on(rank_step, votes[0], snapshot)
        action = settle_attempt(votes, attempts=attempts)
        if rank_step is not None and action != "retry":
            rank_step.over()
        if action == "done":
            return
        snapshot.restore()
        free_memory(work.devices())
        if action == "undo":
            break
    undo_all(made)
    if failed is None and rank_step is not None:
        raise _failed_elsewhere(votes, rank_step)
    raise _nothing_moved(failed or "", plan)


def _votes_on(rank_step: RankStep, mine: StepVote, snapshot: Snapshot) -> list[StepVote]:
    """How the attempt ended on all ranks; where the vote fails, the step is undone here."""
    try:
        return rank_step.vote(mine)
    except BatchfitError:
        snapshot.restore()
        raise


def _failed_elsewhere(votes: Sequence[StepVote], rank_step: RankStep) -> Exception:
    """What a rank raises that did nothing wrong itself: the same kind of error as those that did."""
    error = rank_step.failed(votes)
    if all(vote.out_of_memory for vote in votes if vote.error):
        return _nothing_moved(str(error), None)
    return error


def warm(optimizer: Optimizer | Sequence[Optimizer]) -> None:
    """Make the optimizer state of every parameter that has a gradient, where that can be done without a step.

    An OOM is retried once with memory freed, then raised with everything as it was.
    """
    _prepared(StepRun(_checked(optimizer, None, None, False), None, None))


def _checked(optimizer: Any, scaler: Any, clip_norm: Any, rollback: Any) -> tuple[Optimizer, ...]:
    optimizers = tuple(optimizer) if isinstance(optimizer, list | tuple) else (optimizer,)
    if not optimizers:
        raise ValueError(f"optimizer must be an optimizer or a list of some, not {optimizer!r}")
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {one!r:.80}")
        if _needs_closure(one):
            raise ValueError(
                f"optimizer must step without a closure, not {type(one).__name__}: it runs the model several "
                "times inside its step, and batchfit cannot undo those. Call its step(closure) yourself."
            )
    if len(set(map(id, optimizers))) < len(optimizers):
        raise ValueError(f"optimizer must not name one twice, not {[type(o).__name__ for o in optimizers]!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not {scaler!r:.80}")
    number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and clip_norm > 0 and not math.isnan(clip_norm)):
        raise ValueError(f"clip_norm must be a number above 0, not {clip_norm!r}")
    if not isinstance(rollback, bool):
        raise TypeError(f"rollback must be True or False, not {rollback!r}")
    return optimizers


_closures: dict[type[Optimizer], bool] = {}


def _needs_closure(optimizer: Optimizer) -> bool:
    cls = type(optimizer)
    if cls not in _closures:
        given = list(inspect.signature(cls.step).parameters.values())[1:]
        named = any(one.name == "closure" and one.default is inspect.Parameter.empty for one in given)
        _closures[cls] = named or issubclass(cls, torch.optim.LBFGS)
    return _closures[cls]


@dataclass(slots=True)
class _StepPlan:
    """What earlier steps of the same kind have shown."""

    steps: int = 0  # recorded since it last changed what a step does
    gradients: int = 0  # the most parameters that any of them moved
    stateful: bool = True  # a parameter that was moved has state
    need: Need | None = None
    tight: bool = False  # its memory could not be reserved once, which was said

    def covers(self, work: StepRun) -> bool:
        """Whether this step takes no more than those did."""
        enough = RECORDED_STEPS if any(isinstance(o, torch.optim.RAdam) for o in work.optimizers) else 1
        if self.need is None or self.steps < enough or work.gradients() > self.gradients:
            return False
        if not self.stateful:
            return True
        for one, parameters in zip(work.optimizers, work.parameters, strict=True):
            state = one.state
            if len(state) < sum(len(group["params"]) for group in one.param_groups) and any(
                parameter not in state for parameter in parameters
            ):
                return False
        return True

    def learn(self, work: StepRun, need: Need) -> None:
        """A step was taken, and took `need`."""
        self.need = need if self.need is None else self.need.merged(need)
        self.steps += 1
        self.gradients = max(self.gradients, work.gradients())
        pairs = zip(work.optimizers, work.parameters, strict=True)
        self.stateful = all(p in one.state for one, parameters in pairs for p in parameters)


@dataclass(slots=True)
class _Plans:
    by_kind: dict[tuple[Any, ...], _StepPlan] = field(default_factory=dict)


plans_by_optimizer: weakref.WeakKeyDictionary[Optimizer, _Plans] = weakref.WeakKeyDictionary()


def _plan_of(work: StepRun) -> _StepPlan:
    """What is known of such steps; another optimizer beside, other groups or flags make another kind."""
    first = work.optimizers[0]
    plans = plans_by_optimizer.get(first)
    if plans is None:
        plans = plans_by_optimizer[first] = _Plans()
    kind = (
        work.scaler is not None,
        work.clip_norm is not None,
        *(id(one) for one in work.optimizers[1:]),
        *(
            (len(group["params"]), group.get("foreach"), group.get("fused"))
            for one in work.optimizers
            for group in one.param_groups
        ),
    )
    plan = plans.by_kind.get(kind)
    if plan is None:
        if len(plans.by_kind) >= 16:  # groups that come and go
            plans.by_kind.clear()
        plan = plans.by_kind[kind] = _StepPlan()
    return plan


def _is_compiled(optimizer: Optimizer) -> bool:
    """Its step is compiled: a recorder would make it run eagerly, and see other temporaries."""
    return is_compiled_function(optimizer.step)


def _prepared(work: StepRun) -> list[Undo]:
    """Make optimizer state; what is returned removes it."""
    ambient = sys.exception()
    failed = ""
    for _ in range(2):
        made: list[Undo] = []
        try:
            for one in work.optimizers:
                if _is_known(work, one):
                    made.append(remembered(one))
                    make_state(one)
            return made
        except BaseException as error:
            if oom.classify(error, ambient=ambient) != "oom":
                undo_all(made)
                raise
            failed = oom.describe(error, ambient=ambient)
        undo_all(made)
        free_memory(work.devices())
    raise _nothing_moved(failed, None)


def _protection(
    work: StepRun, plan: _StepPlan, learned: Need | None, made: list[Undo], *, rollback: bool
) -> Snapshot | None:
    """A host copy where one is asked for, or where memory for the step cannot be promised."""
    need, known = learned, True
    if need is None:
        need, known = _guess(work), all(_is_known(work, one) for one in work.optimizers)
        if plan.steps >= RECORDED_STEPS:
            plan.steps = 0  # another set of parameters: it is recorded from the start
    if not rollback and known and need.reserve():
        return None
    if known and not rollback and not plan.tight:
        plan.tight = True
        logger.warning(
            "the step of %s takes up to %s, which cannot be reserved: such steps are protected by a host "
            "copy, which takes time. fused=True needs none.",
            _kinds(work),
            format_bytes(need.total_bytes),
        )
    try:
        return copy_state(work)
    except (SnapshotError, TypeError) as error:
        if rollback or known:
            undo_all(made)
        if rollback:
            raise
        failed = oom.describe(error)
    if known:
        raise _nothing_moved(f"its memory cannot be reserved, nor the state copied: {failed}", plan)
    logger.warning("the first step of %s has no host copy to restore: %s", _kinds(work), failed)
    return None


def _is_known(work: StepRun, optimizer: Optimizer) -> bool:
    return can_make_state(optimizer, scaled=work.scaler is not None)


def _guess(work: StepRun) -> Need:
    return guess(work.optimizers, small=work.scaler is not None or work.clip_norm is not None)


def copy_state(work: StepRun) -> Snapshot:
    tensors = [p for some in work.parameters for p in some]
    # gradients and two moments; what is really there is known only when it is copied
    wanted = 4 * sum(p.numel() * p.element_size() for p in tensors)
    available = read_ram().available_bytes
    if wanted > available:
        raise SnapshotError(
            f"a host copy of the parameters of {_kinds(work)} with gradients and state takes up to "
            f"{format_bytes(wanted)}, and {format_bytes(available)} of host memory is available"
        )
    state: list[object] = [*work.optimizers]
    snapshot = Snapshot.take(state if work.scaler is None else [*state, work.scaler])
    logger.debug("copied %s to host memory before a step", format_bytes(snapshot.host_bytes))
    return snapshot


def _kinds(work: StepRun) -> str:
    return ", ".join(type(one).__name__ for one in work.optimizers)


def _attempt(work: StepRun, snapshot: Snapshot | None, plan: _StepPlan, *, recording: bool) -> str | None:
    """Take the step: None, or the text of an OOM. Any other error is raised, with the copy restored."""
    ambient = sys.exception()
    recorder = StorageRecorder() if recording else None
    try:
        with recorder or nullcontext():
            work.run(recording=recording)
    except BaseException as error:
        verdict = oom.classify(error, ambient=ambient)
        if verdict == "oom":
            return oom.describe(error, ambient=ambient)
        if snapshot is not None and verdict != "fatal":
            snapshot.restore()
        raise
    if recorder is not None and not work.skipped:
        plan.learn(work, recorder.need(work.optimizers))
    elif recorder is None and plan.need is None:
        plan.learn(work, _guess(work))  # a compiled step: eager ones take more
    return None


def _nothing_moved(detail: str, plan: _StepPlan | None) -> torch.OutOfMemoryError:
    takes = ""
    if plan is not None and plan.need is not None:
        takes = f" It takes {format_bytes(plan.need.total_bytes)} beside what is held."
    return torch.OutOfMemoryError(
        f"the optimizer step is out of memory, and nothing has moved: parameters, gradients, optimizer "
        f"state and scaler are as before the call.{takes} Free memory and call it again, or make the "
        f"optimizer with fused=True (no temporaries) or foreach=False (one parameter's at a time). ({detail})"
    )
