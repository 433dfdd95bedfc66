"""The step of a trainer of TRL as `adapt` searches with it, and the trainer's own on the same batches.

GRPO's and RLOO's is that of their loss phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import batchfit

SIZE = 8
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": 512,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFT", {}),
    "SFT packed": ("SFT", {"packing": True, "max_length": 64}),
    "SFT chunked_nll": ("SFT", {"loss_type": "chunked_nll"}),
    "DPO": ("DPO", {}),
    "KTO": ("KTO", {}),
    "Reward": ("Reward", {}),
    "ORPO": ("ORPO", {}),
}
GENERATING: dict[str, dict[str, Any]] = {
    "GRPO loss": {"kind": "GRPO"},
    "GRPO loss, entropy": {"kind": "GRPO", "entropy_coef": 0.05, "loss_type": "bnpo"},
    "RLOO loss": {"kind": "RLOO"},
}


class Taken(Exception):
    """No error: it ends the training once the search has begun."""


def trainer_for(name: str, folder: Path, *, batch: int = SIZE) -> Any:
    from trl_cases import model_for, trainer_of

    kind, given = CASES[name]
    more = {"ref_model": model_for(kind, seed=1, **SHAPE)} if kind in ("DPO", "KTO") else {}
    return trainer_of(
        kind, folder, model=model_for(kind, **SHAPE), more=more, optim="adamw_torch", batch=batch, **given
    )


def searched(name: str, folder: Path, kept: list[Any], *, batch: int = SIZE) -> Any:
    """The workload that `adapt` searches with, up to `batch` samples; the trainer goes into `kept`."""
    from batchfit.integrations.transformers import adapt

    trainer = adapt(trainer_for(name, folder, batch=batch))
    (found,) = searches_of(trainer, most=1)
    trainer._batchfit.searches = True
    kept.append(trainer)
    return found


def policy_trainer(name: str, folder: Path) -> Any:
    import trl_models as tiny

    folder.mkdir(exist_ok=True)
    model = tiny.llama(width=64, layers=3, dtype=torch.float32)
    prompts = tiny.prompts(64)
    return tiny.trainer(
        folder, **GENERATING[name], model=model, data=prompts, per_device_train_batch_size=SIZE
    )


def searched_loss(name: str, folder: Path, kept: list[Any]) -> Any:
    """The workload of the loss phase that `adapt` searches with."""
    from batchfit.integrations.transformers import adapt

    trainer = adapt(policy_trainer(name, folder))
    _, found = searches_of(trainer, most=2)
    trainer._batchfit.searches = True
    kept.append(trainer)
    return found


def plain_loss(name: str, folder: Path, kept: list[Any]) -> Any:
    """The plain trainer's own step of a batch that was generated before, while gradients are accumulated."""
    from batchfit.integrations.transformers.rl.peaks import longest_batch, longest_prompt

    trainer = policy_trainer(name, folder)
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    optimizer, prompt = trainer.create_optimizer(), longest_prompt(trainer)
    trainer.model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)  # as `train` does

    def step(size: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        for parameter in trainer.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        # The second batch of a generation, which is not generated again.
        trainer._step, trainer._buffered_inputs = 1, [None, longest_batch(trainer, prompt, size)]
        trainer.training_step(trainer.model, [{}], None)
        trainer._buffered_inputs = None
        optimizer.step()

    kept.append(trainer)
    return batchfit.Workload(step, state=[trainer.model, optimizer])


def searches_of(trainer: Any, *, most: int) -> list[Any]:
    """The workloads of the first searches of a training, which ends there."""
    found: list[Any] = []

    def take(work: Any, **_: Any) -> Any:
        found.append(work)
        if len(found) == most:
            raise Taken
        return mock.MagicMock(elapsed_s=0.0, batch_size=1)

    try:
        with mock.patch.object(batchfit, "find_batch_size", take):
            trainer.train()
    except Taken:
        return found
    raise AssertionError(f"{len(found)} searches instead of {most}")


def plain(name: str, folder: Path, kept: list[Any]) -> Any:
    """The trainer's own step, with its metrics, on the same batches."""
    from batchfit.integrations.transformers import adapt
    from batchfit.integrations.trl.search import search_batches

    other = adapt(trainer_for(name, folder))  # it notes the longest sequence
    trainer = trainer_for(name, folder)
    trainer.current_gradient_accumulation_steps = 1
    optimizer = trainer.create_optimizer()
    batches = search_batches(other, trainer.get_train_dataloader().dataset, trainer.data_collator, SIZE)

    def step(size: int) -> None:
        # All microbatches but the first run while gradients are allocated.
        optimizer.zero_grad(set_to_none=size >= batches.largest)
        inputs = batches.restored(batches.source(size))
        if "label" in inputs:  # a search has true ones only
            inputs["label"] = torch.arange(size) % 3 > 0
        count = (inputs["labels"] != -100).sum() if "labels" in inputs else None
        trainer.training_step(trainer.model, inputs, count)
        optimizer.step()

    kept.append(trainer)
    return batchfit.Workload(step, state=[trainer.model, optimizer])
