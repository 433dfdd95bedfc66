"""What a check allows, what it says where that is exceeded, and what pyproject.toml says of it."""

from __future__ import annotations

from typing import Any

import pytest

from batchfit._check.pure.limits import Allowance, failures, parse_allowance
from batchfit._check.pure.options import CheckOptions
from batchfit._check.pure.project import read_project


@pytest.mark.parametrize(
    ("value", "of_1000"),
    [("2%", 20), (" 0.5 % ", 5), ("0", 0), (0, 0), ("0%", 0), ("150%", 1500), ("1KiB", 1024), (64, 64)],
)
def test_an_allowance_is_a_share_or_bytes(value: Any, of_1000: int) -> None:
    assert parse_allowance(value, name="max_increase").of(1000) == of_1000


@pytest.mark.parametrize("value", ["two", "-1%", "%", "", -5, "2 %%"])
def test_what_is_no_allowance_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="max_increase must be"):
        parse_allowance(value, name="max_increase")


@pytest.mark.parametrize("value", [True, None, 0.02, [1]])
def test_a_wrong_type_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"max_increase must be text such as '2%'"):
        parse_allowance(value, name="max_increase")


def failed(**changes: Any) -> tuple[str, ...]:
    known = {"peak_bytes": 1020, "baseline_bytes": 1000, "allowance": Allowance(share=0.02)}
    return failures(**{**known, "max_peak_bytes": None, **changes})


def test_what_is_allowed_passes_and_a_byte_more_fails() -> None:
    assert failed() == ()
    assert failed(peak_bytes=500) == ()
    assert failed(baseline_bytes=None, peak_bytes=10**9) == ()
    assert failed(peak_bytes=1021) == (
        "the peak is +21 B (+2.1 %) above the baseline, and 2 % more is allowed",
    )


def test_the_highest_peak_and_the_largest_batch() -> None:
    assert failed(max_peak_bytes=1020) == ()
    assert failed(max_peak_bytes=1019) == ("the peak is 1020 B, and 1019 B is the most that is allowed",)
    assert failed(largest=98, baseline_largest=100) == ()
    assert failed(largest=97, baseline_largest=100) == ("the largest batch is 97, and was 100",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a positive integer or None, not 0"),
        ({"baseline": ""}, "baseline must be the path of a file or None, not ''"),
        ({"baseline": 3}, "baseline must be the path"),
        ({"max_peak": "much"}, "max_peak must be bytes"),
        ({"max_increase": "much"}, "max_increase must be"),
        ({"budget": "32 parsec"}, "budget must be bytes"),
        ({"gpu": "h1000"}, "gpu must be"),
        ({"update": 1}, "update must be True or False"),
    ],
)
def test_wrong_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        CheckOptions(**options)


PROJECT = """
[tool.batchfit.check]
baseline = "ci/memory.json"
max-increase = "1%"
targets = ["train.py:w", { target = "eval.py:w", batch-size = 4, max-increase = 0 }]
"""


def test_a_project_names_targets_and_their_limits() -> None:
    found = read_project(PROJECT, name="pyproject.toml")
    assert list(found.targets) == ["train.py:w", "eval.py:w"]
    shared = {"baseline": "ci/memory.json", "max_increase": "1%"}
    assert found.flags_of("train.py:w") == found.flags_of("other.py:w") == shared
    assert found.flags_of("eval.py:w") == {**shared, "batch_size": 4, "max_increase": 0}


def test_a_project_without_the_table_names_nothing() -> None:
    found = read_project("[tool.ruff]\nline-length = 100\n", name="pyproject.toml")
    assert (found.targets, found.shared) == ({}, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.batchfit", "pyproject.toml must be TOML, and is not"),
        ("[tool.batchfit]\ncheck = 1", "must be a table, not 1"),
        ("[tool.batchfit.check]\ntargets = 'a'", "must be a list, not 'a'"),
        ("[tool.batchfit.check]\ntargets = [1]", "must name a target, not 1"),
        ("[tool.batchfit.check]\ntargets = ['a:b', 'a:b']", "must name 'a:b' once"),
        (
            "[tool.batchfit.check]\nmax-incraese = '1%'",
            "must have keys among targets, baseline, .* not 'max-incraese'",
        ),
        ("[tool.batchfit.check]\nupdate = true", "not 'update'"),
        ("[tool.batchfit.check]\ntarget = 'a:b'", "must have keys among targets, baseline, .* not 'target'"),
        (
            "[tool.batchfit.check]\ntargets = [{target = 'a:b', batch-size = '8'}]",
            r"batch_size must be .*, not '8' \(a:b in \[tool.batchfit.check\] of pyproject.toml\)",
        ),
        (
            "[tool.batchfit.check]\nmax-increase = '2'",
            r"not '2' \(\[tool.batchfit.check\] in ",
        ),
        ("[tool.batchfit.check]\ntargets = [{target = 'a:b', gup = 'h100'}]", "not 'gup'"),
    ],
)
def test_what_a_project_says_wrongly_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_project(text, name="pyproject.toml")
