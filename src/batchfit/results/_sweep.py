"""What a sweep answers: one record for each configuration, and the whole as table, JSON, CSV and DataFrame.

Rules:
- A record is complete: it says what was asked, what ran, what was measured and what went wrong.
- Records stand in the order of the configurations, whoever ran them and whenever they ended.
- A file is the same whether or not the sweep was interrupted, apart from the fields named in `TIMINGS`
  (and whatever a measure of the user's times itself).
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, computed_field

from batchfit._charts.tables import html_table, text_table
from batchfit._files import write_atomically
from batchfit._knobs import key_of, label, short
from batchfit.results._base import SCHEMA_VERSION, Result
from batchfit.results._fit import Trial

# Seconds, wherever they stand in a file: another run has others.
TIMINGS = frozenset({"elapsed_s", "find_s", "measure_s", "step_s"})
# Columns of a summary that are ours: no knob and no measure may be called like that.
OWN_COLUMNS = ("batch_size_used", "error")

# Numbers that JSON has no word for: text in a file, numbers again in a DataFrame.
NOT_FINITE = ("nan", "inf", "-inf")

Stage = Literal["factory", "search", "measure"]


class SweepRecord(Result):
    """One configuration of a sweep: its knobs, the batch size that was used, the measures, and how it went.

    Attributes:
        knobs: the values of its knobs, by name.
        batch_size_used: the size per process; None where none was found.
        measures: what the measurement returned, by name.
        error: type and text of what went wrong; None where nothing did.
        error_at: the line of your code where it did; None where there is none.
        failed_in: "factory", "search" or "measure"; None where nothing failed.
        estimate: the size that the estimate named; None without one.
        start: the first size that the search was given; None without one.
        trials: all trials of the search.
        survived_steps: steps of the longest trial at the size used.
        stopped_because: why the search ended: a key of `batchfit.results.REASONS`.
        peak_bytes: peak of live bytes at the size used; None without a reading.
        budget_bytes: bytes that the program could use; None where no search ran.
        device: where it ran ("cuda:0", "cpu").
        device_model: what the device is ("NVIDIA H200"); empty on a CPU.
        device_bytes: all memory of the device; None where it is not known.
        measure_sizes: sizes at which the measurement was tried: more than one where it was out of memory.
        find_s: seconds of the search.
        measure_s: seconds of the measurement.
        elapsed_s: seconds of all of it.
    """

    knobs: dict[str, Any]
    batch_size_used: int | None = Field(default=None, ge=1)
    measures: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None
    error_at: str | None = None
    failed_in: Stage | None = None
    estimate: int | None = None
    start: int | None = None
    trials: tuple[Trial, ...] = ()
    survived_steps: int = 0
    stopped_because: str = ""
    peak_bytes: int | None = None
    budget_bytes: int | None = None
    device: str = ""
    device_model: str = ""
    device_bytes: int | None = None
    measure_sizes: tuple[int, ...] = ()
    find_s: float = 0.0
    measure_s: float = 0.0
    elapsed_s: float = 0.0

    @property
    def key(self) -> str:
        """What the configuration is known by."""
        return key_of(self.knobs)

    @property
    def label(self) -> str:
        """`max_crops=12, top_k=2`."""
        return label(self.knobs)

    @property
    def measure_retries(self) -> int:
        """How often the measurement ran out of memory and went down."""
        return max(0, len(self.measure_sizes) - 1)

    @property
    def ooms(self) -> int:
        """How many trials ran out of memory."""
        return sum(not trial.fits for trial in self.trials)

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of the trials at the size used; None where there is no time."""
        times = [one.step_s for one in self.trials if one.fits and one.size == self.batch_size_used]
        last = next((time for time in reversed(times) if time), None)
        return self.batch_size_used / last if last and self.batch_size_used else None

    @property
    def note(self) -> str:
        """What a table has no room for: what went wrong and where, or that the measurement went down."""
        if self.error is not None:
            return self.error + (f" (at {self.error_at})" if self.error_at else "")
        if self.measure_retries:
            sizes = ", ".join(map(str, self.measure_sizes[:-1]))
            return f"the measurement ran out of memory at {sizes}, and ran at {self.measure_sizes[-1]}"
        return ""

    @property
    def row(self) -> dict[str, Any]:
        """The record flat: knobs, `batch_size_used`, measures, `error`."""
        return {
            **self.knobs,
            "batch_size_used": self.batch_size_used,
            **self.measures,
            "error": self.error,
        }


class SkippedConfiguration(Result):
    """A configuration that is not run, and why.

    Attributes:
        knobs: the values of its knobs, by name.
        reason: why it was not run.
    """

    knobs: dict[str, Any]
    reason: str


