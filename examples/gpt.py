"""How large a batch can a small GPT train with? Plain PyTorch, nothing else.

    python examples/gpt.py
    batchfit find examples/gpt.py:workload

On a GPU: the largest batch that fits on it. On a CPU: the largest that fits in 96 MiB of virtual
memory, which runs out as a GPU's would.
"""

import math

import torch
from torch import nn

import batchfit

VOCABULARY, CONTEXT = 512, 64  # tokens there are, tokens in a sample
WIDTH, HEADS, LAYERS = 128, 4, 5
DROPOUT = 0.1


class Block(nn.Module):
    """Attention, then a feed-forward network, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.norm_forward = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        heads = self.qkv(self.norm_attention(x)).view(samples, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        rate = DROPOUT if self.training else 0.0
        attended = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        attended = attended.transpose(1, 2).reshape(samples, tokens, WIDTH)
        x = x + self.dropout(self.joined(attended))
        return x + self.dropout(self.narrow(nn.functional.gelu(self.wide(self.norm_forward(x)))))


class GPT(nn.Module):
    """A decoder-only transformer: token ids in, the next token's logits out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 / math.sqrt(2 * LAYERS) if "joined" in name or "narrow" in name else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


def make_batch(size: int) -> torch.Tensor:
    """`size` samples of one token more than the context: inputs and targets are shifted views of it."""
    return torch.randint(0, VOCABULARY, (size, CONTEXT + 1))


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def workload() -> batchfit.Workload:
    """What one training step is; also the target of `batchfit find examples/gpt.py:workload`."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    autocast = torch.bfloat16 if device == "cuda" else None
    return batchfit.training(model, optimizer, loss_fn, make_batch, autocast=autocast, clip_norm=1.0)


if __name__ == "__main__":
    budget = None if torch.cuda.is_available() else "96MiB"
    fit = batchfit.find_batch_size(workload(), budget=budget)
    print(fit)
