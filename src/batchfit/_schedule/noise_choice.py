"""The batch size that the gradient noise asks for, checked every few steps.

Rules: the decision is `_noise/pure/goodput.py`'s; here it is asked, with the numbers of this run, and all
ranks go on with the same answer. The noise is checked every `CHECK_EVERY` steps, and once per step. A
reading to which nothing was added since the last check changes nothing: it is of another time, and of another
size. Where none is measured at all, one warning says so: the size would never change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from batchfit._engine.distributed.ranks import Ranks
from batchfit._loader.pure.progress import Progress
from batchfit._noise.pure.throughput import Speed
from batchfit._schedule.pure.bound_plan import BoundPlan
from batchfit.results import ThroughputProfile
from batchfit.schedules import NoiseBatchSizeConfig

log = logging.getLogger("batchfit")

CHECK_EVERY: Final = 10
SAY_AFTER: Final = 50  # steps of which none was measured


@final
class NoiseChoice:
    """Chooses among the initial size times powers of the ratio."""

    def __init__(
        self,
        config: NoiseBatchSizeConfig,
        limits: BoundPlan,
        noise: Any,
        throughput: Callable[[int], float] | ThroughputProfile | None,
        *,
        microbatch_size: int | None = None,
    ) -> None:
        initial, world_size, multiple_of = limits.initial_batch_size, limits.world_size, limits.multiple
        if not callable(getattr(noise, "reading", None)):
            raise TypeError(f"noise must be a GradientNoise for a NoiseBatchSizeConfig, not {noise!r:.80}")
        if isinstance(throughput, ThroughputProfile):
            timed = [(point.size, point.step_s) for point in throughput.points]
            throughput = Speed.of(timed, world_size=world_size, microbatch_size=microbatch_size)
        if throughput is not None and not callable(throughput):
            raise TypeError(
                "throughput must be a ThroughputProfile or a callable, throughput(size) -> samples/s, "
                f"not {throughput!r}"
            )
        if config.min_batch_size is not None and config.min_batch_size > initial:
            raise ValueError(
                f"min_batch_size must be at most the initial batch size {initial}, "
                f"not {config.min_batch_size}"
            )
        if initial % multiple_of:
            raise ValueError(f"initial_batch_size must be a multiple of {multiple_of}, not {initial}")
        self._config = config
        sizes = config.candidates(initial, limits.cap)
        self._candidates = [size for size in sizes if size % multiple_of == 0 and size >= world_size]
        self._cap = limits.cap
        self._noise = noise
        self._throughput = throughput
        self._changed_at: int | None = None
        self._checked_at = -1
        self._measured: int | None = None  # steps that the last reading was made from
        self._measured_at = 0  # when that number last changed
        self._said = False

    def choose(self, size: int, at: Progress) -> tuple[int, str]:
        """(the size from now on, why); no reason where nobody looked."""
        if self._checked_at >= 0 and 0 <= at.step - self._checked_at < CHECK_EVERY:
            return size, ""
        self._checked_at = at.step
        from batchfit._noise.pure.goodput import DecideSettings, decide

        config = self._config
        settings = DecideSettings(
            ratio=config.ratio,
            hysteresis=config.hysteresis,
            min_steps=config.min_steps,
            target=config.target,
            can_shrink=config.can_shrink,
            use_bound=config.use_bound,
        )
        reading = self._noise.reading()
        is_new = reading.steps != self._measured
        if is_new:
            self._measured, self._measured_at = reading.steps, at.step
        since = None if self._changed_at is None else max(at.step - self._changed_at, 0)
        decision = decide(
            reading if is_new else None,
            size,
            self._candidates,
            self._throughput,
            settings,
            steps_since_change=since,
            largest=self._cap,
        )
        # Ranks measure for themselves: the smallest of their answers is one that each of them can bear.
        agreed = Ranks.current().minimum(decision.size, doing="the batch size that the noise asks for")
        reason = decision.reason if agreed == decision.size else f"another rank decided for {agreed}"
        if not is_new and agreed == size:
            reason = f"no step was measured since step {self._measured_at}: {reading.reason or reading}"
            self._say_blind(size, at.step)
        if agreed != size:
            self._changed_at = at.step
        return agreed, reason

    def _say_blind(self, size: int, step: int) -> None:
        if self._said or step - self._measured_at < SAY_AFTER or not Ranks.current().is_main:
            return
        self._said = True
        log.warning(
            "%s",
            f"the noise was not measured in {step - self._measured_at} steps, and the batch size stays "
            f"{size}. A batch must come in two microbatches or more, and be reported: "
            "Microbatcher(model, noise=noise, microbatch_size=...) with at most half of what a rank gets, "
            "or noise.microbatch(...) and noise.total()",
        )

    def state_dict(self) -> dict[str, Any]:
        """When it last changed the size."""
        return {"changed_at": self._changed_at, "looked_at": self._checked_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._changed_at, self._checked_at = state["changed_at"], state["looked_at"]
