"""The options of a sweep: the keywords of `sweep`, most of which a file of `batchfit sweep` may set.

Rules: the constructor checks what depends on no other module; knobs, settings and engines are checked by
`_sweep.request` and `_sweep.engines`, which are made from these options. No torch: the command line reads the
names of the fields.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, final

from batchfit._arguments import check_callback, check_flag
from batchfit._sweep.pure.estimates import EstimateFunction
from batchfit._sweep.pure.events import OnEvent

if TYPE_CHECKING:
    from batchfit._sweep.job import Engine
    from batchfit.results import SweepRecord

# measure(workload, size), or with knobs by name besides: measure(workload, size, max_crops)
Measure = Callable[..., Mapping[str, Any]]
EstimateSpec = str | Mapping[str, Any] | EstimateFunction
OnRecord = Callable[["SweepRecord"], object]

# Flags of the command line, and objects of a program's own: no keys of a file.
_NOT_IN_A_FILE: Final = ("resume", "retry_failed", "overwrite", "on_record", "on_event")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How to sweep; `sweep` documents each option."""

    mode: Literal["grid", "zip"] = "grid"
    batch_size: int | None = 64
    min_size: int = 1
    auto: bool = True
    estimate: EstimateSpec | None = None
    measure: Measure | str | None = None
    strategy: str = "guided"
    attempts: int = 5
    tolerance: float = 0.02
    steps: int = 3
    soak_steps: int | None = None
    budget: int | str | None = None
    device: str | int | None = None
    start_from: object = None
    devices: Sequence[str | int] | str | None = None
    engine: Engine | str | None = None
    ray_address: str | None = None
    num_gpus: float | None = None
    num_cpus: float | None = None
    max_retries: int | None = None
    output: str | os.PathLike[str] | None = None
    resume: bool = False
    retry_failed: bool = False
    overwrite: bool = False
    on_record: OnRecord | None = None
    on_event: OnEvent | None = None

    def __post_init__(self) -> None:
        check_callback("on_record", self.on_record, "record")
        check_callback("on_event", self.on_event, "event")
        for name in ("resume", "retry_failed", "overwrite"):
            check_flag(name, getattr(self, name))

    def part(self, cls: type[Any]) -> dict[str, Any]:
        """The options that are fields of `cls`, by name."""
        own = {one.name for one in fields(self)}
        return {one.name: getattr(self, one.name) for one in fields(cls) if one.name in own}


def file_keys() -> tuple[str, ...]:
    """The options that a file may set."""
    return tuple(one.name for one in fields(SweepOptions) if one.name not in _NOT_IN_A_FILE)
