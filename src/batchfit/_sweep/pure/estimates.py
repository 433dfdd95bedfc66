"""The size to begin with for a configuration: tables and formulas, one for each knob that matters.

Rules:
- An estimate is where a search begins, never what it answers: a wrong one costs trials, not the result.
- Each knob gives a factor, the factors are multiplied, and the size is that share of `batch_size`, rounded
  down, never above it and never below 1.
- A formula is arithmetic over the configuration's knobs; nothing else can be written in one.

The three that come with batchfit are those of experiments with vision-language models (image crops, experts
per token, active blocks of a transformer).
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final

from batchfit._knobs import Configuration, label
from batchfit._sweep.pure.grid import GridError, did_you_mean

EstimateFunction = Callable[[Configuration, int], int]


class Factor(Protocol):
    """The share of the full batch size that a configuration can have, as far as one knob goes."""

    def __call__(self, value: Any, configuration: Configuration) -> float: ...


@final
@dataclass(frozen=True, slots=True)
class EstimateTable:
    """`steps` are (largest value, factor), from small to large; beyond the last one it is `otherwise`."""

    steps: tuple[tuple[float, float], ...]
    otherwise: float

    def __call__(self, value: Any, configuration: Configuration) -> float:
        number = _number(value)
        return next((factor for largest, factor in self.steps if number <= largest), self.otherwise)


@final
@dataclass(frozen=True, slots=True)
class Share:
    """The value's share of a total, such as the active ones of so many blocks."""

    total: float

    def __call__(self, value: Any, configuration: Configuration) -> float:
        return _number(value) / self.total


@final
@dataclass(frozen=True, slots=True)
class Formula:
    """Arithmetic over the knobs: "512 / prompt", "min(1, 8 / max_crops)"."""

    text: str

    def __call__(self, value: Any, configuration: Configuration) -> float:
        return float(_value_of(ast.parse(self.text, mode="eval").body, configuration, self.text))


@final
@dataclass(frozen=True, slots=True)
class OfValue:
    """A function of the knob's value alone."""

    function: Callable[[Any], float]

    def __call__(self, value: Any, configuration: Configuration) -> float:
        return float(self.function(value))


CROPS = EstimateTable(((2, 1.0), (4, 0.8), (6, 0.6), (8, 0.5), (10, 0.4), (12, 0.3)), otherwise=0.25)
TOP_K = EstimateTable(((2, 1.0), (4, 0.9), (8, 0.8)), otherwise=0.7)
TABLES: dict[str, EstimateTable] = {"crops": CROPS, "top_k": TOP_K}
# What else can be asked for by name, and what it needs.
BLOCKS = "blocks"


@final
@dataclass(frozen=True, slots=True)
class Estimate:
    """Factors by knob, combined."""

    factors: Mapping[str, Factor]

    def check(self, configuration: Configuration) -> None:
        """Refuse a configuration for which a table or a formula has no factor; the place is the knob's."""
        for name, factor in self.factors.items():
            if isinstance(factor, OfValue):
                continue  # the user's own code: it is called where a configuration is run, and not before
            try:
                Estimate({name: factor})(configuration, 1)
            except ValueError as error:
                raise GridError(str(error), "estimate", name) from None

    def __call__(self, configuration: Configuration, batch_size: int) -> int:
        scale = 1.0
        for name, factor in self.factors.items():
            found = factor(configuration[name], configuration)
            if not (math.isfinite(found) and found > 0):
                raise ValueError(
                    f"the estimate for {name!r} must be a positive factor at {label(configuration)}, "
                    f"not {found!r}"
                )
            scale *= found
        return max(1, min(int(batch_size * scale), batch_size))


def estimate_of(
    spec: Mapping[str, Any], knobs: tuple[str, ...], configurations: Iterable[Configuration] = ()
) -> Estimate:
    """The estimate that a mapping of knobs describes, and that has a value for these configurations.

    A knob's entry is the name of a table ("crops", "top_k"), `{"blocks": 24}`, a table of one's own from
    largest values to factors with `"else"` for what is beyond (`{2: 1.0, 8: 0.5, "else": 0.25}`), a formula
    (`"512 / prompt"`) or a function of the value.

    >>> estimate_of({"max_crops": "crops"}, ("max_crops",))({"max_crops": 12}, 64)
    19
    """
    if not spec:
        raise GridError("estimate must name a knob or be left out, not {}", "estimate")
    factors = {}
    for name, one in spec.items():
        if name not in knobs:
            raise GridError(
                f"estimate must name knobs ({', '.join(knobs)}), not {name!r}"
                f"{did_you_mean(str(name), knobs)}",
                *("estimate", str(name)),
            )
        factors[name] = _factor(name, one, knobs)
    estimate = Estimate(factors)
    for configuration in configurations:
        estimate.check(configuration)
    return estimate


