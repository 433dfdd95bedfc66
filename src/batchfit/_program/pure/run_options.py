"""The flags of `batchfit run` besides those of a search: with which size, and what after an OOM.

Rules: as in `_find.pure.options`: wrong values are refused with their names, before anything is started.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from batchfit._arguments import check_whole
from batchfit._options import flag

if TYPE_CHECKING:
    from batchfit._find.pure.bracket import Sizes

_RUN = "Run"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How the program is run for real, checked."""

    size: int | None = flag(
        None,
        int,
        metavar="N",
        panel=_RUN,
        shown_default="searched, or the stored one",
        help="Run with this size, and search for none.",
    )
    margin: float = flag(
        0.0,
        metavar="SHARE",
        panel=_RUN,
        help="Stay below the largest size by this share: 0.1 runs 90 where 100 was found.",
    )
    restarts: int = flag(
        0,
        metavar="N",
        panel=_RUN,
        help="After an OOM, start the program again with a smaller size, up to N times.",
    )
    out: Path | None = flag(
        None,
        Path,
        metavar="FOLDER",
        panel=_RUN,
        shown_default=False,
        help="What {out} in the command is in the real run; trials have a temporary folder.",
    )
    dry_run: bool = flag(False, panel=_RUN, help="Show the command with its size, and do not run it.")

    def __post_init__(self) -> None:
        check_whole("size", self.size, optional=True)
        check_whole("restarts", self.restarts, at_least=0)
        margin: object = self.margin
        number = isinstance(margin, int | float) and not isinstance(margin, bool) and math.isfinite(margin)
        if not number or not 0 <= self.margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, not {margin!r}")
        if self.size is not None and self.margin:
            raise ValueError(f"margin must be left out with size, which is run as it is, not {margin!r}")

    def size_of(self, largest: int, sizes: Sizes) -> int:
        """The size to run with, where `largest` is the largest that runs."""
        if not self.margin:
            return largest
        return sizes.at(max(0, sizes.index(largest * (1 - self.margin) + 1e-9)))
