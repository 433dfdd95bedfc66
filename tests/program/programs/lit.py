"""An autoencoder with Lightning: python lit.py --data.batch_size 64"""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((1, 28, 28), (index % 10) / 10), index % 10


class DigitsModule(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Digits(6000), batch_size=self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(Digits(64), batch_size=4)


class LitAutoEncoder(L.LightningModule):
    def __init__(self, width=384):
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 16))
        self.decoder = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 784))

    def loss_of(self, batch):
        x, _ = batch
        return nn.functional.mse_loss(self.decoder(self.encoder(x)), x.flatten(1))

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss_of(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data.batch_size", dest="batch_size", type=int, default=32)
    parser.add_argument("--trainer.max_epochs", dest="max_epochs", type=int, default=50)
    args = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=args.max_epochs, accelerator="cpu", log_every_n_steps=1)
    trainer.fit(LitAutoEncoder(), datamodule=DigitsModule(args.batch_size))


if __name__ == "__main__":
    main()
