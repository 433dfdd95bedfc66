"""Contrastive learning with in-batch negatives: the encoder in microbatches, the loss over the whole batch.

    python examples/contrastive.py

Every sample is compared with all others of its batch, so cutting the batch would change the loss. With
`backward_cached` the encoder runs in chunks that fit, and the gradients are those of the full batch, which
this file checks.
"""

import contextlib
from typing import Any

import torch
from torch import nn

import batchfit

FEATURES, WIDTH, BATCH = 64, 32, 1024
Pair = tuple[torch.Tensor, torch.Tensor]


class Loss(nn.Module):
    """InfoNCE with a learned temperature: the two views of a sample belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, views: Pair) -> torch.Tensor:
        first, second = (nn.functional.normalize(view, dim=1) for view in views)
        scores = first @ second.T * self.log_scale.exp()
        return nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def make_models() -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(FEATURES, 2048), nn.GELU(), nn.Dropout(0.1), nn.Linear(2048, WIDTH))
    return encoder, Loss()


def make_batch() -> Pair:
    """Two noisy views of each sample."""
    sample = torch.randn(BATCH, FEATURES)
    return sample + 0.5 * torch.randn_like(sample), sample + 0.5 * torch.randn_like(sample)


def train(steps: int, limit_bytes: int = 24 << 20) -> list[batchfit.StepReport]:
    """Train the encoder and the temperature: the reports of all steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    encoder, criterion = (model.to(device) for model in make_models())
    optimizer = torch.optim.AdamW([*encoder.parameters(), *criterion.parameters()], lr=1e-3)

    def encode(micro: Pair) -> Pair:
        return encoder(micro[0]), encoder(micro[1])

    reports = []
    mb = batchfit.Microbatcher(encoder, criterion)  # the loss has a parameter of its own
    with contextlib.nullcontext() if device == "cuda" else batchfit.virtual_memory(limit_bytes):
        for _ in range(steps):
            optimizer.zero_grad()
            report = mb.backward_cached(encode, criterion, make_batch())
            mb.step(optimizer)
            reports.append(report)
    return reports


def error_of_the_gradients(microbatch_size: int) -> float:
    """Against the full batch, without dropout (it draws other numbers in a batch that is cut), in fp64."""
    encoder, criterion = (model.double().eval() for model in make_models())
    first, second = (view.double() for view in make_batch())
    models: tuple[Any, Any] = (encoder, criterion)

    def gradients() -> torch.Tensor:
        made = torch.cat([p.grad.flatten() for model in models for p in model.parameters()])
        for model in models:
            model.zero_grad()
        return made

    criterion((encoder(first), encoder(second))).backward()
    full = gradients()
    mb = batchfit.Microbatcher(*models, microbatch_size=microbatch_size)
    mb.backward_cached(lambda micro: (encoder(micro[0]), encoder(micro[1])), criterion, (first, second))
    return float((gradients() - full).norm() / full.norm())


if __name__ == "__main__":
    reports = train(steps=20)
    for step in (0, 1, 19):
        report = reports[step]
        print(f"step {step}: loss {report.loss:.3f}, encoder in {report.microbatch_sizes}")
    print(f"gradients differ from the full batch's by {error_of_the_gradients(100):.0e} of their norm (fp64)")
