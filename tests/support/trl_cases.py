"""The trainers of TRL with a tiny Llama, a word tokenizer and made-up data: nothing is downloaded.

Rules: in float64 TRL's fused LM head is replaced by log_softmax, since the head computes in float32.
"""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import tokenizers
import torch
import transformers
from hf_models import gradients_of as gradients_of

WORDS = 60

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
datasets.disable_progress_bars()
logging.getLogger("trl").setLevel(logging.ERROR)


def tokenizer() -> Any:
    names = ["[PAD]", "[UNK]", "[EOS]", *(f"w{index}" for index in range(WORDS))]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
    )
    made.chat_template = (
        "{% for one in messages %}{% if one.role == 'assistant' %}{% generation %}{{ one.content }} [EOS] "
        "{% endgeneration %}{% else %}{{ one.content }} {% endif %}{% endfor %}"
    )
    return made


def llama(*, dropout: float = 0.0, kind: str = "LlamaForCausalLM", seed: int = 0, **more: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": WORDS + 4,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "attention_dropout": dropout,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **more,
        }
    )
    return getattr(transformers, kind)(config)


def model_for(kind: str, **given: Any) -> Any:
    """The model that a trainer wants."""
    return llama(
        **({"kind": "LlamaForSequenceClassification", "num_labels": 1} if kind == "Reward" else {}), **given
    )


def mixtral() -> Any:
    """A mixture of experts with a load-balancing loss."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=WORDS + 4,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        router_aux_loss_coef=0.02,
    )
    return transformers.MixtralForCausalLM(config)


def lora_config() -> Any:
    """LoRA whose adapter changes the model from the first step on."""
    import peft

    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )


def text(draw: random.Random, least: int, most: int) -> str:
    return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(least, most)))


def rows(kind: str, count: int, *, seed: int = 0, least: int = 2, most: int = 14) -> Any:
    """`count` samples of ragged lengths for a trainer."""
    draw = random.Random(seed)
    if kind == "SFT":
        found = [{"text": text(draw, least, most)} for _ in range(count)]
    elif kind == "completion":
        found = [
            {"prompt": text(draw, least, most), "completion": " " + text(draw, 1, most)} for _ in range(count)
        ]
    elif kind == "chat":
        roles = ("user", "assistant", "user", "assistant")
        found = [
            {"messages": [{"role": role, "content": text(draw, least, most // 2)} for role in roles]}
            for _ in range(count)
        ]
    elif kind == "KTO":
        found = [
            {
                "prompt": text(draw, least, most),
                "completion": " " + text(draw, 1, most),
                "label": number % 3 > 0,
            }
            for number in range(count)
        ]
    else:
        found = [
            {
                "prompt": text(draw, least, most),
                "chosen": " " + text(draw, 1, most),
                "rejected": " " + text(draw, 1, most),
            }
            for _ in range(count)
        ]
    return datasets.Dataset.from_list(found)


_HOMES = {"ORPO": "trl.experimental.orpo", "CPO": "trl.experimental.cpo"}


def trainer_of(
    kind: str,
    folder: Path,
    *,
    model: Any = None,
    data: Any = None,
    count: int = 21,
    batch: int = 7,
    accumulate: int = 1,
    steps: int = 1,
    more: dict[str, Any] | None = None,
    **given: Any,
) -> Any:
    """A trainer of TRL on the CPU: by default one step of one batch, plain SGD, no clipping."""
    if kind in ("DPO", "KTO") and "peft_config" not in (more or {}):
        more = {"ref_model": model_for(kind, seed=1), **(more or {})}
    home = importlib.import_module(_HOMES.get(kind, "trl"))
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": accumulate,
        "max_steps": steps,
        "learning_rate": 0.1,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        **({"max_length": None} if kind == "SFT" and "max_length" not in given else {}),
        **given,
    }
    return getattr(home, f"{kind}Trainer")(
        model=model_for(kind) if model is None else model,
        args=getattr(home, f"{kind}Config")(**arguments),
        train_dataset=rows(kind, count) if data is None else data,
        processing_class=tokenizer(),
        **(more or {}),
    )


@contextmanager
def heads_in_float64() -> Iterator[None]:
    """TRL's fused LM head as torch would write it, in the dtype of the model."""
    utils = importlib.import_module("trl.trainer.utils")

    class Head:
        @staticmethod
        def apply(hidden: Any, weight: Any, bias: Any, targets: Any, temperature: Any, *rest: Any) -> Any:
            logits = hidden @ weight.t()
            logits = logits if bias is None else logits + bias
            logits = logits / temperature
            log_probs = logits.log_softmax(-1)
            probs = log_probs.detach().exp()
            return (
                log_probs.gather(-1, targets[:, None]).squeeze(-1),
                -(probs * log_probs.detach()).sum(-1),
                probs.pow(2).sum(-1).log(),
                logits.detach().mean(-1),
                logits.argmax(-1) == targets,
            )

    with mock.patch.object(utils, "_ChunkedLogProbFunction", Head):
        yield
