"""The how-to page shows what the H200's own file gives."""

from __future__ import annotations

from pathlib import Path

from snapshot_cases import h200

from batchfit._why.why import explain_oom

PAGE = Path(__file__).parent.parent.parent.parent / "docs" / "how-to" / "why-did-it-die.md"


def test_the_page_shows_what_the_file_of_the_gpu_gives() -> None:
    shown = PAGE.read_text(encoding="utf-8").split("$ batchfit why long_batch.pickle.gz\n")[1]
    assert shown.split("\n```")[0] == str(explain_oom(h200("long batch")))
