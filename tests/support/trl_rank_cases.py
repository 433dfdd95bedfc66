"""TRL's trainers on gloo ranks: what each rank reports. The functions run in processes of their own."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hf_cases import join_ranks
from hf_models import parameters_of
from trl_cases import heads_in_float64, model_for, trainer_of

from batchfit.integrations.transformers import adapt

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT packed": ("SFT", {"packing": True, "max_length": 24}),
    "DPO": ("DPO", {}),
    "KTO": ("KTO", {}),
}


def everything(rank: int) -> dict[str, Any]:
    """A plain trainer; then rank 0 runs a batch whole, and rank 1 in microbatches of one sample."""
    join_ranks(rank, 2)
    found = {}
    for name, (kind, given) in CASES.items():
        plain, adapted = (trained(kind, given, size) for size in (None, 1 if rank else 1000))
        found[name] = {"plain": plain, "adapted": adapted}
    return found


def trained(kind: str, given: dict[str, Any], size: int | None) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        more = {"ref_model": model_for(kind, seed=1).double()} if kind in ("DPO", "KTO") else {}
        trainer = trainer_of(
            kind,
            Path(folder),
            model=model_for(kind).double(),
            more=more,
            batch=4,
            count=48,
            steps=2,
            ddp_backend="gloo",
            **given,
        )
        if size is not None:
            adapt(trainer, find=False)._batchfit.microbatch_size = size
        with heads_in_float64():
            trainer.train()
        torch.distributed.barrier()
        logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return parameters_of(trainer.model).tolist(), logged
