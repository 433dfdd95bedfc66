"""An LR scheduler whose `step` runs without the batch size's factor; its class stays the user's.

Rules
- The wrappers are attributes of the object, as torch wraps `optimizer.step` (`patch_track_step_called`).
- torch takes an LR scheduler's `state_dict` and pickle from its `__dict__`: both are wrapped too, and leave
  the wrappers out. A checkpoint or a copy is that of an LR scheduler that batchfit never had.
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

_WRAPPED: Final = ("step", "state_dict", "__getstate__")


def wrap_step(lr_scheduler: Any, around: weakref.ref[_Around]) -> None:
    """Let `lr_scheduler.step()` run inside `around`, for as long as its owner lives."""
    attributes = getattr(lr_scheduler, "__dict__", None)
    if not isinstance(attributes, dict):
        raise TypeError(
            f"lr_scheduler must be a plain Python object, not {type(lr_scheduler).__name__}: step it inside "
            "`with scheduler.lr_untouched():` instead"
        )
    before = attributes.get("step")
    if isinstance(before, _WrappedMethod):
        if before.around() is not None:
            raise ValueError(
                "lr_scheduler must be given to one BatchSizeScheduler only: close() the other first"
            )
        unwrap_step(lr_scheduler)  # its owner went without close()
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
        self._steps = name == "step"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lr_scheduler = self._lr_scheduler()
        if not self._steps:
            return _without_wrappers(self._call(lr_scheduler, *args, **kwargs))
        around = self.around()
        if around is None:
            return self._call(lr_scheduler, *args, **kwargs)
        with around(lr_scheduler):
            return self._call(lr_scheduler, *args, **kwargs)

    def _call(self, lr_scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._free is not None:
            return self._free(*args, **kwargs)
        assert self._of_class is not None
        return self._of_class(lr_scheduler, *args, **kwargs)


def _without_wrappers(state: Any) -> Any:
    """The state of an LR scheduler, a dict or the pair that pickle takes with slots, without our wrappers."""
    if isinstance(state, tuple):
        return tuple(_without_wrappers(part) for part in state)
    if not isinstance(state, dict) or not any(isinstance(one, _WrappedMethod) for one in state.values()):
        return state
    return {name: one for name, one in state.items() if not isinstance(one, _WrappedMethod)}
