"""Losses of sentence-transformers that compare samples, in a Trainer that `adapt` has changed.

Rules
- Such a loss (in-batch negatives, mined triplets, ranks of similarities) is never cut. Microbatches are
  encoded one after another, and the loss is that of all their embeddings (`Microbatcher.backward_cached`).
- The trainer's own step computes the loss: while it does, its model returns the embeddings that are there.
- Samples are compared within `per_device_train_batch_size`, as without batchfit: gradient accumulation loads
  several such batches as one, and each has a loss of its own.
- A cached loss of the library runs in the same way: its `mini_batch_size` is then the microbatch size found.
- Where this cannot be done, a batch that has to be cut is refused, with what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import nn

from batchfit.errors import BatchfitError
from batchfit.integrations.trl.terms import patched

# Nothing here is called by users: `adapt` does.
__all__: list[str] = []

log = logging.getLogger("batchfit")

_LIBRARY = "sentence_transformers"
_TRAINERS = ("SentenceTransformerTrainer", "SparseEncoderTrainer")
# Losses that compare the samples of a batch; classes of users count by the class that they are made from.
_COMPARING = frozenset(
    {
        "AnglELoss",
        "BatchAllTripletLoss",
        "BatchHardSoftMarginTripletLoss",
        "BatchHardTripletLoss",
        "BatchSemiHardTripletLoss",
        "CSRLoss",
        "CachedMultipleNegativesRankingLoss",
        "CachedMultipleNegativesSymmetricRankingLoss",
        "CachedSpladeLoss",
        "CoSENTLoss",
        "FlopsLoss",
        "GISTEmbedLoss",
        "GlobalOrthogonalRegularizationLoss",
        "MegaBatchMarginLoss",
        "MultipleNegativesRankingLoss",
        "MultipleNegativesSymmetricRankingLoss",
        "OnlineContrastiveLoss",
        "SparseAnglELoss",
        "SparseCoSENTLoss",
        "SparseMultipleNegativesRankingLoss",
        "SpladeLoss",
    }
)
_REFUSED = {  # by class, and what to do
    "AdaptiveLayerLoss": "it reads the layers of the model itself. Use MatryoshkaLoss",
    "Matryoshka2dLoss": "it reads the layers of the model itself. Use MatryoshkaLoss",
    "CachedGISTEmbedLoss": "it runs the model in mini-batches of its own. Use GISTEmbedLoss, whose batches "
    "are then encoded in microbatches",
    "ContrastiveTensionLossInBatchNegatives": "it trains two copies of the model. Use "
    "MultipleNegativesRankingLoss",
}


def extra_modules(trainer: Any) -> list[nn.Module]:
    """Parameters of the loss itself (a classifier, a temperature), which the optimizer updates too."""
    model = {id(one) for one in trainer.model.parameters()}
    found = {
        id(one): one for loss in _losses_of(trainer) for one in loss.parameters() if id(one) not in model
    }
    trained = [one for one in found.values() if one.requires_grad]
    return [nn.ParameterList(trained)] if trained else []


def comparing_step(trainer: Any, model: nn.Module, inputs: Any, *, group: int = 0) -> ComparingStep | None:
    """How to run this batch with a loss that compares its samples; None where the loss does not.

    `group`: how many samples are compared with each other, 0 for all.
    """
    if not _is_known_trainer(trainer) or not hasattr(inputs, "items"):
        return None
    loss = _loss_of(trainer, inputs)
    names = [] if loss is None else [_name_in(one, _COMPARING) for one in loss.modules()]
    if loss is None or not any(names) or _refused_in(loss):
        return None
    if trainer.args.world_size > 1 and any(
        getattr(one, "gather_across_devices", False) for one in loss.modules()
    ):
        raise BatchfitError(
            "gather_across_devices=True has collectives in the loss: a rank that retries a batch would wait "
            "for the others. Set gather_across_devices=False"
        )
    _say_once(trainer, loss)
    return ComparingStep(trainer, model, inputs, loss, group)


def check_cut(trainer: Any, inputs: Any) -> None:
    """Refuse to cut a batch whose loss compares its samples, and cannot be computed from embeddings."""
    loss = _loss_of(trainer, inputs) if _losses_of(trainer) else None
    name = None if loss is None else _refused_in(loss)
    if name:
        raise BatchfitError(
            f"adapt() cannot cut a batch with {name}, which compares its samples: {_REFUSED[name]}. Or lower "
            "per_device_train_batch_size, so that a batch fits whole"
        )


@final
class ComparingStep:
    """The two halves of a step: embeddings of a microbatch, and the loss of those of the batch."""

    def __init__(self, trainer: Any, model: nn.Module, inputs: Any, loss: nn.Module, group: int) -> None:
        self._trainer = trainer
        self._model = model
        self._inputs = inputs
        self._loss = loss
        self._group = group
        self._rows = 1  # of the last microbatch

    def encode(self, micro: Any) -> tuple[dict[str, torch.Tensor], ...]:
        """What the loss may read of the model's output, for each column."""
        trainer = self._trainer
        features, _ = trainer.collect_features(dict(trainer._prepare_inputs(micro)))
        found = []
        with trainer.compute_loss_context_manager():
            for column in features:
                # Copies: a model may write into its masks, and each microbatch is encoded twice.
                given = {
                    name: one.clone() if isinstance(one, torch.Tensor) else one
                    for name, one in column.items()
                }
                rows = self._rows = _rows_of(given)
                outputs = self._model(dict(given))
                found.append(
                    {
                        name: one
                        for name, one in outputs.items()
                        if isinstance(one, torch.Tensor)
                        and one.is_floating_point()
                        and name not in given
                        and one.dim() == 2
                        and len(one) == rows
                    }
                )
        return tuple(found)

    def encode_to_train(self, micro: Any) -> tuple[dict[str, torch.Tensor], ...]:
        """`encode`, with the model in the mode that `training_step` sets."""
        self._model.train()
        return self.encode(micro)

    def loss(
        self,
        embeddings: Sequence[dict[str, torch.Tensor]],
        compute: Callable[[Any], Any],
    ) -> Any:
        """`compute(inputs)`, the trainer's own, with a model that returns these embeddings."""
        # On the device already, so that the trainer's own step passes on these very tensors.
        inputs = dict(self._trainer._prepare_inputs(self._inputs))
        with replaying(self._trainer, self._loss, inputs, embeddings, chunk=self._rows):
            return compute(inputs)

    def mean_loss(
        self, embeddings: Sequence[dict[str, torch.Tensor]], compute: Callable[[Any], Any]
    ) -> torch.Tensor:
        """The mean loss of the batches that were loaded as one."""
        rows = len(next(iter(embeddings[0].values())))
        size = self._group or rows
        losses = []
        for begin in range(0, rows, size):
            part = _cut(self._inputs, rows, begin, begin + size)
            mine = [
                {name: one[begin : begin + size] for name, one in column.items()} for column in embeddings
            ]
            step = ComparingStep(self._trainer, self._model, part, self._loss, 0)
            step._rows = self._rows
            losses.append(step.loss(mine, compute))
        return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


