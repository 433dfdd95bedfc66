"""An LR scheduler whose `step` runs without the batch size's factor; its class stays the user's.

Rules
- The wrappers are attributes of the object, as torch wraps `optimizer.step` (`patch_track_step_called`).
- `state_dict`, pickle and copies are made from an LR scheduler's `__dict__`: they are wrapped too, and leave
  the wrappers out, also where the class has its own `__reduce__` or `__deepcopy__`. A checkpoint or a copy is
  that of an LR scheduler that batchfit never had.
- A wrapper holds no strong reference to its LR scheduler: a cycle would keep the parameters alive.
- Once the owner of the factor is gone, the wrappers only pass calls on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias, final

# What an LR scheduler steps inside of, called with that LR scheduler.
_Around: TypeAlias = Callable[[Any], AbstractContextManager[None]]

# pickle and `deepcopy` ask the object for `__reduce_ex__`, `copy` asks its class, which calls `__getstate__`.
_WRAPPED: Final = ("step", "state_dict", "__getstate__", "__reduce_ex__", "__deepcopy__")


def wrap_step(lr_scheduler: Any, around: weakref.ref[_Around]) -> None:
    """Let `lr_scheduler.step()` run inside `around`, for as long as its owner lives."""
    attributes = getattr(lr_scheduler, "__dict__", None)
    if not isinstance(attributes, dict) or not hasattr(lr_scheduler, "__weakref__"):
        raise TypeError(
            f"lr_scheduler must be a plain Python object, not {type(lr_scheduler).__name__}: step it inside "
            "`with scheduler.lr_untouched():` instead"
        )
    ours = [one for one in map(attributes.get, _WRAPPED) if isinstance(one, _WrappedMethod)]
    if any(one.around() is not None for one in ours):
        raise ValueError("lr_scheduler must be given to one BatchSizeScheduler only: close() the other first")
    unwrap_step(lr_scheduler)  # an owner that went without close()
    for name in _WRAPPED:
        if hasattr(lr_scheduler, name):
            attributes[name] = _WrappedMethod(lr_scheduler, name, around)


def unwrap_step(lr_scheduler: Any) -> None:
    """Remove the wrappers; one that somebody else has wrapped again stays, and passes calls on."""
    attributes = vars(lr_scheduler)
    for name in _WRAPPED:
        wrapper = attributes.get(name)
        if isinstance(wrapper, _WrappedMethod):
            del attributes[name]
            if wrapper.own is not None:
                attributes[name] = wrapper.own


@final
class _WrappedMethod:
    """A method of one LR scheduler, called with that object."""

    def __init__(self, lr_scheduler: Any, name: str, around: weakref.ref[_Around]) -> None:
        self.around = around
        self.own: Callable[..., Any] | None = vars(lr_scheduler).get(name)  # wrapped by another program
        of_class: Callable[..., Any] | None = getattr(type(lr_scheduler), name, None)
        # A proxy has the method from neither: its `__getattr__` gives one of another object.
        self._free = self.own or (None if of_class else getattr(lr_scheduler, name))
        self._of_class = of_class
        self._lr_scheduler = weakref.ref(lr_scheduler)
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lr_scheduler = self._lr_scheduler()
        if self._name == "__deepcopy__":
            return self._copy(lr_scheduler, *args)
        if self._name != "step":
            return _without_wrappers(self._call(lr_scheduler, *args, **kwargs))
        around = self.around()
        if around is None:
            return self._call(lr_scheduler, *args, **kwargs)
        with around(lr_scheduler):
            return self._call(lr_scheduler, *args, **kwargs)

    def _copy(self, lr_scheduler: Any, *args: Any) -> Any:
        """A copy by the class's own `__deepcopy__`, which may copy every attribute: no wrapper."""
        attributes = vars(lr_scheduler)
        before = dict(attributes)
        unwrap_step(lr_scheduler)
        try:
            return self._call(lr_scheduler, *args)
        finally:
            attributes.update({name: before[name] for name in _WRAPPED if name in before})

    def _call(self, lr_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._free is not None:
            return self._free(*args, **kwargs)
        assert self._of_class is not None
        return self._of_class(lr_scheduler, *args, **kwargs)


def _without_wrappers(state: Any) -> Any:
    """The state of an LR scheduler, a dict or a tuple that pickle takes, without our wrappers."""
    if type(state) is tuple:
        return tuple(_without_wrappers(part) for part in state)
    if type(state) is not dict or not _has_wrapper(state):
        return state
    kept = {name: one for name, one in state.items() if not isinstance(one, _WrappedMethod)}
    return {name: _without_wrappers(one) if type(one) is dict else one for name, one in kept.items()}


def _has_wrapper(state: dict[Any, Any]) -> bool:
    return any(
        isinstance(one, _WrappedMethod) or (type(one) is dict and _has_wrapper(one)) for one in state.values()
    )
