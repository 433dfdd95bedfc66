"""Models in DistributedDataParallel, as `ddp` uses them, or refuses them.

Rules
- Refused, with the reason: what always has collectives in forward, and what would be left out
  where gradients are reduced outside of DDP.
- Flags of the models are as before once a block is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.data_parallel.all_reduce import BUCKET_BYTES
from batchfit._engine.torch_private import ddp
from batchfit.errors import BatchfitError

_FLAGS = ("require_backward_grad_sync", "require_forward_param_sync")


@final
class Wrapped:
    """All models of a Microbatcher that are in DDP."""

    def __init__(self, models: Sequence[DistributedDataParallel]) -> None:
        self._models = models
        for model in models:
            _refuse(model)
            _refuse_now(model)
        self._hooked = _hooked_by(models)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Those of all models."""
        for model in self._models:
            yield from model.parameters()

    @property
    def views(self) -> bool:
        """Whether gradients may be views of DDP's buckets."""
        return any(model.gradient_as_bucket_view for model in self._models)

    @property
    def bucket_bytes(self) -> int:
        """The size of buckets that the user has asked DDP for, or torch's own."""
        asked = [getattr(model, "bucket_bytes_cap", None) for model in self._models]
        return min((one for one in asked if isinstance(one, int) and one > 0), default=BUCKET_BYTES)

    def reduce_all(self, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether DDP by itself reduces these and nothing else: it knows what got gradients when it was made.

        A parameter that was thawed since keeps each rank's own gradient, silently; for one that was frozen
        DDP waits.
        """
        return self._hooked is not None and {id(leaf) for leaf in leaves} == self._hooked

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse leaves whose gradients would not be reduced."""
        known = {id(one) for model in self._models for one in _reduced_by(model)}
        outside = [leaf for leaf in leaves if id(leaf) not in known]
        if outside:
            shown = ", ".join(str(tuple(leaf.shape)) for leaf in outside[:3])
            raise BatchfitError(
                f"{len(outside)} of the parameters that get gradients are in no DistributedDataParallel "
                f"(shapes {shown}): they would become different on each rank. Wrap their module too, or "
                "freeze them"
            )

    def check_reached(self, modules: Iterable[nn.Module]) -> None:
        """Refuse another wrapped model than these: it would reduce by itself."""
        for module in modules:
            if isinstance(module, DistributedDataParallel) and module not in self._models:
                raise BatchfitError(
                    "fn runs a model in DistributedDataParallel that Microbatcher was not given: it would "
                    "reduce in every microbatch, and a rank that retries would leave the others waiting. "
                    "Pass it too"
                )

    def buffers(self) -> list[torch.Tensor]:
        """Those that DDP sends from rank 0 to all: each once."""
        found: dict[int, torch.Tensor] = {}
        for model in self._models:
            if not model.broadcast_buffers:
                continue
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            for name, buffer in model.module.named_buffers():
                if name not in ignored and buffer.numel():
                    found[id(buffer)] = buffer
        return list(found.values())

    def syncs(self) -> bool:
        """Whether gradients are to be reduced in this call: False under the user's `no_sync()`."""
        asked = {bool(model.require_backward_grad_sync) for model in self._models}
        if len(asked) > 1:
            raise BatchfitError("no_sync() must cover all models that are wrapped, not some of them")
        return asked.pop()

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Inside, forward and backward of the models have no collective.

        Not only `no_sync()`: the first forward under it still broadcasts buffers, and so does one in eval
        mode without gradients.
        """
        for model in self._models:
            _refuse_now(model)
        before = [[getattr(model, name) for name in _FLAGS] for model in self._models]
        try:
            self._set(False)
            yield
        finally:
            for model, values in zip(self._models, before, strict=True):
                for name, value in zip(_FLAGS, values, strict=True):
                    setattr(model, name, value)

    @contextmanager
    def with_collectives(self) -> Iterator[None]:
        """Inside `without_collectives`, DDP reduces and broadcasts as it does by itself."""
        self._set(True)
        try:
            yield
        finally:
            self._set(False)

    @contextmanager
    def must_be_called(self) -> Iterator[None]:
        """Inside, a model that gets gradients must be called through its wrapper, or DDP reduces nothing."""
        seen: set[int] = set()

        def note(model: nn.Module, inputs: object) -> None:
            seen.add(id(model))

        hooks = [model.register_forward_pre_hook(note) for model in self._models]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        for model in self._models:
            if id(model) not in seen and any(one.grad is not None for one in _reduced_by(model)):
                raise BatchfitError(
                    "fn must call the wrapped model, not model.module: DDP has not reduced its gradients. "
                    "sync='safe' does in either case"
                )

    def rebuilt(self) -> int:
        """How many of them have rebuilt their buckets, which is a collective in a forward."""
        return sum(map(ddp.has_rebuilt_buckets, self._models))

    def rebuild_buckets(self) -> None:
        """DDP rebuilds its buckets once, in the forward after the first batch that it reduced.

        That is a collective, and a rank that has no samples then would miss it: so it is done now.
        """
        for model in self._models:
            ddp.rebuild_buckets(model)

    def _set(self, value: bool) -> None:
        for model in self._models:
            for name in _FLAGS:
                setattr(model, name, value)


def _refuse(model: DistributedDataParallel) -> None:
    """What DDP can do and this cannot."""
    ddp.check(model)
    if dist.get_world_size(model.process_group) != dist.get_world_size():
        raise BatchfitError(
            "a model is wrapped for a part of the ranks (process_group=...), and all ranks must agree on a "
            "batch. Wrap it for all of them"
        )
    if model.static_graph:
        raise BatchfitError(
            "DistributedDataParallel(static_graph=True) always reduces inside backward, and "
            "crashes after a forward with an OOM. Use static_graph=False"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise BatchfitError(
            "DistributedDataParallel(mixed_precision=...) casts gradients in its own reduction. Use autocast"
        )
    if ddp.delays(model):
        raise BatchfitError(
            "DistributedDataParallel(delay_all_reduce_named_params=...) reduces inside backward: leave it out"
        )
    if hasattr(model, "buffer_hook"):
        raise BatchfitError("a buffer hook is registered, which only a forward of DDP's own calls: remove it")


def _refuse_now(model: DistributedDataParallel) -> None:
    """What may be switched on later."""
    if ddp.has_hook(model):
        raise BatchfitError(
            "a communication hook is registered, and gradients are reduced outside of "
            "DistributedDataParallel, and DDP would never call it. Leave the hook out"
        )
    if ddp.is_joining(model):
        raise BatchfitError(
            "ddp.join() puts collectives into forward. Leave it out: ranks may have unequal batches here, "
            "and one without samples passes None or an empty batch"
        )


def _hooked_by(models: Sequence[DistributedDataParallel]) -> set[int] | None:
    """The parameters that DDP reduces by itself; None where they have changed since it was made."""
    found: set[int] = set()
    for model in models:
        mine = {id(one) for one in _reduced_by(model) if one.requires_grad}
        if ddp.reduced_parameters(model) != len(mine):
            return None
        found |= mine
    return found


def _reduced_by(model: DistributedDataParallel) -> Iterator[torch.Tensor]:
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    for name, parameter in model.module.named_parameters():
        if name not in ignored:
            yield parameter
