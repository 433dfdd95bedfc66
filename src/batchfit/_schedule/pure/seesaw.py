"""Batch sizes instead of a learning-rate decay.

Rules: where the decay would have cut the learning rate by k (since the last change), the batch grows by k.
With the rate cut by k**0.5 there, this is Seesaw (arXiv 2510.14717); with the rate untouched, Smith et al.
(1711.00489). A smooth decay becomes stairs at the points where it has fallen by another `ratio`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

Decay = Literal["cosine", "quarter-cosine"]
DECAYS = ("cosine", "quarter-cosine")


def smooth_points(decay: Decay, *, total: int, ratio: float, most: float) -> Iterator[tuple[int, float]]:
    """(count, growth of the batch) where the decay has fallen by `ratio`, `ratio**2`, ... up to `most`.

    "cosine" falls as (1 + cos(pi t)) / 2 (torch's CosineAnnealingLR), "quarter-cosine" as cos(pi t / 2).
    """
    power = 0
    while True:
        power += 1
        growth = ratio**power
        if growth > most * (1 + 1e-12):
            return
        left = 1 / growth
        share = math.acos(2 * left - 1) / math.pi if decay == "cosine" else 2 * math.acos(left) / math.pi
        at = math.ceil(share * total - 1e-6)  # 600.0000001 by rounding errors is 600
        if at >= total:
            return
        yield at, growth


def cut_points(cuts: Sequence[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    """(count, growth of the batch) for a decay by factors, such as `[(60, 0.2), (120, 0.2)]`."""
    growth = 1.0
    for at, factor in cuts:
        growth /= factor
        yield at, growth
