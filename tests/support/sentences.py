"""A tiny sentence encoder, pairs of sentences, and a Trainer for them, made without a download."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import datasets
import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

WORDS = 60

transformers.logging.set_verbosity_error()
datasets.disable_progress_bars()
logging.getLogger("sentence_transformers").setLevel(logging.ERROR)


def encoder(folder: Path, *, dropout: float = 0.0, kind: Any = None) -> Any:
    """Two layers of 16, in float64; `folder` keeps what sentence-transformers can only load."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{f"w{index}": index + 2 for index in range(WORDS)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    transformers.BertModel(config).save_pretrained(folder / "encoder")
    fast.save_pretrained(folder / "encoder")
    words = Transformer(str(folder / "encoder"))
    model = sentence_transformers.SentenceTransformer(modules=[words, Pooling(16)], device="cpu")
    return model.double()


def sentences(count: int, *, seed: int) -> list[str]:
    """Of 3 to 9 words."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, 10, (), generator=generator))
        found.append(" ".join(f"w{int(n)}" for n in torch.randint(WORDS, (length,), generator=generator)))
    return found


def pairs(count: int = 24, *, columns: int = 2, labels: Any = None) -> Any:
    names = ["anchor", "positive", "negative", "other"][:columns]
    table: dict[str, Any] = {name: sentences(count, seed=at) for at, name in enumerate(names)}
    if labels is not None:
        table["label"] = [labels(index) for index in range(count)]
    return datasets.Dataset.from_dict(table)


def trainer_of(model: Any, loss: Any, data: Any, folder: Path, **more: Any) -> Any:
    given = {
        "per_device_train_batch_size": 12,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    evaluation = more.pop("eval_dataset", None)
    kind = more.pop("kind", sentence_transformers.SentenceTransformerTrainer)
    args = sentence_transformers.SentenceTransformerTrainingArguments(str(folder), **{**given, **more})
    return kind(model=model, args=args, train_dataset=data, eval_dataset=evaluation, loss=loss)
