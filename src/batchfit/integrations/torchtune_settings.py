"""The keys that batchfit's torchtune recipes read from a config, checked before a model is loaded."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any, Final, final

from omegaconf import DictConfig, OmegaConf
from torchtune import config

import batchfit
from batchfit.testing import FakeDevice

log = logging.getLogger("batchfit")

_KEYS: Final = (
    "recipe",
    "use_maximum_batch_size",
    "batch_increase_function",
    "split_on_out_of_memory",
    "batchfit",
)
# Keywords of the search that the recipe sets itself, or that a recipe cannot support.
_OURS: Final = ("max_size", "min_size", "device", "isolate", "timeout_s", "resume", "on_trial")


@final
class RecipeSettings:
    """Our keys of a config, checked."""

    def __init__(self, cfg: DictConfig) -> None:
        if int(os.environ.get("WORLD_SIZE", "1") or 1) > 1:
            raise ValueError("recipe must be run on one device: leave out torchrun's options")
        _refuse_near_misses(cfg)
        self.use_maximum = _flag(cfg, "use_maximum_batch_size", default=False)
        self.split = _flag(cfg, "split_on_out_of_memory", default=True)
        self.increase = _increase(cfg.get("batch_increase_function"))
        self.search = _search(cfg.get("batchfit"))
        if self.search and not (self.use_maximum or self.increase):
            raise ValueError(
                "batchfit must be left out where neither use_maximum_batch_size nor batch_increase_function "
                f"is set, since nothing is searched then, not {self.search!r}"
            )
        if self.use_maximum and self.increase is not None:
            log.warning(
                "use_maximum_batch_size and batch_increase_function are both set: training begins with the "
                "largest batch that fits, so every increase will be skipped"
            )


def _refuse_near_misses(cfg: DictConfig) -> None:
    """Refuse misspelled keys of ours: recipes ignore unknown keys silently."""
    for name in map(str, cfg):
        near = difflib.get_close_matches(name, _KEYS, n=1, cutoff=0.8)
        if near and name not in _KEYS:
            raise ValueError(f"{name} must be left out, not {cfg.get(name)!r}: did you mean {near[0]}?")


def _flag(cfg: DictConfig, name: str, *, default: bool) -> bool:
    value = cfg.get(name, default)
    if type(value) is not bool:
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def _increase(path: object) -> batchfit.IncreaseBatchSizeConfig | None:
    """`package.module.function`, as torchtune writes components, or `package.module:function`."""
    if path is None:
        return None
    parts = path.replace(":", ".").split(".") if isinstance(path, str) else []
    if not isinstance(path, str) or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"batch_increase_function must be 'package.module.function', not {path!r}")
    module, _, function = path.rpartition(":" if ":" in path else ".")
    try:
        found = config._utils._get_component_from_path(f"{module}.{function}")  # raises now, not in an epoch
    except Exception as error:
        why = " ".join(str(error).split())
        raise ValueError(f"batch_increase_function must be importable, not {path!r}: {why}") from error
    if not callable(found):
        raise ValueError(f"batch_increase_function must be a function, not {found!r} ({path})")
    return batchfit.IncreaseBatchSizeConfig(function=f"{module}:{function}")


def _search(given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if not OmegaConf.is_dict(given):
        raise TypeError(f"batchfit must be keywords of batchfit.find_batch_size, not {given!r}")
    settings: Any = OmegaConf.to_container(given, resolve=True)
    for name in _OURS:
        if name in settings:
            raise ValueError(f"batchfit.{name} must be left out, not {settings[name]!r}: the recipe sets it")
    named = {str(name): value for name, value in settings.items()}
    _check_search(named)
    return named


class _CheckedError(Exception):
    """Raised by the step of a search that only checks its settings."""


def _check_search(named: Mapping[str, Any]) -> None:
    """Raise what the search would raise for these keywords."""
    known = [name for name in inspect.signature(batchfit.find_batch_size).parameters if name != "workload"]
    for name, value in named.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"batchfit.{name} must be a keyword of batchfit.find_batch_size, not {value!r}{hint}"
            )

    def step(_: int) -> None:
        raise _CheckedError

    for name in ("store", "fresh"):
        if type(named.get(name, False)) is not bool:
            raise TypeError(f"batchfit.{name} must be True or False, not {named[name]!r}")
    # With a valid name the store would be read; with none the search refuses it, as in the recipe.
    key = named.get("key")
    stored = ("store", "fresh", "key") if isinstance(key, str) and key.strip() else ()
    checked = {name: value for name, value in named.items() if name not in stored}
    device = FakeDevice(2**60)  # the recipe's own device is not used yet
    with contextlib.suppress(_CheckedError):
        batchfit.find_batch_size(batchfit.Workload(step, state=[]), device=device, max_size=2**20, **checked)
