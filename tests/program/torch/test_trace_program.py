"""Programs traced as they run: the same allocations as of the same step in a workload, and clear refusals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_runner import runner
from short_temp import short_temp
from torch.nn import functional
from typer.testing import Result

import batchfit
from batchfit._cli.app import app
from batchfit._engine.allocator.footprint import Trace
from batchfit._engine.allocator.gpus import GPUS
from batchfit._engine.trace.trace import trace
from batchfit._engine.trace.workload import rules_for
from batchfit._predict.pure.options import PredictOptions
from batchfit._program.pure.template import CommandTemplate
from batchfit._program.tracing.predict import predict_program
from batchfit._program.tracing.traces import ProgramTraces, TooFewSamplesError
from batchfit.errors import ProgramError, UntraceableError

GPU = GPUS["rtx4090"]
PARTS = """
import sys
import torch
from torch import nn
from torch.nn import functional as F

def make_model():
    layers = [nn.Linear(256, 512), nn.Dropout(0.1), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers)
"""
TRAIN = (
    PARTS
    + """
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
parameters = list(model.parameters())
total = 0.0
for step in range(20):
    x, y = torch.randn(int(sys.argv[1]), 256), torch.randint(0, 10, (int(sys.argv[1]),))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if torch.isnan(loss) or loss.item() > 1e6:
        raise SystemExit("diverged")
    loss.backward()
    if nn.utils.clip_grad_norm_(parameters, 1.0).item() > 1e3:
        print("a large gradient")
    optimizer.step()
    total += loss.item()
    print(f"{step}: {total / (step + 1):.3f}")
"""
)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs run in a folder of their own; nothing is left in the temporary one."""
    with short_temp(monkeypatch) as temp:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        yield
        assert list(temp.iterdir()) == []


def traces(text: str, *words: str) -> ProgramTraces:
    Path("train.py").write_text(text)
    return ProgramTraces(CommandTemplate(words=(sys.executable, "train.py", *(words or ("{}",)))), GPU)


def by_kind(found: Trace) -> dict[str, int]:
    """Bytes allocated by kind; a loop of the program's and a workload's end their steps at other lines."""
    kinds: dict[str, int] = {}
    for size, origin in zip(found.sizes, found.origins, strict=True):
        kinds[origin.kind] = kinds.get(origin.kind, 0) + size
    return kinds


def make(text: str) -> dict[str, Any]:
    """What a program's text defines."""
    names: dict[str, Any] = {}
    exec(text, names)
    return names


def workload_trace(workload: batchfit.Workload, size: int) -> Trace:
    rules = rules_for(workload, GPU)
    trace(workload, size, rules=rules, steps=1)  # the first trace in a process differs by a few operations
    return trace(workload, size, rules=rules, steps=2)


def test_a_program_allocates_what_its_step_does_as_a_workload() -> None:
    model = make(PARTS)["make_model"]()
    workload = batchfit.training(
        model,
        torch.optim.AdamW(model.parameters()),
        lambda model, batch: functional.cross_entropy(model(batch[0]), batch[1]),
        lambda n: (torch.randn(n, 256), torch.randint(0, 10, (n,))),
        clip_norm=1.0,
    )
    expected = workload_trace(workload, 64)
    program = traces(TRAIN)
    found = program.trace(64, steps=2)
    assert found.peak_bytes == pytest.approx(expected.peak_bytes, rel=1e-3)
    for kind in ("weights", "gradients", "optimizer", "activations", "batch"):
        assert by_kind(found)[kind] == pytest.approx(by_kind(expected)[kind], rel=1e-4), kind
    assert {origin.phase for origin in found.origins} >= {"forward", "backward", "optimizer"}
    assert any(origin.source.startswith("train.py:") for origin in found.origins)
    assert program.classes == {
        "": "Sequential",
        "0": "Linear",
        "1": "Dropout",
        "2": "ReLU",
        "3": "Linear",
    }
    assert program.samples is None
    # One run serves any number of steps.
    assert program.trace(64, steps=1).step_ends == found.step_ends[:1]


