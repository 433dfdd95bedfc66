"""The options of a profile: the keywords of `profile_throughput`, and the flags of `batchfit profile`.

Rules: as in `_find.pure.options`. On the command line `sizes` may be given several times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from batchfit._arguments import check_callback, check_flag, check_whole
from batchfit._options import flag
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.device.device import Device
    from batchfit._engine.device.resolve import DeviceSpec
    from batchfit._profile.pure.knee import Knee
    from batchfit.results import ThroughputPoint

OnPoint = Callable[["ThroughputPoint"], object]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What to time, checked; `profile_throughput` documents each option."""

    smallest: int = flag(1, metavar="N", help="Size to begin with, where a batch of 1 does not run.")
    largest: int | None = flag(
        None, int, metavar="N", shown_default="what memory allows", help="Largest size to look at."
    )
    sizes: Sequence[int] | None = flag(
        None,
        int,
        repeats=True,
        metavar="N",
        shown_default="chosen by what is measured",
        help="Time these sizes, and no others: 4,16,64. May be given several times.",
    )
    within: float = flag(
        0.05, metavar="SHARE", help="How far from the best throughput the recommended size may be."
    )
    budget: int | str | None = flag(
        None,
        str,
        metavar="BYTES",
        shown_default="all that is free; of RAM a quarter, at most 4 GiB",
        help="Memory the program may use, such as 24GiB.",
    )
    time_limit_s: float | None = flag(
        None, float, metavar="S", shown_default="no limit", help="Stop with what was measured by then."
    )
    device: DeviceSpec | Device | None = flag(
        None,
        str,
        metavar="DEVICE",
        shown_default="where the workload is",
        help="Where it runs, such as cuda:1.",
    )
    tokens_per_sample: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default="read off input_ids",
        help="Tokens in a sample, for tokens/s.",
    )
    target_batch_size: int | None = flag(
        None,
        int,
        metavar="N",
        shown_default=False,
        help="Batch that the training wants: where it does not fit, how to accumulate it.",
    )
    diagnose: bool = flag(True, help="Look for what holds throughput back.")
    loader: Iterable[Any] | None = None
    on_point: OnPoint | None = None

    def __post_init__(self) -> None:
        if self.sizes is not None:
            object.__setattr__(self, "sizes", self._named_sizes())  # an iterator can be read only once
        self.knee()  # which checks what it is made of
        seconds: object = self.time_limit_s
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if self.time_limit_s is not None and (not number or not self.time_limit_s > 0):
            raise ValueError(f"time_limit_s must be a positive number of seconds, not {seconds!r}")
        check_whole("tokens_per_sample", self.tokens_per_sample, optional=True)
        check_whole("target_batch_size", self.target_batch_size, optional=True)
        loader: object = self.loader
        if loader is not None and (not isinstance(loader, Iterable) or isinstance(loader, Iterator)):
            raise TypeError(f"loader must be something that can be iterated repeatedly, not {loader!r}")
        check_flag("diagnose", self.diagnose)
        if loader is not None and not self.diagnose:
            raise ValueError(
                "diagnose must be True where a loader is given, which nothing else looks at, not False"
            )
        check_callback("on_point", self.on_point, "point")
        _ = self.budget_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The budget that was asked for, in bytes."""
        return None if self.budget is None else parse_bytes(self.budget)

    def knee(self) -> Knee:
        """The search for the recommended size that these options ask for."""
        from batchfit._profile.pure.knee import Knee

        smallest, largest = self.smallest, self.largest
        Knee(smallest=smallest)
        if largest is not None and (type(largest) is not int or largest < 1):
            raise ValueError(f"largest must be a positive integer or None, not {largest!r}")
        if self.sizes is None:
            if largest is not None and largest < smallest:
                raise ValueError(f"largest must be at least smallest ({smallest}), not {largest!r}")
            return Knee(limit=largest, within=self.within, smallest=smallest)
        if largest is not None:
            raise ValueError(f"largest must be None where sizes are given, not {largest!r}")
        if smallest != 1:
            raise ValueError(f"smallest must be left out where sizes are given, not {smallest!r}")
        Knee(sizes=tuple(self.sizes))
        return Knee(within=self.within, sizes=tuple(dict.fromkeys(self.sizes)))

    def _named_sizes(self) -> tuple[int, ...]:
        given: Any = self.sizes
        try:
            named: tuple[int, ...] | None = None if isinstance(given, str) else tuple(given)
        except TypeError:
            named = None
        if named is None:
            raise TypeError(f"sizes must be a list of batch sizes, not {given!r}")
        if not named:
            raise ValueError(f"sizes must name at least one batch size, not {given!r}")
        return named
