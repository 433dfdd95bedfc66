"""Collectives in a trace: whether the step gathers or reduces at this moment, and on which stream.

Blocks that are made meanwhile carry it. A trace outside of a fake process group has no `Communication`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from batchfit._engine.torch_private.fsdp2 import collectives_noted, shapes_by_fakes
from batchfit._engine.torch_private.replaced import replaced

COMMUNICATION = "communication"


@final
class Communication:
    """Whether collectives are prepared, done or unpacked now, and the stream that is current."""

    def __init__(self) -> None:
        self._depth = 0
        self.stream = 0  # the one on which the program computes

    @property
    def is_active(self) -> bool:
        return self._depth > 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, what is allocated is for a collective."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Inside, what is allocated is that stream's."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


@contextlib.contextmanager
def followed(communication: Communication) -> Iterator[None]:
    """Notes when FSDP2 gathers and reduces, and on which stream."""
    numbers: dict[int, int] = {}
    kept: list[Any] = []  # so that no other stream gets the id of one that is gone

    def stream(one: Any) -> AbstractContextManager[Any]:
        if one is None or one is torch.cpu.current_stream():
            return contextlib.nullcontext()
        kept.append(one)
        return communication.on_stream(numbers.setdefault(id(one), len(numbers) + 1))

    with collectives_noted(communication.inside), shapes_by_fakes(), replaced(torch.cpu, "stream", stream):
        yield