@contextmanager
def replaying(
    trainer: Any,
    loss: nn.Module,
    inputs: dict[str, Any],
    embeddings: Sequence[dict[str, torch.Tensor]],
    *,
    chunk: int,
) -> Iterator[None]:
    """Inside, the loss gets these embeddings from its model, and computes none."""
    columns, _ = trainer.collect_features(dict(inputs))
    known = {
        id(one): outputs
        for column, outputs in zip(columns, embeddings, strict=True)
        for one in column.values()
        if isinstance(one, torch.Tensor)
    }

    def outputs_of(features: Any) -> dict[str, Any]:
        for one in features.values():
            if id(one) in known:
                return {**features, **known[id(one)]}
        raise BatchfitError(
            f"{type(loss).__name__} runs the model on something else than the columns of the batch, so the "
            "batch cannot be encoded in microbatches. Use a batch that fits whole, or compared='warn', which "
            "cuts it all the same"
        )

    models = {id(one): one for one in (trainer.model, trainer.model_wrapped)}
    with ExitStack() as stack:
        stack.enter_context(_merging_disabled())
        for one in models.values():
            stack.enter_context(patched(one, "forward", lambda features, **_: outputs_of(features)))
        for one in loss.modules():
            guide = vars(one).get("_modules", {}).get("guide")
            if guide is not None and id(guide) not in models:
                stack.enter_context(patched(guide, "forward", _in_chunks(guide.forward, chunk)))
            if hasattr(one, "forward_cached"):
                cached = _without_cache(one, outputs_of)
                stack.enter_context(patched(one, "forward_cached", cached))
        yield