def _factor(name: str, spec: Any, knobs: tuple[str, ...]) -> Factor:
    if isinstance(spec, str):
        if spec in TABLES:
            return TABLES[spec]
        if spec == BLOCKS:
            raise GridError(
                f"estimate for {name!r} must say of how many blocks, {{'blocks': 24}}, not 'blocks'",
                *("estimate", name),
            )
        _check_formula(name, spec, knobs)
        return Formula(spec)
    if isinstance(spec, Mapping):
        if set(spec) == {BLOCKS}:
            total = spec[BLOCKS]
            if not _is_number(total) or total <= 0:
                raise GridError(
                    f"blocks must be how many there are in all, not {total!r}", "estimate", name, BLOCKS
                )
            return Share(total)
        return _table(name, spec)
    if callable(spec):
        return OfValue(spec)
    raise GridError(
        f"estimate for {name!r} must be one of {', '.join(TABLES)}, {{'blocks': n}}, a table, a formula or a "
        f"function, not {spec!r:.80}",
        *("estimate", name),
    )


def _table(name: str, spec: Mapping[Any, Any]) -> EstimateTable:
    steps = {}
    for largest, factor in spec.items():
        if not _is_number(factor) or not 0 < factor < math.inf:
            raise GridError(
                f"a factor for {name!r} must be a positive number, not {factor!r}",
                *("estimate", name, str(largest)),
            )
        if largest == "else":
            continue
        try:
            steps[float(largest)] = float(factor)
        except (TypeError, ValueError):
            raise GridError(
                f"a table for {name!r} must go from largest values to factors, with 'else' for the rest, "
                f"not {largest!r}",
                *("estimate", name, str(largest)),
            ) from None
    if "else" not in spec:
        raise GridError(
            f"a table for {name!r} must say 'else' for what is beyond its last value, not end there",
            *("estimate", name),
        )
    return EstimateTable(tuple(sorted(steps.items())), float(spec["else"]))


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "sqrt": math.sqrt}
_LONGEST_FORMULA = 200


def _check_formula(name: str, text: str, knobs: tuple[str, ...]) -> None:
    def wrong(why: str) -> GridError:
        return GridError(
            f"estimate for {name!r} must be one of {', '.join(TABLES)} or arithmetic over the knobs "
            f"({', '.join(knobs)}), not {text!r:.80}: {why}",
            *("estimate", name),
        )

    if len(text) > _LONGEST_FORMULA:
        raise wrong(f"it is longer than {_LONGEST_FORMULA} characters")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        raise wrong("it cannot be read") from None
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in knobs and id(node) not in called:
            raise wrong(f"{node.id!r} is no knob{did_you_mean(node.id, (*knobs, *TABLES))}")
        if isinstance(node, ast.Call) and not (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        ):
            raise wrong(f"it may call {', '.join(_FUNCTIONS)} only")
        fine = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Name, ast.Load, *_OPERATORS)
        if not isinstance(node, fine) and not (isinstance(node, ast.Constant) and _is_number(node.value)):
            raise wrong(f"{type(node).__name__} is not arithmetic")


def _value_of(node: ast.AST, configuration: Configuration, text: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return _number(configuration[node.id])
    try:
        if isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Name)
            return _FUNCTIONS[node.func.id](*(_value_of(one, configuration, text) for one in node.args))
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](_value_of(node.operand, configuration, text))
        assert isinstance(node, ast.BinOp)
        left, right = (_value_of(one, configuration, text) for one in (node.left, node.right))
        if isinstance(node.op, ast.Pow) and abs(right) > 16:
            raise ValueError("its power is above 16")
        return _OPERATORS[type(node.op)](left, right)
    except (ArithmeticError, ValueError, TypeError) as error:
        raise ValueError(
            f"the estimate {text!r} must have a value at {label(configuration)}: {error}"
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float:
    if not _is_number(value):
        raise ValueError(f"an estimate must be made from numbers, not {value!r}")
    number: float = value
    return number
