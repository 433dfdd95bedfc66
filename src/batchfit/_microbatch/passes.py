"""The work of one try: a batch's microbatches run once, from the first to the last.

Rules
- A try is called and either ends or raises; what it leaves in gradients, buffers and generators is the
  caller's to take back. It holds views of the batch and no tensor of the user's once it has raised.
- The user's function is called in a frame that is gone before the next microbatch is touched.
- Losses stay on the device: nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch

from batchfit._engine.batch.pure.pieces import Piece
from batchfit._engine.batch.split import Batch, check_one
from batchfit._engine.batch.structure import children, mapped
from batchfit._engine.batch.transfer import feed
from batchfit._engine.sizing.watch import PassWatch
from batchfit._engine.snapshot import rng
from batchfit._engine.snapshot.coverage import Look
from batchfit._engine.snapshot.rewind import Rewind
from batchfit._engine.workload.checks import check_loss, check_scalar, loss_and_outputs, without_graph
from batchfit._microbatch.batch_norm import BatchNorm, ExactStatistics

_LOW = (torch.float16, torch.bfloat16)


@final
class PlannedPass:
    """A try that is made where it runs: cutting a batch and weighing its parts may need memory too."""

    __slots__ = ("_make", "_plan", "made")

    def __init__(self, make: Callable[[Sequence[Piece]], Any], plan: Sequence[Piece]) -> None:
        self._make = make
        self._plan = plan
        self.made: Any = None

    def __call__(self) -> None:
        self.made = self._make(self._plan)
        if self.made is not None:
            self.made()

    @property
    def at(self) -> int:
        return self.made.at if self.made is not None else -1

    @property
    def in_loss(self) -> bool:
        """Whether it is in a loss over the whole batch, which smaller microbatches leave as it is."""
        return bool(getattr(self.made, "in_loss", False))


@final
@dataclass(frozen=True, slots=True)
class Around:
    """What the tries of one call have in common."""

    device: torch.device | None
    rewind: Rewind
    finish: Callable[[], None]  # called once, at the end of a try that was right; it may need memory too
    scale: float  # what a rank's part counts in the losses; gradients are made of losses times this
    last: Callable[[], AbstractContextManager[None]]  # around the last microbatch
    is_local: bool  # gradients are this rank's alone at the end of a try
    scaler: Any
    layers: Sequence[BatchNorm]
    look: Look | None
    watch: PassWatch
    in_step: bool  # other ranks are in the same microbatch: its backward sends
    alone: bool  # no other rank may have the gradients that this one lacks

    def backward(self, loss: Any, name: str, *, share: float = 1.0, look: Look | None = None) -> torch.Tensor:
        """Backward of what the user's function `name` returned; the loss, scaled, without its graph.

        A loss without a graph, where that may be (`check_scalar`), adds no gradient.
        """
        if look is not None and loss.requires_grad:
            look([loss])
        share *= self.scale
        if share != 1.0:
            loss = loss * share
        if loss.requires_grad:
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        kept: torch.Tensor = loss.detach()
        return kept.float() if kept.dtype in _LOW else kept

    def told(self, loss: Any) -> Any:
        """The loss as the user knows it, and `finish`."""
        if loss is not None and self.scale != 1.0:
            loss = loss / self.scale
        self.finish()
        return loss


@final
class BackwardPass:
    """Forward and backward of each microbatch, each loss scaled by its share of the batch's weight.

    A microbatch whose loss has no graph (all its rows are masked) adds nothing, where another one has one.
    """

    def __init__(
        self,
        fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Piece],
        micros: Sequence[Any],
        shares: Sequence[float],
        around: Around,
    ) -> None:
        # A microbatch without weight has no part in the result, and its mean would be 0/0.
        self._indices = [index for index, share in enumerate(shares) if share]
        self._micros = micros
        self._whole = whole
        self._plan = plan
        self._shares = shares
        self._fn = fn
        self._around = around
        self._look = around.look
        self._parts: dict[int, Any] = {}  # outputs, by microbatch
        self._graphs = 0  # losses that had one
        self.at = -1  # the microbatch that runs; none so far
        self.loss: Any = None
        self.outputs: Any = None

    def __call__(self) -> None:
        around = self._around
        total: torch.Tensor | None = None
        micros = [self._micros[index] for index in self._indices]
        with ExactStatistics(around.layers) as exact:
            for index, micro in zip(self._indices, feed(micros, around.device), strict=True):
                self.at = index
                exact.next_microbatch()
                around.watch.begin(index)
                if index == self._indices[-1]:
                    with around.last():
                        loss = self._run_one(micro, index)
                else:
                    loss = self._run_one(micro, index)
                around.watch.end(index)
                del micro  # or it would live on while the next one is on its way
                total = loss if total is None else total + loss
            exact.apply()
        if around.alone and not self._graphs:
            raise without_graph("fn")
        if self._parts:
            self.outputs = self._joined()
        self.loss = around.told(total)

    def _run_one(self, micro: Any, index: int) -> torch.Tensor:
        around = self._around
        loss, outputs = loss_and_outputs(self._fn(micro))
        # Others wait for what backward sends: under FSDP2 in each microbatch, under DDP in the last.
        sends = around.in_step or (not around.is_local and index == self._indices[-1])
        (check_loss if sends else check_scalar)(loss, "fn")
        if outputs is not None:
            self._parts[index] = mapped(outputs, _detached)
        self._graphs += loss.requires_grad
        look = self._look
        if loss.requires_grad:
            self._look = None
        return around.backward(loss, "fn", share=self._shares[index], look=look)

    def _joined(self) -> Any:
        """The outputs of all microbatches, in the batch's order; those without weight run for theirs now."""
        left = [index for index in range(len(self._plan)) if index not in self._indices]
        if left and self._around.in_step:
            raise ValueError(
                f"fn must return the loss alone where {len(left)} of {len(self._plan)} microbatches have no "
                "weight under FSDP2, not (loss, outputs): they are not run"
            )
        with torch.no_grad():
            for index in left:
                (micro,) = feed([self._micros[index]], self._around.device)
                self._parts[index] = mapped(loss_and_outputs(self._fn(micro))[1], _detached)
        if len(self._parts) < len(self._plan):
            raise ValueError(
                f"fn must return (loss, outputs) for all {len(self._plan)} microbatches or for none, not for "
                f"{len(self._parts)}"
            )
        parts = [self._parts.pop(index) for index in range(len(self._plan))]
        return self._whole.joined(parts, self._plan, "fn's outputs")


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


