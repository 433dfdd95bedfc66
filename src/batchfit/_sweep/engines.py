"""Where a sweep runs: this process, a child per device, all ranks, or Ray, by its options.

Rules: an engine changes where configurations run, never what they answer, so nothing of it is among the
settings that a file compares: a sweep may be resumed with another one. An engine of a framework's is found by
its name, in `batchfit.integrations`, when it is asked for; whoever does not ask needs no framework.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from batchfit._arguments import check_callback
from batchfit._engine.distributed.ranks import Ranks, join_launched, made_by_us
from batchfit._sweep.configuration import RANKS_TIMEOUT_S
from batchfit._sweep.devices import Devices
from batchfit._sweep.job import Engine, here
from batchfit._sweep.pure.grid import did_you_mean
from batchfit._sweep.pure.options import SweepOptions
from batchfit._sweep.pure.visible_devices import VISIBLE, places_of
from batchfit._sweep.ranks import AllRanks

# name -> module and class there, and which keywords of `sweep` it gets
_NAMED = {"ray": ("batchfit.integrations.ray", "RayEngine")}
_OF_RAY = {
    "ray_address": "address",
    "num_gpus": "num_gpus",
    "num_cpus": "num_cpus",
    "max_retries": "max_retries",
}


def engine_of(options: SweepOptions) -> Engine:
    """The engine that the options ask for, but for ranks."""
    _check(options)
    if options.devices is not None:
        visible = os.environ.get(VISIBLE)
        return Devices(places_of(options.devices, visible=visible, count=torch.cuda.device_count))
    if options.engine is None:
        return here
    if not isinstance(options.engine, str):
        return options.engine
    module, name = _NAMED[options.engine]
    given = {inner: getattr(options, outer) for outer, inner in _OF_RAY.items()}
    made = getattr(importlib.import_module(module), name)
    engine: Engine = made(**{key: value for key, value in given.items() if value is not None})
    return engine


def _check(options: SweepOptions) -> None:
    engine: object = options.engine
    devices, device = options.devices, options.device
    if isinstance(engine, str) and engine not in _NAMED:
        raise ValueError(
            f"engine must be {', '.join(map(repr, _NAMED))}, a callable or None, not {engine!r}"
            f"{did_you_mean(engine, _NAMED)}"
        )
    if engine is not None and not isinstance(engine, str) and not callable(engine):
        raise TypeError(f"engine must be 'ray', a callable or None, not {engine!r}")
    if not isinstance(engine, str):
        check_callback("engine", engine, "job", "waiting", "on_event")
    if devices is not None and engine is not None:
        raise ValueError(f"devices must be None with engine, which chooses its own, not {devices!r}")
    if devices is not None and device is not None:
        raise ValueError(f"device must be None with devices, not {device!r}")
    for name in _OF_RAY:
        if getattr(options, name) is not None and engine != "ray":
            raise ValueError(f"{name} must be None without engine='ray', not {getattr(options, name)!r}")
    if launched() and (devices is not None or engine is not None):
        name = "engine" if devices is None else "devices"
        raise ValueError(
            f"{name} must be None under torchrun, where each configuration runs over all ranks, not "
            f"{getattr(options, name)!r}"
        )


def launched() -> bool:
    """Whether a launcher has started several ranks, or there is a process group of several."""
    if dist.is_available() and dist.is_initialized():
        return Ranks.current().world_size > 1
    return os.environ.get("WORLD_SIZE", "1").strip() not in ("", "0", "1")


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """The ranks of a launcher, with a process group to agree in; a group that was made for it goes again."""
    before = dist.is_available() and dist.is_initialized()
    join_launched()
    try:
        yield Ranks.current(timeout_s=RANKS_TIMEOUT_S)
    finally:
        if not before and made_by_us():
            dist.destroy_process_group()


def over_ranks(ranks: Ranks, alone: Engine) -> Engine:
    """The engine for all ranks where there are several, else the one that was asked for."""
    return AllRanks(ranks) if ranks.world_size > 1 else alone
