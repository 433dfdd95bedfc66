"""What live models and optimizers of this process hold after an OOM, for a program that declared none.

Rule: Python's garbage collector is asked for them, once, after an OOM that ends the run. Nothing is kept.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch
from torch import nn

from batchfit._engine.device.tensors import tensors_in, top_holders
from batchfit._units import in_use_bytes


def model_holders(
    models: Sequence[object], kind: str, live_bytes: int | None, batch: Sequence[torch.Tensor]
) -> list[tuple[str, int]]:
    """What these models, the optimizers that update them, and a batch hold on devices of a kind."""
    known = {id(one) for one in tensors_in(models)}
    alive = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    updates = [one for one in alive if any(id(parameter) in known for parameter in tensors_in([one]))]
    return top_holders([*models, *updates], on=torch.device(kind), live_bytes=live_bytes, batch=batch)


def living_holders(message: str) -> tuple[tuple[str, int], ...]:
    """What models and optimizers hold, and the rest of what was live by the text of the OOM."""
    found = gc.get_objects()
    modules = [one for one in found if issubclass(type(one), nn.Module)]
    optimizers = [one for one in found if issubclass(type(one), torch.optim.Optimizer)]
    del found
    inner = {id(child) for module in modules for child in module._modules.values()}
    parts = [*(one for one in modules if id(one) not in inner), *optimizers]
    kinds = {one.device.type for one in tensors_in(parts)} - {"meta"}
    kind = next((one for one in sorted(kinds) if one != "cpu"), "cpu")
    return tuple(top_holders(parts, on=torch.device(kind), live_bytes=in_use_bytes(message)))
