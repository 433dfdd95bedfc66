"""How the learning rate follows the batch size: a power of the ratio to the size that it was tuned for.

Rules: a rule is a value, and what it says depends on nothing but the ratio, so that it can be applied any
number of times. "none" 1; "linear" r (Goyal et al., SGD); "sqrt" r**0.5 (Adam); "power(0.6)" r**0.6; "seesaw"
r**-0.5: where the learning rate would be cut by k, the batch grows by k and the rate falls by k**0.5 only.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import final

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
