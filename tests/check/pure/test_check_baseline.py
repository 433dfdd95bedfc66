"""A baseline as text: read back as it was, one line per entry, and a clear error for what it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchfit._check.baseline_file import put_record, records_in
from batchfit._check.pure.baseline import baseline_text, read_baseline
from batchfit._check.pure.record import HeldRow, OptimizerRecord, PeakRecord, PhaseMoment
from batchfit.errors import ResultFileError

CHAIN = ("t.py:loss: y = model(x)", "t.py:f: return é * x")


def moment(phase: str, size: int) -> PhaseMoment:
    lines = (
        HeldRow(("cuBLAS workspaces",), "workspaces", size, "cuBLAS"),
        HeldRow(CHAIN, "activations", 2 * size, "mm float32[8]"),
        HeldRow((CHAIN[0],), "temporaries", 0, "mm float32[8]"),
    )
    modules = (HeldRow(("blocks", "*", "up"), "activations", 3 * size),)
    return PhaseMoment(phase, "aten.mm.default", CHAIN[1], 3 * size, lines, modules)


RECORD = PeakRecord(
    batch_size=8,
    card="h200",
    versions={"batchfit": "0.1.0", "torch": "2.13.0"},
    moments=(moment("forward", 1024), moment("backward", 2048)),
    batch=("int64[8, 512]",),
    optimizer=OptimizerRecord("AdamW", "t.py:make: o = AdamW(p)", 2.0),
    budget_bytes=2**30,
    largest=41,
)


def as_rows(record: PeakRecord) -> Any:
    return [(one.phase, one.line, one.size, sorted(one.lines), sorted(one.modules)) for one in record.moments]


def test_it_is_read_back() -> None:
    (name, found), *rest = read_baseline(baseline_text({"train.py:w": RECORD})).items()
    assert (name, rest) == ("train.py:w", [])
    assert as_rows(found) == as_rows(RECORD)
    assert (found.batch, found.optimizer, found.budget_bytes, found.largest) == (
        RECORD.batch, RECORD.optimizer, 2**30, 41,
    )  # fmt: skip
    assert baseline_text({"train.py:w": found}) == baseline_text({"train.py:w": RECORD})


def test_it_is_sorted_and_diffs_by_line() -> None:
    text = baseline_text({"b": RECORD, "a": RECORD})
    assert list(json.loads(text)["targets"]) == ["a", "b"]
    lines = text.splitlines()
    assert '        "cuBLAS workspaces": {"workspaces": [1024, 2048, "cuBLAS"]},' in lines
    assert '            "t.py:f: return é * x": {"activations": [2048, 4096, "mm float32[8]"]}' in lines
    assert max(map(len, lines)) < 120
    assert text.endswith("}\n")


def broken(**changes: Any) -> str:
    data = json.loads(baseline_text({"w": RECORD}))
    data["targets"]["w"] |= changes
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON: .* Restore it from git, or delete it and write it with batchfit check --update"),
        ("{\n<<<<<<< HEAD\n", "a merge left a conflict in it: take one side of it, then write it with"),
        (broken(batch_size=0), "field 'batch_size' of 'w': must be positive, not 0"),
        ("[]", "no baseline of batchfit check: field 'kind'"),
        ('{"kind": "fit"}', "field 'kind' must be 'memory_baseline'"),
        ('{"kind": "memory_baseline", "schema_version": 2}', "schema_version is 2, .* reads 1.* delete"),
        ('{"kind": "memory_baseline", "schema_version": 1}', "field 'targets' .* must be an object"),
        (broken(batch_size="8"), "field 'batch_size' of 'w': must be a whole number, not '8'"),
        (broken(batch_size=True), "field 'batch_size'"),
        (broken(gpu=None), "field 'gpu' of 'w': must be text"),
        (broken(peaks={}), "field 'peaks' of 'w': must have at least one"),
        (
            broken(peaks={"1": {"bytes": 1}, "2": {}}),
            "field 'phase' of 'w': must be text",
        ),
        (
            broken(lines={"x": {"activations": [1, "a"]}}),
            "field 'activations' .* must be a list of 2",
        ),
        (broken(lines={"x": {"memory": [1, 2, "a"]}}), "field 'memory' of 'w': must be one of weights"),
        (broken(lines={"x": 1}), "field 'x' of 'w': must be an object"),
        (broken(modules={"x": {"weights": [1, 2, 3]}}), "field 'weights' of 'w': must be a list of 2"),
        (broken(versions={"torch": 2}), "field 'torch' of 'w'"),
        (broken(optimizer={"name": "SGD"}), "field 'place' of 'w'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(ResultFileError, match=message):
        read_baseline(text)


def test_a_file_has_the_records_of_all_targets(tmp_path: Path) -> None:
    path = tmp_path / "memory.json"
    assert records_in(path) == {}
    put_record(path, "one", RECORD)
    put_record(path, "two", RECORD)
    assert list(records_in(path)) == ["one", "two"]
    assert [one.name for one in tmp_path.iterdir()] == ["memory.json"]
    path.write_text("{")
    with pytest.raises(ResultFileError, match=f"{path}: not JSON"):
        records_in(path)
    with pytest.raises(ResultFileError, match="directory"):
        records_in(tmp_path)
