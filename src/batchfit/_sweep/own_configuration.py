"""The interface of a configuration with its own search and measurement, as that of a program's command.

Rules: as for a workload: what it finds and measures is recorded as it becomes known, and a measurement
that is out of memory goes down.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from batchfit._sweep.measure import measure_downwards
from batchfit._sweep.run_state import ConfigurationRun, SweepSettings
from batchfit.results import FitResult


class OwnConfiguration(ABC):
    """What a factory returns in the place of a workload."""

    @abstractmethod
    def find(self, settings: SweepSettings, run: ConfigurationRun, start: int | None) -> FitResult:
        """Search its size; `run` collects trials, and what the device is."""

    @property
    @abstractmethod
    def measures(self) -> bool:
        """Whether there is a measurement."""

    @abstractmethod
    def measure(self, size: int) -> Mapping[str, Any] | None:
        """Measure at the size; None where that is out of memory."""

    @abstractmethod
    def out_of_memory(self, size: int) -> Exception:
        """The error where not even this smallest size can be measured."""


def run_own(own: OwnConfiguration, settings: SweepSettings, run: ConfigurationRun) -> None:
    """Find the size, and measure there."""
    run.stage = "search"
    estimate, start = None, None
    if not settings.auto or settings.strategy in ("grow", "halve"):
        start = settings.batch_size
    if settings.auto and settings.estimate is not None:
        estimate = run.estimate(settings)
        start = max(settings.min_size, min(estimate, settings.batch_size or estimate))
    run.known.update(estimate=estimate, start=start)
    run.report("search", estimate=estimate, start=start)
    begun_s = time.perf_counter()
    fit = own.find(settings, run, start)
    run.keep_fit(fit, find_s=time.perf_counter() - begun_s)
    if not own.measures:
        return
    run.stage = "measure"
    begun_s = time.perf_counter()

    def attempt(size: int, last: bool) -> Mapping[str, Any] | None:
        measured = own.measure(size)
        if measured is None and last:
            raise own.out_of_memory(size)
        return measured

    try:
        measure_downwards(attempt, fit, settings, run)
    finally:
        run.known["measure_s"] = time.perf_counter() - begun_s
