"""Workloads: a step together with the state that a trial must put back.

Rules: arguments are checked when the workload is made, before any device work. A step says which phase
it is in. Nothing outlives a step: the batch and the loss live until it ends, as they do in a loop written
by hand, logits die inside `loss_fn`, and no tensor is left for the next step to find. (A loop that keeps
its last output while the next batch runs needs room for one more output than a step here.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, final

import torch
from torch import nn

from batchfit._torch import phase
from batchfit._torch.batches import BatchSource, CollateFn, Longest, batch_source, takes_arguments
from batchfit._torch.structure import to_device
from batchfit._torch.workload_parts import (
    check_belongs,
    check_full_length,
    check_generated,
    check_loss,
    check_loss_fn,
    check_model,
    check_optimizer,
    checked_state,
    checked_step,
    is_positive_number,
)

Kind = Literal["step", "training", "inference", "generation"]
Autocast = torch.dtype | torch.autocast | Callable[[], AbstractContextManager[Any]]


@final
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Workload:
    """A step, and the state that a trial must put back.

        workload = Workload(step, state=[generator, discriminator, opt_g, opt_d, ema])

    `step(batch_size)` runs one step of that many samples. `state` holds the modules, optimizers,
    schedulers, scalers and tensors that the step changes, or one such thing alone; an empty list says
    that it changes none. Without `state` the workload is not `declared`: what the step changes stays
    changed. `kind` is "step" here; `training`, `inference` and `generation` make the other kinds, which
    know their `model` and `optimizer`.
    """

    step: Callable[[int], object]
    state: tuple[object, ...]
    declared: bool
    kind: Kind
    model: Any
    optimizer: Any
    _parts: Mapping[str, Any]  # what else the step is made of, for the store's key

    def __init__(self, step: Callable[[int], object], *, state: object = None) -> None:
        self._set(step=checked_step(step), state=checked_state(state), declared=state is not None)
        self._set(kind="step", model=None, optimizer=None, _parts={})

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def with_step(self, step: Callable[[int], object]) -> Workload:
        """This workload with another step over the same state: one that counts, logs or fails."""
        twin = Workload(step, state=self.state if self.declared else None)
        twin._set(kind=self.kind, model=self.model, optimizer=self.optimizer)
        twin._set(_parts={**self._parts, "step": step})
        return twin

    def _watched(self, step: Callable[[int], object]) -> Workload:
        """This workload with a step that only looks on while it runs this one's: for the store, the same."""
        twin = self.with_step(step)
        twin._set(_parts=self._parts)
        return twin

    @property
    def _samples(self) -> int | None:
        """How many samples its dataset has; None where it has none, or makes batches without one."""
        source = self._parts.get("source")
        return len(source) if isinstance(source, Longest) else None

    def _brief(self, new_tokens: int) -> Workload | None:
        """This generation, of fewer tokens; None where that is not much less, or the step is not our own."""
        options = self._parts.get("options", {})
        if self.model is None or "step" in self._parts or options.get("max_new_tokens", 0) < 4 * new_tokens:
            return None
        fewer = {**options, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        return _generation(self.model, self._parts["source"], fewer)

    def __repr__(self) -> str:
        what = getattr(self.step, "__qualname__", None) if self.model is None else type(self.model).__name__
        state = ", ".join(type(part).__name__ for part in self.state) if self.declared else "not declared"
        return f"<Workload {self.kind} {what or type(self.step).__name__}, state: {state or 'none'}>"


def as_workload(obj: object) -> Workload:
    """A `Workload` as it is; a plain callable `step(batch_size)` as a workload without declared state."""
    if isinstance(obj, Workload):
        return obj
    if isinstance(obj, nn.Module) or not callable(obj) or isinstance(obj, type):
        shown = f"the model {type(obj).__name__}" if isinstance(obj, nn.Module) else repr(obj)
        hint = "; a function is named like that with isolate=True only" if isinstance(obj, str) else ""
        raise TypeError(f"workload must be a Workload or a callable step(batch_size), not {shown}{hint}")
    return Workload(obj)


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    make_batch: Any,
    *,
    collate_fn: CollateFn | None = None,
    autocast: Autocast | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_norm: float | None = None,
    state: object = (),
) -> Workload:
    """A training step, as a loop written by hand would do it.

        workload = training(model, optimizer, lambda model, batch: model(**batch).loss, example_batch)

    One step: a batch on the model's device, `zero_grad`, forward and loss (under `autocast`: a dtype or a
    function that makes the context), backward (scaled), unscale and clip, `optimizer.step`,
    `scaler.update`. An LR scheduler takes no memory, so it is not stepped. `loss_fn(model, batch)` returns
    the mean loss. `make_batch` is a callable `make_batch(n)`, a map-style dataset (with its `collate_fn`;
    the longest samples are used), a DataLoader of one, or one example batch, repeated to size. With
    `optimizer=None` a step is forward and backward only. `state` names what else the step changes. A model in
    eval mode is in training mode during the step; one that is in training mode already is left as it is, with
    any part frozen in eval mode. Several models or optimizers: write the step and give it to `Workload`.
    """
    check_model(model)
    check_optimizer(optimizer, scaler=scaler)
    others = checked_state(state)
    if optimizer is not None:
        check_belongs(optimizer, model, others)
    check_loss_fn(loss_fn)
    if clip_norm is not None and not is_positive_number(clip_norm):
        raise ValueError(f"clip_norm must be a positive number or None, not {clip_norm!r}")
    context = _autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)
    clears = model if optimizer is None else optimizer

    def step(batch_size: int) -> None:
        with _mode(model, training=True):
            phase.enter("batch")
            batch = to_device(source(batch_size), _device_of(model))
            phase.enter("forward")
            clears.zero_grad(set_to_none=True)
            with context():
                loss = loss_fn(model, batch)
            check_loss(loss, "loss_fn")
            phase.enter("backward")
            _backward(loss, scaler)
            phase.enter("optimizer")
            _update(model, optimizer, scaler=scaler, clip_norm=clip_norm)
        phase.clear()

    known = [part for part in (model, optimizer, scaler) if part is not None]
    parts = {
        "source": source,
        "loss_fn": loss_fn,
        "autocast": autocast,
        "scaler": scaler,
        "clips": clip_norm is not None,
    }
    return _known(step, "training", model, optimizer, state=(*known, *others), parts=parts)


