"""The samples of one epoch in token batches: steps with one batch per rank.

Rules: an order keeps no place: a position is a value, and asked twice it gives the same step. Windows, their
plans and what is set aside are those of `_loader/pure/tokens.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, final

import torch

from batchfit._loader.pure.tokens import TokenLimits, TokenPosition, WindowPlan, plan_window

if TYPE_CHECKING:
    from batchfit._loader.token_sampler import TokenBatchSampler

_log = logging.getLogger("batchfit")


@final
@dataclass(frozen=True, slots=True)
class TokenStep:
    """The batches of all ranks in one step, by index, and the position after it."""

    batches: tuple[list[int], ...]
    after: TokenPosition


@final
@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan with the samples that it is made of."""

    samples: torch.Tensor  # in the order that the plan's runs are positions of
    totals: list[int]  # tokens before each of them, and of all
    stop: int  # the next plan begins here in the order of the epoch
    is_last: bool
    plan: WindowPlan

    def batch(self, run: tuple[int, int]) -> list[int]:
        indices: list[int] = self.samples[slice(*run)].tolist()
        return indices

    def rest(self) -> tuple[int, ...]:
        """What the plan sets aside."""
        return tuple(self.samples[list(self.plan.rest)].tolist())

    def left(self, dealt: int) -> tuple[int, ...]:
        """What has not come after so many of its steps."""
        came = torch.zeros(len(self.samples), dtype=torch.bool)
        for step in self.plan.steps[:dealt]:
            for run in step:
                came[slice(*run)] = True
        return tuple(self.samples[~came].tolist())


@final
class TokenOrder:
    """The samples of one epoch, dealt out in steps by a position that is a value: it keeps none itself."""

    def __init__(self, sampler: TokenBatchSampler, epoch: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        lengths = sampler.lengths
        if sampler.shuffle:
            generator = torch.Generator().manual_seed(sampler.seed + epoch)
            self._indices = torch.randperm(len(lengths), generator=generator)
        else:
            self._indices = torch.arange(len(lengths))
        self._lengths = lengths[self._indices]
        self._totals: tuple[int, torch.Tensor] | None = None  # of the samples that fit a size
        self._planned: tuple[tuple[object, ...], _Planned] | None = None
        self._counted: tuple[TokenPosition, int, int] | None = None
        self._has_warned = False

    def deal(self, at: TokenPosition, max_tokens: int) -> TokenStep | None:
        """The next step; None at the end of the epoch."""
        world_size = self._sampler.world_size
        if (at.max_tokens, at.world_size) != (max_tokens, world_size):
            at = self._replanned(at, max_tokens)
        planned = self._plan(at)
        while at.dealt == len(planned.plan.steps):
            if planned.is_last:
                return None
            at = replace(at, held=planned.rest(), start=planned.stop, dealt=0)
            planned = self._plan(at)
        runs = planned.plan.steps[at.dealt]
        batches = tuple(map(planned.batch, runs))
        samples = sum(map(len, batches))
        tokens = sum(planned.totals[stop] - planned.totals[start] for start, stop in runs)
        after = replace(
            at,
            dealt=at.dealt + 1,
            steps=at.steps + 1,
            samples=at.samples + samples,
            tokens=at.tokens + tokens,
        )
        return TokenStep(batches, after)

    def count(self, at: TokenPosition, max_tokens: int) -> int:
        """How many steps the epoch has: those before `at`, and those to come with `max_tokens`."""
        if self._counted is not None and self._counted[:2] == (at, max_tokens):
            return self._counted[2]
        begun, kept = at, self._planned
        if (at.max_tokens, at.world_size) != (max_tokens, self._sampler.world_size):
            at = self._replanned(at, max_tokens)
        planned, steps = self._plan(at), at.steps - at.dealt
        while True:
            steps += len(planned.plan.steps)
            if planned.is_last:
                break
            at = replace(at, held=planned.rest(), start=planned.stop, dealt=0)
            planned = self._plan(at)
        self._planned = kept
        self._counted = (begun, max_tokens, steps)
        return steps

    def _replanned(self, at: TokenPosition, max_tokens: int) -> TokenPosition:
        """The same position where what is left is planned again."""
        held: tuple[int, ...] = ()
        start = 0
        if at.max_tokens:
            before = self._plan(at)
            held, start = before.left(at.dealt), before.stop
        return replace(
            at, held=held, start=start, dealt=0, max_tokens=max_tokens, world_size=self._sampler.world_size
        )

    def _plan(self, at: TokenPosition) -> _Planned:
        key = (at.held, at.start, at.max_tokens, at.world_size)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, self._made(at)
        return self._planned[1]

    def _made(self, at: TokenPosition) -> _Planned:
        sampler, limits = self._sampler, self._sampler._limits(at.max_tokens)
        held = torch.tensor(at.held, dtype=torch.int64)
        stop = self._stop(at, int(sampler.lengths[held].sum()))
        samples = torch.cat([held, self._indices[at.start : stop]])
        lengths = sampler.lengths[samples]
        if not bool((fits := self._fit(lengths, limits)).all()):
            if not sampler.drop_longer:
                sampler._checked(at.max_tokens)  # raises
            self._warn(int((~fits).sum()), limits.max_tokens)
            samples, lengths = samples[fits], lengths[fits]
        random = None
        if sampler.shuffle:
            seed = (sampler.seed, self._epoch, at.start, len(held), at.max_tokens, at.world_size)
            random = Random(repr(seed))
        if not limits.packed:
            longest_first = random is None or random.random() < 0.5
            lengths, by_length = torch.sort(lengths, descending=longest_first, stable=True)
            samples = samples[by_length]
        is_last = stop == len(self._indices)
        listed: list[int] = lengths.tolist()
        plan = plan_window(
            listed,
            limits,
            world_size=at.world_size,
            random=random,
            is_last=is_last,
            drop_last=sampler.drop_last,
        )
        return _Planned(samples, list(accumulate(listed, initial=0)), stop, is_last, plan)

    def _stop(self, at: TokenPosition, held_tokens: int) -> int:
        """Where a window ends that has enough tokens for `window` batches per rank."""
        if self._totals is None or self._totals[0] != at.max_tokens:
            fits = self._fit(self._lengths, self._sampler._limits(at.max_tokens))
            self._totals = at.max_tokens, torch.cumsum(self._lengths * fits, 0)
        totals = self._totals[1]
        before = int(totals[at.start - 1]) if at.start else 0
        wanted = before + self._sampler.window * at.world_size * at.max_tokens - held_tokens
        return max(at.start, min(len(totals), int(torch.searchsorted(totals, wanted)) + 1))

    @staticmethod
    def _fit(lengths: torch.Tensor, limits: TokenLimits) -> torch.Tensor:
        each = limits.pad_to_multiple_of
        return (lengths + each - 1) // each * each <= limits.max_tokens

    def _warn(self, count: int, max_tokens: int) -> None:
        if not self._has_warned and self._sampler.rank == 0:
            self._has_warned = True
            _log.warning(
                "%d samples of a window are longer than max_tokens (%d), and drop_longer leaves them out",
                *(count, max_tokens),
            )
