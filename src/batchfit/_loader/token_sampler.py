"""`TokenBatchSampler`: batches of about equally many tokens, in place of equally many samples.

Rules
- The order of an epoch is a function of seed and epoch; the batches depend on it, on `max_tokens` and on the
  number of ranks. Each rank makes the same plan, and takes its own part.
- A position says which samples have been dealt out, whatever sizes and ranks they were dealt with: only those
  that have not come yet come after a change (`_loader/pure/tokens.py`).
- `max_tokens` is what one rank holds at once: a limit of memory, as `find_batch_size` answers it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, SupportsIndex, final

import torch
from torch.utils.data import Sampler

from batchfit._arguments import check_flag
from batchfit._loader.pure.tokens import TokenLimits, TokenPosition, longest_runs
from batchfit._loader.this_rank import place_among_ranks
from batchfit._loader.token_order import TokenOrder
from batchfit._units import whole

_VERSION = 1


@final
class TokenBatchSampler(Sampler[list[int]]):
    """Batches of at most `max_tokens` tokens each: few long samples, or many short ones.

        lengths = [len(sample["input_ids"]) for sample in dataset]
        sampler = batchfit.TokenBatchSampler(lengths, max_tokens=16_384)
        loader = batchfit.ResizableLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Samples of about one length share a batch, so there is little padding; the order of the batches is random.
    In an epoch every sample comes once, on one rank, and all ranks have equally many batches. It also works
    as the `batch_sampler` of torch's `DataLoader`; there, with workers, what a checkpoint counts is ahead of
    the loop by the prefetched batches.

    Args:
        lengths: tokens of each sample of the dataset.
        max_tokens: most tokens of one batch on one rank: its longest sample, times its samples. May be set
            later, too, and counts for the batches that are not made yet.
        packed: samples are joined without padding: the sum of their lengths counts.
        max_rows: most samples of a batch.
        multiple_of: samples of a batch are a multiple of this, where so many fit, but for the rest.
        pad_to_multiple_of: what your `collate_fn` pads lengths to.
        drop_longer: leave out samples longer than `max_tokens`, with a warning; default: they are an error.
        drop_last: leave out the samples at the end of an epoch that do not make a full batch for every rank.
        shuffle: another order in each epoch; False: always the same batches, longest first in each window.
        seed: seed of the order, the same on all ranks.
        window: batches of each rank that are sorted by length together; more: less padding, but batches less
            random.
        rank: number of this rank; default: that of `torch.distributed`, or 0.
        world_size: number of ranks; default: that of `torch.distributed`, or 1.

    Raises:
        ValueError: a sample is longer than `max_tokens`; the message has its index.
    """

    def __init__(
        self,
        lengths: Sequence[int] | torch.Tensor,
        max_tokens: int,
        *,
        packed: bool = False,
        max_rows: int | None = None,
        multiple_of: int = 1,
        pad_to_multiple_of: int = 1,
        drop_longer: bool = False,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        window: int = 64,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        for name, flag in (
            ("packed", packed),
            ("drop_longer", drop_longer),
            ("drop_last", drop_last),
            ("shuffle", shuffle),
        ):
            check_flag(name, flag)
        if packed and pad_to_multiple_of != 1:
            raise ValueError(f"pad_to_multiple_of must be 1 with packed=True, not {pad_to_multiple_of!r}")
        self.lengths = _checked_lengths(lengths)
        self._rules = TokenLimits(
            1,
            None if max_rows is None else whole(max_rows, name="max_rows", at_least=1),
            whole(multiple_of, name="multiple_of", at_least=1),
            whole(pad_to_multiple_of, name="pad_to_multiple_of", at_least=1),
            packed,
        )
        if max_rows is not None and multiple_of > max_rows:
            raise ValueError(f"multiple_of must be at most max_rows ({max_rows}), not {multiple_of!r}")
        self.drop_longer = drop_longer
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.seed = whole(seed, name="seed")
        self.window = whole(window, name="window", at_least=2)
        self.rank, self.world_size = place_among_ranks(rank, world_size)
        self.max_tokens = max_tokens
        self._given = self._max_tokens
        self._epoch = 0
        self._done = (0, 0, 0)  # steps, samples and tokens of the epochs before
        self._at = TokenPosition()
        self._begun = False
        self._order: TokenOrder | None = None

    @property
    def max_tokens(self) -> int:
        """Most tokens of one batch on one rank."""
        return self._max_tokens

    @max_tokens.setter
    def max_tokens(self, max_tokens: SupportsIndex) -> None:
        self._max_tokens = self._checked(max_tokens)

    def _checked(self, max_tokens: SupportsIndex, name: str = "max_tokens") -> int:
        """`max_tokens` as a size that every sample fits into, unless longer ones are left out.

        Args:
            max_tokens: tokens of one batch on one rank.
            name: what to call it in an error.

        Raises:
            ValueError: it is no positive integer, or a sample is longer.
        """
        try:
            size = operator.index(max_tokens)
        except TypeError:
            size = 0
        if isinstance(max_tokens, bool) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, not {max_tokens!r}")
        longest = int(self.lengths.max())
        least = self._limits(size).padded(longest)
        if least > size and not self.drop_longer:
            shown = "" if least == longest else f", padded {least}"
            index = int(self.lengths.argmax())
            raise ValueError(
                f"{name} must be at least {least}, for sample {index} has {longest} tokens"
                f"{shown}, not {size}: cut the sample, or leave longer ones out with drop_longer=True"
            )
        if self._limits(size).padded(int(self.lengths.min())) > size:
            raise ValueError(f"{name} must be at least the length of the shortest sample, not {size}")
        return size

    def _limits(self, max_tokens: int | None = None) -> TokenLimits:
        """What a batch may hold, at another `max_tokens`."""
        return replace(self._rules, max_tokens=self._max_tokens if max_tokens is None else max_tokens)

    @property
    def epoch(self) -> int:
        """The epoch that is dealt out, or comes next."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; without this, they count up by themselves.

        After `load_state_dict` the epoch that was loaded goes on where it was, unless another one is set.

        Args:
            epoch: number of the epoch, from 0.
        """
        epoch = whole(epoch, name="epoch", at_least=0)
        if self._begun or epoch != self._epoch:
            self._renew(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """The batches of this rank: the rest of the epoch that was loaded, or a new epoch."""
        # All of it when the first batch is asked for: DataLoader makes two iterators, and uses one.
        if self._begun:  # and not ended: somebody has left the loop
            self._renew(self._epoch + 1)
        self._begun = True
        order = self._order_now()
        while True:
            if self._order is not order:
                raise RuntimeError(
                    "this iterator has ended: its sampler was iterated again, or got another state or epoch"
                )
            step = order.deal(self._at, self._max_tokens)
            if step is None:
                self._renew(self._epoch + 1)
                return
            self._at = step.after
            yield step.batches[self.rank]

    def __len__(self) -> int:
        """Batches of this rank in this epoch: those dealt out, and those to come with `max_tokens` of now."""
        return self._order_now().count(self._at, self._max_tokens)

    def _order_now(self) -> TokenOrder:
        if self._order is None:
            self._order = self._order_of(self._epoch)
        return self._order

    def _order_of(self, epoch: int) -> TokenOrder:
        """What deals out the samples of an epoch."""
        return TokenOrder(self, epoch)

    def _renew(self, epoch: int) -> None:
        at = self._at
        now = (at.steps, at.samples, at.tokens)
        steps, samples, tokens = map(operator.add, self._done, now)
        self._done = (steps, samples, tokens)
        self._epoch, self._at, self._begun, self._order = epoch, TokenPosition(), False, None

    def state_dict(self) -> dict[str, Any]:
        """Where the run is, by what was dealt out; of all ranks, so that any of them may save it."""
        return {
            "version": _VERSION,
            "epoch": self._epoch,
            "seed": self.seed,
            "length": len(self.lengths),
            "given_max_tokens": self._given,
            "max_tokens": self._max_tokens,
            "done": list(self._done),
            "position": self._at.to_dict(),
            "made_with": self._made_with(),
        }

    def _made_with(self) -> dict[str, Any]:
        """What a position in an epoch depends on besides seed, `max_tokens` and ranks, as plain data."""
        rules = asdict(self._rules)
        del rules["max_tokens"]
        flags = {name: getattr(self, name) for name in ("drop_longer", "drop_last", "shuffle", "window")}
        places = torch.arange(1, len(self.lengths) + 1)
        return {**rules, **flags, "checksum of lengths": int((self.lengths * places).sum())}

    def _check_goes_on(self, position: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
        """Refuse a position within an epoch of a sampler that was made otherwise: it deals out otherwise.

        Args:
            position: where the checkpoint is.
            made_with: `_made_with()` of its sampler.
        """
        for name, own in self._made_with().items() if position["steps"] else ():
            if own != made_with[name]:
                raise ValueError(
                    f"{name} must be {made_with[name]!r} to go on within the epoch of the state, not {own!r}"
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, also with another number of ranks.

        `max_tokens` is that of the checkpoint, unless this sampler was made with another one than that of the
        checkpoint was made with: then that counts. Only samples that have not come yet come either way.

        Args:
            state: what `state_dict()` returned.

        Raises:
            ValueError: `state` is something else, of another dataset, or within an epoch of a sampler with
                other arguments.
        """
        found = state.get("version") if hasattr(state, "get") else None
        if found != _VERSION or "position" not in state:
            raise ValueError(f"state must be what state_dict() returned, not {state!r:.80}")
        if state["length"] != len(self.lengths):
            raise ValueError(f"state must be of {len(self.lengths)} samples, not {state['length']!r}")
        self._check_goes_on(state["position"], state["made_with"])
        if state["given_max_tokens"] == self._given:
            self.max_tokens = state["max_tokens"]
        self.seed = state["seed"]
        self._epoch, self._done = state["epoch"], tuple(state["done"])
        self._at = TokenPosition.from_dict(state["position"])
        self._begun, self._order = False, None

    def extremes(self, max_tokens: int) -> list[list[int]]:
        """Batches that need the most memory at that size, by index: what a search runs.

        That of the longest samples, that of the most tokens, that of the most samples and that of the most
        squared lengths (attention), as far as they are different.

        Args:
            max_tokens: most tokens of one batch on one rank.

        Returns:
            One to four batches, each a list of indices.
        """
        limits = self._limits(self._checked(max_tokens))
        lengths, order = torch.sort(self.lengths, descending=True, stable=True)
        sizes, indices = lengths.tolist(), order.tolist()
        fits = next(at for at, length in enumerate(sizes) if limits.padded(length) <= max_tokens)
        runs = longest_runs(sizes, limits, fits)
        widest = max(runs, key=lambda run: limits.tokens(sizes[slice(*run)]))
        most = max(runs, key=lambda run: run[1] - run[0])
        squared = max(runs, key=lambda run: limits.squares(sizes[slice(*run)]))
        return [indices[slice(*run)] for run in dict.fromkeys((runs[0], widest, squared, most))]

    def shapes(self, max_tokens: int) -> str:
        """`extremes` as text: `4 x 512, 32 x 64`, samples and the length of the longest.

        Args:
            max_tokens: most tokens of one batch on one rank.

        Returns:
            The text.
        """
        limits, found = self._limits(max_tokens), []
        for indices in self.extremes(max_tokens):
            longest = int(self.lengths[indices].max())
            found.append(f"{len(indices)} x {limits.padded(longest)}")
        return f"{', '.join(dict.fromkeys(found))} (samples x {'longest' if limits.packed else 'tokens'})"

    def bounds(self) -> tuple[int, int]:
        """The least `max_tokens` that is allowed, and the most that changes anything."""
        limits, count = self._rules, len(self.lengths)
        lengths = self.lengths.min() if self.drop_longer else self.lengths.max()
        rows = count if limits.max_rows is None else min(count, limits.max_rows)
        longest = limits.padded(int(self.lengths.max()))
        most = int(self.lengths.sum()) if limits.packed else longest * rows
        least = limits.padded(int(lengths))
        return least, max(least, most)

    def __repr__(self) -> str:
        what = "packed" if self._rules.packed else "padded"
        return (
            f"TokenBatchSampler({len(self.lengths)} samples, at most {self._max_tokens} {what} tokens, rank "
            f"{self.rank} of {self.world_size})"
        )


def _checked_lengths(lengths: Any) -> torch.Tensor:
    try:
        found = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    if found.numel() == 0:
        raise ValueError("lengths must hold at least one sample, not none")
    if found.dim() != 1 or found.is_floating_point() or found.is_complex() or found.dtype is torch.bool:
        raise TypeError(f"lengths must be one integer per sample of the dataset, not {lengths!r:.80}")
    found = found.to("cpu", torch.int64)
    if (least := int(found.min())) < 1:
        raise ValueError(f"lengths must be at least 1, and sample {int(found.argmin())} has {least}")
    return found
