"""`find -- COMMAND` on a real GPU: the answer runs, little more does not, and a workload's is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchfit

pytestmark = pytest.mark.gpu

BUDGET = 6 * 2**30
TRAIN = """
import argparse
import os

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, WORDS, LENGTH = 512, 8, 6, 8192, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, c))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.blocks(self.tokens(ids) + self.places.weight))


def loss_of(model, ids):
    with torch.autocast("cuda", torch.bfloat16):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def make_workload():
    import batchfit

    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)

    def step(size):
        train_one(model, optimizer, size)

    return batchfit.Workload(step, state=[model, optimizer])


def train_one(model, optimizer, size):
    ids = torch.randint(0, WORDS, (size, LENGTH), device="cuda")
    optimizer.zero_grad()
    loss_of(model, ids).backward()
    optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--skip-oom", action="store_true")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit / total)
    model = GPT().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    for _ in range(args.steps):
        try:
            train_one(model, optimizer, args.batch_size)
        except torch.OutOfMemoryError:
            if not args.skip_oom:
                raise
            torch.cuda.empty_cache()
    open("finished", "w").close()


if __name__ == "__main__":
    main()
"""
CONVOLVES = """
import sys
import torch
from torch import nn

size, steps = int(sys.argv[1]), int(sys.argv[2])
if len(sys.argv) > 3:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(int(sys.argv[3]) / total)
torch.backends.cudnn.benchmark = True
convolution = lambda channels: nn.Conv2d(channels, 64, 3, padding=1)
layers = [nn.Sequential(convolution(64 if i else 3), nn.BatchNorm2d(64), nn.ReLU()) for i in range(6)]
model = nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
for _ in range(steps):
    loss = model(torch.randn(size, 3, 64, 64, device="cuda")).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the programs are, and where they run."""
    place = tmp_path_factory.mktemp("programs")
    (place / "train.py").write_text(TRAIN)
    (place / "convolves.py").write_text(CONVOLVES)
    return place


def find(folder: Path, *command: str) -> batchfit.FitResult:
    flags = ["--budget", str(BUDGET), "--json", "--time-limit-s", "400"]
    words = [sys.executable, "-m", "batchfit", "find", *flags, "--", *command]
    ran = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    assert not (folder / "finished").exists()
    return batchfit.FitResult.from_json(ran.stdout)


def runs_outside(folder: Path, *command: str) -> bool:
    """Whether the program itself, without batchfit, runs to its end."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("BATCHFIT")}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    (folder / "finished").unlink(missing_ok=True)
    assert ran.returncode == 0 or "CUDA out of memory" in ran.stderr, ran.stderr
    return ran.returncode == 0


@pytest.fixture(scope="module")
def fit(folder: Path) -> batchfit.FitResult:
    """The answer for the plain command."""
    return find(folder, sys.executable, "train.py", "--batch-size", "{}")


def test_the_answer_runs_outside_and_little_more_does_not(folder: Path, fit: batchfit.FitResult) -> None:
    def outside(size: int) -> bool:
        words = ["train.py", "--batch-size", str(size), "--steps", "40", "--limit", str(BUDGET)]
        return runs_outside(folder, sys.executable, *words)

    assert fit.device == "cuda:0"
    assert fit.survived_steps == 25
    assert fit.peak_bytes is not None
    assert 0.8 * BUDGET < fit.peak_bytes <= BUDGET
    trial = next(one for one in fit.trials if one.size == fit.batch_size and one.fits)
    assert trial.reserved_bytes is not None
    assert fit.peak_bytes <= trial.reserved_bytes <= BUDGET
    assert outside(fit.batch_size)
    assert not outside(fit.batch_size + max(1, fit.batch_size * 6 // 100))


def test_a_workload_of_the_same_step_has_the_same_answer(
    folder: Path, fit: batchfit.FitResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    workload = batchfit.find_batch_size("train.py:make_workload", budget=BUDGET, isolate=True)
    print(json.dumps({"command": fit.batch_size, "workload": workload.batch_size}))
    assert abs(workload.batch_size - fit.batch_size) <= max(1, 0.04 * workload.batch_size)


def test_torchrun(folder: Path, fit: batchfit.FitResult) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    launched = find(folder, *launcher, "train.py", "--batch-size", "{}")
    assert abs(launched.batch_size - fit.batch_size) <= max(1, 0.03 * fit.batch_size)


def test_an_oom_that_the_program_skips(folder: Path, fit: batchfit.FitResult) -> None:
    skipped = find(folder, sys.executable, "train.py", "--batch-size", "{}", "--skip-oom")
    assert abs(skipped.batch_size - fit.batch_size) <= max(1, 0.03 * fit.batch_size)
    assert all(one.outcome in ("fits", "oom") for one in skipped.trials)


def test_an_algorithm_of_cudnn_that_finds_no_workspace_is_no_oom(folder: Path) -> None:
    fit = find(folder, sys.executable, "convolves.py", "{}", "10000")
    print(json.dumps({"convolutions": fit.batch_size, "peak": fit.peak_bytes}))
    assert runs_outside(folder, sys.executable, "convolves.py", str(fit.batch_size), "40", str(BUDGET))
    more = fit.batch_size * 3 // 2
    assert not runs_outside(folder, sys.executable, "convolves.py", str(more), "40", str(BUDGET))


def test_steps_are_timed_on_the_gpu(folder: Path, fit: batchfit.FitResult) -> None:
    trials = {one.size: one.step_s for one in fit.trials if one.fits and one.step_s is not None}
    small, large = min(trials), max(trials)
    # The host launches both in the same time.
    assert trials[large] > 1.3 * trials[small]
    ran = next(one for one in fit.trials if one.size == large and one.fits)
    assert trials[large] * ran.steps_run < ran.elapsed_s
