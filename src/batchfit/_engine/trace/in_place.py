"""Where torch writes into memory that is there, and a trace would see a copy.

torch keeps its hands off tensors of a class of somebody's own, such as a trace's fake ones: it then adds
gradients and biases into new memory. A real run adds them in place, in two cases:

- Backward: a gradient that comes second is added to the one that waits, if nobody else holds that one.
- `linear` on an input that is not contiguous: the bias is added to the product.

Rules: the operation itself stays as it is; its result is said to take over the block of what it would have
been written into.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, cast, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit._engine.device.tensors import is_dense

aten: Any = torch.ops.aten
log = logging.getLogger("batchfit")
_ADD = aten.add.Tensor
_ENGINE = _engine_run_backward.__code__


@final
class InPlace:
    """Says, of an operation that a trace sees, into whose memory a real run would write the result."""

    def __init__(self) -> None:
        self._running = threading.local()  # the biases of the `linear`s that run in a thread
        self._made: dict[int, int] = {}  # by which node of backward a storage was made
        counts_of_one_holder()  # now, and not in the middle of a trace

    @contextlib.contextmanager
    def active(self, key: str) -> Iterator[None]:
        """Inside, it is known when `linear` runs."""
        library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                library.impl("linear", self.linear, key)
            yield
        finally:
            library._destroy()

    def linear(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """torch's own, known to run in this thread."""
        biases = self._biases()
        biases.append(id(bias))
        try:
            return aten.linear.default.decompose(value, weight, bias)
        finally:
            biases.pop()

    def _biases(self) -> list[int]:
        if not hasattr(self._running, "biases"):
            self._running.biases = []
        found: list[int] = self._running.biases
        return found

    def note(self, tensor: Tensor) -> None:
        """A tensor has new memory: who made it, if it was backward."""
        address = tensor.untyped_storage()._cdata
        node = _node()
        if node is None:
            self._made.pop(address, None)
        else:
            self._made[address] = node._sequence_nr()

    def written_into(self, func: Any, args: Any, given: Any, *, depth: int) -> Tensor | None:
        """The argument whose memory the result takes over.

        `given` are the arguments before they were made fake; `depth` frames below is who called.
        """
        if func is not _ADD or not isinstance(args[1], Tensor):
            return None
        waiting: Tensor = args[0]
        biases = self._biases()
        if biases:
            return waiting if id(given[1]) == biases[-1] else None
        if torch.is_grad_enabled() or not self._waits(waiting) or not _by_the_engine(depth + 1):
            return None
        if waiting.shape != args[1].shape or not is_dense(waiting):
            return None
        alone = counts_of_one_holder()
        return waiting if alone is not None and _holds(waiting) == alone else None

    def _waits(self, tensor: Tensor) -> bool:
        """Whether a gradient may be one that waits for another, and is no part of a node's own arithmetic."""
        node = _node()
        maker = self._made.get(tensor.untyped_storage()._cdata)
        if node is None or maker is None:
            return False
        if maker != node._sequence_nr():
            return True
        targets = [target for target in node.next_functions if target[0] is not None]
        return len(set(targets)) < len(targets)  # two of its results go to one place


def _node() -> Any:
    """The node of backward that runs, or has just run."""
    return torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None


def _by_the_engine(depth: int) -> bool:
    """Whether backward itself called, and no line of a program's own backward function."""
    try:
        return sys._getframe(depth + 1).f_code is _ENGINE
    except ValueError:  # nobody: a thread of the engine's own, for a GPU
        return True


def _holds(tensor: Tensor) -> tuple[int, int]:
    """How often a tensor is held, and its storage."""
    storage, counted = tensor.untyped_storage(), cast(Any, tensor)
    return counted._use_count(), torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def counts_of_one_holder() -> tuple[int, int] | None:
    """As often as that where only backward holds them (and the call, and Python): seen in an example.

    None where a version of torch cannot be asked: sums are then copies, as a trace sees them.
    """
    seen = []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and torch._C._current_graph_task_id() != -1:
                seen.append(_holds(args[0]))
            return func(*args, **(kwargs or {}))

    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
            FakeTensorMode(),
            Counting(),  # type: ignore[no-untyped-call]
        ):
            value = torch.empty(2, requires_grad=True, device="cpu") * 1
            torch.cat([value * 2, value * 3]).sum().backward()  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError) as error:
        log.info("gradients are traced as if they were never added in place: %s", str(error))
        return None
    return seen[0] if seen else None