def batches(make_batch: Any, *, collate_fn: CollateFn | None = None) -> Callable[[int], Any]:
    """What makes the batches of a trial: `batches(dataset, collate_fn=collate)(32)`, as `training` does.

    For steps of one's own; `make_batch` as in `training`.
    """
    return batch_source(make_batch, collate_fn=collate_fn)


def inference(
    model: nn.Module,
    make_batch: Any,
    *,
    collate_fn: CollateFn | None = None,
    autocast: Autocast | None = None,
    forward: Callable[[Any, Any], object] | None = None,
) -> Workload:
    """A forward pass in eval mode under `torch.inference_mode`.

        workload = inference(model, dataset, collate_fn=collate, autocast=torch.bfloat16)

    `forward(model, batch)` defaults to `model(**batch)` for mappings, `model(*batch)` for tuples and
    `model(batch)` for anything else. `make_batch` as in `training`. The output is dropped when the step
    ends, before the next batch is made: a loop that still holds its last output while it runs the next
    batch needs room for that one too (`del output`, or keep it in a `Workload` of your own).
    """
    check_model(model)
    run: Any = _call_model if forward is None else forward
    if not callable(run) or not takes_arguments(run, 2):
        raise TypeError(f"forward must be a callable forward(model, batch) or None, not {forward!r}")
    context = _autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)

    def step(batch_size: int) -> None:
        with _mode(model, training=False):
            phase.enter("batch")
            batch = to_device(source(batch_size), _device_of(model))
            phase.enter("forward")
            with torch.inference_mode(), context():
                run(model, batch)
        phase.clear()

    parts = {"source": source, "forward": forward, "autocast": autocast}
    return _known(step, "inference", model, None, state=(model,), parts=parts)


def generation(
    model: Any,
    make_batch: Any,
    *,
    max_new_tokens: int,
    collate_fn: CollateFn | None = None,
    **generate_kwargs: Any,
) -> Workload:
    """`model.generate` forced to the full length: every sample gets `max_new_tokens` new tokens.

        workload = generation(model, prompts, max_new_tokens=256, num_beams=4)

    Any object with a `generate` that knows `max_new_tokens` and `min_new_tokens` will do. A batch that
    is a mapping goes as keywords, any other as the first argument; the remaining keywords go to
    `generate` as they are. `make_batch` as in `training`. In eval mode under `torch.inference_mode`.
    `model` may also be a function `generate(batch, max_new_tokens=...)`, which returns the tokens and has to
    make all of them; its batch stays where `make_batch` put it.
    """
    if isinstance(model, FunctionType | MethodType | functools.partial):
        return _generating(model, make_batch, max_new_tokens, collate_fn, generate_kwargs)
    if not callable(getattr(model, "generate", None)) or isinstance(model, type):
        raise TypeError(f"model must be an object with a generate method, not {type(model).__name__}")
    check_full_length(generate_kwargs, max_new_tokens)
    options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    return _generation(model, batch_source(make_batch, collate_fn=collate_fn), options)


