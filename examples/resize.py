"""A training loop whose batch grows: by plan at first, then because the loss has stopped falling.

    python examples/resize.py

One loader for the whole run: workers stay, no sample is lost or repeated when the size changes, and a
checkpoint in the midst of an epoch goes on with the very next sample.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import batchfit

FEATURES, CLASSES = 32, 4


class Points(Dataset[tuple[torch.Tensor, int]]):
    """Noisy points of a few classes; each sample is made when it is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return self.centres[index % CLASSES] + 2 * noise, index % CLASSES


class WarmUp:
    """32 samples a batch, then 64 from the 512th sample on."""

    def size_at(self, progress: Any) -> int:
        return 32 if progress.samples < 512 else 64


def make_loader(samples: int, workers: int) -> batchfit.ResizableLoader:
    return batchfit.ResizableLoader(
        Points(samples), schedule=WarmUp(), shuffle=True, num_workers=workers, seed=1
    )


def train(samples: int = 2048, epochs: int = 3, workers: int = 1) -> dict[str, Any]:
    """Train: the size of every batch, the losses, and a checkpoint from the midst of the last epoch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = make_loader(samples, workers)
    sizes, losses = [], []
    average = best = float("inf")
    checkpoint: dict[str, Any] = {}
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y) * loader.weight  # 1.0 on one rank
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(len(x))
            losses.append(loss.item())
            average = losses[-1] if len(losses) == 1 else 0.9 * average + 0.1 * losses[-1]
            best = min(best, average)
            # Unplanned: larger batches once the average has risen from its best. Ends the schedule.
            if len(sizes) % 10 == 0 and average > 1.05 * best and loader.batch_size < 256:
                loader.batch_size *= 2
                best = average
            if epoch == epochs - 1 and not checkpoint and loader.progress.samples >= (epochs - 0.5) * samples:
                checkpoint = {"model": model.state_dict(), "loader": loader.state_dict()}
    return {"sizes": sizes, "losses": losses, "checkpoint": checkpoint, "progress": loader.progress}


if __name__ == "__main__":
    samples = 2048
    result = train(samples)
    changes = [
        0,
        *(i for i in range(1, len(result["sizes"])) if result["sizes"][i] != result["sizes"][i - 1]),
    ]
    for step in changes:
        print(f"step {step:3}: batches of {result['sizes'][step]}, loss {result['losses'][step]:.3f}")
    print(result["progress"])

    again = make_loader(samples, workers=0)  # another number of workers will do
    again.load_state_dict(result["checkpoint"]["loader"])
    rest = sum(len(x) for x, _ in again)
    print(
        f"the checkpoint goes on in epoch {again.progress.epoch - 1} with the {rest} samples that were left"
    )
