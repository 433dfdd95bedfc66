"""What real ranks run in the tests of batchfit.integrations.transformers, all of it in one launch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from hf_models import Tokens, arguments, bert, gpt2, parameters_of
from transformers import Trainer

import batchfit
from batchfit.integrations.transformers import BatchfitTrainer, Options, adapt

MODELS = {"gpt2": gpt2, "bert": bert}


def data_of(name: str, length: int = 48) -> Tokens:
    return Tokens(length, classes=4 if name == "bert" else 64)


class Faulty(BatchfitTrainer):
    """Runs out of memory on one rank, in the second step and in the first batch of an evaluation."""

    failing = False
    fired = 0

    def training_step(self, *given: Any, **named: Any) -> Any:
        with batchfit.testing.fail_at(60 if self.failing and self.state.global_step == 1 else 10**9) as seen:
            loss = super().training_step(*given, **named)
        self.fired += seen.fired
        return loss

    def prediction_step(self, *given: Any, **named: Any) -> Any:
        with batchfit.testing.fail_at(60 if self.failing and self.fired < 2 else 10**9) as seen:
            found = super().prediction_step(*given, **named)
        self.fired += seen.fired
        return found


def join_ranks(rank: int, world_size: int) -> None:
    """As torchrun would have told them."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in told.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # the group is there already
    # transformers 4.57 loads checkpoints to "cpu:0", which torch 2.13 refuses in a plain Trainer too.
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, location: storage if location == "cpu:0" else None
    )


def train_all(rank: int) -> dict[str, Any]:
    join_ranks(rank, 2)
    return {name: train_with_faults(rank, name) for name in MODELS}


def find_and_follow(rank: int, folder: str) -> dict[str, Any]:
    join_ranks(rank, 2)
    return {"find": find_with_less_on_one_rank(rank), "schedule": follow_a_schedule(Path(folder))}


def train_with_faults(rank: int, name: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo", "per_device_eval_batch_size": 5}
        trainer = Faulty(
            MODELS[name](),
            arguments(Path(folder), **given),
            train_dataset=data_of(name),
            eval_dataset=data_of(name, 20),
            batchfit=Options(find=False),
        )
        trainer.failing = rank == 1
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        return [parameters_of(trainer.model).tolist(), trainer.fired, trainer.state.global_step, loss]


def find_with_less_on_one_rank(rank: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given = {"gradient_accumulation_steps": 8, "ddp_backend": "gloo", "per_device_train_batch_size": 2}
        model = gpt2()
        trainer = Trainer(model, arguments(Path(folder), **given, max_steps=2), train_dataset=Tokens(64))
        live = sum(parameter.nbytes for parameter in model.parameters())
        adapt(trainer, budget=2**30 if rank == 0 else 12 * live + 150_000)
        trainer.train()
        return [trainer.found.batch_size, trainer.state.global_step]


def follow_a_schedule(folder: Path) -> Any:
    given = {"ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 4}
    answers = []
    for resume in (None, str(folder / "checkpoint-4")):
        trainer = Trainer(gpt2(), arguments(folder, **given), train_dataset=Tokens())
        adapt(trainer, schedule="0:8 3:16 step", lr="sqrt", find=False)
        trainer.train(resume_from_checkpoint=resume)
        answers.append(parameters_of(trainer.model).tolist())
        torch.distributed.barrier()
    return answers
