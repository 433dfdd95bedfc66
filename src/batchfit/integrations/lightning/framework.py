"""Which Lightning this is, and what of it the callbacks use.

Rules
- `lightning` and `pytorch_lightning` are the same code under two names. A callback is one of those that the
  program has imported; everything else is taken from the package that the Trainer comes from.
- What is missing, unknown or contradicts a callback is said when the Trainer sets up, before anything runs.
- Lightning's private parts are reached here and in `loaders` and `trials` by name, never copied.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

import batchfit
from batchfit.errors import BatchfitError

log = logging.getLogger("batchfit")

NAMES: Final[tuple[str, ...]] = ("lightning.pytorch", "pytorch_lightning")
TESTED: Final = ((2, 5), (2, 6))  # the first and the last release that the tests have run with
_told: set[str] = set()


def callback_bases() -> tuple[type, ...]:
    """`Callback` of each Lightning that the program has imported, or of the one that is installed."""
    installed = (name for name in NAMES if importlib.util.find_spec(name.split(".")[0]) is not None)
    names = [name for name in NAMES if name in sys.modules] or list(itertools.islice(installed, 1))
    if not names:
        raise ModuleNotFoundError(
            'pip install "batchfit[lightning]" to use batchfit.integrations.lightning', name="lightning"
        )
    return tuple(importlib.import_module(name).Callback for name in names)


if TYPE_CHECKING:

    class Callback:
        """What Lightning calls: hooks by name, each with the Trainer and the module."""

else:
    Callback = type("Callback", callback_bases(), {"__doc__": "Lightning's own, of whichever is imported."})


def part(trainer: Any, name: str) -> Any:
    """A module of the Lightning that this Trainer is of: `part(trainer, "callbacks")`."""
    return importlib.import_module(f"{_package(trainer)}.{name}")


def _package(trainer: Any) -> str:
    for kind in type(trainer).__mro__:
        for name in NAMES:
            if kind.__module__ == name or kind.__module__.startswith(name + "."):
                return name
    raise TypeError(f"trainer must be a Trainer of lightning or pytorch_lightning, not {trainer!r:.80}")


def check_trainer(trainer: Any, callback: Any) -> None:
    """What every callback of ours asks of a Trainer."""
    package = _package(trainer)
    _check_version(package.split(".")[0], importlib.import_module(package).__version__)
    name = type(callback).__name__
    strategies = part(trainer, "strategies")
    if not isinstance(trainer.strategy, (strategies.SingleDeviceStrategy, strategies.DDPStrategy)):
        raise BatchfitError(
            f"{name} works on one device and under DDP, not under {type(trainer.strategy).__name__}: "
            "use batchfit.find_batch_size and batchfit.Microbatcher by hand there"
        )


def _check_version(name: str, version: str) -> None:
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if TESTED[0] <= found <= TESTED[1] or version in _told:
        return
    _told.add(version)
    first, last = (".".join(map(str, one)) for one in TESTED)
    warnings.warn(
        f"{name} {version} is not known to batchfit, whose callbacks were tested with {first} to {last}: "
        "they use parts of Lightning that may have changed",
        stacklevel=2,
    )


def check_budget(budget: Any) -> None:
    """What a device will be asked about, looked at now; its memory is not known yet."""
    try:
        batchfit.Microbatcher(torch.nn.Identity(), budget=budget)
    except ValueError as error:
        if "must not exceed" not in str(error):
            raise


def refuse_beside(trainer: Any, callback: Any, *others: str, why: str) -> None:
    """Refuse callbacks of Lightning's own that do the same thing or undo it."""
    for other in others:
        kind = getattr(part(trainer, "callbacks"), other)
        if any(isinstance(one, kind) for one in trainer.callbacks):
            raise ValueError(
                f"callbacks must not hold Lightning's {other} beside batchfit's "
                f"{type(callback).__name__}: {why}"
            )


def write(trainer: Any, values: dict[str, float]) -> None:
    """To the Trainer's loggers, at the step that it is at."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)


class Shown:
    """Values in the progress bar and the loggers.

    Lightning keeps what was logged until its epoch ends, and a call of its `log` takes longer than all that
    microbatching adds to a step: what has not changed is not logged again.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}

    def show(self, trainer: Any, module: Any, **values: float) -> None:
        """To the progress bar and the loggers, with what the module logs in this batch."""
        if trainer.barebones:
            return
        for name, value in values.items():
            now = (trainer.current_epoch, float(value))
            if self._last.get(name) == now:
                continue
            # On the host: a number would be sent to the device.
            module.log(name, torch.tensor(now[1]), prog_bar=True, on_step=True, on_epoch=False, batch_size=1)
            self._last[name] = now


def call_step(trainer: Any, name: str, *args: Any) -> Any:
    """`training_step` and its like, through the strategy: with its wrapper, precision and profiler."""
    return part(trainer, "trainer.call")._call_strategy_hook(trainer, name, *args)


def overrides(module: Any, name: str, trainer: Any) -> bool:
    """Whether the user's module has a method of its own in place of Lightning's."""
    plain = part(trainer, "core.module").LightningModule
    return getattr(type(module), name, None) is not getattr(plain, name)
