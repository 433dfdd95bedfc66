"""A sweep's result as table, JSON, CSV and DataFrame; the lines of its events."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from notebook import notebook_html

import batchfit
from batchfit import results
from batchfit._sweep.pure.events import SweepEvent, event_line
from batchfit.errors import ResultFileError
from batchfit.results import Trial
from batchfit.results._sweep import TIMINGS, SkippedConfiguration, SweepRecord, SweepResult, in_order


def trial(size: int, outcome: Any = "fits", **more: Any) -> Trial:
    return Trial(size=size, outcome=outcome, steps_run=3, step_s=0.5, **more)


def record(crops: int, size: int | None = 63, **more: Any) -> SweepRecord:
    return SweepRecord(
        knobs={"max_crops": crops}, batch_size_used=size, trials=(trial(19), trial(63)), elapsed_s=2.0, **more
    )


@pytest.fixture
def result() -> SweepResult:
    return SweepResult(
        planned=4,
        records=(
            record(12, measures={"accuracy": 0.85, "note": "a, b"}, peak_bytes=1024, measure_sizes=(80, 63)),
            record(13, None, error="ValueError: wrong", error_at="model.py:3", failed_in="factory"),
            record(14, 24, measures={"accuracy": 0.5, "seconds": [1, 2]}),
        ),
        skipped=(SkippedConfiguration(knobs={"max_crops": 2}, reason="it stands before max_crops=12"),),
        settings={"batch_size": 64},
        environment={"torch_version": "2.13"},
    )


def test_the_summary_is_the_seeds(result: SweepResult) -> None:
    data = json.loads(result.to_json())
    assert data["summary"][0] == {
        "max_crops": 12, "accuracy": 0.85, "note": "a, b", "batch_size_used": 63, "error": None,
    }  # fmt: skip
    assert data["summary"][1]["batch_size_used"] is None
    assert (data["kind"], data["schema_version"]) == ("sweep", 1)
    assert data["records"][0]["trials"][1]["size"] == 63


def test_json_both_ways(result: SweepResult) -> None:
    again = SweepResult.from_json(result.to_json())
    assert again == result
    assert again.summary == result.summary
    assert not again.complete
    assert again.elapsed_s == 6.0
    with pytest.raises(ResultFileError, match=r"field 'records\.0\.batch_size_used' of SweepResult"):
        SweepResult.from_json(result.to_json().replace('"batch_size_used": 63', '"batch_size_used": 0'))


def test_it_is_a_public_result() -> None:
    assert batchfit.SweepResult is results.SweepResult is SweepResult
    assert batchfit.SweepRecord is results.SweepRecord is SweepRecord
    with pytest.raises(AttributeError, match=r"'batchfit\.results' has no attribute 'SweepThing'"):
        _ = results.SweepThing


def test_a_table_for_people(result: SweepResult) -> None:
    assert str(result).splitlines() == [
        "max_crops  batch_size_used  accuracy  note  seconds       error",
        "       12               63      0.85  a, b        -           -",
        "       13                -         -     -        -  ValueError",
        "       14               24       0.5     -   [1, 2]           -",
        "3 of 4 configurations in 6.0 s; 1 still to run; 1 skipped; 1 failed; the measurement ran out of "
        "memory 1 time",
        "max_crops=12: the measurement ran out of memory at 80, and ran at 63",
        "max_crops=13: ValueError: wrong (at model.py:3)",
    ]
    assert "<td>63</td>" in notebook_html(result)
    alone = SweepResult(planned=1, records=(record(12),))
    assert (
        str(alone) == "max_crops  batch_size_used\n       12               63\n1 of 1 configurations in 2.0 s"
    )


def test_csv(result: SweepResult, tmp_path: Path) -> None:
    result.to_csv(tmp_path / "out.csv")
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert list(rows[0]) == ["max_crops", "batch_size_used", "accuracy", "note", "seconds", "error"]
    assert rows[0]["note"] == "a, b"
    assert [row["batch_size_used"] for row in rows] == ["63", "", "24"]


def test_a_dataframe(result: SweepResult) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    frame = result.to_dataframe()
    assert frame["max_crops"].tolist() == [12, 13, 14]
    assert frame["samples_per_s"][0] == 63 / 0.5
    assert frame["trials"].tolist() == [2, 2, 2]
    assert list(frame.columns[:2]) == ["max_crops", "batch_size_used"]


def test_a_measure_of_ones_own_is_not_written_over_in_a_dataframe(result: SweepResult) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    first = result.records[0].model_copy(update={"measures": {"samples_per_s": 1.5, "peak_bytes": 7}})
    frame = result.model_copy(update={"records": (first, *result.records[1:])}).to_dataframe()
    assert (frame["samples_per_s"][0], frame["peak_bytes"][0]) == (1.5, 7)
    assert frame[["samples_per_s", "peak_bytes"]][1:].isna().all(axis=None)  # no number of ours among them
    assert list(frame.columns).count("samples_per_s") == 1


def test_numbers_that_json_cannot_say_are_numbers_in_a_dataframe(result: SweepResult) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    said: tuple[Any, ...] = ("-inf", 2.0, "nan")
    records = [
        one.model_copy(update={"measures": {"loss": v}}) for one, v in zip(result.records, said, strict=True)
    ]
    losses = result.model_copy(update={"records": tuple(records)}).to_dataframe()["loss"]
    assert losses.dtype == float
    assert losses[:2].tolist() == [float("-inf"), 2.0]
    assert losses.isna().tolist() == [False, False, True]


def test_a_long_value_does_not_stretch_the_table(result: SweepResult) -> None:
    first = result.records[0].model_copy(update={"measures": {"curve": list(range(1000))}})
    shown = str(result.model_copy(update={"records": (first,)}))
    assert len(shown.splitlines()[1]) < 80
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11..." in shown


def test_a_dataframe_without_pandas(result: SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"^pip install pandas to use SweepResult\.to_dataframe$"):
        result.to_dataframe()


def test_timings_are_all_that_another_run_changes(result: SweepResult) -> None:
    slower = result.model_copy(
        update={"records": tuple(one.model_copy(update={"elapsed_s": 9.0}) for one in result.records)}
    )
    assert slower != result
    assert slower.without_timings() == result.without_timings()
    other = result.model_copy(update={"records": result.records[:2]})
    assert other.without_timings() != result.without_timings()

    def names(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    seconds = {name for name in names(result.model_dump(mode="json")) if name.endswith("_s")}
    assert seconds == TIMINGS


def test_records_stand_in_the_order_of_the_configurations(result: SweepResult) -> None:
    keys = [one.key for one in result.records]
    assert in_order(reversed(result.records), keys) == result.records


def test_a_record_by_its_knobs(result: SweepResult) -> None:
    assert result.at(max_crops=14).batch_size_used == 24
    assert [one.label for one in result.failed] == ["max_crops=13"]
    assert result.at(max_crops=12).measure_retries == 1
    with pytest.raises(ValueError, match=r"knobs must be those of a record .* not max_crops=2"):
        result.at(max_crops=2)


def test_lines_read_like_the_seeds() -> None:
    def line(kind: Any, **more: Any) -> str:
        return event_line(SweepEvent(kind=kind, knobs={"max_crops": 12}, **more))

    assert [
        line("begin"),
        line("search", estimate=19, start=19),
        line("trial", trial=trial(19)),
        line("trying", size=28, before=19),
        line("trial", trial=trial(36, "oom")),
        line("trying", size=28, before=36),
        line("trying", size=63, before=42, again=True),
        line("trial", trial=trial(63, soak=True)),
        line("using", size=63),
        line("measure", size=63),
        line("measure_oom", size=50, before=63),
        line("record", record=record(12, 50, measures={"accuracy": 0.85321})),
        line("record", record=record(12, None, error="ValueError: wrong")),
    ] == [
        "Testing max_crops=12",
        "Finding the largest batch size for max_crops=12 (estimated: 19, starting with: 19)...",
        "✓ Batch size 19 works for max_crops=12",
        "  Trying larger batch size: 28...",
        "✗ Batch size 36 caused OOM for max_crops=12",
        "  Trying smaller batch size: 28...",
        "  Trying batch size 63 for longer...",
        "✓ Batch size 63 works for 3 steps for max_crops=12",
        "Using batch size: 63 for max_crops=12",
        "Measuring max_crops=12 at batch size 63...",
        "✗ Measuring at batch size 63 caused OOM for max_crops=12; trying 50...",
        "Measured max_crops=12 at batch size 50: accuracy=0.8532",
        "✗ max_crops=12 failed: ValueError: wrong",
    ]
    assert line("trying", size=19) == line("record", record=record(12)) == ""
