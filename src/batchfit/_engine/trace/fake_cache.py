"""A cache of operations' results for fake arguments: torch is asked once for equal shapes.

Nine of ten operations of a step have been seen before: layers are alike, and so are steps. torch keeps such
results too, but what it compares takes longer than our whole trace.

Rules:
- Arguments are alike if all that a fake kernel can see of them is: shapes, strides, dtypes, devices and
  plain values, with the modes of torch that a kernel asks about. A tensor whose value is known to torch is
  never alike.
- A result is repeated only if it could be made again at once and came out the same in every respect;
  operations that depend on data, change shapes in place, come from outside torch or give parts of one memory
  to several results are asked about each time.
- Errors are not kept: who fails is asked again, and fails again.
- Only shapes are kept, no tensor; not more than a few thousand, for as long as the process lives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from batchfit._engine.torch_private import dispatch
from batchfit._engine.torch_private.dispatch import (
    OpOverload,
    keys_of,
    make_subclass,
    modes_disabled,
    schema_of,
)
from batchfit._engine.torch_private.fake import FakeTensor, FakeTensorMode, device_of, pointer_guard
from batchfit._engine.torch_private.storage import address_of

aten = torch.ops.aten
_META = torch.device("meta")
_PLAIN = frozenset(
    {bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_MOST = 1 << 13


class _MadeResult(NamedTuple):
    """How to make one result: a tensor of its own, a view into an argument, an argument, or a plain value."""

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    offset: int = 0
    view_of: int | None = None
    itself: int | None = None
    value: Any = None


class _Result(NamedTuple):
    parts: tuple[_MadeResult, ...]
    kind: type | None  # tuple or list; None for a single one


_NEVER = _Result((), None)  # in the place of one that cannot be repeated
results_by_call: dict[Any, _Result] = {}
# All that can be seen of a tensor, by a number: hundreds of them make one key.
forms_seen: dict[Any, int] = {}
_numbers = itertools.count()  # never used twice: a key may outlive the form


@final
class FakeResults:
    """Runs operations of one trace on fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._guard = pointer_guard(mode)
        self._attributes: dict[torch.device, dict[str, Any]] = {}

    def of(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` gives."""
        parts: list[Any] = []
        about = facts_about(func)
        if not about.repeats or not (
            self._see(args, parts, about.numbers) and self._see_named(kwargs, parts, about.numbers)
        ):
            return func(*args, **kwargs)
        key = (func, *_modes(), *parts)
        known = results_by_call.get(key)
        if known is None:
            return self._asked(func, args, kwargs, key)
        if known is _NEVER:
            return func(*args, **kwargs)
        return self._repeated(known, args)

    def _asked(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """What torch says, or what follows from what it said about the same with other lengths."""
        if max(len(results_by_call), len(forms_seen)) >= _MOST:
            results_by_call.clear()
            forms_seen.clear()
        like = _LIKE.get(func)
        alike = None if like is None else self._alike(func, args, kwargs, like)
        if alike is not None and (found := results_by_call.get(alike)) is not None:
            # Each result has the lengths of the argument that it is like, by what the operation is.
            known = _Result(
                tuple(
                    one
                    if one.device is None
                    else one._replace(shape=args[at].shape, stride=args[at].stride())
                    for one, at in zip(found.parts, like or (), strict=True)
                ),
                found.kind,
            )
            results_by_call[key] = known
            return self._repeated(known, args)
        out = self._one_by_one(func, args, kwargs) if facts_about(func).each else func(*args, **kwargs)
        described = self.describe(out, args)
        results_by_call[key] = described or _NEVER
        if alike is not None and described is not None and _is_like(described, args, like or ()):
            results_by_call[alike] = described
        return out

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operation on lists does the same with the first of each, the second of each, and so on."""
        lists = [one for one in args if type(one) in (list, tuple)]
        if kwargs or not lists or len(lists[0]) < 2 or len({len(one) for one in lists}) != 1:
            return func(*args, **kwargs)
        found: list[Any] = []
        for index in range(len(lists[0])):
            each = tuple([one[index]] if type(one) in (list, tuple) else one for one in args)
            out = self.of(func, each, kwargs)
            if out is not None:
                found += out
        return found if len(schema_of(func).returns) else None

    def _repeated(self, known: Any, args: Any) -> Any:
        if known.kind is None:
            return self._again(known.parts[0], args)
        return known.kind([self._again(one, args) for one in known.parts])

    def _see(self, values: Iterable[Any], parts: list[Any], numbers: bool = True) -> bool:
        """Write down what a kernel can see of some arguments; whether that is all."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if not self._is_plain(value):
                    return False
                form = (
                    value.shape,
                    value.stride(),
                    value.dtype,
                    device_of(value),
                    value.storage_offset(),
                    value.requires_grad,
                    value.is_inference(),
                )
                number = forms_seen.get(form)
                if number is None:
                    number = forms_seen[form] = next(_numbers)
                parts.append(number)
            elif kind is int or kind is float:
                # 1 and 1.0 are equal, and give other dtypes.
                parts += (kind, value) if numbers else (kind,)
            elif kind in _PLAIN:
                parts += (kind, value)
            elif kind is list or kind is tuple:
                parts += (kind, len(value))
                if not self._see(value, parts, numbers):
                    return False
            else:
                return False
        return True

    def _see_named(self, kwargs: dict[str, Any], parts: list[Any], numbers: bool = True) -> bool:
        if not kwargs:
            return True
        parts += (dict, *kwargs)
        return self._see(kwargs.values(), parts, numbers)

    def _is_plain(self, value: Any) -> bool:
        return (
            value.constant is None
            and value.fake_mode is self._mode
            and value.layout is torch.strided
            and not value.is_conj()
            and not value.is_neg()
        )

    def _alike(self, func: Any, args: Any, kwargs: Any, like: tuple[int, ...]) -> Any:
        """What the arguments have in common with others of other lengths; None for layouts of their own."""
        parts: list[Any] = ["alike", func, *_modes()]
        shape = getattr(args[like[0]], "shape", None)
        for value in args:
            if type(value) is not FakeTensor:
                if not self._see((value,), parts):
                    return None
                continue
            # With a length of 1 one layout passes for another.
            if not value.is_contiguous() or value.storage_offset() or min(value.shape, default=2) < 2:
                return None
            parts += (value.dim(), value.shape == shape, value.dtype, device_of(value))
            parts += (value.requires_grad, value.is_inference())
        return tuple(parts) if self._see_named(kwargs, parts) else None

    def describe(self, out: Any, args: Any) -> _Result | None:
        """How to make these results again; None where that is not known."""
        kind = type(out) if type(out) in (list, tuple) else None
        given = [(index, one) for index, one in enumerate(args) if isinstance(one, Tensor)]
        among = tensors_among(args)
        held = {address_of(one) for one in among}
        single = given[0][0] if len(given) == 1 and len(among) == 1 else None
        found, seen = [], set(held)
        for one in (out,) if kind is None else out:
            if type(one) in (int, float, bool, type(None)):
                found.append(_MadeResult(value=one))
                continue
            if type(one) is not FakeTensor or not self._is_plain(one):
                return None
            itself = next((index for index, other in given if other is one), None)
            if itself is not None:
                found.append(_MadeResult(itself=itself))
                continue
            address = address_of(one)
            view_of = single if address in held else None
            if address in seen and view_of is None:  # which of several it shares memory with is not known
                return None
            seen.add(address)
            made = self._made(one, view_of, args)
            if made is None:
                return None
            found.append(made)
        return _Result(tuple(found), kind)

    def _made(self, one: Any, view_of: int | None, args: Any) -> _MadeResult | None:
        """How to make a tensor like this one, if that gives one like it in every respect."""
        made = _MadeResult(one.shape, one.stride(), one.dtype, device_of(one), one.storage_offset(), view_of)
        twin = self._again(made, args)
        same = (
            vars(twin) == vars(one)
            and twin.shape == one.shape
            and twin.stride() == one.stride()
            and twin.storage_offset() == one.storage_offset()
            and twin.untyped_storage().nbytes() == one.untyped_storage().nbytes()
            and twin.requires_grad == one.requires_grad
            and twin.is_inference() == one.is_inference()
            and keys_of is not None
            and keys_of(twin) == keys_of(one)
        )
        return made if same else None

    def _again(self, made: _MadeResult, args: Any) -> Any:
        if made.itself is not None:
            return args[made.itself]
        if made.device is None:
            return made.value
        if made.view_of is None:
            return self.empty(made.shape, made.stride, made.dtype, made.device)
        return self._view(args[made.view_of], made.shape, made.stride, made.offset, made.dtype, made.device)

    def empty(self, shape: Any, stride: Any, dtype: Any, device: torch.device) -> Tensor:
        """A fake tensor with memory of its own."""
        with modes_disabled():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
        return self._dressed(bare, device)

    def sharing(self, fake: Any) -> Tensor:
        """Another fake tensor of the same memory, unknown to autograd."""
        return self._view(fake, fake.shape, fake.stride(), fake.storage_offset(), fake.dtype, device_of(fake))

    def _view(
        self, of: Any, shape: Any, stride: Any, offset: int, dtype: Any, device: torch.device
    ) -> Tensor:
        with modes_disabled():
            bare = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            bare.set_(of.untyped_storage(), offset, shape, stride)
        return self._dressed(bare, device)

    def _dressed(self, bare: Tensor, device: torch.device) -> Tensor:
        """A fake tensor, as torch makes it, with the attributes that it gives to all of a device."""
        attributes = self._attributes.get(device)
        fake: Any
        if attributes is None or self._guard is None:
            fake = FakeTensor(self._mode, bare, device)
            self._attributes[device] = dict(vars(fake))
        else:
            keys = {"dispatch_device": True, "device_for_backend_keys": device}
            fake = make_subclass(FakeTensor, bare, False, **keys)
            self._guard(fake)
            vars(fake).update(attributes)
        made: Tensor = fake
        return made


def _modes() -> tuple[Any, ...]:
    """What kernels ask about besides their arguments: a convolution's layout is its back-end's, say."""
    return (
        torch.get_default_dtype(),
        torch.is_inference_mode_enabled(),
        dispatch.uses_cudnn(),
        dispatch.uses_mkldnn(),
        torch.are_deterministic_algorithms_enabled(),
    )


class _About(NamedTuple):
    """What is to be known of an operation."""

    repeats: bool  # its results follow from what can be seen of its arguments
    numbers: bool  # ... and from the numbers among these: not where it only writes
    each: bool  # it takes lists, and treats each of them by itself


@functools.cache
def facts_about(func: Any) -> _About:
    if not isinstance(func, OpOverload) or func.namespace not in ("aten", "prims"):
        return _About(False, False, False)
    schema = schema_of(func)
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)
    # What is given as `out` may be resized.
    has_tag = func is not aten.index.Tensor and any(tag in func.tags for tag in tags)
    known = not has_tag and not any(one.is_out for one in schema.arguments)
    each = schema.name.startswith("aten::_foreach_")
    return _About(known and func not in _ASKED, not each or len(schema.returns) > 0, each)


_ASKED = frozenset(
    {
        aten._fused_sdp_choice.default,  # by switches that a program may turn at any layer
        aten.lift_fresh.default,
        aten.lift_fresh_copy.default,
        aten.lift.default,
        aten.as_strided.default,  # may read beyond what is seen of its argument
        aten.as_strided_.default,
        aten.set_.source_Tensor,
        aten.resize_.default,
    }
)


# Operations whose results have, one by one, the lengths of these arguments.
_LIKE: dict[Any, tuple[int, ...]] = {
    aten.native_batch_norm.default: (0, 1, 1),
    aten.native_batch_norm_backward.default: (1, 2, 2),
    aten.native_dropout.default: (0, 0),
    aten.native_dropout_backward.default: (0,),
    **dict.fromkeys(
        (
            aten._to_copy.default,
            aten.clone.default,
            aten.relu.default,
            aten.gelu.default,
            aten.silu.default,
            aten.tanh.default,
            aten.sigmoid.default,
            aten.threshold_backward.default,
            aten.gelu_backward.default,
            aten.silu_backward.default,
            aten.tanh_backward.default,
            aten.sigmoid_backward.default,
            aten.add.Tensor,
            aten.mul.Tensor,
            aten.zeros_like.default,
            aten.empty_like.default,
            aten.ones_like.default,
        ),
        (0,),
    ),
}


def _is_like(result: _Result, args: Any, like: tuple[int, ...]) -> bool:
    """Whether each result is new and has the lengths and the layout of the argument that it is like."""
    if len(result.parts) != len(like):
        return False
    return all(
        (one.device is None and one.itself is None)
        or (
            one.itself is None
            and one.view_of is None
            and isinstance(args[at], Tensor)
            and (one.shape, one.stride) == (args[at].shape, args[at].stride())
        )
        for one, at in zip(result.parts, like, strict=True)
    )


def tensors_among(values: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, those in lists too."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_among(value)
    return found
