"""Values on the traced device that depend on neither data nor weights: positions, masks, counters.

A program may branch on them (is this causal mask all true? are these positions one sequence?), and a fake
tensor has no values. Those that a program makes from shapes alone are computed beside the trace, on the host,
so that such a branch is taken as it would be and not guessed.

Rules:
- A value is known only if everything it was made of is known. What came from the batch, from a weight or from
  a random generator is not, but for the mask of a batch that hides nothing: whole numbers, all the same.
- A gradient scaler finds no infinities: it steps, and its scale goes on as after a step.
- A tensor that is written with something unknown is unknown from then on.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

aten = torch.ops.aten
_LARGEST = 1 << 24  # elements: more is no mask or position but a computation
_A_FEW = 8  # whole numbers that are an index written into the program (`ids[:, [-1, 0]]`)
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
        return found[1] if living.untyped_storage()._cdata == found[2] else None  # or `fake.data = other`

    def put(self, fake: Tensor, value: Tensor) -> None:
        """From now on `fake` has this value, which lies in memory as `fake` does."""
        key = id(fake)
        if value.layout is not torch.strided or not _is_laid_out_as(value, fake):
            self._values.pop(key, None)
            return
        address = fake.untyped_storage()._cdata
        self._values[key] = (weakref.ref(fake, lambda _: self._values.pop(key, None)), value, address)

    def _put_zero(self, found_inf: Tensor) -> None:
        with unset_fake_temporarily():
            self.put(found_inf, torch.zeros(found_inf.shape))

    def see(self, fake: Tensor, real: Tensor, *, is_index: bool) -> None:
        """A tensor of the host comes in as `fake`: known if it is an index, or a whole number all over."""
        plain = real.layout is torch.strided and real.dtype in WHOLE and real.device.type == "cpu"
        if not plain or not 0 < real.numel() <= _LARGEST:
            return
        if (is_index and real.numel() <= _A_FEW) or _is_constant(real):
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
            if func in _LIKE:
                if out.numel() <= _LARGEST:
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
        if outs and all(isinstance(one, Tensor) and one.numel() <= _LARGEST for one in outs):
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
        name = func._schema.name
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
        """These look at a shape only; the values of what they are like do not matter."""
        with unset_fake_temporarily():
            shaped = torch.zeros(args[0].shape, dtype=args[0].dtype)
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
            address = written.untyped_storage()._cdata
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
    arguments = enumerate(func._schema.arguments)
    return tuple((i, one.name) for i, one in arguments if one.is_write or one.name in _STATISTICS)


def written_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that an operation writes into: its own, a list's, or those given as `out`."""
    found: list[Tensor] = []
    for index, name in _written(func):
        value = args[index] if index < len(args) else kwargs.get(name)
        several = value if isinstance(value, list | tuple) else (value,)
        found += [one for one in several if isinstance(one, Tensor) and one.layout is torch.strided]
    return found
