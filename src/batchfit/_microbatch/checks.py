"""Checks of a Microbatcher's models and options: whether their batches may be cut at all.

Rules
- Refused, with the reason: whatever has collectives in forward or backward. One rank alone that retries
  would leave the others waiting. FSDP2 is allowed: its ranks run the same number of microbatches.
- Nothing here touches a device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.batch.trim import check_padding
from batchfit._engine.device.tensors import leaves_of
from batchfit._engine.distributed.fsdp_reset import sharded_modules
from batchfit._engine.snapshot import rng
from batchfit._engine.snapshot.contents import is_parallel
from batchfit.errors import BatchfitError

_ALONE = "one rank alone that retries would leave the others waiting"


def check_models(models: Sequence[Any]) -> None:
    """Refuse what is no model, and models that cannot be retried."""
    if not models:
        raise TypeError("models must be at least one module, not none")
    for model in models:
        if not isinstance(model, nn.Module | torch.Tensor):
            raise TypeError(f"models must be modules or parameters, not {model!r:.80}")
        if isinstance(model, torch.Tensor) and not model.is_leaf:
            raise TypeError("models must be modules or parameters, not a tensor that was computed")
    leaves, _, modules = leaves_of(models)
    in_step = sharded_modules(modules)
    for module in modules:
        if is_parallel(module) and not isinstance(module, DistributedDataParallel) and module not in in_step:
            raise BatchfitError(f"{type(module).__name__} is not supported by Microbatcher so far: {_ALONE}")
        if isinstance(module, nn.SyncBatchNorm):
            raise BatchfitError(
                f"SyncBatchNorm has collectives in forward: {_ALONE}. Use BatchNorm or GroupNorm"
            )
    sharded = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    # Parameters of modules under `fully_shard` are checked in `data_parallel/fsdp_models.py`.
    if sharded is not None and not in_step and any(isinstance(leaf, sharded) for leaf in leaves):
        raise BatchfitError(f"parameters are spread over ranks (DTensor): {_ALONE}")


def where(device: Any, models: Sequence[Any]) -> torch.device | None:
    """Where microbatches go: the device named, else where the first model is."""
    if isinstance(device, str | torch.device):
        wanted = torch.device(device)
        return torch.empty(0, device=wanted).device if wanted.type == "cuda" else wanted
    for model in models:
        tensors = [model] if isinstance(model, torch.Tensor) else [*model.parameters(), *model.buffers()]
        for tensor in tensors:
            if not tensor.is_meta:
                return tensor.device
    return None


def generators_of(models: Sequence[Any]) -> list[object]:
    """Generators that modules keep as attributes."""
    kept = [value for module in leaves_of(models)[2] for value in vars(module).values()]
    return list({id(value): value for value in kept if rng.is_generator(value)}.values())


def check_generators(generators: Any) -> None:
    """Refuse what is no generator of random numbers."""
    if isinstance(generators, str) or not isinstance(generators, Sequence):
        raise TypeError(f"generators must be a list of generators, not {brief(generators)}")
    for one in generators:
        if not rng.is_generator(one):
            raise TypeError(f"generators must be generators of torch, NumPy or random, not {brief(one)}")


def check_options(
    weight: Any,
    split: Any,
    count: Any,
    size: Any,
    reduction: Any,
    on_zero: Any,
    batch_norm: Any,
    compared: Any,
    on_event: Any,
) -> None:
    """Refuse options of `Microbatcher` that mean nothing."""
    if weight is not None and not isinstance(weight, str) and not callable(weight):
        raise TypeError(
            f"weight must be a callable, the name of a part of the batch or None, not {brief(weight)}"
        )
    for name, value in (("split", split), ("count", count), ("on_event", on_event)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a callable or None, not {brief(value)}")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise TypeError(f"microbatch_size must be a positive integer or None, not {size!r}")
    if size is not None and size < 1:
        raise ValueError(f"microbatch_size must be a positive integer or None, not {size!r}")
    for name, value, allowed in (
        ("reduction", reduction, ("mean", "sum")),
        ("on_zero_weight", on_zero, ("raise", "skip")),
        ("batch_norm", batch_norm, ("warn", "error", "exact", "ignore")),
        ("compared", compared, ("error", "warn", "ignore")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")
    if reduction == "sum" and weight is not None:
        raise ValueError(f"weight must be None where reduction is 'sum', not {weight!r}")


def check_ragged(lengths: Any, split: Any, pad_keys: Any, pad_dim: Any, padding_side: Any) -> None:
    """Refuse options for ragged batches that mean nothing."""
    if lengths is not None and not isinstance(lengths, str) and not callable(lengths):
        raise TypeError(
            "lengths must be the name of a part of the batch or a callable (numbers go to each call), not "
            f"{lengths!r:.80}"
        )
    if isinstance(lengths, torch.Tensor):
        raise TypeError("lengths must be a name or a callable here, not a tensor: give it to each call")
    if lengths is not None and split is not None:
        raise ValueError(f"split must be None where lengths is given, not {split!r}")
    check_padding(pad_keys, pad_dim, padding_side)


def brief(value: Any) -> str:
    """As text that fits into a line: not all the numbers of a tensor."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{value!r:.80}"
