"""The picture of the README: drawn from the committed results, and of nothing else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def hero(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not (FOLDER / "hero.py").exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(FOLDER))
    import hero

    yield hero
    for name in ("hero", "goals", "find_gpu", "turns", "pages", "rows"):
        sys.modules.pop(name, None)


def test_the_committed_pictures_are_of_the_committed_results(hero: ModuleType) -> None:
    for name, text in hero.pictures().items():
        kept = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python benchmarks/hero.py write"


def case(**finds: Any) -> dict[str, Any]:
    """100 is the largest that trains; 104 dies at step 2."""
    run = {"of": 200, "settled_retries": 0}
    return {
        "find": finds,
        "survive": {"100": {**run, "survived": 200}, "104": {**run, "survived": 2}},
        "truth": {"sustained": 100, "fails": 102},
    }


def found(answer: int | None, ooms: int = 0) -> dict[str, Any]:
    return {"answer": answer, "ooms": ooms}


def test_a_row_per_finder_a_dot_per_model_and_a_cross_where_it_dies(hero: ModuleType) -> None:
    results = {
        "cases": {
            "gpt2/24": case(batchfit_predict=found(98), bisection=found(104, 3), toma={"error": "exit 1"}),
            "vit/24": case(batchfit_predict=found(100), bisection=found(90, 2)),
            "vit/80": case(batchfit_predict=found(1)),  # another budget is not drawn
        }
    }
    ours, bisection = hero.finders(results)
    assert (ours.name, [dot.share for dot in ours.dots], ours.ooms) == ("batchfit", [98.0, 100.0], 0)
    assert [(dot.model, dot.share, dot.dies) for dot in bisection.dots] == [
        ("gpt2", 104.0, True),
        ("vit", 90.0, False),
    ]
    assert bisection.ooms == 5
    text = hero.draw([ours, bisection], "dark")
    assert text.count("<circle") == 3 + 1  # and one in the key
    assert re.findall(r"<title>(.*dies.*)</title>", text) == [
        "double, then bisect, gpt2: 104.0 %, dies in training"
    ]
    assert ">1 of 2<" in text
    assert ">0 of 2<" in text