class SweepResult(Result):
    """What `sweep` answers, and what its file holds after each configuration.

    Attributes:
        kind: "sweep": the kind of result, where a file is read.
        schema_version: version of the JSON schema.
        planned: configurations that are to be run; a sweep that was stopped has fewer records.
        records: all there is to know of each configuration, in order.
        skipped: configurations that are not run.
        settings: what the sweep was asked for, for a later `resume`.
        environment: versions of batchfit, torch and Python.
    """

    kind: Literal["sweep"] = "sweep"
    schema_version: int = SCHEMA_VERSION
    planned: int = Field(ge=0)
    records: tuple[SweepRecord, ...] = ()
    skipped: tuple[SkippedConfiguration, ...] = ()
    settings: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def summary(self) -> list[dict[str, Any]]:
        """One flat entry a configuration."""
        return [record.row for record in self.records]

    @property
    def complete(self) -> bool:
        """Every configuration that was planned has its record."""
        return len(self.records) == self.planned

    @property
    def failed(self) -> tuple[SweepRecord, ...]:
        """The records with an error."""
        return tuple(record for record in self.records if record.error is not None)

    @property
    def elapsed_s(self) -> float:
        """Seconds of all configurations together, those of earlier runs included."""
        return sum(record.elapsed_s for record in self.records)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names in `summary`: knobs, `batch_size_used`, measures, and `error`."""
        names: dict[str, None] = {}
        for part in ("knobs", "measures"):
            for record in self.records:
                names.update(dict.fromkeys(getattr(record, part)))
            if part == "knobs":
                names["batch_size_used"] = None
        return (*names, "error")

    def at(self, **knobs: Any) -> SweepRecord:
        """The record of one configuration: `result.at(max_crops=12)`.

        Args:
            **knobs: the value of every knob.

        Returns:
            The record of that configuration.

        Raises:
            ValueError: no record has these knobs.
        """
        for record in self.records:
            if record.key == key_of(knobs):
                return record
        known = "; ".join(record.label for record in self.records[:8]) or "none"
        raise ValueError(f"knobs must be those of a record ({known}), not {label(knobs)}")

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the summary as CSV, whole or not at all.

        Args:
            path: the file; it is replaced.
        """
        stream = io.StringIO()
        writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.summary)
        write_atomically(Path(path), stream.getvalue())

    def to_dataframe(self) -> Any:
        """The summary as a pandas DataFrame, with throughput, peak memory and the number of trials.

        A knob or a measure that is called like one of these columns stands there in its place.

        Returns:
            A `pandas.DataFrame` with one row per configuration.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas  # type: ignore[import-untyped, unused-ignore]
        except ImportError:
            raise ImportError("pip install pandas to use SweepResult.to_dataframe") from None
        rows = [
            {
                "samples_per_s": record.samples_per_s,
                "peak_bytes": record.peak_bytes,
                "trials": len(record.trials),
                "elapsed_s": record.elapsed_s,
                **dict.fromkeys(self.columns),
                **record.row,
                **{name: float(one) for name, one in record.measures.items() if one in NOT_FINITE},
            }
            for record in self.records
        ]
        extra = ("samples_per_s", "peak_bytes", "trials", "elapsed_s")
        return pandas.DataFrame(rows, columns=list(dict.fromkeys((*self.columns, *extra))))

    def without_timings(self) -> dict[str, Any]:
        """All of it but seconds: what is the same when a sweep is run again, or was interrupted.

        Returns:
            A dict as `to_json` would write, without the fields that are seconds.
        """
        kept: dict[str, Any] = _timeless(self.model_dump(mode="json"))
        return kept

    @property
    def headline(self) -> str:
        """The outcome in one sentence."""
        done, failed = len(self.records), len(self.failed)
        text = f"{done} of {self.planned} configurations in {self.elapsed_s:.1f} s"
        if not self.complete:
            text += f"; {self.planned - done} still to run"
        if self.skipped:
            text += f"; {len(self.skipped)} skipped"
        if failed:
            text += f"; {failed} failed"
        retried = sum(record.measure_retries for record in self.records)
        if retried:
            text += f"; the measurement ran out of memory {retried} time{'s' if retried > 1 else ''}"
        return text

    def __str__(self) -> str:
        columns, rows = self._table()
        notes = "".join(f"\n{record.label}: {record.note}" for record in self.records if record.note)
        return f"{text_table(columns, rows)}\n{self.headline}{notes}"

    def _repr_html_(self) -> str:
        columns, rows = self._table()
        return html_table(columns, rows, caption=self.headline)

    def _table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        columns = tuple(name for name in self.columns if name != "error" or self.failed)
        return columns, [
            tuple(_cell(name, record.row.get(name)) for name in columns) for record in self.records
        ]


def _cell(name: str, value: object) -> str:
    if name == "error":
        return "-" if value is None else str(value).partition(":")[0]
    return short(value)


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _timeless(one) for name, one in value.items() if name not in TIMINGS}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def in_order(records: Iterable[SweepRecord], keys: Iterable[str]) -> tuple[SweepRecord, ...]:
    """The records in the order of the configurations."""
    place = {key: number for number, key in enumerate(keys)}
    return tuple(sorted(records, key=lambda record: place[record.key]))
