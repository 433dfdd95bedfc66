"""CPU tensors in a trace: operations on them run for real, and what they wrote is restored afterwards.

Rules:
- What an operation of the host writes into, and the step did not make, is restored after the trace.
- A tensor of the host that meets the fake device is adopted: one fake stands for it from then on.
- Where the program names no device, as without a GPU, the host stands for the device.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Never, final

import torch
from torch import Tensor, nn

from batchfit._engine.cuda_model.dispatch import CudaRules
from batchfit._engine.snapshot.rng import UndoStack
from batchfit._engine.torch_private.fake import FakeTensor, unset_fake_temporarily
from batchfit._engine.torch_private.storage import address_of
from batchfit._engine.trace.blocks import Blocks, Whereabouts
from batchfit._engine.trace.fake_cache import tensors_among
from batchfit._engine.trace.fake_state import Faked
from batchfit._engine.trace.program_lines import calling_line
from batchfit._engine.trace.values import KnownValues, written_by
from batchfit.errors import UntraceableError

_CPU = torch.device("cpu")
_INDEX = torch.ops.aten.index.Tensor
_MOVES = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, _INDEX})


@final
class HostTensors:
    """The tensors of the host that a traced step uses, and the fakes that stand for them on the device.

    `counts_host`: what the step computes on the host is the device's, as long as it names no device.
    """

    def __init__(
        self,
        faked: Faked,
        rules: CudaRules,
        blocks: Blocks,
        where: Whereabouts,
        values: KnownValues,
        *,
        counts_host: bool,
    ) -> None:
        self._faked = faked
        self._rules = rules
        self._blocks = blocks
        self._where = where
        self._values = values
        self._counts_host = counts_host
        # Whether the program names the device itself; else, without a GPU, it has put everything on the CPU.
        # What a step computes there before a weight comes in is then the device's (`counts_host`), but for
        # batches that are made for it: theirs is the host.
        self.device_is_named = not rules.host_means_device
        self._made: dict[int, Any] = {}  # host storages that the step made itself, by address
        self._writes = _HostWrites()  # into others
        self._adopted: dict[int, tuple[weakref.ref[Any], Tensor]] = {}
        self._filled: dict[int, tuple[Any, bool]] = {}  # host storages with values of the device, by address

    def renamed(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the device that the trace knows in place of the program's."""
        if "device" not in kwargs:
            return kwargs
        device = self._rules.renamed(kwargs["device"])
        self.device_is_named |= device is not kwargs["device"]
        return {**kwargs, "device": device}

    def runs(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> bool:
        """Whether an operation without fake arguments is one of the host."""
        if self._filled and self._any_filled(tensors):
            return False
        device = kwargs.get("device")
        device = device if device is not None else tensors[0].device if tensors else _CPU
        return device.type == "cpu" and device != self._rules.device and self._are_host(func, tensors)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Really run an operation of the host; note what it writes into and the step did not make."""
        with unset_fake_temporarily():
            for one in written_by(func, args, kwargs):
                address = address_of(one)
                if address not in self._made and address not in self._writes:
                    self._writes.note(one)
                self._forget_adopted(address)
            out = func(*args, **kwargs)
        made = [] if func.is_view else tensors_among((out,))
        counts = self._counts_host and not self.device_is_named
        for one in made:
            if one.layout is not torch.strided:
                continue
            if counts and one.dim():
                self._blocks.see(one, self._where.origin("batch", str(func)))
            address = address_of(one)
            if address not in self._made and address not in self._writes:
                forget = functools.partial(_forget, self._made, address)
                self._made[address] = weakref.ref(one.untyped_storage(), forget)
        return out

    def restore(self) -> None:
        """All tensors of the program as they were before the first write."""
        self._writes.restore()

    def _forget_adopted(self, address: int) -> None:
        """A host tensor is written into: what it was when it came to the device is no longer its value."""
        for real, fake in list(self._adopted.values()):
            living = real()
            if living is not None and address_of(living) == address:
                self._values.drop(fake)

    def _are_host(self, func: Any, tensors: list[Tensor]) -> bool:
        if any(one.device.type != "cpu" for one in tensors):
            return False
        for one in tensors:
            # A frozen one as well: without a GPU its model would really be computed, and not be counted.
            learns = one.requires_grad and one.is_leaf
            if isinstance(one, nn.Parameter) and (learns or self._rules.host_means_device):
                _refuse_undeclared(func)
            if learns and self._rules.host_means_device and address_of(one) not in self._made:
                _refuse_undeclared(func)
        return True

    def faked_arguments(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> tuple[Any, Any]:
        """Fakes for real tensors beside fake ones: from the host, or the program's own on the device."""
        moves = func in _MOVES
        # A table is where its index is. By its id: `faked` is a circle, which would keep the table alive.
        on_device = func is _INDEX and any(one.device == self._rules.device for one in tensors)
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
        if learning and not self._are_host(func, real) and torch.is_grad_enabled():
            _refuse_undeclared(func)  # its gradient would be the real parameter's
        return tuple(faked(one) for one in args), {name: faked(one) for name, one in kwargs.items()}

    def note_filled(self, func: Any, args: Any, kwargs: Any) -> None:
        """What of the program's is written with values that are not there: who reads it must not see its own.

        It was copied from the device, or is itself what would be on the device.
        """
        to_host = func in _MOVES and self.device_is_named
        for one in written_by(func, args, kwargs):
            if isinstance(one, FakeTensor):
                continue
            address = address_of(one)
            forget = functools.partial(_forget, self._filled, address)
            self._filled[address] = (weakref.ref(one.untyped_storage(), forget), to_host)

    def _any_filled(self, tensors: list[Tensor]) -> bool:
        plain = (one for one in tensors if one.layout is torch.strided)
        return any(address_of(one) in self._filled for one in plain)

    def adopt(self, tensors: list[Tensor]) -> None:
        """See those that are real, and stand for tensors of the device, before an operation needs them."""
        self.faked_arguments(None, tensors, {}, tensors)

    def _adopt(self, real: Tensor, *, as_host: bool, is_index: bool) -> Tensor:
        """The fake that stands for a real tensor from now on."""
        key = id(real)
        found = self._adopted.get(key)
        if found is not None and found[0]() is real:
            return found[1]
        filled = self._filled.get(address_of(real)) if self._filled and real.layout is torch.strided else None
        if filled is not None:
            as_host = filled[1]
        on_device = real.device.type != "cpu" or (self._rules.host_means_device and not as_host)
        with unset_fake_temporarily():
            device = self._rules.device if on_device else _CPU
            fake = self._faked.shaped_like(real.detach(), device)
            if filled is None:
                if device.type == "cpu" and real.dim() == 0 and real.device.type == "cpu":
                    fake.constant = real.detach().clone()  # type: ignore[attr-defined]
                self._values.see(fake, real, is_index=is_index)
        if as_host and not on_device:
            return fake
        if on_device and real.layout is torch.strided and real in self._blocks:
            self._blocks.take_over(fake, real)
        elif on_device:
            self._blocks.see(fake, self._where.origin("batch", "adopted"))
        self._adopted[key] = (weakref.ref(real, lambda _: self._adopted.pop(key, None)), fake)
        return fake


def _refuse_undeclared(func: Any) -> Never:
    raise UntraceableError(
        str(func),
        calling_line(),
        "it uses a parameter of a model that is not in the workload's state: declare it, "
        "batchfit.Workload(step, state=[model, optimizer])",
    )


@final
class _HostWrites:
    """Memory that is about to be written into, as it was: in the order in which that happened."""

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}  # by address; kept, so that no other gets it
        self._undo = UndoStack()

    def __contains__(self, address: int) -> bool:
        return address in self._known

    def note(self, tensor: Tensor) -> None:
        """Remember what is in the memory of `tensor`, and which of it the tensor is a view of."""
        storage = tensor.untyped_storage()
        address = address_of(tensor)
        self._known[address] = storage
        before = _bytes_of(storage).clone()
        view = tensor.storage_offset(), tensor.shape, tensor.stride()

        def restore() -> None:
            with torch.no_grad():
                if storage.nbytes() != before.numel():
                    storage.resize_(before.numel())
                _bytes_of(storage).copy_(before)
                now = tensor.storage_offset(), tensor.shape, tensor.stride()
                if now != view or address_of(tensor) != address:
                    tensor.data = torch.empty(0, dtype=tensor.dtype).set_(storage, *view)

        self._undo.push("a tensor on the host", restore)

    def restore(self) -> None:
        self._undo.run()
        self._known.clear()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _forget(table: dict[int, Any], key: int, _: Any) -> None:
    table.pop(key, None)
