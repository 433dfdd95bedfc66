"""How the learning rate follows the batch size: a power of the ratio to the size that it was tuned for.

Rules: a rule is a value, and what it says depends on nothing but the ratio, so that it can be applied any
number of times. "none" 1; "linear" r (Goyal et al., SGD); "sqrt" r**0.5 (Adam); "power(0.6)" r**0.6; "seesaw"
r**-0.5: where the learning rate would be cut by k, the batch grows by k and the rate falls by k**0.5 only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

_EXPONENTS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5, "seesaw": -0.5}
_POWER = re.compile(r"power\(\s*([+-]?[0-9]*\.?[0-9]+)\s*\)\Z")
FORMS = "'none', 'linear', 'sqrt', 'seesaw' or 'power(0.6)'"


@final
@dataclass(frozen=True, slots=True)
class LRRule:
    """The factor of the learning rate is `ratio ** exponent`."""

    name: str
    exponent: float

    @classmethod
    def parse(cls, rule: object, *, name: str = "lr") -> LRRule:
        """The rule that a text names."""
        if isinstance(rule, LRRule):
            return rule
        if isinstance(rule, str):
            text = rule.strip().lower()
            if text in _EXPONENTS:
                return cls(text, _EXPONENTS[text])
            match = _POWER.match(text)
            if match and math.isfinite(float(match.group(1))):
                return cls(text, float(match.group(1)))
        raise ValueError(f"{name} must be {FORMS}, not {rule!r}")

    def factor(self, ratio: float) -> float:
        """What the learning rate is multiplied with at `ratio` times the initial batch size."""
        return float(ratio**self.exponent)


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
