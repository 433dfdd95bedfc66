"""`GradScaler`: what it notes of each optimizer in a step, and its scale as a tensor.

Rules: its `state_dict` leaves both out, and the public calls make the host wait or change them. A scaler
whose notes cannot be read is refused before it steps: gradients unscaled twice are silently wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.optim import Optimizer

from batchfit._engine.torch_private import needs

# Attributes that `GradScaler.step` hangs on an optimizer for its fused step, and takes off at its end.
_LENT: Final = ("grad_scale", "found_inf")
_STATES: Final = "_per_optimizer_states"


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


def attributes(scaler: Any) -> dict[str, Any] | None:
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


def begin_anew(scaler: Any) -> None:
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
