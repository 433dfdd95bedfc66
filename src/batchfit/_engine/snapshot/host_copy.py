"""Tensors kept as bytes in host memory, and restored in place.

Rules:
- A storage is copied once, as raw bytes, however many tensors look into it: views, ties, NaN payloads and
  exotic dtypes need no care of their own.
- Nothing on the device is kept alive: tensors and storages are held by weak references. What is still
  there at restore is written in place; what the program has freed is created again.
- Host copies are storages, not tensors, and are made out of sight of dispatch modes: whoever counts live
  tensors (`virtual_memory`) counts none of them.
- New device memory is allocated in sight of dispatch modes, so that it is counted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import TensorWeakRef

from batchfit._engine.torch_private.autograd import is_view
from batchfit._engine.torch_private.dispatch import is_wrapper, make_subclass, modes_disabled
from batchfit._engine.torch_private.storage import WeakStorage, storage_address
from batchfit.errors import SnapshotError


def synchronize(device: torch.device) -> None:
    """Synchronize every stream of `device`."""
    if device.type in ("cpu", "meta"):
        return
    module: Any = torch.get_device_module(device)
    if device.type == "mps":  # has one device and takes no argument
        module.synchronize()
    else:
        module.synchronize(device)


class StorageCopy:
    """The bytes of one storage."""

    __slots__ = ("_host", "_weak", "device", "nbytes", "path")

    def __init__(self, storage: torch.UntypedStorage, path: str) -> None:
        self.path = path
        self.device = storage.device
        self.nbytes = storage.nbytes()
        self._weak = WeakStorage(storage)
        self._host: torch.UntypedStorage | None = None
        if self.nbytes > 0 and self.device.type != "meta":
            if storage.data_ptr() == 0:
                raise SnapshotError(f"{path} has no memory of its own that could be copied")
            empty: Any = torch.UntypedStorage  # its constructors have no annotations
            self._host = host = empty(self.nbytes, device="cpu")
            with modes_disabled():
                host.copy_(storage)

    def live(self) -> torch.UntypedStorage | None:
        """The storage itself, if the program still has it."""
        return self._weak.live()

    def holds(self, tensor: torch.Tensor) -> bool:
        """`tensor` looks into this storage."""
        return self._weak.is_of(tensor)

    def allocate(self) -> torch.UntypedStorage:
        """The storage itself, or a new one of its size where it is gone."""
        storage = self.live()
        if storage is None:
            storage = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
            self._weak = WeakStorage(storage)
        elif storage.nbytes() != self.nbytes:
            storage.resize_(self.nbytes)
        return storage

    def write(self, storage: torch.UntypedStorage) -> None:
        """Make the bytes of `storage` what they were."""
        if self._host is None:
            return
        with modes_disabled():
            # On the host a comparison is cheap, and weights mapped from a file may be read-only.
            if self.device.type != "cpu" or not torch.equal(_bytes_of(storage), _bytes_of(self._host)):
                storage.copy_(self._host)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of the storage as integers: as wide as its length allows, which compares five times faster."""
    length = storage.nbytes()
    widths = {8: torch.int64, 4: torch.int32, 1: torch.uint8}
    width = next(width for width in widths if length % width == 0)
    nothing = torch.empty(0, dtype=widths[width], device=storage.device)
    return nothing.set_(storage, 0, (length // width,), (1,))


class TensorCopy(ABC):
    """One tensor as it was: the same object with the same bits, or an equal one where it is gone.

    `release` lets go of what was put into the tensor since; `put` makes it what it was. Between the two
    the storages are allocated and written.
    """

    __slots__ = ("_weak", "cls", "device", "leaf", "path", "requires_grad")

    def __init__(self, tensor: torch.Tensor, path: str) -> None:
        self.path = path
        self.cls = type(tensor)
        self.device = tensor.device
        self.requires_grad = tensor.requires_grad
        self.leaf = tensor.is_leaf
        self._weak = TensorWeakRef(tensor)

    def live(self) -> torch.Tensor | None:
        """The tensor itself, if the program still has it."""
        return cast("torch.Tensor | None", self._weak())

    def release(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Cut `tensor` off from what was made since; None if only a new tensor can replace it."""
        if self.leaf and not tensor.is_leaf:
            # An in-place operation has put it into a graph, and that graph holds the step's tensors.
            if is_view(tensor):
                return None  # torch cannot detach a view in place
            tensor.detach_()
        self._let_go(tensor)
        return tensor

    def put(self, tensor: torch.Tensor | None) -> torch.Tensor:
        """`tensor`, or a new one, as it was."""
        tensor = self._put(tensor)
        if tensor.is_leaf and tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        self._weak = TensorWeakRef(tensor)
        return tensor

    @abstractmethod
    def _let_go(self, tensor: torch.Tensor) -> None: ...

    @abstractmethod
    def _put(self, tensor: torch.Tensor | None) -> torch.Tensor: ...


class StridedCopy(TensorCopy):
    """A dense tensor: where it looks into its storage."""

    __slots__ = ("conj", "dtype", "neg", "offset", "size", "storage", "stride")

    def __init__(self, tensor: torch.Tensor, path: str, storage: StorageCopy) -> None:
        super().__init__(tensor, path)
        self.storage = storage
        self.dtype = tensor.dtype
        self.size = tuple(tensor.size())
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()

    def _in_place(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and self.storage.holds(tensor)
            and tensor.dtype == self.dtype
            and tuple(tensor.size()) == self.size
            and tensor.stride() == self.stride
            and tensor.storage_offset() == self.offset
            and tensor.is_conj() == self.conj
            and tensor.is_neg() == self.neg
        )

    def _let_go(self, tensor: torch.Tensor) -> None:
        if not self.storage.holds(tensor):
            # `.data` was swapped: its memory is wanted back before any is allocated.
            with modes_disabled():
                tensor.data = torch.empty(0, dtype=self.dtype, device=self.device)

    def _put(self, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is not None and self._in_place(tensor):
            return tensor
        storage = self.storage.live()
        if storage is None:
            raise SnapshotError("there was no memory for it")
        with modes_disabled():
            nothing = torch.empty(0, dtype=self.dtype, device=self.device)
            view = nothing.set_(storage, self.offset, self.size, self.stride)
            if self.conj:
                view = torch.conj(view)
            if self.neg:
                view = torch.ops.aten._neg_view.default(view)
            if tensor is not None:
                tensor.data = view
                return tensor
            return _of_class(self.cls, view, self.requires_grad)


def _of_class(cls: type[torch.Tensor], tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    return tensor if cls is torch.Tensor else make_subclass(cls, tensor, requires_grad)


class WholeCopy(TensorCopy):
    """A tensor without a storage to copy (sparse, quantized, nested): kept whole, on the host."""

    __slots__ = ("_host",)

    def __init__(self, tensor: torch.Tensor, path: str) -> None:
        super().__init__(tensor, path)
        with modes_disabled():
            self._host = tensor.detach().to("cpu", copy=True)

    def _let_go(self, tensor: torch.Tensor) -> None:
        pass

    def _put(self, tensor: torch.Tensor | None) -> torch.Tensor:
        new = self._host.to(self.device, copy=True)
        if tensor is not None:
            tensor.data = new
            return tensor
        return _of_class(self.cls, new, self.requires_grad)


class WrapperCopy(TensorCopy):
    """A tensor made of tensors (DTensor, torchao's): its parts are copied, it is put together from them."""

    __slots__ = ("_context", "_others", "_parts", "_size", "_stride")

    def __init__(
        self, tensor: torch.Tensor, path: str, parts: Mapping[str, TensorCopy], others: Mapping[str, object]
    ) -> None:
        super().__init__(tensor, path)
        self._parts = parts
        self._others = others  # a DTensor's mesh
        self._context = cast("Any", tensor).__tensor_flatten__()[1]
        self._size = tensor.size()
        self._stride = tensor.stride()

    def _let_go(self, tensor: torch.Tensor) -> None:
        for part in self._parts.values():
            inner = part.live()
            if inner is not None:
                part.release(inner)

    def _put(self, tensor: torch.Tensor | None) -> torch.Tensor:
        parts = {name: part.put(part.live()) for name, part in self._parts.items()}
        if tensor is None:
            make = cast("Any", self.cls).__tensor_unflatten__
            return cast(
                "torch.Tensor", make({**parts, **self._others}, self._context, self._size, self._stride)
            )
        for name, part in parts.items():
            if getattr(tensor, name) is not part:
                setattr(tensor, name, part)
        return tensor


class HostMemory:
    """All storages of one snapshot, each copied once."""

    __slots__ = ("devices", "storages")

    def __init__(self) -> None:
        self.storages: dict[int, StorageCopy] = {}
        self.devices: set[torch.device] = set()

    def copy(self, tensor: torch.Tensor, path: str) -> TensorCopy:
        """A copy of `tensor`; of its storage only if no other tensor has brought that already."""
        if is_lazy(tensor):
            raise SnapshotError(
                f"{path} is not initialised yet: a trial would give it its shape. "
                "Run the model once on a small batch before the search."
            )
        if tensor.device not in self.devices:
            synchronize(tensor.device)
            self.devices.add(tensor.device)
        try:
            return self._copy(tensor, path)
        except (RuntimeError, MemoryError, NotImplementedError) as error:
            raise SnapshotError(
                f"{path} ({type(tensor).__name__}) could not be copied to host memory"
            ) from error

    def _copy(self, tensor: torch.Tensor, path: str) -> TensorCopy:
        if is_wrapper(tensor):
            names, _ = cast("Any", tensor).__tensor_flatten__()
            inner = {name: getattr(tensor, name) for name in names}
            parts = {
                name: self._copy(part, f"{path}.{name}")
                for name, part in inner.items()
                if isinstance(part, torch.Tensor)
            }
            return WrapperCopy(tensor, path, parts, {n: part for n, part in inner.items() if n not in parts})
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            return WholeCopy(tensor, path)
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if key not in self.storages:
            self.storages[key] = StorageCopy(storage, path)
        return StridedCopy(tensor, path, self.storages[key])
