"""The learning rate follows the batch size, under any LR scheduler.

Rules
- `group["lr"]` is what the LR scheduler (or the user) says, times our factor. The group itself keeps both, as
  torch keeps `initial_lr` there: an optimizer's checkpoint knows that our factor is in: nothing compounds.
- Before an LR scheduler steps our factor is taken out, and put back after: recursive schedulers would
  multiply it into every later value. What is taken out is bit for bit what the LR scheduler wrote.
- An LR scheduler that we watch gets a subclass of its own class, not an attribute: its `state_dict` is its
  `__dict__`, and stays as it is. It gets its class back with `close()`, and does nothing once we are gone.
- A tensor learning rate is changed in place, without waiting for the device.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.lr_rules import LRRule

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
            self._rule_of(number, group)  # a wrong rule of a group's own is told now
        self._ratio = 1.0
        self._depth = 0
        self._told = False
        self._on_lr_step = on_lr_step
        self._watched: list[tuple[Any, type]] = []
        for one in lr_schedulers:
            self._watch(one)

    @property
    def factors(self) -> tuple[float, ...]:
        """What each group's learning rate is multiplied with now."""
        return tuple(group.get(FACTOR, 1.0) for group in self._optimizer.param_groups)

    def set_ratio(self, ratio: float) -> tuple[float, ...]:
        """Let the learning rates be those of `ratio` times the initial batch size; any number of times."""
        self._ratio = ratio
        if self._depth == 0:
            self._take_out()
            self._put_in()
        return self.factors

    def is_moved_by(self, ratio: float) -> bool:
        """Whether any learning rate will be another at `ratio` times the initial batch size."""
        groups = enumerate(self._optimizer.param_groups)
        return any(self._rule_of(n, group).factor(ratio) != group.get(FACTOR, 1.0) for n, group in groups)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Inside, the groups hold learning rates without our factor."""
        if self._depth == 0:
            self._take_out()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._put_in()

    def close(self) -> None:
        """Take our factor out for good, and let the LR schedulers be what they were."""
        self._take_out()
        for one, kind in self._watched:
            one.__class__ = kind
        self._watched = []

    def _rule_of(self, number: int, group: dict[str, Any]) -> LRRule:
        own = group.get(RULE)
        if own is not None:
            return LRRule.parse(own, name=f"{RULE} of group {number}")
        if not self._single and number >= len(self._rules):
            raise ValueError(
                f"lr must have a rule for group {number}, which was added later: put {RULE!r} into it"
            )
        return self._rules[0 if self._single else number]

    def _put_in(self) -> None:
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

    def _take_out(self) -> None:
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
        if self._told or self._watched:
            return
        self._told = True
        log.warning(
            "%s",
            f"the learning rate of group {number} was changed while it held the factor of the batch size. If "
            "an LR scheduler did it, pass it as lr_scheduler= to BatchSizeScheduler, or step it inside `with "
            "scheduler.lr_untouched():`; otherwise the two multiply wrongly",
        )

    def _watch(self, lr_scheduler: Any) -> None:
        if not callable(getattr(lr_scheduler, "step", None)):
            raise TypeError(f"lr_scheduler must have a method step(), not {lr_scheduler!r:.80}")
        theirs = getattr(getattr(lr_scheduler, "optimizer", None), "param_groups", None)
        if theirs is not None and theirs is not self._optimizer.param_groups:
            raise ValueError(
                f"lr_scheduler must belong to the optimizer, not {type(lr_scheduler).__name__} of another"
            )
        kind = type(lr_scheduler)
        watcher = getattr(kind, "_batchfit_watches", None)
        if watcher is not None and watcher() is None:  # it was left without close()
            kind = kind.__mro__[1]
        elif watcher is not None:
            raise ValueError(
                "lr_scheduler must be given to one BatchSizeScheduler only: close() the other first"
            )
        try:
            lr_scheduler.__class__ = _watching(kind, weakref.ref(self))
        except TypeError:
            raise TypeError(
                f"lr_scheduler must be a plain Python object, not {kind.__name__}: step it inside "
                "`with scheduler.lr_untouched():` instead"
            ) from None
        self._watched.append((lr_scheduler, kind))

    def stepped(self, lr_scheduler: Any) -> None:
        """A watched LR scheduler has stepped."""
        told = None if self._on_lr_step is None else self._on_lr_step()
        if told is not None:
            told(lr_scheduler)


def _unwatched(kind: type) -> Any:
    """What a copy or a pickle of a watched LR scheduler begins as."""
    return object.__new__(kind)


def _watching(kind: type, keeper: weakref.ref[ScaledLR]) -> type:
    """A subclass of an LR scheduler's class that steps without our factor; pickles as the original."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        lr = keeper()
        if lr is None:  # nobody keeps a factor any more
            return kind.step(self, *args, **kwargs)  # type: ignore[attr-defined]
        with lr.untouched():
            value = kind.step(self, *args, **kwargs)  # type: ignore[attr-defined]
        lr.stepped(self)
        return value

    def reduce(self: Any, protocol: Any) -> Any:
        return _unwatched, (kind,), vars(self)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    body = {**names, "step": step, "__reduce_ex__": reduce, "_batchfit_watches": keeper}
    return type(kind)(kind.__name__, (kind,), body)


log = logging.getLogger("batchfit")


@final
class LRClock:
    """Watches how far a run comes between two steps of an LR scheduler."""

    def __init__(self, unit: str, *, counts: bool) -> None:
        self._by_epoch = counts or unit == "epoch"  # whether the epoch of each step is known
        self._at: dict[int, Progress] = {}
        self._told = False

    def stepped(self, lr_scheduler: Any, now: Progress, size: int) -> None:
        """It has stepped, at a batch size that will change."""
        before = self._at.get(id(lr_scheduler))
        self._at[id(lr_scheduler)] = now
        if before is None or self._told or isinstance(lr_scheduler, ReduceLROnPlateau):
            return
        if self._by_epoch:
            often = now.epoch == before.epoch
        else:
            often = 0 < now.step - before.step <= 1 or 0 < now.samples - before.samples <= 2 * size
        if often:
            self._told = True
            log.warning(
                "%s",
                f"{type(lr_scheduler).__name__} is stepped once a batch, and the batch size changes: it will "
                "get another number of steps than with a constant size. Step it once an epoch, or make it "
                "for the number of steps that there will be, scheduler.updates(samples=..., epochs=...), and "
                "say so with updates_known=True",
            )
