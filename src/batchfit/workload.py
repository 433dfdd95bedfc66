"""Workloads: a step together with the state that a trial must restore.

Rules: arguments are checked when the workload is made, before any device work. A step says which phase
it is in. In a trial, a timing or a trace the batch, the model's outputs and the loss live until the next
step's take their place, as the variables of a loop written by hand do (`_engine/workload/loop.py`); with
`keep_outputs=False` nothing outlives a step, and outputs die inside `loss_fn`.
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

from batchfit._arguments import check_flag
from batchfit._engine.batch.sources import BatchSource, CollateFn, Longest, batch_source, takes_arguments
from batchfit._engine.batch.structure import to_device
from batchfit._engine.device.tensors import check_loss
from batchfit._engine.workload import loop
from batchfit._engine.workload.checks import (
    check_belongs,
    check_full_length,
    check_generated,
    check_loss_fn,
    check_model,
    check_optimizer,
    check_step_settings,
    checked_state,
    checked_step,
)

Kind = Literal["step", "training", "inference", "generation"]
Autocast = torch.dtype | torch.autocast | Callable[[], AbstractContextManager[Any]]


@final
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Workload:
    """A step, and the state that a trial must restore.

        workload = Workload(step, state=[generator, discriminator, opt_g, opt_d, ema])

    `step(batch_size)` runs one step of that many samples. `state` holds the modules, optimizers,
    schedulers, scalers and tensors that the step changes, or one such thing alone; an empty list says
    that it changes none. Without `state` the workload is not `declared`: what the step changes stays
    changed. `kind` is "step" here; `training`, `inference` and `generation` make the other kinds, which
    know their `model` and `optimizer`. `batch_size` is that of one forward/backward in one process.
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
        """This workload with a step that observes this one's while it runs: the same for the store."""
        twin = self.with_step(step)
        twin._set(_parts=self._parts)
        return twin

    @property
    def _held(self) -> tuple[object, ...]:
        """What lies on the device that it runs on: its state and its model."""
        return (*self.state, self.model)

    @property
    def _samples(self) -> int | None:
        """How many samples its dataset has; None where it has none, or makes batches without one."""
        source = self._parts.get("source")
        return len(source) if isinstance(source, Longest) else None

    @property
    def _passes(self) -> int:
        """Over how many passes of `batch_size` samples a step accumulates gradients."""
        return int(self._parts.get("accumulate", 1))

    def _brief(self, new_tokens: int) -> Workload | None:
        """This generation, of fewer tokens; None where that is not much less, or the step is not our own."""
        options = self._parts.get("options", {})
        if self.model is None or "step" in self._parts or options.get("max_new_tokens", 0) < 4 * new_tokens:
            return None
        fewer = {**options, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        return _generation(self.model, self._parts["source"], fewer, keep_outputs=self._parts["keep_outputs"])

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
    accumulate: int = 1,
    keep_outputs: bool = True,
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

    The batch, what the model returned and the loss stay alive until those of the next step replace them, as
    in `for batch in loader: out = model(batch); loss = criterion(out, batch); ...`. With `keep_outputs=False`
    they do not: for a loop that deletes them, or computes its loss in a function. `accumulate=k`: k passes of
    `batch_size` samples each, one optimizer step; gradients are held in all forward passes but the first.
    """
    check_model(model)
    check_optimizer(optimizer, scaler=scaler)
    others = checked_state(state)
    if optimizer is not None:
        check_belongs(optimizer, model, others)
    check_loss_fn(loss_fn)
    check_step_settings(clip_norm, accumulate, keep_outputs)
    context = _autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)
    clears = model if optimizer is None else optimizer
    owner = object()

    def step(batch_size: int) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        with _mode(model, training=True):
            for number in range(loop.passes_of(accumulate)):
                loop.enter_phase("batch")
                batch = to_device(source(batch_size), _device_of(model))
                if kept is not None:
                    kept.batch = batch
                loop.enter_phase("forward")
                if number == 0:
                    clears.zero_grad(set_to_none=True)
                with context(), loop.catching(model, kept):
                    loss = loss_fn(model, batch)
                check_loss(loss, "loss_fn")
                if accumulate > 1:
                    loss = loss / accumulate
                if kept is not None:
                    kept.result = loss
                loop.enter_phase("backward")
                _backward(loss, scaler)
            loop.enter_phase("optimizer")
            _update(model, optimizer, scaler=scaler, clip_norm=clip_norm)
        loop.clear_phase()

    known = [part for part in (model, optimizer, scaler) if part is not None]
    parts = {
        "source": source,
        "loss_fn": loss_fn,
        "autocast": autocast,
        "scaler": scaler,
        "clips": clip_norm is not None,
        "keep_outputs": keep_outputs,
        "accumulate": accumulate,
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
    keep_outputs: bool = True,
) -> Workload:
    """A forward pass in eval mode under `torch.inference_mode`.

        workload = inference(model, dataset, collate_fn=collate, autocast=torch.bfloat16)

    `forward(model, batch)` defaults to `model(**batch)` for mappings, `model(*batch)` for tuples and
    `model(batch)` for anything else. `make_batch` as in `training`. The batch and the outputs stay alive
    until those of the next step replace them, as in `for batch in loader: out = model(batch)`; with
    `keep_outputs=False` they are dropped when the step ends, as where a loop deletes them.
    """
    check_model(model)
    run: Any = _call_model if forward is None else forward
    if not callable(run) or not takes_arguments(run, 2):
        raise TypeError(f"forward must be a callable forward(model, batch) or None, not {forward!r}")
    check_flag("keep_outputs", keep_outputs)
    context = _autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)
    owner = object()

    def step(batch_size: int) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        with _mode(model, training=False):
            loop.enter_phase("batch")
            batch = to_device(source(batch_size), _device_of(model))
            if kept is not None:
                kept.batch = batch
            loop.enter_phase("forward")
            with torch.inference_mode(), context(), loop.catching(model, kept):
                returned = run(model, batch)
                if kept is not None:
                    kept.result = returned
                del returned
        loop.clear_phase()

    parts = {"source": source, "forward": forward, "autocast": autocast, "keep_outputs": keep_outputs}
    return _known(step, "inference", model, None, state=(model,), parts=parts)


def generation(
    model: Any,
    make_batch: Any,
    *,
    max_new_tokens: int,
    collate_fn: CollateFn | None = None,
    keep_outputs: bool = True,
    **generate_kwargs: Any,
) -> Workload:
    """`model.generate` forced to the full length: every sample gets `max_new_tokens` new tokens.

        workload = generation(model, prompts, max_new_tokens=256, num_beams=4)

    Any object with a `generate` that knows `max_new_tokens` and `min_new_tokens` will do. A batch that
    is a mapping goes as keywords, any other as the first argument; the remaining keywords go to
    `generate` as they are. `make_batch` as in `training`. In eval mode under `torch.inference_mode`. The
    batch and what `generate` returned stay alive until the next ones replace them; with `keep_outputs=False`
    they are dropped when the step ends.
    `model` may also be a function `generate(batch, max_new_tokens=...)`, which returns the tokens and has to
    make all of them; its batch stays where `make_batch` put it.
    """
    check_flag("keep_outputs", keep_outputs)
    if isinstance(model, FunctionType | MethodType | functools.partial):
        check_full_length(generate_kwargs, max_new_tokens)
        options = {**generate_kwargs, "max_new_tokens": max_new_tokens}
        source = batch_source(make_batch, collate_fn=collate_fn)
        return _generating(model, source, options, keep_outputs=keep_outputs)
    if not callable(getattr(model, "generate", None)) or isinstance(model, type):
        raise TypeError(f"model must be an object with a generate method, not {type(model).__name__}")
    check_full_length(generate_kwargs, max_new_tokens)
    options = {**generate_kwargs, "max_new_tokens": max_new_tokens, "min_new_tokens": max_new_tokens}
    source = batch_source(make_batch, collate_fn=collate_fn)
    return _generation(model, source, options, keep_outputs=keep_outputs)


def _generation(model: Any, source: BatchSource, options: dict[str, Any], *, keep_outputs: bool) -> Workload:
    owner = object()

    def step(batch_size: int) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        with _mode(model, training=False):
            loop.enter_phase("batch")
            batch = to_device(source(batch_size), _device_of(model))
            if kept is not None:
                kept.batch = batch
            loop.enter_phase("forward")
            with torch.inference_mode():
                if isinstance(batch, Mapping):
                    output = model.generate(**batch, **options)
                else:
                    output = model.generate(batch, **options)
            if kept is not None:
                kept.result = output
            check_generated(output, batch, model, options["max_new_tokens"])
        loop.clear_phase()

    state = (model,) if isinstance(model, nn.Module) else ()
    parts = {"source": source, "options": options, "keep_outputs": keep_outputs}
    return _known(step, "generation", model, None, state=state, parts=parts)


def _generating(
    function: Callable[..., Any], source: BatchSource, options: dict[str, Any], *, keep_outputs: bool
) -> Workload:
    """Generation by a function of the user's."""
    owner, max_new_tokens = object(), options["max_new_tokens"]

    def step(batch_size: int) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        loop.enter_phase("batch")
        batch = source(batch_size)
        if kept is not None:
            kept.batch = batch
        loop.enter_phase("forward")
        with torch.inference_mode():
            tokens = function(batch, **options)
        if kept is not None:
            kept.result = tokens
        length = tokens.shape[-1] if isinstance(tokens, torch.Tensor) else max_new_tokens
        if length < max_new_tokens:
            raise ValueError(
                f"model must make all {max_new_tokens} new tokens of a sample, not {length}: "
                "a shorter answer needs less memory than the longest one will"
            )
        loop.clear_phase()

    parts = {"source": source, "options": options, "function": function, "keep_outputs": keep_outputs}
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
        return lambda: autocast  # may be entered repeatedly, unlike other contexts
    # A context itself (`__enter__`) can as a rule be entered only once, and is callable as a decorator.
    is_context = hasattr(autocast, "__enter__") and not isinstance(autocast, type)
    if is_context or not callable(autocast) or not takes_arguments(autocast, 0):
        raise TypeError(
            "autocast must be None, a dtype or a function without arguments that makes a context, "
            f"not {autocast!r}"
        )
    make: Callable[[], AbstractContextManager[Any]] = autocast
    return make
