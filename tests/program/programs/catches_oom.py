"""Sequence-to-sequence training that skips a batch when memory runs out, as older trainers do."""

import argparse

import torch
from torch import nn


class Translator(nn.Module):
    def __init__(self, words=500, width=64):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, source, target):
        _, state = self.encoder(self.embed(source))
        hidden, _ = self.decoder(self.embed(target), state)
        return self.out(hidden)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.model = Translator()
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)
        self.criterion = nn.CrossEntropyLoss()
        self.oom_batches = 0

    def train_step(self, source, target):
        self.model.train()
        self.optimizer.zero_grad()
        try:
            logits = self.model(source, target)
            loss = self.criterion(logits.flatten(0, 1), target.flatten())
            loss.backward()
        except RuntimeError as e:
            if "out of memory" in str(e):
                print("| WARNING: ran out of memory, skipping batch")
                self.oom_batches += 1
                self.optimizer.zero_grad()
                return None
            raise e
        self.optimizer.step()
        return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-sentences", type=int, default=32, help="batch size")
    parser.add_argument("--max-update", type=int, default=2000)
    args = parser.parse_args()
    torch.manual_seed(0)
    trainer = Trainer(args)
    for update in range(args.max_update):
        source = torch.randint(0, 500, (args.max_sentences, 32))
        target = torch.randint(0, 500, (args.max_sentences, 32))
        loss = trainer.train_step(source, target)
        if update % 10 == 0:
            print(f"| update {update} loss {loss}")
    torch.save(trainer.model.state_dict(), "checkpoint_last.pt")


if __name__ == "__main__":
    main()
