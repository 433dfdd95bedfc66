"""Errors that batchfit raises itself.

    BatchfitError
    ├── NothingFitsError      not even the smallest allowed size ran; a RuntimeError, too
    ├── SearchStoppedError    a limit ended the search before any size ran
    ├── NothingRanError       a trial ran no step, so it proves nothing
    ├── SnapshotError         a part of the state could not be restored
    ├── StepInterruptedError  out of memory inside an optimizer step, after something may have moved
    ├── UntraceableError      a step cannot be traced; names the operation and the line
    ├── ReadOnceError         an iterable dataset can be read once only, so nothing of it can be tried
    ├── TargetError           a target (`file.py:function`) could not be loaded
    ├── ChildDiedError        a child process ended for a reason that is not the batch size
    ├── ChildRaisedError      your code raised in a child process an error that this one does not know
    ├── ProgramError          a program that was given as a command cannot be measured; its last lines
    ├── SettingsDifferError   a file to resume from holds a search or a sweep with other settings
    ├── RanksDisagreeError    ranks hold different values where all must agree
    ├── CollectivesError      steps issue collectives that a rank whose step failed cannot issue
    ├── RankMissingError      a rank did not answer in time, or has left with an error of its own
    ├── RankFailedError       another rank raised, so what all had to do together did not happen
    └── ResultFileError       a result file, or a memory snapshot, cannot be read

Wrong arguments are `ValueError` or `TypeError`, raised before any device work; a wrong schedule is a
`ValueError` that is a `pydantic.ValidationError`, too. An error of the
user's own code comes out unchanged, with the batch size added as a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

_EXPLAIN_FURTHER = "More: batchfit explain (batchfit.explain_memory) at that size."
_LOOK_FURTHER = 'More: batchfit.record_oom("oom.pickle"), then batchfit why oom.pickle.'


class BatchfitError(Exception):
    """Base of every error that batchfit raises for a run that cannot go on.

    All of them can be pickled, so that a process pool or a Ray task can raise them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.args, self.__dict__)


