"""The loss phase of a trainer that generates: forward and backward of one batch, in microbatches.

Rules
- The trainer's own `training_step` runs once per batch, as without batchfit: it generates, counts and logs.
  Only its `compute_loss` and `accelerator.backward` are replaced, by a loss that is not there yet and by the
  microbatches. What the step does to the loss in between (gradient accumulation) is done to theirs.
- A microbatch's loss is TRL's own, of some rows of the batch: advantages, masks and log-probabilities are
  cut along. Its share is exact for each loss type: of the samples, of the tokens, or 1 where the loss is
  divided by what the whole batch counts.
- An entropy bonus and the mask of tokens with high entropy are over all tokens of a batch. Log-probabilities
  are then made in microbatches, and the loss is that of all of them (`Microbatcher.backward_cached`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, final

import torch

from batchfit.errors import BatchfitError
from batchfit.integrations.transformers.losses import rows_of
from batchfit.integrations.transformers.probing import keeping_mode, uncounted
from batchfit.integrations.transformers.rl.checks import check_images, needs_whole_loss
from batchfit.integrations.transformers.rl.metrics import on_this_rank, token_mask

if TYPE_CHECKING:
    from batchfit.integrations.transformers.rl.phases import Phases

Divisor = Literal["samples", "tokens", "batch"]

# What the loss of a batch is divided by, for each loss type of TRL 1.16.
_DIVISORS: dict[str, Divisor] = {
    "grpo": "samples",
    "sapo": "samples",
    "luspo": "samples",
    "dr_grpo": "samples",
    "bnpo": "tokens",
    "dapo": "batch",
    "cispo": "batch",
    "vespo": "batch",
}


def divisor_of(trainer: Any) -> Divisor:
    """What the trainer's loss divides by: "batch" is a number that is the same for all microbatches."""
    kind = getattr(trainer, "loss_type", None)
    return "samples" if kind is None else _DIVISORS.get(kind, "samples")  # RLOO has no loss types


def is_known_loss(trainer: Any) -> bool:
    """Whether the loss is TRL's own, of a type that is in the table."""
    kind = type(trainer)
    homes = {"trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer"}
    owners = [
        next(one.__module__ for one in kind.__mro__ if name in vars(one) and not _is_ours(one))
        for name in ("compute_loss", "_compute_loss")
    ]
    return homes.issuperset(owners) and getattr(trainer, "loss_type", "grpo") in _DIVISORS


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "batchfit"


