"""What `batchfit run` answers: with which size the program was run, how often, and how it ended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._fit import FitResult


class ProgramStart(Result):
    """One start of the program: its batch size, and how it ended.

    Attributes:
        batch_size: the size that it was started with.
        exit_code: the program's own, or 128 and the number of the signal that ended it.
        oom: how it was out of memory; empty where it was not, or where nothing looked (without `--restarts`).
        elapsed_s: seconds that it ran.
    """

    batch_size: int = Field(ge=1)
    exit_code: int
    oom: str = ""
    elapsed_s: float = 0.0


class ProgramRun(Result):
    """What `batchfit run --output` writes: the program, its last size, every start, and the search before.

    Attributes:
        kind: "run": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        command: the words of the command, with `{}` in the place of the size.
        batch_size: the size of the last start.
        exit_code: what the last start, and `batchfit run`, exited with.
        starts: every start of the program, in order.
        fit: the search; None where the size was given.
        batchfit_version: version of batchfit that ran the program.
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
