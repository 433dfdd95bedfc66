"""The smallest real models, data and Trainers, for tests of batchfit.integrations.transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch.utils.data import Dataset

VOCABULARY, WIDTH = 64, 12
VERSION = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:3]))
# A plain Trainer of transformers 5.2.0 to 5.5.3 lets Accelerate divide an accumulated loss a second time.
DIVIDES_TWICE = (5, 2) <= VERSION < (5, 5, 4)

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def gpt2(*, dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=16,
        n_head=2,
        vocab_size=VOCABULARY,
        n_positions=2 * WIDTH,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config).double()


def bert() -> Any:
    """Takes `**kwargs`, and its loss is a mean that does not look at `num_items_in_batch`."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=VOCABULARY,
        max_position_embeddings=WIDTH,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForTokenClassification(config).double()


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


class Tokens(Dataset[Any]):
    """Sentences of 3 to WIDTH tokens; labels beyond a sentence's end do not count."""

    def __init__(self, length: int = 48, *, classes: int = VOCABULARY, padded: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(2, VOCABULARY, (length, WIDTH), generator=generator)
        self.lengths = torch.randint(3, WIDTH + 1, (length,), generator=generator).tolist()
        self._classes = classes
        self._padded = padded

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        count = self.lengths[index]
        labels = self.ids[index] % self._classes
        if not self._padded:
            return {"input_ids": self.ids[index, :count], "labels": labels[:count]}
        labels = labels.masked_fill(torch.arange(WIDTH) >= count, -100)
        return {"input_ids": self.ids[index], "labels": labels}


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As wide as the longest: what a data collator does."""
    pad = torch.nn.utils.rnn.pad_sequence
    masks = [torch.ones_like(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": pad([sample["input_ids"] for sample in samples], batch_first=True),
        "attention_mask": pad(masks, batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
    }


def arguments(folder: Path, *, seq2seq: bool = False, **more: Any) -> Any:
    kind = transformers.Seq2SeqTrainingArguments if seq2seq else transformers.TrainingArguments
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    return kind(**{**given, **more})


@contextmanager
def dividing_once() -> Iterator[None]:
    """Give new plain Trainers what transformers 5.5.4 repaired, where `DIVIDES_TWICE`."""
    create = transformers.Trainer.create_accelerator_and_postprocess

    def repaired(trainer: Any) -> None:
        create(trainer)
        if DIVIDES_TWICE:
            trainer.accelerator.gradient_accumulation_steps = 1

    with mock.patch.object(transformers.Trainer, "create_accelerator_and_postprocess", repaired):
        yield


def run_of(trainer: Any) -> Any:
    """What batchfit keeps on a Trainer that was adapted."""
    return trainer._batchfit


def parameters_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradients_of(trainer: Any, *, steps: int = 1) -> torch.Tensor:
    """Train; the gradients with which the optimizer was called, of all parameters, step after step."""
    found: list[torch.Tensor] = []

    class Noting(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            found.extend(
                one.grad.detach().flatten().clone()
                for one in more["model"].parameters()
                if one.grad is not None
            )

    trainer.add_callback(Noting())
    trainer.train()
    assert found
    return torch.cat(found)
