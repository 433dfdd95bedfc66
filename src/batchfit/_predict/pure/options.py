"""The options of a prediction: the keywords of `predict_batch_size`, and the flags of `batchfit predict`.

Rules: as in `_find.pure.options`. On the command line `budget` and `gpu` may be given several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

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

Budget = int | str


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """What to predict, checked; `predict_batch_size` documents each option."""

    budget: Budget | Sequence[Budget] | None = flag(
        None,
        str,
        repeats=True,
        metavar="BYTES",
        shown_default="what is free on the GPU, or all of --gpu",
        help="Memory the program may use, such as 80GiB or 24GiB,80GiB. May be given several times.",
    )
    gpu: str | None = flag(
        None,
        str,
        repeats=True,
        metavar="GPU",
        shown_default="the one that is here",
        help="GPU to predict for: its memory and its choice of kernels, such as h100 or rtx4090. May be "
        "given several times.",
    )
    max_size: int | None = flag(
        None, int, metavar="N", shown_default="no limit", help="Largest size that is wanted."
    )
    margin: float | None = flag(
        None,
        float,
        metavar="SHARE",
        shown_default="0.02 without a GPU, 0.015 with one, 0.01 calibrated",
        help="Share of the budget to leave free.",
    )
    calibrate: bool | None = flag(
        None,
        bool,
        shown_default="where the workload is on a GPU",
        help="Run two small sizes on the GPU to correct the prediction.",
    )
    expandable_segments: bool | None = flag(
        None,
        bool,
        shown_default="as PYTORCH_CUDA_ALLOC_CONF says",
        help="Whether the program will run with expandable segments.",
    )
    ranks: int | None = flag(None, int, metavar="N", shown_default="1", help=RANKS_HELP)
    shard: str | None = flag(
        None, str, metavar="HOW", shown_default="as the program does it", help=SHARD_HELP
    )
    offload: bool = flag(False, help=OFFLOAD_HELP)

    def __post_init__(self) -> None:
        max_size, margin = self.max_size, self.margin
        if max_size is not None and (type(max_size) is not int or max_size < 1):
            raise ValueError(f"max_size must be a positive integer or None, not {max_size!r}")
        if margin is not None and (type(margin) not in (int, float) or not 0 <= margin < 1):
            raise ValueError(f"margin must be at least 0 and below 1, not {margin!r}")
        for name in ("calibrate", "expandable_segments"):
            value: object = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")
        _ = self.target, self.budgets_bytes, self.layout

    @property
    def layout(self) -> ShardLayout | None:
        """How a plain model is spread over ranks; None where the program does it, or there is one process."""
        if self.ranks is None and self.shard is None and self.offload is False:
            return None
        return layout_of(self.ranks, self.shard, self.offload)

    @property
    def target(self) -> Gpu | None:
        """The GPU that is named; None for the one that is here."""
        from batchfit._engine.allocator.gpus import gpu_named

        return None if self.gpu is None else gpu_named(self.gpu)

    @property
    def budgets_bytes(self) -> list[int] | None:
        """The budgets in bytes; None where none is given."""
        if self.budget is None:
            return None
        if isinstance(self.budget, str | int) or not isinstance(self.budget, Sequence):
            return [parse_bytes(self.budget)]
        if not self.budget:
            raise ValueError("budget must name at least one budget, not an empty list")
        return [parse_bytes(one) for one in self.budget]
