"""Workloads: a step together with the state that a trial must restore.

Rules: arguments are checked when the workload is made, before any device work. A step says which phase
it is in. In a trial, a timing or a trace the batch, the model's outputs and the loss live until the next
step's take their place, as the variables of a loop written by hand do (`_engine/workload/loop.py`); with
`keep_outputs=False` nothing outlives a step, and outputs die inside `loss_fn`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal, final

import torch
from torch import nn

from batchfit._arguments import check_flag
from batchfit._engine.batch.sources import BatchSource, CollateFn, Longest, batch_source, takes_arguments
from batchfit._engine.batch.structure import to_device
from batchfit._engine.batch.token_source import TokenBatches, not_by_samples
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
from batchfit._engine.workload.loop import (
    autocast_context,
    backward,
    call_model,
    device_of,
    in_mode,
    update,
)

Kind = Literal["step", "training", "inference", "generation"]
Autocast = torch.dtype | torch.autocast | Callable[[], AbstractContextManager[Any]]


@final
@dataclass(frozen=True, init=False, eq=False, repr=False)
class Workload:
    """A step, and the state that a trial must restore.

        workload = Workload(step, state=[generator, discriminator, opt_g, opt_d, ema])

    Without `state` what the step changes stays changed. `training`, `inference` and `generation` make
    workloads that know their `model` and `optimizer`.

    Args:
        step: `step(batch_size)` runs one step of that many samples, in one process.
        state: modules, optimizers, schedulers, scalers and tensors that the step changes, or one such thing
            alone; an empty list says that it changes none.

    Attributes:
        declared: whether the state was given.
        kind: "step", "training", "inference" or "generation".
        model: the model; None with kind "step".
        optimizer: the optimizer; None where there is none.
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
        """This workload with another step over the same state: one that counts, logs or fails.

        Args:
            step: the other step.

        Returns:
            A workload with the same state.
        """
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
        return self._source.samples if isinstance(self._source, Longest) else None

    def _made_of(self, size: int) -> str:
        """What batches of that size are made of, where it is not the longest samples of all."""
        return self._source.made_of(size) if isinstance(self._source, Longest | TokenBatches) else ""

    @property
    def _source(self) -> Any:
        return self._parts.get("source")

    @property
    def _by_tokens(self) -> bool:
        return isinstance(self._source, TokenBatches)

    def _check_by_samples(self, what: str) -> None:
        if self._by_tokens:
            raise not_by_samples(what)

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
    """A `Workload` as it is; a plain callable `step(batch_size)` as a workload without declared state.

    Args:
        obj: a workload, or a callable `step(batch_size)`.

    Returns:
        The workload.

    Raises:
        TypeError: `obj` is neither.
    """
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

    One step: a batch on the model's device, `zero_grad`, forward and loss, backward (scaled), unscale and
    clip, `optimizer.step`, `scaler.update`. An LR scheduler takes no memory, so it is not stepped. A model in
    eval mode is in training mode during the step; one that is in training mode already is left as it is, with
    any part frozen in eval mode. Several models or optimizers: write the step and give it to `Workload`.

    Args:
        model: the model to train.
        optimizer: its optimizer; None: a step is forward and backward only.
        loss_fn: `loss_fn(model, batch)` returns the mean loss.
        make_batch: a callable `make_batch(n)`, a dataset (the longest samples are used, of an iterable one
            see `FirstSamples`), a DataLoader of one, or one example batch, repeated to size.
        collate_fn: makes a batch of a dataset's samples; default: DataLoader's.
        autocast: a dtype, or a function that makes the context, for forward and loss.
        scaler: the `GradScaler` of the loop.
        clip_norm: the gradient norm to clip at; None: gradients are not clipped.
        accumulate: passes of `batch_size` samples each per optimizer step; gradients are held in all but the
            first.
        keep_outputs: batch, outputs and loss live until those of the next step replace them, as the variables
            of a loop do; False: for a loop that deletes them, or computes its loss in a function.
        state: what else the step changes.

    Returns:
        A `Workload` with model, optimizer and scaler as its state.
    """
    check_model(model)
    check_optimizer(optimizer, scaler=scaler)
    others = checked_state(state)
    if optimizer is not None:
        check_belongs(optimizer, model, others)
    check_loss_fn(loss_fn)
    check_step_settings(clip_norm, accumulate, keep_outputs)
    context = autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)
    clears = model if optimizer is None else optimizer
    owner = object()

    def one(make: Callable[[], Any]) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        with in_mode(model, training=True):
            for number in range(loop.passes_of(accumulate)):
                loop.enter_phase("batch")
                batch = to_device(make(), device_of(model))
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
                backward(loss, scaler)
            loop.enter_phase("optimizer")
            update(model, optimizer, scaler=scaler, clip_norm=clip_norm)
        loop.clear_phase()

    step = loop.each_batch(one, source)
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
    """What makes the batches of a trial, as `training` does: for steps of one's own.

        make = batches(dataset, collate_fn=collate)
        batch = make(32)

    Args:
        make_batch: as in `training`.
        collate_fn: makes a batch of a dataset's samples; default: DataLoader's.

    Returns:
        A callable that makes a batch of a size.
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

    Args:
        model: the model to run.
        make_batch: as in `training`.
        collate_fn: makes a batch of a dataset's samples; default: DataLoader's.
        autocast: a dtype, or a function that makes the context, for the forward pass.
        forward: `forward(model, batch)`; default: `model(**batch)` for mappings, `model(*batch)` for tuples
            and `model(batch)` for anything else.
        keep_outputs: batch and outputs live until those of the next step replace them, as the variables of a
            loop do; False: they are dropped when the step ends.

    Returns:
        A `Workload` with the model as its state.

    Raises:
        TypeError: `forward` does not take a model and a batch.
    """
    check_model(model)
    run: Any = call_model if forward is None else forward
    if not callable(run) or not takes_arguments(run, 2):
        raise TypeError(f"forward must be a callable forward(model, batch) or None, not {forward!r}")
    check_flag("keep_outputs", keep_outputs)
    context = autocast_context(autocast, model)
    source = batch_source(make_batch, collate_fn=collate_fn)
    owner = object()

    def one(make: Callable[[], Any]) -> None:
        kept = loop.variables_of(owner) if keep_outputs else None
        with in_mode(model, training=False):
            loop.enter_phase("batch")
            batch = to_device(make(), device_of(model))
            if kept is not None:
                kept.batch = batch
            loop.enter_phase("forward")
            with torch.inference_mode(), context(), loop.catching(model, kept):
                returned = run(model, batch)
                if kept is not None:
                    kept.result = returned
                del returned
        loop.clear_phase()

    step = loop.each_batch(one, source)
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

    In eval mode under `torch.inference_mode`. A batch that is a mapping goes as keywords, any other as the
    first argument.

    Args:
        model: an object with a `generate` that knows `max_new_tokens` and `min_new_tokens`, or a function
            `generate(batch, max_new_tokens=...)`, which returns the tokens and has to make all of them; its
            batch stays where `make_batch` put it.
        make_batch: as in `training`.
        max_new_tokens: new tokens of every sample.
        collate_fn: makes a batch of a dataset's samples; default: DataLoader's.
        keep_outputs: batch and tokens live until the next ones replace them; False: they are dropped when the
            step ends.
        **generate_kwargs: go to `generate` as they are.

    Returns:
        A `Workload` with the model as its state.

    Raises:
        TypeError: `model` has no `generate`.
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
        with in_mode(model, training=False):
            loop.enter_phase("batch")
            batch = to_device(source(batch_size), device_of(model))
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
    step: Callable[[int], None], kind: Kind, model: Any, optimizer: Any, *, state: Any, parts: dict[str, Any]
) -> Workload:
    workload = Workload(step, state=state)
    workload._set(kind=kind, model=model, optimizer=optimizer, _parts=parts)
    return workload
