"""The search before training: how many prompts generate at once, the largest microbatch of the loss phase.

Rules
- Both phases are run as the trainer runs them, at the longest prompt of its dataset and with
  `max_completion_length` new tokens: no later batch needs more. Each has a search of its own, since their
  peaks differ.
- What training holds meanwhile is held: the optimizer's state, gradients where they are accumulated across a
  generation, and, in the loss phase, gradients wherever a batch is cut.
- All of it is restored, and no size beyond the trainer's own batches is tried.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import batchfit
from batchfit.integrations.transformers.rl.checks import unguarded_generation
from batchfit.integrations.transformers.rl.generation import keeping_checkpointing
from batchfit.integrations.transformers.rl.loss_phase import HeldBatch, run_loss
from batchfit.integrations.transformers.rl.metrics import no_metrics
from batchfit.integrations.transformers.rl.phases import phases_of

log = logging.getLogger("batchfit")

_MOST_READ = 100_000  # prompts whose texts are compared
_MOST_TOKENIZED = 64  # of the longest texts


def find_peaks(
    trainer: Any, model: Any, optimizer: Any, *, generate: Callable[..., Any], compute: Callable[..., Any]
) -> None:
    """Search both phases; the results are kept in the trainer's `TrainerRun`."""
    run = trainer._batchfit
    prompt = longest_prompt(trainer)
    if prompt is None:
        log.info("no search before training: the longest prompt is not known; sizes are learned")
        return
    # Completions of the last generation are there while the next one is made, and while they are trained on.
    generated = trainer.args.per_device_train_batch_size * trainer.args.steps_per_generation
    buffered = longest_batch(trainer, prompt, generated)
    run.searches = True
    try:
        if unguarded_generation(trainer) is None:
            run.generation_fit = _find_generation(trainer, model, optimizer, prompt, generate)
        run.fit = _find_loss(trainer, model, optimizer, prompt, compute)
    finally:
        run.searches = False
        del buffered
    run.microbatch_size = run.fit.batch_size
    entry = {"microbatch_size": run.microbatch_size}
    elapsed_s = run.fit.elapsed_s
    if run.generation_fit is not None:
        run.generation_size = entry["generation_batch_size"] = run.generation_fit.batch_size
        elapsed_s += run.generation_fit.elapsed_s
    # On several ranks the size found holds for all batches: each rank would learn other sizes.
    run.is_ragged = trainer.args.world_size == 1
    if run.is_ragged:
        _learn_longest(trainer, model, longest_batch(trainer, prompt, run.microbatch_size), compute)
    run.logs.append({**entry, "find_s": round(elapsed_s, 3)})


def longest_prompt(trainer: Any) -> list[int] | None:
    """The tokens of the longest prompt; None where prompts come from a stream or an environment."""
    dataset = trainer.train_dataset
    names = getattr(dataset, "column_names", None) or ()
    if not hasattr(dataset, "__getitem__") or "prompt" not in names:
        return None
    if getattr(trainer, "environment_factories", None) is not None:
        return None
    step = -(-len(dataset) // _MOST_READ)
    prompts: Sequence[Any] = (dataset if step == 1 else dataset.select(range(0, len(dataset), step)))[
        "prompt"
    ]
    longest = sorted(prompts, key=lambda prompt: len(str(prompt)))[-_MOST_TOKENIZED:]
    found: list[list[int]] = trainer._tokenize_prompts(copy.deepcopy(longest))[0]
    return max(found, key=len)


def _keywords(trainer: Any, most: int) -> dict[str, Any]:
    options = trainer._batchfit.options
    return {"max_size": most, "soak_steps": 0, "budget": options.budget, **options.search}


def _find_generation(
    trainer: Any, model: Any, optimizer: Any, prompt: list[int], generate: Callable[..., Any]
) -> Any:
    """The most prompts that generate at once, each to its full length."""
    args = trainer.args
    generates_every = args.steps_per_generation * trainer.num_iterations
    is_between_steps = generates_every % args.gradient_accumulation_steps == 0
    takes = inspect.signature(generate).parameters
    more = (trainer.num_generations,) if "num_generations" in takes else ()
    trained = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]

    def step(count: int) -> None:
        model.train()
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # its state is there when the second batch is generated
        if is_between_steps:
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad(), keeping_checkpointing(trainer):
            generate([prompt] * count, None, {}, *more)

    state = [model, optimizer, trainer.lr_scheduler, *trainer._batchfit.options.state]
    most = args.per_device_train_batch_size * args.steps_per_generation
    with _full_length(trainer):
        # Two steps: the optimizer's state is there in the second. TRL reads the tokens that were generated,
        # which no trace can know.
        keywords = {"steps": 2, "predict": False, **_keywords(trainer, most)}
        return batchfit.find_batch_size(batchfit.Workload(step, state=state), **keywords)


