"""The smallest real modules and Trainers for the tests of `batchfit.integrations.lightning`."""

from __future__ import annotations

import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as legacy
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)

LIGHTNING = tuple(int(part) for part in pl.__version__.split(".")[:2])
# For tests that compare with Lightning's own search.
SEARCH_OF_2_6 = pytest.mark.skipif(
    LIGHTNING < (2, 6),
    reason="Lightning before 2.6 counts the trials of its own search otherwise, without margin and max_val",
)
# Lightning's own advice about loaders, loggers and torch's deprecations: not what is tested.
QUIET = (
    "ignore:.*does not have many workers",
    "ignore:.*isinstance.treespec",
    "ignore:.*no logger configured",
    "ignore:You defined a `validation_step`",
    "ignore:.*smaller than the logging interval",
    "ignore:.*LeafSpec",
    "ignore:.*already configured with model summary",
    "ignore:Checkpoint directory",
    "ignore:.*Found . module.s. in eval mode",
    "ignore:.*weights_only",
    "ignore:`isinstance",
    "ignore:The .predict_dataloader. does not",
    "ignore:You are using the `dataloader_iter`",
    "ignore:Found `dataloader_iter` argument",
)


class Steps:
    """A small net that keeps the sizes it has seen, with dropout for the random numbers."""

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        width: int = 64,
        dropout: float = 0.1,
        limit: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size is not None:
            self.batch_size = batch_size
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, width), nn.Linear(width, 1)
        )
        self.limit = limit  # samples above which a step runs out of memory
        self.sizes: list[int] = []
        self.data: Any = None

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        self.sizes.append(len(x))
        if self.limit is not None and len(x) > self.limit:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return (self.net(x) - x[:, :1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Net(Steps, pl.LightningModule):
    pass


class LegacyNet(Steps, legacy.LightningModule):
    pass


class Own(Net):
    """One that makes its loaders itself."""

    def train_dataloader(self) -> Any:
        return DataLoader(data(), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def data(samples: int = 256, width: int = 16, dtype: torch.dtype = torch.float32) -> TensorDataset:
    made = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(samples, width, generator=made, dtype=dtype))


def trainer(*callbacks: Callback, package: Any = pl, **options: Any) -> Any:
    plain: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return package.Trainer(callbacks=list(callbacks), **{**plain, **options})


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in module.parameters()]


def seeded(make: Any) -> Any:
    """`make()` with torch's random numbers begun anew, for runs that are compared."""
    torch.manual_seed(11)
    return make()
