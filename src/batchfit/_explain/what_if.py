"""Changes to a step for the time of a trace: checkpointing, bf16 or fp16, a chunked loss, another optimizer.

Rules:
- A change is a context, `change(workload, faked)`, entered while the state is fake: it works on the fakes and
  on the step's own variables, and leaves both as it found them. The user's tensors are never seen by it.
- What is traced is the changed program, never a formula.
- A change knows whether it applies: what is on already, or cannot be known, is not offered.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.sharding.model_blocks import RepeatedBlocks, repeated_blocks
from batchfit._engine.torch_private.modules import BatchNorm
from batchfit._engine.torch_private.optimizers import set_takes_scaler
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.workload.reachable import StepReach
from batchfit._explain.step_variables import changed_variable, mapped, step_variable
from batchfit.workload import Workload

Group = Literal["checkpointing", "dtype", "loss", "optimizer", "weights", "length"]
Context = Callable[[Workload, Any], AbstractContextManager[Any]]
ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_SHORTEST = 16  # a sequence that is cut has at least this length
_CHUNKS = 16  # of a loss
# The switch of models of transformers, by its name since 5.23 and by that before.
_SWITCHES = ("activation_checkpointing_enable", "gradient_checkpointing_enable")


@final
@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do otherwise: what, how to write it, what it costs, and the contexts that do it.

    Of the changes of one `group`, one at a time makes sense. `same_result` says that training goes on as
    before, up to rounding; others are advice.
    """

    name: str
    how: str
    cost: str
    group: Group
    contexts: tuple[Context, ...]
    same_result: bool = True


# -- activation checkpointing


def checkpointing(reach: StepReach, learning: Container[int] | None = None) -> list[Change]:
    """Checkpointing of repeated blocks, from the outermost to the innermost; empty where it is on already.

    `learning` are the ids of the modules whose outputs need gradients in the step (`StepTraits.learning`): an
    EMA copy or a teacher keeps no activations, so there is nothing to save.
    """
    workload = reach.workload
    if workload.kind in ("inference", "generation"):
        return []
    roots = [part for part in reach.parts if isinstance(part, nn.Module)]
    if any(getattr(one, "gradient_checkpointing", False) for root in roots for one in root.modules()):
        return []
    found = []
    level = [one for root in roots for one in repeated_blocks(root)]
    while level:
        if learning is not None:
            kept = [(one, tuple(block for block in one.blocks if id(block) in learning)) for one in level]
            level = [RepeatedBlocks(one.kind, blocks) for one, blocks in kept if blocks]
        if level:
            found.append(_checkpointing(level, workload.model))
        level = [inner for outer in level for block in outer.blocks for inner in repeated_blocks(block)]
    return found


def _checkpointing(level: list[RepeatedBlocks], model: Any) -> Change:
    blocks = [block for one in level for block in one.blocks]
    kinds = Counter(one.kind for one in level for _ in one.blocks)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    switch = next((name for name in _SWITCHES if hasattr(model, name)), "")
    if switch and _switched_alone(model, blocks):
        how = f'model.{switch}({{"use_reentrant": False}})'
    else:
        how = (
            f"for each {' and '.join(kinds)} m: m.forward = functools.partial("
            "torch.utils.checkpoint.checkpoint, m.forward, use_reentrant=False)"
        )
    cost = "one more forward pass of these blocks (about a third more time)"
    if any(isinstance(one, BatchNorm) for block in blocks for one in block.modules()):
        cost += "; BatchNorm's running statistics are updated twice per step"
    name = f"activation checkpointing of each of {named}"
    return Change(name, how, cost, "checkpointing", (_Checkpointed(tuple(blocks)),))


def _switched_alone(model: Any, blocks: list[nn.Module]) -> bool:
    """Whether transformers' own switch checkpoints these blocks, and no others."""
    if not isinstance(model, nn.Module):
        return False
    switched = [
        one
        for one in model.modules()
        if any(base.__name__ == "GradientCheckpointingLayer" for base in type(one).__mro__)
    ]
    return set(map(id, switched)) == set(map(id, blocks))


