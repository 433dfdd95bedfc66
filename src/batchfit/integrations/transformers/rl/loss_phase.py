"""The loss phase of a trainer that generates: forward and backward of its batches, in microbatches.

Rules
- The batches that the trainer accumulates wait for the last one, and run together: gradients that were there
  before would need memory for a second set while a batch may be retried.
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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, final

import torch
from torch import nn

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
@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A batch whose loss phase is still to run, and what TRL computes its loss with."""

    inputs: Mapping[str, Any]
    compute: Callable[[Any], Any]
    factor: float  # that the trainer's step has put on the loss

    @property
    def rows(self) -> int:
        return rows_of(self.inputs)

    @property
    def length(self) -> int:
        return int(self.inputs["completion_ids"].size(1))

    def part(self, rows: list[int]) -> dict[str, Any]:
        """Some samples of the batch; what is not one value per sample stays."""
        count, first = self.rows, rows[0]
        if rows == list(range(count)):
            return dict(self.inputs)
        is_run = rows == list(range(first, first + len(rows)))

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or len(value) != count:
                return value
            return value[first : first + len(rows)] if is_run else value[rows]

        return {name: cut(value) for name, value in self.inputs.items()}


@final
class LossStep:
    """One call of the trainer's own `training_step`."""

    def __init__(self, trainer: Any, phases: Phases) -> None:
        self._trainer = trainer
        self._phases = phases
        self._held: tuple[Any, Any, Callable[[Any], Any]] | None = None
        # On the host: to read what a step makes of it forces no synchronization.
        self._unit = torch.ones((), dtype=torch.float64, requires_grad=True)
        self.loss: Any = None  # what the step returns

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
        if self.loss is None:
            raise BatchfitError("training_step must call compute_loss and accelerator.backward once")

    def hold(self, model: Any, inputs: Any, compute: Callable[[Any], Any]) -> torch.Tensor:
        """What `compute_loss` returns: a loss of 1, which stands for that of the batch."""
        if self._held is not None:
            raise BatchfitError("training_step must call compute_loss once, so that batchfit can retry it")
        check_images(inputs)
        self._held = model, inputs, compute
        return self._unit

    def backward(self, loss: Any, **options: Any) -> None:
        """Keep the batch; with the last one of an optimizer step, run forward and backward of all of them."""
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
        trainer, phases = self._trainer, self._phases
        phases.held.append(HeldBatch(inputs, compute, float(factor)))
        if trainer.accelerator.sync_gradients:
            held, phases.held = phases.held, []
            self.loss = run_loss(trainer, phases, model, held).loss
        else:
            self.loss = torch.zeros((), device=trainer.accelerator.device)


def run_loss(trainer: Any, phases: Phases, model: Any, held: Sequence[HeldBatch]) -> Any:
    """Forward and backward of the batches of an optimizer step; the `StepReport` sums their losses."""
    run = trainer._batchfit
    microbatcher, metrics = phases.loss_microbatcher(trainer, model), phases.metrics
    metrics.clear()
    batch, scaler = joined_rows(held), trainer.accelerator.scaler
    with run.deferring_logs(trainer.log):
        if needs_whole_loss(trainer):
            encode, loss_fn = whole_loss(trainer, phases, model, held)
            return run.logged(microbatcher.backward_cached(encode, loss_fn, batch, scaler=scaler))
        report = run.logged(
            microbatcher.backward(microbatch_loss(trainer, phases, held), batch, scaler=scaler)
        )
    metrics.write(trainer.accelerator)
    ranks = trainer.args.world_size
    if ranks > 1:
        report.loss.mul_(ranks)
    return report


def joined_rows(held: Sequence[HeldBatch]) -> dict[str, torch.Tensor]:
    """What the Microbatcher cuts: samples by number, as long as they are, so that sizes are learned by it."""
    length = max(int(one.inputs["prompt_ids"].size(1)) + one.length for one in held)
    rows = [one.rows for one in held]
    return {
        "batch": torch.cat([torch.full((count,), at) for at, count in enumerate(rows)]),
        "row": torch.cat([torch.arange(count) for count in rows]),
        "length": torch.zeros(sum(rows), length, dtype=torch.int8),
    }


