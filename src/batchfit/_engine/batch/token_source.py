"""Batches by tokens for a search: at each size the batch shapes that need the most memory.

Rules
- A size is `max_tokens`. Memory at it is that of the worst batch that training may meet: of the longest
  samples, of the most tokens, samples or squared lengths. Which one nobody knows before; all are run.
- The sampler says which batches these are; it is that of the loader that training uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, final, runtime_checkable


@runtime_checkable
class SaysExtremes(Protocol):
    """A batch sampler by tokens."""

    def extremes(self, max_tokens: int) -> list[list[int]]:
        """Batches that need the most memory at that size, by index."""

    def shapes(self, max_tokens: int) -> str:
        """Those batches as text: samples and their length."""

    def bounds(self) -> tuple[int, int]:
        """The least `max_tokens` that is allowed, and the most that changes anything."""


@final
class TokenBatches:
    """Batches of the samples that a sampler by tokens would put together."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any], sampler: SaysExtremes) -> None:
        self.dataset = dataset
        self.collate = collate_fn
        self.sampler = sampler
        self._last: tuple[int, list[list[int]]] | None = None

    def __call__(self, size: int) -> Any:
        raise TypeError(
            "make_batch must be by samples here, not a loader of batches by tokens: pass its dataset with "
            "collate_fn, and a batch size. By tokens, find_batch_size searches training and inference"
        )

    def makers(self, max_tokens: int) -> list[Callable[[], Any]]:
        """What makes each of the worst batches at that size."""
        if self._last is None or self._last[0] != max_tokens:
            self._last = max_tokens, self.sampler.extremes(max_tokens)
        return [partial(self._made, indices) for indices in self._last[1]]

    def _made(self, indices: list[int]) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)
        samples = fetch(indices) if callable(fetch) else [self.dataset[index] for index in indices]
        return self.collate(samples)

    def described(self) -> list[Any]:
        """All that the memory of its batches depends on, for a key: the shapes at a few sizes."""
        least, most = self.sampler.bounds()
        sizes = [least]
        while sizes[-1] < most:
            sizes.append(2 * sizes[-1])
        return [[size, self.sampler.shapes(size)] for size in sizes]

    def made_of(self, max_tokens: int) -> str:
        """The batches at that size, as samples and their length."""
        return f"at most {max_tokens:,} tokens: {self.sampler.shapes(max_tokens)}"


def not_by_samples(what: str) -> TypeError:
    """The error where batches are by tokens, and sizes are counted in samples."""
    return TypeError(
        f"workload must have batches by samples for {what}, not by tokens: pass the dataset with "
        "collate_fn to make_batch. find_batch_size finds max_tokens"
    )
