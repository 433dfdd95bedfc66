"""Image classification, with a config of dotted overrides: python train.py train.batch_size=64."""

import logging
import sys
import traceback
from types import SimpleNamespace

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, Dataset

log = logging.getLogger(__name__)


def to_namespace(data):
    return SimpleNamespace(**{k: to_namespace(v) if isinstance(v, dict) else v for k, v in data.items()})


def compose(path, overrides):
    with open(path) as stream:
        data = yaml.safe_load(stream)
    for one in overrides:
        key, value = one.split("=", 1)
        *parents, last = key.split(".")
        node = data
        for name in parents:
            node = node[name]
        node[last] = yaml.safe_load(value)
    return to_namespace(data)


class Images(Dataset):
    def __init__(self, cfg):
        self.cfg = cfg

    def __len__(self):
        return self.cfg.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        size = self.cfg.image_size
        return torch.randn(3, size, size, generator=generator), index % self.cfg.classes


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build(cfg):
    stem = nn.Sequential(nn.Conv2d(3, cfg.model.width, 3, padding=1), nn.ReLU(inplace=True))
    blocks = [Residual(cfg.model.width) for _ in range(cfg.model.blocks)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cfg.model.width, cfg.data.classes))
    return nn.Sequential(stem, *blocks, head)


def train(cfg):
    torch.manual_seed(cfg.seed)
    model = build(cfg)
    settings = cfg.train.optimizer
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Images(cfg.data), batch_size=cfg.train.batch_size, shuffle=True, drop_last=True)
    for epoch in range(cfg.train.epochs):
        for step, (images, labels) in enumerate(loader):
            optimizer.zero_grad()
            outputs = model(images)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            log.info("epoch %d step %d loss %.3f", epoch, step, loss.item())
        torch.save(model.state_dict(), f"epoch{epoch}.pt")


def main():
    logging.basicConfig(level=logging.INFO)
    try:
        train(compose("config.yaml", sys.argv[1:]))
    except Exception:
        traceback.print_exc()  # as Hydra does
        sys.exit(1)


if __name__ == "__main__":
    main()