def _parts(micro: Mapping[str, torch.Tensor]) -> list[tuple[int, list[int]]]:
    """The rows of each batch in a microbatch."""
    found: dict[int, list[int]] = {}
    for at, row in zip(micro["batch"].tolist(), micro["row"].tolist(), strict=True):
        found.setdefault(at, []).append(row)
    return list(found.items())


def microbatch_loss(trainer: Any, phases: Phases, held: Sequence[HeldBatch]) -> Callable[[Any], Any]:
    """`fn(micro)`: what a microbatch contributes to the losses of its batches."""
    divisor, ranks = divisor_of(trainer), trainer.args.world_size
    counts = [token_mask(one.inputs).sum().clamp(min=1) for one in held] if divisor == "tokens" else []

    def share_of(at: int, part: Mapping[str, Any]) -> Any:
        if divisor == "samples":
            return rows_of(part) / held[at].rows
        return token_mask(part).sum().clamp(min=1).double() / counts[at] if divisor == "tokens" else 1.0

    def part_loss(at: int, rows: list[int]) -> Any:
        part, is_whole = held[at].part(rows), len(rows) == held[at].rows
        if not is_whole:
            _check_router(trainer)
        with ExitStack() as stack:
            if not torch.is_grad_enabled():  # the Microbatcher inspects the loss, in eval mode
                stack.enter_context(keeping_mode(trainer.model))
                stack.enter_context(uncounted(trainer))
                stack.enter_context(on_this_rank(trainer.accelerator))
            elif not is_whole or ranks > 1:
                stack.enter_context(on_this_rank(trainer.accelerator))
                stack.enter_context(phases.metrics.collecting(part, batch=at))
            stack.enter_context(trainer.compute_loss_context_manager())
            loss = held[at].compute(part)
        # The Trainer's loss is for DDP's mean over ranks; the Microbatcher adds sums up over ranks.
        factor = held[at].factor / ranks
        if is_whole:
            return loss if factor == 1.0 else loss * factor
        return loss * (factor * share_of(at, part))

    def loss_of(micro: Any) -> Any:
        losses = [part_loss(at, rows) for at, rows in _parts(micro)]
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    return loss_of


def whole_loss(
    trainer: Any, phases: Phases, model: Any, held: Sequence[HeldBatch]
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """`encode(micro)`: log-probabilities and entropies; `loss_fn`: the losses of all of them."""
    longest = max(one.length for one in held)

    def encode(micro: Any) -> dict[str, torch.Tensor]:
        found: list[tuple[torch.Tensor, ...]] = []
        for at, rows in _parts(micro):
            part, length = held[at].part(rows), held[at].length
            ids = torch.cat([part["prompt_ids"], part["completion_ids"]], dim=1)
            mask = torch.cat([part["prompt_mask"], part["completion_mask"]], dim=1)
            with trainer.compute_loss_context_manager():
                made = trainer._get_per_token_logps_and_entropies(
                    model, ids, mask, length, compute_entropy=True
                )
            found.append(tuple(nn.functional.pad(one, (0, longest - length)) for one in made[:2]))
        logps, entropies = (torch.cat(values) for values in zip(*found, strict=True))
        return {"logps": logps, "entropies": entropies}

    def loss_fn(found: dict[str, torch.Tensor]) -> torch.Tensor:
        losses, begin, accelerator = [], 0, trainer.accelerator
        try:
            for one in held:
                mine = {name: value[begin : begin + one.rows, : one.length] for name, value in found.items()}
                begin += one.rows
                # TRL adapts its entropy bonus with the last batch of an optimizer step.
                accelerator.sync_gradients = one is held[-1]
                with phases.replaying(mine), trainer.compute_loss_context_manager():
                    losses.append(one.compute(one.inputs) * one.factor)
        finally:
            accelerator.sync_gradients = True
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    return encode, loss_fn


def _check_router(trainer: Any) -> None:
    """Refuse to cut a batch with the load-balancing loss of a mixture of experts."""
    if getattr(trainer, "aux_loss_enabled", False):
        raise BatchfitError(
            "router_aux_loss_coef: the load-balancing loss of a mixture of experts is one of all tokens of a "
            "batch, so the batch cannot be cut. Set router_aux_loss_coef=0.0, or lower "
            "per_device_train_batch_size and raise gradient_accumulation_steps by the same factor"
        )
