"""What is done after the program has ended: nothing, or another start with a smaller size.

Rules:
- Only an OOM starts it again: an error that says so, or the kernel's OOM killer. A program that ended well,
  or that was asked to end, is not started again whatever it reported.
- Each start has a smaller size than the one before, from those that the search may try: a size that ran where
  there is one a little below, else four fifths.
- What ended it is passed on: its exit code, or 128 and the number of the signal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from batchfit._find.pure.bracket import Sizes

_LOWER = 0.8  # of a size at which the program was out of memory
_CLEARLY_LOWER = 0.9  # a size that ran is worth a start at this share or less
_KILLED = (-9, 137)  # by SIGKILL; as a shell or a launcher passes it on


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one start of the program ended: its exit code, or minus a signal's number.

    `oom` is the text of an OOM that a process of it reported as its end. `kernel_kills`: processes that the
    kernel's OOM killer ended meanwhile. `stopped`: it was asked to end, by a signal to batchfit.
    """

    code: int
    elapsed_s: float = 0.0
    oom: str = ""
    kernel_kills: int = 0
    stopped: bool = False

    @property
    def exit_code(self) -> int:
        """What a shell would say."""
        return 128 - self.code if self.code < 0 else self.code

    @property
    def too_large(self) -> str:
        """Why the size was too large, in a few words; empty where nothing says so."""
        if self.code == 0 or self.stopped:
            return ""
        if self.oom:
            return self.oom
        killed = self.code in _KILLED and self.kernel_kills > 0
        return "killed by the kernel (OOM killer)" if killed else ""


def next_size(size: int, sizes: Sizes, ran: Sequence[int]) -> int | None:
    """The size of the next start after an OOM at `size`, None where none is left; `ran`: sizes that ran."""
    if size <= sizes.first:
        return None
    wanted = max([math.floor(size * _LOWER), *(one for one in ran if one <= size * _CLEARLY_LOWER)])
    return sizes.at(max(0, sizes.index(min(wanted, size - 1))))


def first_line(text: str, *, most: int = 100) -> str:
    """What an error says first, short enough for a line."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r"^[\w.]*Error: ", "", line)
    line = line.split(". GPU ", 1)[0].rstrip(".")  # torch goes on with what each process holds
    return line if len(line) <= most else line[: most - 3] + "..."
