"""Accelerate's `find_executable_batch_size`, with fewer and shorter attempts.

Rules
- Towards the caller `find_executable_batch_size` is Accelerate's: signature, arguments passed on, errors,
  `reduce_batch_size_fn`, and later calls that start with the last call's size.
- A function that reached its end is never run again; between the size that failed and the next that runs,
  the function is only probed (`batchfit.run_largest`).
- What an attempt leaves in an Accelerator (prepared objects, half an accumulation, loaders that were being
  read) is removed before the next one; what was prepared before the call stays.
- Modules, optimizers and LR schedulers among the arguments (in containers and partials too), and the
  accelerator's gradient scaler, are as before the call at every attempt.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from accelerate import Accelerator
from accelerate.utils.memory import should_reduce_batch_size

import batchfit
from batchfit.errors import NothingFitsError
from batchfit.integrations.accelerate.arguments import accelerators_of, bound_arguments, state_of
from batchfit.results import Trial

PREPARED: Final = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
_ZERO: Final = "No executable batch size found, reached zero."  # Accelerate's own words


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    workload: Any = None,
    probe_steps: int | None = None,
    tolerance: float = 0.05,
    key: str | None = None,
    fresh: bool = False,
    accelerator: Accelerator | None = None,
    on_run: Callable[[Trial], object] | None = None,
) -> Any:
    """Accelerate's decorator: runs `function(batch_size, ...)` at the largest size that fits.

    ```python
    @find_executable_batch_size(starting_batch_size=512)
    def train(batch_size):
        model, optimizer, loader = accelerator.prepare(*make(batch_size))
        ...

    train()
    ```

    Args:
        function: takes the batch size first. It is a whole program: a second call starts all over.
        starting_batch_size: the largest size of one process; it may be large: sizes are halved and bisected.
        reduce_batch_size_fn: takes nothing and returns the next size after each OOM; then nothing is probed.
        workload: a `batchfit.Workload`, or a function of the same arguments (without the batch size) that
            makes one: the size is then found by `batchfit.find_batch_size` before the function is run, up to
            `starting_batch_size`. On several ranks, only this way survives an OOM of one rank inside a
            collective.
        probe_steps: optimizer steps after which a probe is stopped (3); 0: no probes.
        tolerance: probes end when about this share could still be gained.
        key: a name under which the size is stored for later programs.
        fresh: do not use a stored size.
        accelerator: the Accelerator whose memory is released; default: every one among the arguments, and
            among the variables that `function` uses.
        on_run: called with each run, as a `batchfit.Trial`.

    Returns:
        The decorated function, which is called without the batch size; without `function` a decorator.

    Raises:
        TypeError: `function` cannot be called.
    """
    given: dict[str, Any] = {
        "workload": workload,
        "probe_steps": probe_steps,
        "tolerance": tolerance,
        "key": key,
        "fresh": fresh,
        "accelerator": accelerator,
        "on_run": on_run,
    }
    _check(starting_batch_size, reduce_batch_size_fn, **given)
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            **given,
        )
    if not callable(function):
        raise TypeError(f"function must be a callable function(batch_size, ...), not {function!r}")
    finder = _Finder(function, starting_batch_size, reduce_batch_size_fn, given)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return finder(args, kwargs)

    return wrapped


@final
class _Finder:
    """One decorated function, and the size that its next call starts with."""

    def __init__(
        self,
        function: Callable[..., Any],
        size: int,
        reduce: Callable[[], int] | None,
        given: Mapping[str, Any],
    ) -> None:
        self._function = function
        self._size = size
        self._reduce = reduce
        self._given = given
        self._is_found = False  # by `workload`, in an earlier call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_call(self._function, args)
        given = self._given
        reduce = self._reduce
        found = accelerators_of(self._function, args, kwargs, given["accelerator"])
        states = [_AcceleratorState(one) for one in found]
        why = ""
        if given["workload"] is not None and not self._is_found:
            self._size, why = self._find(args, kwargs)
            self._is_found = True
        if self._size == 0:
            raise RuntimeError(f"{_ZERO}{f' ({why})' * bool(why)}")

        def reset() -> None:
            for state in states:
                state.reset()

        def shrink() -> int:
            assert reduce is not None
            self._size = reduce()
            return self._size

        text = ""
        try:
            ran = batchfit.run_largest(
                lambda size: _raise_as_oom(self._function, size, *args, **kwargs),
                start=self._size,
                probe_steps=3 if given["probe_steps"] is None else given["probe_steps"],
                tolerance=given["tolerance"],
                reduce=None if reduce is None else shrink,
                state=state_of(
                    [
                        *bound_arguments(self._function),
                        *args,
                        *kwargs.values(),
                        *(state.scaler for state in states),
                    ]
                ),
                key=given["key"],
                fresh=given["fresh"],
                device=states[0].device if states else None,
                before_retry=reset,
                on_run=given["on_run"],
            )
        except NothingFitsError as nothing:
            text = str(nothing)
        if text:
            self._size = 0  # as in Accelerate: the next call raises at once
            reset()
            raise RuntimeError(f"{_ZERO} ({text})")
        self._size = ran.batch_size
        return ran.value

    def _find(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str]:
        """The largest size by the workload; 0 where none fits, and why."""
        work = self._given["workload"]
        if not isinstance(work, batchfit.Workload):
            work = work(*args, **kwargs)
        key = self._given["key"]
        named = {} if key is None else {"key": f"{key} (workload)", "fresh": self._given["fresh"]}
        try:
            return batchfit.find_batch_size(work, max_size=self._size, **named).batch_size, ""
        except NothingFitsError as nothing:
            return 0, str(nothing)


def _raise_as_oom(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`; raise what Accelerate takes for an OOM of any device as torch's own error."""
    text = ""
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        is_ours = isinstance(error, torch.OutOfMemoryError)
        if is_ours or " out of memory." not in str(error) or not should_reduce_batch_size(error):
            raise
        text = str(error)
    raise torch.OutOfMemoryError(text)


