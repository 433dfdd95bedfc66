"""The options of a search: the keywords of `find_batch_size`, and the flags of `batchfit find`.

Rules: the constructor refuses wrong values with their names, before torch or a device is needed. Only what
depends on the workload is checked later (`check_key`). What checks is imported when it is needed: `--help`
reads these fields.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from batchfit._arguments import MOST_STEPS, check_callback, check_flag, check_whole, checked_file
from batchfit._options import flag
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit._engine.device.device import Device
    from batchfit._engine.device.resolve import DeviceSpec
    from batchfit._find.pure.search import Search
    from batchfit.results import Trial

OnTrial = Callable[["Trial", int], object]

_SEARCH = "Search"
_TRIALS = "Trials"
_STORE = "Store"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FindOptions:
    """How to search, checked; `find_batch_size` documents each option."""

    budget: int | str | None = flag(
        None,
        str,
        metavar="BYTES",
        shown_default="what is free",
        help="Memory the program may use, such as 24GiB or 800MiB. On a CPU: virtual memory, with OOMs "
        "like a GPU's.",
    )
    device: DeviceSpec | Device | None = flag(
        None,
        str,
        metavar="DEVICE",
        shown_default="the workload's",
        help="Device whose memory is measured: cuda:1, 1, a UUID such as GPU-8932f937, or cpu.",
    )
    strategy: str = flag(
        "guided",
        metavar="NAME",
        panel=_SEARCH,
        help="How sizes are chosen: guided, bisect, halve, grow or powers.",
    )
    min_size: int = flag(1, metavar="N", panel=_SEARCH, help="Smallest size to accept.")
    max_size: int | None = flag(
        None, int, metavar="N", panel=_SEARCH, shown_default="no limit", help="Largest size to try."
    )
    multiple_of: int = flag(1, metavar="N", panel=_SEARCH, help="Try only multiples of N.")
    power_of_two: bool = flag(False, panel=_SEARCH, help="Try only powers of two.")
    tolerance: float = flag(
        0.02,
        metavar="SHARE",
        panel=_SEARCH,
        help="Stop this close to the largest size; 0 finds it exactly.",
    )
    start: int | None = flag(
        None, int, metavar="N", panel=_SEARCH, shown_default="the strategy's", help="First size to try."
    )
    attempts: int = flag(5, metavar="N", panel=_SEARCH, help="Sizes that the strategy grow may try.")
    steps: int = flag(3, metavar="N", panel=_TRIALS, help="Steps of one trial.")
    soak_steps: int | None = flag(
        None,
        int,
        metavar="N",
        panel=_TRIALS,
        shown_default="25, fewer once memory repeats itself",
        help="Steps of the stability check (soak) at the end; 0: none.",
    )
    max_trials: int | None = flag(
        None, int, metavar="N", panel=_TRIALS, shown_default="no limit", help="Stop after this many trials."
    )
    time_limit_s: float | None = flag(
        None,
        float,
        metavar="SECONDS",
        panel=_TRIALS,
        shown_default="no limit",
        help="Begin no trial after this many seconds.",
    )
    predict: bool = flag(True, panel=_SEARCH, help="On a GPU, let guided begin with what a prediction says.")
    isolate: bool = flag(
        False,
        panel=_TRIALS,
        help="Run each trial in a child process: one that is killed or hangs is too big, and the search "
        "goes on. Without prediction and store, which need the workload here.",
    )
    timeout_s: float | None = flag(
        None,
        float,
        metavar="SECONDS",
        panel=_TRIALS,
        shown_default="no limit",
        help="With --isolate: stop a child whose step takes longer.",
    )
    resume: str | os.PathLike[str] | None = flag(
        None,
        str,
        metavar="FILE",
        panel=_SEARCH,
        shown_default=False,
        help="Keep the search in FILE after each trial; go on with the one that it holds.",
    )
    store: bool = flag(
        False, panel=_STORE, help="Use an answer found before, confirmed by one trial, and keep this one."
    )
    fresh: bool = flag(False, panel=_STORE, help="Search even if there is a stored answer, and replace it.")
    key: str | None = flag(
        None,
        str,
        metavar="NAME",
        panel=_STORE,
        shown_default="made from the workload",
        help="Name of this workload in the store; needed for a step without a model.",
    )
    on_trial: OnTrial | None = None

    def __post_init__(self) -> None:
        self._check_isolation()
        check_steps(self.steps, self.soak_steps, self.time_limit_s)
        check_callback("on_trial", self.on_trial, "trial", "budget_bytes")
        self.search()  # which checks what it is made of
        check_flag("predict", self.predict)
        self._check_store()
        _ = self.budget_bytes

    @property
    def budget_bytes(self) -> int | None:
        """The budget that was asked for, in bytes."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def uses_store(self) -> bool:
        """Whether answers are stored; a key turns the store on."""
        return self.store or self.key is not None

    @property
    def predicts(self) -> bool:
        """Whether the search may begin with a prediction: a `start` is the user's own estimate."""
        return self.predict and self.strategy == "guided" and self.start is None

    def search(self, *, costly_trials: bool = False) -> Search:
        """The search that these options ask for, without a budget: that depends on the device."""
        from batchfit._find.pure.search import Search

        return Search(
            strategy=self.strategy,
            min_size=self.min_size,
            max_size=self.max_size,
            multiple_of=self.multiple_of,
            power_of_two=self.power_of_two,
            tolerance=self.tolerance,
            start=self.start,
            attempts=self.attempts,
            max_trials=self.max_trials,
            soak=self.soak_steps != 0,
            costly_trials=costly_trials,
        )

    def within(self, least: int, most: int) -> FindOptions:
        """The same search among sizes of batches by tokens: no smaller than the longest sample."""
        if self.max_size is not None and self.max_size < least:
            raise ValueError(f"max_size must be at least {least}, the longest sample, not {self.max_size!r}")
        largest = most if self.max_size is None else min(most, self.max_size)
        return replace(self, min_size=min(max(self.min_size, least), largest), max_size=largest)

    def check_key(self, *, has_model: bool) -> None:
        """Refuse to store the answer of a workload that has nothing to make a key from."""
        if self.store and self.key is None and not has_model:
            raise ValueError(
                "key must be given to store the answer of a step without a model, not None: "
                'key="my-workload" names it'
            )

    def _check_isolation(self) -> None:
        check_flag("isolate", self.isolate)
        seconds = self.timeout_s
        if seconds is not None and (type(seconds) not in (int, float) or not 0 < seconds < math.inf):
            raise ValueError(f"timeout_s must be a positive number of seconds, not {seconds!r}")
        if seconds is not None and not self.isolate:
            raise ValueError(
                f"timeout_s must be None without isolate=True, not {seconds!r}: see time_limit_s"
            )
        if self.resume is not None:
            checked_file("resume", self.resume)

    def _check_store(self) -> None:
        key: object = self.key
        check_flag("store", self.store)
        check_flag("fresh", self.fresh)
        if key is not None and (not isinstance(key, str) or not key.strip()):
            raise ValueError(f"key must be a name or None, not {key!r}")
        if self.isolate:
            for name, value, off in (
                ("key", key, None),
                ("fresh", self.fresh, False),
                ("store", self.store, False),
            ):
                if value != off:
                    raise ValueError(
                        f"{name} must be {off} with isolate=True, not {value!r}: the workload is made in a "
                        "child process, so there is nothing here to make its key from"
                    )
        if self.fresh and not self.uses_store:
            raise ValueError("fresh must be False without store=True or key, not True")


def check_steps(steps: int, soak_steps: int | None, time_limit_s: float | None = None) -> None:
    """Refuse wrong numbers of steps and seconds, which the search itself does not know."""
    check_whole("steps", steps, at_least=2, at_most=MOST_STEPS)
    if soak_steps is not None and (type(soak_steps) is not int or 0 != soak_steps < steps):
        raise ValueError(f"soak_steps must be 0 or at least steps ({steps}), not {soak_steps!r}")
    check_whole("soak_steps", soak_steps or 0, at_least=0, at_most=MOST_STEPS)
    if time_limit_s is not None and (type(time_limit_s) not in (int, float) or not time_limit_s > 0):
        raise ValueError(f"time_limit_s must be a positive number of seconds, not {time_limit_s!r}")
