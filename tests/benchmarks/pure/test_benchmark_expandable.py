"""The search of benchmarks/expandable_gpu.py: a bracket from where the prediction is, in few runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def bracket(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, int | None]]:
    if not BENCHMARKS.exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("expandable_gpu", "prediction_gpu", "rows"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import expandable_gpu

    found: Callable[..., tuple[int, int | None]] = expandable_gpu.bracket
    return found


@pytest.mark.parametrize("true", [1, 7, 16, 17, 63, 64, 65, 405, 410, 1000])
@pytest.mark.parametrize("off", [0.95, 1.0, 1.05])
def test_the_bracket_is_closed_around_the_truth(
    bracket: Callable[..., tuple[int, int | None]], true: int, off: float
) -> None:
    tried: list[int] = []

    def survives(size: int) -> bool:
        tried.append(size)
        return size <= true

    good, fails = bracket(max(1, round(true * off)), survives)
    assert good <= true
    assert fails is not None
    assert fails > true
    assert fails - good <= max(1, good // 200)
    assert len(tried) == len(set(tried)) <= 8


def test_a_search_that_is_cut_off_says_what_it_does_not_know(
    bracket: Callable[..., tuple[int, int | None]],
) -> None:
    assert bracket(100, lambda size: True, most=3) == (102, None)
    assert bracket(2, lambda size: False) == (0, 1)
