"""A value in a TOML text is changed where it stands, and nothing else is."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from batchfit._program.pure.toml_place import with_toml_value

TEXT = """\
batch_size = 1  # not this one
[train]
batch_size = 32 # per GPU
eval_batch_size = 4
"name" = "batch_size = 7"
optimizer = {lr = 1e-3, batch_size = 5}
[[stages]]
batch_size = "8"
[[stages]]
batch_size = 16
"""


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ("batch_size", "batch_size = 64  # not this one"),
        ("train.batch_size", "batch_size = 64 # per GPU"),
        ("train.eval_batch_size", "eval_batch_size = 64"),
        ("train.optimizer.batch_size", "optimizer = {lr = 1e-3, batch_size = 64}"),
        ("stages.0.batch_size", "batch_size = 64"),
        ("train.name", '"name" = 64'),
    ],
)
def test_the_value_is_changed_and_all_else_stays(keys: str, line: str) -> None:
    changed = with_toml_value(TEXT, keys.split("."), 64, name="config.toml")
    differing = [new for old, new in zip(TEXT.splitlines(), changed.splitlines(), strict=True) if old != new]
    assert differing == [line]


@pytest.mark.parametrize(
    ("text", "keys", "message"),
    [
        ("a = 1", "b", "a place that is in c.toml, not 'b'"),
        ("[a]\nb = 1", "a.c", "a place that is in c.toml, not 'a.c'"),
        ("a = 1", "a.b", "a place that is in c.toml, not 'a.b'"),
        ("[a]\nb = 1", "a", "a single value in c.toml, not 'a'"),
        ("a = [1, 2]", "a.0", "a value that stands on one line"),
        ("a = = 1", "a", "c.toml must be TOML, and is not"),
    ],
)
def test_what_is_refused(text: str, keys: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_toml_value(text, keys.split("."), 64, name="c.toml")


NAMES = st.sampled_from(["batch_size", "size", "a"])
TABLES = st.dictionaries(NAMES, st.dictionaries(NAMES, st.integers(0, 99), min_size=1), min_size=1)


@examples(100)
@given(TABLES, st.data())
def test_any_place_can_be_set(tables: dict[str, Any], data: st.DataObject) -> None:
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in rows.items())
        for table, rows in tables.items()
    )
    table = data.draw(st.sampled_from(sorted(tables)))
    key = data.draw(st.sampled_from(sorted(tables[table])))
    read = tomllib.loads(with_toml_value(text, [table, key], 1234, name="c.toml"))
    tables[table][key] = 1234
    assert read == tables
