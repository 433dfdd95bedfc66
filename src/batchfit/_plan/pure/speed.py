"""How fast one setting would be beside another, from what a step computes and moves. Relative figures only.

Rules:
- A step takes as long as its products at the GPU's peak, and as long as its memory traffic at the GPU's
  bandwidth: the sum of both, since eager PyTorch overlaps little of them.
- Both peaks are of data sheets (dense bf16, without sparsity). No real step reaches them, so no seconds are
  said: only how much slower a row is than the best one beside it.
- A GPU that is not in the table has no speed, rather than a guessed one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import final

from batchfit._engine.allocator.footprint import STATE, Footprint

# Each byte that an operation makes is written once and read about twice.
_PASSES_OVER_ACTIVATIONS = 3
# In forward, in backward, and in the recomputation where there is one: the last is left out.
_PASSES_OVER_WEIGHTS = 2
# An optimizer reads weights, gradients and state, and writes weights and state.
_PASSES_OF_OPTIMIZER = 2
# Name -> dense bf16 TFLOP/s (fp16 where there is no bf16) and GB/s.
PEAKS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "b200": (2250, 8000),
        "gb200": (2250, 8000),
        "h200": (989, 4800),
        "h200-nvl": (835, 4800),
        "h100": (989, 3350),
        "h100-pcie": (756, 2000),
        "h100-nvl": (835, 3938),
        "h800": (989, 3350),
        "h20": (148, 4000),
        "gh200": (989, 4000),
        "a100-80gb": (312, 2039),
        "a100-40gb": (312, 1555),
        "a800-80gb": (312, 2039),
        "a30": (165, 933),
        "l40s": (362, 864),
        "l40": (181, 864),
        "l4": (121, 300),
        "a40": (150, 696),
        "a10": (125, 600),
        "a10g": (70, 600),
        "t4": (65, 320),
        "v100-32gb": (125, 900),
        "v100-16gb": (125, 900),
        "rtx6000-ada": (364, 960),
        "a6000": (155, 768),
        "a5000": (111, 768),
        "a4000": (77, 448),
        "rtx5090": (210, 1792),
        "rtx5080": (113, 960),
        "rtx4090": (165, 1008),
        "rtx4080": (97, 717),
        "rtx4080-super": (104, 736),
        "rtx4070-ti": (80, 504),
        "rtx4070": (58, 504),
        "rtx4060-ti-16gb": (44, 288),
        "rtx4060": (30, 272),
        "rtx3090": (71, 936),
        "rtx3090-ti": (80, 1008),
        "rtx3080-10gb": (60, 760),
        "rtx3060": (25, 360),
        "rtx2080-ti": (57, 616),
    }
)


@final
@dataclass(frozen=True, slots=True)
class StepCost:
    """What one step of a setting computes and moves."""

    flops_per_sample: float
    bytes_per_sample: float
    bytes_per_microbatch: float
    bytes_per_step: float

    @classmethod
    def of(cls, footprint: Footprint, flops_per_sample: float) -> StepCost:
        """Of a traced step, whose operations are counted apart."""
        begin = footprint.step_ends[-2] if len(footprint.step_ends) > 1 else footprint.begins
        made = [event for event in footprint.events[begin : footprint.step_ends[-1]] if event >= 0]
        passing = [
            one
            for one in made
            if footprint.origins[one].kind not in STATE and footprint.origins[one].phase != "optimizer"
        ]
        state = dict.fromkeys(STATE, 0.0)
        for block, origin in enumerate(footprint.origins):
            if origin.kind in state:
                state[origin.kind] += footprint.fixed[block]
        steps = max(len(footprint.step_ends), 1)
        gradients = state["gradients"] / steps  # each step makes them again
        learned = min(gradients, state["weights"])
        return cls(
            flops_per_sample,
            _PASSES_OVER_ACTIVATIONS * sum(footprint.per_sample[one] for one in passing),
            _PASSES_OVER_ACTIVATIONS * max(sum(footprint.fixed[one] for one in passing), 0.0)
            + _PASSES_OVER_WEIGHTS * state["weights"],
            _PASSES_OF_OPTIMIZER * (learned + gradients + state["optimizer"]),
        )

    def samples_per_unit(
        self, gpu: str, size: int, *, count: int = 1, global_batch: int | None = None
    ) -> float:
        """Samples per unit of time on `count` GPUs; 0 where the GPU's peaks are not known or nothing fits."""
        if gpu not in PEAKS or size < 1:
            return 0.0
        tflops, gigabytes = PEAKS[gpu]
        passes = 1 if global_batch is None else max(1, ceil(global_batch / (size * count)))
        samples = size * count * passes if global_batch is None else global_batch
        each = samples / count / passes  # samples of one forward and backward on one GPU
        computing = each * self.flops_per_sample / (tflops * 1e12)
        moving = (each * self.bytes_per_sample + self.bytes_per_microbatch) / (gigabytes * 1e9)
        step = self.bytes_per_step / (gigabytes * 1e9)
        return samples / (passes * (computing + moving) + step)


@final
@dataclass(frozen=True, slots=True)
class Cell:
    """What fits of one setting on one GPU, and what its step costs there."""

    batch_size: int
    peak_bytes: int
    cost: StepCost | None = None
