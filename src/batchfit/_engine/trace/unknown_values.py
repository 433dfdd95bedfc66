"""Values that depend on the data: what reading one gives in a trace.

Rules:
- A program that only logs a value needs none: what `item()` gives can be added, scaled and printed. It
  refuses, with the line, to be compared, tested or made a number, except where `%` writes it into a text.
- Code of torch reads values that decide no shape. It is wrapped during a trace (`LibraryReads`), so that the
  recorder knows who reads, and answers. Which function reads is never guessed from file names.
"""

from __future__ import annotations

import contextlib
import functools
import opcode
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, final

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchfit._engine.trace.provenance import calling_line
from batchfit.errors import UntraceableError


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, a class, a module or this one instance has another attribute of that name."""
    had, before = name in vars(owner), vars(owner).get(name)

    def put(value: Any) -> None:
        # Past the `__setattr__` of an instance: a compiled module would set it on what it wraps.
        setattr(owner, name, value) if isinstance(owner, type) else vars(owner).update({name: value})

    put(value)
    try:
        yield
    finally:
        if had:
            put(before)
        elif isinstance(owner, type):
            delattr(owner, name)
        else:
            del vars(owner)[name]


# -- who reads


@functools.cache
def optimizer_updates() -> tuple[tuple[Any, str], ...]:
    """The functions in which torch's optimizers update parameters, as (module, name).

    They read step counters, learning rates and norms, and run no code of the program's.
    """
    modules = [module for name, module in sys.modules.items() if name.startswith("torch.optim.")]
    kinds = ("_single_tensor_", "_multi_tensor_")
    return tuple(
        (module, name)
        for module in modules
        for name, value in vars(module).items()
        if name.startswith(kinds) and getattr(value, "__module__", "") == module.__name__
    )


_LISTED = object()  # a list of values is there to be worked with, not to be shown


@final
class LibraryReads:
    """Which code of torch is reading values, and the answer that it gets.

    - An optimizer's update and `ReduceLROnPlateau` put numbers into formulas: any number does.
    - Distributions ask whether their arguments are valid: in a step that runs, they are.
    """

    def __init__(self) -> None:
        self._answer: Any = None

    @property
    def active(self) -> bool:
        """Whether a value that is read now is no value that a program logs."""
        return self._answer is not None

    def answer(self, *, is_bool: bool) -> Any:
        """What code of torch that reads a value gets; None where the program itself reads it.

        A truth value is a branch, which is not guessed for an optimizer; a number is no validity.
        """
        if self._answer is _LISTED:
            return None
        return self._answer if isinstance(self._answer, bool) == is_bool else None

    @contextlib.contextmanager
    def wrapped(self) -> Iterator[None]:
        """Inside, it is known when such code runs."""
        readers: list[tuple[Any, str, Any]] = [(*one, 1.0) for one in optimizer_updates()]
        readers += [(ReduceLROnPlateau, "step", 1.0)]
        readers += [(Distribution, "__init__", True), (Distribution, "_validate_sample", True)]
        readers += [(FakeTensor, "tolist", _LISTED)]
        with contextlib.ExitStack() as stack:
            for owner, name, answer in readers:
                stack.enter_context(replaced(owner, name, self._reading(getattr(owner, name), answer)))
            yield

    def _reading(self, function: Callable[..., Any], answer: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def reading(*args: Any, **kwargs: Any) -> Any:
            before, self._answer = self._answer, answer
            try:
                return function(*args, **kwargs)
            finally:
                self._answer = before

        return reading


# -- what the program reads


@final
class Unread:
    """A number that nobody knows."""

    __slots__ = ("_reads", "_refused")

    def __init__(self, refused: list[UntraceableError], reads: LibraryReads) -> None:
        self._refused = refused
        self._reads = reads

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
        answer = self._reads.answer(is_bool=False)
        if answer is not None:  # a scheduler that watches the loss: it changes rates, not memory
            return answer
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
def values_unread(
    known: Callable[[Any], bool],
    answers: Callable[[], bool],
    reads: LibraryReads,
    refused: list[UntraceableError],
) -> Iterator[None]:
    """Inside, `item()` of a fake tensor whose value is not `known` gives an `Unread`.

    Except where the recorder `answers`, since code of a library reads it. What an `Unread` refuses to do is
    noted in `refused`: the program may catch the error.
    """

    def item(self: Any) -> Any:
        if known(self) or getattr(self, "constant", None) is not None or answers():
            return Tensor.item(self)
        return Unread(refused, reads)

    def formatted(self: Any, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 and spec else str(self)

    def exported(self: Any, *_: Any, **__: Any) -> Any:
        """Its memory, which another library would read: there is none."""
        raise UntraceableError("__dlpack__", calling_line(), "another library is given memory of the device")

    with (
        reads.wrapped(),
        replaced(FakeTensor, "item", item),
        replaced(FakeTensor, "__format__", formatted),
        replaced(FakeTensor, "__dlpack__", exported),
    ):
        yield
