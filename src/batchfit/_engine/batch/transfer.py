"""Moves microbatches to the device, one at a time.

Rules
- At most two microbatches' inputs are on the device: the one in use and the next, whose copy runs beside it.
- A copy from the host never waits for what the device is doing: a large one goes through pinned memory and a
  stream of its own, a small one is staged by the driver at once. Where pinning fails, it is copied plainly.
- What is on the device already stays a view of the batch.
- Memory of the next microbatch belongs to the stream that computes, so it needs no record of who uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from batchfit._engine.batch.structure import mapped

# Below this a copy costs less than the events around it; the driver stages up to 64 KiB at once.
_WORTH_BYTES = 1 << 16

_streams: dict[torch.device, Any] = {}


def feed(micros: Sequence[Any], device: torch.device | None) -> Iterator[Any]:
    """The microbatches, each on `device`; the next one is under way while one is in use."""
    if device is None or device.type != "cuda":
        for micro in micros:
            yield _moved(micro, device)
        return
    following: _Copy | None = None
    try:
        for index, micro in enumerate(micros):
            current = (following or _Copy(micro, device)).take()
            following = _Copy(micros[index + 1], device) if index + 1 < len(micros) else None
            yield current
            del current
    finally:
        if following is not None:  # an error: its memory must not be used again before the copy has ended
            with suppress(RuntimeError):  # of a dead context
                following.take()


class _Copy:
    """The copy of one microbatch, begun when it is made."""

    __slots__ = ("_device", "_done", "_micro", "_pinned")

    def __init__(self, micro: Any, device: torch.device) -> None:
        self._device = device
        self._done: Any = None
        self._pinned: list[torch.Tensor] = []
        stream: Any = None

        def move(leaf: Any) -> Any:
            nonlocal stream
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                return _leaf_to(leaf, device)
            if leaf.numel() * leaf.element_size() < _WORTH_BYTES or leaf.layout is not torch.strided:
                return _leaf_to(leaf, device)
            source = _pinned(leaf)
            if source is None or leaf.requires_grad:
                return _leaf_to(leaf, device)
            # Allocated on the stream that computes: the copy waits for what that memory was used for last.
            target = torch.empty_like(leaf, device=device)
            if stream is None:
                stream = _side_stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            self._pinned.append(source)
            return target

        try:
            self._micro = _mapped(micro, move)
        except BaseException:
            if stream is not None:  # parts may be under way to memory that is free again in a moment
                torch.cuda.current_stream(device).wait_stream(stream)
            raise
        if stream is not None:
            self._done = stream.record_event()

    def take(self) -> Any:
        """The microbatch, for the current stream."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
        micro, self._micro = self._micro, None
        self._pinned.clear()  # the host allocator itself waits until the copy has read them
        return micro


def _side_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]


def _pinned(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor if tensor.is_pinned() else tensor.pin_memory()
    except RuntimeError:  # the system gives no more pinned pages: "CUDA error: out of memory", of the host
        return None


def _moved(micro: Any, device: torch.device | None) -> Any:
    return micro if device is None else _mapped(micro, lambda leaf: _leaf_to(leaf, device))


def _mapped(micro: Any, change: Callable[[Any], Any]) -> Any:
    """As `mapped`, which takes several times as long for what most microbatches are."""
    if isinstance(micro, torch.Tensor):
        return change(micro)
    if type(micro) is dict:
        return {key: _mapped(value, change) for key, value in micro.items()}
    if type(micro) in (tuple, list) and micro and isinstance(micro[0], torch.Tensor):
        return type(micro)([_mapped(value, change) for value in micro])
    return mapped(micro, change)


def _leaf_to(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        if leaf.device == device:
            return leaf
        # From the host only: a copy to the host must be synchronized before anyone reads it.
        return leaf.to(device, non_blocking=leaf.device.type == "cpu" and device.type == "cuda")
    if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
        return leaf
    moved = leaf.to(device)
    return leaf if moved is None else moved