@dataclass(frozen=True, slots=True)
class _Checkpointed:
    """Each block's forward goes through `torch.utils.checkpoint`."""

    blocks: tuple[nn.Module, ...]

    @contextlib.contextmanager
    def __call__(self, workload: Workload, faked: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for block in self.blocks:
                forward = partial(checkpoint, block.forward, use_reentrant=False)
                stack.enter_context(replaced(block, "forward", forward))
            yield


# -- dtypes


def lower_precision(reach: StepReach, gpu: Gpu, *, uses_autocast: bool) -> list[Change]:
    """Half precision by autocast and for parameters, where the program is in fp32.

    It is bf16 where the GPU has it. Before Ampere it is fp16, which needs a GradScaler to train with, and
    parameters in fp16 are for inference only.
    """
    workload = reach.workload
    models = [part for part in reach.parts if isinstance(part, nn.Module)]
    if not any(tensor.dtype is torch.float32 for model in models for tensor in model.parameters()):
        return []
    found = []
    learns = workload.kind in ("training", "step")
    dtype = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
    short = "bf16" if dtype is torch.bfloat16 else "fp16"
    if not uses_autocast and step_variable(workload, "context") is not None:
        how = f'with torch.autocast("cuda", {dtype}): {"forward and loss" if learns else "forward"}'
        cost = "exactness of products and convolutions; it is also faster"
        if learns and short == "fp16":
            how += "; torch.amp.GradScaler around backward and step"
            cost = f"a GradScaler, since small gradients vanish in fp16 (no bf16 on this GPU); {cost}"
        found.append(Change(f"{short} autocast", how, cost, "dtype", (partial(_autocast, dtype),)))
    if learns and short == "fp16":
        return found
    if learns:
        name = "bf16 parameters (with them gradients, optimizer state)"
        how = "model.to(torch.bfloat16) before the optimizer is made"
        cost = (
            "accuracy: updates below 1/256 of a weight are lost (keep fp32 copies, or round stochastically)"
        )
    else:
        name = f"{short} parameters"
        how = f"model.to({dtype}), and its inputs"
        cost = f"accuracy: numbers have {8 if short == 'bf16' else 11} significant bits"
    contexts = (partial(_parameters_in, dtype),)
    found.append(Change(name, how, cost, "dtype", contexts, same_result=not learns))
    return found


@contextlib.contextmanager
def _autocast(dtype: torch.dtype, workload: Workload, faked: Any) -> Iterator[None]:
    kind = faked.device.type
    with changed_variable(workload, "context", lambda _: lambda: torch.autocast(kind, dtype=dtype)):
        yield


@contextlib.contextmanager
def _parameters_in(dtype: torch.dtype, workload: Workload, faked: Faked) -> Iterator[None]:
    """As `model.to(dtype)` before the optimizer: state that exists already goes along.

    The fakes are thrown away after the trace, so there is nothing to restore in them.
    """
    with faked.mode, torch.no_grad():
        for _, tensor, _ in faked.held():
            if tensor.is_floating_point() and tensor.dtype is not dtype:
                tensor.data = tensor.data.to(dtype)

    def lowered(source: Callable[[int], Any]) -> Callable[[int], Any]:
        return lambda size: mapped(
            source(size), lambda tensor: tensor.to(dtype) if tensor.dtype is torch.float32 else tensor
        )

    with (
        changed_variable(workload, "source", lowered),
        changed_variable(workload, "context", lambda _: nullcontext),
    ):
        yield


# -- the loss


def chunked_loss(workload: Workload) -> list[Change]:
    """A cross-entropy that keeps no log-probabilities and makes no gradient beside the logits."""
    if workload.kind not in ("training", "step"):
        return []
    return [
        Change(
            "a cross-entropy in chunks, its gradient in the place of the logits",
            "liger_kernel's LigerCrossEntropyLoss; with less memory still, the last Linear and the loss in "
            "one: torch.nn.LinearCrossEntropyLoss (torch 2.13)",
            "nothing that training sees; the logits are overwritten, so metrics come before the loss",
            "loss",
            (_in_chunks,),
        )
    ]


@contextlib.contextmanager
def _in_chunks(workload: Workload, faked: Any) -> Iterator[None]:
    """`torch.nn.functional.cross_entropy`, as `nn.CrossEntropyLoss` and transformers call it."""
    plain = F.cross_entropy

    def cross_entropy(input: Tensor, target: Tensor, *args: Any, **more: Any) -> Tensor:
        classes = input.dim() == 2 and not target.is_floating_point() and input.requires_grad
        # What is not small beside a step: a row for each token, and many of them.
        if not classes or args or set(more) - {"ignore_index", "reduction"} or len(input) < 4 * _CHUNKS:
            return plain(input, target, *args, **more)
        each = more.get("reduction", "mean") == "none"
        loss: Tensor = _ChunkedCrossEntropy.apply(input, each)  # type: ignore[no-untyped-call]
        return loss

    with replaced(F, "cross_entropy", cross_entropy):
        yield


@final
class _ChunkedCrossEntropy(torch.autograd.Function):
    """Allocates as such a loss does, on fakes: softmax of a chunk at a time, written over the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, each: bool) -> Tensor:
        for chunk in logits.chunk(_CHUNKS):
            chunk.copy_(torch.softmax(chunk, -1))
        ctx.save_for_backward(logits)
        return logits.new_zeros(len(logits) if each else ())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits.mul_(gradient.unsqueeze(-1)), None


# -- optimizers


def update_changes(reach: StepReach) -> list[Change]:
    """fused=True and foreach=False, for optimizers that know these and do not have them yet."""
    optimizers = optimizers_of(reach)
    groups = [group for one in optimizers for group in one.param_groups]
    if not groups:
        return []
    kind = type(optimizers[0]).__name__
    found = []
    if all(group.get("fused", True) in (None, False) for group in groups):
        name, cost = "a fused optimizer step", "nothing, and is faster"
        how = f"torch.optim.{kind}(..., fused=True)"
        found.append(Change(name, how, cost, "optimizer", (partial(_fused, optimizers),)))
    if all(group.get("foreach", False) is not False and not group.get("fused") for group in groups):
        name, cost = "an optimizer step parameter by parameter", "a slower optimizer step"
        how = f"torch.optim.{kind}(..., foreach=False)"
        found.append(Change(name, how, cost, "optimizer", (partial(_one_by_one, optimizers),)))
    return found


def smaller_optimizer(reach: StepReach) -> list[Change]:
    """One state in place of Adam's two, as advice: it trains otherwise."""
    adams = [one for one in optimizers_of(reach) if isinstance(one, ADAMS)]
    if not adams:
        return []
    return [
        Change(
            f"SGD with momentum in place of {type(adams[0]).__name__}",
            "torch.optim.SGD(model.parameters(), lr=..., momentum=0.9)",
            "a search for its learning rate; transformers train worse with it",
            "optimizer",
            (partial(_sgd, adams),),
            same_result=False,
        )
    ]


@contextlib.contextmanager
def _fused(optimizers: Sequence[Optimizer], _: Workload, faked: Faked) -> Iterator[None]:
    """The flags are the fake groups'; `Faked` restores the real ones."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        set_takes_scaler(optimizer)
        # A fused step counts on the device.
        for state in optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                with faked.mode:
                    state["step"] = torch.zeros((), device=faked.device)
    yield


@contextlib.contextmanager
def _one_by_one(optimizers: Sequence[Optimizer], _: Workload, __: Faked) -> Iterator[None]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["foreach"] = False
    yield


@contextlib.contextmanager
def _sgd(adams: Sequence[Optimizer], _: Workload, faked: Faked) -> Iterator[None]:
    """Adam's `step` is SGD's for the trace, and what it kept is gone; `Faked` restores the optimizer."""
    for optimizer in adams:
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    with faked.mode:
                        value.data = value.new_empty(0)
        optimizer.state.clear()
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        other = torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
        vars(optimizer)["step"] = other.step
    yield


def optimizers_of(reach: StepReach) -> list[Optimizer]:
    """The optimizers that a step can reach."""
    return [part for part in reach.parts if isinstance(part, Optimizer)]


# -- the batch


def shorter_sequence(workload: Workload, length: int) -> list[Change]:
    """Half of the sequence, where batches have integers of shape [n, length] (`StepTraits.length`)."""
    if workload.kind != "training" or length < _SHORTEST or step_variable(workload, "source") is None:
        return []
    half = length // 2

    def cut(tensor: Tensor) -> Tensor:
        # As a batch that was made that short: contiguous, and what was cut off is freed.
        fits = tensor.dim() >= 2 and tensor.shape[1] == length
        return tensor[:, :half].contiguous() if fits else tensor

    @contextlib.contextmanager
    def shortened(workload: Workload, faked: Any) -> Iterator[None]:
        with changed_variable(workload, "source", lambda source: lambda size: mapped(source(size), cut)):
            yield

    return [
        Change(
            f"sequences of {half} in place of {length}",
            f"cut the samples to {half} tokens",
            "context: a sample is half as long, so compare tokens, not samples",
            "length",
            (shortened,),
            same_result=False,
        )
    ]
