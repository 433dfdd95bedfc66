"""BatchSizeScheduler: the one object that moves the batch size, the loader and the learning rate together.

Rules
- The size is a function of progress. Asking twice changes nothing; a run that goes on from a checkpoint has
  the sizes and learning rates of one that was never stopped.
- Every change is one line (`Epoch 20: Updating batch size from 256 to 512`) and one event, on rank 0.
- Wrong sizes, ranks and limits are errors before training, where they can be known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, final

import torch
from torch.optim import Optimizer

from batchfit._arguments import check_callback, check_flag
from batchfit._loader.pure.progress import EpochPlan, Progress
from batchfit._schedule.following_loader import FollowingLoader
from batchfit._schedule.learning_rate import LRClock, ScaledLR
from batchfit._schedule.noise_choice import NoiseChoice
from batchfit._schedule.pure.bound_plan import BoundPlan, count_in
from batchfit._schedule.pure.config import BatchSizeConfig
from batchfit._schedule.pure.increase import Increases
from batchfit._schedule.pure.phases import EventKind, ScheduleEvent, phases, updates_of
from batchfit._schedule.pure.run_plan import multiple, plan_of, starts_by_itself
from batchfit._units import parse_count, whole
from batchfit.messages import say
from batchfit.results import ThroughputProfile
from batchfit.schedules import NoiseBatchSizeConfig, load_schedule

_STATE_VERSION = 1


@final
class BatchSizeScheduler:
    """Says which batch size comes next, and moves the loader and the learning rate with it.

        scheduler = BatchSizeScheduler(StepBatchSizeConfig(step_size=20, gamma=2), 256, loader=loader)
        for epoch in range(100):
            scheduler.step(epoch)
            for batch in loader: ...

    A schedule in steps, samples or tokens is stepped after `optimizer.step()`, like torch's LR schedulers:
    `scheduler.step()` with a loader that counts, or `scheduler.step(samples=...)`.

    Args:
        config: a schedule, its text or mapping (`load_schedule`), or None for a constant size.
        initial_batch_size: the size that training starts with, over all ranks, and that the learning rate was
            tuned for. May be left out where milestones begin at 0, or where the loader has one.
        loader: a `ResizableLoader`, or any object with an attribute `batch_size` that can be set.
        lr: how the learning rate follows: "none", "linear", "sqrt", "seesaw", "power(0.6)", or one for each
            parameter group. A group with a key "batchfit_lr_rule" has its own.
        optimizer: whose learning rates follow; needs `lr`.
        lr_scheduler: torch's LR scheduler (or several) of that optimizer: our factor is removed before it
            steps, and multiplied in after.
        largest: the largest batch that fits. A schedule is capped there; an increase past it is left out.
        world_size: where given, sizes are multiples of it. The number of ranks is otherwise the loader's, or
            that of `torch.distributed`.
        microbatch_size: where given, sizes are multiples of it on every rank.
        tokens_per_sample: for schedules in tokens, where nobody counts them.
        noise: for `NoiseBatchSizeConfig`: a `GradientNoise`.
        throughput: for `NoiseBatchSizeConfig`: what `profile_throughput` answered, or a function
            `throughput(size)` that gives samples per second.
        on_event: called with each `ScheduleEvent` (the size changed, or did not, and why).
        updates_known: the LR scheduler was made for `updates(...)` steps, so that it may count batches.
    """

    def __init__(
        self,
        config: BatchSizeConfig | str | Path | Mapping[str, Any] | None,
        initial_batch_size: int | None = None,
        *,
        loader: Any = None,
        lr: str | Sequence[str] | None = None,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        largest: int | None = None,
        world_size: int | None = None,
        microbatch_size: int | None = None,
        tokens_per_sample: int | None = None,
        noise: Any = None,
        throughput: Callable[[int], float] | ThroughputProfile | None = None,
        on_event: Callable[[ScheduleEvent], object] | None = None,
        updates_known: bool = False,
    ) -> None:
        for name, value in (
            ("largest", largest),
            ("world_size", world_size),
            ("microbatch_size", microbatch_size),
        ):
            if value is not None:
                whole(value, name=name, at_least=1)
        if tokens_per_sample is not None:
            tokens_per_sample = parse_count(tokens_per_sample, name="tokens_per_sample", at_least=1)
        check_callback("on_event", on_event, "event")
        _check_lr(lr, optimizer, lr_scheduler)
        self._loader = FollowingLoader(loader)
        self.config = load_schedule(config, name="config")
        if initial_batch_size is None and not starts_by_itself(self.config):
            initial_batch_size = self._loader.batch_size
        self._unit = "epoch" if self.config is None else self.config.unit
        ranks = self._world_size = _world_size(world_size, self._loader.world_size)
        self._plan = plan_of(
            self.config,
            initial_batch_size,
            largest=largest,
            world_size=ranks,
            multiple_of=multiple(world_size=world_size, ranks=ranks, microbatch_size=microbatch_size),
            tokens_per_sample=tokens_per_sample,
        )
        self.initial_batch_size = self._plan.initial_batch_size
        self._noise: NoiseChoice | None = None
        if isinstance(self.config, NoiseBatchSizeConfig):
            assert isinstance(self._plan, BoundPlan)
            self._noise = NoiseChoice(
                self.config, self._plan, noise, throughput, microbatch_size=microbatch_size
            )
        elif noise is not None or throughput is not None:
            raise ValueError("noise and throughput must be given with a NoiseBatchSizeConfig only")
        self._size = self.initial_batch_size
        self._progress = Progress()
        self._on_event = on_event
        self._said = ""
        self._updates_known = updates_known
        self._lr: ScaledLR | None = None
        if optimizer is not None and lr is not None:
            several = lr_scheduler if isinstance(lr_scheduler, tuple | list) else [lr_scheduler]
            given = [one for one in several if one is not None]
            self._clock = LRClock(self._unit, counts=self._loader.progress is not None)
            # Weak: an LR scheduler that outlives this object is then itself again.
            on_lr_step = weakref.WeakMethod(self._lr_stepped)
            self._lr = ScaledLR(optimizer, lr, lr_schedulers=given, on_lr_step=on_lr_step)
        self._give_plan()

    # --- what it says

    @property
    def plan(self) -> EpochPlan:
        """The size as a function of progress, for this run: what `ResizableLoader(schedule=)` takes."""
        return self._plan

    @property
    def batch_size(self) -> int:
        """The size now."""
        return self._size

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """What each parameter group's learning rate is multiplied with now."""
        return self._lr.factors if self._lr is not None else ()

    def get_batch_size(
        self,
        epoch: int | None = None,
        *,
        step: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> int:
        """The global batch size at a point of the run; changes nothing.

        A schedule by noise does not know other points: it is the size now.

        Args:
            epoch: epochs that are over; default: as far as the run has come, by the loader's count.
            step: optimizer steps so far.
            samples: samples so far, over all ranks.
            tokens: tokens so far, over all ranks.

        Returns:
            The size over all ranks.
        """
        if self._noise is not None:
            return self._size
        return self._plan.size_at(self._located(epoch, step, samples, tokens))

    def should_update(
        self,
        epoch: int | None = None,
        *,
        step: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> bool:
        """Whether `step` would change the size; changes nothing.

        Args:
            epoch: epochs that are over.
            step: optimizer steps so far.
            samples: samples so far, over all ranks.
            tokens: tokens so far, over all ranks.
        """
        return self.get_batch_size(epoch, step=step, samples=samples, tokens=tokens) != self._size

    def updates(self, *, samples: int, epochs: int, drop_last: bool | None = None) -> int:
        """How many optimizer steps a run will take: the length of an LR scheduler.

        Args:
            samples: samples of an epoch, over all ranks.
            epochs: epochs of the run.
            drop_last: whether the short last batch of an epoch is left out; default: as the loader does.

        Returns:
            The number of optimizer steps.

        Raises:
            ValueError: the schedule follows the noise scale, so its sizes cannot be known.
        """
        if self._noise is not None:
            raise ValueError("config must be a schedule that can be foreseen, not one by noise")
        if drop_last is not None:
            check_flag("drop_last", drop_last)
        dropped = self._loader.drop_last if drop_last is None else drop_last
        found = phases(
            self._plan, samples=samples, epochs=epochs, drop_last=dropped, world_size=self._world_size
        )
        return updates_of(found)

    # --- what it does

    def step(
        self,
        epoch: int | None = None,
        *,
        step: int | None = None,
        samples: int | None = None,
        tokens: int | None = None,
    ) -> tuple[int, bool]:
        """Go to a point of the run: move the batch size, the loader and the learning rate there.

        Args:
            epoch: epochs that are over; default: as far as the run has come, by the loader's count.
            step: optimizer steps so far.
            samples: samples so far, over all ranks.
            tokens: tokens so far, over all ranks.

        Returns:
            The global size from now on, and whether it changed.
        """
        at = self._located(epoch, step, samples, tokens)
        self._loader.compare_epochs(epoch)
        return self._go(at)

    @contextmanager
    def lr_untouched(self) -> Iterator[None]:
        """Inside, learning rates are without our factor: for an LR scheduler that was not given to us."""
        if self._lr is None:
            yield
            return
        with self._lr.untouched():
            yield

    def close(self) -> None:
        """Remove our factor from the learning rates, and our wrappers from the LR schedulers."""
        if self._lr is not None:
            self._lr.close()
            self._lr = None

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, for a checkpoint; beside the optimizer's, whose groups keep our factor."""
        state: dict[str, Any] = {
            "version": _STATE_VERSION,
            "initial_batch_size": self.initial_batch_size,
            "batch_size": self._size,
            "progress": asdict(self._progress),
        }
        if self._lr is not None and any(rates := self._lr.state_dict()):
            state["learning_rates"] = rates
        if (others := self._loader.set_by_others(self._size)) is not None:
            state["loader_batch_size"] = others
        if isinstance(self._plan, Increases):
            state["sizes"] = self._plan.runs(before_epoch=self._progress.epoch + 1)
        if self._noise is not None:
            state["noise"] = self._noise.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was; in any order with the optimizer's and the LR scheduler's.

        Args:
            state: what `state_dict()` returned.

        Raises:
            ValueError: `state` is something else, or of a run with another initial size.
        """
        if not hasattr(state, "get") or state.get("version") != _STATE_VERSION:
            raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
        if state["initial_batch_size"] != self.initial_batch_size:
            raise ValueError(
                f"initial_batch_size must be {state['initial_batch_size']}, as in the checkpoint, since "
                f"learning rates are relative to it, not {self.initial_batch_size}"
            )
        self._progress = Progress(**state["progress"])
        size = int(state["batch_size"])
        if isinstance(self._plan, Increases):
            self._plan.restore(state.get("sizes", ()))
        if self._noise is not None:
            self._noise.load_state_dict(state["noise"])
        elif any(asdict(self._progress).values()) or size != self.initial_batch_size:  # it had begun
            size = self._plan.size_at(self._progress)
        self._size = size
        by_hand = state.get("loader_batch_size")
        if by_hand is not None and size == state["batch_size"]:
            self._loader.restore(by_hand)
        else:
            self._loader.move(size)
        if self._lr is not None:
            self._lr.recognise(state.get("learning_rates", ()))
        factors = self._follow()
        if size != state["batch_size"]:
            why = "the schedule or its limits are others than in the checkpoint"
            self._report("changed", int(state["batch_size"]), self._progress, why, factors)

    def __repr__(self) -> str:
        kind = "constant" if self.config is None else self.config.type
        return f"BatchSizeScheduler({kind}, initial {self.initial_batch_size}, now {self._size})"

    # --- how

    def _located(
        self, epoch: int | None, step: int | None, samples: int | None, tokens: int | None
    ) -> Progress:
        """The progress that the caller means: what was given, what the loader counts, what was known."""
        named = {"epoch": epoch, "step": step, "samples": samples, "tokens": tokens}
        given = {
            name: whole(value, name=name, at_least=0) for name, value in named.items() if value is not None
        }
        at = replace(self._now(), **given)
        per_sample = getattr(self._plan, "tokens_per_sample", None)
        if tokens is None and per_sample is not None and (at.tokens is None or samples is not None):
            at = replace(at, tokens=at.samples * per_sample)
        enough = self._unit in given or self._loader.progress is not None
        if not enough and not (self._unit == "tokens" and samples is not None and per_sample is not None):
            how = "step(epoch)" if self._unit == "epoch" else f"step({self._unit}=...)"
            raise ValueError(
                f"{self._unit} must be given, as in {how}: the schedule counts them, and no loader does"
            )
        count_in(at, self._unit)  # tokens that nobody counts
        return at

    def _go(self, at: Progress) -> tuple[int, bool]:
        why = ""
        if self._noise is not None:
            size, why = self._noise.choose(self._size, at)
        else:
            size = self._plan.size_at(at)
        self._progress = at
        before, self._size = self._size, size
        if size != before:
            self._loader.move(size)
            if self._lr is not None and self._lr.is_moved_by(size / self.initial_batch_size):
                self._loader.compare_sizes(before)
        factors = self._follow()
        if size != before:
            self._report("changed", before, at, why or self._limit(at) or "as planned", factors)
        else:
            self._report_limit(at, why, factors)
        return size, size != before

    def _give_plan(self) -> None:
        foreseen = isinstance(self._plan, BoundPlan) and self._noise is None
        self._loader.take(self._plan if foreseen else None, self._size)
        if self._loader.has_plan and self._loader.progress is not None:
            # It has the plan's first size from now on, which rounding or a function may have changed.
            at = self._located(None, None, None, None)
            if self._plan.size_at(at) != self._size:
                self._go(at)

    def _follow(self) -> tuple[float, ...]:
        if self._lr is None:
            return ()
        return self._lr.set_ratio(self._size / self.initial_batch_size)

    def _limit(self, at: Progress) -> str:
        if isinstance(self._plan, Increases):
            return self._plan.at_epoch(at.epoch).why
        return "" if self._noise is not None else self._plan.limited_at(at)

    def _report_limit(self, at: Progress, why: str, factors: tuple[float, ...]) -> None:
        """Say once that the schedule wants another size than it gets."""
        limit = why or self._limit(at)
        if limit and limit != self._said:
            kind: EventKind = "limited" if isinstance(self._plan, BoundPlan) else "skipped"
            self._report("kept" if self._noise is not None else kind, self._size, at, limit, factors)
        self._said = limit

    def _report(
        self, kind: EventKind, before: int, at: Progress, why: str, factors: tuple[float, ...]
    ) -> None:
        event = ScheduleEvent(kind, before, self._size, at, why, self._unit, factors)
        if kind != "kept":  # a decision to do nothing comes with every check of the noise
            say(str(event))
        if self._on_event is not None:
            self._on_event(event)

    def _lr_stepped(self, lr_scheduler: Any) -> None:
        # A constant size does not change the number of steps.
        if self.config is not None and not self._updates_known:
            # Of the last batch: a loop that ends leaves the loader at the next epoch, a `break` does not.
            now = self._loader.last_began or self._now()
            self._clock.stepped(lr_scheduler, now, self._size)

    def _now(self) -> Progress:
        return self._loader.progress or self._progress


def _check_lr(lr: object, optimizer: object, lr_scheduler: object) -> None:
    if lr is not None and optimizer is None:
        raise ValueError(f"optimizer must be given with lr={lr!r}, not None")
    if optimizer is not None and lr is None:
        raise ValueError("lr must be a rule such as 'none' or 'sqrt' where an optimizer is given, not None")
    if lr_scheduler is not None and optimizer is None:
        raise ValueError("optimizer must be given with lr_scheduler, not None")


def _world_size(given: int | None, of_loader: int | None) -> int:
    if given is not None and of_loader is not None and given != of_loader:
        raise ValueError(f"world_size must be that of the loader, {of_loader}, not {given}")
    if given is not None or of_loader is not None:
        return given or of_loader or 1
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1
