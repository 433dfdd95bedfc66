"""A training loop whose batch grows while it trains: loader and learning rate follow.

    python examples/schedule.py

The batch doubles where the learning rate would have been halved (Seesaw): fewer updates for the same samples.
A checkpoint in the middle is loaded into fresh objects, and training goes on as if nothing had happened.
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import batchfit

SAMPLES, FEATURES, CLASSES, INITIAL = 4096, 32, 8, 64


def make_data() -> TensorDataset:
    """Samples whose class is the largest of their first features, with a few wrong labels."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = x[:, :CLASSES].argmax(dim=1)
    wrong = torch.rand(SAMPLES, generator=generator) < 0.05
    y[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=generator)
    return TensorDataset(x, y)


class Run:
    """Everything that a checkpoint must hold, made anew."""

    def __init__(self, epochs: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        # The schedule takes the place of the decay; the LR scheduler is for the warm-up only.
        self.warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=2)
        self.loader = batchfit.ResizableLoader(make_data(), batch_size=INITIAL, shuffle=True)
        self.events: list[batchfit.ScheduleEvent] = []
        self.scheduler = batchfit.BatchSizeScheduler(
            batchfit.MilestoneBatchSizeConfig.seesaw(
                INITIAL, decay="cosine", total=epochs, max_batch_size=512
            ),
            loader=self.loader,
            lr="seesaw",
            optimizer=self.optimizer,
            lr_scheduler=self.warm_up,
            on_event=self.events.append,
        )
        self.losses: list[float] = []
        self.updates = 0

    def train(self, epochs: range) -> None:
        """The loop: one line more than without a schedule."""
        for epoch in epochs:
            self.scheduler.step(epoch)
            total = 0.0
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(x), y)
                loss.backward()
                self.optimizer.step()
                total += loss.item() * len(x)
                self.updates += 1
            self.warm_up.step()
            self.losses.append(total / SAMPLES)

    def parts(self) -> dict[str, Any]:
        """What has a state."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "warm_up": self.warm_up,
            "scheduler": self.scheduler,
            "loader": self.loader,
        }


def train(epochs: int) -> dict[str, Any]:
    """Train once to the end, and once more with a stop in the middle: both must agree."""
    whole = Run(epochs)
    whole.train(range(epochs))
    first, second = Run(epochs), Run(epochs)
    middle = epochs // 2 + 1
    first.train(range(middle))
    for name, part in second.parts().items():
        part.load_state_dict(first.parts()[name].state_dict())
    second.train(range(middle, epochs))
    return {
        "losses": whole.losses,
        "resumed": first.losses + second.losses,
        "events": whole.events,
        "updates": whole.updates,
        "planned": whole.scheduler.updates(samples=SAMPLES, epochs=epochs),
        "constant": epochs * -(-SAMPLES // INITIAL),
    }


if __name__ == "__main__":
    result = train(epochs=12)
    print("loss by epoch:", " ".join(f"{loss:.3f}" for loss in result["losses"]))
    print(f"{result['updates']} updates (planned {result['planned']}, constant {result['constant']})")
    print("resumed run equal:", result["resumed"] == result["losses"])
