"""Result files, read whatever kind they are of.

Rules: a file says what it is in its field `kind`; a file that cannot be read names itself, the field and why;
nothing is guessed. A list of results, as `batchfit predict --json` writes for several GPUs, is several.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchfit._config_files import parse_json
from batchfit.errors import ResultFileError
from batchfit.results import (
    FitResult,
    MemoryCheck,
    MemoryExplanation,
    OomExplanation,
    Plan,
    Prediction,
    Result,
    SweepResult,
    ThroughputProfile,
)

LARGEST_FILE_BYTES = 64 * 2**20


class SchedulePhase(Result):
    """One phase of a schedule, as `batchfit schedule show --json` writes it."""

    from_epoch: int
    to_epoch: int
    from_step: int
    batch_size: int
    updates: int
    samples: int = 0
    short_batches: int = 0
    lr_factor: float = 1.0
    lr: float | None = None
    peak_bytes: int | None = None


class SchedulePlan(Result):
    """A schedule followed to its end, as `batchfit schedule show --json` writes it."""

    kind: Literal["schedule"]
    schema_version: int
    schedule: str
    initial_batch_size: int
    samples: int
    epochs: int
    phases: tuple[SchedulePhase, ...]
    updates: int
    updates_at_constant_size: int
    updates_saved: float
    more_than_fits: tuple[str, ...] = ()
    more_than_an_epoch: tuple[str, ...] = ()
    fits: int | None = None
    budget_bytes: int | None = None


class NothingFits(Result):
    """A GPU on which not even one sample fits, as `batchfit predict --json` lists it."""

    kind: Literal["nothing_fits"]
    card: str
    budget_bytes: int
    peak_bytes: int | None = None
    message: str = ""


# What `kind` says -> what reads it.
KINDS: dict[str, type[Result]] = {
    "fit": FitResult,
    "prediction": Prediction,
    "memory": MemoryExplanation,
    "check": MemoryCheck,
    "oom": OomExplanation,
    "plan": Plan,
    "throughput": ThroughputProfile,
    "schedule": SchedulePlan,
    "nothing_fits": NothingFits,
    "sweep": SweepResult,
}
REPORTED = tuple(KINDS.values())


@dataclass(frozen=True, slots=True)
class Source:
    """A result, and where it came from (a file's name; empty where it was given as a value)."""

    result: Result
    name: str = ""


def sources_of(given: object) -> list[Source]:
    """Results out of a result, a path, or several of them."""
    if isinstance(given, REPORTED):
        return [Source(given)]
    if isinstance(given, str | Path):
        return read_file(Path(given))
    if isinstance(given, list | tuple | set | frozenset | Iterator):
        found = [source for one in given for source in sources_of(one)]
        if found:
            return found
    raise TypeError(
        "result must be a result of batchfit, the path of its JSON file, or several of them, not "
        f"{given!r:.80}"
    )


def read_file(path: Path) -> list[Source]:
    """The results in a file."""
    try:
        with path.open("rb") as stream:  # not by its size: a pipe has none, and a device no end
            data = stream.read(LARGEST_FILE_BYTES + 1)
        if len(data) > LARGEST_FILE_BYTES:
            raise ResultFileError(
                f"{path}: more than {LARGEST_FILE_BYTES:,} bytes are too many for a result of batchfit"
            )
        text = data.decode("utf-8")
    except OSError as error:
        raise ResultFileError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ResultFileError(f"{path}: not JSON: it is no text in UTF-8") from None
    try:
        return [Source(result, path.name) for result in results_in(text)]
    except ResultFileError as error:
        raise ResultFileError(f"{path}: {error}") from None


def results_in(text: str) -> list[Result]:
    """The results in a JSON text."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ResultFileError(f"not JSON, or cut short: {error}") from None
    if isinstance(data, list):
        if not data:
            raise ResultFileError("an empty list, without a result in it")
        found = []
        for number, one in enumerate(data):
            try:
                found.append(_result(one))
            except ResultFileError as error:
                raise ResultFileError(f"result {number + 1} of {len(data)}: {error}") from None
        return found
    return [_result(data)]


def _result(data: Any) -> Result:
    if not isinstance(data, dict):
        raise ResultFileError(f"not a result of batchfit: a {type(data).__name__} where an object must be")
    kind = data.get("kind")
    known = ", ".join(KINDS)
    if kind is None:
        what = (
            "the file of a search for --resume, not its result"
            if "search" in data
            else "not a result of batchfit"
        )
        raise ResultFileError(f"{what}: field 'kind' is missing (one of {known})")
    reader = KINDS.get(kind) if isinstance(kind, str) else None
    if reader is None:
        raise ResultFileError(
            f"field 'kind' must be one of {known}, not {kind!r:.80}. A later version of batchfit may know it."
        )
    return reader.from_json(json.dumps(data))
