"""Costs as ratios: ways of doing the same work in turn, by CPU time, which neighbours disturb the least.

Rules: every round runs every way once, in an order that turns around; a ratio is the median over rounds of
the way's time over the reference's of the same round. One thread, since torch's pool spins while it waits.
"""

from __future__ import annotations

import math
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Work = Callable[[], object]
Times = dict[str, list[float]]


def own_cpu_s(work: Work) -> float:
    """CPU seconds of this process."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def all_cpu_s(work: Work) -> float:
    """CPU seconds of this process and of the children that ended meanwhile."""

    def now() -> float:  # not `os.times`, which counts in hundredths
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    begun = now()
    work()
    return now() - begun


def children_cpu_s(work: Work) -> float:
    """CPU seconds of the children that ended meanwhile, alone."""

    def now() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    begun = now()
    work()
    return now() - begun


def in_turn(
    ways: Mapping[str, Work], rounds: int, *, seconds: Callable[[Work], float] = own_cpu_s, warm_up: int = 2
) -> Times:
    """The seconds of each way in each round."""
    for _ in range(warm_up):
        for work in ways.values():
            work()
    times: Times = {name: [] for name in ways}
    for number in range(rounds):
        order = list(ways.items())
        for name, work in order if number % 2 else reversed(order):
            times[name].append(seconds(work))
    return times


def ratio(times: Times, way: str, to: str) -> float:
    """What `way` takes over what `to` takes, the median over rounds."""
    return statistics.median(a / b for a, b in zip(times[way], times[to], strict=True))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the median, by the ranks that a fair coin gives."""
    ordered, count = sorted(values), len(values)
    below = max(0, math.floor(count / 2 - 0.98 * math.sqrt(count)))
    return ordered[below], ordered[count - 1 - below]


def median_ms(times: Times) -> dict[str, float]:
    return {name: round(1e3 * statistics.median(some), 4) for name, some in times.items()}


def about(command: str) -> dict[str, Any]:
    """What a page says of where its figures come from."""
    import importlib.metadata

    return {
        "command": command,
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }


IN_TURN = "CPU time, all ways in turn; ratios are medians over rounds."


def made_by(told: Mapping[str, Any]) -> str:
    machine = f"python {told['python']}, torch {told['torch']}, {told['cores']} cores ({told['machine']})"
    return f"Made by `{told['command']}`; {machine}, shared with other programs"
