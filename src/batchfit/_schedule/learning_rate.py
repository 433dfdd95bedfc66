"""The learning rate follows the batch size, under any LR scheduler.

Rules
- `group["lr"]` is what the LR scheduler (or the user) says, times our factor. The group itself keeps both, as
  torch keeps `initial_lr` there: an optimizer's checkpoint knows that our factor is in: nothing compounds.
- Before an LR scheduler steps our factor is removed, and multiplied in after: recursive schedulers would
  multiply it into every later value. What is removed leaves bit for bit what the LR scheduler wrote.
- An LR scheduler given to us keeps its class: its `step` is wrapped on the object (`wrapped_step.py`). Hooks
  of the optimizer cannot do this: they do not see the LR scheduler step, and between two optimizer steps the
  groups must hold the rate that is in force, which is what loggers read.
- A tensor learning rate is changed in place, without a CUDA synchronization.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.lr_rules import LRRule
from batchfit._schedule.wrapped_step import unwrap_step, wrap_step

log = logging.getLogger("batchfit")

FACTOR: Final = "batchfit_lr_factor"
BASE: Final = "batchfit_lr_base"
RULE: Final = "batchfit_lr_rule"  # a group's own rule, which the user may put there


@final
class ScaledLR:
    """Keeps our factor in the learning rates of an optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        rules: str | LRRule | Sequence[str | LRRule],
        *,
        lr_schedulers: Sequence[Any] = (),
        on_lr_step: Callable[[], Callable[[Any], None] | None] | None = None,
    ) -> None:
        groups = getattr(optimizer, "param_groups", None)
        if not isinstance(groups, list):
            raise TypeError(f"optimizer must be a torch optimizer, not {optimizer!r:.80}")
        self._optimizer = optimizer
        self._single = not isinstance(rules, tuple | list)
        self._rules = [LRRule.parse(rule) for rule in (rules if isinstance(rules, tuple | list) else [rules])]
        if not self._single and len(self._rules) != len(groups):
            raise ValueError(
                f"lr must have one rule for each of {len(groups)} groups, not {len(self._rules)}"
            )
        for number, group in enumerate(groups):
            self._rule_of(number, group)  # a wrong rule of a group's own is an error now
        self._ratio = 1.0
        self._depth = 0
        self._warned = False
        self._on_lr_step = on_lr_step
        self._wrapped: list[Any] = []
        for one in lr_schedulers:
            self._check_scheduler(one)
            wrap_step(one, weakref.WeakMethod(self._stepping))
            self._wrapped.append(one)

    @property
    def factors(self) -> tuple[float, ...]:
        """What each group's learning rate is multiplied with now."""
        return tuple(group.get(FACTOR, 1.0) for group in self._optimizer.param_groups)

    def set_ratio(self, ratio: float) -> tuple[float, ...]:
        """Set the learning rates for `ratio` times the initial batch size; repeated calls do not compound."""
        self._ratio = ratio
        if self._depth == 0:
            self._remove_factors()
            self._apply_factors()
        return self.factors

    def state_dict(self) -> list[dict[str, float]]:
        """What each group holds, for a checkpoint: our factor, the rate with it, and the rate without."""
        return [
            {"factor": float(group[FACTOR]), "lr": float(group["lr"]), "base": float(group[BASE])}
            if FACTOR in group
            else {}
            for group in self._optimizer.param_groups
        ]

    def recognise(self, saved: Sequence[Mapping[str, float]]) -> None:
        """Find our factor in rates that were loaded without our marks, as checkpoints of sharded models are.

        Those load the entries that a group has already, and on some ranks no others.
        """
        with self.untouched():
            for group, one in zip(self._optimizer.param_groups, saved, strict=False):
                if one and float(group["lr"]) == one["lr"]:
                    is_tensor = isinstance(group["lr"], torch.Tensor)
                    base = torch.full_like(group["lr"], one["base"]) if is_tensor else one["base"]
                    group[FACTOR], group[BASE] = one["factor"], base
            self._remove_factors()

    def is_moved_by(self, ratio: float) -> bool:
        """Whether any learning rate will be another at `ratio` times the initial batch size."""
        groups = enumerate(self._optimizer.param_groups)
        return any(self._rule_of(n, group).factor(ratio) != group.get(FACTOR, 1.0) for n, group in groups)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, the groups hold learning rates without our factor."""
        if self._depth == 0:
            self._remove_factors()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._apply_factors()

    def close(self) -> None:
        """Remove our factor from the learning rates, and our wrappers from the LR schedulers."""
        self._remove_factors()
        for one in self._wrapped:
            unwrap_step(one)
        self._wrapped = []

    def _rule_of(self, number: int, group: dict[str, Any]) -> LRRule:
        own = group.get(RULE)
        if own is not None:
            return LRRule.parse(own, name=f"{RULE} of group {number}")
        if not self._single and number >= len(self._rules):
            raise ValueError(
                f"lr must have a rule for group {number}, which was added later: put {RULE!r} into it"
            )
        return self._rules[0 if self._single else number]

    def _apply_factors(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            factor = self._rule_of(number, group).factor(self._ratio)
            if factor == 1.0:
                continue
            rate = group["lr"]
            group[FACTOR] = factor
            if isinstance(rate, torch.Tensor):
                with torch.no_grad():
                    group[BASE] = rate.detach().clone()
                    rate.mul_(factor)
            else:
                group[BASE] = rate
                group["lr"] = rate * factor

    def _remove_factors(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            factor, base = group.pop(FACTOR, None), group.pop(BASE, None)
            if factor is None:
                continue
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                with torch.no_grad():
                    plain = rate / factor
                    if isinstance(base, torch.Tensor):
                        base = base.to(rate)
                        plain = torch.where(rate == base * factor, base, plain)
                    rate.copy_(plain)
            elif base is not None and rate == base * factor:
                group["lr"] = base
            else:
                group["lr"] = rate / factor
                self._changed_elsewhere(number)

    def _changed_elsewhere(self, number: int) -> None:
        if self._warned or self._wrapped:
            return
        self._warned = True
        log.warning(
            "%s",
            f"the learning rate of group {number} was changed while it held the factor of the batch size. If "
            "an LR scheduler did it, pass it as lr_scheduler= to BatchSizeScheduler, or step it inside `with "
            "scheduler.lr_untouched():`; otherwise the two multiply wrongly",
        )

    def _check_scheduler(self, lr_scheduler: Any) -> None:
        if not callable(getattr(lr_scheduler, "step", None)):
            raise TypeError(f"lr_scheduler must have a method step(), not {lr_scheduler!r:.80}")
        theirs = getattr(getattr(lr_scheduler, "optimizer", None), "param_groups", None)
        if theirs is not None and theirs is not self._optimizer.param_groups:
            raise ValueError(
                f"lr_scheduler must belong to the optimizer, not {type(lr_scheduler).__name__} of another"
            )

    @contextmanager
    def _stepping(self, lr_scheduler: Any) -> Iterator[None]:
        """Inside, a wrapped LR scheduler steps; the owner of this object hears of it afterwards."""
        with self.untouched():
            yield
        report = None if self._on_lr_step is None else self._on_lr_step()
        if report is not None:
            report(lr_scheduler)


@final
class LRClock:
    """Warns about an LR scheduler that is stepped per batch while the batch size changes."""

    def __init__(self, unit: str, *, counts: bool) -> None:
        self._by_epoch = counts or unit == "epoch"  # whether the epoch of each step is known
        self._at: dict[int, Progress] = {}
        self._warned = False

    def stepped(self, lr_scheduler: Any, now: Progress, size: int) -> None:
        """Record that `lr_scheduler` stepped at `now`, with batches of `size` samples."""
        before = self._at.get(id(lr_scheduler))
        self._at[id(lr_scheduler)] = now
        if before is None or self._warned or isinstance(lr_scheduler, ReduceLROnPlateau):
            return
        if self._by_epoch:
            often = now.epoch == before.epoch
        else:
            often = 0 < now.step - before.step <= 1 or 0 < now.samples - before.samples <= 2 * size
        if often:
            self._warned = True
            log.warning(
                "%s",
                f"{type(lr_scheduler).__name__} is stepped once per batch, and the batch size changes: it "
                "will get another number of steps than with a constant size. Step it once per epoch, or make "
                "it for the number of steps that there will be, scheduler.updates(samples=..., epochs=...), "
                "and say so with updates_known=True",
            )
