"""Deals the batches of a `TokenBatchSampler`: each when a worker is to begin with it, as `Dealer` does.

Rules
- The position is a value (`TokenPosition`): that of the batch handed out last is saved, and is where a change
  goes back to. The books in samples (`DealtSamples`) run beside it.
- Tokens are counted, without padding: a schedule in tokens needs nobody to say how many a sample has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

from batchfit._loader.batch_sampler import Dealer, LoaderSettings
from batchfit._loader.fetch import IndexTask, Number
from batchfit._loader.pure.deal import Deal, DealtSamples
from batchfit._loader.pure.progress import Progress
from batchfit._loader.pure.tokens import TokenPosition
from batchfit._loader.token_order import TokenOrder
from batchfit._loader.token_sampler import TokenBatchSampler


class DealtTokens(NamedTuple):
    """A prefetched batch: with what it was made, its samples on this rank, and the position after it."""

    serial: int
    max_tokens: int
    rows: int
    after: TokenPosition


@final
class TokenDealer(Dealer):
    """Deals the batches of one epoch by tokens."""

    def __init__(
        self,
        settings: LoaderSettings,
        begun: Progress,
        ledger: DealtSamples,
        discarded_below: Number,
        sampler: TokenBatchSampler,
        saved: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(settings, begun, ledger, discarded_below)
        self._sampler = sampler
        self._tokens: TokenOrder | None = None
        self._handed = TokenPosition() if saved is None else TokenPosition.from_dict(saved)
        self._next = self._handed
        self._dealt: list[DealtTokens] = []
        self.rows = 0  # of this rank, in the batch that was handed out last

    @property
    def tokens(self) -> TokenOrder:
        """The samples of this epoch."""
        if self._tokens is None:
            self._tokens = self._sampler._order_of(self.begun.epoch)
        return self._tokens

    @property
    def weight(self) -> float:
        return 1.0 if self.current is None else self.rows * self.settings.world_size / self.current.size

    def progress_of(self, at: TokenPosition) -> Progress:
        """How far the run has come at a position of this epoch."""
        begun = self.begun
        return Progress(
            begun.epoch, begun.step + at.steps, begun.samples + at.samples, (begun.tokens or 0) + at.tokens
        )

    def progress_at(self, number: int, position: int) -> Progress:
        known = [self._handed, *(one.after for one in self._dealt), self._next]
        return self.progress_of(next(at for at in known if at.samples == position))

    def count(self, length: Callable[[], int]) -> int:
        if self.settings.schedule is None:
            return self.tokens.count(self._handed, self.settings.batch_size)
        at, order = self._handed, self._sampler._order_of(self.begun.epoch)
        while (step := order.deal(at, self.settings.wanted(self.progress_of(at)))) is not None:
            at = step.after
        return at.steps

    def _deal(self) -> IndexTask | None:
        settings, ledger = self.settings, self.ledger
        max_tokens = settings.wanted(self.progress_of(self._next))
        step = self.tokens.deal(self._next, max_tokens)
        if step is None:
            return None
        mine = step.batches[settings.rank]
        self.ledger = ledger.deal(sum(map(len, step.batches)))
        self._next = step.after
        self._dealt.append(DealtTokens(ledger.serial, max_tokens, len(mine), step.after))
        return ledger.serial, mine

    def arrive(self, serial: int, data: Any) -> tuple[Any, ...]:
        handed = super().arrive(serial, data)
        for one in self._dealt:
            if one.serial == serial and handed:
                self._handed, self.rows = one.after, one.rows
        self._dealt = [one for one in self._dealt if one.serial > serial]
        return handed

    def _still_wanted(self, deal: Deal) -> bool:
        made = next(one for one in self._dealt if one.serial == deal.serial)
        try:
            return self.settings.wanted(self.progress_at(deal.number, deal.start)) == made.max_tokens
        except Exception:  # noqa: BLE001 - it will be raised when that batch is made again
            return False

    def _rewind(self) -> None:
        self._next, self._dealt = self._handed, []

    def state(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "tokens": self._handed.to_dict(),
            "given_max_tokens": sampler._given,
            "made_with": sampler._made_with(),
        }
