"""An OOM in evaluation leaves the size of training as it was, and says why its own size fell."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import batchfit


@pytest.mark.parametrize("shared", [True, False], ids=["one Microbatcher", "one for each"])
def test_an_oom_in_evaluation_does_not_shrink_the_training(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="batchfit")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    sizes = []
    with batchfit.virtual_memory("5MiB"):
        trained = batchfit.Microbatcher(model)
        evaluated = trained if shared else batchfit.Microbatcher(model)
        for step in range(8):
            model.zero_grad()
            report = trained.backward(lambda x: model(x).square().mean(), torch.randn(10, 128, 64))
            sizes.append(report.microbatch_sizes)
            if step in (2, 5):
                model.eval()
                evaluated.map(lambda x: model(x).mean((1, 2)), torch.randn(60, 128, 64))
                model.train()
    assert set(sizes) == {(10,)}
    told = [record.getMessage() for record in caplog.records]
    assert any(one.startswith("microbatch 60 -> 30: OOM at a request of") for one in told)
    assert not any(one.startswith("microbatch 10 -> ") for one in told)
