"""The collectives of a step, and how a rank whose step failed still takes part in them.

Rules:
- A rank with an OOM inside a step leaves its peers waiting in the next collective. So it issues the
  collectives of the trial's remaining steps itself, with zeros. The peers end their trial as usual, nobody
  waits for a time-out, no process group breaks, and whatever the zeros have done to any state is restored
  with the rest. The rank reports its failure at the next agreement.
- Whole numbers are sent as they were in the rehearsal: they are indices (DDP sends the layout of its buckets
  like that), and zeros would be wrong indices.
- What a step sends is recorded beforehand, in a rehearsal at small sizes: kind, group, shapes. Shapes may
  grow with the batch size as a straight line. How much of it a step had sent when it failed is read from the
  counter that each process group keeps: nothing is watched, and nothing is slowed down, in a trial itself.
- What cannot be sent like that is refused with its reason (`Unservable`), before any trial: messages from
  rank to rank, tensors whose number depends on the data, steps that send something else each time.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
import torch.distributed as dist

from batchfit._engine.device import oom
from batchfit._engine.torch_private import process_groups
from batchfit._engine.torch_private.dispatch import TorchDispatchMode

_SPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# They send nothing: one waits for what was sent, the others only wrap.
_QUIET = ("wait_tensor", "_wrap_tensor_autograd")
_BETWEEN_TWO = ("send", "recv_", "recv_any_source_", "isend", "irecv")
_MOST_NUMBERS = 2**16
# What a back end says of a lost connection, in lower case; the words count wherever they are raised. Its
# name alone says nothing: "Distributed package doesn't have NCCL built in" is no lost rank.
_LOST = (
    # gloo names its file: "[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:21"
    "gloo/transport/",
    "gloo connectfullmesh failed",  # ProcessGroupGloo.cpp, before the words of the transport
    "application timeout caused pair closure",  # gloo's pair.cc, in a rank whose peer has given up
    # torch raises what NCCL reports as a `DistBackendError`, and some wrappers as a plain RuntimeError:
    "ncclremoteerror",  # NCCLUtils.cpp: "... a network error or a remote process exiting prematurely"
    "remote process exited or there was a network error",  # ncclGetErrorString of the same
    "nccl communicator was aborted on rank",  # NCCLUtils.cpp
    "watchdog caught collective operation timeout",  # ProcessGroupNCCL.cpp
)
# The types that torch has for these, as the first word of an error of another process.
_LOST_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError")
# Words that a user's own code has for connections of its own: they count where torch has raised them.
_MAYBE_LOST = (
    *("process group", "socket", "connection closed", "connection reset", "connection refused"),
    *("connection aborted", "by peer", "broken pipe", "timed out"),
)
_TORCH = os.path.dirname(torch.__file__) + os.sep
# Where torch raises what a dataset of the user's has raised.
_LOADERS = (os.path.join(_TORCH, "utils", "data", ""), os.path.join(_TORCH, "_utils.py"))


class Unservable(Exception):
    """The collectives of a step cannot be sent in its place; says which, and why."""


def counts() -> dict[str, int]:
    """How many collectives each process group of this process has begun."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    return process_groups.counts()


def begun_since(before: Mapping[str, int]) -> dict[str, int]:
    """How many collectives each group has begun since `before`."""
    return {name: count - before.get(name, 0) for name, count in counts().items()}


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error says that another rank could not be reached, not that the step is wrong."""
    if not isinstance(error, RuntimeError | OSError):
        return False
    # Memory is this rank's own, also where NCCL had none for its buffers. What was handled when the error was
    # raised does not count.
    if oom.classify(error, ambient=error.__cause__ or error.__context__) == "oom":
        return False
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    text = str(error).lower()
    if any(words in text for words in _LOST):
        return True
    return any(words in text for words in _MAYBE_LOST) and _was_raised_by_torch(error)


def _was_raised_by_torch(error: BaseException) -> bool:
    """Whether the error's traceback ends in torch: a database that times out is an error of the step's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return file.startswith(_TORCH) and not file.startswith(_LOADERS)


def reads_as_lost(text: str) -> bool:
    """`is_lost_connection` of an error of another process, by its text, which may begin with its type."""
    return text.startswith(_LOST_TYPES) or any(words in text.lower() for words in (*_LOST, *_MAYBE_LOST))


@dataclass(frozen=True, slots=True)
class _Shape:
    """A tensor of a collective; `numbers` are its values where they are few and whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    numbers: torch.Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Shape:
        whole = not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _MOST_NUMBERS
        numbers = tensor.detach().to("cpu", copy=True) if whole else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, numbers)

    def made(self) -> torch.Tensor:
        if self.numbers is not None and tuple(self.numbers.shape) == self.shape:
            return self.numbers.to(self.device, copy=True)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective, with tensors replaced by their shapes."""

    op: Any
    group: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what is sent while it is on; nothing is held but shapes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor sends inside its own operations (the norm of all shards): next
        kwargs = kwargs or {}
        if func.namespace in _SPACES and func._schema.name.partition("::")[2] not in _QUIET:
            self.calls.append(CollectiveCall(func, _group_of(args, kwargs), _shapes(args), _shapes(kwargs)))
        return func(*args, **kwargs)


@contextlib.contextmanager
def recording() -> Iterator[list[CollectiveCall]]:
    """Inside, every collective of this thread, and of the backward passes that it starts, is kept."""
    recorder = _Recorder()
    with recorder:
        yield recorder.calls


