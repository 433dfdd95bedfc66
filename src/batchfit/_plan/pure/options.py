"""The options of a plan: the keywords of `plan`, and the flags of `batchfit plan`.

Rules: as in `_find.pure.options`. A GPU is a name, a name with a number of them ("h100x8"), or a name with
its memory ("a100=32GiB", for a GPU that is not known, or only a part of one). A number at the end of an
unknown name is part of it ("gtx1080=8GiB"), unless three letters stand before the "x" ("mygpux8=24GiB").
A price is that of what was named: of one "h100", or of all eight of "h100x8".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final, get_args

from batchfit._arguments import check_flag, check_whole
from batchfit._options import flag
from batchfit._plan.pure.settings import METHODS, Method
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.allocator.gpus import Gpu

_COUNTED = re.compile(r"(?P<name>.+?)\s*x\s*(?P<count>[1-9][0-9]{0,3})")


@final
@dataclass(frozen=True, slots=True)
class PlanGpu:
    """A column: a GPU, how many of them, and the name it was asked for by."""

    text: str
    gpu: Gpu
    count: int = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for, checked; `plan` documents each option."""

    gpus: str | Sequence[str] = flag(
        kind=str,
        repeats=True,
        spelling="--gpu",
        metavar="GPU",
        shown_default=False,
        help="GPU to plan for: rtx4090, several of one kind as h100x8, or with its memory as name=24GiB. May "
        "be given several times.",
    )
    seq_len: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default="2048 tokens, or what the model takes",
        help="Tokens per sample (for images: the side in pixels).",
    )
    global_batch: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default="one microbatch per GPU",
        help="Samples per optimizer step over all GPUs, by gradient accumulation.",
    )
    methods: str | Sequence[str] | None = flag(
        None,
        str,
        repeats=True,
        spelling="--method",
        metavar="METHOD",
        shown_default="all",
        help="Only full, lora or qlora. May be given several times.",
    )
    prices: str | Sequence[str] | None = flag(
        None,
        str,
        repeats=True,
        spelling="--price",
        metavar="GPU=AMOUNT",
        shown_default=False,
        help="What an hour of a GPU costs you, such as rtx4090=0.4. May be given several times.",
    )
    margin: float = flag(0.02, metavar="SHARE", help="Share of each GPU's memory to leave free.")
    cache: bool = flag(True, help="Keep what was traced, and use it again.")

    def __post_init__(self) -> None:
        check_whole("seq_len", self.seq_len, at_most=2**24, optional=True)
        check_whole("global_batch", self.global_batch, optional=True)
        check_flag("cache", self.cache)
        if type(self.margin) not in (int, float) or not 0 <= self.margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, not {self.margin!r}")
        _ = self.columns, self.wanted_methods, self.hourly

    @property
    def columns(self) -> list[PlanGpu]:
        """The GPUs, once each."""
        names = _several("gpus", self.gpus)
        if not names:
            raise ValueError('gpus must name at least one GPU, such as "rtx4090" or "h100x8"')
        found = [_column(name) for name in names]
        return list({(one.gpu.name, one.gpu.usable_bytes, one.count): one for one in found}.values())

    @property
    def wanted_methods(self) -> tuple[Method, ...]:
        """The methods whose rows are wanted."""
        asked = (
            METHODS if self.methods is None else [one.lower() for one in _several("methods", self.methods)]
        )
        for one in asked:
            if one not in get_args(Method):
                raise ValueError(f"methods must be full, lora or qlora, not {one!r}")
        return tuple(one for one in METHODS if one in asked)

    @property
    def hourly(self) -> dict[str, float]:
        """Price per hour by the name of the GPU that it was given for."""
        found = {}
        for text in _several("prices", self.prices or ()):
            name, _, amount = text.partition("=")
            try:
                price = float(amount)
            except ValueError:
                price = 0.0
            if not name or not 0 < price < float("inf"):
                raise ValueError(f"prices must be GPU=AMOUNT with an amount above 0, not {text!r}")
            column = self._priced(name, text)
            found[column.gpu.name] = price / column.count
        return found

    def _priced(self, name: str, text: str) -> PlanGpu:
        """What a price is for: a GPU that is planned for, or several of it."""
        planned = {one.gpu.name: one for one in self.columns}
        plain, count = _counted(name)
        if plain in planned:  # its memory was given, and nobody else knows the name
            return replace(planned[plain], count=count)
        found = _column(name) if _is_known(plain) else None
        if found is None or found.gpu.name not in planned:
            names = ", ".join(planned)
            raise ValueError(f"prices must be of a GPU that is planned for ({names}), not {text!r}")
        return found


def _several(name: str, value: object) -> list[str]:
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(one, str) for one in values):
        raise TypeError(f"{name} must be a text or a list of texts, not {value!r}")
    return [part.strip() for one in values for part in one.split(",") if part.strip()]


def _column(text: str) -> PlanGpu:
    from batchfit._engine.allocator.gpus import DEFAULT, gpu_named

    name, _, memory = text.partition("=")
    name, count = _counted(name)
    if not memory:
        if not _is_known(name):
            raise ValueError(f"{_named_wrong(name)} Its memory can be given: {name}=24GiB")
        return PlanGpu(text, gpu_named(name), count)
    usable = parse_bytes(memory, name="gpus")
    if _is_known(name):
        return PlanGpu(text, replace(gpu_named(name), usable_bytes=usable, source="given"), count)
    note = f"{name}: not known, so the kernels of an {DEFAULT.name} are assumed"
    other = replace(DEFAULT, name=name, measured=False, source="given", note=note, usable_bytes=usable)
    return PlanGpu(text, other, count)


def _counted(text: str) -> tuple[str, int]:
    """A name, and how many of it."""
    counted = _COUNTED.fullmatch(text)
    if counted is None or _is_known(text):
        return text, 1
    name = counted["name"]
    # "gtx1080" and "rtx409" are names, not a thousand of "gt".
    return (name, int(counted["count"])) if _is_known(name) or len(name) > 2 else (text, 1)


def _is_known(name: str) -> bool:
    return not _named_wrong(name)


def _named_wrong(name: str) -> str:
    from batchfit._engine.allocator.gpus import gpu_named

    try:
        gpu_named(name)
    except ValueError as error:
        return str(error).replace("gpu must be", "gpus must be", 1).partition("; budget")[0] + "."
    return ""
