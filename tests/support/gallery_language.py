"""Loops over sequences."""

from __future__ import annotations

import random
from typing import Any

import torch
from gallery_case import Block, F, Language, loop, next_token_loss, tokens
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset

import batchfit


def trained(device: str, model: nn.Module, loss_of: Any, *, low: bool = False) -> batchfit.Workload:
    """The plainest loop: AdamW, and bf16 autocast if asked for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step(n: int) -> None:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=low):
            loss = loss_of(n)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


@loop()
def causal_attention(device: str) -> batchfit.Workload:
    model = Language().to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        return next_token_loss(model(ids), ids)

    return trained(device, model, loss_of, low=True)


@loop()
def padding_mask(device: str) -> batchfit.Workload:
    """A key padding mask from lengths, as one boolean mask beside the causal one; padding is not learned."""
    model = Language().to(device)

    def loss_of(n: int) -> Tensor:
        lengths = torch.randint(64, 128, (n,))
        ids = tokens(n, device)
        kept = (torch.arange(128)[None] < lengths[:, None]).to(device)
        causal = torch.ones(128, 128, dtype=torch.bool, device=device).tril()
        logits = model(ids, kept[:, None, None, :] & causal)
        labels = ids.masked_fill(~kept, -100)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)

    return trained(device, model, loss_of, low=True)


@loop()
def window_mask(device: str) -> batchfit.Workload:
    """A sliding window as one boolean mask for all, in fp32."""
    model = Language().to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        at = torch.arange(128, device=device)
        apart = at[:, None] - at[None, :]
        return next_token_loss(model(ids, (apart >= 0) & (apart < 32)), ids)

    return trained(device, model, loss_of)


class Attended(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 256), nn.Linear(256, 4096)
        self.attention = nn.ModuleList(nn.MultiheadAttention(256, 4, batch_first=True) for _ in range(3))

    def forward(self, ids: Tensor, padding: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, seen = self.embed(ids), []
        for one in self.attention:
            made, weights = one(x, x, x, key_padding_mask=padding, need_weights=True)
            x = x + made
            seen.append(weights)
        return self.head(x), seen


@loop()
def attention_weights(device: str) -> batchfit.Workload:
    """nn.MultiheadAttention with its weights, which the loss uses."""
    model = Attended().to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        padding = torch.zeros(n, 128, dtype=torch.bool)
        padding[:, 100:] = True
        logits, seen = model(ids, padding.to(device))
        spread = sum((-(one * (one + 1e-9).log()).sum(-1).mean() for one in seen), torch.zeros(()).to(device))
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 0.01 * spread

    return trained(device, model, loss_of)


@loop(uncounted="refused before torch 2.13: the fast way through its layers loses the device")
def encoder_layers(device: str) -> batchfit.Workload:
    """nn.TransformerEncoder with a padding mask, a class token, and evaluation in the same step."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(4096, 256, padding_idx=0),
            "body": nn.TransformerEncoder(layer, 3, enable_nested_tensor=False),
            "head": nn.Linear(256, 2),
        }
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters())

    def logits_of(ids: Tensor) -> Tensor:
        out: Tensor = model["body"](model["embed"](ids), src_key_padding_mask=ids == 0)
        head: Tensor = model["head"](out[:, 0])
        return head

    def step(n: int) -> None:
        model.train()
        ids, labels = tokens(n, device), torch.randint(0, 2, (n,)).to(device)
        optimizer.zero_grad()
        F.cross_entropy(logits_of(ids), labels).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right = (logits_of(ids).argmax(-1) == labels).float().mean()
        print(f"accuracy {right.item():.3f}", file=_Nowhere())
        model.train()

    return batchfit.Workload(step, state=[model, optimizer])


