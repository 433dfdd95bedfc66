"""Traces a workload with fake tensors: what its steps allocate and free, at one size, without memory.

Rules:
- The device is fake, the host is real. Tensors on the traced device have shapes and no memory; what a
  program computes on the host (its data, its random decisions) is really computed, on the small batches of a
  trace, so that no branch is guessed.
- Nothing of the user's is changed: parameters, buffers and optimizer state are replaced by fakes for the
  trace and put back after it, random states too, and host tensors that the step writes into.
- What cannot be traced is an `UntraceableError` that names the operation and the line.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from batchfit._decide.footprint import OPTIONAL, Origin, Trace
from batchfit._torch import phase as phases
from batchfit._torch.calling import HERE, TORCH, calling_line, library_caller, named
from batchfit._torch.cuda_rules import STAND_INS, CudaRules
from batchfit._torch.faking import Faked
from batchfit._torch.generating import short_generation
from batchfit._torch.known_values import KnownValues, written_by
from batchfit._torch.libraries import not_called_a_trace
from batchfit._torch.rng import global_states
from batchfit._torch.unread import values_unread
from batchfit._torch.workspaces import Extra, extra_of, is_gemm
from batchfit.errors import UntraceableError
from batchfit.workload import Workload

_ITEM = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default
STEPS = 2


def trace(
    workload: Workload,
    size: int,
    *,
    rules: CudaRules,
    steps: int = STEPS,
    changes: tuple[Any, ...] = (),
    limit_s: float | None = None,
) -> Trace:
    """The allocations and frees of `steps` steps of `size` samples.

    `changes` are contexts that change the step for the trace only: `change(workload, faked)`. A trace that
    has not ended after `limit_s` is given up (`UntraceableError`).
    """
    undo = global_states()
    collects = gc.isenabled()
    gc.disable()  # a collection would free things at moments of its own
    try:
        with contextlib.ExitStack() as stack:
            faked = stack.enter_context(Faked.of(workload, device=rules.device))
            stack.enter_context(rules.active())
            stack.enter_context(_not_compiled())
            stack.enter_context(short_generation(workload))
            for change in changes:
                stack.enter_context(change(workload, faked))
            recorder = Recorder(faked, rules, limit_s)
            stack.callback(recorder.put_back_written)
            stack.enter_context(not_called_a_trace(recorder.knows))
            # A fused kernel of TorchScript would really run, on the addresses of tensors that have none.
            jit: Any = torch.jit
            stack.enter_context(jit.optimized_execution(False))
            stack.enter_context(values_unread(recorder.knows))
            with recorder.watching():
                for _ in range(steps):
                    _run(workload, size, recorder)
                    recorder.end_step()
            return recorder.trace(size)
    finally:
        if collects:
            gc.enable()
        for _, put_back in undo:
            put_back()


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    """Compiled modules run as they were written; their complaint about global hooks is about ours."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and it takes long to import
        yield
        return
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.filterwarnings(
            "ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks"
        )
        yield


def _run(workload: Workload, size: int, recorder: Recorder) -> None:
    try:
        with recorder.faked.mode, recorder, warnings.catch_warnings():
            # nn.LSTM looks whether its weights lie side by side, and is answered that they do not.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            workload.step(size)
    except UntraceableError:
        raise
    except Exception as error:
        if _is_argument_error(error):
            raise
        raise _explained(error, recorder) from error
    finally:
        phases.clear()


def _is_argument_error(error: Exception) -> bool:
    """batchfit's own complaint about what it was given (a loss that is no scalar): not about tracing."""
    raised = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
    inside = raised.startswith(HERE) and Path(raised) != Path(__file__)
    return inside and isinstance(error, TypeError | ValueError)


