"""`Microbatcher.backward_cached`: a loss over the whole batch's representations, the encoder in microbatches.

Rules: as in `backward`. Every microbatch runs forward twice: without a graph for the representations, and
with one for the gradients, from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from batchfit._engine.batch.pure.microbatch import Microbatch
from batchfit._engine.batch.split import Batch, check_one
from batchfit._engine.batch.structure import children, mapped
from batchfit._engine.data_parallel.interface import DataParallel
from batchfit._engine.device.tensors import check_loss, loss_and_outputs
from batchfit._engine.snapshot import rng
from batchfit._microbatch.backward import detached
from batchfit._microbatch.batch_norm import ExactStatistics
from batchfit._microbatch.batch_run import MicrobatchCall, PassTerms
from batchfit.errors import BatchfitError


@final
class CachedCall(MicrobatchCall):
    """One call of `Microbatcher.backward_cached`."""

    kind = "cached"

    def __init__(self, encode: Callable[[Any], Any], loss_fn: Callable[[Any], Any], *, scaler: Any) -> None:
        self.functions = {"encode": encode, "loss_fn": loss_fn}
        self.scaler = scaler
        self._encode = encode
        self._loss_fn = loss_fn

    def check(self, ranks: DataParallel) -> None:
        super().check(ranks)
        if ranks.shards is not None:
            raise BatchfitError(
                "backward_cached is not supported for models under FSDP2: each chunk runs forward twice, "
                "and ranks with other numbers of chunks would have other collectives. Use DDP"
            )

    def weigh(self, whole: Batch, plan: Sequence[Microbatch]) -> float:
        return float(whole.length)

    def prepare(
        self, whole: Batch, plan: Sequence[Microbatch], terms: PassTerms
    ) -> tuple[CachedBackwardPass, float]:
        encode = self._encode if len(plan) == 1 else _checking_writes(self._encode, whole)
        return CachedBackwardPass(encode, self._loss_fn, whole, plan, terms), float(whole.length)


def _checking_writes(encode: Callable[[Any], Any], whole: Batch) -> Callable[[Any], Any]:
    """`encode`, which is called twice per microbatch: refuses one that writes into the batch."""

    def encoded(micro: Any) -> Any:
        before = whole.versions()
        found = encode(micro)
        if before != whole.versions():
            raise BatchfitError(
                "encode changed the batch in place, and each chunk is encoded twice: the second time it "
                "would see the changed batch. Clone what encode writes into"
            )
        return found

    return encoded


@final
class CachedBackwardPass:
    """A loss over the representations of the whole batch, with the encoder in microbatches: exact."""

    def __init__(
        self,
        encode: Callable[[Any], Any],
        loss_fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Microbatch],
        terms: PassTerms,
    ) -> None:
        self._encode = encode
        self._loss_fn = loss_fn
        self._whole = whole
        self._plan = plan
        self._micros = whole.micros(plan)
        self._terms = terms
        self.at = -1
        self.count = len(plan)
        self.in_loss = False
        self.loss: Any = None
        self.outputs: Any = None

    def __call__(self) -> None:
        loss = self._in_one() if len(self._micros) == 1 else self._chunked()
        self.loss = self._terms.end_with(loss)

    def _in_one(self) -> torch.Tensor:
        (micro,) = self._whole.fed(self._micros, self._terms.run.device)
        representations = self._encode(micro)
        if self._whole.trimmer is not None:  # sorted by length: `loss_fn` gets the batch's own order
            representations = self._whole.joined([representations], self._plan, "encode's output")
        else:
            check_one(representations, self._whole.length, "encode's output")
        return self._backward(representations)

    def _backward(self, representations: Any) -> torch.Tensor:
        terms = self._terms
        loss, outputs = loss_and_outputs(self._loss_fn(representations))
        check_loss(loss, "loss_fn")
        self.outputs = mapped(outputs, detached)
        return terms.backward(loss, check_graph=terms.check_graph)

    def _chunked(self) -> torch.Tensor:
        representations, rows, states = self._representations()
        self.in_loss = True
        loss = self._backward(representations)
        self.in_loss = False
        gradients = [tensor.grad for tensor in tensors_of(representations)]
        del representations
        terms, run = self._terms, self._terms.run
        after = run.undo.random_states()
        run.undo.restore_buffers()
        begin, graphs = [0] * len(gradients), 0
        with ExactStatistics(terms.layers) as exact:
            for index, micro in enumerate(self._whole.fed(self._micros, run.device)):
                self.at = index
                exact.next_microbatch()
                _restore(states[index])
                terms.begin(index)
                graphs += self._backward_of(micro, gradients, begin, rows[index])
                terms.ended(index)
                del micro
                begin = [start + count for start, count in zip(begin, rows[index], strict=True)]
            exact.apply()
        if run.ranks.is_alone and not graphs and all(leaf.grad is None for leaf in run.undo.leaves):
            raise ValueError(
                "encode must return tensors that require grad, not ones without: is the model frozen, or its "
                "output detached or made under torch.no_grad?"
            )
        _restore(after)
        return loss

    def _representations(self) -> tuple[Any, list[list[int]], list[list[rng.Undo]]]:
        """All of them as leaves of a new graph, the rows of each microbatch, and its random numbers."""
        outputs, rows, states = [], [], []
        with torch.no_grad():
            for index, micro in enumerate(self._whole.fed(self._micros, self._terms.run.device)):
                self.at = index
                states.append(self._terms.run.undo.random_states())
                outputs.append(self._encode(micro))
                del micro
                rows.append([tensor.size(0) if tensor.dim() else 0 for tensor in tensors_of(outputs[-1])])
            whole = self._whole.joined(outputs, self._plan, "encode's output", is_ours=True)
        # Older torch keeps cast copies of the weights that were made without a graph: they must not serve
        # the second pass, in which no gradient would reach the weights.
        torch.clear_autocast_cache()
        return mapped(whole, _as_leaf), rows, states

    def _backward_of(
        self, micro: Any, gradients: list[torch.Tensor | None], begin: list[int], rows: list[int]
    ) -> bool:
        """Backward of one microbatch; whether it had a graph (not where all its rows are masked)."""
        tensors = tensors_of(self._encode(micro))
        if [tensor.size(0) if tensor.dim() else 0 for tensor in tensors] != rows:
            raise ValueError("encode must return the same rows when it is called twice with the same samples")
        pairs = [
            (tensor, self._part(gradient, tensor, start))
            for tensor, gradient, start in zip(tensors, gradients, begin, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            if self._terms.check_graph is not None and self.at == 0:
                self._terms.check_graph([one for one, _ in pairs])
            # The same as the backward of sum(tensor * gradient), without making that sum.
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        return any(tensor.requires_grad for tensor in tensors)

    def _part(self, gradient: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """What belongs to this microbatch of the gradient of all representations."""
        if self._whole.trimmer is None:
            return gradient[start : start + tensor.size(0)]
        samples: Any = self._plan[self.at].samples
        part = gradient.index_select(0, torch.tensor(samples, device=gradient.device))
        for dim in range(1, tensor.dim()):  # one value per token: it was padded to the batch's width
            extra = part.size(dim) - tensor.size(dim)
            if extra:
                begin = extra if self._whole.trimmer.padding_side == "left" else 0
                part = part.narrow(dim, begin, tensor.size(dim))
        return part


def _as_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    detached = leaf.detach()
    return detached.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else detached


def _restore(states: list[rng.Undo]) -> None:
    for undo in states:
        undo()


def tensors_of(node: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    if isinstance(node, torch.Tensor):
        return [node]
    return [tensor for _, value in children(node) or () for tensor in tensors_of(value)]
