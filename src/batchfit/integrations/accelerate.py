"""Hugging Face Accelerate: its `find_executable_batch_size`, and microbatches in its loops.

    from batchfit.integrations.accelerate import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=512)
    def train(batch_size, ...): ...

Rules
- Towards the caller `find_executable_batch_size` is Accelerate's: signature, arguments passed on, errors,
  `reduce_batch_size_fn`, and that later calls begin where the last one ended.
- A function that reached its end is never run again; between the size that failed and the next that runs,
  the function is only probed (`batchfit.run_largest`).
- What an attempt leaves in an Accelerator (prepared objects, half an accumulation, loaders that were being
  read) is taken out before the next one; what was prepared before the call stays.
- Modules, optimizers and LR schedulers among the arguments (in containers and partials too), and the
  accelerator's gradient scaler, are as before the call at every attempt.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final, final

import torch

import batchfit
from batchfit.errors import NothingFitsError
from batchfit.results import StepReport, Trial

try:
    import accelerate
    from accelerate import Accelerator
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils.memory import should_reduce_batch_size
except ImportError as error:
    raise ImportError('pip install "batchfit[accelerate]" to use batchfit.integrations.accelerate') from error

log = logging.getLogger("batchfit")

TESTED: Final = ("1.10", "1.15")
_PREPARED: Final = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
_LONGEST: Final = 1000  # items of a container that is looked into
_MOST: Final = 20_000  # objects that are looked at
_ZERO: Final = "No executable batch size found, reached zero."  # Accelerate's own words
_REFUSED: Final = {
    "DEEPSPEED": "DeepSpeed's engine runs backward and step itself",
    "MEGATRON_LM": "Megatron-LM runs forward and backward itself",
}


def _warn_of_version(version: str = accelerate.__version__) -> None:
    """Say that a version is outside of what the tests have seen; releases between are taken as known."""
    try:
        now = tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        now = (0,)
    low, high = (tuple(int(part) for part in edge.split(".")) for edge in TESTED)
    if not low <= now <= high:
        warnings.warn(
            f"batchfit.integrations.accelerate is tested with accelerate {TESTED[0]} to {TESTED[1]}, "
            f"and this is {version}",
            stacklevel=3,
        )


_warn_of_version()


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
        function: takes the batch size first. It is a whole program: called again, it begins anew.
        starting_batch_size: the largest size; may be generous, for sizes are halved and bisected.
        reduce_batch_size_fn: takes nothing and returns the next size after each out-of-memory; then nothing
            is probed.
        workload: a `batchfit.Workload`, or a function of the same arguments (without the batch size) that
            makes one: the size is then found by `batchfit.find_batch_size` before the function is run, up to
            `starting_batch_size`. On several ranks the only way that survives a rank that runs out alone
            inside a collective.
        probe_steps: optimizer steps after which a probe is stopped (3); 0: no probes.
        tolerance: probes end when about this share could still be gained.
        key: a name under which the size is kept for later programs.
        fresh: do not look for a size that was kept.
        accelerator: whose memory is given back; default: every Accelerator among the arguments, and among
            the variables that `function` uses.
        on_run: called with each run, as a `batchfit.Trial`.
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
    """One decorated function, and the size that its next call begins with."""

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
        self._found = False  # by `workload`, in an earlier call

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_call(self._function, args)
        given = self._given
        reduce = self._reduce
        traces = [_Trace(one) for one in _accelerators(self._function, args, kwargs, given["accelerator"])]
        why = ""
        if given["workload"] is not None and not self._found:
            self._size, why = self._find(args, kwargs)
            self._found = True
        if self._size == 0:
            raise RuntimeError(f"{_ZERO}{f' ({why})' * bool(why)}")

        def forget() -> None:
            for trace in traces:
                trace.forget()

        def shrink() -> int:
            assert reduce is not None
            self._size = reduce()
            return self._size

        text = ""
        try:
            ran = batchfit.run_largest(
                lambda size: _known(self._function, size, *args, **kwargs),
                start=self._size,
                probe_steps=3 if given["probe_steps"] is None else given["probe_steps"],
                tolerance=given["tolerance"],
                reduce=None if reduce is None else shrink,
                state=_state_of(
                    [*_bound(self._function), *args, *kwargs.values(), *(trace.scaler for trace in traces)]
                ),
                key=given["key"],
                fresh=given["fresh"],
                device=traces[0].device if traces else None,
                before_retry=forget,
                on_run=given["on_run"],
            )
        except NothingFitsError as nothing:
            text = str(nothing)
        if text:
            self._size = 0  # as upstream: the next call says so at once
            forget()
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


def _known(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function` returns; what Accelerate takes for any device's out-of-memory is one for us."""
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
class _Trace:
    """An Accelerator as the call found it, so that what an attempt leaves in it can be taken out."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.device = accelerator.device
        self.scaler = accelerator.scaler
        self._accelerator = accelerator
        self._lengths = {name: len(getattr(accelerator, name, ())) for name in _PREPARED}
        self._engine = getattr(accelerator, "deepspeed_engine_wrapped", None)
        self._step = accelerator.step
        self._loaders = [one for one in self._references() if one is not None]

    def forget(self) -> None:
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
        # A loop that was left by an exception never says so, and its loader stays the active one.
        for loader in self._references():
            if loader is not None and all(loader is not one for one in self._loaders):
                state._remove_dataloader(loader)

    def _references(self) -> list[Any]:
        return list(getattr(self._accelerator.gradient_state, "dataloader_references", ()))


def backward(
    accelerator: Accelerator,
    microbatcher: Any,
    fn: Callable[[Any], Any],
    batch: Any,
    **options: Any,
) -> StepReport:
    """`accelerator.backward` for a batch that may not fit: in microbatches, with the gradients of the whole.

    ```python
    mb = batchfit.Microbatcher(model)                      # the prepared model
    for batch in loader:
        with accelerator.accumulate(model):
            report = backward(accelerator, mb, lambda micro: loss_fn(model, micro), batch)
            optimizer.step()
            optimizer.zero_grad()
    ```

    The loss is divided by `gradient_accumulation_steps` and scaled as `accelerator.backward` does; the report
    has it undivided. `options` go to `Microbatcher.backward`.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"accelerator must be an accelerate.Accelerator, not {accelerator!r:.80}")
    if not isinstance(microbatcher, batchfit.Microbatcher):
        raise TypeError(f"microbatcher must be a batchfit.Microbatcher, not {microbatcher!r:.80}")
    if "scaler" in options:
        raise TypeError("scaler must not be given: the accelerator has its own")
    kind = getattr(accelerator.distributed_type, "name", "")
    if kind in _REFUSED:
        raise ValueError(f"accelerator must not be one of {kind} with a Microbatcher: {_REFUSED[kind]}")
    parts = accelerator.gradient_accumulation_steps
    scaled = fn if parts == 1 else (lambda micro: _divided(fn(micro), parts))
    report = microbatcher.backward(scaled, batch, scaler=accelerator.scaler, **options)
    return report if parts == 1 else dataclasses.replace(report, loss=report.loss * parts)


