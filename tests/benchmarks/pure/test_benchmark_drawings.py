"""Pictures of the docs' pages: drawn from the committed results, and of nothing else."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"


@pytest.fixture
def drawings(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not (FOLDER / "drawings.py").exists():
        pytest.skip("benchmarks are not in the distribution")
    monkeypatch.syspath_prepend(str(FOLDER))
    import drawings

    yield drawings
    for name in ("drawings", "hero", "goals", "find_gpu", "turns", "pages", "rows"):
        sys.modules.pop(name, None)


def test_the_committed_pictures_are_of_the_committed_results(drawings: ModuleType) -> None:
    for name, text in drawings.pictures().items():
        kept = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: run python benchmarks/drawings.py write"


def test_a_search_is_drawn_with_all_of_its_trials(drawings: ModuleType) -> None:
    (kept,) = (FOLDER / "results").glob("find_h200_*.json")
    found = json.loads(kept.read_text(encoding="utf-8"))
    case = found["cases"][drawings.CASE]["find"]
    text = drawings.search(found, drawings.COLOURS["dark"])
    assert len(re.findall(r"<title>size \d+: ", text)) == len(case["batchfit"]["trials"])
    for name in drawings.OTHERS:
        assert f"{len(case[name]['sizes'])} sizes, {case[name]['ooms']} OOMs" in text
    moved = text.replace(str(case["batchfit"]["answer"]), "?")
    case["batchfit"]["answer"] += 1
    assert (
        drawings.search(found, drawings.COLOURS["dark"]).replace(str(case["batchfit"]["answer"]), "?") != text
    )
    assert moved != text
