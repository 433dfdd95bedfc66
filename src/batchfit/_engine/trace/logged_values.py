"""Values that a program reads only to show them: `loss.item()` for a log line.

Almost every training loop reads its loss, adds it up and prints it. A fake loss has no value, but as long as
nothing depends on it none is needed: what `item()` gives in a trace can be added, scaled and printed, and
refuses, with the line, to be compared, tested or made a number, but where `%` writes it into a text.
"""

from __future__ import annotations

import contextlib
import opcode
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from batchfit._engine.trace.source_line import calling_line, library_caller
from batchfit.errors import UntraceableError


@final
class Unread:
    """A number that nobody knows."""

    __slots__ = ("_refused",)

    def __init__(self, refused: list[UntraceableError]) -> None:
        self._refused = refused

    def __format__(self, _: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"

    def _same(self, other: Any = None, *_: Any) -> Any:
        return other * 1.0 if isinstance(other, Tensor) else self  # a tensor times it is a new tensor

    def _refuse(self, *_: Any) -> Any:
        error = UntraceableError(
            ".item()", calling_line(), "the program decides by a value that depends on the data"
        )
        self._refused.append(error)
        raise error

    def _as_float(self) -> Any:
        if library_caller() == "optim":  # a scheduler that watches the loss: it turns to rates, not to memory
            return 1.0
        return float("nan") if _is_written(sys._getframe(1)) else self._refuse()

    def _as_int(self) -> Any:
        return 0 if _is_written(sys._getframe(1)) else self._refuse()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __floordiv__ = __rfloordiv__ = __pow__ = __rpow__ = __mod__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = _same
    __float__ = _as_float
    __int__ = __index__ = _as_int
    __bool__ = __complex__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = None  # type: ignore[assignment]


_REMAINDERS = [
    index for index, (name, _) in enumerate(getattr(opcode, "_nb_ops", ())) if name.endswith("REMAINDER")
]


def _is_written(caller: FrameType) -> bool:
    """Whether the caller is at a `%`: `"loss %.3f" % loss.item()`, which makes it a number to write it.

    A number itself asks for no `float()` there: what is left of `%` is a text.
    """
    code, at = caller.f_code.co_code, caller.f_lasti
    return opcode.opname[code[at]] == "BINARY_OP" and code[at + 1] in _REMAINDERS


@contextlib.contextmanager
def values_unread(known: Callable[[Any], bool], refused: list[UntraceableError]) -> Iterator[None]:
    """Inside, `item()` of a fake tensor whose value is not `known` gives an `Unread`.

    What it refuses to do is noted in `refused`: the program may catch the error.
    """
    fake: Any = FakeTensor
    names = ("item", "__format__", "__dlpack__")
    own = {name: fake.__dict__[name] for name in names if name in fake.__dict__}

    def item(self: Any) -> Any:
        # torch's own optimizers and scaler put the value into formulas: the trace answers them. A list of
        # values is there to be worked with, not to be shown.
        listed = sys._getframe(1).f_code.co_filename.endswith("fake_tensor.py")
        if known(self) or getattr(self, "constant", None) is not None or listed or library_caller():
            return Tensor.item(self)
        return Unread(refused)

    def formatted(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else str(self)

    def handed_out(self: Any, *_: Any, **__: Any) -> Any:
        """Its memory, which another library would read: there is none."""
        raise UntraceableError("__dlpack__", calling_line(), "another library is given memory of the device")

    fake.item, fake.__format__, fake.__dlpack__ = item, formatted, handed_out
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(fake, name, own[name])
            else:
                delattr(fake, name)
