"""Predictions from a trace: the peak at a size, the largest size that fits, where a search should begin.

Rules:
- A trace shows what each operation allocates; a replay of the caching allocator says what fits.
- The margin is stated and applied to the budget: the smaller, the more was measured.
- A search needs no prediction: where there is none, or none that a real run bears out, it measures only.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from batchfit._engine.allocator.caching import AllocatorSettings
from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.allocator.replay import Simulation, largest, simulate
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.device.tensors import own_bytes, tensors_in
from batchfit._engine.torch_private.allocator import settings_text
from batchfit._engine.trace.trace import uncollected
from batchfit._engine.trace.workload import TracedWorkload, trace_source
from batchfit.workload import Workload

log = logging.getLogger("batchfit")

# The share of the budget that is left free, by what is known.
MARGINS = {"no GPU": 0.02, "GPU, not run": 0.015, "calibrated": 0.01}
# Where cuDNN's recurrent layers run: what they work with is known to a tenth of it only.
_RECURRENT_MARGIN = 0.05
# Of generation that no lines fit: its end is ragged, and only lines are replayed often enough to see that.
_RAGGED_MARGIN = 0.08
WORKSPACE_BYTES = 66 * 2**20  # and what cuBLAS takes at most
Basis = Literal["no GPU", "GPU, not run", "calibrated"]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Answers for any size, from a trace and what a calibration added."""

    traced: TracedWorkload
    rules: AllocatorSettings
    residual: tuple[float, float]

    def run(self, size: int, capacity_bytes: int | None, *, bare: bool = False) -> Simulation:
        """A replay of `size`, under a capacity or without; `bare`: without what kernels can do without."""
        footprint = self.traced.at(size)
        return simulate(
            footprint.bare if bare else footprint,
            size,
            capacity_bytes=capacity_bytes,
            rules=self.rules,
            extra_bytes=max(0.0, self.residual[0] + self.residual[1] * size),
            may_retry=self.traced.may_retry,
        )

    def peak(self, size: int) -> int:
        """Live bytes at the highest moment, in the allocator's blocks."""
        return self.run(size, None).peak_allocated_bytes

    def largest(self, capacity_bytes: int, most: int | None) -> Simulation | None:
        """The largest size that is sustained under a capacity."""
        if self.traced.footprint is not None:
            # Replays make blocks by the ten thousand, a few MB, and a collection that these set off visits
            # the whole program: with transformers loaded it takes longer than all the replays.
            with uncollected():
                return largest(
                    self.traced.footprint,
                    capacity_bytes=capacity_bytes,
                    rules=self.rules,
                    extra=self.residual,
                    most=most,
                    may_retry=self.traced.may_retry,
                )
        return self._by_single_traces(capacity_bytes, most)

    def largest_of(self, budget_bytes: int, margin: float, most: int | None) -> Simulation | None:
        """The largest size that is sustained in a budget less its margin, and none that all of it would not.

        With a larger capacity memory is fragmented differently: 293 samples of a RegNet lasted in 98 % of
        16 GiB by the replay, and only 288 in 100 %; on the GPU 292 did.
        """
        capacity_bytes = round(budget_bytes * (1 - margin))
        found = self.largest(capacity_bytes, most)
        if not margin or found is None or self.traced.footprint is None:
            return found
        in_all = self.largest(budget_bytes, most)
        if in_all is None or in_all.size >= found.size:
            return found
        return self.largest(capacity_bytes, in_all.size)

    def _by_single_traces(self, capacity_bytes: int, most: int | None) -> Simulation | None:
        """Doubling and halving, with a trace for each size: for steps that no lines fit."""
        low, best, high = 0, None, 1
        while most is None or high <= most:
            found = self.run(high, capacity_bytes)
            if not found.sustained or high >= 2**20:
                break
            low, best, high = high, found, high * 2
        top = high if most is None else min(high, most + 1)
        while top - low > max(1, low // 50):
            middle = (low + top) // 2
            found = self.run(middle, capacity_bytes)
            if found.sustained:
                low, best = middle, found
            else:
                top = middle
        return best


@dataclass(frozen=True, slots=True)
class Oracles:
    """Answers for several budgets: the first oracle's, and those of budgets that end far below it."""

    all: list[Oracle]

    def largest(self, budget_bytes: int, margin: float, most: int | None) -> Simulation | None:
        """The largest size under a budget less its margin, as if that budget were the only one."""
        whole = self.all[0]
        found = whole.largest_of(budget_bytes, margin, most)
        traced = whole.traced
        if traced.footprint is None or not traced.is_off_at(0 if found is None else found.size, budget_bytes):
            return found
        again = trace_source(traced.source, budget_bytes=budget_bytes, most=most, small=traced.small)
        self.all.append(replace(whole, traced=again))
        return self.all[-1].largest_of(budget_bytes, margin, most)

    def of(self, size: int) -> Oracle:
        """The one that was traced nearest to `size`: the smallest that reaches it."""
        reach = [one for one in self.all if one.traced.footprint is not None and one.traced.sizes[-1] >= size]
        return min(reach, key=lambda one: one.traced.sizes[-1], default=self.all[0])


def margin_of(traced: TracedWorkload, basis: Basis) -> float:
    """The share of the budget to leave free."""
    if traced.may_retry and traced.footprint is None:
        return _RAGGED_MARGIN
    return _RECURRENT_MARGIN if is_recurrent(traced) else MARGINS[basis]


def is_recurrent(traced: TracedWorkload) -> bool:
    """Whether cuDNN's recurrent layers run."""
    footprint = traced.footprint
    return footprint is not None and any("_cudnn_rnn" in one.operation for one in footprint.origins)


def held_beside(parts: tuple[Any, ...], gpu: Gpu) -> tuple[int, int]:
    """Bytes that the program holds on the workload's GPU besides the workload's own state: known, and unsure.

    `parts` are as the trace has them: a teacher that nobody declared is among them. What cuBLAS has taken
    already cannot be distinguished from the rest, and a trace counts it: it is subtracted. Where more is held
    than that, it is unsure how much of it this was.
    """
    device = next((one.device for one in tensors_in(parts) if one.device.type == "cuda"), None)
    if device is None:
        return 0, 0
    # As it was asked for: what blocks are rounded up by is some hundred MiB beside weights of 70 GiB.
    asked = int(torch.cuda.memory_stats(device).get("requested_bytes.all.current", 0))
    unsure = 2 * gpu.blas_bytes + gpu.blas_lt_bytes
    known = asked - own_bytes(parts, on=device) - unsure
    return (known, unsure) if known > 0 else (0, 0)


def default_budget(target: Gpu | None, on_gpu: Workload | None) -> int | None:
    """All of the GPU that is named, or what is free on the one that is here; None without either."""
    if target is not None:
        return target.usable_bytes
    return None if on_gpu is None else device_to_run(on_gpu._held).budget_bytes()


def allocator_rules(expandable_segments: bool | None = None, *, capped: bool = False) -> AllocatorSettings:
    """The environment's allocator settings with what is asked for; `capped` as in `AllocatorSettings`."""
    rules = AllocatorSettings.from_environment(settings_text())
    if expandable_segments is None:
        expandable_segments = rules.expandable_segments
    return replace(rules, expandable_segments=expandable_segments, capped=rules.capped or capped)


def allocator_caveats(rules: AllocatorSettings) -> list[str]:
    """How the allocator is modelled, where that was compared with little on a GPU; what is not modelled."""
    found = []
    if rules.not_replayed:
        keys = ", ".join(rules.not_replayed)
        found.append(f"allocator settings: {keys} not replayed, and another size may fit with that")
    if rules.expandable_segments:
        end = (
            "under a memory fraction, where torch asks for room for the whole of a request"
            if rules.capped
            else "for the GPU's own memory; under set_per_process_memory_fraction less may fit"
        )
        replayed = "replayed by the allocator's source (measured: five models, H200)"
        found.append(f"expandable segments: {replayed}, {end}")
    return found
