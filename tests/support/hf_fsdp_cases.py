"""What real ranks run in the tests of `adapt` under FSDP2, all of it in one launch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate_state import join_ranks, reset_accelerate, sharding_on_cpu
from hf_cases import data_of
from hf_models import Tokens, arguments, bert, gpt2, parameters_of, run_of
from transformers import Trainer

from batchfit.integrations.transformers import BatchfitTrainer, Options, adapt
from batchfit.testing import fail_at, simulated_oom

MODELS = {"gpt2": gpt2, "bert": bert}
LAYERS = {"gpt2": "GPT2Block", "bert": "BertLayer"}


def full(model: torch.nn.Module) -> list[float]:
    """All parameters, gathered."""
    parts: list[Any] = list(model.parameters())
    return torch.cat([one.full_tensor().detach().flatten() for one in parts]).tolist()


def sharded(name: str = "gpt2", **more: Any) -> dict[str, Any]:
    config = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": LAYERS[name]}
    return {"fsdp": True, "fsdp_config": config, "ddp_backend": "gloo", **more}


def everything(rank: int, folder: str) -> dict[str, Any]:
    join_ranks(rank, dist.get_world_size())
    found: dict[str, Any] = {}
    with sharding_on_cpu():
        for name, case in CASES.items():
            reset_accelerate()
            found[name] = case(rank, Path(folder) / name)
    return found


class Faulty(BatchfitTrainer):
    """Out of memory on some ranks: in the second step, and in the first batch of an evaluation."""

    failing = False

    def training_step(self, *given: Any, **named: Any) -> Any:
        with fail_at(60 if self.failing and self.state.global_step == 1 else 10**9) as seen:
            loss = super().training_step(*given, **named)
        FIRED.extend(["train"] * seen.fired)
        return loss

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        if self.failing and not model.training and len(inputs["input_ids"]) == 5 and "evaluate" not in FIRED:
            FIRED.append("evaluate")
            raise simulated_oom()
        return super().compute_loss(model, inputs, **named)


FIRED: list[str] = []  # not of the trainer, where a retry undoes what was counted


def train_with_faults(rank: int, name: str, folder: Path) -> Any:
    """Batches of 16 over all ranks."""
    ranks = dist.get_world_size()
    given = sharded(name, gradient_accumulation_steps=4 // ranks, per_device_eval_batch_size=5)
    trainer = Faulty(
        MODELS[name](),
        arguments(folder, **given),
        train_dataset=data_of(name),
        eval_dataset=data_of(name, 20),
        batchfit=Options(find=False),
    )
    trainer.failing = rank % 2 == 1
    FIRED.clear()
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    return [full(trainer.model), list(FIRED), trainer.state.global_step, loss]


def forced_split(rank: int, folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    """Microbatches of 3, of ragged batches of 8, with clipping; and the plain Trainer."""
    found = []
    for size in (None, 3):
        given = sharded(gradient_accumulation_steps=1, per_device_train_batch_size=8, max_grad_norm=0.1)
        trainer: Any = Trainer(gpt2().to(dtype), arguments(folder, **given), train_dataset=Tokens(64))
        if size is not None:
            adapt(trainer, find=False)
            run_of(trainer).microbatch_size = size
        trainer.train()
        found.append([full(trainer.model), trainer.state.global_step])
        reset_accelerate()
    return found


def find_with_less_on_one_rank(rank: int, folder: Path) -> Any:
    given = sharded(gradient_accumulation_steps=8, per_device_train_batch_size=2, max_steps=2)
    model = gpt2()
    live = sum(parameter.nbytes for parameter in model.parameters())
    trainer: Any = Trainer(model, arguments(folder, **given), train_dataset=Tokens(64))
    adapt(trainer, budget=2**30 if rank == 0 else 12 * live + 150_000)
    trainer.train()
    return [trainer.found.batch_size, trainer.state.global_step]


def follow_a_schedule(rank: int, folder: Path) -> Any:
    """From the beginning, and from the checkpoint of its fourth step; then what it saves is loaded."""
    answers = []
    for resume in (None, str(folder / "checkpoint-4")):
        given = sharded(
            save_strategy="steps", save_steps=4, per_device_train_batch_size=8 // dist.get_world_size()
        )
        trainer: Any = Trainer(
            gpt2(), arguments(folder, **given, gradient_accumulation_steps=2), train_dataset=Tokens()
        )
        adapt(trainer, schedule="0:8 3:16 step", lr="sqrt", find=False)
        trainer.train(resume_from_checkpoint=resume)
        answers.append(full(trainer.model))
        dist.barrier()
        if resume is None:
            reset_accelerate()
    trainer.save_model(str(folder / "final"))
    dist.barrier()
    answers.append(parameters_of(type(gpt2()).from_pretrained(folder / "final")).tolist())
    return answers


class FailsWhenProbed(BatchfitTrainer):
    """Its loss of two samples, which batchfit asks for first, cannot be computed on one rank."""

    def compute_loss(self, model: Any, inputs: Any, **named: Any) -> Any:
        if dist.get_rank() == 1 and not model.training:
            raise ValueError("no loss in eval mode")
        return super().compute_loss(model, inputs, **named)


def fail_in_the_probe(rank: int, folder: str) -> None:
    join_ranks(rank, dist.get_world_size())
    with sharding_on_cpu():
        FailsWhenProbed(
            gpt2(),
            arguments(Path(folder), **sharded()),
            train_dataset=Tokens(),
            batchfit=Options(find=False),
        ).train()


CASES: dict[str, Callable[[int, Path], Any]] = {
    "gpt2": lambda rank, folder: train_with_faults(rank, "gpt2", folder),
    "bert": lambda rank, folder: train_with_faults(rank, "bert", folder),
    "split": forced_split,
    "single": lambda rank, folder: forced_split(rank, folder, torch.float32),
    "find": find_with_less_on_one_rank,
    "schedule": follow_a_schedule,
}
