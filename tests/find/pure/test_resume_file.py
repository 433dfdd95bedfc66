"""A search kept in a file: read back as it was, refused where it does not fit, never half written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchfit._find.pure.search import Observation, Search
from batchfit._find.resume import Kept, ResumeFile
from batchfit.errors import ResultFileError, SettingsDifferError
from batchfit.results import FitResult, Trial

SETTINGS: dict[str, Any] = {"budget": 2**30, "steps": 3, "device": "cpu", "state_elements": 8}


def begun(**changes: Any) -> Search:
    return replace(Search(budget_bytes=2**30, max_size=64), **changes)


def saved(path: Path, search: Search | None = None, sizes: tuple[int, ...] = (1, 8)) -> Search:
    """The file of a search in which these sizes fit; the search."""
    search = search or begun()
    for size in sizes:
        search = search.tell(Observation(size=size, fits=True, allocated_bytes=size * 2**20))
    file = ResumeFile(path)
    file.begin("", search, SETTINGS)
    file.save(search, [Trial(size=size, outcome="fits", steps_run=3) for size in sizes], 2.5)
    return search


def test_a_new_file_begins_at_the_start(tmp_path: Path) -> None:
    file = ResumeFile(tmp_path / "search.json")
    assert file.begin(file.read(begun(), SETTINGS), begun(), SETTINGS) == (begun(), [])
    file.path.touch()  # as mktemp leaves it
    assert file.begin(file.read(begun(), SETTINGS), begun(), SETTINGS) == (begun(), [])


def test_it_goes_on_with_the_same_size(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    then = saved(path)
    file = ResumeFile(path)
    search, trials = file.begin(file.read(begun(), SETTINGS), begun(), SETTINGS)
    assert search == then
    assert search.ask() == then.ask()
    assert [trial.size for trial in trials] == [1, 8]
    assert file.earlier_s == 2.5
    file.save(search, trials, 1.0)
    assert Kept.from_json(path.read_text()).elapsed_s == 3.5


def test_the_budget_of_the_beginning_counts_where_none_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    saved(path)
    file = ResumeFile(path)
    now = begun(budget_bytes=2**29)
    search, _ = file.begin(file.read(now, SETTINGS), now, SETTINGS)
    assert search.budget_bytes == 2**30


def test_limits_may_differ(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    saved(path, begun(max_trials=2))
    file = ResumeFile(path)
    now = begun(max_trials=9)
    search, _ = file.begin(file.read(now, SETTINGS), now, SETTINGS)
    assert search.max_trials == 9
    assert search.ask() is not None


@pytest.mark.parametrize(
    ("search", "settings", "words"),
    [
        ({"max_size": None}, {}, r"\(max_size: 64 then, not given now\)"),
        ({"strategy": "bisect"}, {}, "strategy: guided then, bisect now"),
        ({}, {"budget": 2**31}, r"budget: 1.00 GiB then, 2.00 GiB now"),
        ({}, {"device": "cuda:0"}, "device: cpu then, cuda:0 now"),
        ({"multiple_of": 2}, {"steps": 4}, "multiple_of: 1 then, 2 now; steps: 3 then, 4 now"),
        ({}, {"state_elements": 9}, "state_elements: 8 then, 9 now"),
    ],
)
def test_other_settings_are_refused_and_named(
    search: dict[str, Any], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "search.json"
    saved(path)
    before = path.read_bytes()
    with pytest.raises(SettingsDifferError, match=words) as caught:
        ResumeFile(path).read(begun(**search), {**SETTINGS, **settings})
    assert len(caught.value.differences) == len(search) + len(settings)
    assert path.read_bytes() == before


def test_what_is_known_early_is_compared_early(tmp_path: Path) -> None:
    """Before a device is touched: what only a loaded workload shows is compared in `begin`."""
    path = tmp_path / "search.json"
    saved(path)
    file = ResumeFile(path)
    text = file.read(begun(), {"budget": 2**30, "steps": 3})
    with pytest.raises(SettingsDifferError, match="device: cpu then, mps now"):
        file.begin(text, begun(), {**SETTINGS, "device": "mps"})


def _damaged(path: Path, **changes: Any) -> str:
    saved(path)
    return json.dumps({**json.loads(path.read_text()), **changes})


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    fit = FitResult(
        batch_size=1,
        trials=(),
        survived_steps=3,
        stopped_because="max_size",
        budget_bytes=8,
        peak_bytes=None,
        device="cpu",
        strategy="guided",
        elapsed_s=1.0,
    )
    for text, words in (
        ("{", "not JSON"),
        ("[]", "'kind' must be 'find'"),
        (fit.to_json(), "'kind' must be 'find'"),
        (_damaged(path, schema_version=99), "schema_version is 99.*Upgrade"),
        (_damaged(path, trials=[]), "it is damaged"),
        (_damaged(path, settings=None), "it is damaged"),
        (_damaged(path, elapsed_s="long"), "it is damaged"),
        (_damaged(path, search=None), "kind"),
        (_damaged(path, trials=[{"size": 1}, {"size": 2}]), "field 'outcome' of Trial"),
    ):
        path.write_text(text)
        with pytest.raises(ResultFileError, match=f"search.json cannot be resumed from: .*{words}"):
            ResumeFile(path).read(begun(), SETTINGS)
        assert path.read_text() == text


def test_a_path_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resume must be a file in a folder that exists"):
        ResumeFile(tmp_path / "no" / "search.json").kept()
    with pytest.raises(ResultFileError, match="cannot be resumed from"):
        ResumeFile(tmp_path).kept()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ResultFileError, match="cannot be resumed from"):
        ResumeFile(tmp_path / "binary").kept()
