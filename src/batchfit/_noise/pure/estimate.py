"""The gradient noise scale from squared norms of gradients: an estimate, how sure it is, or why none.

With per-sample gradients of mean G and covariance Sigma, the mean gradient over b samples has an expected
squared norm of |G|^2 + S / b, where S = tr(Sigma). Two means over different numbers of samples give both
unknowns; B_simple = S / |G|^2 (McCandlish et al. 2018, appendix A, here for microbatches of any sizes).

Rules
- Each step gives an unbiased pair (S, |G|^2), and nothing else: no clamping, no ratio. Either of them may
  well be negative in one step. Two averages are kept, and divided when they are read.
- Averages decay per sample, not per step, so a larger batch counts for more, and are corrected for their
  short past. A pair that is not finite is skipped and counted.
- The interval is Fieller's for a ratio of two means: it holds where |G|^2 is close to zero too. Where |G|^2
  is less than three standard errors above zero there is "no estimate", only a lower bound.
- An estimate that is given only when |G|^2 came out large is likely to be too small (the winner's curse). The
  interval therefore allows for the selection: of the estimates that are given, 95 % are covered.
- It covers what sampling does. It knows nothing of a gradient that drifts within the averages' memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from statistics import NormalDist
from typing import Any, Final, final

CONFIDENCE: Final = 0.95
CLEARLY: Final = 3.0  # standard errors that |G|^2 must be above zero
MIN_STEPS: Final = 20
MEMORY_STEPS: Final = 200  # of the first batch's size: the averages' memory where none is given
VERSION: Final = 1  # of the state as JSON


@final
@dataclass(frozen=True, slots=True)
class NoiseObservation:
    """One step's two squared norms, `rate` being what S adds to each: 1 / b for a mean over b samples."""

    small: float
    small_rate: float
    big: float
    big_rate: float
    samples: float

    @property
    def noise(self) -> float:
        """Unbiased for S."""
        return (self.small - self.big) / (self.small_rate - self.big_rate)

    @property
    def signal(self) -> float:
        """Unbiased for |G|^2."""
        return self.big - self.big_rate * self.noise

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.noise) and math.isfinite(self.signal)


