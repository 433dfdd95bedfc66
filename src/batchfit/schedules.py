"""Batch-size schedules: what the size shall be, declared and checked before training.

Rules
- A schedule is a frozen value, distinguished from the others by `type`, and travels as JSON or YAML.
- Its size is a pure function of progress: `config.size_at(progress, initial_batch_size)`. Two schedules carry
  state instead, which `BatchSizeScheduler` keeps: `Increase-` and `NoiseBatchSizeConfig`.
- Counts are in one `unit` and may be text ("250B"). Sizes may fall as well as grow. Rounding is explicit.
- An error names field and value: `gamma must be at least 2, not 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, TypeAdapter, ValidationError, field_serializer, model_validator

from batchfit._config_files import SUFFIXES, parse_document, read_document
from batchfit._loader.pure.progress import Progress
from batchfit._schedule.pure import lr_rules
from batchfit._schedule.pure.bound_plan import checked_size, count_in, where
from batchfit._schedule.pure.config import (
    BatchSizeConfig,
    Count,
    Function,
    PlannedConfig,
    PositiveCount,
    Size,
    SmoothConfig,
    Unit,
    positive_number,
    refusal,
    whole_number,
)
from batchfit._schedule.pure.functions import as_path, call, resolve
from batchfit._schedule.pure.milestones import looks_like_milestones, parse_milestones, unit_of
from batchfit._units import MOST, Rounding, round_size, whole


class StepBatchSizeConfig(PlannedConfig):
    """Multiplies the batch size by `gamma` every `step_size` counts.

    The size is `min(initial * gamma ** (epoch // step_size), max_batch_size)`.

    Attributes:
        type: "step": the kind of schedule, where a file is read.
        step_size: counts between two changes.
        gamma: the factor of each change, at least 2.
    """

    type: Literal["step"] = "step"
    step_size: PositiveCount
    gamma: Annotated[int, whole_number(2)]

    def wanted(self, progress: Progress, initial_batch_size: int) -> int:
        times = count_in(progress, self.unit) // self.step_size
        most = MOST if self.max_batch_size is None else self.max_batch_size
        # gamma ** times of a long run has a million digits: what is beyond the cap is not computed.
        if times * math.log(self.gamma) > math.log(most) + 1:
            size = most + 1
        else:
            size = initial_batch_size * self.gamma**times
        if self.max_batch_size is None and size > MOST:
            raise ValueError(
                f"max_batch_size must be set: at {where(progress, self.unit)} the size would be "
                f"{initial_batch_size} * {self.gamma} ** {times}"
            )
        return min(size, most)

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        if (
            self.max_batch_size is not None
            and self.wanted(progress, initial_batch_size) >= self.max_batch_size
        ):
            return None
        return (count_in(progress, self.unit) // self.step_size + 1) * self.step_size


class LinearBatchSizeConfig(SmoothConfig):
    """Changes the batch size by the same number of samples with every count.

    Attributes:
        type: "linear": the kind of schedule, where a file is read.
    """

    type: Literal["linear"] = "linear"

    def between(self, share: float, initial_batch_size: int) -> float:
        return initial_batch_size + (self.final_batch_size - initial_batch_size) * share


class ExponentialBatchSizeConfig(SmoothConfig):
    """Changes the batch size by the same factor with every count.

    Attributes:
        type: "exponential": the kind of schedule, where a file is read.
    """

    type: Literal["exponential"] = "exponential"

    def between(self, share: float, initial_batch_size: int) -> float:
        return float(initial_batch_size * (self.final_batch_size / initial_batch_size) ** share)


class CosineBatchSizeConfig(SmoothConfig):
    """Half a cosine wave: slow at both ends, as CosineAnnealingLR is for the learning rate.

    Attributes:
        type: "cosine": the kind of schedule, where a file is read.
    """

    type: Literal["cosine"] = "cosine"

    def between(self, share: float, initial_batch_size: int) -> float:
        risen = (1 - math.cos(math.pi * share)) / 2
        return initial_batch_size + (self.final_batch_size - initial_batch_size) * risen


class MilestoneBatchSizeConfig(PlannedConfig):
    """Sizes from given counts on: `"0:256 20:512"`, `{0: 256, 20: 512}`, or `"0:768 250B:1536 tokens"`.

    Attributes:
        type: "milestone": the kind of schedule, where a file is read.
        milestones: pairs of a count and the global size from there on, as text, a mapping or a list.
    """

    type: Literal["milestone"] = "milestone"
    milestones: tuple[tuple[int, int], ...]

    # Type checkers would ask for the tuple that is kept, where text is what people write.
    def __init__(self, **data: Any) -> None:
        super().__init__(**data)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or "milestones" not in data:
            return data
        given = data["milestones"]
        unit = unit_of(given, data.get("unit"))
        most = data.get("max_batch_size")
        return {**data, "milestones": parse_milestones(given, most=most), **({"unit": unit} if unit else {})}

    @property
    def starts_by_itself(self) -> bool:
        return self.milestones[0][0] == 0

    def checked_initial(self, initial_batch_size: int | None) -> int:
        size = self.milestones[0][1]
        if not self.starts_by_itself:
            return super().checked_initial(initial_batch_size)
        if initial_batch_size is not None and initial_batch_size != size:
            raise ValueError(
                f"initial_batch_size must be {size}, which milestones says at 0, not {initial_batch_size!r}"
            )
        return size

    def wanted(self, progress: Progress, initial_batch_size: int) -> float:
        now = count_in(progress, self.unit)
        size = initial_batch_size
        for count, then in self.milestones:
            if count > now:
                break
            size = then
        return size

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        now = count_in(progress, self.unit)
        return next((count for count, _ in self.milestones if count > now), None)

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        least = min(size for _, size in self.milestones)
        if least < initial_batch_size:
            return "milestones", least
        return super().smallest(initial_batch_size)

    @classmethod
    def seesaw(
        cls,
        initial_batch_size: int,
        *,
        decay: Literal["cosine", "quarter-cosine"] | Mapping[int, float],
        total: int | str | None = None,
        ratio: float = 2.0,
        unit: Unit = "epoch",
        max_batch_size: int | None = None,
        multiple_of: int = 1,
        rounding: Rounding = "nearest",
    ) -> Self:
        """The batch sizes that take the place of a learning-rate decay (Seesaw, arXiv 2510.14717).

        Keep the learning rate constant and pass `lr="seesaw"` to the scheduler: where the decay would have
        cut it by k, the batch grows by k and the rate falls by k ** 0.5.

        Args:
            initial_batch_size: the global size that the run starts with.
            decay: "cosine" (as CosineAnnealingLR to 0 over `total`), "quarter-cosine" (cos(pi t / 2), the
                paper's 36 %) or cuts such as `{60: 0.2, 120: 0.2}`.
            total: over how many counts a cosine falls; may be text ("250B").
            ratio: a cosine is followed in steps of this factor.
            unit: what counts are in: "epoch", "step", "samples" or "tokens".
            max_batch_size: the largest size. Without it a cosine stops at 64 times the initial size: its end
                would ask for any size.
            multiple_of: every size is a multiple of this.
            rounding: how a size becomes one: "down", "nearest" or "up".

        Returns:
            The schedule with these milestones.

        Raises:
            ValueError: an argument is wrong; names it and its value.
        """
        initial = checked_size(initial_batch_size, name="initial_batch_size")
        whole(multiple_of, name="multiple_of", at_least=1)
        if max_batch_size is not None and whole(max_batch_size, name="max_batch_size") < initial:
            raise ValueError(
                f"max_batch_size must be at least the initial batch size {initial}, not {max_batch_size!r}"
            )
        points = lr_rules.growth_points(decay, initial=initial, total=total, ratio=ratio, most=max_batch_size)
        sizes = {0: initial}
        for at, growth in points:
            size = round_size(initial * growth, multiple_of=multiple_of, rounding=rounding)
            sizes[at] = size if max_batch_size is None else min(size, max_batch_size)
        return cls(
            milestones=tuple(sizes.items()),
            unit=unit,
            max_batch_size=max_batch_size,
            multiple_of=multiple_of,
            rounding=rounding,
        )


class _CallsConfig(BatchSizeConfig):
    """A schedule that asks a function of yours."""

    function: Function

    @field_serializer("function")
    def _named(self, function: Callable[..., Any] | str) -> str:
        return as_path(function)

    def to_json(self) -> str:
        as_path(self.function)  # pydantic would wrap what this says about a lambda in two errors of its own
        return super().to_json()


class CustomBatchSizeConfig(_CallsConfig, PlannedConfig):
    """The size is what a function of yours returns.

    Attributes:
        type: "custom": the kind of schedule, where a file is read.
        function: `function(progress) -> int`, a callable or its import path "package.module:function". It
            must be pure.
    """

    type: Literal["custom"] = "custom"

    def wanted(self, progress: Progress, initial_batch_size: int) -> int:
        at = where(progress, self.unit)
        return call(resolve(self.function), (progress,), returns="batch size", at=at, at_least=1)

    def steady_until(self, progress: Progress, initial_batch_size: int) -> int | None:
        return count_in(progress, self.unit)  # nobody knows: it may look at any count

    def smallest(self, initial_batch_size: int) -> tuple[str, int] | None:
        return None


class IncreaseBatchSizeConfig(_CallsConfig):
    """A function of yours says by how much the size grows, once per epoch (torchtune's RFC).

    An increase past `max_batch_size`, or past what fits, is left out, with an event.

    Attributes:
        type: "increase": the kind of schedule, where a file is read.
        clamp: go to the limit instead, where an increase would pass it.
        unit: "epoch": what counts are in.
        function: `function(epoch, current_batch_size) -> increase`, a callable or its import path. A negative
            number is a decrease.
    """

    type: Literal["increase"] = "increase"
    clamp: bool = False
    unit: Literal["epoch"] = "epoch"

    def increase(self, epoch: int, current_batch_size: int) -> int:
        """What the function says, checked.

        Args:
            epoch: epochs that are over.
            current_batch_size: the global size now.
        """
        arguments = (epoch, current_batch_size)
        at = f"epoch {epoch}, batch size {current_batch_size}"
        return call(
            resolve(self.function), arguments, returns="increase", at=at, at_least=1 - current_batch_size
        )


class NoiseBatchSizeConfig(BatchSizeConfig):
    """The size follows the measured gradient noise scale; see `GradientNoise`.

    Only a reading whose whole interval agrees changes the size.

    Attributes:
        type: "noise": the kind of schedule, where a file is read.
        ratio: the factor of a change: sizes are the initial one times powers of it.
        min_batch_size: the smallest size; None: no limit.
        hysteresis: the part by which another size must be better.
        min_steps: optimizer steps between two changes.
        target: the size aimed for, in noise scales, where samples/s are not known.
        can_shrink: whether sizes below the initial one are allowed.
        use_bound: a lower bound of the noise scale is enough to grow: all that there is while the batch is
            far smaller than the noise scale.
        unit: "step": what counts are in.
    """

    type: Literal["noise"] = "noise"
    ratio: Annotated[int, whole_number(2)] = 2
    min_batch_size: Size | None = None
    hysteresis: Annotated[float, positive_number()] = 0.05
    min_steps: Count = 50
    target: Annotated[float, positive_number()] = 1.0
    can_shrink: bool = True
    use_bound: bool = False
    unit: Literal["step"] = "step"

    @model_validator(mode="after")
    def _checked(self) -> Self:
        low, high = self.min_batch_size, self.max_batch_size
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_batch_size must be at most max_batch_size {high}, not {low}")
        return self

    def candidates(self, initial_batch_size: int, largest: int | None) -> tuple[int, ...]:
        """The sizes to choose from, in order: the initial one times powers of `ratio`, within the limits.

        Args:
            initial_batch_size: the global size that the run starts with.
            largest: the largest global batch that fits; None: no limit.
        """
        caps = [cap for cap in (self.max_batch_size, largest) if cap is not None]
        most = min(caps, default=MOST)
        least = self.min_batch_size or (1 if self.can_shrink else initial_batch_size)
        sizes, size = [initial_batch_size], initial_batch_size
        while size * self.ratio <= most:
            size *= self.ratio
            sizes.append(size)
        size = initial_batch_size
        while size % self.ratio == 0 and size // self.ratio >= least:
            size //= self.ratio
            sizes.append(size)
        return tuple(sorted(sizes))


AnyConfig = (
    StepBatchSizeConfig
    | LinearBatchSizeConfig
    | ExponentialBatchSizeConfig
    | CosineBatchSizeConfig
    | MilestoneBatchSizeConfig
    | CustomBatchSizeConfig
    | IncreaseBatchSizeConfig
    | NoiseBatchSizeConfig
)
# For a field of your own pydantic model, as in `schedule: BatchSizeSchedule | None = None`.
BatchSizeSchedule = Annotated[AnyConfig, Field(discriminator="type")]


def load_schedule(
    source: str | Path | Mapping[str, Any] | BatchSizeConfig | None, *, name: str = "source"
) -> AnyConfig | None:
    """Read a schedule from a file, from text, or from a mapping.

    ```python
    batchfit.load_schedule("0:256 20:512")
    batchfit.load_schedule({"type": "step", "step_size": 20, "gamma": 2})
    ```

    Args:
        source: a JSON or YAML file, text ("0:256 20:512", or JSON), a mapping with `type`, a schedule, or
            None for a constant size.
        name: the argument that an error names: that of your own function.

    Returns:
        The schedule; None for None.

    Raises:
        ValueError: a field is wrong, or the text is no schedule; names field and value.
        TypeError: `source` is something else.
    """
    if source is None or isinstance(source, BatchSizeConfig):
        return source  # type: ignore[return-value]
    if isinstance(source, Path):
        return _from_mapping(read_document(source), file=source)
    if isinstance(source, Mapping):
        return _from_mapping(dict(source))
    if not isinstance(source, str):
        raise TypeError(f"{name} must be a file, text, a mapping or a schedule, not {source!r}")
    if source.lstrip().startswith("{"):
        return _from_mapping(parse_document(source, name="the schedule"))
    if looks_like_milestones(source):
        return MilestoneBatchSizeConfig(milestones=source)
    if source.lower().endswith(SUFFIXES) or _is_file(source):
        return _from_mapping(read_document(Path(source)), file=Path(source))
    raise ValueError(
        f"{name} must be a file ({', '.join(SUFFIXES)}) or text such as '0:256 20:512', not {source!r:.80}"
    )


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a name, or with a null byte in it
        return False


def _from_mapping(data: dict[str, Any], *, file: Path | None = None) -> AnyConfig:
    try:
        return TypeAdapter[AnyConfig](BatchSizeSchedule).validate_python(data)
    except ValidationError as error:
        kinds: dict[Any, type[BatchSizeConfig]] = {
            kind.model_fields["type"].default: kind for kind in get_args(AnyConfig)
        }
        kind = data.get("type")
        known = kinds.get(kind) if isinstance(kind, str) else None
        raise refusal(error, known or BatchSizeConfig, file=file) from None
