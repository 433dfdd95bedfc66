"""The options of an explanation: the keywords of `explain_memory`, and the flags of `batchfit explain`.

Rules: as in `_find.pure.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from batchfit._arguments import check_flag, check_whole
from batchfit._engine.sharding.pure.layout import (
    OFFLOAD_HELP,
    RANKS_HELP,
    SHARD_HELP,
    ShardLayout,
    layout_of,
)
from batchfit._options import flag
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.allocator.gpus import Gpu


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainOptions:
    """What to explain, checked; `explain_memory` documents each option."""

    batch_size: int = flag(kind=int, metavar="N", shown_default=False, help="Size to explain.")
    budget: int | str | None = flag(
        None,
        str,
        metavar="BYTES",
        shown_default="what is free on the GPU, or all of --gpu",
        help="Memory the program may use, for the largest batch as it is and with each change.",
    )
    gpu: str | None = flag(
        None,
        str,
        metavar="GPU",
        shown_default="the one that is here",
        help="GPU whose memory and kernels count.",
    )
    what_if: bool = flag(True, help="Trace what checkpointing, bf16 and the like would change, too.")
    ranks: int | None = flag(None, int, metavar="N", shown_default="1", help=RANKS_HELP)
    shard: str | None = flag(
        None, str, metavar="HOW", shown_default="as the program does it", help=SHARD_HELP
    )
    offload: bool = flag(False, help=OFFLOAD_HELP)

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size)
        check_flag("what_if", self.what_if)
        _ = self.target, self.budget_bytes, self.layout

    @property
    def layout(self) -> ShardLayout | None:
        """How a plain model is spread over ranks; None where the program does it, or there is one process."""
        return layout_of(self.ranks, self.shard, self.offload)

    @property
    def target(self) -> Gpu | None:
        """The GPU that is named; None for the one that is here."""
        from batchfit._engine.allocator.gpus import gpu_named

        return None if self.gpu is None else gpu_named(self.gpu)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None where none is given."""
        return None if self.budget is None else parse_bytes(self.budget)