def _without_cache(loss: Any, outputs_of: Callable[[Any], dict[str, Any]]) -> Callable[..., Any]:
    """`forward_cached` of a cached loss, whose embeddings are there."""

    def forward_cached(features: Any, labels: Any = None) -> Any:
        embeddings = [outputs_of(one)["sentence_embedding"] for one in features]
        if not torch.is_grad_enabled():
            return loss.calculate_loss([[one] for one in embeddings], labels)
        # It runs backward itself, up to embeddings: those of a graph of its own.
        leaves = [one.detach().requires_grad_() for one in embeddings]
        value = loss.calculate_loss([[one] for one in leaves], labels, with_backward=True)
        apply: Any = _WithGradients.apply
        return apply(value.detach(), [one.grad for one in leaves], *embeddings)

    return forward_cached


@final
class _WithGradients(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Any, gradients: Any, *embeddings: Any) -> Any:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, factor: Any) -> Any:
        return None, None, *(None if one is None else one * factor for one in ctx.gradients)


def _in_chunks(forward: Callable[[Any], Any], size: int) -> Callable[..., Any]:
    """A model that has no gradients, in as many samples at once as the trained one."""

    def chunked(features: Any, **more: Any) -> dict[str, Any]:
        rows = _rows_of(features)
        parts = [
            forward(_cut(features, rows, begin, begin + size), **more)["sentence_embedding"]
            for begin in range(0, rows, size)
        ]
        return {**features, "sentence_embedding": torch.cat(parts)}

    return chunked


def _merging_disabled() -> Any:
    """One call of the model per column, where the library would join columns."""
    try:
        from sentence_transformers.base.losses.merged_forward import column_merging_disabled
    except ImportError:  # an older version, which does not join them
        return nullcontext()
    return column_merging_disabled()


def _is_known_trainer(trainer: Any) -> bool:
    return any(
        kind.__name__ in _TRAINERS and kind.__module__.partition(".")[0] == _LIBRARY
        for kind in type(trainer).__mro__
    )


def _losses_of(trainer: Any) -> list[nn.Module]:
    """The loss modules of a trainer of the library; none of any other."""
    if not any(kind.__module__.partition(".")[0] == _LIBRARY for kind in type(trainer).__mro__):
        return []
    loss = getattr(trainer, "loss", None)
    found = list(loss.values()) if isinstance(loss, dict) else [loss]
    return [one for one in found if isinstance(one, nn.Module)]


def _loss_of(trainer: Any, inputs: Any) -> nn.Module | None:
    loss = getattr(trainer, "loss", None)
    if isinstance(loss, dict):
        loss = loss.get(inputs.get("dataset_name"))
    return loss if isinstance(loss, nn.Module) else None


def _name_in(module: nn.Module, names: Any) -> str | None:
    return next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in names), None)


def _refused_in(loss: nn.Module) -> str | None:
    return next(filter(None, (_name_in(one, _REFUSED) for one in loss.modules())), None)


def _rows_of(features: Any) -> int:
    return next(len(one) for one in features.values() if isinstance(one, torch.Tensor) and one.dim() > 0)


def _cut(inputs: Any, rows: int, begin: int, end: int) -> dict[str, Any]:
    """Samples of a batch; what is not one value per sample stays."""
    if begin == 0 and end >= rows:
        return dict(inputs)
    return {
        name: one[begin:end] if isinstance(one, torch.Tensor) and one.dim() > 0 and len(one) == rows else one
        for name, one in inputs.items()
    }


def _say_once(trainer: Any, loss: nn.Module) -> None:
    run = trainer._batchfit
    if not run.says_compared and trainer.is_world_process_zero():
        run.says_compared = True
        log.info(
            "%s compares the samples of a batch: microbatches are encoded twice, and the loss is that of the "
            "whole batch",
            type(loss).__name__,
        )