def _unpickled(kind: type[BatchfitError], args: tuple[Any, ...], state: dict[str, Any]) -> BatchfitError:
    """An error as it was; its `__init__` takes what the text was made of, not the text."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


_NO_BATCH_HELPS = (
    "Fewer or shorter samples do not help: keep the weights in bf16, freeze most of them (LoRA), shard them "
    "(FSDP), use an optimizer with less state (Adafactor, 8-bit Adam, SGD), or take a larger GPU."
)


_LAST_RESORT = "Shrink the model or the sequence length, shard the weights (FSDP), or take a larger GPU."


def _most_of(holders: Sequence[tuple[str, int]], *, traced: bool = False, further: str = "") -> str:
    """Who holds the most, as a sentence of an error, and the command that shows more."""
    from batchfit._units import format_bytes

    if not holders:
        return ""
    listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in holders)
    if traced:
        return f" Most of its peak, by a trace of the step: {listed}. {_EXPLAIN_FURTHER}"
    return f" Most of what was held: {listed}. {f'More: {further}.' if further else _LOOK_FURTHER}"


def _what_would_fit(
    changes: Sequence[tuple[str, str]], changed_bytes: int | None, tried: Sequence[str]
) -> str:
    """The changes that make a size fit, or that none does."""
    from batchfit._units import format_bytes

    peak = "" if changed_bytes is None else f" (peak {format_bytes(changed_bytes)})"
    if changes:
        names = " and ".join(name for name, _ in changes)
        return f"By prediction it fits with {names}{peak}: {'; '.join(how for _, how in changes)}."
    if tried:
        return f"By prediction it does not fit with {' and '.join(tried)} either{peak}."
    return ""


def _needs(budget_bytes: int, peak_bytes: int | None, detail: str) -> str:
    """What a size needs, of what; with numbers that add up where the text of the OOM has them."""
    from batchfit._units import format_bytes, in_use_bytes, requested_bytes

    budget = format_bytes(budget_bytes)
    requested, in_use = requested_bytes(detail), in_use_bytes(detail)
    if requested is not None and in_use is not None:
        least = format_bytes(in_use + requested)
        parts = f"{format_bytes(in_use)} in use + {format_bytes(requested)} requested"
        return f"needs at least {least}: {parts}, of {budget}"
    if peak_bytes is None:
        return f"budget {budget}"
    more = "" if requested is None else f", and {format_bytes(requested)} more requested"
    return f"peak {format_bytes(peak_bytes)} of {budget}{more}"


class NothingFitsError(BatchfitError, RuntimeError):
    """Not even the smallest allowed size ran; carries the numbers. A RuntimeError, as an OOM is, too.

    Attributes:
        size: the smallest size that was tried.
        device: where ("cuda:0", "cpu").
        budget_bytes: bytes that the program could use.
        peak_bytes: what that size needed at least; None without a reading.
        state_bytes: bytes of weights, gradients and optimizer state; None where they are not known.
        phase: the phase of the OOM ("optimizer"); None where it is not known.
        detail: the text of the OOM.
        holders: what holds the most of the memory, with its bytes; empty where it is not known.
        changes: what would make it fit, by prediction, and how to write each; empty where that is not known.
        changed_bytes: the predicted peak with them, or with those that were `tried`.
        tried: changes that do not make it fit together, by prediction, where none do.
        traced: whether the step was traced to see the holders, after it had failed.
    """

    def __init__(
        self,
        size: int,
        *,
        device: str,
        budget_bytes: int,
        peak_bytes: int | None = None,
        state_bytes: int | None = None,
        phase: str | None = None,
        detail: str = "",
        advice: str = "",
        holders: Sequence[tuple[str, int]] = (),
        changes: Sequence[tuple[str, str]] = (),
        changed_bytes: int | None = None,
        tried: Sequence[str] = (),
        traced: bool = False,
        further: str = "",
    ) -> None:
        from batchfit._units import format_bytes

        self.size = size
        self.device = device
        self.budget_bytes = budget_bytes
        self.peak_bytes = peak_bytes
        self.state_bytes = state_bytes
        self.phase = phase
        self.detail = detail
        self.holders = tuple((name, size) for name, size in holders)
        self.changes = tuple((name, how) for name, how in changes)
        self.changed_bytes = changed_bytes
        self.tried = tuple(tried)
        self.traced = traced
        known = _what_would_fit(self.changes, changed_bytes, self.tried)
        if state_bytes is not None and state_bytes > budget_bytes:
            alone = "Weights alone, in training with gradients and optimizer state, take at least"
            advice = f"{alone} {format_bytes(state_bytes)}. {known or _NO_BATCH_HELPS}"
        elif phase == "optimizer":
            gone = "Out of memory in the optimizer's step, when what the samples need was free again."
            advice = f"{gone} {known or _NO_BATCH_HELPS}"
        elif known:
            advice = f"{advice} {known}".strip()
        if self.tried and not self.changes:
            advice = f"{advice} {_LAST_RESORT}"
        if not advice and size == 1:
            advice = "Shrink the model or the sequence length, or turn on activation checkpointing."
        elif not advice:
            advice = f"Allow a smaller size than {size} (min_size, multiple_of), or shrink the model."
        needs = _needs(budget_bytes, peak_bytes, detail)
        text = f"a batch of {size} does not fit on {device} ({needs}). {advice}"
        held = _most_of(self.holders, traced=traced, further=further)
        super().__init__(f"{text}{held}" + (f" ({detail})" if detail else ""))


class SearchStoppedError(BatchfitError):
    """A limit (`max_trials`, `time_limit_s`) ended the search before any size had run."""


class NothingRanError(BatchfitError):
    """A trial in which no step ran proves nothing."""


class SnapshotError(BatchfitError):
    """A part of the workload's state could not be copied or restored."""


