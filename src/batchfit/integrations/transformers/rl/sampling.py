"""Sampling of part of a batch with the random numbers that the whole batch would draw.

Rules
- `torch.multinomial` draws one exponential number per row and token, and takes the largest ratio. Part of the
  rows draw those of all rows, and use their own: a batch that is generated in microbatches has the
  completions that it would have as a whole, up to rounding of its logits.
- Only inside `generate`, only where one token per row is drawn; anything else draws as it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode


@final
class SharedDraws:
    """The random numbers of one generation, which all its parts begin with."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = _state(device)
        self._end, self._most = self._start, -1  # no part yet

    def of_rows(self, begin: int, end: int, total: int) -> RowsOfDraws:
        """Inside, rows `begin` to `end` of `total` are generated."""
        return RowsOfDraws(self, begin, end, total)

    def begin(self) -> None:
        """A part begins: as the whole did."""
        _set_state(self._device, self._start)

    def ended(self, draws: int) -> None:
        """A part has drawn so often; the part that drew the most ends where the whole would have."""
        if draws > self._most:
            self._end, self._most = _state(self._device), draws

    def close(self) -> None:
        """All parts are done; a batch that ran as a whole has drawn by itself."""
        if self._most >= 0:
            _set_state(self._device, self._end)


@final
class RowsOfDraws(TorchFunctionMode):
    """Inside, `torch.multinomial` of some rows draws for all."""

    def __init__(self, draws: SharedDraws, begin: int, end: int, total: int) -> None:
        super().__init__()
        self._draws = draws
        self._rows = slice(begin, end)
        self._total = total
        self._count = 0

    def __enter__(self) -> Any:
        self._count = 0
        self._draws.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            self._draws.ended(self._count)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.multinomial and self._is_one_each(*args, **named):
            return self._drawn(args[0] if args else named["input"])
        return func(*args, **named)

    def _is_one_each(self, input: Any, num_samples: int, *given: Any, **more: Any) -> bool:
        rows = self._rows.stop - self._rows.start
        return num_samples == 1 and not given and not more and input.dim() == 2 and len(input) == rows

    def _drawn(self, weights: torch.Tensor) -> torch.Tensor:
        self._count += 1
        draws = weights.new_empty((self._total, weights.size(1))).exponential_(1)[self._rows]
        return (weights / draws).argmax(-1, keepdim=True)


def _state(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