@pytest.mark.slow
def test_two_optimizers_are_two_optimizers() -> None:
    text = (
        PARTS
        + """
generator, critic = nn.Linear(32, 64), nn.Linear(64, 1)
optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, critic)]
def step(n):
    noise = torch.randn(n, 32)
    fake = generator(noise)
    loss = critic(fake.detach()).mean() - critic(torch.randn(n, 64)).mean()
    optimizers[1].zero_grad(); loss.backward(); optimizers[1].step()
    loss = -critic(generator(noise)).mean()
    optimizers[0].zero_grad(); loss.backward(); optimizers[0].step()
"""
    )
    names = make(text)
    state = [names["generator"], names["critic"], *names["optimizers"]]
    expected = workload_trace(batchfit.Workload(names["step"], state=state), 128)
    found = traces(text + "\nfor _ in range(9): step(int(sys.argv[1]))").trace(128, steps=2)
    assert by_kind(found)["weights"] == by_kind(expected)["weights"]
    assert by_kind(found)["optimizer"] == by_kind(expected)["optimizer"] > 0


@pytest.mark.slow
def test_an_evaluation_needs_no_optimizer() -> None:
    text = (
        PARTS
        + """
model = make_model().eval()
right = 0
with torch.no_grad():
    for _ in range(12):
        x = torch.randn(int(sys.argv[1]), 256)
        right += (model(x).argmax(1) == 0).sum().item()
print(right)
"""
    )
    found = traces(text).trace(96, steps=2)
    assert "gradients" not in by_kind(found)
    assert "optimizer" not in by_kind(found)
    model_bytes = sum(one.numel() * 4 for one in make(PARTS)["make_model"]().parameters())
    assert by_kind(found)["weights"] == model_bytes
    assert by_kind(found)["batch"] >= 96 * 256 * 4


@pytest.mark.slow
def test_what_the_program_reads_in_its_way_is_what_it_read_when_it_ran() -> None:
    # The branch is taken in the second step only, as the real values say.
    text = TRAIN.replace(
        "    loss.backward()\n",
        "    if (x.mean() * 0 + step).item() == 1 and model[0].weight.sum() * 0 == 0:\n"
        "        extra = model[0].weight.new_zeros(int(sys.argv[1]), 1000)\n"
        "    loss.backward()\n",
    )
    found = traces(text).trace(16, steps=2)
    extra = [number for number, size in enumerate(found.sizes) if size == 16 * 1000 * 4]
    assert len(extra) == 1
    position = found.events.index(extra[0])
    assert found.step_ends[0] <= position < found.step_ends[1]


def test_what_a_line_reads_and_did_not_when_it_ran_is_refused_with_the_line() -> None:
    text = TRAIN.replace("    loss.backward()\n", "    loss.backward()\n    last = loss.detach().numpy()\n")
    with pytest.raises(UntraceableError, match=r"train\.py:\d+"):
        traces(text).trace(8, steps=2)


@pytest.mark.slow
def test_an_error_of_the_program_is_the_programs() -> None:
    program = traces(TRAIN.replace("    loss.backward()\n", "    raise KeyError('no such column')\n"))
    with pytest.raises(ProgramError, match="the program raised KeyError: 'no such column'") as raised:
        program.trace(8, steps=2)
    assert any("no such column" in line for line in raised.value.lines)


