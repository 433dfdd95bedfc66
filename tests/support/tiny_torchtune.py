"""Components for the smallest real torchtune recipes: a tokenizer, data and functions, named in configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

MODEL = {
    "vocab_size": 64,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 64,
}


class TinyTokenizer:
    """What the recipes want of a tokenizer."""

    pad_id = 0


class TinyData(Dataset[Any]):
    """Token lists of different lengths, the same in every process."""

    def __init__(self, tokenizer: Any, count: int = 48) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.rows = [
            torch.randint(1, 64, (8 + 3 * (row % 5),), generator=drawn).tolist() for row in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        tokens = self.rows[index]
        # Prompts of different lengths, some of none: then the first token has a label, and no target.
        masked = 4 * (index % 3)
        return {"tokens": list(tokens), "labels": [-100] * masked + tokens[masked:]}


def two_more_each_epoch(epoch: int, current_batch_size: int) -> int:
    return 2 if epoch else 0


def far_too_much(epoch: int, current_batch_size: int) -> int:
    return 10_000 if epoch == 1 else 0


not_a_function = 3


def write_checkpoint(folder: Path) -> None:
    """A model of random weights, as torchtune keeps it."""
    from torchtune.models.llama2 import llama2

    state = torch.get_rng_state()
    torch.manual_seed(7)
    (folder / "base").mkdir(exist_ok=True)
    torch.save(llama2(**MODEL).state_dict(), folder / "base" / "model.pt")
    torch.set_rng_state(state)


def tiny_config(folder: Path, recipe: str, **changes: Any) -> dict[str, Any]:
    """The config of a recipe, on the CPU."""
    model: dict[str, Any] = {"_component_": "torchtune.models.llama2.llama2", **MODEL}
    if recipe == "lora":
        model = {
            "_component_": "torchtune.models.llama2.lora_llama2",
            **MODEL,
            "lora_attn_modules": ["q_proj", "v_proj"],
            "apply_lora_to_mlp": False,
            "lora_rank": 4,
            "lora_alpha": 8,
        }
    return {
        "recipe": recipe,
        "output_dir": str(folder / "out"),
        "tokenizer": {"_component_": "tiny_torchtune.TinyTokenizer"},
        "dataset": {"_component_": "tiny_torchtune.TinyData"},
        "seed": 3,
        "shuffle": True,
        "model": model,
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(folder / "base"),
            "checkpoint_files": ["model.pt"],
            "model_type": "LLAMA2",
            "output_dir": str(folder / "out"),
        },
        "resume_from_checkpoint": False,
        "batch_size": 2,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01, "foreach": False},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "optimizer_in_bwd": False,
        "loss": {"_component_": "torch.nn.CrossEntropyLoss"},
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": None,
        "compile": False,
        "device": "cpu",
        "dtype": "fp32",
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder / "logs"),
        },
        **changes,
    }
