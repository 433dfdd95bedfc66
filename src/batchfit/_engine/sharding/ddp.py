"""DistributedDataParallel in a trace: its buckets, its broadcasts, and gradients that are views of buckets.

Rules: the reducer is C++ and keeps the real parameters, so a trace does in its place what takes memory there
(torch/csrc/distributed/c10d/reducer.cpp): buckets as large as all gradients, from before the first step on,
laid out again at the second forward in the order in which gradients came; buffers flattened at each forward.
A bucket is full once it has reached its limit; the first one is small. Copies into and out of buckets take
nothing. Communication hooks are not run, and are a caveat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.torch_private import ddp
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.communication import COMMUNICATION, Communication
from batchfit._engine.trace.fake_state import Faked
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

FIRST_BYTES = 2**20  # limit of the first bucket
CAP_BYTES = 25 * 2**20


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """Every model of a step that is in DistributedDataParallel, and the plain ones that are meant to be."""

    models: tuple[nn.Module, ...]

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Faked) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for model in self.models:
                stack.enter_context(_Reducer.of(model, faked).running(model))
            yield


@final
@dataclass(slots=True)
class _Reducer:
    """What a reducer holds of one model's gradients."""

    faked: Faked
    parameters: Sequence[Tensor]
    buffers: Sequence[Tensor]
    limits: tuple[int, int]
    as_views: bool
    places: dict[int, Tensor] = field(default_factory=dict)  # of each gradient in its bucket, by parameter
    ready: list[Tensor] = field(default_factory=list)  # in the order in which their gradients came
    rebuilt: bool = False

    @classmethod
    def of(cls, model: nn.Module, faked: Faked) -> _Reducer:
        learning = [one for one in model.parameters() if one.requires_grad]
        if not isinstance(model, DistributedDataParallel):
            return cls(faked, learning, list(model.buffers()), (FIRST_BYTES, CAP_BYTES), as_views=False)
        if model.mixed_precision is not None:
            why = "DistributedDataParallel with mixed_precision: predict with autocast, or FSDP2"
            raise UntraceableError("", "", why)
        cap = int(model.bucket_bytes_cap)
        first = min(FIRST_BYTES, cap) if cap == CAP_BYTES else cap
        buffers = [*model.module.buffers()] if ddp.sends_buffers(model) else []
        ignored = set(getattr(model, "parameters_to_ignore", ()))
        learning = [
            one for name, one in model.module.named_parameters() if one.requires_grad and name not in ignored
        ]
        return cls(faked, learning, buffers, (first, cap), as_views=model.gradient_as_bucket_view)

    @contextlib.contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        self.lay_out(self.parameters[::-1])
        self._hold()
        handles = [
            one.register_post_accumulate_grad_hook(self.reduce)  # type: ignore[no-untyped-call]
            for one in self.parameters
        ]
        handles.append(model.register_forward_pre_hook(lambda *_: self.before_forward()))
        try:
            if isinstance(model, DistributedDataParallel):
                with replaced(model, "forward", model.module.__call__):
                    yield
            else:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hold(self) -> None:
        """Buckets are there before the first step; nobody else keeps them."""
        for bucket in {id(one): one for one in map(_whole, self.places.values())}.values():
            self.faked.holding.add("DDP's buckets", bucket, COMMUNICATION)

    @property
    def _communication(self) -> Communication:
        found = self.faked.communication
        assert found is not None  # there is a fake process group
        return found

    def lay_out(self, parameters: Sequence[Tensor]) -> None:
        """Buckets for these gradients, in this order; none of the buckets before is kept."""
        self.places.clear()
        first, cap = self.limits
        for bucket in _assigned(parameters, first, cap):
            with torch.no_grad(), self.faked.mode, self._communication.inside():
                flat = torch.empty(
                    sum(one.numel() for one in bucket), dtype=bucket[0].dtype, device=self.faked.device
                )
                parts = torch.split(flat, [one.numel() for one in bucket])
                for one, part in zip(bucket, parts, strict=True):
                    self.places[id(one)] = part.view(one.shape)

    def before_forward(self) -> None:
        """What a forward does first: a new layout, once, and rank 0's buffers for all."""
        if self.ready and not self.rebuilt and torch.is_grad_enabled():
            self.rebuilt = True
            self.lay_out(self.ready)
        if self.buffers and torch.is_grad_enabled():
            for dtype in {one.dtype for one in self.buffers}:
                with torch.no_grad(), self._communication.inside():
                    torch.cat([one.reshape(-1) for one in self.buffers if one.dtype == dtype])

    def reduce(self, parameter: Tensor) -> None:
        """A gradient is there: it is copied into its bucket, and may be a view of that from now on."""
        if not self.rebuilt and len(self.ready) < len(self.parameters):
            self.ready.append(parameter)
        if self.as_views and parameter.grad is not None:
            parameter.grad = self.places[id(parameter)]


def _assigned(parameters: Iterable[Tensor], first: int, cap: int) -> Iterator[list[Tensor]]:
    """The gradients of each bucket: in order, those of a dtype together, each full at its limit."""
    filling: dict[torch.dtype, tuple[list[Tensor], int]] = {}
    limits: dict[torch.dtype, int] = {}
    for one in parameters:
        bucket, size = filling.get(one.dtype, ([], 0))
        size += one.numel() * one.element_size()
        bucket.append(one)
        if size >= limits.get(one.dtype, first):
            limits[one.dtype] = cap
            yield bucket
            bucket, size = [], 0
        filling[one.dtype] = bucket, size
    yield from (bucket for bucket, _ in filling.values() if bucket)


def _whole(view: Tensor) -> Tensor:
    base: Tensor | None = view._base
    return view if base is None else base