@final
class LossStep:
    """One call of the trainer's own `training_step`."""

    def __init__(self, trainer: Any, phases: Phases) -> None:
        self._trainer = trainer
        self._phases = phases
        self._held: tuple[Any, Any, Callable[[Any], Any]] | None = None
        # On the host: to read what a step makes of it forces no synchronization.
        self._unit = torch.ones((), dtype=torch.float64, requires_grad=True)
        self.report: Any = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Inside, `compute_loss` holds its batch, and `accelerator.backward` runs it."""
        accelerator = self._trainer.accelerator
        accelerator.backward = self.backward
        self._phases.step = self
        try:
            yield
        finally:
            self._phases.step = None
            del accelerator.backward
        if self.report is None:
            raise BatchfitError("training_step must call compute_loss and accelerator.backward once")

    def hold(self, model: Any, inputs: Any, compute: Callable[[Any], Any]) -> torch.Tensor:
        """What `compute_loss` returns: a loss of 1, which stands for that of the batch."""
        if self._held is not None:
            raise BatchfitError("training_step must call compute_loss once, so that batchfit can retry it")
        check_images(inputs)
        self._held = model, inputs, compute
        return self._unit

    def backward(self, loss: Any, **options: Any) -> None:
        """Forward and backward of the batch, with the factor that the step has put on its loss."""
        if self._held is None:
            raise BatchfitError("training_step must call accelerator.backward with what compute_loss returns")
        (model, inputs, compute), value = self._held, float(loss.detach())
        factor: Any
        (factor,) = torch.autograd.grad(loss, self._unit, allow_unused=True)
        if factor is None or abs(float(factor) - value) > 1e-12 * abs(value):
            raise BatchfitError(
                "training_step must pass on the loss of compute_loss or a multiple of it: batchfit calls "
                "backward itself, in microbatches. Put other terms into compute_loss"
            )
        self.report = run_loss(self._trainer, self._phases, model, inputs, compute, float(factor))


def run_loss(
    trainer: Any,
    phases: Phases,
    model: Any,
    inputs: Mapping[str, Any],
    compute: Callable[[Any], Any],
    factor: float,
) -> Any:
    """Forward and backward of one batch; its `StepReport`, with the loss that the step would return."""
    run = trainer._batchfit
    microbatcher, metrics = phases.loss_microbatcher(trainer, model), phases.metrics
    metrics.clear()
    scaler = trainer.accelerator.scaler
    with run.deferring_logs(trainer.log):
        if needs_whole_loss(trainer):
            encode, loss_fn = whole_loss(trainer, phases, model, inputs, compute, factor)
            return run.logged(microbatcher.backward_cached(encode, loss_fn, inputs, scaler=scaler))
        ranks = trainer.args.world_size
        # The Trainer's loss is for DDP's mean over ranks; the Microbatcher adds sums up over ranks.
        loss_of = microbatch_loss(trainer, phases, inputs, compute, factor / ranks)
        report = run.logged(microbatcher.backward(loss_of, inputs, scaler=scaler))
    metrics.write(trainer.accelerator)
    if ranks > 1:
        report.loss.mul_(ranks)
    return report


def microbatch_loss(
    trainer: Any, phases: Phases, inputs: Mapping[str, Any], compute: Callable[[Any], Any], factor: float
) -> Callable[[Any], Any]:
    """`fn(micro)`: what a microbatch contributes to the loss of its batch."""
    rows, divisor = rows_of(inputs), divisor_of(trainer)
    tokens = token_mask(inputs).sum().clamp(min=1) if divisor == "tokens" else None
    is_alone = trainer.args.world_size == 1

    def loss_of(micro: Any) -> Any:
        is_whole = rows_of(micro) == rows
        if not is_whole:
            _check_router(trainer)
        with ExitStack() as stack:
            if not torch.is_grad_enabled():  # the Microbatcher inspects the loss, in eval mode
                stack.enter_context(keeping_mode(trainer.model))
                stack.enter_context(uncounted(trainer))
                stack.enter_context(on_this_rank(trainer.accelerator))
            elif not (is_whole and is_alone):
                stack.enter_context(on_this_rank(trainer.accelerator))
                stack.enter_context(phases.metrics.collecting(micro))
            stack.enter_context(trainer.compute_loss_context_manager())
            loss = compute(micro)
        share: Any = factor
        if not is_whole and divisor == "samples":
            share = factor * (rows_of(micro) / rows)
        elif not is_whole and tokens is not None:
            share = factor * token_mask(micro).sum().clamp(min=1).to(loss.dtype) / tokens
        return loss if isinstance(share, float) and share == 1.0 else loss * share

    return loss_of


def whole_loss(
    trainer: Any,
    phases: Phases,
    model: Any,
    inputs: Mapping[str, Any],
    compute: Callable[[Any], Any],
    factor: float,
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """`encode(micro)`: log-probabilities and entropies; `loss_fn`: the loss of all of them."""

    def encode(micro: Any) -> dict[str, torch.Tensor]:
        ids = torch.cat([micro["prompt_ids"], micro["completion_ids"]], dim=1)
        mask = torch.cat([micro["prompt_mask"], micro["completion_mask"]], dim=1)
        with trainer.compute_loss_context_manager():
            logps, entropies, _ = trainer._get_per_token_logps_and_entropies(
                model, ids, mask, micro["completion_ids"].size(1), compute_entropy=True
            )
        return {"logps": logps, "entropies": entropies}

    def loss_fn(found: dict[str, torch.Tensor]) -> torch.Tensor:
        with phases.replaying(found), trainer.compute_loss_context_manager():
            loss: torch.Tensor = compute(inputs)
        return loss if factor == 1.0 else loss * factor

    return encode, loss_fn


def _check_router(trainer: Any) -> None:
    """Refuse to cut a batch with the load-balancing loss of a mixture of experts."""
    if getattr(trainer, "aux_loss_enabled", False):
        raise BatchfitError(
            "router_aux_loss_coef: the load-balancing loss of a mixture of experts is one of all tokens of a "
            "batch, so the batch cannot be cut. Set router_aux_loss_coef=0.0, or lower "
            "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor"
        )
