"""The training loop that batchfit runs a step in: its phases, and the variables it keeps between steps.

    for batch in loader:
        out = model(batch)             # the last step's `out` is there until this one has returned
        loss = criterion(out, batch)
        loss.backward()

Rules:
- A variable holds its old value until the new one is there: old and new are live together for that long.
- Variables belong to a loop: one trial, one timing, one trace. What they hold is dropped when that ends,
  however it ends. A step that is called outside of any loop keeps nothing.
- The model's outputs are caught where torch itself checks before it calls a module (the slot in which
  `Module.compile` puts the compiled call): outside of what is compiled, scripted, sharded or hooked, on this
  one module, only while its loss is computed. A copy of the module made meanwhile is not caught.
- A step that ends well leaves no phase behind, a step that fails leaves the phase it failed in.
- A model is left in the mode in which it was found; its device is read at each step, since it may have moved.
- A scaled loss dies where it is used, as in a loop written by hand.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import NoneType
from typing import Any, final

import torch
from torch import nn

from batchfit._engine.batch.sources import takes_arguments
from batchfit._engine.batch.structure import leaves
from batchfit._engine.batch.token_source import TokenBatches
from batchfit._engine.device.tensors import plain_parts
from batchfit._engine.torch_private.dynamo import COMPILED_CALL
from batchfit._engine.torch_private.modules import call_of
from batchfit._engine.virtual_memory.op_sizes import block_bytes

PHASES = ("batch", "forward", "backward", "optimizer")
# Passes of a step that accumulates gradients, where memory is all that is asked about: the first without
# gradients, one beside those of the first, and one beside what that one has left. The others are like it.
PASSES = 3


@final
class Variables:
    """The variables of one workload in one loop."""

    __slots__ = ("batch", "outputs", "result")

    def __init__(self) -> None:
        self.batch: Any = None
        self.outputs: Any = None  # of the model's last call
        self.result: Any = None  # the loss, or what a forward function returned

    def storages(self) -> Iterator[torch.UntypedStorage]:
        """The memory that they keep alive, as far as tensors show it."""
        for leaf in leaves((self.batch, self.outputs, self.result)):
            if isinstance(leaf, torch.Tensor):
                yield from (one.untyped_storage() for one in plain_parts(leaf))


@final
class Loop:
    """One run of steps that follow each other."""

    def __init__(self, most_passes: int | None) -> None:
        self.most_passes = most_passes
        self._variables: dict[object, Variables] = {}

    def of(self, owner: object) -> Variables:
        """The variables of the workload that `owner` stands for."""
        return self._variables.setdefault(owner, Variables())

    def held_bytes(self, device_name: str) -> int:
        """What the variables of all workloads hold on a device, in the caching allocator's blocks."""
        kind, _, index = device_name.partition(":")
        found: dict[int, int] = {}
        for variables in self._variables.values():
            for storage in variables.storages():
                device = storage.device
                if device.type == kind and (not index or device.index in (None, int(index))):
                    found[storage.data_ptr()] = block_bytes(storage.nbytes())
        return sum(found.values())

    def end(self) -> None:
        """Drop everything."""
        self._variables.clear()


class _Running(threading.local):
    loop: Loop | None = None
    phase: str | None = None


_running = _Running()


def enter_phase(name: str) -> None:
    """This thread now runs the phase `name` of a step, one of `PHASES`."""
    if name not in PHASES:
        raise ValueError(f"name must be one of {', '.join(PHASES)}, not {name!r}")
    _running.phase = name


def current_phase() -> str | None:
    """The phase that this thread entered last, or None."""
    return _running.phase


def clear_phase() -> None:
    """No phase is running in this thread."""
    _running.phase = None


@contextlib.contextmanager
def running(*, most_passes: int | None = None) -> Iterator[Loop]:
    """Inside, steps keep what the variables of a loop would; all of it is dropped at the end.

    `most_passes`: of a step that accumulates gradients over many passes, this many are run.
    """
    before, loop = _running.loop, Loop(most_passes)
    _running.loop = loop
    try:
        yield loop
    finally:
        _running.loop = before
        loop.end()


def variables_of(owner: object) -> Variables:
    """The variables of a workload in the loop that runs; outside of one, new ones that nobody keeps."""
    loop = _running.loop
    return Variables() if loop is None else loop.of(owner)


def passes_of(accumulate: int) -> int:
    """How many passes a step runs of those that it accumulates."""
    most = None if _running.loop is None else _running.loop.most_passes
    return accumulate if most is None else min(accumulate, most)


@contextlib.contextmanager
def catching(model: Any, variables: Variables | None) -> Iterator[None]:
    """Inside, what each call of the model returns is kept in `variables` until the next one has returned."""
    if variables is None:
        yield
        return
    slots = vars(model)
    had, before = COMPILED_CALL in slots, slots.get(COMPILED_CALL)
    slots[COMPILED_CALL] = _Caught(model, before, variables)
    try:
        yield
    finally:
        if had:
            slots[COMPILED_CALL] = before
        else:
            slots.pop(COMPILED_CALL, None)


@final
class _Caught:
    """Calls a module as torch would have, and keeps what the outermost call returned."""

    def __init__(self, model: nn.Module, compiled: Any, variables: Variables) -> None:
        self._call = call_of(model) if compiled is None else compiled
        self._variables = variables
        self._depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._depth += 1
        try:
            out = self._call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0:
            self._variables.outputs = out
        return out

    # torch leaves the slot out where it copies or pickles a module; a module with a `__getstate__` of its own
    # may not, and its copy has none then.
    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return NoneType, ()


# --- parts of a step


def backward(loss: Any, scaler: Any) -> None:
    """In a call of its own: the scaled loss is gone when it returns, as after `scale(loss).backward()`."""
    (loss if scaler is None else scaler.scale(loss)).backward()


def update(model: nn.Module, optimizer: Any, *, scaler: Any, clip_norm: float | None) -> None:
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


def call_model(model: Any, batch: Any) -> object:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


@contextlib.contextmanager
def in_mode(model: Any, *, training: bool) -> Iterator[None]:
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


def device_of(model: Any) -> torch.device | None:
    """Where the model's batches go: to its first parameter or buffer; None where it says nothing."""
    if isinstance(model, nn.Module):
        for tensors in (model.parameters(), model.buffers()):
            for tensor in tensors:
                return tensor.device
        return None
    device = getattr(model, "device", None)
    return device if isinstance(device, torch.device) else None


def each_batch(run: Callable[[Callable[[], Any]], None], source: Any) -> Callable[[int], None]:
    """A step that runs each of its batches: several of batches by tokens, else one."""

    def step(batch_size: int) -> None:
        by_tokens = isinstance(source, TokenBatches)
        for make in source.makers(batch_size) if by_tokens else [partial(source, batch_size)]:
            run(make)

    return step


def autocast_context(autocast: Any, model: nn.Module) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    if autocast is None:
        return contextlib.nullcontext
    if isinstance(autocast, torch.dtype):
        if autocast not in (torch.bfloat16, torch.float16):
            raise ValueError(f"autocast must be torch.bfloat16 or torch.float16 as a dtype, not {autocast!r}")

        # The device is asked for at each step: the model may have moved since.
        def lowered() -> contextlib.AbstractContextManager[Any]:
            device = device_of(model)
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
    make: Callable[[], contextlib.AbstractContextManager[Any]] = autocast
    return make
