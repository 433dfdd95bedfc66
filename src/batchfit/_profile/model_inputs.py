"""Records the model's inputs while steps run: shapes, tokens, precision.

Rules: only read, never kept: no tensor outlives the step through us. A model whose call is compiled is
not touched, since a hook would make it compile again: nothing is seen of it. What is put in is taken out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.torch_private.dynamo import is_compiled_model

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
Shape = tuple[tuple[int, ...], ...]


@final
@dataclass(slots=True)
class InputsSeen:
    """What the calls of a model showed, one entry a call."""

    shapes: list[Shape] = field(default_factory=list)
    tokens: int | None = None  # in the last call
    precision: str = ""

    @property
    def distinct(self) -> int:
        """How many different shapes came."""
        return len(set(self.shapes))


@contextmanager
def watched_inputs(model: object) -> Iterator[InputsSeen]:
    """Inside, the calls of `model` are recorded."""
    seen = InputsSeen()
    scripted = isinstance(model, torch.jit.ScriptModule)
    if not isinstance(model, nn.Module) or scripted or is_compiled_model(model):
        yield seen  # a scripted module takes no such hook
        return

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = list(_tensors((args, kwargs)))
        seen.shapes.append(tuple(tuple(one.shape) for one in tensors))
        seen.tokens = _tokens(args, kwargs)
        if not seen.precision:
            seen.precision = _precision(module, tensors)

    handle = model.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def batch_shapes(batch: object) -> Shape:
    """The shapes of the tensors of a batch."""
    return tuple(tuple(one.shape) for one in _tensors(batch))


def _tensors(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _tensors(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _tensors(value)


def _tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """The tokens of a call: `input_ids` by name, or a first argument that resembles it (whole, 2-D)."""
    for mapping in (kwargs, *(one for one in args if isinstance(one, Mapping))):
        ids = mapping.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids.numel()
    first = args[0] if args else None
    if isinstance(first, torch.Tensor) and first.dim() == 2 and first.dtype in (torch.int64, torch.int32):
        return first.numel()
    return None


def _precision(module: nn.Module, tensors: Iterable[torch.Tensor]) -> str:
    """What matrices are multiplied in: autocast's type, else the parameters', with TF32 distinguished."""
    parameter = next((one for one in module.parameters() if one.is_floating_point()), None)
    device = parameter.device.type if parameter is not None else "cpu"
    if torch.is_autocast_enabled(device):
        return _SHORT.get(torch.get_autocast_dtype(device), "")
    if parameter is None:
        return ""
    name = _SHORT.get(parameter.dtype, "")
    if name == "fp32" and device == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return name
