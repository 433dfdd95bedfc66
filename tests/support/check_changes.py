"""A program, and changes that people make to it: for each, the line that a check must name first."""

from __future__ import annotations

from dataclasses import dataclass

PROGRAM = '''\
import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import batchfit

WORDS, WIDTH, LENGTH, BLOCKS = 512, 64, 32, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm(x))
        y = F.relu(self.up(x), inplace=True)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if False else block(x)
        return self.head(x)


def cross_entropy(logits, words):
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def make_batch(n):
    return torch.randint(0, WORDS, (n, LENGTH))


def make_workload():
    torch.manual_seed(0)
    model = Model()
    teacher = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss_fn(model, words):
        with torch.no_grad():
            wanted = teacher.words(words).mean(1)
            wanted = wanted + teacher.blocks(wanted[:, None]).mean() if False else wanted
        logits = model(words)
        return cross_entropy(logits, words) + wanted.mean()

    return batchfit.training(model, optimizer, loss_fn, make_batch, state=[model, optimizer, teacher])
'''
