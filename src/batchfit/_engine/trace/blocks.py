"""Memory blocks of a trace: allocations and frees in order, and the purpose of each.

Rules:
- A block lives as long as its storage; storages that are distinguished by address are known while they live,
  and what dies after the trace was taken is not the step's doing.
- Hooks follow the step from outside, to say phase, module and line of a block, and are removed after the
  trace. Backward runs in C++: the number of its autograd node says which forward operation it belongs to.
- Where a real run writes in place and a trace would see a copy, the operation itself stays as it is; its
  result is said to take over the block of what it would have been written into.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from batchfit._engine.allocator.footprint import CodeLine, Origin, Trace, TraceLog
from batchfit._engine.allocator.token_loops import TokenLoop, with_all_passes
from batchfit._engine.cuda_model.dispatch import kernels_replaced
from batchfit._engine.device.tensors import is_dense
from batchfit._engine.torch_private.autograd import (
    current_node,
    engine_code,
    in_backward,
    next_number,
    number_of,
)
from batchfit._engine.torch_private.dispatch import TorchDispatchMode
from batchfit._engine.torch_private.fake import FakeTensor, FakeTensorMode
from batchfit._engine.torch_private.storage import address_of, storage_address, use_counts
from batchfit._engine.trace.communication import COMMUNICATION, Communication
from batchfit._engine.trace.held_tensors import parts_of
from batchfit._engine.trace.program_lines import HERE, TORCH, calling_line
from batchfit._engine.workload import loop
from batchfit._engine.workload.user_errors import is_users
from batchfit.errors import UntraceableError

aten: Any = torch.ops.aten
log = logging.getLogger("batchfit")
_ADD = aten.add.Tensor
_ENGINE = engine_code()


@final
class Blocks(TraceLog):
    """What is allocated and freed, written down as it happens."""

    def __init__(self, *, detailed: bool = False) -> None:
        super().__init__()
        self._detailed = detailed  # whether an origin says what tensor a block was made for
        self._step_ends: list[int] = []
        self._loops: list[TokenLoop] = []
        self._begins = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._shared: dict[int, int] = {}  # how many storages more hold a block

    def __contains__(self, tensor: Tensor) -> bool:
        return address_of(tensor) in self._known

    def see(self, tensor: Tensor, origin: Origin, size: int | None = None) -> None:
        """A tensor is there; its storage is a block from now on until it is freed."""
        if tensor not in self:
            size = tensor.untyped_storage().nbytes() if size is None else size
            if self._detailed:
                dtype = str(tensor.dtype).removeprefix("torch.")
                origin = replace(origin, tensor=f"{dtype}{list(tensor.shape)}")
            self._hold(tensor, self.allocate(size, origin))

    def take_over(self, tensor: Tensor, from_: Tensor) -> None:
        """A tensor is there that lies where another one does: their block is freed with the last of them."""
        block = self._known[address_of(from_)][1]
        self._shared[block] = self._shared.get(block, 0) + 1
        self._hold(tensor, block)

    def _hold(self, tensor: Tensor, block: int) -> None:
        address = address_of(tensor)

        def freed(_: Any) -> None:
            entry = self._known.pop(address, None)
            if entry is None:
                return
            others = self._shared.pop(block := entry[1], 0)  # another one where the storage was resized
            if others:
                self._shared[block] = others - 1
            else:
                self._events.append(~block)

        self._known[address] = (weakref.ref(tensor.untyped_storage(), freed), block)

    def resized(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """A storage has another length now: it is another block, and the one that it was is gone."""
        entry = self._known.get(storage_address(storage))
        if entry is not None:
            self._known[storage_address(storage)] = (entry[0], self.allocate(storage.nbytes(), origin))
            self._events.append(~entry[1])

    def free(self, blocks: list[int]) -> None:
        """Blocks that no tensor held are gone."""
        self._events.extend(~block for block in blocks)

    def briefly(self, sizes: tuple[int, ...], origin: Origin) -> None:
        """Blocks that are there together for a moment."""
        self.free([self.allocate(size, origin) for size in sizes][::-1])

    def mark(self, tensor: Tensor, kind: str, name: str = "") -> None:
        """Say what the block of a tensor turned out to be for. Weights stay weights."""
        entry = self._known.get(address_of(tensor))
        if entry is not None:
            block = entry[1]
            origin = self._origins[block]
            if origin.kind != "weights" and (origin.kind != kind or (name and origin.module != name)):
                self._origins[block] = replace(origin, kind=kind, module=name)

    def begin(self) -> None:
        """What was there before the first step ends here."""
        self._begins = len(self._events)

    def end_step(self) -> None:
        self._step_ends.append(self.position())

    def position(self) -> int:
        """How many events there are so far."""
        return len(self._events)

    def looped(self, loop: TokenLoop) -> None:
        """What was written down since has some passes of a loop, and stands for all of them."""
        self._loops.append(loop)

    def trace(self, size: int) -> Trace:
        """What was written down."""
        found = self.written(size, self._begins, self._step_ends)
        self._known.clear()
        return (with_all_passes(found, self._loops) if self._loops else found).ordered()


# -- where the step is


@final
class Whereabouts:
    """Follows a step. `outside` is the code that calls it, and no part of it; `detailed` as in a trace."""

    def __init__(
        self,
        module_names: Mapping[int, str],
        outside: CodeType,
        communication: Communication | None,
        *,
        detailed: bool,
    ) -> None:
        self._module_names = module_names
        self._communication = communication
        self._outside = outside
        self._detailed = detailed
        self._modules: list[str] = []
        self._in_optimizer = 0
        self._lines: dict[tuple[str, int, str], str] = {}
        self._ours: dict[str, bool] = {}  # whether a file is torch's, or batchfit's
        self._users: dict[str, bool] = {}  # whether it is the user's own
        # Module, line, and all lines, by the number of an autograd node.
        self._forward: dict[int, tuple[str, str, tuple[CodeLine, ...]]] = {}

    @contextlib.contextmanager
    def followed(
        self,
        parameters: Iterable[Tensor],
        *,
        on_gradient: Callable[[Tensor], None],
        on_state: Callable[[torch.optim.Optimizer], None],
    ) -> Iterator[None]:
        """Follows modules and optimizers; says when a gradient and when an optimizer's state is there."""
        module = torch.nn.modules.module

        def enter(one: nn.Module, *_: Any) -> None:
            self._modules.append(self._module_names.get(id(one), type(one).__name__))

        def leave(*_: Any) -> None:
            if self._modules:
                self._modules.pop()

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_optimizer += 1
            groups = optimizer.param_groups
            held = (part for group in groups for one in group["params"] for part in parts_of(one))
            if not all(isinstance(part, FakeTensor) for part in held):
                raise UntraceableError(
                    f"{type(optimizer).__name__}.step",
                    calling_line(),
                    "it has parameters of a model that is not in the workload's state: declare both, "
                    "batchfit.Workload(step, state=[model, optimizer])",
                )

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # A program's step ends in a hook like this one, which may have been there before.
            self._in_optimizer = max(0, self._in_optimizer - 1)
            on_state(optimizer)

        handles = [
            module.register_module_forward_pre_hook(enter),
            module.register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(on_gradient)  # type: ignore[no-untyped-call]
            for parameter in parameters
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_step(self) -> None:
        """A step that ended early may not have left its modules."""
        self._modules.clear()
        self._in_optimizer = 0

    def origin(self, kind: str, operation: str) -> Origin:
        """What a block is for that this operation makes here and now."""
        phase = self.phase()
        # A module that runs while gradients are computed: activations that a checkpoint computes again.
        recomputed = phase == "backward" and bool(self._modules)
        communication = self._communication
        if communication is not None and communication.is_active and kind != "workspaces":
            kind = COMMUNICATION
        elif phase == "batch":
            kind = "batch"
        elif phase != "forward" and kind == "activations" and not recomputed:
            kind = "temporaries"
        if phase == "backward" and not recomputed:
            module, source, lines = self._of_node()
        else:
            module, source, lines = self._here()
        stream = 0 if communication is None else communication.stream
        return Origin(kind, phase, module, source, operation, lines, stream=stream)

    def note_node(self) -> None:
        """Remember where we are for the backward of this operation.

        Autograd has made the operation's node, and given it the last number, before it gets here.
        """
        if not torch.is_grad_enabled() or (in_backward() and not self._modules):
            return  # in backward a module runs where a checkpoint computes it again, with nodes of its own
        number = next_number() - 1
        if number not in self._forward:
            self._forward[number] = self._here()

    def _here(self) -> tuple[str, str, tuple[CodeLine, ...]]:
        """The module and the line that are running; all lines, where they are wanted."""
        lines = self._all_lines() if self._detailed else ()
        return self._modules[-1] if self._modules else "", self._source(), lines

    def _of_node(self) -> tuple[str, str, tuple[CodeLine, ...]]:
        """The module and the line whose gradient is being computed: backward itself runs in C++."""
        node = _node()
        if node is None:
            return "", "", ()
        number = number_of(node)
        # An operation in place on a view has two more nodes, right after its own.
        known = (self._forward.get(number - back) for back in range(3))
        return next((one for one in known if one is not None), ("", "", ()))

    def phase(self) -> str:
        """batch, forward, backward or optimizer."""
        if self._in_optimizer:
            return "optimizer"
        if in_backward():
            return "backward"
        return "batch" if loop.current_phase() == "batch" else "forward"

    def _source(self) -> str:
        """The innermost line of the step outside torch and batchfit; nothing where it has none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is self._outside:  # what lies beyond called batchfit, and is no part of the step
                break
            name = code.co_filename
            if not self._is_ours(name):
                key = (name, frame.f_lineno, code.co_name)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = f"{Path(name).name}:{frame.f_lineno} {code.co_name}"
                return line
            frame = frame.f_back
        return ""

    def _is_ours(self, file: str) -> bool:
        """Whether a file is torch's or batchfit's, or none."""
        ours = self._ours.get(file)
        if ours is None:
            ours = self._ours[file] = file.startswith((*TORCH, *HERE)) or file[0] == "<"
        return ours

    def _is_users(self, file: str) -> bool:
        known = self._users.get(file)
        if known is None:
            known = self._users[file] = is_users(file, home=None)
        return known

    def _all_lines(self) -> tuple[CodeLine, ...]:
        """The innermost line, as `_source` has it, and those of the program's own that lead there."""
        found: list[CodeLine] = []
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code is not self._outside:
            code = frame.f_code
            file = code.co_filename
            if not self._is_ours(file) and (not found or self._is_users(file)):
                function = code.co_qualname.rpartition("<locals>.")[2]
                found.append(CodeLine(file, frame.f_lineno, function))
            frame = frame.f_back
        return tuple(reversed(found))


# -- what is written in place


@final
class InPlace:
    """Says, of an operation that a trace sees, into whose memory a real run would write the result.

    torch keeps its hands off tensors of a class of somebody's own, such as a trace's fake ones: it then adds
    gradients and biases into new memory. A real run adds them in place, in two cases:

    - Backward: a gradient that comes second is added to the one that waits, if nobody else holds that one.
    - `linear` on an input that is not contiguous: the bias is added to the product.
    """

    def __init__(self) -> None:
        self._running = threading.local()  # the biases of the `linear`s that run in a thread
        self._made: dict[int, int] = {}  # by which node of backward a storage was made
        counts_of_one_holder()  # now, and not in the middle of a trace

    def active(self, key: str) -> AbstractContextManager[None]:
        """Inside, it is known when `linear` runs."""
        return kernels_replaced({"linear": self.linear}, key)

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
        address = address_of(tensor)
        node = _node()
        if node is None:
            self._made.pop(address, None)
        else:
            self._made[address] = number_of(node)

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
        return waiting if alone is not None and use_counts(waiting) == alone else None

    def _waits(self, tensor: Tensor) -> bool:
        """Whether a gradient may be one that waits for another, and is no part of a node's own arithmetic."""
        node = _node()
        maker = self._made.get(address_of(tensor))
        if node is None or maker is None:
            return False
        if maker != number_of(node):
            return True
        targets = [target for target in node.next_functions if target[0] is not None]
        return len(set(targets)) < len(targets)  # two of its results go to one place


def _node() -> Any:
    """The node of backward that runs, or has just run."""
    return current_node() if in_backward() else None


def _by_the_engine(depth: int) -> bool:
    """Whether backward itself called, and no line of a program's own backward function."""
    try:
        return sys._getframe(depth + 1).f_code is _ENGINE
    except ValueError:  # nobody: a thread of the engine's own, for a GPU
        return True


@functools.cache
def counts_of_one_holder() -> tuple[int, int] | None:
    """As often as that where only backward holds them (and the call, and Python): seen in an example.

    None where a version of torch cannot be asked: sums are then copies, as a trace sees them.
    """
    if _ENGINE is None:
        return None
    seen: list[tuple[int, int] | None] = []

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is _ADD and in_backward():
                seen.append(use_counts(args[0]))
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
    except (RuntimeError, UntraceableError) as error:
        log.info("gradients are traced as if they were never added in place: %s", str(error))
        return None
    return seen[0] if seen else None