@final
class _AcceleratorState:
    """The state of an Accelerator before the call, to which it is reset before each attempt."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self.scaler = accelerator.scaler
        self._accelerator = accelerator
        self._lengths = {name: len(getattr(accelerator, name, ())) for name in PREPARED}
        self._engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
        self._step = accelerator.step
        self._loaders = [one for one in self._references() if one is not None]

    def reset(self) -> None:
        accelerator = self._accelerator
        for name, length in self._lengths.items():
            held = getattr(accelerator, name, None)
            if isinstance(held, list):
                del held[length:]
        engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
        if engine is not None and engine is not self._engine:
            engine.engine.destroy()
            accelerator.deepspeed_engine_wrapped = self._engine
        accelerator.step = self._step
        state = accelerator.gradient_state
        state._set_sync_gradients(True)
        # A loop that an exception ended does not report its end, and its loader stays the active one.
        for loader in self._references():
            if loader is not None and all(loader is not one for one in self._loaders):
                state._remove_dataloader(loader)

    def _references(self) -> list[Any]:
        return list(getattr(self._accelerator.gradient_state, "dataloader_references", ()))


def _check_call(function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Accelerate's guard: the caller has passed the batch size too."""
    names = list(inspect.signature(function).parameters)
    if len(names) < len(args) + 1:
        named = getattr(function, "__name__", repr(function))
        shown = ", ".join(f"{name}={value}" for name, value in zip(names[1:], args[1:], strict=False))
        raise TypeError(
            f"Batch size was passed into `{named}` as the first argument when called. "
            f"Remove this as the decorator already does so: `{named}({shown})`"
        )


def _check(
    size: int,
    reduce: object,
    *,
    workload: object,
    probe_steps: int | None,
    tolerance: float,
    key: object,
    fresh: bool,
    accelerator: object,
    on_run: object,
) -> None:
    """Refuse wrong and contradicting settings when the function is decorated."""
    if type(size) is not int or size < 0:
        raise ValueError(f"starting_batch_size must be an integer of at least 0, not {size!r}")
    for name, value in (("reduce_batch_size_fn", reduce), ("on_run", on_run)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be a callable or None, not {value!r}")
    if workload is not None and not isinstance(workload, batchfit.Workload) and not callable(workload):
        raise TypeError(
            f"workload must be a batchfit.Workload or a function that makes one, not {workload!r}"
        )
    if probe_steps is not None and (type(probe_steps) is not int or probe_steps < 0):
        raise ValueError(f"probe_steps must be an integer of at least 0 or None, not {probe_steps!r}")
    if type(tolerance) not in (int, float) or not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be a number from 0 up to below 1, not {tolerance!r}")
    if accelerator is not None and not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator or None, not {accelerator!r:.80}")
    if reduce is not None and probe_steps:
        raise ValueError(
            "reduce_batch_size_fn and probe_steps must not both be given: each of them determines the "
            "next size"
        )
    if reduce is not None and key is not None:
        raise ValueError(
            "reduce_batch_size_fn and key must not both be given: a stored size would start below the "
            "sizes that the function counts"
        )
    if fresh and key is None:
        raise ValueError("fresh must be False without key, not True")
