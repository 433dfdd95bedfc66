"""The store on a real CUDA device: two processes, one search."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import batchfit

pytestmark = pytest.mark.gpu

PROGRAM = """
import sys
import torch
from torch import nn
import batchfit

def make():
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.Sequential(nn.Embedding(8192, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 8192))
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    loss = lambda model, ids: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    batch = lambda n: torch.randint(0, 8192, (n, 256))
    return batchfit.training(model, optimizer, loss, batch, autocast=torch.bfloat16)

budget = sys.argv[1] if len(sys.argv) > 1 else None
print(batchfit.find_batch_size(make(), budget=budget, store=True).to_json(indent=None))
"""


@pytest.mark.parametrize("budget", [("4GiB",), ()], ids=["a budget", "what is free"])
def test_a_second_process_confirms_what_the_first_has_found(tmp_path: Path, budget: tuple[str, ...]) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "program.py", *budget],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        found.append(batchfit.FitResult.from_json(done.stdout.splitlines()[-1]))
    first, second = found
    assert not first.from_store
    assert second.from_store, second
    assert second.batch_size == first.batch_size
    assert second.sustained
    assert len(second.trials) == 1
    assert second.elapsed_s < first.elapsed_s
