"""A loop that `batchfit init` has changed trains as before, and goes on where it had an OOM."""

from __future__ import annotations

import gc
import runpy
from pathlib import Path

import pytest
import torch

from batchfit._init.advice import advise
from batchfit.testing import virtual_memory

PLAIN = '''\
"""Trains."""
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(256, 64), torch.randint(0, 2, (256,))) for _ in range(3)]


def train():
    total = 0.0
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            # every other feature
            x = x * torch.tensor([0.0, 1.0]).repeat(32)
            optimizer.zero_grad()
            with torch.autocast("cpu", enabled=False):
                out = model(x)
                loss = criterion(out, y)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total


answer = [train(), *(float(value) for value in model[2].weight.detach().flatten())]
'''


def runs_out(path: Path) -> bool:
    try:
        runpy.run_path(str(path))
    except torch.OutOfMemoryError:
        return True
    return False


def test_the_changed_loop_trains_as_before_and_survives(tmp_path: Path, living_bytes: int) -> None:
    state = torch.get_rng_state()
    (tmp_path / "before.py").write_text(PLAIN)
    advice = advise(PLAIN, file="before.py")
    assert advice.kind == "loop"
    (tmp_path / "after.py").write_text(advice.text)
    before = runpy.run_path(str(tmp_path / "before.py"))["answer"]
    after = runpy.run_path(str(tmp_path / "after.py"))["answer"]
    assert after == pytest.approx(before, abs=1e-6)
    gc.collect()  # what the two runs left would take a part, or not
    with virtual_memory(living_bytes + 440 * 1024):
        assert runs_out(tmp_path / "before.py")
        gc.collect()
        survived = runpy.run_path(str(tmp_path / "after.py"))["answer"]
    assert survived == pytest.approx(before, abs=1e-5)
    torch.set_rng_state(state)


NOTED = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
mean = nn.Linear(64, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.CrossEntropyLoss()
loader = [(torch.randn(256, 64), torch.randint(0, 2, (256,))) for _ in range(4)]
losses, seen, total, accumulate = [], [0], 0.0, 2
for step, (x, y) in enumerate(loader):
    seen[0] = seen[0] + len(x)
    with torch.no_grad():
        for a, b in zip(mean.parameters(), model[2:].parameters()):
            a.mul_(0.9)
    if step % accumulate == 0:
        optimizer.zero_grad()
    loss = criterion(model(x), y) / accumulate
    losses.append(loss.item())
    total += loss.item() * len(x)
    loss.backward()
    if (step + 1) % accumulate == 0:
        optimizer.step()

answer = [len(losses), seen[0], total, *losses, float(mean.weight.detach().sum())]
answer += [float(value) for value in model[2].weight.detach().flatten()]
"""


def test_a_loop_that_accumulates_and_notes_does_so_once_a_batch(tmp_path: Path, living_bytes: int) -> None:
    state = torch.get_rng_state()
    (tmp_path / "before.py").write_text(NOTED)
    (tmp_path / "after.py").write_text(advise(NOTED, file="before.py").text)
    before = runpy.run_path(str(tmp_path / "before.py"))["answer"]
    assert before[:2] == [4, 1024]
    gc.collect()
    with virtual_memory(living_bytes + 450 * 1024):
        assert runs_out(tmp_path / "before.py")
        gc.collect()
        survived = runpy.run_path(str(tmp_path / "after.py"))["answer"]
    assert survived == pytest.approx(before, abs=1e-5, rel=1e-6)
    torch.set_rng_state(state)


ACCELERATED = """\
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(1000, 64), torch.randint(0, 2, (1000,)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=256))
total, seen = 0.0, 0
for epoch in range(2):
    for step, (x, y) in enumerate(loader):
        with accelerator.accumulate(model):
            x = x.float()
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        total += accelerator.gather(loss).mean().item()
        seen += len(x)

answer = [seen, total, *(float(value) for value in model[2].weight.detach().flatten())]
"""


def test_a_changed_loop_of_accelerates_trains_as_before_and_survives(
    tmp_path: Path, living_bytes: int
) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    from accelerate_state import reset_accelerate

    random = torch.get_rng_state()
    (tmp_path / "before.py").write_text(ACCELERATED)
    advice = advise(ACCELERATED, file="before.py")
    assert "backward(accelerator, mb" in advice.text
    (tmp_path / "after.py").write_text(advice.text)
    before = runpy.run_path(str(tmp_path / "before.py"))["answer"]
    assert before[0] == 2000
    gc.collect()
    with virtual_memory(living_bytes + 535 * 1024):
        assert runs_out(tmp_path / "before.py")
        gc.collect()
        survived = runpy.run_path(str(tmp_path / "after.py"))["answer"]
    assert survived == pytest.approx(before, abs=1e-5)
    reset_accelerate()
    gc.collect()
    torch.set_rng_state(random)
