"""Finds a model's equal layers, and the shallow models whose traces stand for the whole one.

Rules:
- A shallow model is the same configuration with fewer layers. It stands for the whole one only if each of
  its layers is like the whole model's of the same number: the same modules, plain attributes and shapes of
  parameters, seen on the meta device. An attribute that is the layer's own number does not count.
- Layers may come in turns (every second one with a sliding window), and the first ones may differ (dense
  before experts): a period is left out as a whole.
- Where that cannot be said, or would save little, there are no depths, and the whole model is traced.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import nn

from batchfit._engine.sharding.model_blocks import repeated_blocks
from batchfit._plan.models import build
from batchfit._plan.pure.model_shape import ModelShape
from batchfit.errors import TargetError

_FIELDS: Final = (  # of a configuration: how many layers there are
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_LONGEST_PERIOD: Final = 8
_LONGEST_PREFIX: Final = 4
_WORTH: Final = 0.8  # of what tracing the whole model takes
_STEPS_OF_WHOLE: Final = 5  # that `trace_source` traces of a model, as a rule
_Signature = tuple[Hashable, ...]


@final
@dataclass(frozen=True, slots=True)
class Depths:
    """Three depths, one period apart, and how many periods the whole has more than the middle one."""

    shallow: ModelShape
    middle: ModelShape
    deep: ModelShape
    more: int


@final
class Layers:
    """The layers of one model, looked at once."""

    def __init__(self, shape: ModelShape) -> None:
        self._shape = shape
        counts = {shape.config[one] for one in _FIELDS if isinstance(shape.config.get(one), int)}
        self._count = counts.pop() if len(counts) == 1 else 0
        self._signatures: dict[int, list[list[_Signature]]] = {}

    def depths(self, period: int) -> list[Depths]:
        """Depths to try, the cheapest first; settings treat the layers of a `period` in turns."""
        if not self._count:
            return []
        whole = self._of(self._count)
        if not whole or any(len(one) != self._count for one in whole):
            return []
        found = (
            (math.lcm(period, turn), prefix)
            for turn in range(1, _LONGEST_PERIOD + 1)
            for prefix in range(_LONGEST_PREFIX + 1)
            if all(_comes_again(one, turn, prefix) for one in whole)
        )
        turn, prefix = next(found, (0, 0))
        if not turn:
            return []
        first = max(2, prefix + 1)
        first += (self._count - first) % turn
        return [one for base in (first, first + turn) if (one := self._depths(base, turn)) is not None]

    def _depths(self, base: int, turn: int) -> Depths | None:
        counts = [base, base + turn, base + 2 * turn]
        # Two steps of each at one size; of the middle one, two steps at another, and one at two more.
        traced = 2 * sum(counts) + 4 * counts[1]
        if traced > _WORTH * _STEPS_OF_WHOLE * self._count:
            return None
        whole = self._of(self._count)
        for count in counts:
            if self._of(count) != [one[:count] for one in whole]:
                return None
        shallow, middle, deep = (self._with(count) for count in counts)
        return Depths(shallow, middle, deep, (self._count - counts[1]) // turn)

    def _of(self, count: int) -> list[list[_Signature]]:
        """The signature of each layer of a model with so many, for each stack of layers."""
        if count not in self._signatures:
            try:
                model = build(self._with(count), dtype=torch.bfloat16)
            except TargetError:  # of the whole model it is said where that is traced
                self._signatures[count] = []
            else:
                self._signatures[count] = [_signatures(one.blocks) for one in repeated_blocks(model)]
        return self._signatures[count]

    def _with(self, count: int) -> ModelShape:
        config = dict(self._shape.config)
        for name, value in config.items():
            if name in _FIELDS and value == self._count:
                config[name] = count
            elif isinstance(value, list) and len(value) == self._count:  # `layer_types`
                config[name] = value[:count]
        return replace(self._shape, config=config)


def _comes_again(layers: Sequence[_Signature], turn: int, prefix: int) -> bool:
    """Whether layers are like those one turn before, but for the first ones."""
    return all(layers[at] == layers[at + turn] for at in range(prefix, len(layers) - turn))


def _signatures(blocks: Sequence[nn.Module]) -> list[_Signature]:
    attributes = [_attributes(block) for block in blocks]
    numbers = {
        name for name in attributes[0] if all(one.get(name) == at for at, one in enumerate(attributes))
    }
    return [
        (
            tuple((path, type(one).__qualname__) for path, one in block.named_modules()),
            tuple(sorted((name, repr(value)) for name, value in own.items() if name not in numbers)),
            tuple((path, one.shape, one.dtype, one.requires_grad) for path, one in block.named_parameters()),
            tuple((path, one.shape, one.dtype) for path, one in block.named_buffers()),
        )
        for block, own in zip(blocks, attributes, strict=True)
    ]


def _attributes(block: nn.Module) -> dict[str, Any]:
    """What is plain in a layer, by module and name; sizes and switches that its forward may ask about."""
    return {
        f"{path}.{name}": value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | torch.Size | None)
    }
