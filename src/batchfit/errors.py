"""Errors that batchfit raises itself.

    BatchfitError
    ├── NothingFitsError      not even the smallest allowed size ran
    ├── SearchStoppedError    a limit ended the search before any size ran
    ├── NothingRanError       a trial ran no step, so it proves nothing
    ├── SnapshotError         a part of the state could not be put back
    ├── TargetError           a command-line target could not be loaded
    ├── RanksDisagreeError    ranks hold different values where all must agree
    ├── RankMissingError      a rank did not answer in time, or has left with an error of its own
    └── ResultFileError       a result file cannot be read

Wrong arguments are `ValueError` or `TypeError`, raised before any device work. An error of the
user's own code comes out unchanged, with the batch size added as a note.
"""

from __future__ import annotations

from collections.abc import Iterable


class BatchfitError(Exception):
    """Base of every error that batchfit raises for a run that cannot go on."""


class NothingFitsError(BatchfitError):
    """Not even the smallest allowed size ran; carries the numbers."""

    def __init__(
        self,
        size: int,
        *,
        device: str,
        budget_bytes: int,
        peak_bytes: int | None = None,
        detail: str = "",
    ) -> None:
        from batchfit._decide.units import format_bytes

        self.size = size
        self.device = device
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes
        self.detail = detail
        peak = f"peak {format_bytes(peak_bytes)} of " if peak_bytes is not None else "budget "
        advice = "Shrink the model or the sequence length, or turn on activation checkpointing."
        if size > 1:
            advice = f"Allow a smaller size than {size} (min_size, multiple_of), or shrink the model."
        text = f"a batch of {size} does not fit on {device} ({peak}{format_bytes(budget_bytes)}). {advice}"
        super().__init__(f"{text} ({detail})" if detail else text)


class SearchStoppedError(BatchfitError):
    """A limit (`max_trials`, `time_limit_s`) ended the search before any size had run."""


class NothingRanError(BatchfitError):
    """A trial in which no step ran proves nothing."""


class SnapshotError(BatchfitError):
    """A part of the workload's state could not be copied or put back."""


class UntraceableError(BatchfitError):
    """A step cannot be traced with fake tensors; names the operation, the line and the reason."""

    def __init__(self, operation: str, where: str, why: str) -> None:
        self.operation = operation
        self.where = where
        self.why = why
        at = f" at {where}" if where else ""
        super().__init__(
            f"the step cannot be traced: {operation or 'the step'}{at}: {why}. "
            "batchfit find measures instead."
        )


class TargetError(BatchfitError):
    """A command-line target (`file.py:function`) could not be loaded or made no workload."""


class RanksDisagreeError(BatchfitError):
    """Ranks hold different values where all must hold the same."""


class RankMissingError(BatchfitError):
    """One or more ranks did not answer within the time-out, or said that they will not (`why`)."""

    def __init__(self, missing: Iterable[int], *, doing: str, timeout_s: float, why: str = "") -> None:
        self.missing = tuple(missing)
        self.doing = doing
        self.timeout_s = timeout_s
        self.why = why
        named = "rank " + str(self.missing[0])
        if len(self.missing) > 1:
            named = "ranks " + ", ".join(map(str, self.missing))
        happened = f"did not come ({why})" if why else f"did not answer within {timeout_s:g} s"
        super().__init__(
            f"{named} {happened} while all ranks had to agree on {doing}. "
            "Look at that rank's own output: it has most likely failed or is stuck."
        )


class ResultFileError(BatchfitError):
    """A result could not be read: says which field and why."""
