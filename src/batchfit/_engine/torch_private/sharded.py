"""Tensors that are spread over ranks (DTensor), and what FSDP2 makes of a model on one process without a GPU.

Rules: `fully_shard` is torch's own, and so are all of its hooks; only the device that it takes is said to
it, and what it does in collectives is noted. What was replaced is put back.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from batchfit._engine.torch_private import fsdp2, needs

_PACKAGE: Final = "torch.distributed.fsdp._fully_shard"
# Functions of FSDP2 inside which collectives are prepared, done and unpacked.
_COLLECTIVES: Final = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def local_part(tensor: DTensor) -> Tensor:
    """This rank's part of a DTensor, the very tensor."""
    found: Tensor = tensor._local_tensor
    return found


def with_part(tensor: DTensor, part: Tensor) -> Tensor:
    """A tensor that is spread in the same way, with another part on this rank."""
    kind: Any = DTensor
    made: Tensor = kind(part, tensor._spec, requires_grad=tensor.requires_grad)
    return made


@contextlib.contextmanager
def sharding_on(device: torch.device) -> Iterator[None]:
    """Inside, `fully_shard` takes `device` for the one of a mesh of CPUs."""
    if not fsdp2.runs_on_cpu():
        raise needs.FSDP2_ON_CPU.refusal()
    with contextlib.ExitStack() as stack:
        found = False
        for name in ("_fully_shard", "_fsdp_init"):
            module = _module(name)
            if hasattr(module, "_get_device_from_mesh"):
                found = True
                stack.enter_context(_put(module, "_get_device_from_mesh", lambda _: device))
        if not found:
            raise needs.FSDP2_STATE.refusal()
        yield


@contextlib.contextmanager
def collectives_noted(inside: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, `inside()` is entered for as long as FSDP2 gathers or reduces something."""
    module = _module("_fsdp_param_group")
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            plain = getattr(module, name, None)
            if plain is None:
                raise needs.FSDP2_STATE.refusal()
            stack.enter_context(_put(module, name, _noted(plain, inside)))
        yield


def _noted(plain: Any, inside: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return plain(*args, **kwargs)

    return call


def forget_sharding(module: nn.Module) -> None:
    """As if `fully_shard` had never been called on a module, as far as torch keeps that elsewhere."""
    known = getattr(importlib.import_module("torch.distributed._composable_state"), "_module_state_mapping", None)
    if known is None:
        raise needs.FSDP2_STATE.refusal()
    known.pop(module, None)


def offloaded(module: nn.Module) -> list[Tensor]:
    """The parameters of a sharded module that FSDP2 keeps on the host."""
    records = (one for group in fsdp2.groups(module) for one in fsdp2.parameters(group))
    return [fsdp2.sharded(one) for one in records if one.offload_to_cpu]


@contextlib.contextmanager
def faked_records(
    module: nn.Module, fake_of: Callable[..., Tensor], device: torch.device
) -> Iterator[None]:
    """Inside, FSDP2's records of a sharded module hold fakes on `device`, and nothing was gathered yet."""
    state: Any = fsdp2.state_of(module)
    groups = fsdp2.groups(module)
    records = [one for group in groups for one in fsdp2.parameters(group)]
    shared = [one for holder in (state, *groups) for one in _shared_by(holder)]
    with _kept(state, *groups, *records, *shared):
        state._device = device
        for group in groups:
            group.device = device
        for one in records:
            # Its parameter first: what is on the host stays there, as the fake of the same memory does.
            one.sharded_param = fake_of(one.sharded_param)
            host = torch.device("cpu") if one.offload_to_cpu else device
            one._sharded_param_data = fake_of(one._sharded_param_data, host)
            one.device = device
            one.all_gather_outputs = []
            one.unsharded_accumulated_grad = None
            vars(one).pop("_unsharded_param", None)
        yield


def _shared_by(holder: Any) -> list[Any]:
    """What FSDP2's states and groups have in common."""
    found = (getattr(holder, name, None) for name in ("_state_ctx", "_comm_ctx", "comm_ctx"))
    return [one for one in found if one is not None]


@contextlib.contextmanager
def _kept(*objects: Any) -> Iterator[None]:
    """Afterwards these have the attributes that they had, and lists and tables among them their items."""
    before = [(one, {name: _copied(value) for name, value in vars(one).items()}) for one in objects]
    try:
        yield
    finally:
        for one, values in before:
            vars(one).clear()
            vars(one).update(values)


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


@contextlib.contextmanager
def _put(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _module(name: str) -> Any:
    found = sys.modules.get(f"{_PACKAGE}.{name}")
    if found is None:
        try:
            found = importlib.import_module(f"{_PACKAGE}.{name}")
        except ModuleNotFoundError:
            return None
    return found
