"""What all batch-size schedules share: fields that check themselves, a cap, rounding, and the way to a plan.

Rules: the error of a wrong field names it and its value (`gamma must be at least 2, not 1`), by the
constructor and by whatever validates a mapping. What a schedule wants (`wanted`) knows no limits: they are
applied in one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo, model_validator

from batchfit._config_files import sentence
from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure.bound_plan import BoundPlan, checked_size, count_in, fitted
from batchfit._schedule.pure.functions import checked_function
from batchfit._units import Rounding, parse_count, whole

Unit = Literal["epoch", "step", "samples", "tokens"]


def counted(at_least: int) -> Any:
    return BeforeValidator(
        lambda value, info: None if value is None else parse_count(value, name=_name(info), at_least=at_least)
    )


def whole_number(at_least: int) -> Any:
    return BeforeValidator(
        lambda value, info: None if value is None else whole(value, name=_name(info), at_least=at_least)
    )


def positive_number() -> Any:
    """A finite number above 0."""

    def check(value: object, info: ValidationInfo) -> float:
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not 0 < number < math.inf:
            raise ValueError(f"{_name(info)} must be more than 0, not {value!r}")
        return float(number)

    return BeforeValidator(check)


def _name(info: ValidationInfo) -> str:
    return info.field_name or "value"


Count = Annotated[int, counted(0)]
PositiveCount = Annotated[int, counted(1)]
Size = Annotated[int, whole_number(1)]
Function = Annotated[
    Callable[..., Any] | str, BeforeValidator(lambda v, info: checked_function(v, name=_name(info)))
]


class BatchSizeConfig(BaseModel):
    """Base of all schedules: a cap, and multiples of `multiple_of`. Sizes are global: over all ranks.

    Attributes:
        max_batch_size: the largest size; None: no limit.
        multiple_of: every size is a multiple of this.
        rounding: how a size becomes one: "down", "nearest" or "up".
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    max_batch_size: Size | None = None
    multiple_of: Size = 1
    rounding: Rounding = "down"

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise refusal(error, type(self)) from None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The schedule in a JSON or YAML file.

        Args:
            path: a JSON or YAML file.

        Returns:
            The schedule.

        Raises:
            ValueError: the file holds another kind of schedule, or a wrong field.
        """
        from batchfit.schedules import load_schedule  # which knows all kinds

        config = load_schedule(Path(path))
        if not isinstance(config, cls):
            raise ValueError(f"{path} must hold a {cls.__name__}, not a {type(config).__name__}")
        return config

    def to_json(self) -> str:
        """This schedule as JSON text, for `load_schedule`."""
        return self.model_dump_json(exclude_defaults=False)


class PlannedConfig(BatchSizeConfig):
    """A schedule whose size is a pure function of progress.

    Attributes:
        unit: what counts are in: "epoch", "step", "samples" or "tokens".
    """

    unit: Unit = "epoch"

    def size_at(self, progress: Progress, initial_batch_size: int) -> int:
        """The global size of the batch that comes next.

        Args:
            progress: how far the run has come.
            initial_batch_size: the global size that the run starts with.
        """
        return fitted(
            self.wanted(progress, initial_batch_size), self.max_batch_size, self.multiple_of, self.rounding
        )

    def bind(
        self,
        initial_batch_size: int | None = None,
        *,
        largest: int | None = None,
        world_size: int = 1,
        multiple_of: int = 1,
        tokens_per_sample: int | None = None,
    ) -> BoundPlan:
        """This schedule for one run, checked: what `ResizableLoader(schedule=)` takes.

        Args:
            initial_batch_size: the global size that the run starts with; None where the schedule says it.
            largest: the largest global batch that fits; None: no limit.
            world_size: ranks that share a batch.
            multiple_of: what sizes are rounded to, besides the schedule's own `multiple_of`.
            tokens_per_sample: tokens of a sample, for schedules in tokens.
        """
        initial = self.checked_initial(initial_batch_size)
        plan = BoundPlan(self, initial, largest, world_size, multiple_of, tokens_per_sample)
        plan.check()
        return plan

    @property
    def starts_by_itself(self) -> bool:
        """Whether it says the size that a run starts from."""
        return False

    def checked_initial(self, initial_batch_size: int | None) -> int:
        """The size that a run starts from.

        Args:
            initial_batch_size: what was given; None where nothing was.

        Raises:
            ValueError: the size is missing, or not the one that the schedule says.
        """
        return checked_size(initial_batch_size, name="initial_batch_size")

    def wanted(self, progress: Progress, initial_batch_size: int) -> float:
        """The size before cap and rounding.

        Args:
            progress: how far the run has come.
            initial_batch_size: the global size that the run starts with.

        Raises:
            ValueError: the size would be too large to count, since there is no `max_batch_size`.
        """
        raise NotImplementedError

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        """The count from which the size may be another one.

        Args:
            progress: how far the run has come.
            initial_batch_size: the global size that the run starts with.

        Returns:
            The count in the schedule's unit; None where the size stays.
        """
        return count_in(progress, self.unit) + 1

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        """The smallest size that it will ever want, and the field that says so; None where nobody knows.

        Args:
            initial_batch_size: the global size that the run starts with.

        Returns:
            The field that says it, and the size; None where it cannot be known.
        """
        return "initial_batch_size", initial_batch_size


class SmoothConfig(PlannedConfig):
    """From the initial size to `final_batch_size` over `over` counts, from `start` on.

    Attributes:
        final_batch_size: the global size at the end.
        over: how many counts it takes.
        start: the count at which it begins.
        every: the size changes only each so many counts; None: with every count. Set it: each new size is a
            new shape, which costs plans, compilation and memory.
    """

    final_batch_size: Size
    over: PositiveCount
    start: Count = 0
    every: PositiveCount | None = None

    @model_validator(mode="after")
    def _checked(self) -> Self:
        if self.max_batch_size is not None and self.final_batch_size > self.max_batch_size:
            raise ValueError(
                f"final_batch_size must be at most max_batch_size {self.max_batch_size}, "
                f"not {self.final_batch_size}"
            )
        return self

    def wanted(self, progress: Progress, initial_batch_size: int) -> float:
        done = count_in(progress, self.unit) - self.start
        if done >= self.over:
            return self.final_batch_size
        if self.every is not None:
            done = done // self.every * self.every
        if done <= 0:
            return initial_batch_size
        return self.between(done / self.over, initial_batch_size)

    def between(self, share: float, initial_batch_size: int) -> float:
        """The size when `share` of the way is done, 0 < share < 1.

        Args:
            share: how much of the way is done, between 0 and 1.
            initial_batch_size: the global size that the run starts with.
        """
        raise NotImplementedError

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        done = count_in(progress, self.unit) - self.start
        if done >= self.over:
            return None
        step = self.every or 1
        return self.start + min((max(done, 0) // step + 1) * step, self.over)

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        if self.final_batch_size < initial_batch_size:
            return "final_batch_size", self.final_batch_size
        return super().smallest(initial_batch_size)


class WrongScheduleError(ValidationError):
    """A schedule with wrong fields: pydantic's error, which reads as one sentence of ours."""

    def __str__(self) -> str:
        return str(self.errors()[0]["ctx"]["error"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def refusal(
    error: ValidationError, kind: type[BatchSizeConfig], *, file: Path | None = None
) -> ValidationError:
    """The same error, with a sentence of ours for each field that is wrong, and the file it is in."""
    where = "" if file is None else f"{file}: "
    fields, name = list(kind.model_fields), kind.__name__
    lines: list[Any] = [
        {
            "type": "value_error",
            "loc": one["loc"],
            "input": one["input"],
            "ctx": {"error": ValueError(where + sentence([one], fields=fields, name=name))},
        }
        for one in error.errors()
    ]
    return WrongScheduleError.from_exception_data(name, lines)
