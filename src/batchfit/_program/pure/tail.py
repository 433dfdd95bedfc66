"""The last lines that a program has printed, shortened for an error."""

from __future__ import annotations

import re
from collections import deque
from typing import final

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_KEPT, _LONGEST = 200, 400


@final
class Tail:
    """Takes what is printed, keeps its last lines; a progress bar is its last state."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._rest = ""

    def take(self, text: str) -> None:
        """More of the output."""
        *lines, self._rest = (self._rest + text).split("\n")
        self._rest = self._rest[-_LONGEST * 20 :]
        self._lines.extend(lines)

    def lines(self, most: int = 15) -> list[str]:
        """The last lines that say something."""
        shown = [_cleaned(line) for line in (*self._lines, self._rest)]
        return [line for line in shown if line][-most:]


def _cleaned(line: str) -> str:
    line = line.rstrip("\r").rpartition("\r")[2]
    line = _CONTROL.sub("", line).rstrip()
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."
