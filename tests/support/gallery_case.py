"""What a loop of the gallery is, and what several of them are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

import batchfit

Make = Callable[[str], batchfit.Workload]
F = nn.functional


@dataclass(frozen=True)
class Case:
    """A training or evaluation loop as people write it.

    `expected` says whether a trace can follow it. One that it cannot follow decides by its data, at the line
    that holds the text `at`.
    """

    name: str
    make: Make
    expected: Literal["traced", "refused"]
    at: str = ""
    most: int | None = None  # the largest size that the loop takes
    uncounted: str = ""  # what a trace without a GPU does not count


CASES: dict[str, Case] = {}


def loop(*, refused: str = "", most: int | None = None, uncounted: str = "") -> Callable[[Make], Make]:
    """Hang a loop up in the gallery; `refused` is a text of the line at which a trace must stop."""

    def hang(make: Make) -> Make:
        expected: Any = "refused" if refused else "traced"
        CASES[make.__name__] = Case(make.__name__, make, expected, refused, most, uncounted)
        return make

    return hang


# ---------------------------------------------------------------- what loops are made of


def conv_net(width: int = 32, *, classes: int = 10, norm: bool = True, channels: int = 3) -> nn.Sequential:
    """Three stages of convolutions, for images of 64 x 64."""
    layers: list[nn.Module] = []
    for inside, outside in ((channels, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.BatchNorm2d(outside) if norm else nn.Identity(),
        ]
        layers += [nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes))


def images(n: int, device: str, classes: int = 10) -> tuple[Tensor, Tensor]:
    """A batch as a loader gives it, moved to the device."""
    pictures, labels = torch.randn(n, 3, 64, 64), torch.randint(0, classes, (n,))
    return pictures.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.GELU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A transformer's block, attention by `scaled_dot_product_attention`."""

    def __init__(
        self, width: int = 256, heads: int = 4, *, causal: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        n, length, width = x.shape
        q, k, v = (
            one.view(n, length, self.heads, -1).transpose(1, 2)
            for one in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        causal = self.causal and mask is None
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.drop(self.out(seen.transpose(1, 2).reshape(n, length, width)))
        out: Tensor = x + self.drop(self.inner(self.norm2(x)))
        return out


class Language(nn.Module):
    """A small language model; `hidden` is what its head sees."""

    def __init__(
        self, vocabulary: int = 4096, width: int = 256, depth: int = 3, *, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, mask)
        out: Tensor = self.norm(x)
        return out

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.hidden(ids, mask))
        return out


def tokens(n: int, device: str, length: int = 128, vocabulary: int = 4096) -> Tensor:
    return torch.randint(0, vocabulary, (n, length)).to(device)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
