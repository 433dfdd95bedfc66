"""What a workload is made of, checked: wrong arguments are refused before anything runs.

Rules: the message names the argument, what it must be and what it is.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from batchfit._arguments import check_flag
from batchfit._engine.batch.sources import takes_arguments
from batchfit._engine.batch.structure import is_array
from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.torch_private.optimizers import has_step_hook

_STATELESS = (str, bytes, int, float, complex, type, FunctionType, BuiltinFunctionType, type(None))


def checked_step(step: Any) -> Callable[[int], object]:
    if not callable(step):
        raise TypeError(f"step must be a callable step(batch_size), not {step!r}")
    if not takes_arguments(step, 1):
        raise TypeError(
            f"step must take the batch size as its one positional argument, not {step!r}; "
            "a function that makes the workload has to be called first"
        )
    checked: Callable[[int], object] = step
    return checked


def checked_state(state: Any) -> tuple[object, ...]:
    """The parts of the state; one part alone is accepted, also one that could be iterated over.

    The snapshot says exactly what can be restored; here only what never has any state is refused.
    """
    if state is None:
        return ()
    alone = isinstance(state, (nn.Module, torch.Tensor, Mapping, *_STATELESS)) or hasattr(state, "state_dict")
    parts = (state,) if alone or is_array(state) or not isinstance(state, Iterable) else tuple(state)
    for part in parts:
        if isinstance(part, _STATELESS):
            raise TypeError(
                f"state must hold modules, optimizers, schedulers, scalers or tensors, not {part!r}"
            )
    return parts


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r:.80}; several go into a Workload")


def check_optimizer(optimizer: Any, *, scaler: Any) -> None:
    if optimizer is None:
        if scaler is not None:
            raise ValueError(f"scaler must be None where optimizer is None, not {scaler!r}")
        return
    if not (callable(getattr(optimizer, "step", None)) and callable(getattr(optimizer, "zero_grad", None))):
        raise TypeError(
            f"optimizer must be one optimizer or None, not {optimizer!r:.80}; several go into a Workload"
        )
    if scaler is not None and not (hasattr(scaler, "unscale_") and hasattr(scaler, "update")):
        raise TypeError(f"scaler must be a torch.amp.GradScaler or None, not {scaler!r}")


def check_belongs(optimizer: Any, model: nn.Module, others: Iterable[object]) -> None:
    """Refuse an optimizer that was made for a copy of the model; warn of one that holds nothing of it.

    The second may be right: what it moves may be in `loss_fn` alone (a head, a prompt, the input), or it
    keeps copies of its own (in higher precision, on the host).
    """
    moved = [one for one in tensors_in([optimizer]) if one.requires_grad]
    own = [one for one in model.parameters() if one.requires_grad]
    known = {id(one) for one in (*model.parameters(), *tensors_in(others))}
    if not moved or not own or any(id(one) in known for one in moved):
        return
    # One of torch's moves its own parameters by their own gradients, unless a hook makes up for that.
    plain = type(optimizer).__module__.startswith("torch.optim.")
    hooked = plain and has_step_hook(optimizer)
    if plain and not hooked and _kinds(moved) == _kinds(own):
        raise ValueError(
            f"optimizer must hold the model's parameters, not those of a copy: each of its {len(moved)} is "
            "like one of the model's, and none is one. Make it from model.parameters()"
        )
    warnings.warn(
        f"the optimizer ({type(optimizer).__name__}) holds none of the model's parameters. If it was made "
        "for another model, make it from model.parameters(). If it moves what only loss_fn knows, declare "
        "that: state=[head].",
        stacklevel=3,
    )


def _kinds(tensors: Iterable[torch.Tensor]) -> Counter[tuple[object, ...]]:
    return Counter((None if is_lazy(one) else one.shape, one.dtype, one.device) for one in tensors)


def check_loss_fn(loss_fn: Any) -> None:
    if type(loss_fn).__module__ == "torch.nn.modules.loss":
        raise TypeError(
            f"loss_fn must be a callable loss_fn(model, batch), not {loss_fn!r}, which knows no model: "
            "lambda model, batch: criterion(model(batch[0]), batch[1])"
        )
    if not callable(loss_fn) or not takes_arguments(loss_fn, 2):
        raise TypeError(f"loss_fn must be a callable loss_fn(model, batch), not {loss_fn!r}")


def check_full_length(options: Mapping[str, Any], max_new_tokens: int) -> None:
    """Nothing among the keywords may set another length or end a sample early."""
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
        raise TypeError(f"max_new_tokens must be a positive integer, not {max_new_tokens!r}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a positive integer, not {max_new_tokens!r}")
    shortest = options.get("min_new_tokens", max_new_tokens)
    if shortest != max_new_tokens:
        raise ValueError(
            f"min_new_tokens must be max_new_tokens ({max_new_tokens}) or left out, not {shortest!r}: "
            "generation is forced to the full length"
        )
    for name in ("max_length", "min_length", "max_time", "stop_strings", "stopping_criteria"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name} must be left out, not {options[name]!r}: generation is forced to max_new_tokens"
            )


def check_generated(output: Any, batch: Any, model: Any, max_new_tokens: int) -> None:
    """A model's own configuration may still end it early (`max_time`): such a trial would prove nothing."""
    tokens = getattr(output, "sequences", output)
    prompt = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    has_encoder = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    if has_encoder is None or not (isinstance(tokens, torch.Tensor) and isinstance(prompt, torch.Tensor)):
        return
    # A decoder goes on from the prompt; one behind an encoder begins with a token of its own.
    made = tokens.shape[-1] - (1 if has_encoder else prompt.shape[-1])
    if made < max_new_tokens:
        raise ValueError(
            f"model.generate stopped after {made} of {max_new_tokens} new tokens: take max_time, "
            "stop_strings and other early ends out of its generation_config"
        )


def check_step_settings(clip_norm: Any, accumulate: object, keep_outputs: object) -> None:
    """Refuse wrong settings of a training step."""
    is_number = isinstance(clip_norm, int | float) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (is_number and clip_norm > 0):
        raise ValueError(f"clip_norm must be a positive number or None, not {clip_norm!r}")
    if type(accumulate) is not int or accumulate < 1:
        raise ValueError(f"accumulate must be a positive integer, not {accumulate!r}")
    check_flag("keep_outputs", keep_outputs)
