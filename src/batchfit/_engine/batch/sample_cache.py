"""A cache of samples that are slow to read, since a search asks for the same ones again and again.

Rules: a sample that took little time is read again, and so is one that cannot be pickled, or is a view of
something larger. Samples are kept as bytes, which no count of tensors sees, and each is handed out as a new
object, as the dataset would: a `collate_fn` may change what it is given. What is kept is bounded; the longest
samples stay, since every batch has them.
"""

from __future__ import annotations

import heapq
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, final

import torch

from batchfit._engine.batch.structure import element_count, leaves
from batchfit._engine.torch_private.dispatch import modes_disabled, tracing

KEPT_BYTES = 2**28
_SLOW_S = 2e-4  # to make a sample of bytes again takes about half of that


@final
class Samples:
    """What was read of a dataset."""

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: dict[int, bytes] = {}
        self._shortest: list[tuple[int, int]] = []  # a heap of (elements, index)
        self._bytes = 0

    def read(self, indices: Sequence[int], fetch: Callable[[list[int]], Any]) -> Any:
        """The samples of `indices`: `fetch` is asked for those that are not kept, all at once."""
        missing = [index for index in indices if index not in self._kept]
        begun = time.perf_counter()
        fetched = fetch(missing) if missing else []
        slow = bool(missing) and (time.perf_counter() - begun) / len(missing) > _SLOW_S
        if len(missing) == len(indices) and not slow:
            return fetched
        fresh = iter(fetched)
        found = [self._made(index) if index in self._kept else next(fresh) for index in indices]
        if slow:
            for index, sample in zip(missing, fetched, strict=True):
                self._keep(index, sample)
        return found

    def _made(self, index: int) -> Any:
        # Beside a trace, which would take each tensor for one of the step's own.
        with modes_disabled() if tracing() else nullcontext():
            return pickle.loads(self._kept[index])

    def _keep(self, index: int, sample: Any) -> None:
        if index in self._kept or any(map(_is_part, leaves(sample))):
            return
        try:
            with modes_disabled() if tracing() else nullcontext():
                whole = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
        except (pickle.PickleError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError):
            return
        self._kept[index] = whole
        self._bytes += len(whole)
        heapq.heappush(self._shortest, (element_count(sample), index))
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._kept.pop(heapq.heappop(self._shortest)[1]))


def _is_part(leaf: Any) -> bool:
    """A tensor that shares its memory with more than itself: all of that would be pickled."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return False
    return leaf.untyped_storage().nbytes() > 2 * leaf.numel() * leaf.element_size() + 1024
