"""The options of a check: the keywords of `check_memory`, and the flags of `batchfit check`.

Rules: as in `_find.pure.options`. All are None where they are not given: what `[tool.batchfit.check]` says
comes next, then the defaults here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from batchfit._arguments import check_flag, check_whole
from batchfit._check.pure.limits import Allowance, parse_allowance
from batchfit._options import flag
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.allocator.gpus import Gpu

BASELINE = "memory.json"
MAX_INCREASE = "2%"
NAME = "workload"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """What to check, and against what, checked; `check_memory` documents each option."""

    baseline: str | Path | None = flag(
        None,
        str,
        metavar="FILE",
        shown_default=BASELINE,
        help="File with the baselines of all targets; it belongs into git.",
    )
    update: bool = flag(False, help="Write the baseline of what is checked, in place of comparing with it.")
    batch_size: int | None = flag(
        None, int, metavar="N", shown_default="that of the baseline", help="Size to check, per process."
    )
    budget: int | str | None = flag(
        None,
        str,
        metavar="BYTES",
        shown_default=False,
        help="Check the largest size within this budget, too.",
    )
    max_increase: int | str | None = flag(
        None,
        str,
        metavar="SHARE",
        shown_default=MAX_INCREASE,
        help="How much more than the baseline is allowed: 2%, 500MiB, or 0.",
    )
    max_peak: int | str | None = flag(
        None, str, metavar="BYTES", shown_default=False, help="The highest peak that is allowed, with or "
        "without a baseline."
    )  # fmt: skip
    gpu: str | None = flag(
        None,
        str,
        metavar="GPU",
        shown_default="that of the baseline, else h200",
        help="GPU whose choice of kernels counts. None is needed.",
    )

    def __post_init__(self) -> None:
        check_flag("update", self.update)
        check_whole("batch_size", self.batch_size, optional=True)
        path: object = self.baseline
        if path is not None and (not isinstance(path, str | Path) or path == ""):
            raise TypeError(f"baseline must be the path of a file or None, not {self.baseline!r}")
        _ = self.target, self.budget_bytes, self.allowance, self.max_peak_bytes

    @property
    def target(self) -> Gpu | None:
        """The GPU that is named."""
        from batchfit._engine.allocator.gpus import gpu_named

        return None if self.gpu is None else gpu_named(self.gpu)

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None where none is given."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def allowance(self) -> Allowance:
        """How much more than the baseline is allowed."""
        value = MAX_INCREASE if self.max_increase is None else self.max_increase
        return parse_allowance(value, name="max_increase")

    @property
    def max_peak_bytes(self) -> int | None:
        """The highest peak in bytes; None where none is given."""
        return None if self.max_peak is None else parse_bytes(self.max_peak, name="max_peak")
