"""A module for TorchScript, which reads annotations: this file has none that are put off."""

import torch
from torch import nn


class Scripted(nn.Module):
    """Its `forward` moves what TorchScript keeps: a number, a list, a buffer that is another each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.count = 0
        self.seen = [0]
        self.register_buffer("total", torch.zeros(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.total = self.total + 1
        return self.norm(self.linear(batch)) + self.total