class _Nowhere:
    def write(self, _: str) -> None:
        pass


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.embed, self.head = nn.Embedding(4096, 256), nn.Linear(256, 4096)
        self.blocks = nn.ModuleList(Block(dropout=0.1) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.how == "sequential":
            x = checkpoint_sequential(list(self.blocks), 2, x, use_reentrant=False)
        else:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")
        out: Tensor = self.head(x)
        return out


def checkpointed(device: str, how: str) -> batchfit.Workload:
    model = Checkpointed(how).to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        return next_token_loss(model(ids), ids)

    return trained(device, model, loss_of, low=True)


@loop()
def checkpoint_reentrant(device: str) -> batchfit.Workload:
    return checkpointed(device, "reentrant")


@loop()
def checkpoint_hooks(device: str) -> batchfit.Workload:
    """The kind that is not re-entrant."""
    return checkpointed(device, "hooks")


@loop()
def checkpoint_in_segments(device: str) -> batchfit.Workload:
    return checkpointed(device, "sequential")


@loop()
def chunked_loss(device: str) -> batchfit.Workload:
    """A tied head over a large vocabulary, the loss in chunks that are computed again in backward."""
    model = Language(16384, tied=True).to(device)

    def part_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden).float(), labels, reduction="sum")

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device, vocabulary=16384)
        hidden = model.hidden(ids)[:, :-1].flatten(0, 1)
        labels = ids[:, 1:].flatten()
        total = torch.zeros((), device=device)
        for one, wanted in zip(hidden.chunk(8), labels.chunk(8), strict=True):
            total = total + checkpoint(part_of, one, wanted, use_reentrant=False)
        return total / labels.numel()

    return trained(device, model, loss_of, low=True)


