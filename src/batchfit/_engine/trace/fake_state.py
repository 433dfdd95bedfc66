"""A workload's state as fake tensors, for as long as a trace lasts.

Rules: tensors that share memory share it as fakes (tied weights); what was there before is restored object
for object, so that neither a value nor an identity changes; nothing on the device is copied or allocated.
First all that the state holds is noted (`contents`), whatever its class: modules, schedulers inside
schedulers, objects of the program's own. Then fakes take their places. After the trace each of these gets
back what it held, each by itself: one that fails stops no other. Lists and attributes that the step reaches
(a history of losses) hold no fakes afterwards, but what they held before; names of outer functions and
modules stand for what they stood for.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.snapshot.contents import (
    ATOMS,
    BYTES,
    Contents,
    contents_of,
    is_array,
    is_iterator,
    is_parallel,
    is_record,
)
from batchfit._engine.snapshot.iterators import twin_of as iterator_twin_of
from batchfit._engine.snapshot.iterators import warn_of
from batchfit._engine.snapshot.rng import UndoStack, undo_generator
from batchfit._engine.torch_private.autograd import gradient_hooks
from batchfit._engine.torch_private.fake import FakeTensor, FakeTensorMode, check, keep_value, mark_parameter
from batchfit._engine.torch_private.fsdp2 import faked_records, is_sharded, local_part, offloaded, with_part
from batchfit._engine.torch_private.optimizers import chooses_foreach, forget_steps_of
from batchfit._engine.torch_private.process_groups import is_fake
from batchfit._engine.torch_private.storage import address_of
from batchfit._engine.trace.communication import Communication
from batchfit._engine.trace.fake_cache import FakeResults
from batchfit._engine.trace.held_tensors import (
    LEAST_PAGED,
    HeldTensors,
    can_fake_ranks,
    clear_if_filled,
    dense_bytes,
    holds_tensors,
    is_made_of_tensors,
    is_paged,
    on_host,
    parts_of,
    put_gradient,
    rebuilt_with,
    twin_of,
)
from batchfit._engine.trace.values import WHOLE
from batchfit._engine.workload.reachable import NameBinding, StepReach, kept_by_classes
from batchfit.errors import UntraceableError

# What is looked into wherever it is held.
_KNOWN = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
_CONTAINERS = (dict, list, set, deque)


@final
class Faked(contextlib.AbstractContextManager["Faked"]):
    """The state of a workload, replaced by fakes on `device` inside the `with` block."""

    def __init__(
        self,
        parts: list[Any],
        device: torch.device,
        containers: Sequence[Any] = (),
        places: Sequence[NameBinding] = (),
    ) -> None:
        check()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # a trace keeps results itself, at a tenth of the cost
        self.results = FakeResults(self.mode)
        self.device = device
        self.module_names: dict[int, str] = {}
        self.communication = Communication() if is_fake() else None
        self._parts = parts
        self._containers = containers
        self._places = places
        self._fakes: dict[int, Tensor] = {}  # by the id of the real tensor, which `_real` keeps alive
        self._real: list[Tensor] = []
        self._bases: dict[int, Tensor] = {}  # by the address of the real storage
        self.holding = HeldTensors(device)
        self._optimizers: list[torch.optim.Optimizer] = []
        self._counters: list[tuple[Tensor, Tensor]] = []
        self._undo = UndoStack()
        self._kept: dict[int, Any] = {}  # by id, each kept alive
        self._twins: dict[int, Any] = {}  # of iterators, by id
        # A model on the meta device is what would be on the GPU; beside a real one it is but a skeleton.
        self._is_meta = all(one.device.type == "meta" for one in tensors_in(parts))

    @classmethod
    def of(cls, reach: StepReach, *, device: torch.device) -> Self:
        return cls([*reach.parts, *reach.parts_of_hooks], device, reach.containers, reach.places)

    def __enter__(self) -> Self:
        try:
            self._keep_all()
            self._fake_all()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, UntraceableError) or not isinstance(error, Exception):
                raise
            why = f"its state cannot be stood in for by fake tensors ({type(error).__name__}: {error})"
            raise UntraceableError("", "", why) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.run()

    def _keep_all(self) -> None:
        """Note what everything holds, before anything is replaced."""
        for part in self._parts:
            self._keep(part)
            for module in part.modules() if isinstance(part, nn.Module) else ():
                self._keep(module)  # TorchScript hides its submodules
                for held in kept_by_classes(type(module)):
                    self._keep_container(held)
        for one in self._containers:
            self._keep_container(one)
        for place in self._places:
            self._undo.push(f"the name {place.name}".rstrip(), functools.partial(place.put, place.held()))

    def _fake_all(self) -> None:
        for part in self._parts:
            if isinstance(part, nn.Module):
                self._fake_module(part)
        for part in self._parts:
            if isinstance(part, torch.optim.Optimizer):
                self._fake_optimizer(part)
            elif isinstance(part, torch.amp.GradScaler):
                self._fake_scaler(part)
            elif isinstance(part, Tensor):
                self._stand_in(part)
            elif isinstance(part, _CONTAINERS):
                self._put_stand_ins(part)
        for one in self._containers:
            self._put_stand_ins(one)
        for module in [one for part in self._parts if isinstance(part, nn.Module) for one in part.modules()]:
            for held in kept_by_classes(type(module)):
                self._put_stand_ins(held)
        for place in self._places:
            self._fake_place(place)

    def held(self) -> Iterator[tuple[str, Tensor, str]]:
        """What is on the device before the first step: name, tensor, kind."""
        return self.holding.entries()

    def let_go(self) -> None:
        """From now on only the program holds the fakes: a weight that it replaces (`p.data = new`) goes."""
        self._bases.clear()
        self._fakes.clear()
        self.holding.clear()

    def counters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole numbers in buffers (up to where a queue is filled), which a program reads: their values."""
        for fake, real in self._counters:
            yield fake, real.detach().cpu().clone()

    def optimizer_tensors(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values() if isinstance(state, dict) else ():
                    yield from (one for one in parts_of(value) if isinstance(one, FakeTensor))

    def fake_of(self, real: Tensor, device: torch.device | None = None) -> Tensor:
        """The fake that stands for a real tensor: same shape, strides, dtype and sharing."""
        known = self._fakes.get(id(real))
        if known is not None:
            return known
        if isinstance(real, FakeTensor):  # in groups that two optimizers have in common
            return real
        if isinstance(real, DTensor):
            return self._spread_over_ranks(real, device)
        if is_made_of_tensors(real):
            return self._made_of_fakes(real, device)
        fake = self.shaped_like(real, self.device if device is None else device, sharing=True)
        if real.dim() == 0 and not real.requires_grad and real.device.type == "cpu":
            keep_value(self.mode, fake, real.detach().clone())  # a counter that is read
        if isinstance(real, nn.Parameter):
            # As nn.Parameter does: not the tensor itself, which others may share, but one of the same memory.
            fake = self.results.sharing(fake).requires_grad_(real.requires_grad)
            mark_parameter(fake)
            for name, value in vars(real).items():
                if holds_tensors(real):
                    setattr(fake, name, twin_of(value, self.fake_of))
                elif not isinstance(value, Tensor):
                    setattr(fake, name, value)
            if real.requires_grad:
                hooked: Any = fake
                before, after = gradient_hooks(real)
                for hook in before:
                    hooked.register_hook(hook)
                for hook in after:
                    hooked.register_post_accumulate_grad_hook(hook)
        elif real.requires_grad and real.is_leaf:
            fake.requires_grad_(True)
        if real.requires_grad and real.is_leaf:
            self._undo.push("a gradient", functools.partial(put_gradient, real, real.grad))
        self._fakes[id(real)] = fake
        self._real.append(real)
        return fake

    def _spread_over_ranks(self, real: DTensor, device: torch.device | None) -> Tensor:
        """The same part of a tensor as this rank has of the real one."""
        return self._standing_for(real, with_part(real, self.fake_of(local_part(real), device)))

    def _made_of_fakes(self, real: Tensor, device: torch.device | None) -> Tensor:
        """The fake of a tensor that is made of others."""
        with self.mode:
            made: Tensor = rebuilt_with(real, functools.partial(self.fake_of, device=device))
        return self._standing_for(real, made)

    def _standing_for(self, real: Tensor, made: Tensor) -> Tensor:
        if isinstance(real, nn.Parameter):
            mark_parameter(made)
        if real.requires_grad and real.is_leaf:
            self._undo.push("a gradient", functools.partial(put_gradient, real, real.grad))
        self._fakes[id(real)] = made
        self._real.append(real)
        return made

    def shaped_like(self, real: Tensor, device: torch.device, *, sharing: bool = False) -> Tensor:
        """A fake of that shape; with `sharing` it has its memory in common with earlier ones, as the real."""
        if not sharing or real.device.type == "meta":
            return self.results.empty(real.shape, real.stride(), real.dtype, device)
        storage = real.untyped_storage()
        address = address_of(real)
        base = self._bases.get(address)
        if base is None:
            whole = real.storage_offset() == 0 and storage.nbytes() == dense_bytes(real)
            if whole:
                base = self.results.empty(real.shape, real.stride(), real.dtype, device)
            else:
                count = storage.nbytes() // max(real.element_size(), 1)
                base = self.results.empty((count,), (1,), real.dtype, device)
            self._bases[address] = base
            if whole:
                return base
        with self.mode:
            flat = base if base.dtype == real.dtype else base.reshape(-1).view(real.dtype)
            return torch.as_strided(flat, real.shape, real.stride(), real.storage_offset())

    def _fake_module(self, module: nn.Module) -> None:
        for path, one in module.named_modules():
            if is_parallel(one) and not (is_fake() and can_fake_ranks(one)):
                what = f"{path or 'the model'} is {type(one).__name__}"
                raise UntraceableError(
                    "", "", f"{what}, which issues collectives: predict with what it wraps"
                )
        for path, one in module.named_modules():
            self.module_names.setdefault(id(one), path or type(one).__name__)
            if is_sharded(one):
                self._fake_records(one)
            tables: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
            for table in tables:
                for name, tensor in list(table.items()):
                    if tensor is None or isinstance(tensor, FakeTensor):
                        continue
                    table[name] = self.fake_of(tensor)
                    if tensor.numel() == 1 and tensor.dtype in WHOLE and tensor.device.type != "meta":
                        self._counters.append((table[name], tensor))
                    self._hold(tensor, f"{path}.{name}".lstrip("."), learns=name in one._parameters)
            for name, value in list(vars(one).items()):
                if holds_tensors(value) and not isinstance(value, nn.Module):
                    twin = vars(one)[name] = twin_of(value, self.fake_of)
                    for part in parts_of(twin):
                        self.holding.add(f"{path}.{name}", part, "weights")

    def _fake_records(self, module: nn.Module) -> None:
        """FSDP2 keeps its parameters a second time; those on the host are no memory of the device."""
        for parameter in offloaded(module):
            self.fake_of(parameter, torch.device("cpu"))
        stack = contextlib.ExitStack()
        self._undo.push("FSDP2's records", stack.close)
        stack.enter_context(faked_records(module, self.fake_of, self.device))

    def _hold(self, real: Tensor, name: str, *, learns: bool) -> None:
        """It is on the device before the first step, and its gradient if it has one."""
        fake = self.fake_of(real)
        if real.is_leaf and real.grad is not None:
            spread = isinstance(real.grad, DTensor)
            fake.grad = self.fake_of(real.grad) if spread else self.shaped_like(real.grad, self.device)
        if learns:
            self.holding.learns(name, fake)
        if real.device.type != "meta" or self._is_meta:
            beside = vars(fake).values() if holds_tensors(real) else ()
            for part in (part for whole in [fake, *beside] for part in parts_of(whole)):
                self.holding.add(name, part, "weights")

    def _fake_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(optimizer)
        groups = [(group, dict(group)) for group in optimizer.param_groups]
        state = optimizer.state
        chooses = chooses_foreach(optimizer)
        for group, values in groups:
            for index, one in enumerate(values["params"]):
                if id(one) not in self._fakes:  # of no module: a prompt, a temperature
                    self._hold(one, f"parameter {index}", learns=True)
            group["params"] = [self.fake_of(one) for one in values["params"]]
            for name, value in values.items():
                if isinstance(value, Tensor):
                    group[name] = self.fake_of(value, torch.device("cpu") if on_host(value) else None)
            if chooses and values.get("foreach", False) is None and not values.get("fused"):
                # On a GPU torch would choose this itself; it does not see that these are parameters.
                tensor_lr = isinstance(values.get("lr"), Tensor) and not values.get("capturable")
                group["foreach"] = not values.get("differentiable", False) and not tensor_lr
            if values.get("capturable") and self.device.type == "cpu":
                group["capturable"] = False  # refused on a CPU; it takes a few scalars more
        for name, value in list(vars(optimizer).items()):
            if isinstance(value, list) and any(isinstance(one, nn.Parameter) for one in value):
                # A list of the parameters beside the groups (LBFGS).
                setattr(
                    optimizer, name, [self.fake_of(one) if isinstance(one, Tensor) else one for one in value]
                )
        fresh: Any = defaultdict(dict)
        for parameter, entries in state.items():
            fresh[self.fake_of(parameter)] = self._faked_state(entries)
        optimizer.state = fresh
        if is_paged(optimizer):
            vars(optimizer)["get_state_buffer"] = self._paged_buffer
            vars(optimizer)["prefetch_state"] = lambda parameter: None

    def _paged_buffer(self, parameter: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """State of a paged optimizer: of all but small parameters it is managed memory (`is_paged`)."""
        if parameter.numel() < LEAST_PAGED:
            return torch.zeros_like(parameter, dtype=dtype)
        paged = self.results.empty(parameter.shape, parameter.stride(), dtype, torch.device("cpu"))
        paged.is_paged = True  # type: ignore[attr-defined]  # so it may be beside tensors of the GPU
        return paged

    def _faked_state(self, entries: Any) -> Any:
        if not isinstance(entries, dict):
            return entries
        faked = {}
        for name, value in entries.items():
            if isinstance(value, Tensor):
                stays = on_host(value) or getattr(value, "is_paged", False)
                faked[name] = self.fake_of(value, torch.device("cpu") if stays else None)
                if not stays:
                    for part in parts_of(faked[name]):
                        self.holding.add(f"optimizer.{name}", part, "optimizer")
            else:
                faked[name] = value
        return faked

    def _fake_scaler(self, scaler: Any) -> None:
        forget_steps_of(scaler)

    def _keep(self, root: Any) -> None:
        """Later restores what `root` holds now: its attributes and its items, and theirs in turn."""
        waiting = [root]
        while waiting:
            value = waiting.pop()
            if isinstance(value, tuple):
                waiting.extend(one for one in value if type(one) not in ATOMS)
            elif id(value) not in self._kept and (value is root or _is_looked_into(value)):
                for contents in self._note(value):
                    waiting.extend(one for one in contents.held() if type(one) not in ATOMS)

    def _note(self, value: Any) -> list[Contents]:
        """Later restores what this one object holds now."""
        self._kept[id(value)] = value
        name = f"what is in a {type(value).__name__}"
        again = undo_generator(value)
        if again is not None:
            self._undo.push(name, again)
            return []
        found = contents_of(value)
        for contents in found:
            self._undo.push(name, contents.restore)
            if any(map(is_iterator, contents.held())):
                contents.replace(functools.partial(self._twin, value, contents))
        return found

    def _twin(self, owner: Any, contents: Contents, value: Any) -> Any:
        """For the trace another iterator at the same place, so that the program's own does not move."""
        if not is_iterator(value):
            return value
        if id(value) not in self._twins:
            twin = iterator_twin_of(value)
            if twin is None:
                warn_of(f"{type(owner).__name__}{contents.place_of(value)}", value)
            self._twins[id(value)] = value if twin is None else twin
        return self._twins[id(value)]

    def _keep_container(self, value: Any) -> None:
        """Later restores what a container or an object of the program's holds now.

        Only itself: what is inside was found by itself, or is data.
        """
        if isinstance(value, functools._lru_cache_wrapper):
            undo = functools.partial(clear_if_filled, value, value.cache_info().misses)
            self._undo.push("a cached function", undo)
        elif id(value) not in self._kept:
            self._note(value)

    def _put_stand_ins(self, value: Any) -> None:
        """Fakes for the parameters in a container (a list of those to clip, a table by parameter)."""
        if not isinstance(value, functools._lru_cache_wrapper) and not is_array(value):
            for contents in contents_of(value):
                contents.replace(self._stand_in)

    def _fake_place(self, place: NameBinding) -> None:
        """A parameter is a fake meanwhile, in a tuple too."""
        before = meanwhile = place.held()
        if type(before) is tuple:
            inside = [self._stand_in(one) for one in before]
            if any(one is not other for one, other in zip(inside, before, strict=True)):
                meanwhile = tuple(inside)
        else:
            meanwhile = self._stand_in(before)
        if meanwhile is not before:
            place.put(meanwhile)

    def _stand_in(self, value: Any) -> Any:
        """The fake of what learns, or of what has one; anything else as it is."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        learns = value.requires_grad and value.is_leaf
        if id(value) not in self._fakes and learns and value.device.type == self.device.type:
            self._hold(value, "a tensor", learns=True)  # of no module and no optimizer
        return self._fakes.get(id(value), value)


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, Tensor):
        return bool(vars(value)) and not isinstance(value, FakeTensor)
    if isinstance(value, (*_KNOWN, *_CONTAINERS, *BYTES)) or is_array(value):
        return True
    return undo_generator(value) is not None or is_record(value)
