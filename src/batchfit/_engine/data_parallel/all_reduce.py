"""Gradients summed over the ranks, in place, with memory that was allocated before.

Rules
- `Reduction` allocates all the memory that it needs when it is made; `run` allocates nothing on the device.
- What is sent, in which order and in which collective, is a function of the parameters alone, never of the
  gradients of one rank: all ranks issue the same collectives. Two ranks whose gradients have different
  strides send the same layout, the parameter's.
- Small tensors share a bucket (25 MiB, torch's own size, or DDP's `bucket_cap_mb`); one as large as a bucket
  is summed where it is.
  Buckets go round in few slots: while some are on their way, the next is filled and the last is emptied.
  Cost: at most four buckets of memory for a moment, not a second copy of all gradients.
- The number of collectives is that of DistributedDataParallel: one per bucket, filled as DDP fills its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, NamedTuple, final

import torch
import torch.distributed as dist

from batchfit._engine.device.tensors import is_dense
from batchfit._engine.torch_private import foreach

BUCKET_BYTES: Final = 25 << 20
_SLOTS: Final = 4


class _Bucket(NamedTuple):
    """Tensors that go in one collective, by their numbers; `alone`: one large tensor, where it is."""

    members: tuple[int, ...]
    alone: bool


def buckets_of(tensors: Sequence[torch.Tensor], cap_bytes: int = BUCKET_BYTES) -> list[_Bucket]:
    """Which of them go together: from the last to the first, as backward makes them."""
    found: list[_Bucket] = []
    open_: dict[tuple[torch.device, torch.dtype], tuple[list[int], int]] = {}
    for number in reversed(range(len(tensors))):
        tensor = tensors[number]
        size = tensor.numel() * tensor.element_size()
        if not size:  # nothing to sum, and some back-ends refuse it
            continue
        if size >= cap_bytes:
            found.append(_Bucket((number,), True))
            continue
        kind = (tensor.device, tensor.dtype)
        members, filled = open_.pop(kind, ([], 0))
        members.append(number)
        if filled + size >= cap_bytes:  # full once it has that much, as DDP's are
            found.append(_Bucket(tuple(members), False))
        else:
            open_[kind] = members, filled + size
    found.extend(_Bucket(tuple(members), False) for members, _ in open_.values())
    return found


@final
class Reduction:
    """Slots for the sums of some parameters' gradients, and for the buffers that rank 0 sends to the others.

    reduction = Reduction(parameters, buffers, group=group)    # may be an OOM
    ...                                                        # a vote
    reduction.run(parameters, gradients, buffers)              # does not
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        *,
        group: Any,
        cap_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self._cap_bytes = cap_bytes
        self._slots: dict[torch.device, deque[torch.Tensor]] = {}
        self._odd: dict[int, torch.Tensor] = {}
        small: dict[torch.device, list[int]] = {}
        for at, tensor in enumerate((*parameters, *buffers)):
            size = tensor.numel() * tensor.element_size()
            gradient = tensor.grad if at < len(parameters) else None
            if size < cap_bytes:
                small.setdefault(tensor.device, []).append(size)
            elif not is_dense(tensor) or (gradient is not None and gradient.stride() != tensor.stride()):
                self._odd[id(tensor)] = torch.empty_like(tensor, memory_format=_format(tensor))
        most = len(buckets_of((*parameters, *buffers), cap_bytes))
        for device, sizes in small.items():
            slot_bytes = min(cap_bytes + max(sizes), sum(sizes))  # whichever of them are reduced
            self._slots[device] = deque(
                torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(min(_SLOTS, most))
            )

    def run(
        self,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor] = (),
        *,
        timeout_s: float | None = None,
    ) -> int:
        """Sum `gradients`, those of `parameters`, over all ranks; give all ranks rank 0's `buffers`.

        Returns the number of collectives. `timeout_s` is for groups in which the host waits.
        """
        flights: deque[_Flight] = deque()
        count = 0
        with torch.no_grad():
            for likes, tensors, sums in ((parameters, gradients, True), (buffers, buffers, False)):
                for bucket in buckets_of(likes, self._cap_bytes):
                    slots = self._slots.get(likes[bucket.members[0]].device)
                    while not bucket.alone and not slots:
                        self._land(flights, timeout_s)
                    flights.append(self._start(bucket, likes, tensors, slots, sums=sums))
                    count += 1
            while flights:
                self._land(flights, timeout_s)
        return count

    def _start(
        self, bucket: _Bucket, likes: Any, tensors: Any, slots: deque[torch.Tensor] | None, *, sums: bool
    ) -> _Flight:
        members = [tensors[number] for number in bucket.members]
        slot = None
        if bucket.alone:
            like, (tensor,) = likes[bucket.members[0]], members
            odd = self._odd.get(id(like))
            if odd is not None:
                odd.copy_(tensor)
            flat = _flat(tensor if odd is None else odd)
            views = [] if odd is None else [odd]
        else:
            assert slots
            slot = slots.popleft()
            flat, views = _laid_out(slot, [likes[number] for number in bucket.members])
            foreach.copy_(views, members)
        work: Any
        if sums:
            work = dist.all_reduce(flat, group=self._group, async_op=True)
        else:
            first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            work = dist.broadcast(flat, first, group=self._group, async_op=True)
        return _Flight(work, slot, members, views, slots)

    def _land(self, flights: deque[_Flight], timeout_s: float | None) -> None:
        """Wait for the oldest, and put its result where it belongs."""
        flight = flights.popleft()
        if timeout_s is None:
            flight.work.wait()
        else:
            flight.work.wait(timedelta(seconds=timeout_s))
        if flight.views:
            foreach.copy_(flight.members, flight.views)
        if flight.slot is not None and flight.slots is not None:
            flight.slots.append(flight.slot)


class _Flight(NamedTuple):
    """A bucket on its way."""

    work: Any
    slot: torch.Tensor | None
    members: list[torch.Tensor]
    views: list[torch.Tensor]
    slots: deque[torch.Tensor] | None


def _format(like: torch.Tensor) -> torch.memory_format:
    return torch.preserve_format if is_dense(like) else torch.contiguous_format


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's memory, in its own order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid_out(slot: torch.Tensor, likes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A slot as one flat tensor, and a view of it for each of `likes`."""
    total = sum(like.numel() for like in likes)
    flat = slot[: total * likes[0].element_size()].view(likes[0].dtype)
    views, begin = [], 0
    for like in likes:
        if is_dense(like):
            views.append(flat.as_strided(like.shape, like.stride(), begin))
        else:
            views.append(flat[begin : begin + like.numel()].view(like.shape))
        begin += like.numel()
    return flat, views
