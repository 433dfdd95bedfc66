"""Changes that keep less state: an 8-bit optimizer, and LoRA in place of training every weight.

Rules: as in `what_if.py`. Both are traced as the libraries that people take for them allocate
(bitsandbytes, PEFT), whether or not these are installed; tests compare them with traces of the real ones.
Both are advice: they train otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from batchfit._engine.sharding.model_blocks import repeated_blocks
from batchfit._engine.torch_private.fake import mark_parameter
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.workload.reachable import StepReach
from batchfit._explain.what_if import ADAMS, Change, optimizers_of
from batchfit.workload import Workload

_BLOCK = 256  # elements with one scale in common, as in bitsandbytes
_LEAST_IN_8_BITS = 4096  # elements; smaller tensors keep their state in fp32 there
_RANK = 16
_MOSTLY = 0.5  # where less of the weights is trained, it is LoRA or the like already


def eight_bit(reach: StepReach) -> list[Change]:
    """Adam's two states in a byte each, as bitsandbytes keeps them."""
    adams = [one for one in optimizers_of(reach) if type(one) in ADAMS]
    if not adams:
        return []
    name = type(adams[0]).__name__
    return [
        Change(
            f"an 8-bit {name}",
            f"bitsandbytes.optim.{name}8bit(...) in the place of torch.optim.{name}",
            "optimizer state in a byte per number, with a scale per 256",
            "optimizer",
            (partial(_in_8_bits, adams),),
            same_result=False,
        )
    ]


@contextlib.contextmanager
def _in_8_bits(adams: Sequence[Optimizer], _: Workload, faked: Faked) -> Iterator[None]:
    """Adam's `step` makes such state and nothing beside it; `Faked` restores the optimizer."""
    for optimizer in adams:
        _forget_state(optimizer, faked)
        vars(optimizer)["step"] = partial(_step_in_8_bits, optimizer)
    yield


@torch.no_grad()
def _step_in_8_bits(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
    if closure is not None:
        with torch.enable_grad():
            closure()
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one.grad is None or optimizer.state[one]:
                continue
            state = optimizer.state[one]
            for name in ("state1", "state2"):
                if one.numel() < _LEAST_IN_8_BITS:
                    state[name] = torch.zeros_like(one, dtype=torch.float32)
                else:
                    state[name] = torch.zeros_like(one, dtype=torch.uint8)
                    state[f"absmax_{name}"] = one.new_zeros(-(-one.numel() // _BLOCK), dtype=torch.float32)


def lora(reach: StepReach) -> list[Change]:
    """Adapters at the linear layers of the repeated blocks; every other weight is frozen."""
    workload = reach.workload
    model = workload.model
    if workload.kind != "training" or workload.optimizer is None or not isinstance(model, nn.Module):
        return []
    layers = [one for found in repeated_blocks(model) for block in found.blocks for one in _linear_in(block)]
    weights = list(model.parameters())
    trained = sum(one.numel() for one in weights if one.requires_grad)
    if not layers or trained < _MOSTLY * sum(one.numel() for one in weights):
        return []
    return [
        Change(
            f"LoRA (rank {_RANK})",
            f'peft.get_peft_model(model, peft.LoraConfig(r={_RANK}, target_modules="all-linear")) '
            "before the optimizer is made",
            "the weights stay as they are, and adapters of them are trained",
            "weights",
            (partial(_with_adapters, model, layers),),
            same_result=False,
        )
    ]


def _linear_in(block: nn.Module) -> list[nn.Module]:
    # `Conv1D` of transformers is a linear layer, too, with its weight transposed.
    return [one for one in block.modules() if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"]


@contextlib.contextmanager
def _with_adapters(
    model: nn.Module, layers: Sequence[nn.Module], workload: Workload, faked: Faked
) -> Iterator[None]:
    """Each layer's forward goes through an adapter as well; fakes are thrown away after the trace."""
    for one in model.parameters():
        one.requires_grad_(False)
        one.grad = None
    adapters: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for layer in layers:
            weight: Any = layer.weight
            out, into = weight.shape if isinstance(layer, nn.Linear) else reversed(weight.shape)
            down = _adapter(faked, _RANK, into)
            up = _adapter(faked, out, _RANK)
            adapters += [down, up]
            stack.enter_context(replaced(layer, "forward", partial(_adapted, layer.forward, down, up)))
        optimizer = workload.optimizer
        _forget_state(optimizer, faked)
        for number, group in enumerate(optimizer.param_groups):
            group["params"] = adapters if number == 0 else []
        yield


def _adapter(faked: Faked, rows: int, columns: int) -> Tensor:
    """A weight more; PEFT keeps it in fp32 beside weights in half precision."""
    made = faked.results.empty((rows, columns), (columns, 1), torch.float32, faked.device)
    made.requires_grad_(True)
    mark_parameter(made)
    faked.holding.learns("adapter", made)
    faked.holding.add("adapter", made, "weights")
    return made


def _adapted(forward: Callable[..., Any], down: Tensor, up: Tensor, x: Tensor) -> Any:
    plain = forward(x)
    made = nn.functional.linear(nn.functional.linear(x.to(down.dtype), down), up)
    return (plain + made * 2.0).to(plain.dtype)


def _forget_state(optimizer: Optimizer, faked: Faked) -> None:
    """What it kept so far is gone."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor):
                with faked.mode:
                    value.data = value.new_empty(0)
    optimizer.state.clear()
