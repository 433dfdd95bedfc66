"""Binds a schedule of any kind to one run: checks its limits and makes the `BoundPlan`.

Rules: wrong sizes, ranks and limits are errors here, before training, for all kinds in the same
words. A size is a multiple of `world_size` where that was given, and of `microbatch_size` on every rank where
that was, whoever said how many ranks there are. A schedule by noise has no plan but its initial size.
"""

from __future__ import annotations

from batchfit._schedule.pure.bound_plan import BoundPlan, checked_size
from batchfit._schedule.pure.config import BatchSizeConfig, PlannedConfig
from batchfit._schedule.pure.increase import Increases
from batchfit._schedule.pure.phases import Constant
from batchfit.schedules import IncreaseBatchSizeConfig


def plan_of(
    config: BatchSizeConfig | None,
    initial_batch_size: int | None,
    *,
    largest: int | None = None,
    world_size: int = 1,
    multiple_of: int = 1,
    tokens_per_sample: int | None = None,
) -> BoundPlan | Increases:
    """The plan of a run on `world_size` ranks, checked. No schedule is a constant size."""
    limits: PlannedConfig | Constant
    if isinstance(config, PlannedConfig):
        initial, limits = config.checked_initial(initial_batch_size), config
    else:
        initial, limits = checked_size(initial_batch_size, name="initial_batch_size"), _limits(config)
    bound = BoundPlan(limits, initial, largest, world_size, multiple_of, tokens_per_sample)
    bound.check()
    if not isinstance(config, IncreaseBatchSizeConfig):
        return bound
    return Increases(
        config.increase,
        initial,
        cap=bound.cap,
        clamp=config.clamp,
        world_size=world_size,
        multiple_of=bound.multiple,
        rounding=config.rounding,
        tokens_per_sample=tokens_per_sample,
    )


def multiple(*, world_size: int | None, ranks: int, microbatch_size: int | None) -> int:
    """What sizes must be a multiple of on `ranks` ranks; `world_size` is what the user gave."""
    return ranks * microbatch_size if microbatch_size is not None else world_size or 1


def starts_by_itself(config: BatchSizeConfig | None) -> bool:
    """Whether it says the size that a run starts from."""
    return isinstance(config, PlannedConfig) and config.starts_by_itself


def _limits(config: BatchSizeConfig | None) -> Constant:
    if config is None:
        return Constant()
    unit = "epoch" if isinstance(config, IncreaseBatchSizeConfig) else "step"
    return Constant(unit, config.max_batch_size, config.multiple_of, config.rounding)
