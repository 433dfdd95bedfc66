"""How large a batch can a mixture of experts train with, for each number of experts per token?

    batchfit sweep examples/sweep_moe.yaml --output moe.json
    python examples/sweep_moe.py

Each token goes through its `top_k` best experts, and their activations are kept for the backward pass: more
experts, less room. The measurement is the loss on held-out data after a few steps at the size found.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

import batchfit

WIDTH, EXPERTS, TOKENS, CLASSES = 32, 8, 16, 4


class Experts(nn.Module):
    """A layer of experts, of which each token takes the `top_k` with the highest scores."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 4 * WIDTH, WIDTH) / (4 * WIDTH) ** 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(flat)
        for expert in range(EXPERTS):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            hidden = functional.gelu(flat[rows] @ self.up[expert])
            out = out.index_add(0, rows, (hidden @ self.down[expert]) * weights[rows, place, None])
        return tokens + out.view_as(tokens)


class Mixture(nn.Module):
    """Two layers of experts, and a class for each sequence."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Experts(top_k), Experts(top_k))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(tokens).mean(dim=1))


def make_batch(size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Sequences whose class is written into their first token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(size, TOKENS, WIDTH, generator=generator)
    return {"tokens": tokens, "label": tokens[:, 0, :CLASSES].argmax(dim=-1)}


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch["tokens"]), batch["label"])


def make(top_k: int) -> batchfit.Workload:
    """The workload of one configuration."""
    torch.manual_seed(0)
    model = Mixture(top_k).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return batchfit.training(model, optimizer, loss_fn, make_batch)


def held_out_loss(workload: batchfit.Workload, size: int) -> dict[str, Any]:
    """Train a little at that size, then look at data that was not seen."""
    for _ in range(4):
        workload.step(size)
    with torch.no_grad():
        device = next(workload.model.parameters()).device
        batch = {name: one.to(device) for name, one in make_batch(32, seed=1).items()}
        return {"loss": round(float(loss_fn(workload.model, batch)), 5)}


if __name__ == "__main__":
    budget = None if torch.cuda.is_available() else "12MiB"
    print(
        batchfit.sweep(
            make, {"top_k": [1, 2, 4]}, batch_size=256, measure=held_out_loss, budget=budget, soak_steps=3
        )
    )
