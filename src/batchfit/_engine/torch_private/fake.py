"""Fake tensors: shapes and devices without memory, on which a trace runs. Without them no trace is made."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, final

import torch
from torch import Tensor, nn

from batchfit._engine.torch_private.lookup import lost_to_traces, needed, optional

try:
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
except ImportError as error:
    raise lost_to_traces("torch._subclasses.fake_tensor.FakeTensor") from error

_MODULE = "torch._subclasses.fake_tensor"

# No fake mode sees what happens inside.
unset_fake_temporarily: Callable[[], AbstractContextManager[Any]] = needed(
    f"{_MODULE}.unset_fake_temporarily", lost_to_traces
)


@final
class NeverRaised(Exception):
    """In the place of an error of torch's that this one does not know: the reason of a refusal is vaguer."""


# A result depends on the data; so does its shape; there is no fake kernel.
DataDependentOutputException: type[Exception] = (
    optional(f"{_MODULE}.DataDependentOutputException") or NeverRaised
)
DynamicOutputShapeException: type[Exception] = (
    optional(f"{_MODULE}.DynamicOutputShapeException") or NeverRaised
)
UnsupportedOperatorException: type[Exception] = (
    optional(f"{_MODULE}.UnsupportedOperatorException") or NeverRaised
)

# The device that a fake tensor says it is on.
device_of: Callable[[Any], torch.device] = attrgetter("fake_device")

_OF_TENSORS = ("constant", "fake_device", "fake_mode")


def check() -> None:
    """Refuses a trace where fake tensors are not what a trace takes them for."""
    if gone := missing():
        raise lost_to_traces(gone[0])


@functools.cache
def missing() -> tuple[str, ...]:
    """The names of what fake tensors have in the tested versions, and not in this one."""
    with FakeTensorMode():
        made: Any = torch.empty(1, device="cpu")
    lost = [f"{_MODULE}.FakeTensor.{name}" for name in _OF_TENSORS if not hasattr(made, name)]
    mark_parameter(made)
    return (*lost, *(() if isinstance(made, nn.Parameter) else ("torch.nn.Parameter._is_param",)))


def mark_parameter(fake: Any) -> None:
    """From now on a fake tensor is a parameter to whoever asks."""
    fake._is_param = True


def keep_value(mode: FakeTensorMode, fake: Any, value: Tensor) -> None:
    """Say that a fake tensor has this value, until something is written into it.

    Where torch cannot be made to forget it then, the value stays unknown: who reads it is refused.
    """
    keep = getattr(getattr(mode, "fake_tensor_converter", None), "add_constant_storage_mapping", None)
    if keep is not None:
        fake.constant = value
        keep(fake)


def pointer_guard(mode: Any) -> Callable[[Any], None] | None:
    """What makes torch object when somebody asks for a fake tensor's address; None where it is not known."""
    allowed = getattr(mode, "_allow_unsafe_data_ptr_access", None)
    if allowed is None or optional("torch.Tensor._make_subclass") is None:
        return None
    name = "_set_warn_deprecated_on_mutable_data_ptr" if allowed else "_set_throw_on_mutable_data_ptr"
    found: Callable[[Any], None] | None = optional(f"torch._C.{name}")
    return found
