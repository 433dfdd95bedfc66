"""`plan --apply`: the step is run where its GPU is, and refused elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runner import runner

torch = pytest.importorskip("torch")

import batchfit  # noqa: E402
from batchfit._cli.app import app  # noqa: E402
from batchfit._engine.allocator.gpus import gpu_named  # noqa: E402
from batchfit._plan import apply as applying  # noqa: E402
from batchfit._plan.pure.options import PlanOptions  # noqa: E402

PROGRAM = """
import torch
import batchfit

def workload():
    model = torch.nn.Sequential(torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    return batchfit.training(
        model, optimizer, lambda model, batch: model(batch).square().mean(), lambda n: torch.randn(n, 16, 256)
    )
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BATCHFIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return f"{path}:workload"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU is for machines without a GPU")
@pytest.mark.slow
def test_on_a_cpu_the_plan_is_beside_what_was_found(program: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = runner().invoke(app, ["plan", program, "--gpu", "cpu=112MiB", "--apply", "--output", str(out)])
    assert done.exit_code == 0, done.output
    plan = batchfit.Plan.from_json(out.read_text())
    run = plan.run
    assert run is not None
    assert (run.setting, run.gpu) == ("as it is", "cpu")
    assert run.planned_batch_size == plan.rows[0].cells[0].batch_size > 0
    assert run.peak_bytes is not None
    assert run.planned_batch_size < run.batch_size  # no cuBLAS on a CPU
    assert any("without cuBLAS" in note for note in plan.unseen)
    assert run.peak_bytes <= 112 * 2**20
    assert 1 <= run.fastest <= run.batch_size
    assert run.samples_per_s > 0
    assert f"{run.batch_size:,} found, {run.planned_batch_size:,} planned" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt2", "--gpu", "h100"], "--apply needs a program to run"),
        (["PROGRAM", "--gpu", "h100,t4"], "--apply needs one GPU"),
        (["PROGRAM", "--gpu", "h100x8"], "--apply needs one GPU"),
        (["PROGRAM", "--gpu", "h100"], "--apply needs the planned GPU (h100), and this machine has none"),
    ],
)
def test_without_its_gpu_nothing_is_run(
    words: list[str], says: str, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = runner().invoke(app, ["plan", *(program if one == "PROGRAM" else one for one in words), "--apply"])
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("here", "planned", "is_it"),
    [
        ("h100", "h100", True),
        ("h100", "h100=24GiB", True),
        ("h100", "a100-80gb", False),
        ("h100", "h200", False),
    ],
)
def test_the_gpu_that_is_here_must_be_the_planned_one(
    here: str, planned: str, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(device: Any) -> Any:
        return gpu_named(here)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(applying, "gpu_of", found)
    options = PlanOptions(gpus=planned)
    if is_it:
        assert applying.check_machine(options) == options.columns[0]
        return
    with pytest.raises(applying.OtherGpuError, match=f"this machine has a {here}"):
        applying.check_machine(options)
