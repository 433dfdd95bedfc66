"""What a search for the largest size answers: its trials, and the size.

Rules: a trial says what was run and read, and None where there is no reading; "sustained" is said only of a
soak. A row of a trial is made here, once, for text, notebooks, reports and the live progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from batchfit._charts.tables import html_table, text_table, without_empty
from batchfit._units import format_bytes
from batchfit.results._base import SCHEMA_VERSION, Result

Outcome = Literal["fits", "oom", "too_large", "killed", "timeout"]

TRIAL_COLUMNS = ("size", "verdict", "steps", "peak", "reserved", "of budget", "s/step")

REASONS = {
    "within_tolerance": "the memory left is too little for a size worth trying",
    "predicted": "it is the largest size by the prediction, and it ran",
    "bracketed": "the next larger size was tried and does not fit",
    "max_size": "max_size was reached",
    "near_max_size": "max_size is so little larger that it is not worth a trial",
    "largest": "no batch is larger than this, and the memory has not ended",
    "attempts": "the strategy's attempts are used up",
    "strategy": "the strategy tries no larger size",
    "max_trials": "max_trials was reached",
    "time_limit": "time_limit_s was reached",
    "interrupted": "the search was interrupted",
    "stored": "a stored answer was confirmed by one trial",
}


class Trial(Result):
    """One measured attempt at one batch size of one process: a few steps, or a stability check (soak).

    Attributes:
        size: samples of one forward and backward.
        outcome: "fits", "oom", "too_large" (an error of size that is no OOM), "killed" or "timeout".
        steps_run: steps that ran to their end.
        peak_bytes: peak of live tensor bytes; None without a reading.
        reserved_bytes: peak of what the caching allocator reserved on the device; None without a reading.
        split_bytes: peak of inactive split blocks, which the allocator cannot release; None without a
            reading.
        largest_bytes: the largest block that was allocated at once; None without a reading.
        held_bytes: live bytes between steps, gradients left out; None without a reading.
        alloc_retries: how often the allocator released its cache and tried again.
        settled_retries: such retries in the second half of a stability check; those of a growing generation
            cache do not count.
        step_s: median seconds of the steps after the first, synchronised; None where no second step ran.
        elapsed_s: seconds of the whole trial.
        soak: whether it was a stability check (soak) rather than a plain trial.
        settled: the stability check ended early, without a retry, since the allocator had begun to repeat
            itself.
        ambiguous: the error may have another cause than memory; it counts as an OOM because a smaller size
            ran.
        phase: the phase that failed ("batch", "forward", "backward", "optimizer"), where the workload names
            its phases.
        message: the text of the error; empty where there was none.
    """

    size: int = Field(ge=1)
    outcome: Outcome
    steps_run: int = Field(ge=0)
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    split_bytes: int | None = None
    largest_bytes: int | None = None
    held_bytes: int | None = None
    alloc_retries: int = 0
    settled_retries: int = 0
    step_s: float | None = None
    elapsed_s: float = 0.0
    soak: bool = False
    settled: bool = False
    ambiguous: bool = False
    phase: str | None = None
    message: str = ""

    @property
    def fits(self) -> bool:
        """The trial ended without running out of memory."""
        return self.outcome == "fits"

    @property
    def sustained(self) -> bool:
        """It was a soak, it fits, and no allocation was retried once it had settled."""
        return self.fits and self.soak and self.settled_retries == 0

    @property
    def verdict(self) -> str:
        """The outcome in two words at most, as tables show it."""
        if self.fits and self.soak:
            return "sustained" if self.sustained else "retries"
        if self.soak and self.outcome == "oom":
            return f"oom, step {self.steps_run + 1}"
        return self.outcome

    def __str__(self) -> str:
        return text_table(*without_empty(TRIAL_COLUMNS, [trial_row(self, None)]))


class FitResult(Result):
    """What `find_batch_size` answers: the largest batch size of one forward/backward in one process.

    On several ranks it is the per-device batch size: times the ranks it is the global one.

    Attributes:
        kind: "fit": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        batch_size: the largest size that ran, per process.
        trials: all trials, in the order in which they ran.
        survived_steps: steps of the longest trial at that size.
        stopped_because: why the search ended: a key of `batchfit.results.REASONS`.
        budget_bytes: bytes that the program could use, at the end of the search.
        peak_bytes: peak of live bytes at that size; None without a reading.
        device: where the trials ran ("cuda:0", "cpu").
        strategy: how sizes were chosen ("guided", "bisect", ...).
        elapsed_s: seconds of the search, those of an earlier run that it resumed included.
        trials_resumed: how many of the trials are from the file that the search resumed.
        batchfit_version: version of batchfit that searched.
        torch_version: version of torch that ran the trials.
        from_store: the size was found earlier, and one trial confirmed it now.
        stored_age_s: seconds since then; None without a stored size.
        shrunk_from_bytes: the budget when the search began, where other programs took memory meanwhile; else
            None.
        samples: samples in the workload's dataset, of several ranks in the smallest one; None without a
            dataset.
        unit: "tokens" for batches by tokens: sizes are `max_tokens` then; else "samples".
        made_of: what the batches of the trials were made of, where it is a part of the data: "the longest of
            the first 1,024 samples of Stream"; else empty.
        unseen: caveats: what the trials did not show of a program that is run by its command, such as its
            later steps and an evaluation; empty for a workload, and where the program ended by itself.
    """

    kind: Literal["fit"] = "fit"
    schema_version: int = SCHEMA_VERSION
    batch_size: int = Field(ge=1)
    trials: tuple[Trial, ...]
    survived_steps: int
    stopped_because: str
    budget_bytes: int
    peak_bytes: int | None
    device: str
    strategy: str
    elapsed_s: float
    trials_resumed: int = 0
    batchfit_version: str = ""
    torch_version: str = ""
    from_store: bool = False
    stored_age_s: float | None = None
    shrunk_from_bytes: int | None = None
    samples: int | None = None
    unit: Literal["samples", "tokens"] = "samples"
    made_of: str = ""
    unseen: tuple[str, ...] = ()

    @property
    def sustained(self) -> bool:
        """The size also survived the soak, with no allocation retry once settled."""
        return any(trial.sustained for trial in self.trials if trial.size == self.batch_size)

    @property
    def lasted(self) -> str:
        """How long the size ran: `survived 25 steps`, `ran 3 steps`."""
        how = "survived" if self.sustained else "ran"
        settled = any(trial.settled for trial in self.trials if trial.size == self.batch_size)
        after = ", and from there on its memory repeats itself" if settled else ""
        return f"{how} {self.survived_steps} step{'' if self.survived_steps == 1 else 's'}{after}"

    @property
    def reason(self) -> str:
        """Why the search stopped, as a sentence."""
        return REASONS.get(self.stopped_because, self.stopped_because)

    @property
    def max_tokens(self) -> int | None:
        """The largest `max_tokens` that ran, of batches by tokens; None for batches by samples."""
        return self.batch_size if self.unit == "tokens" else None

    @property
    def size_text(self) -> str:
        """`batch size 32`, or `max_tokens 16384`."""
        return f"{'batch size' if self.unit == 'samples' else 'max_tokens'} {self.batch_size}"

    @property
    def summary(self) -> str:
        """The answer in one sentence."""
        peak = f", peak {format_bytes(self.peak_bytes)}" if self.peak_bytes is not None else ""
        return (
            f"{self.size_text} on {self.device}{peak} of {format_bytes(self.budget_bytes)}, "
            f"{self.lasted}; {len(self.trials)} trials in {self.elapsed_s:.1f} s"
            f"{self.resumed}; "
            f"stopped because {self.reason}{few_samples(self.batch_size, self.samples)}"
            f"{self.made_of and f'; batches of {self.made_of}'}"
            f"{''.join(f'; {one}' for one in self.unseen)}"
        )

    @property
    def resumed(self) -> str:
        """How many of the trials were taken from the file of an earlier run; empty where none were."""
        if not self.trials_resumed:
            return ""
        count = "all" if self.trials_resumed == len(self.trials) else str(self.trials_resumed)
        return f" ({count} of them in an earlier run)"

    def __str__(self) -> str:
        return f"{text_table(*self._table())}\n{self.summary}"

    def _table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Columns and rows of the trials."""
        return without_empty(TRIAL_COLUMNS, [trial_row(trial, self.budget_bytes) for trial in self.trials])

    def _repr_html_(self) -> str:
        from batchfit._charts.figures import Memory, as_cell, memory_chart

        table = html_table(*self._table(), caption=self.summary)
        return table + as_cell(memory_chart(Memory(fits=(("", self),))))


def few_samples(batch_size: int, samples: int | None) -> str:
    """What to know where a batch of that size is more than the whole dataset; empty where it is not."""
    if samples is None or batch_size <= samples:
        return ""
    return f"; the dataset has {samples} samples, so that no batch of it is larger"


def trial_row(trial: Trial, budget_bytes: int | None) -> tuple[str, ...]:
    """A trial as the cells of one table row (shared by text, HTML and the live progress).

    Args:
        trial: the trial.
        budget_bytes: the budget, for the share of it; None: no share.
    """

    def amount(count: int | None) -> str:
        return "-" if count is None else format_bytes(count)

    used = trial.reserved_bytes if trial.reserved_bytes is not None else trial.peak_bytes
    share = "-" if used is None or not budget_bytes else f"{used / budget_bytes:.1%}"
    return (
        str(trial.size),
        trial.verdict,
        str(trial.steps_run),
        amount(trial.peak_bytes),
        amount(trial.reserved_bytes),
        share,
        "-" if trial.step_s is None else f"{trial.step_s:.3g}",
    )