class Rotary(nn.Module):
    """Tables of positions, made again when a longer batch comes; and a mask made for each size of batch."""

    mask: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(4096, 256), nn.Linear(256, 768), nn.Linear(256, 4096)
        self.length, self.rows = 0, 0
        self.cos: Any = None
        self.sin: Any = None
        self.register_buffer("mask", None, persistent=False)

    def tables(self, length: int, device: torch.device) -> None:
        if length > self.length:
            angle = torch.outer(
                torch.arange(length, device=device).float(), 1e4 ** -torch.linspace(0, 1, 32, device=device)
            )
            self.length, self.cos, self.sin = length, angle.cos(), angle.sin()

    def turned(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, dim=-1)
        return torch.cat([one * self.cos - two * self.sin, one * self.sin + two * self.cos], dim=-1)

    def forward(self, ids: Tensor) -> Tensor:
        n, length = ids.shape
        self.tables(length, ids.device)
        if self.mask is None or self.mask.shape[0] != n:
            upper = torch.full((length, length), float("-inf"), device=ids.device).triu(1)
            self.mask = upper.expand(n, 4, length, length).contiguous()
        x = self.embed(ids)
        q, k, v = (one.view(n, length, 4, 64).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        scores = self.turned(q) @ self.turned(k).transpose(-1, -2) / 8.0 + self.mask
        out: Tensor = self.head(x + (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, length, 256))
        return out


@loop()
def cached_tables(device: str) -> batchfit.Workload:
    model = Rotary().to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        return next_token_loss(model(ids), ids)

    return trained(device, model, loss_of)


class Translator(nn.Module):
    """A GRU that reads and one that writes, fed with the truth or with its own words by a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 256), nn.Linear(256, 4096)
        self.read, self.write = nn.GRU(256, 256, batch_first=True), nn.GRU(256, 256, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.read(self.embed(source))
        word, made = target[:, :1], []
        for at in range(1, target.shape[1]):
            out, state = self.write(self.embed(word), state)
            made.append(self.head(out))
            forced = random.random() < 0.5
            word = target[:, at : at + 1] if forced else made[-1].argmax(-1).detach()
        return torch.cat(made, dim=1)


@loop()
def teacher_forcing(device: str) -> batchfit.Workload:
    model = Translator().to(device)

    def loss_of(n: int) -> Tensor:
        source, target = tokens(n, device, 64), tokens(n, device, 24)
        return F.cross_entropy(model(source, target).flatten(0, 1), target[:, 1:].flatten())

    return trained(device, model, loss_of)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, 256)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True, dropout=0.2, bidirectional=True)
        self.head = nn.Linear(512, 4096)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        logits: Tensor = self.head(out)
        return logits


@loop()
def packed_lstm(device: str) -> batchfit.Workload:
    """Lengths stay on the CPU, where they are known."""
    model = Packed().to(device)

    def loss_of(n: int) -> Tensor:
        lengths = 16 + torch.arange(n) % 17
        lengths[0] = 32
        ids = tokens(n, device, 32)
        logits = model(ids, lengths)
        return F.cross_entropy(logits.flatten(0, 1), ids[:, : logits.shape[1]].flatten())

    return trained(device, model, loss_of)


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 256), nn.Linear(256, 4096)
        self.lstm = nn.LSTM(256, 512, 2, batch_first=True)
        self.down = nn.Linear(512, 256)

    def forward(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        out, state = self.lstm(self.embed(ids), state)
        return self.head(self.down(out)), state


@loop()
def truncated_backpropagation(device: str) -> batchfit.Workload:
    """The hidden state goes on from step to step, detached, in a variable of the loop."""
    model = Memory().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state: Any = None

    def step(n: int) -> None:
        nonlocal state
        ids = tokens(n, device, 64)
        if state is not None and state[0].shape[1] != n:
            state = None
        if state is not None:
            state = tuple(one.detach() for one in state)
        logits, state = model(ids, state)
        loss = next_token_loss(logits, ids)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    return batchfit.Workload(step, state=[model, optimizer])


class Lines(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.full((128,), index % 4096)
        return {"input_ids": ids, "weight": 1.0, "name": f"line {index}"}


@loop()
def collated(device: str) -> batchfit.Workload:
    """Dicts from a DataLoader, the keys that are tensors moved one by one."""
    model = Language().to(device)

    def loss_of(n: int) -> Tensor:
        batch = next(iter(DataLoader(Lines(), batch_size=n, shuffle=False)))
        batch = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in batch.items()}
        losses = F.cross_entropy(
            model(batch["input_ids"]).transpose(1, 2), batch["input_ids"], reduction="none"
        ).mean(1)
        return (losses * batch["weight"]).mean()

    return trained(device, model, loss_of)


class Experts(nn.Module):
    """Top-2 of 8 experts, all of which see all tokens, weighted by a dense table."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.route = nn.Linear(width, 8, bias=False)
        self.up = nn.Parameter(torch.randn(8, width, 256) * 0.02)
        self.down = nn.Parameter(torch.randn(8, 256, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.route(flat).softmax(-1).topk(2, dim=-1)
        table = torch.zeros(len(flat), 8, device=x.device, dtype=weights.dtype).scatter(1, chosen, weights)
        inner = torch.einsum("tw,ewh->eth", flat, self.up).relu()
        out = torch.einsum("eth,ehw,te->tw", inner, self.down, table)
        return out.view_as(x)


@loop()
def dense_experts(device: str) -> batchfit.Workload:
    model = nn.Sequential(nn.Embedding(4096, 128), Experts(), Experts(), nn.Linear(128, 4096)).to(device)

    def loss_of(n: int) -> Tensor:
        ids = tokens(n, device)
        return next_token_loss(model(ids), ids)

    return trained(device, model, loss_of)


@loop()
def sampled_by_hand(device: str) -> batchfit.Workload:
    """A generation loop of one's own: logits of the last token, top-k, multinomial, cat."""
    model = Language().to(device).eval()

    @torch.no_grad()
    def step(n: int) -> None:
        ids = tokens(n, device, 64)
        for _ in range(8):
            logits = model(ids)[:, -1] / 0.8
            values, _ = logits.topk(50)
            logits[logits < values[:, [-1]]] = -float("inf")
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)

    return batchfit.Workload(step, state=[model])


@loop()
def speech(device: str) -> batchfit.Workload:
    """CTC over a spectrogram; lengths on the CPU."""
    front = nn.Sequential(nn.Conv1d(80, 256, 3, 2, 1), nn.GELU(), nn.Conv1d(256, 256, 3, 1, 1), nn.GELU())
    model = nn.ModuleDict({"front": front, "body": Block(causal=False), "head": nn.Linear(256, 64)}).to(
        device
    )

    def loss_of(n: int) -> Tensor:
        sound = torch.randn(n, 80, 400).to(device)
        labels = torch.randint(1, 64, (n, 30)).to(device)
        made = model["head"](model["body"](model["front"](sound).transpose(1, 2)))
        log_probability = made.log_softmax(-1).transpose(0, 1)
        long = torch.full((n,), 200, dtype=torch.long)
        return F.ctc_loss(log_probability, labels, long, torch.full((n,), 30), blank=0, zero_infinity=True)

    return trained(device, model, loss_of)


@loop()
def frozen_encoder(device: str) -> batchfit.Workload:
    """A large frozen encoder that nobody declares, under a small head that learns."""
    encoder = nn.Sequential(nn.Embedding(65_536, 512), nn.Linear(512, 512)).to(device).eval()
    encoder.requires_grad_(False)
    head = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 1)).to(device)
    optimizer = torch.optim.AdamW(head.parameters())

    def step(n: int) -> None:
        ids = tokens(n, device, vocabulary=65_536)
        with torch.no_grad():
            features = encoder(ids)
        score = head(features).mean((1, 2))
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(score, torch.ones_like(score)).backward()
        optimizer.step()

    return batchfit.Workload(step, state=[head, optimizer])
