"""What `batchfit run` answers: with which size the program was run, how often, and how it ended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._fit import FitResult


class ProgramStart(Result):
    """One start of the program: its batch size, and how it ended.

    `exit_code` is the program's own, or 128 and the number of the signal that ended it. `oom` says how it was
    out of memory; it is empty where it was not, or where nothing looked (without `--restarts`).
    """

    batch_size: int = Field(ge=1)
    exit_code: int
    oom: str = ""
    elapsed_s: float = 0.0


class ProgramRun(Result):
    """A program that was run: its command, the size it ended with, every start, and the search before it.

    `fit` is the search, None where the size was given. `exit_code` is what `batchfit run` exits with.
    """

    kind: Literal["run"] = "run"
    schema_version: int = SCHEMA_VERSION
    command: tuple[str, ...]
    batch_size: int = Field(ge=1)
    exit_code: int
    starts: tuple[ProgramStart, ...]
    fit: FitResult | None = None
    batchfit_version: str = ""

    @property
    def restarts(self) -> int:
        """How often it was started again, after an OOM."""
        return len(self.starts) - 1

    def __str__(self) -> str:
        """One line."""
        again = f" after {self.restarts} restart{'s' if self.restarts > 1 else ''}" if self.restarts else ""
        elapsed_s = sum(one.elapsed_s for one in self.starts)
        return f"batch size {self.batch_size}{again}: exit code {self.exit_code} in {elapsed_s:.1f} s"
