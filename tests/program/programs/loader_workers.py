"""Image training with worker processes: python loader_workers.py -b 64 -j 2"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="PyTorch training")
parser.add_argument("-b", "--batch-size", default=256, type=int, metavar="N", help="mini-batch size")
parser.add_argument("-j", "--workers", default=2, type=int, metavar="N")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=10, type=int)


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


class Crops(Dataset):
    """Reads an image and augments it: larger tensors live in the worker for a while."""

    def __len__(self):
        return 5000

    def __getitem__(self, index):
        image = torch.rand(3, 64, 64)
        top, left = torch.randint(0, 32, (2,)).tolist()
        crop = image[:, top : top + 32, left : left + 32].clone()
        return crop.flip(-1) if index % 2 else crop, index % 10


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def train(loader, model, criterion, optimizer, epoch, args):
    losses, end = AverageMeter(), time.time()
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}] Loss {losses.avg:.3f} Time {time.time() - end:.3f}")
        end = time.time()


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    model = build_model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    loader = DataLoader(
        Crops(), batch_size=args.batch_size, shuffle=True, num_workers=args.workers, persistent_workers=True
    )
    for epoch in range(args.epochs):
        train(loader, model, criterion, optimizer, epoch, args)
        torch.save({"epoch": epoch, "state_dict": model.state_dict()}, "checkpoint.pth.tar")


if __name__ == "__main__":
    main()
