"""Private names of torch that tests need: all of them are here, so that a new torch breaks one file."""

from __future__ import annotations

from typing import Any

import torch
from torch import _C as C  # noqa: F401 - what tests take away or replace
from torch import Tensor, nn
from torch import _dynamo as dynamo  # noqa: F401
from torch import _foreach_add_ as foreach_add_  # noqa: F401
from torch import _foreach_mul as foreach_mul  # noqa: F401
from torch import _foreach_mul_ as foreach_mul_  # noqa: F401
from torch import _foreach_sqrt as foreach_sqrt  # noqa: F401
from torch import _pack_padded_sequence as pack_padded_sequence  # noqa: F401
from torch import _safe_softmax as safe_softmax  # noqa: F401
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel  # noqa: F401
from torch._C import _dispatch_key_set, _set_cudnn_enabled, _set_mkldnn_enabled
from torch.cuda import _sleep as gpu_sleep  # noqa: F401
from torch.cuda.memory import _record_memory_history as record_memory_history  # noqa: F401
from torch.cuda.memory import _snapshot as memory_snapshot  # noqa: F401
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode as dispatch_mode  # noqa: F401

wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
subclass: Any = torch.Tensor._make_subclass


def private_aten(name: str) -> Any:
    """An ATen operator by its name in native_functions.yaml: `private_aten("_softmax.default")`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def storage_address(tensor: Tensor) -> int:
    """The same number for all tensors that share a storage."""
    return tensor.untyped_storage()._cdata


def dispatch_keys(tensor: Tensor) -> str:
    return str(_dispatch_key_set(tensor))


def enable_backends(*, cudnn: bool, mkldnn: bool) -> None:
    _set_cudnn_enabled(cudnn)
    _set_mkldnn_enabled(mkldnn)


def forward_hooks(module: nn.Module) -> list[Any]:
    """Hooks of `module` before and after its forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def gradient_hooks(parameter: Tensor) -> dict[int, Any]:
    """What runs after a gradient is accumulated; clear it to remove all hooks."""
    return parameter._post_accumulate_grad_hooks or {}


def global_hooks() -> tuple[int, int, int]:
    """How many hooks hold for all optimizers and for all modules."""
    hooks = (_global_optimizer_post_hooks, _global_forward_hooks, _global_forward_pre_hooks)
    return tuple(map(len, hooks))  # type: ignore[return-value]


def unscaled_optimizers(scaler: Any) -> dict[int, Any]:
    """What a GradScaler knows of each optimizer since its last update."""
    return scaler._per_optimizer_states  # type: ignore[no-any-return]


def default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def process_groups() -> dict[Any, Any]:
    from torch.distributed.distributed_c10d import _world

    return _world.pg_map


def set_group_timeout(*given: Any) -> None:
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(*given)


def take_away_fsdp2_reset() -> Any:
    """FSDP2 as before torch 2.13, which cannot reset itself; a function that gives it back."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    name = "_reset_iter_state"
    torchs = getattr(FSDPState, name, None)
    if torchs is None:
        return lambda: None
    delattr(FSDPState, name)
    return lambda: setattr(FSDPState, name, torchs)
