"""Columns of several GPUs under FSDP2: as many ranks as the column has GPUs."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Sequence

from batchfit._engine.sharding.fake_ranks import fake_ranks
from batchfit._engine.sharding.pure.layout import ShardLayout
from batchfit._plan.pure.options import PlanGpu


def by_count(columns: Sequence[PlanGpu], *, apart: bool) -> dict[int, list[int]]:
    """Indices of the columns; `apart`: those with as many GPUs together, else all of them as of one rank."""
    groups: dict[int, list[int]] = defaultdict(list)
    for at, column in enumerate(columns):
        groups[column.count if apart else 1].append(at)
    return groups


@contextlib.contextmanager
def ranks_of(shards: str, ranks: int) -> Iterator[ShardLayout | None]:
    """Inside a group of that many ranks: how a model is spread over them; None where it is whole."""
    if not shards or ranks < 2:
        yield None
        return
    with fake_ranks(ranks):
        yield ShardLayout.parse(shards, ranks=ranks)
