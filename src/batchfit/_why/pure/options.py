"""The options of a post-mortem: the keywords of `explain_oom`, and the flags of `batchfit why`.

Rules: as in `_find.pure.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from batchfit._arguments import check_flag, check_whole
from batchfit._options import flag
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.allocator.gpus import Gpu


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WhyOptions:
    """What is known beside the snapshot, checked; `explain_oom` documents each option."""

    budget: int | str | None = flag(
        None,
        str,
        metavar="BYTES",
        shown_default="all of --gpu",
        help="Memory the process could use: no snapshot says it.",
    )
    gpu: str | None = flag(
        None, str, metavar="GPU", shown_default=False, help="GPU it ran on, for its memory (h100, rtx4090)."
    )
    batch_size: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default=False,
        help="Batch size of the step that failed, to count in samples.",
    )
    what_if: bool = flag(True, help="Replay the allocator under other settings, too.")

    def __post_init__(self) -> None:
        check_flag("what_if", self.what_if)
        if self.batch_size is not None:
            check_whole("batch_size", self.batch_size)
        _ = self.target, self.total_bytes

    @property
    def target(self) -> Gpu | None:
        """The GPU that is named; None for one that is not known."""
        from batchfit._engine.allocator.gpus import gpu_named

        return None if self.gpu is None else gpu_named(self.gpu)

    @property
    def total_bytes(self) -> int | None:
        """Memory that the process could use, where it is given."""
        if self.budget is not None:
            return parse_bytes(self.budget)
        target = self.target
        return None if target is None else target.usable_bytes
