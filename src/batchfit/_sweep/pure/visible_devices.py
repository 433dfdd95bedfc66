"""Devices by name, and the variable with which a process sees one of them alone.

Rules: a process that is given a GPU sees that one and no other, so that `cuda` and `cuda:0` in the user's
code mean it; one that is given a CPU sees no GPU. A GPU is given to one process only: two would take each
other's memory, and neither would find out what fits. A CPU may be given to several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

VISIBLE = "CUDA_VISIBLE_DEVICES"
_OTHERS = ("xpu", "mps", "hpu", "npu", "mtia", "privateuseone")  # devices that a process names as they are


@final
@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A device for one process: its name, what shows it alone in there, and what it is called there."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    device: str | None = None  # None: the only one that is seen

    @property
    def is_cuda(self) -> bool:
        """Whether it is a GPU that the process sees under another number."""
        return bool(self.environment.get(VISIBLE))


def places_of(devices: object, *, visible: str | None, count: Callable[[], int]) -> tuple[VisibleDevice, ...]:
    """A place for each device; `visible` is this process' own CUDA_VISIBLE_DEVICES, `count()` its GPUs.

    >>> [one.environment for one in places_of("cuda:0,cuda:1", visible="2,5", count=lambda: 2)]
    [{'CUDA_VISIBLE_DEVICES': '2'}, {'CUDA_VISIBLE_DEVICES': '5'}]
    """
    names = devices.split(",") if isinstance(devices, str) else devices
    if not isinstance(names, Sequence) or not names:
        raise TypeError(f"devices must be a list of devices such as ['cuda:0', 'cuda:1'], not {devices!r}")
    places: list[VisibleDevice] = []
    for name in names:
        place = _place(name, visible, count)
        if place.is_cuda and any(place.environment == one.environment for one in places):
            raise ValueError(f"devices must name each GPU once, not {place.name!r} twice")
        places.append(place)
    return tuple(places)


def _place(given: object, visible: str | None, count: Callable[[], int]) -> VisibleDevice:
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise TypeError(f"devices must be names such as 'cuda:0', not {given!r}")
    name = str(given).strip()
    if name.upper().startswith(("GPU-", "MIG-")):
        return VisibleDevice(name, {VISIBLE: name})
    kind, _, number = name.partition(":")
    if kind.isascii() and kind.isdecimal() and not number:
        kind, number = "cuda", kind
    if not kind.isidentifier() or (number and not (number.isascii() and number.isdecimal())):
        raise ValueError(f"devices must be names such as 'cuda:0', 'GPU-8932f937' or 'cpu', not {given!r}")
    if kind == "cpu":
        return VisibleDevice("cpu", {VISIBLE: ""})
    if kind in _OTHERS:
        return VisibleDevice(name, {}, name)
    if kind != "cuda":
        raise ValueError(f"devices must be names such as 'cuda:0', 'GPU-8932f937' or 'cpu', not {given!r}")
    index = int(number or 0)
    seen = None if visible is None else [one.strip() for one in visible.split(",") if one.strip()]
    there = count() if seen is None else min(len(seen), count())
    if index >= there:
        there_are = (
            f"cuda:0 to cuda:{there - 1}" if there > 1 else "cuda:0" if there else "cpu (there is no GPU)"
        )
        raise ValueError(f"devices must be among {there_are}, not {given!r}")
    return VisibleDevice(f"cuda:{index}", {VISIBLE: str(index) if seen is None else seen[index]})
