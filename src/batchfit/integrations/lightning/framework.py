"""Which Lightning this is, and what of it the callbacks use.

Rules
- `lightning` and `pytorch_lightning` are the same code under two names. A callback is one of those that the
  program has imported; everything else is taken from the package that the Trainer comes from.
- What is missing, too old or contradicts a callback is said when the Trainer sets up, before anything runs. A
  newer Lightning is used without a word as long as it has what the callbacks use.
- Lightning's private parts are reached here and in `loaders` and `trials` by name, never copied.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

import batchfit
from batchfit.errors import BatchfitError
from batchfit.integrations.lightning.strategies import check_strategy

log = logging.getLogger("batchfit")

NAMES: Final[tuple[str, ...]] = ("lightning.pytorch", "pytorch_lightning")
OLDEST: Final = (2, 5)  # the first release that the tests have run with
# What is private in Lightning and used by the callbacks, by module.
_PRIVATE: Final[Mapping[str, tuple[str, ...]]] = {
    "trainer.call": ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook"),
    "plugins.precision.amp": ("_optimizer_handles_unscaling",),
    "strategies.launchers.multiprocessing": ("_MultiProcessingLauncher",),
    "utilities.exceptions": ("_TunerExitException",),
    "utilities.parsing": ("_lightning_get_all_attr_holders",),
}
_METHODS: Final = ("fit", "validate", "test", "predict")
_warned_versions: set[str] = set()


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
    check_version(package, importlib.import_module(package).__version__)
    check_strategy(trainer, type(callback).__name__)


def check_version(package: str, version: str) -> None:
    """Warn of a Lightning that is older than the tests, or lacks what the callbacks use; once."""
    found = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    missing = _missing_from(package)
    if version in _warned_versions or not (missing or found < OLDEST):
        return
    _warned_versions.add(version)
    lacks = f"lacks {', '.join(missing)}, which they use" if missing else "may lack parts that they use"
    warnings.warn(
        f"{package.split('.')[0]} {version} is not known to batchfit, whose callbacks were tested with "
        f"{'.'.join(map(str, OLDEST))} and later: it {lacks}",
        stacklevel=2,
    )


def _missing_from(package: str) -> list[str]:
    """What the callbacks use of Lightning and this one has not."""
    found = []
    for name, parts in _PRIVATE.items():
        try:
            module = importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError:
            found.append(name)
        else:
            found += [f"{name}.{one}" for one in parts if not hasattr(module, one)]
    return found


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


def put_before(trainer: Any, callback: Any, other: str) -> None:
    """Have a callback called before Lightning's own of this name, which Lightning moves to the front."""
    kind = getattr(part(trainer, "callbacks"), other)
    others = [one for one in trainer.callbacks if one is not callback]
    place = next((index for index, one in enumerate(others) if isinstance(one, kind)), None)
    if place is not None and any(one is callback for one in trainer.callbacks[place:]):
        trainer.callbacks = [*others[:place], callback, *others[place:]]


def generators_now(*own: torch.Generator) -> Callable[[], None]:
    """What restores all generators (torch's on each device, NumPy's, Python's, these) to where they are."""
    numpy: Any = sys.modules.get("numpy.random")
    of_torch, drawn = torch.get_rng_state(), random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    cuda: Any = torch.cuda  # not waked up only to be looked at
    of_cuda = cuda.get_rng_state_all() if cuda.is_initialized() else None
    of_own = [(generator, generator.get_state()) for generator in own]

    def restore() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(drawn)
        if numpy is not None:
            numpy.set_state(of_numpy)
        if of_cuda is not None:
            cuda.set_rng_state_all(of_cuda)
        for generator, state in of_own:
            generator.set_state(state)

    return restore


@contextmanager
def same_random_numbers(*own: torch.Generator) -> Iterator[None]:
    """What is drawn inside, by samplers, workers' seeds or the user's functions, was never drawn."""
    restore = generators_now(*own)
    try:
        yield
    finally:
        restore()


def write(trainer: Any, values: dict[str, float]) -> None:
    """To the Trainer's loggers, at the step that it is at."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)


class ShownValues:
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


def set_up_for(
    finder: Any, trainer: Any, module: Any, method: str, given: Mapping[str, Any], val_dataloaders: Any = None
) -> None:
    """Have the Trainer call the finder in a run of `method`, which ends with the search.

    The method is set up as far as its first hook, and Lightning's own way out of a tuner ends it: nothing is
    trained, evaluated or saved. Afterwards callbacks and generators are as before.
    """
    options = _options(method, {**given, "val_dataloaders": val_dataloaders})
    spawning = part(trainer, "strategies.launchers.multiprocessing")._MultiProcessingLauncher
    if isinstance(trainer.strategy.launcher, spawning):
        raise BatchfitError(
            "a search without a run needs the processes that it is called in, and this strategy starts its "
            'own: use strategy="ddp", or the callback in fit'
        )
    before, early = trainer.callbacks, finder._early_exit
    trainer.callbacks = [finder, *(one for one in before if one is not finder)]
    finder._early_exit = True
    try:
        with same_random_numbers():
            getattr(trainer, method)(module, **options)
    finally:
        trainer.callbacks, finder._early_exit = before, early


def _options(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}, not {method!r}")
    wrong = ("dataloaders",) if method == "fit" else ("train_dataloaders", "val_dataloaders")
    for name in wrong:
        if given[name] is not None:
            right = "train_dataloaders and val_dataloaders" if method == "fit" else "dataloaders"
            raise ValueError(f"{name} must be None with method={method!r}: give {right}")
    return {name: value for name, value in given.items() if value is not None}