@final
class CachedBackwardPass:
    """A loss over the representations of the whole batch, with the encoder in chunks: exact.

    Every chunk runs forward twice: without a graph for the representations, and with one for the gradients,
    from the same random numbers.
    """

    def __init__(
        self,
        encode: Callable[[Any], Any],
        loss_fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Piece],
        around: Around,
    ) -> None:
        self._encode = encode
        self._loss_fn = loss_fn
        self._whole = whole
        self._plan = plan
        self._micros = whole.micros(plan)
        self._around = around
        self.at = -1  # the microbatch that runs; none so far
        self.in_loss = False
        self.loss: Any = None
        self.outputs: Any = None

    def __call__(self) -> None:
        loss = self._in_one() if len(self._micros) == 1 else self._chunked()
        self.loss = self._around.told(loss)

    def _in_one(self) -> torch.Tensor:
        (micro,) = feed(self._micros, self._around.device)
        representations = self._encode(micro)
        if self._whole.trimmer is not None:  # sorted by length: `loss_fn` gets the batch's own order
            representations = self._whole.joined([representations], self._plan, "encode's output")
        else:
            check_one(representations, self._whole.length, "encode's output")
        return self._backward(representations)

    def _backward(self, representations: Any) -> torch.Tensor:
        around = self._around
        loss, outputs = loss_and_outputs(self._loss_fn(representations))
        check_loss(loss, "loss_fn")
        self.outputs = mapped(outputs, _detached)
        return around.backward(loss, "loss_fn", look=around.look)

    def _chunked(self) -> torch.Tensor:
        representations, rows, states = self._representations()
        self.in_loss = True
        loss = self._backward(representations)
        self.in_loss = False
        gradients = [tensor.grad for tensor in tensors_of(representations)]
        del representations
        around = self._around
        after = around.rewind.random_states()
        around.rewind.buffers_back()
        begin, graphs = [0] * len(gradients), 0
        with ExactStatistics(around.layers) as exact:
            for index, micro in enumerate(feed(self._micros, around.device)):
                self.at = index
                exact.next_microbatch()
                _put(states[index])
                around.watch.begin(index)
                graphs += self._again(micro, gradients, begin, rows[index])
                around.watch.end(index)
                del micro
                begin = [start + count for start, count in zip(begin, rows[index], strict=True)]
            exact.apply()
        if around.alone and not graphs and all(leaf.grad is None for leaf in around.rewind.leaves):
            raise ValueError(
                "encode must return tensors that require grad, not ones without: is the model frozen, or its "
                "output detached or made under torch.no_grad?"
            )
        _put(after)
        return loss

    def _representations(self) -> tuple[Any, list[list[int]], list[list[rng.Undo]]]:
        """All of them as leaves of a new graph, the rows of each chunk, and its random numbers."""
        outputs, rows, states = [], [], []
        with torch.no_grad():
            for index, micro in enumerate(feed(self._micros, self._around.device)):
                self.at = index
                states.append(self._around.rewind.random_states())
                outputs.append(self._encode(micro))
                del micro
                rows.append([tensor.size(0) if tensor.dim() else 0 for tensor in tensors_of(outputs[-1])])
            whole = self._whole.joined(outputs, self._plan, "encode's output", is_ours=True)
        # Older torch keeps cast copies of the weights that were made without a graph: they must not serve
        # the second pass, in which no gradient would reach the weights.
        torch.clear_autocast_cache()
        return mapped(whole, _as_leaf), rows, states

    def _again(
        self, micro: Any, gradients: list[torch.Tensor | None], begin: list[int], rows: list[int]
    ) -> bool:
        """Backward of one chunk; whether it had a graph (not where all its rows are masked)."""
        tensors = tensors_of(self._encode(micro))
        if [tensor.size(0) if tensor.dim() else 0 for tensor in tensors] != rows:
            raise ValueError("encode must return the same rows when it is called again with the same samples")
        pairs = [
            (tensor, self._part(gradient, tensor, start))
            for tensor, gradient, start in zip(tensors, gradients, begin, strict=True)
            if gradient is not None and tensor.requires_grad
        ]
        if pairs:
            if self._around.look is not None and self.at == 0:
                self._around.look([one for one, _ in pairs])
            # The same as the backward of sum(tensor * gradient), without making that sum.
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])
        return any(tensor.requires_grad for tensor in tensors)

    def _part(self, gradient: torch.Tensor, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """What belongs to this microbatch of the gradient of all representations."""
        if self._whole.trimmer is None:
            return gradient[start : start + tensor.size(0)]
        samples: Any = self._plan[self.at].samples
        part = gradient.index_select(0, torch.tensor(samples, device=gradient.device))
        for dim in range(1, tensor.dim()):  # one value a token: it was padded to the batch's width
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


def _put(states: list[rng.Undo]) -> None:
    for undo in states:
        undo()


def tensors_of(node: Any) -> list[torch.Tensor]:
    """The tensors in a structure, in order."""
    if isinstance(node, torch.Tensor):
        return [node]
    return [tensor for _, value in children(node) or () for tensor in tensors_of(value)]


@final
class ForwardPass:
    """Calls of `fn` for what is left of a batch; outputs are kept as they come."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        whole: Batch,
        plan: Sequence[Piece],
        device: torch.device | None,
        begin: Callable[[], Rewind],
        outputs: list[Any],
        done: list[Piece],
        watch: PassWatch,
    ) -> None:
        self._fn = fn
        self._whole = whole
        self._plan = plan
        self._device = device
        self._begin = begin
        self._outputs = outputs
        self._done = done
        self._watch = watch
        self.at = -1
        self.mark: Rewind | None = None  # what a failure of the present microbatch goes back to

    def __call__(self) -> None:
        micros = self._whole.micros(self._plan, self._done)
        for index, micro in enumerate(feed(micros, self._device)):
            self.at = index
            self.mark = self._begin()
            self._watch.begin(index)
            self._outputs.append(self._fn(micro))
            self._done.append(self._plan[index])
            self._watch.end(index)
            del micro