def observe(
    sizes: Sequence[float],
    norms: Sequence[float],
    total: float,
    *,
    weights: Sequence[float] | None = None,
) -> NoiseObservation:
    """From the squared norms of all parts of a batch: of its microbatches, or of each rank's batch.

        observe([16, 16, 16, 5], norms, total)

    `norms[i]` is that of the mean gradient over `sizes[i]` samples, `total` that of the batch's gradient.
    `weights`: the part of each in the batch's gradient where that is not its samples (tokens, say). With
    fewer norms than sizes the first ones are meant: `observe(sizes, norms[:1], total)` is the cheap variant,
    as unbiased, and noisier.
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes must name at least two parts of a batch, not {list(sizes)!r}")
    if any(not (math.isfinite(size) and size > 0) for size in sizes):
        raise ValueError(f"sizes must be above 0, not {list(sizes)!r}")
    weights = sizes if weights is None else weights
    if len(weights) != len(sizes) or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights must be one number above 0 a part, not {list(weights)!r}")
    if not 1 <= len(norms) <= len(sizes):
        raise ValueError(f"norms must be 1 to {len(sizes)}, not {len(norms)}")
    whole, seen = math.fsum(weights), math.fsum(weights[: len(norms)])
    parts = [weight / seen for weight in weights[: len(norms)]]
    small = math.fsum(part * norm for part, norm in zip(parts, norms, strict=True))
    small_rate = math.fsum(part / size for part, size in zip(parts, sizes, strict=False))
    big_rate = math.fsum((weight / whole) ** 2 / size for weight, size in zip(weights, sizes, strict=True))
    if not small_rate > big_rate * (1 + 1e-9):
        raise ValueError(f"weights must leave the batch more precise than its parts, not {list(weights)!r}")
    return NoiseObservation(small, small_rate, total, big_rate, math.fsum(sizes))


@final
@dataclass(frozen=True, slots=True)
class NoiseReading:
    """What is known of the noise scale. Printed, it is one line.

    Attributes:
        scale: the noise scale in samples; None where there is no estimate.
        low: lower end of its 95 % interval, in samples.
        high: upper end; None where the interval has none.
        noise: average of the trace of the gradient's covariance (S); may be negative.
        signal: average of the squared norm of the true gradient (|G|^2); may be negative.
        noise_error: standard error of `noise`.
        signal_error: standard error of `signal`.
        steps: steps that were measured.
        samples: samples of these steps.
        effective_steps: how many equal steps would be as much evidence.
        skipped: steps without a finite norm, which do not count.
        reason: why there is no estimate; empty where there is one.
    """

    scale: float | None
    low: float | None
    high: float | None
    noise: float | None
    signal: float | None
    noise_error: float | None
    signal_error: float | None
    steps: int
    samples: float
    effective_steps: float
    skipped: int
    reason: str

    def __str__(self) -> str:
        if self.scale is None:
            least = "" if not self.low else f"; it is at least {_short(self.low)} samples"
            return f"no noise scale: {self.reason}{least}"
        return (
            f"noise scale {_short(self.scale)} samples (95 %: {_short(self.low)} to {_short(self.high)}) "
            f"from {self.steps} steps"
        )


@final
@dataclass(frozen=True, slots=True)
class NoiseState:
    """The two averages and what their errors need; a value, plain numbers all of it.

    A step of b samples has the weight 1 - exp(-b / decay_samples), and all earlier weights shrink by
    exp(-b / decay_samples). `total2` to `total4` are sums of powers of weights; the `square_` fields are
    the centre and the moments of the pairs under squared weights, which is what the variance of a weighted
    mean takes, also where steps differ in how noisy they are.
    """

    decay_samples: float | None = None
    steps: int = 0
    samples: float = 0.0
    skipped: int = 0
    single: int = 0  # steps of one microbatch, which say nothing
    total: float = 0.0
    total2: float = 0.0
    total4: float = 0.0
    noise: float = 0.0
    signal: float = 0.0
    square_noise: float = 0.0
    square_signal: float = 0.0
    square_nn: float = 0.0
    square_ns: float = 0.0
    square_ss: float = 0.0

    def __post_init__(self) -> None:
        decay = self.decay_samples
        if decay is not None and not (math.isfinite(decay) and decay > 0):
            raise ValueError(f"decay_samples must be a number above 0, not {decay!r}")

    def with_step(self, seen: NoiseObservation) -> NoiseState:
        """With one more step."""
        if not seen.is_finite:
            return replace(self, skipped=self.skipped + 1)
        decay = self.decay_samples
        if decay is None:
            decay = MEMORY_STEPS * seen.samples
        kept = math.exp(-seen.samples / decay)
        weight = -math.expm1(-seen.samples / decay)
        total, total2 = kept * self.total + weight, kept**2 * self.total2 + weight**2
        part, part2 = weight / total, weight**2 / total2
        apart_noise, apart_signal = seen.noise - self.square_noise, seen.signal - self.square_signal
        spread = weight**2 * (1 - part2)  # West's update, under squared weights
        return replace(
            self,
            decay_samples=decay,
            steps=self.steps + 1,
            samples=self.samples + seen.samples,
            total=total,
            total2=total2,
            total4=kept**4 * self.total4 + weight**4,
            noise=self.noise + part * (seen.noise - self.noise),
            signal=self.signal + part * (seen.signal - self.signal),
            square_noise=self.square_noise + part2 * apart_noise,
            square_signal=self.square_signal + part2 * apart_signal,
            square_nn=kept**2 * self.square_nn + spread * apart_noise**2,
            square_ns=kept**2 * self.square_ns + spread * apart_noise * apart_signal,
            square_ss=kept**2 * self.square_ss + spread * apart_signal**2,
        )

    def with_single(self) -> NoiseState:
        """With one more step of one microbatch."""
        return replace(self, single=self.single + 1)

    @property
    def effective_steps(self) -> float:
        return self.total**2 / self.total2 if self.total2 else 0.0

    def errors(self) -> tuple[float, float, float]:
        """Variances of the two averages and their covariance: (S, S with |G|^2, |G|^2)."""
        count = self.effective_steps
        if count <= 1:
            return math.inf, 0.0, math.inf
        off_noise, off_signal = self.square_noise - self.noise, self.square_signal - self.signal
        factor = count / (count - 1) / self.total**2
        return (
            factor * (self.square_nn + self.total2 * off_noise**2),
            factor * (self.square_ns + self.total2 * off_noise * off_signal),
            factor * (self.square_ss + self.total2 * off_signal**2),
        )

    def reading(self, *, min_steps: int = MIN_STEPS) -> NoiseReading:
        """The estimate and its interval, or why there is none."""
        freedom = self.total2**2 / self.total4 - 1 if self.total4 else 0.0
        return _reading(
            self.noise, self.signal, self.errors(), freedom, self, self._missing(min_steps, freedom)
        )

    def _missing(self, min_steps: int, freedom: float) -> str:
        """Why nothing can be said so far; "" where something can."""
        if self.steps == 0 and self.single:
            return (
                f"all {self.single} steps had one microbatch, and there is nothing to compare it with: give "
                "Microbatcher a microbatch_size of at most half the batch, or cut the batch in two halves"
            )
        if self.steps == 0 and self.skipped:
            return f"the gradients of all {self.skipped} steps were not finite"
        if self.steps < min_steps:
            return f"{self.steps} of {min_steps} steps so far"
        if freedom < 4:
            return (
                f"decay_samples is {_short(self.decay_samples)}, which remembers about "
                f"{self.effective_steps:.1f} steps: too few for a standard error"
            )
        return ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> NoiseState:
        """What `to_dict` gave; another thing is a ValueError that names the field."""
        if data.get("version") != VERSION:
            raise ValueError(f"version must be {VERSION}, not {data.get('version')!r}")
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = data.get(field.name)
            counts = field.name in ("steps", "skipped", "single")
            right = isinstance(value, int if counts else int | float) and not isinstance(value, bool)
            if not (right or (value is None and field.name == "decay_samples")):
                raise ValueError(f"{field.name} must be a number, not {value!r}")
            if value is not None and not math.isfinite(value):
                raise ValueError(f"{field.name} must be finite, not {value!r}")
            values[field.name] = value
        return cls(**values)


def joined_reading(states: Iterable[NoiseState], *, min_steps: int = MIN_STEPS) -> NoiseReading:
    """One reading from states that saw different samples: those of several ranks.

    Their averages are averaged, and their errors are taken as independent. A state without steps is left
    out. States that all saw one gradient (the reduced one) are not independent: use `observe` with the
    norms of all ranks for those.
    """
    given = list(states)
    if not given:
        raise ValueError("states must hold at least one, not []")
    useful = [state for state in given if state.steps] or given
    least = min(useful, key=lambda state: state.steps)
    count = len(useful)
    noise = math.fsum(state.noise for state in useful) / count
    signal = math.fsum(state.signal for state in useful) / count
    errors = tuple(
        math.fsum(column) / count**2 for column in zip(*(state.errors() for state in useful), strict=True)
    )
    freedoms = [state.total2**2 / state.total4 - 1 if state.total4 else 0.0 for state in useful]
    about = replace(
        least,
        samples=math.fsum(state.samples for state in useful),
        skipped=sum(state.skipped for state in given),
        single=sum(state.single for state in given),
    )
    missing = about._missing(min_steps, min(freedoms))
    return _reading(noise, signal, (errors[0], errors[1], errors[2]), math.fsum(freedoms), about, missing)


def _reading(
    noise: float,
    signal: float,
    errors: tuple[float, float, float],
    freedom: float,
    state: NoiseState,
    missing: str,
) -> NoiseReading:
    answer = NoiseReading(
        scale=None,
        low=None,
        high=None,
        noise=noise if state.steps else None,
        signal=signal if state.steps else None,
        noise_error=None if missing else math.sqrt(errors[0]),
        signal_error=None if missing else math.sqrt(errors[2]),
        steps=state.steps,
        samples=state.samples,
        effective_steps=state.effective_steps,
        skipped=state.skipped,
        reason=missing,
    )
    if missing:
        return answer
    quantile = student(CONFIDENCE, freedom)
    if signal <= CLEARLY * math.sqrt(errors[2]):
        reason = (
            f"the gradient itself ({_short(signal)}) cannot be distinguished from zero in its noise "
            f"(standard error {_short(math.sqrt(errors[2]))}): more steps, a longer memory or a larger batch "
            "would show it"
        )
        return replace(answer, low=fieller(noise, signal, errors, quantile)[0], reason=reason)
    above, below = selected(signal / math.sqrt(errors[2]) if errors[2] else math.inf, quantile)
    low, _ = fieller(noise, signal, errors, above)
    high = None if below is None else fieller(noise, signal, errors, below)[1]
    return replace(answer, scale=max(0.0, noise / signal), low=low, high=high)


def fieller(
    noise: float, signal: float, errors: tuple[float, float, float], quantile: float
) -> tuple[float, float | None]:
    """The ratios noise / signal of at least 0 that are not refuted: (low, high), None for no upper end.

    A ratio q is refuted where noise - q * signal, whose variance is known, is too far from zero.
    """
    var_nn, var_ns, var_ss = (quantile**2 * error for error in errors)
    a, b, c = signal**2 - var_ss, noise * signal - var_ns, noise**2 - var_nn
    root = math.sqrt(max(0.0, b * b - a * c))
    if a > 0 and signal > 0:
        return max(0.0, (b - root) / a), max(0.0, (b + root) / a)
    if c <= 0 or noise <= 0:
        return 0.0, None
    if a < 0:  # the one root above zero; what lies beyond it is not refuted
        return max(0.0, (b - root) / a), None
    # The signal is clearly negative, or just at the border: no ratio above this one is refuted.
    return (c / (2 * b) if a == 0 and b > 0 else 0.0), None


def selected(z: float, quantile: float) -> tuple[float, float | None]:
    """How far above and below an estimate the truth may lie, in errors, where small ones are not reported.

    For an estimate z ~ N(g, 1) that is reported only where it exceeds `CLEARLY`, the limits for g solve
    P(Z > z | Z > CLEARLY, g) = 1 - tail and = tail. Below is None where zero is not excluded. Above is never
    less than one error, although a z at the very border would say so: that far, the formula is not trusted.
    """
    tail = (1 - CONFIDENCE) / 2
    if z > 12 * CLEARLY:
        return quantile, quantile

    def limit(chance: float) -> float:
        low, high = 0.0, z + 4
        for _ in range(40):
            g = (low + high) / 2
            passed = math.erfc((z - g) / math.sqrt(2)) / math.erfc((CLEARLY - g) / math.sqrt(2))
            low, high = (g, high) if passed < chance else (low, g)
        return low

    # The tables of Student's t where those of the normal distribution were used.
    factor = quantile / NormalDist().inv_cdf(1 - tail)
    above = min(quantile, max(1.0, factor * (limit(1 - tail) - z)))
    least = limit(tail)
    return above, None if least <= 0 else max(quantile, factor * (z - least))


def student(confidence: float, freedom: float) -> float:
    """The two-sided quantile of Student's t, by its expansion in 1 / freedom: to 1 % from 4 on."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / freedom**power for power, term in enumerate(terms))


def _short(value: float | None) -> str:
    if value is None:
        return "unbounded"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
