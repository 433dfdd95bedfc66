"""How the batch of a trainer is cut into microbatches, where its rows are not its samples.

Rules
- What the Microbatcher cuts has one row per sample: a pair of sequences (`pairs`), or a few whole sequences
  of a packed row (`packed`). A microbatch is turned back into what the trainer's own step takes.
- A batch that is not cut is the trainer's own, untouched.
- Inside `exact` the trainer's loss of a microbatch is what it adds to the batch's. A loss for which that
  cannot be had refuses to be cut, and says what to do.
- Nothing waits for other ranks in there (`metrics`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from batchfit.integrations.trl.kto import estimates_of, known_kl, parts_of, rows_of_kto, with_kl, without_kl
from batchfit.integrations.trl.metrics import local_metrics
from batchfit.integrations.trl.packed import PackedBatch, is_packed
from batchfit.integrations.trl.pairs import pair_terms, paired, refuse_sorting, unpaired
from batchfit.integrations.trl.terms import refuse_aux_loss, several_means
from batchfit.integrations.trl.trainers import has_pairs, name_of


@final
@dataclass(frozen=True, slots=True)
class CutBatch:
    """A trainer's batch as the Microbatcher cuts it, and the way back."""

    cut: Any
    restored: Callable[[Any], Any]  # a microbatch, as the trainer's own step takes it
    is_whole: Callable[[Any], bool]  # whether a microbatch is all of the batch
    exact: Callable[[Any], Any]  # a context, in which the loss of this microbatch is exact
    few: Callable[[int], Any]  # the trainer's inputs of the first samples
    outputs_of: Callable[[Any], Any] = lambda outputs: outputs  # rows that the trainer returns, per sample
    joined: Callable[[Any], Any] = lambda outputs: outputs  # and as the trainer returns them
    parts: Callable[[Any], list[tuple[Any, float]]] = lambda micro: [(micro, 1.0)]  # with losses of their own

    def loss(self, micro: Any, loss_of: Callable[[Any], Any]) -> Any:
        """What a microbatch adds to the batch's loss, where `loss_of` returns the trainer's own."""
        total = None
        for part, share in self.parts(micro):
            with self.exact(part):
                loss = loss_of(self.restored(part))
            loss = loss if share == 1 else loss * share
            total = loss if total is None else total + loss
        return total


def open_batch(trainer: Any, model: Any, inputs: Any, plain: CutBatch, *, trains: bool = True) -> CutBatch:
    """How to cut the batch `inputs`; `plain`: how to cut it where its rows are its samples."""
    name = name_of(trainer)
    if not isinstance(inputs, Mapping):
        return plain
    if is_packed(trainer, inputs):
        return _packed(trainer, inputs)
    if has_pairs(trainer, inputs):
        return _pairs(trainer, dict(inputs))
    if name == "KTOTrainer":
        return _kto(trainer, model, dict(inputs), plain, trains=trains)
    if name is None:
        return plain
    if name in ("ORPOTrainer", "CPOTrainer"):
        terms = several_means(trainer, inputs)
        return _with_exact(trainer, plain, lambda micro: terms(micro, plain.restored(micro)))
    return _with_exact(trainer, plain, None)


def _with_exact(trainer: Any, batch: CutBatch, terms: Callable[[Any], Any] | None) -> CutBatch:
    """The same batch, whose microbatches have these terms, and gather no metrics."""

    @contextmanager
    def exact(micro: Any) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(local_metrics(trainer))
            if not batch.is_whole(micro):
                refuse_sorting(trainer)
                stack.enter_context(refuse_aux_loss(trainer, batch.cut, micro))
            if terms is not None:  # of all of the batch too: a check may join samples twice
                stack.enter_context(terms(micro))
            yield

    return replace(batch, exact=exact)


def _packed(trainer: Any, inputs: Any) -> CutBatch:
    packed = PackedBatch(trainer, inputs)
    batch = CutBatch(packed.cut, packed.restored, packed.is_whole, local_metrics, packed.few)
    return _with_exact(trainer, batch, None)


def _pairs(trainer: Any, inputs: dict[str, Any]) -> CutBatch:
    cut = paired(inputs)
    count = len(cut["input_ids"])

    def is_whole(micro: Any) -> bool:
        return len(micro["input_ids"]) == count

    def few(samples: int) -> dict[str, Any]:
        return unpaired({name: value[:samples] for name, value in cut.items()})

    batch = CutBatch(cut, unpaired, is_whole, local_metrics, few, _pairs_in, _rows_of_pairs)
    return _with_exact(trainer, batch, pair_terms(trainer, cut))


def _pairs_in(outputs: Any) -> Any:
    """Outputs of a microbatch, with one row per pair."""
    return _each(outputs, lambda one: one.reshape(2, len(one) // 2, *one.shape[1:]).transpose(0, 1))


def _rows_of_pairs(outputs: Any) -> Any:
    """Outputs of the batch, as TRL orders them: all chosen rows, then all rejected ones."""
    return _each(outputs, lambda one: one.transpose(0, 1).reshape(2 * len(one), *one.shape[2:]))


def _each(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(outputs, torch.Tensor):
        return change(outputs) if outputs.dim() > 0 else outputs
    if type(outputs) in (list, tuple):
        return type(outputs)(_each(one, change) for one in outputs)
    if isinstance(outputs, dict):
        return {name: _each(one, change) for name, one in outputs.items()}
    return outputs


def _kto(trainer: Any, model: Any, inputs: dict[str, Any], plain: CutBatch, *, trains: bool) -> CutBatch:
    estimates = estimates_of(trainer, model, inputs, trains=trains)
    if estimates is None:
        return _with_exact(trainer, plain, None)
    cut = without_kl(inputs, estimates)

    def is_whole(micro: Any) -> bool:
        return len(micro["label"]) == len(cut["label"])

    def few(samples: int) -> dict[str, Any]:
        return with_kl(rows_of_kto(cut, slice(samples)))

    batch = CutBatch(cut, with_kl, is_whole, local_metrics, few, parts=parts_of)
    return _with_exact(trainer, batch, lambda micro: known_kl(trainer, estimates.of(micro)))
