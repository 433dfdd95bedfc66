"""How large a batch can a Hugging Face model train, and generate, with?

    python examples/huggingface.py
    batchfit find examples/huggingface.py:workload
    batchfit find examples/huggingface.py:generating

The model is a small GPT-2 from a configuration, with random weights: nothing is downloaded. Put
`AutoModelForCausalLM.from_pretrained(...)` and your tokenizer in its place.

It needs transformers: pip install "batchfit[transformers]".
"""

from typing import Any

import torch

import batchfit

PROMPT, NEW_TOKENS = 32, 16


def make_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = {"vocab_size": 2048, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_head=4, n_embd=128, n_positions=64, **tokens))
    model.loss_type = "ForCausalLM"  # what GPT-2 uses anyway; unsaid, transformers logs that it had to guess
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def example_batch() -> dict[str, torch.Tensor]:
    """One batch as a tokenizer makes it; batchfit repeats it to any size. Use the longest you have."""
    ids = torch.randint(1, 2048, (4, PROMPT))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loss_fn(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch, labels=batch["input_ids"], use_cache=False).loss


def workload() -> batchfit.Workload:
    """One training step."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    autocast = torch.bfloat16 if torch.cuda.is_available() else None
    return batchfit.training(model, optimizer, loss_fn, example_batch(), autocast=autocast)


def generating() -> batchfit.Workload:
    """One call of `generate`, every sample to its full length: the cache has to fit as well."""
    return batchfit.generation(make_model(), example_batch(), max_new_tokens=NEW_TOKENS, pad_token_id=0)


if __name__ == "__main__":
    budget = None if torch.cuda.is_available() else "64MiB"
    print("training")
    print(batchfit.find_batch_size(workload(), budget=budget))
    print("generation")
    print(batchfit.find_batch_size(generating(), budget=budget, max_size=64, soak_steps=3))
