"""A program, and changes that people make to such a program, each with the line that a check must name."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = """\
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
            x = block(x)
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
            wanted = teacher(words)
        logits = model(words)
        return cross_entropy(logits, words) + F.mse_loss(logits, wanted)

    return batchfit.training(model, optimizer, loss_fn, make_batch, state=[model, optimizer, teacher])
"""
_LOGITS = "        logits = model(words)\n"
_LOSS = "    return F.cross_entropy(logits.flatten(0, 1), words.flatten())\n"
_ATTENTION = "mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
_CHUNKED = """\
    parts = zip(logits.flatten(0, 1).chunk(16), words.flatten().chunk(16))
    losses = [checkpoint(F.cross_entropy, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).mean()
"""


@dataclass(frozen=True)
class ProgramChange:
    """`old` is replaced by `new`; `line` is the text of the line that is to blame.

    It must be the first of the changes, or stand in the reasons above them (`in_reasons`). `grows` says which
    way the peak goes.
    """

    name: str
    old: str
    new: str
    line: str
    grows: bool = True
    in_reasons: bool = False
    size: int = 512

    @property
    def text(self) -> str:
        """The changed program."""
        assert PROGRAM.count(self.old) == 1, f"{self.name}: {self.old!r}"
        return PROGRAM.replace(self.old, self.new)


CHANGES = (
    ProgramChange(
        "an extra copy of the logits",
        _LOGITS,
        f"{_LOGITS}        logits = logits.clone()\n",
        "logits = logits.clone()",
    ),
    ProgramChange(
        "logits in fp64",
        _LOSS,
        f"    logits = logits.double()\n{_LOSS}",
        "logits = logits.double()",
        in_reasons=True,
    ),
    ProgramChange(
        "a forgotten no_grad",
        "        with torch.no_grad():\n            wanted = teacher(words)\n",
        "        wanted = teacher(words)\n",
        "wanted = teacher(words)",
    ),
    ProgramChange(
        "a longer sequence", "512, 64, 32, 2", "512, 64, 48, 2", "def make_batch(n):", in_reasons=True
    ),
    ProgramChange("a loss in chunks", _LOSS, _CHUNKED, "parts = zip(logits", grows=False),
    ProgramChange(
        "a larger optimizer state",
        "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)",
        "torch.optim.AdamW(model.parameters(), amsgrad=True)",
        "optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)",
        size=4,
    ),
    ProgramChange(
        "activation checkpointing",
        "            x = block(x)\n",
        "            x = checkpoint(block, x, use_reentrant=False)\n",
        "x = checkpoint(block, x, use_reentrant=False)",
        grows=False,
    ),
    ProgramChange(
        "a wider layer",
        "self.up = nn.Linear(WIDTH, 4 * WIDTH)\n        self.down = nn.Linear(4 * WIDTH, WIDTH)",
        "self.up = nn.Linear(WIDTH, 6 * WIDTH)\n        self.down = nn.Linear(6 * WIDTH, WIDTH)",
        "self.up = nn.Linear(WIDTH, 6 * WIDTH)",
        in_reasons=True,
    ),
    ProgramChange(
        "attention scores that are kept",
        _ATTENTION,
        "mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v",
        "mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v",
    ),
    ProgramChange(
        "one-hot targets",
        _LOSS,
        "    wanted = F.one_hot(words, WORDS).float()\n"
        "    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(0, 1))\n",
        "wanted = F.one_hot(words, WORDS).float()",
    ),
    ProgramChange(
        "outputs of all steps",
        "    def loss_fn(model, words):\n",
        "    kept = []\n\n    def loss_fn(model, words):\n        kept.append(model(words))\n",
        "kept.append(model(words))",
    ),
    ProgramChange(
        "an activation that is no longer in place",
        "y = F.relu(self.up(x), inplace=True)",
        "y = F.gelu(self.up(x))",
        "y = F.gelu(self.up(x))",
    ),
)


def workload_of(text: str, folder: Path, name: str = "train") -> Any:
    """The workload of a program, written to a file in `folder`."""
    path = folder / f"{name}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import would: a check looks there for the line of the optimizer
    # Two versions within a second, of one length, would share their bytecode.
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module.make_workload()
