"""A GAN: two models, two optimizers, and a batch that does not fit.

    python examples/gan.py

Both models go to `Microbatcher`, since both take part in the backward passes. The noise is part of the batch,
so that a sample has the same noise in whatever microbatch it comes.
"""

import contextlib
from typing import Any

import torch
from torch import nn

import batchfit

NOISE, BATCH = 8, 2048


def make_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(NOISE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    critic = nn.Sequential(nn.Linear(2, 256), nn.LeakyReLU(0.2), nn.Linear(256, 256), nn.LeakyReLU(0.2))
    return generator.append(nn.Linear(256, 2)), critic.append(nn.Linear(256, 1))


def make_batch() -> dict[str, torch.Tensor]:
    """Points on a circle, and noise to make others from."""
    angle = torch.rand(BATCH) * 2 * torch.pi
    points = torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(BATCH, 2)
    return {"points": points, "noise": torch.randn(BATCH, NOISE)}


def train(steps: int, limit_bytes: int = 12 << 20) -> dict[str, Any]:
    """Train both: their reports, the generator, and what it makes in the end."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator, critic = (model.to(device) for model in make_models())
    generate, criticise = (
        torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.5, 0.99)) for model in (generator, critic)
    )

    def critic_loss(micro: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            made = generator(micro["noise"])
        # softplus(-real) + softplus(fake) is the usual cross entropy; a mean over samples, as it must be
        real, fake = critic(micro["points"]), critic(made)
        return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()

    def generator_loss(noise: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(-critic(generator(noise))).mean()

    reports = []
    mb = batchfit.Microbatcher(generator, critic)
    with contextlib.nullcontext() if device == "cuda" else batchfit.virtual_memory(limit_bytes):
        for _ in range(steps):
            batch = make_batch()
            criticise.zero_grad()
            report = mb.backward(critic_loss, batch)
            mb.step(criticise)

            generate.zero_grad()
            critic.requires_grad_(False)  # gradients flow through it; it needs none of its own
            other = mb.backward(generator_loss, batch["noise"])
            critic.requires_grad_(True)
            mb.step(generate)
            reports.append((report, other))
        made = mb.map(generator, torch.randn(BATCH, NOISE))
    return {"reports": reports, "generator": generator, "made": made}


if __name__ == "__main__":
    result = train(steps=100)
    for step, (report, other) in enumerate(result["reports"]):
        if step % 33 == 0:
            print(
                f"step {step}: critic {report.loss:.3f} in {report.microbatch_sizes}, "
                f"generator {other.loss:.3f} in {other.microbatch_sizes}"
            )
    radius = result["made"].norm(dim=1)
    print(f"points at radius {radius.mean():.2f} +- {radius.std():.2f}; the data are at 1.00")
