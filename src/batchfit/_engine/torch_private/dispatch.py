"""torch's dispatcher: modes that see operations, operations that bypass them, and registered kernels.

Without dispatch modes batchfit counts, traces and restores nothing: their absence is refused at import.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from batchfit._engine.torch_private.lookup import attribute, lost, lost_to_traces, needed, optional, refusing

try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError as error:
    raise lost("torch.utils._python_dispatch.TorchDispatchMode") from error

# -- past the modes and the classes of tensors

# No dispatch mode and no class of tensors sees what happens inside.
modes_disabled: Callable[[], AbstractContextManager[None]] = needed("torch._C._DisableTorchDispatch")
# Inside, a class's own `__torch_function__` is not asked.
plain_functions: Callable[[], AbstractContextManager[None]] = needed("torch._C.DisableTorchFunctionSubclass")
# The `__torch_dispatch__` of a class of tensors that has none of its own.
NO_DISPATCH: object = getattr(Tensor, "__torch_dispatch__", None)


def _has_parts(value: object) -> bool:
    own = isinstance(value, Tensor) and type(value) is not Tensor
    return own and hasattr(value, "__tensor_flatten__") and hasattr(value, "__tensor_unflatten__")


# Whether it is a tensor made of tensors (DTensor, quantized weights).
is_wrapper: Callable[[object], bool] = (
    optional("torch.utils._python_dispatch.is_traceable_wrapper_subclass") or _has_parts
)


def _as_subclass(kind: type[Tensor], tensor: Tensor, requires_grad: bool = False) -> Any:
    return tensor.detach().as_subclass(kind).requires_grad_(requires_grad)


# A tensor of a class with the memory of a plain one, past the code of the class.
make_subclass: Callable[..., Any] = optional("torch.Tensor._make_subclass") or _as_subclass

# The dispatch mode that was entered last, None outside of all.
current_mode: Callable[[], Any] = optional("torch.utils._python_dispatch._get_current_dispatch_mode") or (
    lambda: None
)

# -- operations

_ADD = torch.ops.aten.add.Tensor
OpOverload: Any = type(_ADD)
# What an operation says of its arguments and results: by name, `op._schema`.
schema_of: Callable[[Any], Any] = attribute(_ADD, "_schema")
# `kernel_of(op)(COMPOSITE, ...)` runs the operation by its kernel for that key.
kernel_of: Callable[[Any], Callable[..., Any]] = attribute(_ADD, "_op_dk")
COMPOSITE: Any = optional("torch._C.DispatchKey.CompositeImplicitAutograd")
_has_kernel: Callable[[str, str], bool] = needed("torch._C._dispatch_has_kernel_for_dispatch_key")
_registrations: Callable[[str], list[str]] = needed(
    "torch._C._dispatch_get_registrations_for_dispatch_key", lost_to_traces
)


def is_composite(op: Any) -> bool:
    """Whether an operation is made of other operations."""
    return _has_kernel(op.name(), "CompositeImplicitAutograd")


def has_cpu_kernel(op: Any) -> bool:
    """Whether an operation runs whole on a CPU: a few have a kernel there and are composite elsewhere."""
    return _has_kernel(op.name(), "CPU")


def has_fake_kernel(op: Any) -> bool:
    """Whether an operation has a kernel for tensors without memory."""
    return _has_kernel(op.name(), "Meta")


def registered(key: str) -> list[str]:
    """The operations of aten with a kernel for a dispatch key, without "aten::"."""
    return sorted(name[6:] for name in _registrations(key) if name.startswith("aten::"))


# Ends what a `torch.library.Library` has put in, at once and not with its last reference.
end_library: Callable[[Any], None] = needed("torch.library.Library._destroy", lost_to_traces)

# -- arguments


def _mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """Lists, tuples and dicts: what the arguments of operations are made of."""
    if type(values) in (list, tuple):
        return type(values)(_mapped(function, one) for one in values)
    if type(values) is dict:
        return {name: _mapped(function, one) for name, one in values.items()}
    return function(values)


# The same containers with `function` of each value in them.
tree_map: Callable[[Callable[[Any], Any], Any], Any] = optional("torch.utils._pytree.tree_map") or _mapped

# -- keys

# All that the dispatcher sees of a tensor; None where it cannot be asked.
keys_of: Callable[[Tensor], Any] | None = optional("torch._C._dispatch_key_set")
_key_set: Callable[[Any], Any] = needed("torch._C.DispatchKeySet", lost_to_traces)
# Inside, operations go past the kernels of these keys.
excluding: Callable[[Any], AbstractContextManager[None]] = needed(
    "torch._C._ExcludeDispatchKeyGuard", lost_to_traces
)


def cpu_autocast_keys() -> Any:
    """What `excluding` takes to go past autocast on the CPU."""
    return _key_set(optional("torch._C.DispatchKey.AutocastCPU"))


# -- torch's own tracing

_TRACING = [optional(f"torch._C._TorchDispatchModeKey.{name}") for name in ("FAKE", "PROXY", "FUNCTIONAL")]
_mode_of: Callable[[Any], Any] = (
    refusing("torch._C._TorchDispatchModeKey") if None in _TRACING else needed("torch._C._get_dispatch_mode")
)


def tracing() -> bool:
    """Whether torch's own tracing (a `FakeTensorMode`, ...) comes after us: nothing real is made then."""
    return any(_mode_of(key) is not None for key in _TRACING)


# -- switches that kernels ask for

uses_cudnn: Callable[[], bool] = optional("torch._C._get_cudnn_enabled") or (
    lambda: bool(torch.backends.cudnn.enabled)
)
uses_mkldnn: Callable[[], bool] = optional("torch._C._get_mkldnn_enabled") or (
    lambda: bool(torch.backends.mkldnn.enabled)
)

# -- fake tensors, where a torch without them would do as well

_FAKE: Any = optional("torch._subclasses.fake_tensor.FakeTensor") or ()


def is_fake(value: object) -> bool:
    """Whether it is a fake tensor."""
    return isinstance(value, _FAKE)