@contextmanager
def _full_length(trainer: Any) -> Iterator[None]:
    """Inside, no completion ends before `max_completion_length`."""
    before = trainer.generation_config
    trainer.generation_config = copy.deepcopy(before)
    trainer.generation_config.min_new_tokens = before.max_new_tokens
    try:
        yield
    finally:
        trainer.generation_config = before


def _find_loss(
    trainer: Any, model: Any, optimizer: Any, prompt: list[int], compute: Callable[..., Any]
) -> Any:
    """The largest microbatch of the loss phase, forward and backward."""
    args = trainer.args
    most = args.per_device_train_batch_size

    def loss_fn(model: Any, batch: Any) -> Any:
        model.train()
        if len(batch["prompt_ids"]) < most or args.gradient_accumulation_steps > 1:
            # All microbatches of an optimizer step but the first run while gradients are allocated.
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        with trainer.compute_loss_context_manager(), no_metrics(trainer.accelerator):
            return compute(model, batch)

    work = batchfit.training(
        model,
        optimizer,
        loss_fn,
        lambda count: longest_batch(trainer, prompt, count),
        scaler=trainer.accelerator.scaler,
        clip_norm=args.max_grad_norm if args.max_grad_norm else None,
        keep_outputs=False,
        state=[trainer.lr_scheduler, trainer.state, trainer.control, *trainer._batchfit.options.state],
    )
    return batchfit.find_batch_size(work, **_keywords(trainer, most))


def _learn_longest(trainer: Any, model: Any, batch: dict[str, torch.Tensor], compute: Any) -> None:
    """Run the largest microbatch of the longest batch, so that the Microbatcher knows it as the largest.

    Shorter batches then start with larger microbatches, by the memory of that one. A search of one size runs
    it, since that restores everything.
    """
    phases, size = phases_of(trainer), len(batch["prompt_ids"])

    def once(batch_size: int) -> None:
        model.train()
        model.zero_grad()
        run_loss(trainer, phases, model, [HeldBatch(batch, lambda micro: compute(model, micro), 1.0)])
        model.zero_grad()

    state = [model, trainer.state, trainer.control, *trainer._batchfit.options.state]
    work = batchfit.Workload(once, state=[*state, *filter(None, [trainer.accelerator.scaler])])
    keywords = {**_keywords(trainer, size), "min_size": size, "max_size": size, "steps": 2, "soak_steps": 0}
    keywords["predict"] = False  # its size is known
    batchfit.find_batch_size(work, **keywords)
    if size < trainer.args.per_device_train_batch_size:
        phases.loss_microbatcher(trainer, model)._nothing_larger()


def longest_batch(trainer: Any, prompt: list[int], count: int) -> dict[str, torch.Tensor]:
    """A batch of the loss phase as `_generate_and_score_completions` makes it, at its longest."""
    device, length = trainer.accelerator.device, trainer.max_completion_length
    prompts = torch.tensor(prompt, device=device).expand(count, -1).contiguous()
    completions = prompts[:, -1:].expand(count, length).contiguous()
    values = torch.zeros(count, length, device=device)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-1.0, 1.0, count, device=device),
        "num_items_in_batch": torch.tensor(count * length, device=device),
        "old_logps": values[:, 0],  # of RLOO
        "old_per_token_logps": values,
        "ref_per_token_logps": values,
    }
    if trainer.use_vllm:
        batch["sampling_per_token_logps"] = batch["importance_sampling_ratio"] = values
    return batch