def _divided(found: Any, parts: int) -> Any:
    """The loss divided, with the outputs beside it where there are some."""
    if type(found) is tuple and len(found) == 2:
        return found[0] / parts, found[1]
    return found / parts


def _accelerators(
    function: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any], named: Accelerator | None
) -> list[Accelerator]:
    """The Accelerator that was named, or all that the function is given or uses, itself or through others."""
    if named is not None:
        return [named]
    found: list[Accelerator] = []
    waiting: deque[Any] = deque([function, *args, *kwargs.values()])
    seen: dict[int, Any] = {}  # held, so that an id is one object's
    while waiting and len(seen) < _MOST:  # the nearest first: a library's functions lead to all of it
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        inside = _inside(one)
        if isinstance(one, Accelerator):
            found.append(one)
        elif inside is not None:
            waiting += inside
        elif inspect.ismethod(one):
            waiting += [one.__func__, one.__self__]
        elif inspect.isfunction(one):
            waiting += _used_by(inspect.unwrap(one))
        elif not isinstance(one, torch.nn.Module | torch.Tensor | type):
            waiting += [
                held for held in getattr(one, "__dict__", {}).values() if isinstance(held, Accelerator)
            ]
    return found


def _inside(value: Any) -> list[Any] | None:
    """What a partial, a container or a dataclass holds; of long ones nothing, since they are data."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, dict):  # read as one: tables of libraries import what is taken from them
        return list(dict.values(value)) if dict.__len__(value) <= _LONGEST else []
    if isinstance(value, SimpleNamespace):
        return list(vars(value).values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value) if len(value) <= _LONGEST else []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _bound(function: Any) -> list[Any]:
    """Arguments that a `functools.partial` brings along: they are passed in, like those of the call."""
    return [*function.args, *function.keywords.values()] if isinstance(function, functools.partial) else []


def _used_by(function: Any) -> list[Any]:
    """The variables of a function that are not its own; one that is not set yet is left out."""
    values = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # set later, or never
            continue
    names, codes = set(), [function.__code__]
    while codes:  # functions and comprehensions that are written inside of it, too
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    near = [function.__globals__[name] for name in names if name in function.__globals__]
    return values + [value for value in near if _is_near(value, function.__module__)]


def _is_near(value: Any, module: str) -> bool:
    """An Accelerator, an object that may hold one, or a function of the same program: not a library's."""
    return not inspect.isfunction(value) or value.__module__ == module


def _state_of(values: Iterable[Any]) -> list[Any]:
    """What the caller passed in that training changes, prepared or not, by itself or in containers."""
    kinds = (
        torch.nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.amp.GradScaler,
        AcceleratedScheduler,
    )
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = list(values)[::-1]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, kinds):
            found.append(one)
        else:
            waiting += (_inside(one) or [])[::-1]
    return found


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
            "reduce_batch_size_fn and probe_steps must not both be given: the one says the next size, the "
            "other looks for it"
        )
    if reduce is not None and key is not None:
        raise ValueError(
            "reduce_batch_size_fn and key must not both be given: a size that was kept would begin below "
            "the sizes that the function counts"
        )
    if fresh and key is None:
        raise ValueError("fresh must be False without key, not True")