def _explained(error: Exception, recorder: Recorder) -> UntraceableError:
    """What stood in the way, with the user's own line."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    where = named(reversed(places))
    # An error that the program itself raises has nothing to do with the operation before it.
    in_torch = places[-1][0].startswith((*TORCH, *HERE))
    operation = str(getattr(error, "func", "") or (recorder.operation if in_torch else ""))
    if isinstance(error, DynamicOutputShapeException):
        return UntraceableError(operation, where, "the shape of its result depends on the data")
    if isinstance(error, DataDependentOutputException):
        return UntraceableError(operation, where, "its result is read by the program and depends on the data")
    if isinstance(error, UnsupportedOperatorException | NotImplementedError):
        return UntraceableError(operation, where, "it has no fake kernel (torch.library.register_fake)")
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return UntraceableError(operation, where, f"{type(error).__name__}: {first.rstrip('.')}")


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees every operation of a step on the fake device, and writes down what it allocates and frees."""

    def __init__(self, faked: Faked, rules: CudaRules, limit_s: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.faked = faked
        self.rules = rules
        self.operation: Any = ""
        self._ends = None if limit_s is None else time.perf_counter() + limit_s
        self._blas: set[bool] = set()  # in which threads cuBLAS has its workspace: backward's or not
        self._sizes: list[int] = []
        self._origins: list[Origin] = []
        self._events: list[int] = []
        self._step_ends: list[int] = []
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._adopted: dict[int, tuple[weakref.ref[Any], Tensor]] = {}
        self._values = KnownValues()
        self._modules: list[str] = []
        self._in_optimizer = 0
        self._lines: dict[tuple[Any, int], str] = {}
        self._made: dict[int, Any] = {}  # host storages that the step made itself, by address
        self._written: dict[int, tuple[Tensor, Tensor]] = {}  # others that it wrote into: tensor, before
        self._forward: dict[int, tuple[str, str]] = {}  # module and line by the number of an autograd node
        self._names: dict[int, str] = {}  # of parameters, by id
        for name, tensor, kind in faked.held():
            self._see(tensor, Origin(kind, "held", module=name))
            self._names.setdefault(id(tensor), name)
        self._begins = len(self._events)

    # -- what happens around the operations

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follows modules, optimizers and gradients, to say what a block is for."""
        names = self.faked.module_names
        module = torch.nn.modules.module

        def enter(one: nn.Module, *_: Any) -> None:
            self._modules.append(names.get(id(one), type(one).__name__))

        def leave(*_: Any) -> None:
            if self._modules:
                self._modules.pop()

        def begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_optimizer += 1
            groups = optimizer.param_groups
            if not all(isinstance(one, FakeTensor) for group in groups for one in group["params"]):
                raise UntraceableError(
                    f"{type(optimizer).__name__}.step",
                    calling_line(),
                    "it has parameters of a model that is not in the workload's state: declare both, "
                    "batchfit.Workload(step, state=[model, optimizer])",
                )

        def end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._in_optimizer -= 1
            self._mark_state(optimizer)

        handles = [
            module.register_module_forward_pre_hook(enter),
            module.register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(begin),
            register_optimizer_step_post_hook(end),
        ]
        handles += [
            parameter.register_post_accumulate_grad_hook(self._mark_gradient)  # type: ignore[no-untyped-call]
            for parameter in self.faked.parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._mark(parameter.grad, "gradients", self._names.get(id(parameter), ""))

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer keeps for a parameter carries the parameter's name, as its gradient does."""
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, FakeTensor):
                    self._mark(value, "optimizer", self._names.get(id(parameter), ""))

    def _mark(self, tensor: Tensor, kind: str, name: str = "") -> None:
        entry = self._known.get(_address(tensor))
        if entry is not None:
            block = entry[1]
            origin = self._origins[block]
            if origin.kind != "weights" and (origin.kind != kind or (name and origin.module != name)):
                self._origins[block] = replace(origin, kind=kind, module=name)

    def end_step(self) -> None:
        """A step is over: name what it leaves behind."""
        for tensor in self.faked.optimizer_tensors():
            self._mark(tensor, "optimizer")
        self._modules.clear()
        self._in_optimizer = 0
        self._step_ends.append(len(self._events))

    def trace(self, size: int) -> Trace:
        found = Trace(
            size,
            tuple(self._sizes),
            tuple(self._origins),
            tuple(self._events),
            self._begins,
            tuple(self._step_ends),
        )
        self._known.clear()  # what dies after this is not the step's doing
        return found.ordered()

    # -- the operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:  # asked for all the time, and by torch itself
            return func(*args, **kwargs)
        self.operation = func
        if self._ends is not None and time.perf_counter() > self._ends:
            raise UntraceableError("", "", "the trace takes too long")
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self.rules.renamed(kwargs["device"])}
        tensors: list[Tensor] = []
        _collect(args, tensors)
        _collect(kwargs.values(), tensors)
        if not any(isinstance(one, FakeTensor) for one in tensors):
            place = kwargs.get("device")
            place = place if place is not None else tensors[0].device if tensors else torch.device("cpu")
            if place.type == "cpu" and place != self.rules.device and self._is_host(tensors):
                return self._on_host(func, args, kwargs)
        if len(tensors) and not all(isinstance(one, FakeTensor) for one in tensors):
            args, kwargs = self._faked_arguments(func, args, kwargs, tensors)
        if func is _ITEM:
            return self._item(args[0])
        if func in _SHAPED_BY_DATA:
            known = self._counted(func, args, kwargs, tensors)
            if known is not None:
                self._record(func, known, None)
                return known
        composite = self.rules.composite(func)
        if composite is None and torch.is_inference_mode_enabled() and _is_composite(func):
            composite = func.decompose  # comes whole where autograd does not take it apart
        if composite is not None:
            with self:
                return composite(*args, **kwargs)
        self._note_node()
        extra = extra_of(func, args, self.rules.card)
        stand_in = STAND_INS.get(func)
        out = func(*args, **kwargs) if stand_in is None else stand_in(*args, **kwargs)
        self._record(func, out, extra)
        self._values.follow(func, args, kwargs, tensors, out)
        return out

    def knows(self, value: Any) -> bool:
        """Whether the values of a tensor are known."""
        return self._values.of(value) is not None

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Really run an operation of the host; what it writes into and the step did not make is put back."""
        with unset_fake_temporarily():
            for one in written_by(func, args, kwargs):
                address = _address(one)
                if address not in self._made and address not in self._written:
                    self._written[address] = (one, _whole(one).clone())
            out = func(*args, **kwargs)
        made: list[Tensor] = []
        if not func.is_view:
            _collect((out,), made)
        for one in made:
            if one.layout is not torch.strided:
                continue
            address = _address(one)
            if address not in self._made and address not in self._written:
                forget = functools.partial(_forget, self._made, address)
                self._made[address] = weakref.ref(one.untyped_storage(), forget)
        return out

    def put_back_written(self) -> None:
        """Host tensors of the program as they were before the trace."""
        with torch.no_grad():
            for tensor, before in self._written.values():
                _whole(tensor).copy_(before)
        self._written.clear()

    def _counted(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Tensor | None:
        """The result of an operation whose shape depends on values, where these are known."""
        values = {id(one): self._values.of(one) for one in tensors}
        if not values or any(value is None for value in values.values()):
            return None
        with unset_fake_temporarily():
            real = func(*(values.get(id(one), one) for one in args), **kwargs)
        fake = self.faked.shaped_like(real, self.rules.device)
        self._values.put(fake, real)
        return fake

    def _is_host(self, tensors: list[Tensor]) -> bool:
        for one in tensors:
            if one.device.type != "cpu":
                return False
            # A frozen one as well: without a GPU its model would really be computed, and not be counted.
            learns = one.requires_grad and one.is_leaf
            if isinstance(one, nn.Parameter) and (learns or self.rules.host_means_device):
                raise UntraceableError(
                    str(self.operation),
                    calling_line(),
                    "it uses a parameter of a model that is not in the workload's state: declare it, "
                    "batchfit.Workload(step, state=[model, optimizer])",
                )
        return True

    def _faked_arguments(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """Real tensors beside fake ones: from the host, or the program's own on the device."""
        moves = func in _MOVES

        def faked(value: Any) -> Any:
            if isinstance(value, FakeTensor) or not isinstance(value, Tensor | list | tuple):
                return value
            if isinstance(value, Tensor):
                return self._adopt(value, as_host=moves or value.dim() == 0)
            return type(value)(faked(one) for one in value) if type(value) in (list, tuple) else value

        if any(
            one.requires_grad and isinstance(one, nn.Parameter)
            for one in tensors
            if not isinstance(one, FakeTensor)
        ):
            self._is_host([one for one in tensors if not isinstance(one, FakeTensor)])
        return tuple(faked(one) for one in args), {name: faked(one) for name, one in kwargs.items()}

    def _adopt(self, real: Tensor, *, as_host: bool) -> Tensor:
        """The fake that stands for a real tensor from now on."""
        key = id(real)
        found = self._adopted.get(key)
        if found is not None and found[0]() is real:
            return found[1]
        on_device = real.device.type != "cpu" or (self.rules.host_means_device and not as_host)
        with unset_fake_temporarily():
            place = self.rules.device if on_device else torch.device("cpu")
            fake = self.faked.shaped_like(real.detach(), place)
            if place.type == "cpu" and real.dim() == 0 and real.device.type == "cpu":
                fake.constant = real.detach().clone()  # type: ignore[attr-defined]
        if as_host and not on_device:
            return fake
        if on_device:
            self._see(fake, self._origin("batch", "adopted"))
        self._adopted[key] = (weakref.ref(real, lambda _: self._adopted.pop(key, None)), fake)
        return fake

    def _item(self, tensor: Any) -> Any:
        known = self._values.of(tensor)
        known = getattr(tensor, "constant", None) if known is None else known
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        # Step counters and found_inf: they enter formulas, never a shape. A scaler that found no inf steps.
        # A truth value is a branch: it is not guessed.
        caller = library_caller() if tensor.dtype is not torch.bool else ""
        if caller == "optim":
            return 1.0
        if caller == "grad_scaler":
            return 0.0
        raise UntraceableError(
            ".item()", calling_line(), "the program reads a value that depends on the data"
        )

    def _record(self, func: Any, out: Any, extra: Extra | None) -> None:
        made: list[Tensor] = []
        _collect((out,), made)
        here = self.rules.device
        operation = None
        early: list[int] = []
        for index, tensor in enumerate(made):
            if extra is not None and index in extra.before:
                early.append(self._allocate(extra.before[index], self._origin("workspaces", str(func))))
            if not isinstance(tensor, FakeTensor) or tensor.fake_device != here:
                continue
            if _address(tensor) not in self._known:
                if operation is None:
                    operation = str(func)
                longer = extra.outputs.get(index) if extra is not None else None
                self._see(tensor, self._origin("activations", operation), longer)
            if extra is not None and index in extra.after:
                self._briefly((extra.after[index],), str(func))
            if extra is not None and index in extra.plans:
                self._briefly((extra.plans[index],), OPTIONAL + str(func))
        if is_gemm(func) and operation is not None:
            self._keep_blas()
        if extra is not None and extra.together:
            self._briefly(extra.together, str(func))
        self._events.extend(~block for block in early)

    def _briefly(self, sizes: tuple[int, ...], operation: str) -> None:
        origin = self._origin("workspaces", operation)
        blocks = [self._allocate(size, origin) for size in sizes]
        self._events.extend(~block for block in reversed(blocks))

    def _keep_blas(self) -> None:
        """cuBLAS takes a workspace at the first product in each thread, and backward has its own thread."""
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward in self._blas:
            return
        self._blas.add(in_backward)
        card = self.rules.card
        sizes = (card.blas_bytes,) if in_backward else (card.blas_bytes, card.blas_lt_bytes)
        for size in sizes:
            if size:
                self._allocate(size, Origin("workspaces", self._phase(), operation="cuBLAS"))

    def _see(self, tensor: Tensor, origin: Origin, size: int | None = None) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        block = self._allocate(storage.nbytes() if size is None else size, origin)

        def freed(_: Any, block: int = block, address: int = address) -> None:
            if self._known.pop(address, None) is not None:
                self._events.append(~block)

        self._known[address] = (weakref.ref(storage, freed), block)

    def _allocate(self, size: int, origin: Origin) -> int:
        block = len(self._sizes)
        self._sizes.append(size)
        self._origins.append(origin)
        self._events.append(block)
        return block

    # -- where we are

    def _origin(self, kind: str, operation: str) -> Origin:
        phase = self._phase()
        # A module that runs while gradients are computed: activations that a checkpoint computes again.
        recomputed = phase == "backward" and bool(self._modules)
        if phase == "batch":
            kind = "batch"
        elif phase != "forward" and kind == "activations" and not recomputed:
            kind = "temporaries"
        if phase == "backward" and not recomputed:
            module, source = self._of_node()
        else:
            module, source = self._modules[-1] if self._modules else "", self._source()
        return Origin(kind, phase, module, source, operation)

    def _note_node(self) -> None:
        """Remember where we are for the backward of this operation.

        Autograd has made the operation's node, and given it the last number, before it gets here.
        """
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return
        number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        if number not in self._forward:
            self._forward[number] = (self._modules[-1] if self._modules else "", self._source())

    def _of_node(self) -> tuple[str, str]:
        """The module and the line whose gradient is being computed: backward itself runs in C++."""
        node: Any = torch._C._current_autograd_node()
        return self._forward.get(node._sequence_nr(), ("", "")) if node is not None else ("", "")

    def _phase(self) -> str:
        if self._in_optimizer:
            return "optimizer"
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        return "batch" if phases.current() == "batch" else "forward"

    def _source(self) -> str:
        """The innermost line of the step outside torch and batchfit; nothing where it has none."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            if code is _run.__code__:  # what lies beyond called batchfit, and is no part of the step
                break
            name = code.co_filename
            if not name.startswith((*TORCH, *HERE)) and name[0] != "<":
                key = (code, frame.f_lineno)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = f"{Path(name).name}:{frame.f_lineno} {code.co_name}"
                return line
            frame = frame.f_back
        return ""


_SHAPED_BY_DATA = frozenset({torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default})
_MOVES = frozenset(
    {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.index.Tensor}
)


@functools.cache
def _is_composite(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's memory."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _forget(table: dict[int, Any], key: int, _: Any) -> None:
    table.pop(key, None)