def _generation(model: Any, source: BatchSource, options: dict[str, Any]) -> Workload:
    def step(batch_size: int) -> None:
        with _mode(model, training=False):
            phase.enter("batch")
            batch = to_device(source(batch_size), _device_of(model))
            phase.enter("forward")
            with torch.inference_mode():
                if isinstance(batch, Mapping):
                    output = model.generate(**batch, **options)
                else:
                    output = model.generate(batch, **options)
            check_generated(output, batch, model, options["max_new_tokens"])
        phase.clear()

    state = (model,) if isinstance(model, nn.Module) else ()
    return _known(step, "generation", model, None, state=state, parts={"source": source, "options": options})


def _generating(
    function: Callable[..., Any], make_batch: Any, max_new_tokens: int, collate_fn: Any, more: dict[str, Any]
) -> Workload:
    """Generation by a function of the user's."""
    check_full_length(more, max_new_tokens)
    options = {**more, "max_new_tokens": max_new_tokens}
    source = batch_source(make_batch, collate_fn=collate_fn)

    def step(batch_size: int) -> None:
        phase.enter("batch")
        batch = source(batch_size)
        phase.enter("forward")
        with torch.inference_mode():
            tokens = function(batch, **options)
        length = tokens.shape[-1] if isinstance(tokens, torch.Tensor) else max_new_tokens
        if length < max_new_tokens:
            raise ValueError(
                f"model must make all {max_new_tokens} new tokens of a sample, not {length}: "
                "a shorter answer needs less memory than the longest one will"
            )
        phase.clear()

    parts = {"source": source, "options": options, "function": function}
    return _known(step, "generation", None, None, state=(), parts=parts)


def _known(
    step: Callable[[int], None],
    kind: Kind,
    model: Any,
    optimizer: Any,
    *,
    state: object,
    parts: Mapping[str, Any],
) -> Workload:
    workload = Workload(step, state=state)
    workload._set(kind=kind, model=model, optimizer=optimizer, _parts=parts)
    return workload


def _backward(loss: Any, scaler: Any) -> None:
    """In a call of its own: the scaled loss is gone when it returns, as after `scale(loss).backward()`."""
    (loss if scaler is None else scaler.scale(loss)).backward()


def _update(model: nn.Module, optimizer: Any, *, scaler: Any, clip_norm: float | None) -> None:
    """What a step does once the gradients are there."""
    if clip_norm is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    elif optimizer is not None:
        optimizer.step()


def _call_model(model: Any, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextmanager
def _mode(model: Any, *, training: bool) -> Iterator[None]:
    """The model in that mode. One that is in it already is left alone, frozen parts and all."""
    if not isinstance(model, nn.Module) or model.training is training:
        yield
        return
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, flag in before:
            module.training = flag


def _device_of(model: Any) -> torch.device | None:
    """Where the model's batches go: to its first parameter or buffer; None where it says nothing."""
    if isinstance(model, nn.Module):
        for tensors in (model.parameters(), model.buffers()):
            for tensor in tensors:
                return tensor.device
        return None
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else None


def _autocast_context(autocast: Any, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    if autocast is None:
        return nullcontext
    if isinstance(autocast, torch.dtype):
        if autocast not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast must be torch.bfloat16 or torch.float16 as a dtype, not {autocast!r}")

        # The device is asked for at each step: the model may have moved since.
        def lowered() -> AbstractContextManager[Any]:
            device = _device_of(model)
            return torch.autocast("cpu" if device is None else device.type, dtype=autocast)

        return lowered
    if isinstance(autocast, torch.autocast):
        return lambda: autocast  # may be entered again and again, unlike other contexts
    # A context itself (`__enter__`) can as a rule be entered only once, and is callable as a decorator.
    is_context = hasattr(autocast, "__enter__") and not isinstance(autocast, type)
    if is_context or not callable(autocast) or not takes_arguments(autocast, 0):
        raise TypeError(
            "autocast must be None, a dtype or a function without arguments that makes a context, "
            f"not {autocast!r}"
        )
    make: Callable[[], AbstractContextManager[Any]] = autocast
    return make
