"""Ray: the configurations of a sweep as tasks of a cluster.

    batchfit.sweep(make, knobs, engine="ray", num_gpus=1)
    batchfit.sweep(make, knobs, engine=RayEngine(address="ray://head:10001", num_gpus=0.5))

Rules
- One task per configuration, and one record per task: the caller keeps records, no task writes.
- A task whose worker or node dies is retried by Ray, `max_retries` times. After that its record holds the
  error, and the sweep continues. What the user's code raises is in the record that the task returns, and is
  not retried.
- An existing cluster is left unchanged; one that was started here ends with the sweep. However the sweep
  ends, none of its tasks keeps running.
- Functions of the main file travel by value, as Ray does it; those of modules, and targets
  ("file.py:function"), are loaded where the task runs, under the same paths.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, final

from batchfit import SweepEvent, SweepRecord
from batchfit.errors import BatchfitError

try:
    import ray
except ImportError as error:
    raise ImportError('pip install "batchfit[ray]" to use batchfit.integrations.ray') from error

log = logging.getLogger("batchfit")

_COLOURS: Final = re.compile("\x1b\\[[0-9;]*m")
_MOST_AT_ONCE: Final = 1000  # tasks that the cluster holds for us: a sweep may have many more


@final
@dataclass(slots=True)
class RayEngine:
    """Runs the configurations of a sweep as Ray tasks.

    A part of a GPU needs a `budget`: Ray does not divide its memory.

    Args:
        address: the cluster ("auto", "ray://head:10001"); None: the one that this program is connected to or
            RAY_ADDRESS names, else one on this machine.
        num_gpus: GPUs that a task takes; None: one where the cluster has any.
        num_cpus: CPUs that a task takes.
        max_retries: how often a task is retried whose worker or node has died.

    Attributes:
        at_once: tasks that run at a time, once that is known.
    """

    address: str | None = None
    num_gpus: float | None = None
    num_cpus: float = 1
    max_retries: int = 3
    at_once: int = field(default=1, init=False)  # tasks that run at a time, once that is known

    def __post_init__(self) -> None:
        for name in ("num_gpus", "num_cpus"):
            value = getattr(self, name)
            wrong = type(value) not in (int, float) or not 0 <= value < math.inf
            if wrong and not (name == "num_gpus" and value is None):
                raise ValueError(f"{name} must be a number of at least 0, not {value!r}")
        if type(self.max_retries) is not int or self.max_retries < 0:
            raise ValueError(f"max_retries must be an integer of at least 0, not {self.max_retries!r}")
        if self.address is not None and not isinstance(self.address, str):
            raise TypeError(f"ray_address must be text or None, not {self.address!r}")

    def __call__(
        self, job: Any, waiting: Sequence[Any], on_event: Callable[[SweepEvent], object]
    ) -> Generator[SweepRecord, None, None]:
        if not waiting:
            return
        if self.num_gpus is not None and self.num_gpus % 1 and job.settings.budget is None:
            raise ValueError(
                f"budget must be given with a part of a GPU (num_gpus {self.num_gpus:g}), not None: Ray does "
                "not divide its memory, and tasks that share it would take each other's"
            )
        ours = self._connect()
        try:
            yield from self._run(job.in_full(), list(waiting), on_event)
        finally:
            if ours:
                ray.shutdown()

    def _connect(self) -> bool:
        """Whether the cluster, or the connection to it, is ours to end."""
        if ray.is_initialized():
            return False
        quiet: dict[str, Any] = {"log_to_driver": True, "logging_level": logging.WARNING}
        if self.address is None and not os.environ.get("RAY_ADDRESS"):
            quiet |= {"include_dashboard": False}
        try:
            ray.init(address=self.address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "on this machine" if self.address is None else f"at {self.address}"
            text = " ".join(str(error).split())
            raise BatchfitError(f"there is no Ray cluster {where}: {text[:300]}") from None
        return True

    def _run(
        self, job: Any, waiting: list[Any], on_event: Callable[[SweepEvent], object]
    ) -> Generator[SweepRecord, None, None]:
        there: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call, unused-ignore]
        gpus = (1 if there.get("GPU") else 0) if self.num_gpus is None else self.num_gpus
        self._check_fits(there, gpus)
        task: Any = ray.remote(
            num_cpus=self.num_cpus, num_gpus=gpus, max_retries=self.max_retries, retry_exceptions=False
        )(_task)
        # As bytes: a worker has to know where modules are before it can load what they hold.
        whole = ray.cloudpickle.dumps(job)  # type: ignore[no-untyped-call, unused-ignore]
        shared = ray.put((list(sys.path), whole))
        running: dict[Any, Any] = {}
        waiting.reverse()
        try:
            while waiting or running:
                while waiting and len(running) < _MOST_AT_ONCE:
                    entry = waiting.pop()
                    running[task.remote(shared, dict(entry.configuration))] = entry
                # A moment at most, so that Ctrl-C comes through.
                done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
                for reference in done:
                    yield _record(reference, running.pop(reference), on_event)
        finally:
            for reference in running:
                ray.cancel(reference, force=True)

    def _check_fits(self, there: Mapping[str, float], gpus: float) -> None:
        """Refuse a task that the cluster could never run: Ray would wait for it without a word."""
        for name, value, kind in (("num_gpus", gpus, "GPU"), ("num_cpus", self.num_cpus, "CPU")):
            if value > there.get(kind, 0):
                most = f"{there.get(kind, 0):g} {kind}"
                raise ValueError(f"{name} must be at most what the cluster has ({most}), not {value:g}")
        places = [there[kind] / value for kind, value in (("GPU", gpus), ("CPU", self.num_cpus)) if value]
        self.at_once = max(1, int(min(places, default=1)))


def _task(
    shared: tuple[list[str], bytes], configuration: Mapping[str, Any]
) -> tuple[SweepRecord, list[SweepEvent]]:
    """What runs in a worker."""
    path, job = shared
    sys.path.extend(folder for folder in path if folder not in sys.path)
    events: list[SweepEvent] = []
    record: SweepRecord = ray.cloudpickle.loads(job).run(configuration, events.append)
    return record, events


def _record(reference: Any, entry: Any, on_event: Callable[[SweepEvent], object]) -> SweepRecord:
    """What a task has found; where its workers died, a record that says so."""
    lost = ""
    try:
        record, events = ray.get(reference)
    except ray.exceptions.RayError as error:
        text = _COLOURS.sub("", str(error)).strip()
        if isinstance(error, ray.exceptions.RayTaskError):  # a whole traceback, which ends with the reason
            text = text.rpartition("\n")[2]
        lost = f"{type(error).__name__}: {' '.join(text.split())}"
    if lost:
        return SweepRecord(knobs=dict(entry.configuration), error=lost[:500], failed_in="factory")
    for event in events:  # all at once: a running task reports nothing
        if event.kind != "record":
            on_event(event)
    found: SweepRecord = record
    return found
