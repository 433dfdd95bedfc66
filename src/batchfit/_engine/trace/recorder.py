"""The dispatch mode of a trace: every operation of a step, on a fake device beside a real host.

Rules:
- Operations of the host are really run (`host_tensors.py`).
- An operation on the fake device runs with fake tensors; what it allocates, inside a kernel too, is recorded
  in the order in which the GPU would allocate it.
- A value that depends on the data is never invented, except where only a library's bookkeeping reads it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from batchfit._engine.allocator.footprint import OPTIONAL, Origin, Trace
from batchfit._engine.cuda_model import quantised_kernels
from batchfit._engine.cuda_model.dispatch import STAND_INS, CudaRules
from batchfit._engine.cuda_model.library_kernels import GEMMS, RULES
from batchfit._engine.cuda_model.sequences import packed
from batchfit._engine.cuda_model.workspaces import Extra, Rule
from batchfit._engine.torch_private.autograd import in_backward
from batchfit._engine.torch_private.dispatch import OpOverload, TorchDispatchMode, is_composite, tree_map
from batchfit._engine.torch_private.fake import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    device_of,
    unset_fake_temporarily,
)
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.blocks import Blocks, InPlace, Whereabouts
from batchfit._engine.trace.fake_cache import tensors_among
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.generation import Generating
from batchfit._engine.trace.held_tensors import kind_is_made_of_tensors, parts_of
from batchfit._engine.trace.host_tensors import HostTensors
from batchfit._engine.trace.program_lines import calling_line, reading
from batchfit._engine.trace.recorded_reads import RecordedReads, Value
from batchfit._engine.trace.values import KnownValues, LibraryReads
from batchfit.errors import UntraceableError

_LINEAR = torch.ops.aten.linear.default
_DEVICE = torch.ops.prim.device.default
_PACK = torch.ops.aten._pack_padded_sequence.default
_ITEM = torch.ops.aten._local_scalar_dense.default
_KNOWN = frozenset({FakeTensor, Tensor, torch.nn.Parameter})
_SHAPED_BY_DATA = frozenset({torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default})


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
        detailed: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.faked = faked
        self.rules = rules
        self.operation: Any = ""
        self._check = check  # whether somebody wants the trace to end
        self.refused: list[UntraceableError] = []  # the program may have caught them
        self._ends = None if limit_s is None else time.perf_counter() + limit_s
        self._blas: set[bool] = set()  # in which threads cuBLAS has its workspace: backward's or not
        self.blocks = Blocks(detailed=detailed)
        self.in_place = InPlace()
        self.generating: Generating | None = None  # set where the step generates
        names, communication = faked.module_names, faked.communication
        self._where = Whereabouts(names, outside, communication, detailed=detailed)
        self._values = KnownValues()
        self._operations: dict[Any, Operation] = {}
        self.reads = LibraryReads()
        self.recorded: RecordedReads | None = None  # set where the program has really run before
        self.host = HostTensors(faked, rules, self.blocks, self._where, self._values, counts_host=counts_host)
        self._names: dict[int, str] = {}  # of parameters, by id
        for name, tensor, kind in faked.held():
            self.blocks.see(tensor, Origin(kind, "held", module=name))
            self._names.setdefault(id(tensor), name)
        self._names |= faked.holding.names_of_spread()
        for counter, value in faked.counters():
            self._values.put(counter, value)
        faked.let_go()
        self.blocks.begin()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Follows the step, to say what a block is for."""
        learning = [one for one in self.faked.holding.parameters() if one.requires_grad]
        with self._where.followed(learning, on_gradient=self._mark_gradient, on_state=self._mark_state):
            yield

    def _mark_gradient(self, parameter: Tensor) -> None:
        for part in parts_of(parameter.grad):  # none of None
            self.blocks.mark(part, "gradients", self._names.get(id(parameter), ""))

    def resizes_seen(self) -> contextlib.AbstractContextManager[None]:
        """Inside, `storage.resize_()` is recorded, which is no operation: FSDP frees and refills with it."""
        plain: Any = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = plain(storage, size)
            self.blocks.resized(storage, self._where.origin("activations", "resize_"))
            return done

        return replaced(torch.UntypedStorage, "resize_", resize)

    def _mark_state(self, optimizer: torch.optim.Optimizer) -> None:
        """What an optimizer keeps for a parameter carries the parameter's name, as its gradient does."""
        for parameter, state in optimizer.state.items():
            for value in state.values() if isinstance(state, dict) else ():
                for part in parts_of(value):
                    if isinstance(part, FakeTensor):
                        self.blocks.mark(part, "optimizer", self._names.get(id(parameter), ""))

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
        if not _KNOWN.issuperset(types) and any(map(kind_is_made_of_tensors, types)):
            return NotImplemented  # its own code says what it does with the tensors inside: they come here
        self._check()
        self.operation = func
        if self._ends is not None and time.perf_counter() > self._ends:
            raise UntraceableError("", "", "the trace takes too long")
        given = args
        kwargs = self.host.renamed(kwargs or {})
        tensors = tensors_among(args)
        if kwargs:
            tensors += tensors_among(kwargs.values())
        fakes = [type(one) for one in tensors].count(FakeTensor)
        if not fakes and self.host.runs(func, tensors, kwargs):
            return self.host.run(func, args, kwargs)
        if func is _PACK and fakes == 1 and isinstance(args[0], FakeTensor):
            return self._packed(*args)
        if fakes < len(tensors):
            if fakes:
                self.host.note_filled(func, args, kwargs)
            args, kwargs = self.host.faked_arguments(func, args, kwargs, tensors)
            tensors = tensors_among((*args, *kwargs.values()))
        known = self._operations.get(func)
        if known is None:
            known = self._operations[func] = Operation.of(func, self.rules)
        if known.reads_data:
            if func is _ITEM:
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
        into = self.in_place.written_into(func, args, given, depth=1)
        return self._on_device(known, func, args, kwargs, tensors, into)

    def _on_device(
        self, known: Operation, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], into: Tensor | None
    ) -> Any:
        """Run an operation of the device with fakes, and record what it allocates.

        `into` is the argument whose memory the result takes over.
        """
        self._where.note_node()
        extra = None
        if known.takes is not None and all(one.layout is torch.strided for one in tensors):
            extra = known.takes(args, self.rules.gpu)
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
            moved = None if self.host.device_is_named else self._moved((args, kwargs))
            if moved is None:
                raise
            return self.faked.results.of(func, *moved)

    def _moved(self, arguments: Any) -> Any:
        """The arguments of an operation with all tensors on the device; None where they share a device."""
        here, there = self.rules.device, torch.device("cpu")
        tensors = tensors_among((*arguments[0], *arguments[1].values()))
        devices = {one.device for one in tensors if one.dim()}
        if devices != {here, there}:
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

    def answers(self) -> bool:
        """Whether code of a library reads a value now, which `_item` answers or refuses."""
        return self.reads.active or (self.generating is not None and self.generating.asks())

    def read_in_a_real_run(self, *, is_bool: bool) -> Value | None:
        """What the line that is running read there; None where it did not, or nothing has run."""
        return None if self.recorded is None else self.recorded.next_of(calling_line(), is_bool=is_bool)

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

    def _item(self, tensor: Any) -> Any:
        known = self._values.of(tensor)
        known = getattr(tensor, "constant", None) if known is None else known
        if known is not None:
            with unset_fake_temporarily():
                return known.item()
        # A truth value is a branch, which is not guessed, except where `generate` asks whether all samples
        # have ended, or whether a prompt has padding: all tokens are made, of whole prompts.
        is_bool = tensor.dtype is torch.bool
        answer = self.reads.answer(is_bool=is_bool)
        if answer is None and is_bool and self.generating is not None and self.generating.goes_on():
            answer = False
        if answer is None:
            answer = self.read_in_a_real_run(is_bool=is_bool)
        if answer is not None:
            return answer
        error = UntraceableError(
            reading(), calling_line(), "the program reads a value that depends on the data"
        )
        self.refused.append(error)
        raise error

    def _record(self, known: Operation, out: Any, extra: Extra | None) -> None:
        made = tensors_among((out,))
        here = self.rules.device
        name = known.name
        allocates = False
        early: list[int] = []
        for index, tensor in enumerate(made):
            if extra is not None and index in extra.before:
                origin = self._where.origin("workspaces", name)
                early.append(self.blocks.allocate(extra.before[index], origin))
            if not isinstance(tensor, FakeTensor) or device_of(tensor) != here:
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
        backward = in_backward()
        if backward in self._blas:
            return
        self._blas.add(backward)
        gpu = self.rules.gpu
        sizes = (gpu.blas_bytes,) if backward else (gpu.blas_bytes, gpu.blas_lt_bytes)
        for size in sizes:
            if size:
                self.blocks.allocate(size, Origin("workspaces", self._where.phase(), operation="cuBLAS"))


class Operation(NamedTuple):
    """What is asked about an operation each time, looked up once: they come by the ten thousand."""

    name: str
    reads_data: bool  # a value is read, or makes the shape of the result
    composite: Any  # CUDA's way through it, where it comes whole
    is_composite: bool
    takes: Rule | None
    stand_in: Any
    is_gemm: bool

    @classmethod
    def of(cls, func: Any, rules: CudaRules) -> Operation:
        plain = isinstance(func, OpOverload)
        library = func.name() if plain else ""  # what is not torch's may be imported after this
        return cls(
            str(func),
            func is _ITEM or func in _SHAPED_BY_DATA,
            rules.composite(func) if plain else None,
            plain and is_composite(func),
            RULES.get(func) or quantised_kernels.RULES.get(library),
            STAND_INS.get(func) or quantised_kernels.STAND_INS.get(library),
            func in GEMMS,
        )
