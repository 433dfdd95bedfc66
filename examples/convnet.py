"""How large a batch can a convolutional network with BatchNorm train with?

    python examples/convnet.py
    batchfit find examples/convnet.py:workload

The search runs real training steps, and BatchNorm's statistics move in each of them; afterwards they
are where they were, as are the weights, the momentum and the learning rate.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import batchfit

PIXELS, CLASSES = 32, 10


class Residual(nn.Module):
    """Two convolutions beside a shortcut; with `stride=2` it halves the image."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        Residual(16, 32, stride=2),
        Residual(32, 64, stride=2),
        Residual(64, 128, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def loss_fn(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def workload() -> batchfit.Workload:
    """Batches come from a dataset here, by its own collate function (torch's default)."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    dataset = TensorDataset(torch.randn(64, 3, PIXELS, PIXELS), torch.randint(0, CLASSES, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    autocast = torch.bfloat16 if device == "cuda" else None
    return batchfit.training(model, optimizer, loss_fn, dataset, autocast=autocast)


if __name__ == "__main__":
    work = workload()
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    fit = batchfit.find_batch_size(work, budget=None if torch.cuda.is_available() else "64MiB")
    print(fit)
    after = work.model.state_dict()
    unchanged = all(torch.equal(after[name], value) for name, value in before.items())
    print(f"weights and BatchNorm statistics as before: {unchanged}")
