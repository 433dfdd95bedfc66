"""torch's optimizers, and the `GradScaler` beside them: their state, hooks and notes.

Rules: what a scaler notes of each optimizer is in no `state_dict`, and the public calls make the host wait or
change it. A scaler whose notes cannot be read is refused before it steps: gradients unscaled twice are
silently wrong. State of an optimizer that cannot be made beforehand is made by its step.
"""

from __future__ import annotations

import inspect
import sys
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from batchfit._engine.torch_private import needs

# Attributes that `GradScaler.step` hangs on an optimizer for its fused step, and takes off at its end.
_LENT: Final = ("grad_scale", "found_inf")
_STATES: Final = "_per_optimizer_states"


def makes_state_in_init_group(optimizer: Optimizer) -> bool:
    """Whether its step is torch's own, and makes its state by torch's own `_init_group`."""
    kind = type(optimizer)
    made_by = getattr(kind, "_init_group", None)
    return made_by is not None and all(
        one.__module__.startswith("torch.optim.") for one in (kind.step, made_by)
    )


def can_make_state() -> bool:
    """Whether this torch's optimizers make their state where it can be asked for."""
    return hasattr(torch.optim.Adam, "_init_group")


@torch.no_grad()
def make_state(optimizer: Any) -> None:
    """Make the state of every parameter that has a gradient and no state."""
    lists = len(inspect.signature(optimizer._init_group).parameters) - 1
    for group in optimizer.param_groups:
        optimizer._init_group(group, *([] for _ in range(lists)))


def has_step_hook(optimizer: Any) -> bool:
    """Whether something of the user's runs before its step; so it is taken where that cannot be read."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return hooks is None or bool(hooks)


def chooses_foreach(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes its foreach form on a GPU of its own accord; torch's Adafactor does not."""
    return any(
        hasattr(sys.modules.get(kind.__module__), "_default_to_fused_or_foreach")
        for kind in type(optimizer).__mro__
        if kind is not Optimizer
    )


def shares_state(optimizer: object) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`, which keeps the state of some parameters on each rank."""
    kind = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def forget_shares(optimizer: Any) -> None:
    """Have such an optimizer find out again which rank has which parameters."""
    forget = getattr(optimizer, "_clear_cache", None)
    if forget is None:
        raise needs.SHARED_STATE.refusal()
    forget()


# -- the scaler


def can_read_states() -> bool:
    """Whether the notes of this torch's scaler can be read."""
    return _STATES in vars(torch.amp.GradScaler("cpu"))


def reads_scale() -> bool:
    """Whether its scale can be read as a tensor."""
    return "_scale" in vars(torch.amp.GradScaler("cpu"))


def takes_scaler(optimizer: Any) -> bool:
    """Whether its own step unscales gradients, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def set_takes_scaler(optimizer: Any) -> None:
    """Make it one whose own step unscales."""
    optimizer._step_supports_amp_scaling = True


def is_unscaled(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether the gradients of this optimizer have been unscaled since the last `update`."""
    state = _states(scaler).get(id(optimizer))
    return state is not None and getattr(state["stage"], "name", "") == "UNSCALED"


def found_inf(scaler: Any) -> bool:
    """Whether a gradient was not finite in this step: the host waits for it."""
    states = _states(scaler).values()
    return any(bool(found) for state in states for found in state["found_inf_per_device"].values())


def forget(scaler: Any, optimizers: Iterable[Optimizer]) -> None:
    """Forget what a step that failed has noted: the next would be scaled twice, or refused."""
    for one in optimizers:
        _states(scaler).pop(id(one), None)
        for name in _LENT:
            vars(one).pop(name, None)


def scale_of(scaler: Any) -> torch.Tensor | None:
    """The scale where it lies, on its device; None before the first loss, or where it cannot be read."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def scaler_attributes(scaler: Any) -> dict[str, Any] | None:
    """All that a scaler holds, to be restored: its tensors are made late, and never written by `scale()`."""
    if scaler is None or not hasattr(scaler, "__dict__"):
        return None
    held = dict(vars(scaler))
    table = held.get(_STATES)
    if table is not None:
        copied = table.copy()
        for key, value in table.items():
            copied[key] = dict(value) if isinstance(value, dict) else value
        held[_STATES] = copied
    return held


def forget_steps_of(scaler: Any) -> None:
    """As before the first loss: without tensors, and without notes."""
    states = vars(scaler).get(_STATES)
    scaler._scale = scaler._growth_tracker = None
    if states is not None:
        scaler._per_optimizer_states = defaultdict(getattr(states, "default_factory", None))


def _states(scaler: Any) -> Any:
    states = getattr(scaler, _STATES, None)
    if states is None:
        raise needs.SCALER_STATE.refusal()
    return states
