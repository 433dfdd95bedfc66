"""One configuration of a sweep while it runs: its settings, and the fields of its record known so far.

Rules:
- `SweepSettings` are the same for every configuration, and plain values but for the user's functions: they
  travel to other processes.
- A `ConfigurationRun` collects the fields of a record as they become known, so that one that fails has all
  that was found until then.
- A listener (`on_event`) that raises is not the user's configuration failing: its error is kept, and what is
  raised instead passes whoever takes errors of the user's code for the configuration's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

from batchfit._engine.device.device import Device
from batchfit._knobs import Configuration, label
from batchfit._sweep.pure.estimates import EstimateFunction
from batchfit._sweep.pure.events import OnEvent, SweepEvent
from batchfit._sweep.pure.options import Measure
from batchfit.results import FitResult, Trial
from batchfit.results._sweep import Stage


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """How every configuration of a sweep is run; `estimate` None: what a prediction says."""

    batch_size: int | None
    min_size: int = 1
    auto: bool = True
    strategy: str = "guided"
    attempts: int = 5
    budget: int | str | None = None
    tolerance: float = 0.02
    steps: int = 3
    soak_steps: int | None = None
    device: str | int | None = None
    estimate: EstimateFunction | None = None
    measure: Measure | str | None = None

    def of_search(self, start: int | None) -> dict[str, Any]:
        """The options of a search, but for its device; a fixed size is searched for alone."""
        fixed = None if self.auto else self.batch_size
        return {
            "budget": self.budget,
            "min_size": fixed or self.min_size,
            "max_size": self.batch_size,
            "strategy": self.strategy if fixed is None else "bisect",
            "start": start if fixed is None else None,
            "attempts": self.attempts,
            "tolerance": self.tolerance,
            "steps": self.steps,
            "soak_steps": self.soak_steps,
        }


class ListenerRaised(BaseException):
    """Out of the configuration, past whatever takes errors of the user's code for its own."""


@final
@dataclass(slots=True)
class ConfigurationRun:
    """A configuration on its way."""

    configuration: Configuration
    on_event: OnEvent | None
    trials: list[Trial] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)  # fields of the record, as they become known
    stage: Stage = "factory"
    device: Device | None = None
    last_size: int | None = None
    begun_trial: bool = False
    listener_error: BaseException | None = None

    def report(self, kind: Any, **more: Any) -> None:
        if self.on_event is None:
            return
        try:
            self.on_event(SweepEvent(kind=kind, knobs=self.configuration, **more))
        except (Exception, SystemExit) as error:  # noqa: BLE001  it is raised again, outside the configuration
            self.listener_error = error
            raise ListenerRaised from None

    def stepping(self, size: int) -> None:
        """Report the first step of a trial."""
        if not self.begun_trial:
            again = any(one.size == size and one.fits for one in self.trials)
            self.report("trying", size=size, before=self.last_size, again=again)
            self.begun_trial, self.last_size = True, size

    def estimate(self, settings: SweepSettings) -> int:
        """What the user's estimate says of this configuration."""
        assert settings.estimate is not None
        assert settings.batch_size is not None
        estimate: Any = settings.estimate(dict(self.configuration), settings.batch_size)
        if isinstance(estimate, bool) or not isinstance(estimate, int) or estimate < 1:
            raise ValueError(
                f"estimate must return a positive integer at {label(self.configuration)}, not {estimate!r}"
            )
        return estimate

    def keep_fit(self, fit: FitResult, *, find_s: float) -> None:
        """Keep what a search has found, and report the size."""
        self.known.update(
            batch_size_used=fit.batch_size,
            survived_steps=fit.survived_steps,
            stopped_because=fit.stopped_because,
            peak_bytes=fit.peak_bytes,
            budget_bytes=fit.budget_bytes,
            find_s=find_s,
        )
        self.report("using", size=fit.batch_size)

    def on_trial(self, trial: Trial, budget_bytes: int) -> None:
        self.begun_trial = False
        self.trials.append(trial)
        self.known["budget_bytes"] = budget_bytes
        self.report("trial", trial=trial, budget_bytes=budget_bytes)
