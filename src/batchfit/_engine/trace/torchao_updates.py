"""Updates of torchao's optimizers: those of parameters that are alike are traced once.

torchao updates one parameter after the other, in a hundred operations each. Of a parameter that is like one
before it (shapes, dtypes, numbers) only the highest moment is written down again, and its update does not
run: the rest is what the first one did. An update that leaves a block behind, or frees one that was there, is
never repeated.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from batchfit._engine.torch_private.dispatch import modes_disabled
from batchfit._engine.torch_private.fake import FakeTensor, device_of
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.trace.held_tensors import is_made_of_tensors, parts_of

if TYPE_CHECKING:
    from batchfit._engine.allocator.footprint import Origin
    from batchfit._engine.trace.blocks import Blocks

TORCHAO: Final = "torchao.optim.adam"  # the module; who has not imported it uses none of its optimizers


@contextlib.contextmanager
def like_updates_repeated(log: Blocks, adopt: Callable[[list[Tensor]], object]) -> Iterator[None]:
    """Inside, torchao's update of a parameter that is like one before it is written down without running.

    `adopt` sees tensors of the host that stand for the device, so that no update is the first to see them.
    """
    module: Any = sys.modules[TORCHAO]
    name = "single_param_adam"
    own = getattr(module, name, None)
    if own is None:
        yield
        return
    known: dict[Any, _Update | None] = {}

    def update(*args: Any) -> None:
        with modes_disabled():
            adopt([one for value in args for one in parts_of(value) if one.dim()])
        key = _form_of(args)
        done = None if key is None else known.get(key)
        if done is not None:
            _repeat(log, done)
            return
        begins = log.position()
        own(*args)
        if key is not None and key not in known:
            known[key] = _update_since(log, begins)

    with replaced(module, name, update):
        yield


_Update = list[tuple[int, "Origin"]]  # the blocks of its highest moment, in order: bytes, where from


def _update_since(log: Blocks, begins: int) -> _Update | None:
    """The highest moment of what was written down since; None where not all of it is gone, or more is.

    What an update frees before and takes after that moment lies in memory that the first one has reserved.
    """
    found = log.written(0, 0, ())
    events = found.events[begins:]
    if {one for one in events if one >= 0} != {~one for one in events if one < 0}:
        return None
    living: dict[int, int] = {}
    highest: list[int] = []
    now = most = 0
    for event in events:
        if event >= 0:
            living[event] = found.sizes[event]
            now += living[event]
        else:
            now -= living.pop(~event)
        if now > most:
            most, highest = now, list(living)
    return [(found.sizes[block], found.origins[block]) for block in highest]


def _repeat(log: Blocks, update: _Update) -> None:
    log.free([log.allocate(size, origin) for size, origin in update][::-1])


def _form_of(value: Any) -> Any:
    """All that decides what an update of these arguments allocates; None where that is not known."""
    if isinstance(value, tuple | list):
        forms = tuple(_form_of(one) for one in value)
        return None if None in forms else forms
    if not isinstance(value, Tensor):
        return type(value).__name__, value
    if is_made_of_tensors(value):
        held: Any = value
        names, context = held.__tensor_flatten__()
        parts = _form_of([getattr(value, name) for name in names])
        return None if parts is None else (type(value), str(context), parts)
    if type(value) not in (FakeTensor, Tensor):
        return None
    device = device_of(value) if type(value) is FakeTensor else value.device
    return value.shape, value.stride(), value.dtype, device, value.storage_offset(), value.requires_grad
