"""How a model is spread over ranks: `fsdp2`, `ddp`, `zero1` to `zero3`, `hsdp:2x4`, and their options.

Rules: ZeRO is said in FSDP2's terms. Stage 3 is FSDP2. Stage 2 keeps the gathered weights from forward to
backward (`reshard_after_forward=False`). Stage 1 is DDP with a `ZeroRedundancyOptimizer`: weights and
gradients whole, the optimizer's state spread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, final

from batchfit._arguments import check_flag, check_whole

Kind = Literal["ddp", "fsdp2", "zero1"]
_NAMES: Final = ("ddp", "fsdp2", "hsdp:RxS", "zero1", "zero2", "zero3")
_HSDP: Final = re.compile(r"(\d+)x(\d+)")
_OPTIONS: Final = ("bf16", "fp16", "reshard=N")


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One way to spread a model over `ranks`, checked.

    >>> ShardLayout.parse("hsdp:2x4", ranks=8).replicas
    2
    """

    kind: Kind
    ranks: int
    name: str
    replicas: int = 1  # groups of ranks that hold the same shards (HSDP)
    reshard_after_forward: bool | int = True
    offload: bool = False
    dtype: str = ""  # of the gathered weights; gradients are reduced in float32

    @classmethod
    def parse(cls, text: str, *, ranks: int, offload: bool = False) -> ShardLayout:
        """The layout that a text names, such as "fsdp2", "fsdp2:bf16,reshard=4" or "hsdp:2x4"."""
        name, _, rest = text.strip().lower().partition(":")
        options = [one for one in rest.split(",") if one]
        if name == "hsdp":
            return cls._hsdp(text, options, ranks=ranks, offload=offload)
        kinds: dict[str, Kind] = {"ddp": "ddp", "fsdp2": "fsdp2", "zero1": "zero1"}
        kind = kinds.get({"zero2": "fsdp2", "zero3": "fsdp2"}.get(name, name))
        if kind is None:
            raise _wrong(text)
        if kind != "fsdp2" and options:
            raise ValueError(f"shard must be {name!r} without options, not {text!r}")
        if kind != "fsdp2" and offload:
            raise ValueError(
                f"offload must be left out with shard={text!r}: only FSDP2 keeps shards on the host"
            )
        dtype, reshard = _read(text, options, ranks)
        if name == "zero2" and reshard is None:
            reshard = False
        return cls(kind, ranks, text, 1, True if reshard is None else reshard, offload, dtype)

    @classmethod
    def _hsdp(cls, text: str, options: list[str], *, ranks: int, offload: bool) -> ShardLayout:
        shape = _HSDP.fullmatch(options[0]) if options else None
        if shape is None:
            raise ValueError(f'shard must name replicas and shards ("hsdp:2x4"), not {text!r}')
        replicas, shards = int(shape[1]), int(shape[2])
        if replicas < 2 or shards < 2 or replicas * shards != ranks:
            such = f" (hsdp:2x{ranks // 2})" if ranks >= 4 and ranks % 2 == 0 else ""
            raise ValueError(
                f"shard must be a grid of all {ranks} ranks, each side at least 2{such}, not {text!r}"
            )
        dtype, reshard = _read(text, options[1:], shards)
        return cls("fsdp2", ranks, text, replicas, True if reshard is None else reshard, offload, dtype)


MOST_RANKS: Final = 1_000_000
RANKS_HELP: Final = "Processes (GPUs) that the program runs on; traced in this one, and no GPU is used."
SHARD_HELP: Final = (
    "How the model is spread over them where the program does not do it itself: fsdp2, ddp, hsdp:2x4, zero1, "
    "zero2 or zero3; with options as in fsdp2:bf16,reshard=4."
)
OFFLOAD_HELP: Final = "FSDP2 keeps shards, their gradients and the optimizer's state on the host."


def layout_of(ranks: int | None, shard: str | None, offload: bool) -> ShardLayout | None:
    """What the options `ranks`, `shard` and `offload` mean together; None: as the program does it."""
    check_whole("ranks", ranks, at_least=2, at_most=MOST_RANKS, optional=True)
    check_flag("offload", offload)
    if shard is not None and not isinstance(shard, str):
        raise TypeError(f'shard must be a text such as "fsdp2" or None, not {shard!r}')
    if shard is None:
        if offload:
            raise ValueError(
                "offload must be False where no shard is given: it is an option of FSDP2, not True"
            )
        return None
    if ranks is None:
        raise ValueError(f"ranks must be given with shard={shard!r}, not None")
    return ShardLayout.parse(shard, ranks=ranks, offload=offload)


def _read(text: str, options: list[str], shards: int) -> tuple[str, bool | int | None]:
    """The dtype of gathered weights, and to how many ranks they go back after forward."""
    dtype, reshard = "", None
    for one in options:
        name, _, value = one.partition("=")
        if (dtype and one in ("bf16", "fp16")) or (reshard is not None and name == "reshard"):
            raise ValueError(f"shard must have one dtype and one reshard, not {text!r}")
        if one in ("bf16", "fp16"):
            dtype = {"bf16": "bfloat16", "fp16": "float16"}[one]
        elif name == "reshard" and value.isdigit():
            reshard = int(value)
            if not 1 < reshard < shards or shards % reshard:
                raise ValueError(
                    f"shard must have a reshard that divides {shards}, and is less, not {text!r}"
                )
        else:
            raise ValueError(
                f"shard must have only options of {', '.join(_OPTIONS)}, not {one!r} in {text!r}"
            )
    return dtype, reshard


def _wrong(text: str) -> ValueError:
    return ValueError(f"shard must be one of {', '.join(_NAMES)}, not {text!r}")
