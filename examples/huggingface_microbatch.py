"""A Hugging Face model on padded batches, in microbatches weighted by their tokens.

    python examples/huggingface_microbatch.py

The loss of a causal model is a mean over the labels that count: not -100, and not the first of a sample,
which nothing predicts. So that is what `weight` counts; the gradients are then those of the full batch. The
model is a small GPT-2 with random weights: nothing is downloaded.

It needs transformers: pip install "batchfit[transformers]".
"""

import contextlib
from typing import Any

import torch

import batchfit

BATCH, LONGEST, VOCABULARY = 64, 48, 512
Batch = dict[str, torch.Tensor]


def make_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=LONGEST, **tokens))
    model.loss_type = "ForCausalLM"  # what GPT-2 uses anyway; unsaid, transformers logs that it had to guess
    return model


def make_batch() -> Batch:
    """What a tokenizer and a collator make of texts of different lengths."""
    lengths = torch.randint(4, LONGEST + 1, (BATCH,))
    first = torch.randint(1, VOCABULARY, (BATCH, 1))
    ids = (first + torch.arange(LONGEST)) % VOCABULARY  # counting: easy to learn
    mask = (torch.arange(LONGEST) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def targets(micro: Batch) -> torch.Tensor:
    """How many labels the loss of a microbatch is a mean of."""
    return (micro["labels"][:, 1:] != -100).sum()


def train(steps: int, limit_bytes: int = 48 << 20) -> list[batchfit.StepReport]:
    """Train with bf16 autocast on a GPU: the reports of all steps."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    reports = []
    mb = batchfit.Microbatcher(model, weight=targets)
    with contextlib.nullcontext() if device == "cuda" else batchfit.virtual_memory(limit_bytes):
        for _ in range(steps):
            batch = make_batch()
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                report = mb.backward(lambda micro: model(**micro, use_cache=False).loss, batch)
            mb.step(optimizer, clip_norm=1.0)
            reports.append(report)
    return reports


if __name__ == "__main__":
    reports = train(steps=20)
    for step in (0, 1, 2, 19):
        report = reports[step]
        print(f"step {step}: loss {report.loss:.3f} in microbatches of {report.microbatch_sizes}")
