"""What a `for` loop over a `ResizableLoader` holds: one pass over an epoch.

Rule: nothing refers back to the iterator, so when the loop ends, DataLoader's workers can end too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from batchfit._loader.batch_sampler import Dealer
from batchfit._loader.fetch import Arrived


@final
class CurrentDealer:
    """The batch sampler that DataLoader gets: the dealer of the epoch that runs now."""

    dealer: Dealer

    def __iter__(self) -> Iterator[Any]:
        return self.dealer


@final
class EpochIterator(Iterator[Any]):
    """Hands out the batches that DataLoader brings, except those that a new size has discarded.

    `current` returns the loader's dealer of now; `ended` is called after the last batch.
    """

    def __init__(
        self,
        dealer: Dealer,
        batches: Iterator[Arrived],
        lock: threading.RLock,
        current: Callable[[], Dealer],
        ended: Callable[[], None],
    ) -> None:
        self._dealer = dealer
        self._batches: Iterator[Arrived] | None = batches
        self._lock = lock
        self._current = current
        self._ended = ended

    def __next__(self) -> Any:
        with self._lock:
            if self._batches is None:
                raise StopIteration
            dealer = self._dealer
            if self._current() is not dealer:
                self._batches = None
                raise RuntimeError(
                    "this iterator has ended: its loader was iterated again, or got another state or epoch. "
                    "Use two loaders to read the data twice at the same time."
                )
            for serial, data in self._batches:
                if handed := dealer.arrive(serial, data):
                    return handed[0]
            self._batches = None
            if dealer.failure is not None:
                raise dealer.failure
            self._ended()
            raise StopIteration

    def __del__(self) -> None:
        if self._batches is not None:
            self._dealer.abandon()
