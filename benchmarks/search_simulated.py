"""How many trials and failures a search costs, and how close it comes: 400 simulated maxima, ours and the peers.

    python benchmarks/search_simulated.py

Rules: every algorithm meets the same 400 maxima in the same run. A size fits if and only if it is at most the
maximum; what is read is the peak of the variant, with noise that depends on the size. All trials count, soaks
included; an answer above the maximum is unsafe and counts as 0 %. Peers marked [real] are the packages' own
code with an injected OOM (their garbage collection is stubbed: only sizes are counted); [port] is written here
from a description of what the package does. A package that is not installed is reported as absent.
Writes results/search_simulated.json and, from the same numbers, results/search_simulated_cpu_<date>.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import hashlib
import importlib.metadata
import io
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchfit._decide.search import Ask, Search, Told, run

BUDGET = 24 * 2**30
MAXIMA = [int(8192 ** ((i + 0.5) / 400)) for i in range(400)]
NOISE = 0.03
GOAL = "default: mean <= 5 trials, <= 0.3 OOMs, >= 98 %; tolerance=0: exact, mean <= 7 trials; worst case <= 24"


# --- the device ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """The share of the budget that a size takes, as `max over lines of (fixed + slope * size)`, plus a step."""

    name: str
    held: float
    lines: tuple[tuple[float, float], ...]  # (fixed, relative size at which the line meets the next, 1 = the end)
    noise: float = 0.0
    step: float = 0.0
    step_at: int = 32

    def share(self, size: int, maximum: int) -> float:
        """Scaled so that the budget ends between `maximum` and the next size."""
        if self.step and maximum < self.step_at:
            # The step may be what ends it.
            end, rise = maximum + unit("room", maximum), 0.0
        else:
            end, rise = maximum + unit("room", maximum), self.step * (size >= self.step_at)
        top = 1 - (self.step if maximum >= self.step_at else 0.0)
        share, fixed_before, slope = 0.0, 0.0, 0.0
        last_fixed = self.lines[-1][0]
        slope = (top - last_fixed) / end
        share = last_fixed + slope * size
        for (fixed, meets), (fixed_before, _) in zip(self.lines[-2::-1], self.lines[:0:-1], strict=True):
            slope -= (fixed - fixed_before) / (meets * end)
            share = max(share, fixed + max(0.0, slope) * size)
        return share + rise

    def reading(self, size: int, maximum: int, *, held: bool) -> dict[str, int]:
        """What the device reports for a trial of `size`."""
        wobble = 1 + self.noise * (2 * unit("noise", maximum, size) - 1)
        read = {"allocated_bytes": round(BUDGET * self.share(size, maximum) * wobble)}
        return {**read, "held_bytes": round(BUDGET * self.held)} if held else read


def unit(*of: object) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    digest = hashlib.blake2b("/".join(map(str, of)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
