"""Wrong arguments of `BatchSizeFinder`, refused before anything runs."""

from __future__ import annotations

from typing import Final

LEAST_STEPS: Final = 2  # optimizers allocate their state in the first step


def check_sizes(
    min_val: int, max_val: int, init_val: int | None, max_trials: int, multiple_of: int, power_of_two: bool
) -> None:
    """Refuse sizes that leave none to try."""
    if type(max_trials) is not int or max_trials < 0:
        raise ValueError(f"max_trials must be an integer of at least 0, not {max_trials!r}")
    counts = {"max_val": max_val, "min_val": min_val, "multiple_of": multiple_of}
    for name, value in {**counts, **({} if init_val is None else {"init_val": init_val})}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if type(power_of_two) is not bool:
        raise ValueError(f"power_of_two must be True or False, not {power_of_two!r}")
    if power_of_two and multiple_of & (multiple_of - 1):
        raise ValueError(f"multiple_of must be a power of two with power_of_two, not {multiple_of!r}")
    first = -(-min_val // multiple_of) * multiple_of
    if power_of_two:
        first = 1 << (first - 1).bit_length()
    if first > max_val:
        raise ValueError(f"max_val must leave an allowed size (the smallest is {first}), not {max_val!r}")


def check_steps(
    steps_per_trial: int, soak_steps: int | None, tolerance: float, time_limit_s: float | None
) -> None:
    """Refuse wrong counts of steps, a wrong tolerance and a wrong time limit."""
    if type(steps_per_trial) is not int or steps_per_trial < 1:
        raise ValueError(f"steps_per_trial must be a positive integer, not {steps_per_trial!r}")
    least = max(LEAST_STEPS, steps_per_trial)
    if soak_steps is not None and (type(soak_steps) is not int or 0 != soak_steps < least):
        raise ValueError(
            f"soak_steps must be 0 or at least the steps of a trial ({least}), not {soak_steps!r}"
        )
    if type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, not {tolerance!r}")
    if time_limit_s is not None and (type(time_limit_s) not in (int, float) or not time_limit_s > 0):
        raise ValueError(f"time_limit_s must be a positive number of seconds, not {time_limit_s!r}")


def check_names(batch_arg_name: object, key: object, fresh: object) -> None:
    """Refuse names that are no text, and a `fresh` that is no flag."""
    if not isinstance(batch_arg_name, str) or not batch_arg_name:
        raise ValueError(f"batch_arg_name must be the name of an attribute, not {batch_arg_name!r}")
    if key is not None and not (isinstance(key, str) and key.strip()):
        raise ValueError(f"key must be a name or None, not {key!r}")
    if type(fresh) is not bool:
        raise ValueError(f"fresh must be True or False, not {fresh!r}")
