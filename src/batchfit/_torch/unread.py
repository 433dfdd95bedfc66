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

from batchfit._torch.calling import calling_line, library_caller
from batchfit.errors import UntraceableError


@final
class Unread:
    """A number that nobody knows."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return "?"

    def __repr__(self) -> str:
        return "?"

    def _same(self, *_: Any) -> Unread:
        return self

    def _refuse(self, *_: Any) -> Any:
        raise UntraceableError(
            ".item()", calling_line(), "the program decides by a value that depends on the data"
        )

    def _as_float(self) -> Any:
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
def values_unread(known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside, `item()` of a fake tensor whose value is not `known` gives an `Unread`."""
    fake: Any = FakeTensor
    names = ("item", "__format__")
    own = {name: fake.__dict__[name] for name in names if name in fake.__dict__}

    def item(self: Any) -> Any:
        # torch's own optimizers and scaler put the value into formulas: the trace answers them. A list of
        # values is there to be worked with, not to be shown.
        listed = sys._getframe(1).f_code.co_filename.endswith("fake_tensor.py")
        if known(self) or getattr(self, "constant", None) is not None or listed or library_caller():
            return Tensor.item(self)
        return Unread()

    def formatted(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else str(self)

    fake.item, fake.__format__ = item, formatted
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(fake, name, own[name])
            else:
                delattr(fake, name)