@final
@dataclass(frozen=True, slots=True)
class StepSends:
    """What one step sends, at any size: learned from the same step at a few small ones."""

    sizes: tuple[int, ...]
    records: tuple[tuple[CollectiveCall, ...], ...]

    @classmethod
    def learn(cls, records: Mapping[int, Sequence[CollectiveCall]]) -> StepSends:
        """From what was recorded at each size; `Unservable` where that does not say what others send."""
        sizes = tuple(sorted(records))
        sends = cls(sizes, tuple(tuple(records[size]) for size in sizes))
        for call in sends.records[0]:
            name = call.op._schema.name.partition("::")[2]
            if name in _BETWEEN_TWO:
                raise Unservable(f"it sends messages from one rank to another ({name}), as pipelines do")
            if not call.group:
                raise Unservable(f"the process group of {name} cannot be read in this version of torch")
        if len({len(record) for record in sends.records}) > 1:
            raise Unservable("how many collectives a step has depends on the batch size")
        for size in sizes:
            for call, seen in zip(sends.at(size), records[size], strict=True):
                if (call.op, call.group, call.args) != (seen.op, seen.group, seen.args):
                    raise Unservable(f"what {seen.op._schema.name} sends is no straight line in the size")
        return sends

    def at(self, size: int) -> list[CollectiveCall]:
        """What a step of `size` sends."""
        calls = []
        for at_each in zip(*self.records, strict=True):
            args = tuple(
                self._along([call.args[i] for call in at_each], size) for i in range(len(at_each[0].args))
            )
            calls.append(CollectiveCall(at_each[0].op, at_each[0].group, args, at_each[0].kwargs))
        return calls

    def serve(self, size: int, already: Mapping[str, int]) -> None:
        """Send what is left of a step of `size`, of which each group has had `already` that many."""
        had = Counter(dict(already))
        for call in self.at(size):
            if had[call.group] > 0:
                had[call.group] -= 1
            else:
                _send_zeros(call)

    def _along(self, values: list[Any], size: int) -> Any:
        """A value on the line through what it was at the first two sizes that were rehearsed."""
        first = values[0]
        if isinstance(first, list | tuple):
            if any(not isinstance(one, list | tuple) or len(one) != len(first) for one in values):
                raise Unservable("a collective has another number of tensors at each size")
            return type(first)(self._along(list(parts), size) for parts in zip(*values, strict=True))
        if not isinstance(first, _Shape) or len(values) < 2:
            return first
        dims = [one.shape for one in values[:2]]
        if len({len(shape) for shape in dims}) > 1:
            raise Unservable("a tensor that is sent has another number of dimensions at each size")
        run = self.sizes[1] - self.sizes[0]
        shape = tuple(a + (b - a) * (size - self.sizes[0]) // run for a, b in zip(*dims, strict=True))
        return replace(first, shape=shape)


@final
@dataclass(frozen=True, slots=True)
class ExpectedCollectives:
    """What the steps of a trial send: the first ones each their own, all later ones as the last of these."""

    steps: tuple[StepSends, ...]

    @classmethod
    def learn(cls, records: Mapping[int, Sequence[Sequence[CollectiveCall]]]) -> ExpectedCollectives:
        """From the collectives of each step of a trial, at each size."""
        count = min(len(steps) for steps in records.values())
        return cls(
            tuple(StepSends.learn({n: steps[i] for n, steps in records.items()}) for i in range(count))
        )

    def step(self, number: int) -> StepSends:
        """What step `number` sends, counted from 0."""
        return self.steps[min(number, len(self.steps) - 1)]


@final
class CountedStep:
    """A step that counts its calls and what each has sent, so that the rest can be sent if one fails.

    counted = CountedStep(step, steps=3)
    ...                       # run three steps; the second fails
    counted.serve(expected, 8)    # what is left of the second, and the third
    """

    def __init__(self, step: Callable[[int], object], *, steps: int) -> None:
        self._step = step
        self._steps = steps
        self._number = -1
        self._before: dict[str, int] = {}

    def __call__(self, size: int) -> object:
        self._before = counts()
        self._number += 1
        return self._step(size)

    def serve(self, expected: ExpectedCollectives, size: int) -> None:
        """Send what is left of the step that failed, then all of the steps after it."""
        if self._number >= 0:
            expected.step(self._number).serve(size, begun_since(self._before))
        for number in range(self._number + 1, self._steps):
            expected.step(number).serve(size, {})


def _send_zeros(call: CollectiveCall) -> None:
    sent = call.op(*_made(call.args), **_made(dict(call.kwargs)))
    if call.op.namespace == "c10d":
        work = sent[-1] if isinstance(sent, tuple | list) else sent
        if isinstance(work, torch.ScriptObject):
            dist.Work.unbox(work).wait()
        return
    for tensor in sent if isinstance(sent, tuple | list) else [sent]:
        process_groups.wait(tensor)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Shape.of(value)
    if isinstance(value, list | tuple):
        return type(value)(_shapes(one) for one in value)
    if isinstance(value, dict):
        return {name: _shapes(one) for name, one in value.items()}
    return _Same(value) if isinstance(value, torch.ScriptObject) else value


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A group or a kind of reduction, which are equal wherever the operation and the group's name are."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same)

    def __hash__(self) -> int:
        return 0


def _made(value: Any) -> Any:
    if isinstance(value, _Shape):
        return value.made()
    if isinstance(value, _Same):
        return value.value
    if isinstance(value, list | tuple):
        return type(value)(_made(one) for one in value)
    if isinstance(value, dict):
        return {name: _made(one) for name, one in value.items()}
    return value


def _group_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """The name of the group that a collective goes to, "" where it cannot be read."""
    names = process_groups.names()
    for value in (*args, *kwargs.values()):
        if isinstance(value, str) and value in names:
            return value
        if isinstance(value, dist.ProcessGroup):
            return str(value.group_name)
        if isinstance(value, torch.ScriptObject):
            name = process_groups.name_of(value)
            if name is not None:
                return name
    return ""
