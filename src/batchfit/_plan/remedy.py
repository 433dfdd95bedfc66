"""Where nothing fits on a GPU: the cheapest change that would.

Rules: what keeps the most comes first: another method at the same length, then half the length and half of
that again. Each is traced, and said only if it fits. The smallest GPU that has the memory is named beside it;
that is read off the peak of one sample, and not traced for that GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from batchfit._engine.allocator.gpus import GPUS
from batchfit._plan.pure.settings import Setting
from batchfit._plan.pure.speed import Cell
from batchfit._units import format_bytes
from batchfit.errors import UntraceableError

_HALVINGS: Final = 3
_SHORTEST: Final = 32


def cheapest_change(
    least: tuple[Setting, int],
    others: Sequence[Setting],
    length: int,
    cell_of: Callable[[Setting, int], Cell],
    *,
    margin: float,
) -> str:
    """What to change, in a sentence; `least` is the row that needs the least, and its peak for one sample.

    `others` are settings that were not asked for, and `cell_of` answers for a setting at a length.
    """
    setting, peak = least
    text = f"the least is needed by {setting.name}: {format_bytes(peak)} for one sample"
    change = _change(setting, others, length, cell_of)
    text += f". {change}" if change else ". No shorter length was found that fits"
    wide = min(
        (one for one in GPUS.values() if one.usable_bytes * (1 - margin) >= peak),
        key=lambda one: one.usable_bytes,
        default=None,
    )
    if wide is None:
        return text + ". No GPU that is known has memory for one sample"
    return f"{text}. The smallest GPU with that memory: {wide.name} ({format_bytes(wide.usable_bytes)})"


def _change(
    setting: Setting, others: Sequence[Setting], length: int, cell_of: Callable[[Setting, int], Cell]
) -> str:
    for other in reversed(others):  # the last needs the least
        size = _fits(other, length, cell_of)
        if size:
            return f"What fits at this length: {other.name}, {size} per GPU (--method {other.method})"
    for halving in range(1, _HALVINGS + 1):
        shorter = length >> halving
        if shorter < _SHORTEST:
            break
        size = _fits(setting, shorter, cell_of)
        if size:
            return f"The cheapest change that would fit: --seq-len {shorter} ({size} per GPU)"
    return ""


def _fits(setting: Setting, length: int, cell_of: Callable[[Setting, int], Cell]) -> int:
    try:
        return cell_of(setting, length).batch_size
    except UntraceableError:
        return 0