class StepInterruptedError(BatchfitError):
    """Out of memory inside an optimizer step, after something may have moved; says what, and what to do.

    Attributes:
        phase: "gradients" (unscaling, clipping: parameters and optimizer state have not moved), "parameters"
            (optimizer number `interrupted`; those before it have stepped, those after it have not) or
            "scaler" (all have stepped, only its update is missing).
        optimizers: the class names of all optimizers of the step.
        interrupted: number of the optimizer that was interrupted, from 0.
        moved: names of parameters that have certainly moved; any of that optimizer's may have, since fused
            kernels leave no trace.
        parameters: how many parameters that optimizer has.
        detail: the text of the OOM.
        holders: what holds the most of the memory, with its bytes; empty where it is not known.
    """

    def __init__(
        self,
        phase: Literal["gradients", "parameters", "scaler"],
        *,
        optimizers: Iterable[str],
        interrupted: int = 0,
        moved: Iterable[str] = (),
        parameters: int = 0,
        detail: str = "",
        holders: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.phase = phase
        self.optimizers = tuple(optimizers)
        self.interrupted = interrupted
        self.moved = tuple(moved)
        self.parameters = parameters
        self.detail = detail
        self.holders = tuple(holders)
        text = {
            "gradients": self._gradients,
            "parameters": self._parameters,
            "scaler": self._scaler,
        }[phase]()
        super().__init__(f"{text}{_most_of(self.holders)}" + (f" ({detail})" if detail else ""))

    def _gradients(self) -> str:
        return (
            "out of memory while gradients were unscaled or clipped: some may be scaled and others not. "
            "Parameters and optimizer state have not moved: drop the gradients (zero_grad) and go on with "
            "the next batch. rollback=True (a host copy) prevents this."
        )

    def _parameters(self) -> str:
        name = self.optimizers[self.interrupted]
        if len(self.optimizers) > 1:
            name = f"{name} (optimizer {self.interrupted + 1} of {len(self.optimizers)})"
        known = f"any of its {self.parameters} parameters may have moved"
        if self.moved:
            shown = ", ".join(self.moved[:3]) + (", ..." if len(self.moved) > 3 else "")
            known += f", and {len(self.moved)} certainly have ({shown})"
        before = ""
        if self.interrupted:
            before = f" {', '.join(self.optimizers[: self.interrupted])} had stepped already."
        return (
            f"out of memory inside the step of {name}: {known}.{before} Do not train on: load a checkpoint. "
            "fused=True (an optimizer without temporaries) or rollback=True (a host copy) prevent this."
        )

    def _scaler(self) -> str:
        return (
            "out of memory in the gradient scaler's update, when every parameter had stepped. "
            "Call scaler.update() and go on."
        )


class UntraceableError(BatchfitError):
    """A step cannot be traced with fake tensors; names the operation, the line and the reason.

    Attributes:
        operation: the operation that cannot be traced.
        where: its source line.
        why: the reason.
        raised: the step raised an ordinary error (its `__cause__`), which may be its own as well.
    """

    def __init__(self, operation: str, where: str, why: str, *, raised: bool = False) -> None:
        self.operation = operation
        self.where = where
        self.why = why
        self.raised = raised
        at = f" at {where}" if where else ""
        if raised:
            doing = f" ({operation})" if operation else ""
            super().__init__(
                f"the step raised {why.rstrip('.')}{at}{doing} while it was traced. Run one step by hand, "
                "or batchfit find: if it is raised there too it is the step's own, otherwise it comes of "
                "tracing."
            )
            return
        super().__init__(
            f"the step cannot be traced: {operation or 'the step'}{at}: {why.rstrip('.')}. "
            "batchfit find measures instead."
        )


class ReadOnceError(BatchfitError, TypeError):
    """An iterable dataset can be read once only: what trials read of it would be lost to training.

    Attributes:
        name: class of the dataset.
        samples_read: how many samples were read before that showed, and are lost; mostly 0.
    """

    def __init__(self, name: str, *, samples_read: int = 0) -> None:
        self.name = name
        self.samples_read = samples_read
        lost = f"the {samples_read} samples that were read" if samples_read else "what is read"
        super().__init__(
            f"make_batch must be a dataset that can be iterated again, and {name} goes on where it was: "
            f"{lost} would be missing in training. Pass a list of samples with collate_fn, a callable "
            f"make_batch(n), or {'make it again, with' if samples_read else 'give it'} an __iter__ that "
            "begins again"
        )


class TargetError(BatchfitError):
    """A target (`file.py:function`) could not be loaded or made no workload."""


class ChildDiedError(BatchfitError):
    """A child process of `isolate=True` ended, and a smaller batch would not have saved it.

    Attributes:
        exit_code: the exit code, the negative number of a signal where one ended it; None where it was
            stopped.
    """

    def __init__(self, text: str, *, exit_code: int | None = None, smallest: bool = False) -> None:
        self.exit_code = exit_code
        advice = "No step had begun, so the batch size has nothing to do with it."
        if smallest:
            advice = "This is the smallest size allowed, so it does not come from the size. "
            advice += "Run one step by itself to see more."
        super().__init__(f"the child process {text}. {advice}")


class ChildRaisedError(BatchfitError):
    """The user's code raised, in a child process, an error whose type is not loaded in this one.

    Attributes:
        type_name: name of that type.
    """

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name = type_name
        super().__init__(f"{type_name}: {text}")


class ProgramError(BatchfitError):
    """A program (`find -- python train.py ...`) failed by itself, or cannot be measured.

    Attributes:
        lines: the last lines that it printed.
    """

    def __init__(self, text: str, *, lines: Iterable[str] = ()) -> None:
        self.lines = tuple(lines)
        super().__init__(text)


class SettingsDifferError(BatchfitError):
    """A file to resume from holds a search or a sweep with other settings.

    Attributes:
        differences: each setting that differs, with both values.
    """

    def __init__(self, path: str, differences: Iterable[str], *, what: str = "search") -> None:
        self.differences = tuple(differences)
        super().__init__(
            f"the {what} in {path} was begun with other settings ({'; '.join(self.differences)}). "
            "Use the same ones, or another file."
        )


class RanksDisagreeError(BatchfitError):
    """Ranks hold different values where all must hold the same.

    Attributes:
        places: what each rank was about to agree on, where that was not the same.
    """

    def __init__(self, text: str, places: Iterable[str] = ()) -> None:
        super().__init__(text)
        self.places = tuple(places)


class CollectivesError(BatchfitError):
    """Steps issue collectives that a rank whose step failed cannot issue: a failed trial would not end."""


class RankMissingError(BatchfitError):
    """One or more ranks did not answer within the time-out, or said that they will not.

    Attributes:
        missing: numbers of these ranks.
        doing: what all ranks had to agree on.
        timeout_s: seconds that this rank waited.
        why: the reason that a rank gave; empty where it gave none.
    """

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
            "See that rank's own output: it has most likely failed or is stuck."
        )


class RankFailedError(BatchfitError):
    """Other ranks raised errors of their own; nothing has changed here.

    Attributes:
        failed: number of each such rank, and the text of its error.
        doing: what all ranks were doing.
    """

    def __init__(self, failed: Iterable[tuple[int, str]], *, doing: str) -> None:
        self.failed = tuple(failed)
        self.doing = doing
        texts = "; ".join(f"rank {rank} raised {text}" for rank, text in self.failed)
        super().__init__(f"all ranks gave up {doing}, and everything is as before the call: {texts}")


class ResultFileError(BatchfitError):
    """A result or a memory snapshot could not be read: says which field and why."""
