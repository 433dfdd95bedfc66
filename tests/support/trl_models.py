"""The smallest policies, prompts and rewards for TRL's trainers that generate; nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY = 64
PAD, END = 0, 1
LENGTH = 8  # new tokens of a completion

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def tokenizer() -> Any:
    """One token per word: "t7" is 7."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": PAD, "<end>": END, **{f"t{number}": number for number in range(2, VOCABULARY)}}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )


def llama(*, width: int = 32, layers: int = 2, dropout: float = 0.0, dtype: Any = torch.float64) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        attention_dropout=dropout,
        pad_token_id=PAD,
        bos_token_id=END,
        eos_token_id=END,
    )
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():  # completions end at different lengths
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    return model


def experts() -> Any:
    """A mixture of experts, with a load-balancing loss."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.02,
        pad_token_id=PAD,
        bos_token_id=END,
        eos_token_id=END,
    )
    return transformers.MixtralForCausalLM(config)


def reward_model() -> Any:
    """Scores texts by random weights."""
    torch.manual_seed(1)
    config = llama().config
    config.num_labels = 1
    return transformers.LlamaForSequenceClassification(config).double()


def prompts(count: int = 12, *, longest: int = 12) -> Any:
    from datasets import Dataset

    draw = random.Random(1)
    texts = [
        " ".join(f"t{draw.randrange(2, VOCABULARY)}" for _ in range(draw.randint(2, longest)))
        for _ in range(count)
    ]
    return Dataset.from_dict({"prompt": texts})


def many_small_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [sum(1.0 for one in ids if one < VOCABULARY // 2) - 0.1 * len(ids) for ids in completion_ids]


def in_double(kind: type) -> type:
    """A trainer whose log-probabilities are in double precision: TRL's fused head rounds them to single."""

    def log_probabilities(
        self: Any, model: Any, ids: Any, mask: Any, keep: int, batch_size: Any = None, **more: Any
    ) -> Any:
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -keep - 1 : -1] / self.temperature
        all_of = logits.log_softmax(-1)
        chosen = all_of.gather(-1, ids[:, -keep:, None]).squeeze(-1)
        return chosen, -(all_of.exp() * all_of).sum(-1) if more.get("compute_entropy") else None, None

    return type(kind.__name__, (kind,), {"_get_per_token_logps_and_entropies": log_probabilities})


def trainer(
    folder: Path,
    kind: str = "GRPO",
    *,
    model: Any = None,
    data: Any = None,
    precise: bool = False,
    made: Any = None,
    **given: Any,
) -> Any:
    import trl

    made = made or getattr(trl, f"{kind}Trainer")
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": 4,
        "max_completion_length": LENGTH,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        **given,
    }
    model = llama() if model is None else model
    if arguments.get("beta", 0.05 if kind == "RLOO" else 0.0):  # the reference model is loaded from there
        model.save_pretrained(folder / "model")
        model.config._name_or_path = str(folder / "model")
        if torch.distributed.is_initialized():  # one rank saves it
            torch.distributed.barrier()
    names = ("eval_dataset", "reward_funcs", "reward_processing_classes", "peft_config")
    extra = {name: arguments.pop(name) for name in names if name in arguments}
    return (in_double(made) if precise else made)(
        model=model,
        args=getattr(trl, f"{kind}Config")(**arguments),
        reward_funcs=extra.pop("reward_funcs", many_small_tokens),
        train_dataset=prompts() if data is None else data,
        processing_class=tokenizer(),
        **extra,
    )
