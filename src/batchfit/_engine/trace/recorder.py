"""The dispatch mode of a trace: every operation of a step, on a fake device beside a real host.

Rules:
- Operations of the host are really run; what they write into and the step did not make is put back.
- An operation on the fake device runs with fake tensors; what it allocates, inside a kernel too, is written
  down in the order in which the card would.
- A value that depends on the data is never invented, but where only a library's bookkeeping reads it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Never, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from batchfit._engine.allocator.footprint import OPTIONAL, Origin, Trace
from batchfit._engine.cuda_model.copies import Extra
from batchfit._engine.cuda_model.dispatch import CudaRules, packed
from batchfit._engine.trace.block_log import Blocks, address_of
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.generation import Generating
from batchfit._engine.trace.host_writes import HostWrites
from batchfit._engine.trace.in_place import InPlace
from batchfit._engine.trace.known_values import KnownValues, written_by
from batchfit._engine.trace.operation import ITEM, Operation
from batchfit._engine.trace.provenance import Whereabouts
from batchfit._engine.trace.source_line import calling_line, library_caller
from batchfit.errors import UntraceableError

_LINEAR = torch.ops.aten.linear.default
_DEVICE = torch.ops.prim.device.default


@final
class TraceRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Sees every operation of a step on the fake device, and writes down what it allocates and frees."""

    def __init__(
        self,
        faked: Faked,
        rules: CudaRules,
        *,
        outside: CodeType,
        check: Callable[[], None],
        limit_s: float | None = None,
        counts_host: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.faked = faked
        self.rules = rules
        self.operation: Any = ""
        self._check = check  # whether somebody wants the trace to end
        self.refused: list[UntraceableError] = []  # the program may have caught them
        self._ends = None if limit_s is None else time.perf_counter() + limit_s
        self._blas: set[bool] = set()  # in which threads cuBLAS has its workspace: backward's or not
        self.blocks = Blocks()
        self.in_place = InPlace()
        self.generating = Generating()
        self._where = Whereabouts(faked.module_names, outside)
        self._adopted: dict[int, tuple[weakref.ref[Any], Tensor]] = {}
        self._values = KnownValues()
        self._known: dict[Any, Operation] = {}
        self._made: dict[int, Any] = {}  # host storages that the step made itself, by address
        self.host_writes = HostWrites()  # into others
        # Whether the program names the device itself; else, without a GPU, it has put everything on the CPU.
        # What a step computes there before a weight comes in is then the device's (`counts_host`), but for
        # batches that are made for it: theirs is the host.
        self._tells_apart = not rules.host_means_device
        self._counts_host = counts_host
        self._filled: dict[int, tuple[Any, bool]] = {}  # host storages with values of the device, by address
        self._names: dict[int, str] = {}  # of parameters, by id
        for name, tensor, kind in faked.held():
            self.blocks.see(tensor, Origin(kind, "held", module=name))
            self._names.setdefault(id(tensor), name)
        for counter, value in faked.counters():
            self._values.put(counter, value)
        faked.let_go()
        self.blocks.begin()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follows the step, to say what a block is for."""
        learning = [one for one in self.faked.parameters() if one.requires_grad]
        with self._where.followed(learning, on_gradient=self._mark_gradient, on_state=self._mark_state):
            yield

    def _mark_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.blocks.mark(parameter.grad, "gradients", self._names.get(id(parameter), ""))

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer keeps for a parameter carries the parameter's name, as its gradient does."""
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                if isinstance(value, FakeTensor):
                    self.blocks.mark(value, "optimizer", self._names.get(id(parameter), ""))

    def end_step(self) -> None:
        """A step is over: name what it leaves behind."""
        for tensor in self.faked.optimizer_tensors():
            self.blocks.mark(tensor, "optimizer")
        self._where.end_step()
        self.blocks.end_step()

    def trace(self, size: int) -> Trace:
        """What was written down."""
        return self.blocks.trace(size)

    # -- the operations

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would wrap each call to keep its compiler out; a trace runs nothing compiled (`eagerly`)."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # asked for all the time, and by torch itself
            return args[0].device if type(args[0]) is FakeTensor else func(*args)
        self._check()
        kwargs = kwargs or {}
        self.operation = func
        if self._ends is not None and time.perf_counter() > self._ends:
            raise UntraceableError("", "", "the trace takes too long")
        if "device" in kwargs:
            place = self.rules.renamed(kwargs["device"])
            self._tells_apart |= place is not kwargs["device"]
            kwargs = {**kwargs, "device": place}
        given = args
        tensors: list[Tensor] = []
        _collect(args, tensors)
        if kwargs:
            _collect(kwargs.values(), tensors)
        fakes = [type(one) for one in tensors].count(FakeTensor)
        if not fakes and not (self._filled and self._any_filled(tensors)):
            place = kwargs.get("device")
            place = place if place is not None else tensors[0].device if tensors else torch.device("cpu")
            if place.type == "cpu" and place != self.rules.device and self._is_host(tensors):
                return self._on_host(func, args, kwargs)
        if func is _PACK and fakes == 1 and isinstance(args[0], FakeTensor):
            return self._packed(*args)
        if fakes < len(tensors):
            if fakes:
                self._note_filled(func, args, kwargs)
            args, kwargs = self._faked_arguments(func, args, kwargs, tensors)
            tensors = []
            _collect((*args, *kwargs.values()), tensors)
        known = self._known.get(func)
        if known is None:
            known = self._known[func] = Operation.of(func, self.rules)
        if known.reads_data:
            if func is ITEM:
                return self._item(args[0])
            counted = self._counted(func, args, kwargs, tensors)
            if counted is not None:
                self._record(known, counted, None)
                return counted
        composite = known.composite
        if composite is None and known.is_composite and torch.is_inference_mode_enabled():
            # It comes whole where autograd does not take it apart.
            composite = self.in_place.linear if func is _LINEAR else func.decompose
        if composite is not None:
            with self:
                return composite(*args, **kwargs)
        self._where.note_node()
        extra = None
        if known.takes is not None and all(one.layout is torch.strided for one in tensors):
            extra = known.takes(args, self.rules.card)
        into = self.in_place.written_into(func, args, given, depth=1)
        stand_in = known.stand_in
        try:
            out = self._result(func, args, kwargs) if stand_in is None else stand_in(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            self.refused.append(
                UntraceableError(known.name, calling_line(), "its result depends on the data")
            )
            raise
        if into is not None and into in self.blocks:
            self.blocks.take_over(out, into)
            self.in_place.note(out)
        self._record(known, out, extra)
        self._values.follow(func, args, kwargs, tensors, out)
        return out

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The fake result; what a program that knows one device only has left on the host comes along."""
        try:
            return self.faked.results.of(func, args, kwargs)
        except RuntimeError:
            moved = None if self._tells_apart else self._on_device((args, kwargs))
            if moved is None:
                raise
            return self.faked.results.of(func, *moved)

    def _on_device(self, arguments: Any) -> Any:
        """The arguments of an operation with all tensors on the device; None where they are in one place."""
        here, there = self.rules.device, torch.device("cpu")
        tensors: list[Tensor] = []
        _collect((*arguments[0], *arguments[1].values()), tensors)
        places = {one.device for one in tensors if one.dim()}
        if places != {here, there}:
            return None

        def moved(one: Any) -> Any:
            if not isinstance(one, FakeTensor) or one.device != there or not one.dim():
                return one
            fake = self.faked.shaped_like(one, here)
            self.blocks.see(fake, self._where.origin("batch", "adopted"))
            return fake

        return tree_map(moved, arguments)

    def _packed(self, value: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Samples of the lengths that the host knows, one after the other."""
        with unset_fake_temporarily():
            known = lengths.tolist()
        with self:
            data, sizes = packed(value, known, batch_first)
        with unset_fake_temporarily():
            return data, torch.tensor(sizes)

    def knows(self, value: Any) -> bool:
        """Whether the values of a tensor are known."""
        return self._values.of(value) is not None

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Really run an operation of the host; what it writes into and the step did not make is put back."""
        with unset_fake_temporarily():
            for one in written_by(func, args, kwargs):
                address = address_of(one)
                if address not in self._made and address not in self.host_writes:
                    self.host_writes.note(one)
                self._forget_adopted(address)
            out = func(*args, **kwargs)
        made: list[Tensor] = []
        if not func.is_view:
            _collect((out,), made)
        counts = self._counts_host and not self._tells_apart
        for one in made:
            if one.layout is not torch.strided:
                continue
            if counts and one.dim():
                self.blocks.see(one, self._where.origin("batch", str(func)))
            address = address_of(one)
            if address not in self._made and address not in self.host_writes:
                forget = functools.partial(_forget, self._made, address)
                self._made[address] = weakref.ref(one.untyped_storage(), forget)
        return out

    def _forget_adopted(self, address: int) -> None:
        """A host tensor is written into: what it was when it came to the device is no longer its value."""
        for real, fake in list(self._adopted.values()):
            living = real()
            if living is not None and address_of(living) == address:
                self._values.drop(fake)

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
        if any(one.device.type != "cpu" for one in tensors):
            return False
        for one in tensors:
            # A frozen one as well: without a GPU its model would really be computed, and not be counted.
            learns = one.requires_grad and one.is_leaf
            if isinstance(one, nn.Parameter) and (learns or self.rules.host_means_device):
                self._refuse_undeclared()
            if learns and self.rules.host_means_device and address_of(one) not in self._made:
                self._refuse_undeclared()
        return True

    def _refuse_undeclared(self) -> Never:
        raise UntraceableError(
            str(self.operation),
            calling_line(),
            "it uses a parameter of a model that is not in the workload's state: declare it, "
            "batchfit.Workload(step, state=[model, optimizer])",
        )

    def _faked_arguments(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """Real tensors beside fake ones: from the host, or the program's own on the device."""
        moves = func in _MOVES
        # A table is where its index is. By its id: `faked` is a circle, which would keep the table alive.
        on_device = func is _INDEX and any(one.device == self.rules.device for one in tensors)
        table = id(args[0]) if on_device else None

        def faked(value: Any) -> Any:
            if isinstance(value, FakeTensor) or not isinstance(value, Tensor | list | tuple):
                return value
            if isinstance(value, Tensor):
                stays = moves and id(value) != table
                return self._adopt(value, as_host=stays or value.dim() == 0, is_index=func is _INDEX)
            return type(value)(faked(one) for one in value) if type(value) in (list, tuple) else value

        real = [one for one in tensors if not isinstance(one, FakeTensor)]
        learning = [one for one in real if isinstance(one, nn.Parameter) and one.requires_grad]
        if learning and not self._is_host(real) and torch.is_grad_enabled():
            self._refuse_undeclared()  # its gradient would be the real parameter's
        return tuple(faked(one) for one in args), {name: faked(one) for name, one in kwargs.items()}

    def _note_filled(self, func: Any, args: Any, kwargs: Any) -> None:
        """What of the program's is written with values that are not there: who reads it must not see its own.

        It was copied from the device, or is itself what would be on the device.
        """
        to_host = func in _MOVES and self._tells_apart
        for one in written_by(func, args, kwargs):
            if isinstance(one, FakeTensor):
                continue
            address = address_of(one)
            forget = functools.partial(_forget, self._filled, address)
            self._filled[address] = (weakref.ref(one.untyped_storage(), forget), to_host)

    def _any_filled(self, tensors: list[Tensor]) -> bool:
        plain = (one for one in tensors if one.layout is torch.strided)
        return any(address_of(one) in self._filled for one in plain)

    def _adopt(self, real: Tensor, *, as_host: bool, is_index: bool) -> Tensor:
        """The fake that stands for a real tensor from now on."""
        key = id(real)
        found = self._adopted.get(key)
        if found is not None and found[0]() is real:
            return found[1]
        filled = self._filled.get(address_of(real)) if self._filled and real.layout is torch.strided else None
        if filled is not None:
            as_host = filled[1]
        on_device = real.device.type != "cpu" or (self.rules.host_means_device and not as_host)
        with unset_fake_temporarily():
            place = self.rules.device if on_device else torch.device("cpu")
            fake = self.faked.shaped_like(real.detach(), place)
            if filled is None:
                if place.type == "cpu" and real.dim() == 0 and real.device.type == "cpu":
                    fake.constant = real.detach().clone()  # type: ignore[attr-defined]
                self._values.see(fake, real, is_index=is_index)
        if as_host and not on_device:
            return fake
        if on_device and real.layout is torch.strided and real in self.blocks:
            self.blocks.take_over(fake, real)
        elif on_device:
            self.blocks.see(fake, self._where.origin("batch", "adopted"))
        self._adopted[key] = (weakref.ref(real, lambda _: self._adopted.pop(key, None)), fake)
        return fake

    def _item(self, tensor: Any) -> Any:
        known = self._values.of(tensor)
        known = getattr(tensor, "constant", None) if known is None else known
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        # Step counters and found_inf: they enter formulas, never a shape. A scaler that found no inf steps.
        # A truth value is a branch: it is not guessed, but where `generate` asks whether all samples have
        # ended, or a prompt with padding: all tokens are made, of whole prompts.
        caller, decides = library_caller(), tensor.dtype is torch.bool
        if caller == "generate" and decides and self.generating.goes_on():
            return False
        if caller == "distributions" and decides:  # whether arguments are valid: a step that runs has such
            return True
        if caller == "optim" and not decides:
            return 1.0
        if caller == "grad_scaler" and not decides:
            return 0.0
        error = UntraceableError(
            ".item()", calling_line(), "the program reads a value that depends on the data"
        )
        self.refused.append(error)
        raise error

    def _record(self, known: Operation, out: Any, extra: Extra | None) -> None:
        made: list[Tensor] = []
        _collect((out,), made)
        here = self.rules.device
        name = known.name
        allocates = False
        early: list[int] = []
        for index, tensor in enumerate(made):
            if extra is not None and index in extra.before:
                origin = self._where.origin("workspaces", name)
                early.append(self.blocks.allocate(extra.before[index], origin))
            if not isinstance(tensor, FakeTensor) or tensor.fake_device != here:
                continue
            if tensor not in self.blocks:
                allocates = True
                longer = extra.outputs.get(index) if extra is not None else None
                self.blocks.see(tensor, self._where.origin("activations", name), longer)
                self.in_place.note(tensor)
            if extra is not None and index in extra.after:
                self.blocks.briefly((extra.after[index],), self._where.origin("workspaces", name))
            if extra is not None and index in extra.plans:
                self.blocks.briefly((extra.plans[index],), self._where.origin("workspaces", OPTIONAL + name))
        if allocates and known.is_gemm:
            self._keep_blas()
        if extra is not None and extra.together:
            self.blocks.briefly(extra.together, self._where.origin("workspaces", name))
        self.blocks.free(early)

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
                self.blocks.allocate(size, Origin("workspaces", self._where.phase(), operation="cuBLAS"))


_INDEX = torch.ops.aten.index.Tensor
_PACK = torch.ops.aten._pack_padded_sequence.default
_MOVES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, _INDEX})


def _collect(values: Any, found: list[Tensor]) -> None:
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)


def _forget(table: dict[int, Any], key: int, _: Any) -> None:
    table.pop(key, None)
