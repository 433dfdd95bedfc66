"""Values of fake tensors: the few that a trace knows, and what `.item()` of any other gives.

A program may branch on values that depend on neither data nor weights (is this causal mask all true? are
these positions one sequence?), and a fake tensor has none. Those that a program makes from shapes alone are
computed beside the trace, on the host, so that such a branch is taken as it would be and not guessed.

Rules:
- A value is known only if everything it was made of is known. What came from the batch, from a weight or from
  a random generator is not, but for the mask of a batch that hides nothing: whole numbers, all the same.
- A gradient scaler finds no infinities: it steps, and its scale goes on as after a step.
- A tensor that is written with something unknown is unknown from then on.
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
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.optim.lr_scheduler import ReduceLROnPlateau

from batchfit._engine.torch_private.dispatch import schema_of
from batchfit._engine.torch_private.fake import FakeTensor, unset_fake_temporarily
from batchfit._engine.torch_private.replaced import replaced
from batchfit._engine.torch_private.storage import address_of
from batchfit._engine.trace.program_lines import calling_line, reading
from batchfit.errors import UntraceableError

aten = torch.ops.aten
_LARGEST_ELEMENTS = 1 << 24  # more is no mask or position but a computation
_LARGEST_INDEX_ELEMENTS = 8  # whole numbers that are an index written into the program (`ids[:, [-1, 0]]`)
WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_MAKERS = frozenset(
    {
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.zeros.default,
        aten.ones.default,
        aten.full.default,
        aten.eye.default,
        aten.scalar_tensor.default,
        aten.linspace.default,
    }
)
_LIKE = frozenset(
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
    }
)
_BOTH = _MAKERS | _LIKE
_ONES = frozenset({aten.ones.default, aten.ones_like.default, aten.new_ones.default})
_UPDATE_SCALE = aten._amp_update_scale_.default
_UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default
_HEAVY = frozenset({"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::convolution"})
# Dtypes of quantised states: gigabytes of zeros, which nothing asks for a value.
_CODES = frozenset({torch.uint8, torch.int8})
_MOST_CODES = 2**16
# Statistics that normalisations write into without saying so.
_STATISTICS = frozenset({"running_mean", "running_var"})


@final
class KnownValues:
    """The known values, by the fake tensor that stands for them."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[weakref.ref[Tensor], Tensor, int]] = {}

    def of(self, fake: Any) -> Tensor | None:
        """The value of a fake tensor, where it is known."""
        found = self._values.get(id(fake))
        if found is None or (living := found[0]()) is None or living is not fake:
            return None
        return found[1] if address_of(living) == found[2] else None  # or `fake.data = other`

    def put(self, fake: Tensor, value: Tensor) -> None:
        """From now on `fake` has this value, which lies in memory as `fake` does."""
        key = id(fake)
        if value.layout is not torch.strided or not _is_laid_out_as(value, fake):
            self._values.pop(key, None)
            return
        address = address_of(fake)
        self._values[key] = (weakref.ref(fake, lambda _: self._values.pop(key, None)), value, address)

    def _put_zero(self, found_inf: Tensor) -> None:
        with unset_fake_temporarily():
            self.put(found_inf, torch.zeros(found_inf.shape))

    def see(self, fake: Tensor, real: Tensor, *, is_index: bool) -> None:
        """A tensor of the host comes in as `fake`: known if it is an index, or a whole number all over."""
        plain = real.layout is torch.strided and real.dtype in WHOLE and real.device.type == "cpu"
        if not plain or not 0 < real.numel() <= _LARGEST_ELEMENTS:
            return
        if (is_index and real.numel() <= _LARGEST_INDEX_ELEMENTS) or _is_constant(real):
            self.put(fake, real.detach().clone())

    def drop(self, fake: Tensor) -> None:
        """Its value is not known any more."""
        self._values.pop(id(fake), None)

    def follow(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], out: Any) -> None:
        """After an operation: the values of its results, or that they are no longer known."""
        known: list[Tensor] | None = []
        if func is _UNSCALE:
            self._forget(func, args, kwargs)
            self._put_zero(args[1])
            return
        if func is _UPDATE_SCALE:
            self._put_zero(args[2])
        if func in _BOTH:
            # Positions, masks and counters: what is large or a fraction is a computation, but for a mask of
            # ones, a row for each sample (as OPT and BART make one for themselves).
            if not isinstance(out, Tensor):
                return
            is_mask = func in _ONES and out.dim() == 2
            if out.numel() != 1 and out.dtype.is_floating_point and not is_mask:
                return
            if out.dtype in _CODES and out.numel() > _MOST_CODES:
                return
            if func in _LIKE:
                if out.numel() <= _LARGEST_ELEMENTS:
                    self._compute_like(func, args, kwargs, out)
                return
        elif not tensors or not self._values:
            return
        else:
            known = self._all_of(tensors)
        if known is None or torch.Tag.nondeterministic_seeded in func.tags:
            if self._values:
                self._forget(func, args, kwargs)
            return
        outs = out if isinstance(out, list | tuple) else (out,)
        if outs and all(isinstance(one, Tensor) and one.numel() <= _LARGEST_ELEMENTS for one in outs):
            self._compute(func, args, kwargs, outs)
        else:
            self._forget(func, args, kwargs)  # no result, as of torch._foreach_add_

    def _all_of(self, tensors: list[Tensor]) -> list[Tensor] | None:
        found = []
        for one in tensors:
            value = self.of(one)
            if value is None:
                return None
            found.append(value)
        return found

    def _compute(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> None:
        name = schema_of(func).name
        # Operations of others may do anything, by chance too; and a product of matrices is no mask.
        if not name.startswith(("aten::", "prims::")) or name in _HEAVY:
            self._forget(func, args, kwargs)
            return
        try:
            with unset_fake_temporarily():
                value = func(*self._real(args), **self._real(kwargs))
        except Exception:  # noqa: BLE001  what the host has no kernel for is not known, and no error
            self._forget(func, args, kwargs)
            return
        for out, one in zip(outs, value if isinstance(value, list | tuple) else (value,), strict=True):
            if isinstance(one, Tensor):
                self.put(out, one)

    def _compute_like(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        """These read a shape only, as `logits.new_zeros(())`; what they are like may not fit on the host."""
        with unset_fake_temporarily():
            shaped = torch.zeros((), dtype=args[0].dtype).expand(args[0].shape)
            value = func(shaped, *self._real(args[1:]), **self._real(kwargs))
            self.put(out, torch.empty_strided(out.shape, out.stride(), dtype=value.dtype).copy_(value))

    def _real(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, list | tuple):
            return type(value)(self._real(one) for one in value)
        if isinstance(value, dict):
            return {name: self._real(one) for name, one in value.items() if name != "pin_memory"}
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        for written in written_by(func, args, kwargs):
            address = address_of(written)
            for key, (fake, _, before) in list(self._values.items()):
                if fake() is None or before == address:
                    self._values.pop(key, None)


def _is_constant(real: Tensor) -> bool:
    first = real.reshape(-1)[0]
    return bool((real == first).all())


def _is_laid_out_as(value: Tensor, fake: Tensor) -> bool:
    if value.shape != fake.shape or value.dtype != fake.dtype:
        return False
    steps = zip(value.shape, value.stride(), fake.stride(), strict=True)
    return all(one == two for length, one, two in steps if length > 1)


@functools.cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Which of its arguments an operation writes into: number and name."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, one.name) for i, one in arguments if one.is_write or one.name in _STATISTICS)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into: its own, a list's, or those given as `out`."""
    found: list[Tensor] = []
    for index, name in _written(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        several = value if isinstance(value, list | tuple) else (value,)
        found += [one for one in several if isinstance(one, Tensor) and one.layout is torch.strided]
    return found


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
                stack.enter_context(replaced(owner, name, self._reading(vars(owner)[name], answer)))
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
            reading(), calling_line(), "the program decides by a value that depends on the data"
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
    recorded: Callable[..., Any],
) -> Iterator[None]:
    """Inside, `item()` of a fake tensor whose value is not `known` gives what is `recorded`, or an `Unread`.

    Except where the recorder `answers`, since code of a library reads it. What an `Unread` refuses to do is
    noted in `refused`: the program may catch the error.
    """

    def item(self: Any) -> Any:
        if known(self) or getattr(self, "constant", None) is not None or answers():
            return Tensor.item(self)
        found = recorded(is_bool=self.dtype is torch.bool)
        return Unread(refused, reads) if found is None else found

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