@pytest.mark.slow
def test_a_program_with_few_samples_is_traced_with_those_it_has() -> None:
    text = (
        PARTS
        + """
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randint(0, 10, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1]), drop_last=True)
for epoch in range(9):
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
    )
    program = traces(text)
    found = predict_program(program, PredictOptions(gpu=GPU.name, max_size=100_000))
    assert program.samples == found.samples == 64
    assert program.most_size == 32
    assert max(found.trace_sizes) <= 32
    assert found.batch_size == 100_000  # lines go on where samples end
    assert any("it ran on a CPU" in note for note in found.unseen)
    with pytest.raises(TooFewSamplesError):
        program.trace(65, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batches", "known"),
    [
        ("torch.utils.data.DataLoader(data, batch_size=size, shuffle=True)", True),
        ("[(data.tensors[0][i:i + size], data.tensors[1][i:i + size]) for i in range(0, 64, size)]", False),
    ],
)
def test_samples_without_a_loader_in_a_variable_bound_the_traces(batches: str, known: bool) -> None:
    text = (
        PARTS
        + """
model = make_model()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.randn(64, 256), torch.randint(0, 10, (64,)))
size = int(sys.argv[1])
for epoch in range(9):
    for x, y in BATCHES:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
"""
    )
    program = traces(text.replace("BATCHES", batches))
    program.trace(2, steps=2)
    assert program.samples == (64 if known else None)
    with pytest.raises(TooFewSamplesError, match="32 each at most"):
        program.trace(1000, steps=2)
    assert predict_program(program, PredictOptions(gpu=GPU.name, max_size=100_000)).batch_size == 100_000
    assert (program.most_size, program.samples) == (32, 64)


@pytest.mark.parametrize(
    ("text", "words", "reason"),
    [
        (TRAIN.replace("int(sys.argv[1])", "8"), ("{}",), "the size changes nothing"),
        ("print('no torch here')", ("{}",), "never imported torch"),
        ("import torch, sys; sys.exit(int(sys.argv[1]))", ("{}",), "exit code 2 before its first step"),
        ("import torch", ("{}",), "ended before its first step"),
    ],
    ids=["the size is not used", "no torch", "an exit code", "no step"],
)
@pytest.mark.slow
def test_what_cannot_be_traced_is_said(text: str, words: tuple[str, ...], reason: str) -> None:
    program = traces(text, *words)
    with pytest.raises(ProgramError, match=reason):
        [program.trace(size, steps=2) for size in (2, 16)]


def run_command(*words: str) -> Result:
    return runner().invoke(app, list(words))


@pytest.mark.slow
def test_the_command_predicts_and_explains() -> None:
    Path("train.py").write_text(TRAIN)
    command = ("--", sys.executable, "train.py", "{}")
    ran = run_command(
        "predict", "--gpu", f"{GPU.name},t4", "--max-size", "512", "--output", "p.json", *command
    )
    assert ran.exit_code == 0, ran.stderr
    predicted = json.loads(Path("p.json").read_text())
    assert [one["batch_size"] for one in predicted] == [512, 512]
    assert [one["card"] for one in predicted] == [GPU.name, "t4"]
    ran = run_command("explain", "--batch-size", "512", "--gpu", GPU.name, "--output", "e.json", *command)
    assert ran.exit_code == 0, ran.stderr
    explained = json.loads(Path("e.json").read_text())
    assert explained["peak_bytes"] == pytest.approx(predicted[0]["peak_bytes"], rel=0.01)
    assert any(line["name"].startswith("train.py:") for line in explained["lines"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("predict", "--", "python", "train.py", "{}"), "gpu must be given for a command"),
        (("predict", "--gpu", "t4", "--calibrate", "--", "python", "train.py", "{}"), "calibrate must be"),
        (("predict", "--gpu", "t4", "--", "python", "train.py"), "no place for the batch size"),
        (("predict", "--gpu", "t4", "--env", "SIZE", "train.py:make"), "--env is for a command"),
        (("explain", "--batch-size", "0", "--", "python", "train.py", "{}"), "batch_size must be"),
        (("explain", "--batch-size", "8", "--set", "a:b", "--", "x", "{}"), "set must name a"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(words: tuple[str, ...], reason: str) -> None:
    ran = run_command(*words)
    assert ran.exit_code == 2
    assert reason in " ".join(ran.stderr.split())


@pytest.mark.slow
def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = traces(TRAIN)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ProgramError, match="leave out its launcher"):
        program.trace(8, steps=2)
