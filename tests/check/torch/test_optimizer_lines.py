"""The line of the optimizer, where several modules of the program call its class."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import batchfit
from batchfit._check.optimizer_lines import OptimizerLines

CLOSED_OVER = """
import torch
import batchfit

def make():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    def loss_fn(model, batch):
        return model(batch).square().mean()
    return batchfit.training(model, optimizer, loss_fn, lambda n: torch.randn(n, 8))
"""
AT_TOP = """
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
another = torch.optim.SGD(
    model.parameters(), lr=0.1
)
"""


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[dict[str, ModuleType]]:
    """Two modules of a program that call the same class; both are loaded."""
    found = {}
    for name, text in {"opt_inside": CLOSED_OVER, "opt_at_top": AT_TOP}.items():
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield found
    for name in found:
        del sys.modules[name]


def place(lines: OptimizerLines, work: batchfit.Workload) -> tuple[str, int]:
    known = work._parts
    line = lines.of(work.optimizer, [known["source"].make, known["loss_fn"], work.step])
    assert line is not None
    return Path(line.file).name, line.number


@pytest.mark.slow
def test_the_module_of_the_functions_that_use_it_is_chosen(modules: dict[str, ModuleType]) -> None:
    assert place(OptimizerLines(), modules["opt_inside"].make()) == ("opt_inside.py", 7)


def test_the_module_that_holds_it_is_chosen(modules: dict[str, ModuleType]) -> None:
    top = modules["opt_at_top"]
    line = OptimizerLines().of(top.optimizer)
    assert line is not None
    assert (Path(line.file).name, line.number) == ("opt_at_top.py", 5)
    made_here = torch.optim.AdamW(top.model.parameters())  # beside theirs, and in no module
    assert OptimizerLines().of(made_here) is None


def test_an_optimizer_that_is_made_under_our_eyes_goes_by_its_stack(tmp_path: Path) -> None:
    lines = OptimizerLines()
    text = "\n\ndef build(kind, model):\n    return kind(\n        model.parameters(), lr=0.1\n    )\n"
    (tmp_path / "built.py").write_text(text)
    space: dict[str, object] = {}
    exec(compile(text, str(tmp_path / "built.py"), "exec"), space)
    before = torch.optim.Optimizer.__init__
    with lines.noting():
        made = space["build"](torch.optim.SGD, torch.nn.Linear(2, 2))  # type: ignore[operator]
    line = lines.of(made)  # no call of SGD is written anywhere
    assert line is not None
    assert (line.file, line.number, line.function) == (str(tmp_path / "built.py"), 4, "build")
    assert torch.optim.Optimizer.__init__ is before
