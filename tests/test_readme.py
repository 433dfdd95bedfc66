"""README.md: its length, its diff, and the figures of its recorded output.

`test_docs.py` runs its commands and compares what they print; `test_benchmark_summary.py` reads its table.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import batchfit
from batchfit._units import format_bytes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_so_are_its_cells() -> None:
    assert len(README.splitlines()) <= 150
    for row in re.findall(r"^\|(.+)\|$", README, re.MULTILINE):
        for cell in row.split("|"):
            words = re.sub(r"\]\([^)]*\)", "]", cell).split()
            assert len(words) <= 12, cell


def test_the_first_screen_has_the_install_line_and_the_commands_of_a_clone() -> None:
    first = README.splitlines()[:20]
    for wanted in ("pip install batchfit", "make demo", "make test"):
        assert any(line.startswith(wanted) for line in first), wanted


def test_a_reader_in_need_meets_the_command_that_changes_nothing_first() -> None:
    """What an OOM needs is a command, so it stands before every change of a program."""
    for page in ("README.md", "docs/index.md", "docs/how-to/out-of-memory.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        command = re.search(r"^batchfit (find|run) -- python train.py --batch-size \{\}", text, re.MULTILINE)
        assert command is not None, page
        assert text[: command.start()].count("\n") <= 20, page
        assert "```diff" not in text[: command.start()], page


def test_both_sides_of_the_diff_train_alike(living_bytes: int) -> None:
    torch = pytest.importorskip("torch")
    (diff,) = re.findall(r"^```diff\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    assert sum(side == "+" for side, _ in lines) <= 4

    def trained(side: str, budget_bytes: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
        ).double()
        names = {
            "batchfit": batchfit,
            "F": torch.nn.functional,
            "model": model,
            "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1),
            "loader": [(torch.randn(512, 8).double(), torch.randint(0, 8, (512,))) for _ in range(3)],
        }
        code = "\n".join(line for mark, line in lines if mark in (side, " "))
        with batchfit.virtual_memory(living_bytes + budget_bytes):
            exec(compile(code, "README.md", "exec"), names)
        return names

    with pytest.raises(torch.OutOfMemoryError):
        trained("-", 3 << 20)
    plain, ours = trained("-", 64 << 20), trained("+", 3 << 20)
    for expected, got in zip(plain["model"].parameters(), ours["model"].parameters(), strict=True):
        assert torch.allclose(expected, got, atol=1e-10)
    assert plain["loss"].item() == pytest.approx(ours["loss"].item())


def test_what_find_printed_is_what_was_recorded() -> None:
    kept = json.loads((ROOT / "benchmarks/results/prediction_kept_h200_202611.json").read_text("utf-8"))
    case = kept["truth"]["gpt2/bf16/24/kept"]
    answer, sizes = case["find"]["answer"], case["find"]["sizes"]
    (shown,) = re.findall(
        r"^\$ batchfit find train.py:workload --budget 24GiB\n(.*?)^```", README, re.S | re.M
    )
    rows = re.findall(
        r"^ +(\d+) +(fits|sustained) +(\d+) +(\S+ \S+) +(\S+ \S+) +(\S+)%$", shown, re.MULTILINE
    )
    assert rows == [
        (
            str(trial["size"]),
            "sustained" if trial["soak"] else trial["outcome"],
            str(trial["steps_run"]),
            format_bytes(trial["peak_bytes"]),
            format_bytes(trial["reserved_bytes"]),
            f"{trial['reserved_bytes'] / (24 << 30):.1%}"[:-1],
        )
        for trial in case["trials"][: len(sizes)]
    ]
    assert [int(row[0]) for row in rows] == sizes
    assert f"batch size {answer} survived {rows[-1][2]} steps" in shown
    assert f"{len(sizes)} in {case['find']['seconds']:.1f} s, none ran out of memory" in shown
    assert case["find"]["ooms"] == 0
    assert f"{case['sustained']} trains, {case['fails']} is out of memory" in README
