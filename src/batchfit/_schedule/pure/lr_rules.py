"""How the learning rate follows the batch size: a power of the ratio to the size that it was tuned for.

Rules: a rule is a value, and what it says depends on nothing but the ratio, so that it can be applied any
number of times. "none" 1; "linear" r (Goyal et al., SGD); "sqrt" r**0.5 (Adam); "power(0.6)" r**0.6; "seesaw"
r**-0.5: where the learning rate would be cut by k, the batch grows by k and the rate falls by k**0.5 only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from batchfit._units import parse_count

_EXPONENTS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5, "seesaw": -0.5}
_POWER = re.compile(r"power\(\s*([+-]?[0-9]*\.?[0-9]+)\s*\)\Z")
_DECAY_FORMS = "decay must be 'cosine', 'quarter-cosine' or cuts such as {{60: 0.2}}, not {!r}"
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


def growth_points(
    decay: object, *, initial: int, total: int | str | None, ratio: Any, most: int | None
) -> list[tuple[int, float]]:
    """Counts, and by what the batch has grown there, in place of a decay by name or by cuts."""
    if isinstance(decay, str):
        return _smooth(initial, decay, total, ratio, most)
    if isinstance(decay, Mapping):
        return list(cut_points(_cuts(decay)))
    raise ValueError(_DECAY_FORMS.format(decay))


def _smooth(
    initial: int, decay: str, total: int | str | None, ratio: Any, most: int | None
) -> list[tuple[int, float]]:
    if decay not in DECAYS:
        raise ValueError(_DECAY_FORMS.format(decay))
    if total is None:
        raise ValueError(f"total must be given: over how many counts the {decay} falls, not None")
    if not isinstance(ratio, int | float) or not 1 < ratio < math.inf:
        raise ValueError(f"ratio must be more than 1, not {ratio!r}")
    # Without a limit the last stairs of a cosine ask for batches of any size.
    growth = 64.0 if most is None else most / initial
    counts = parse_count(total, name="total", at_least=1)
    return list(smooth_points(decay, total=counts, ratio=ratio, most=growth))  # type: ignore[arg-type]


def _cuts(decay: Mapping[Any, Any]) -> list[tuple[int, float]]:
    cuts = []
    for at, factor in decay.items():
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < 1:
            raise ValueError(f"decay must cut by factors between 0 and 1, not {factor!r} at {at!r}")
        cuts.append((parse_count(at, name="the count of a cut", at_least=1), float(factor)))
    return cuts
