"""What real ranks run in the tests of TRL's trainers that generate, all of it in one launch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl_models as tiny
from hf_cases import join_ranks

from batchfit.errors import BatchfitError
from batchfit.integrations.transformers import adapt

CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "bnpo": {"loss_type": "bnpo", "importance_sampling_level": "sequence", "steps_per_generation": 4},
    "RLOO": {"kind": "RLOO"},
}
GIVEN = {"per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 2, "ddp_backend": "gloo"}


def everything(rank: int, folder: str) -> dict[str, Any]:
    """All cases in one launch: importing transformers and TRL is what takes time."""
    join_ranks(rank, 2)
    here = Path(folder)
    return {
        **{name: [end_of(here, name, adapts=adapts, rank=rank) for adapts in (0, 1)] for name in CASES},
        "find": found_on(rank, here),
        "refused": refused(here),
    }


def end_of(folder: Path, name: str, *, adapts: int, rank: int) -> dict[str, Any]:
    """How a training ends; the adapted one is out of memory on rank 1, in both phases."""
    trainer = tiny.trainer(folder, **GIVEN, **CASES[name])
    seen: list[int] = []
    if adapts:
        adapt(trainer, find=False)
        if rank == 1:
            seen = refusing(trainer)
    trainer.train()
    steps = [one for one in trainer.state.log_history if "entropy" in one]
    return {
        "weights": torch.cat([one.detach().flatten() for one in trainer.model.parameters()]).tolist(),
        "logs": [{key: value for key, value in one.items() if "time" not in key} for one in steps],
        "sizes": sorted(set(seen)),
    }


def refusing(trainer: Any, *, rows_to_train: int = 2) -> list[int]:
    """Let forwards of so many rows with gradients, and of four without, be out of memory."""
    seen: list[int] = []

    def refuse(module: Any, args: Any, kwargs: Any) -> None:
        rows = len(kwargs["input_ids"] if "input_ids" in kwargs else args[0])
        if rows >= (rows_to_train if torch.is_grad_enabled() else 4):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        seen.append(rows)

    trainer.model.register_forward_pre_hook(refuse, with_kwargs=True)
    return seen


def found_on(rank: int, folder: Path) -> list[int]:
    """The sizes that a search finds, where rank 1 has less memory."""
    trainer = adapt(tiny.trainer(folder, **{**GIVEN, "max_steps": 1}))
    if rank == 1:
        refusing(trainer, rows_to_train=3)
    trainer.train()
    return [trainer.found.batch_size, trainer.found_generation.batch_size]


def refused(folder: Path) -> str:
    try:
        adapt(tiny.trainer(folder, **GIVEN, entropy_coef=0.1))
    except BatchfitError as error:
        return str(error)
    return ""
