"""Private classes and tables of `torch.nn`, and of parts of torch that have no module here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from batchfit._engine.torch_private.lookup import lost, needed, optional

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd

    BatchNorm = _BatchNorm
    Dropout = _DropoutNd
else:
    # The class of all layers of a kind, by one of them: its own name is private.
    BatchNorm = nn.BatchNorm1d.__base__
    Dropout = nn.Dropout.__base__

# The generator of an Apple GPU.
mps_generator: Callable[[], torch.Generator] = needed("torch.mps._get_default_mps_generator")


def flex_attention_check() -> tuple[Any, str] | None:
    """Where FlexAttention asks about its device, as (module, name); None where it was never loaded."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None:
        return None
    # A torch without the question: its front door, which a program may have imported by itself.
    return module, "_validate_device" if hasattr(module, "_validate_device") else "flex_attention"


def call_of(module: nn.Module) -> Callable[..., Any]:
    """A call of the module as it was written, past what `module.compile()` has made of it."""
    call: Callable[..., Any] | None = getattr(module, "_call_impl", None)
    if call is None:
        raise lost("torch.nn.Module._call_impl")
    return call


def scripted(module: Any) -> tuple[Any, list[str]]:
    """What a scripted module is in C++, and the names of the attributes that it has there."""
    inside = getattr(module, "_c", None)
    if inside is None:
        raise lost("torch.jit.ScriptModule._c")
    kind = vars(module).get("_concrete_type")
    return inside, list(kind.get_attributes()) if kind else []


def datasets_of_iterators(objects: Iterable[Any]) -> list[Any]:
    """The datasets that iterators of loaders among the objects read: nothing else may hold the loader."""
    kind = optional("torch.utils.data.dataloader._BaseDataLoaderIter")
    found = [one for one in objects if issubclass(type(one), kind)] if kind else []
    return [getattr(one, "_dataset", None) for one in found]


def remove_keyword_hook(handle: Any) -> None:
    """Remove a global forward hook that was given keywords, whole: torch leaves a note of it behind.

    As long as that note is there, torch warns of global hooks wherever a module is compiled.
    """
    handle.remove()
    noted = optional("torch.nn.modules.module._global_forward_hooks_with_kwargs")
    if noted:
        noted.pop(handle.id, None)
