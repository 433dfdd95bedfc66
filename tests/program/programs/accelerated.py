"""Sentence pairs with Accelerate: accelerate launch accelerated.py --batch_size 16"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset


class Pairs(Dataset):
    def __len__(self):
        return 3668

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(0, 1000, (48,), generator=generator), "labels": index % 2}


class Classifier(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(1000, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, input_ids, labels):
        logits = self.head(self.encoder(self.embed(input_ids)).mean(1))
        return nn.functional.cross_entropy(logits, labels), logits


def training_function(config, args):
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(config["seed"])
    model = Classifier()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    loader = DataLoader(Pairs(), shuffle=True, batch_size=args.batch_size, drop_last=True)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step / 100))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.3f}")
        accelerator.save_state("checkpoint")
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="If passed, will train on the CPU.")
    training_function({"lr": 2e-5, "num_epochs": 30, "seed": 42}, parser.parse_args())


if __name__ == "__main__":
    main()
