"""Readings that show the bottleneck: the device's busy time, a loader's pace, a rank's own pace.

Rules: a reading that cannot be taken is None, never a guess; each is a few steps. Each runs the steps that it
is given and leaves restoring the state to its caller, except for what it switches itself.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import torch

from batchfit._engine.batch.sample_count import BatchReader
from batchfit._engine.batch.structure import parts, sized
from batchfit._engine.device.device import Device
from batchfit._engine.device.gpu import CudaDevice
from batchfit._profile.model_inputs import batch_shapes

log = logging.getLogger("batchfit")

_BATCHES = 20  # of a loader, timed
PATIENCE_S = 3.0  # for a loader's batches
_LEAST = 3


@final
@dataclass(frozen=True, slots=True)
class Busy:
    """How long the device worked in a step, and on how many kernels."""

    busy_s: float
    kernels: int


def busy_time(step: Callable[[int], object], size: int, *, device: Device, steps: int = 2) -> Busy | None:
    """The union of all kernels' times in a step, as CUPTI records them; None where it cannot be had."""
    if not isinstance(device, CudaDevice):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what the profiler says about itself is not about the step
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
                for _ in range(steps):
                    step(size)
                device.synchronize()
            events: Any = profiler.events() or ()
    except (RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        log.debug("the profiler gives no kernel times: %s", error)
        return None
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if "cuda" in str(getattr(event, "device_type", "")).lower()
        and not getattr(event, "is_user_annotation", False)
    )
    if not spans:
        return None
    return Busy(union(spans) / 1e6 / steps, len(spans) // steps)


def union(spans: Iterable[tuple[float, float]]) -> float:
    """The length that intervals, sorted by their begin, cover together."""
    covered, reached = 0.0, -float("inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def batch_time(source: Callable[[int], object] | None, size: int, *, device: Device) -> float | None:
    """How long it takes to make a batch; None where the step makes its own, inside it."""
    if source is None:
        return None
    times = []
    for _ in range(_LEAST):
        device.synchronize()
        begun = time.perf_counter()
        source(size)
        device.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)  # of so few, what is sure


def flops_of(step: Callable[[int], object], size: int) -> int | None:
    """The floating-point operations of one step, as far as torch counts them; None where it counts none."""
    from torch.utils.flop_counter import FlopCounterMode

    with warnings.catch_warnings():
        # Its hooks on all modules are noticed by a compiled one; the caller lets it run eagerly.
        warnings.filterwarnings("ignore", message="Using `torch.compile.* global hooks")
        with FlopCounterMode(display=False) as counter:
            step(size)
    return counter.get_total_flops() or None


def refuses_to_count(error: BaseException) -> bool:
    """Whether torch's counter itself raised.

    Its formulas assert what they know of (older ones no grouped-query attention); the step runs all the same.
    """
    from torch.utils import flop_counter

    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == flop_counter.__file__


@final
@dataclass(frozen=True, slots=True)
class LoaderPace:
    """A loader alone: seconds per batch, the samples in a batch, and the shapes that came."""

    batch_s: float
    size: int
    batches: int
    shapes: int


def loader_pace(loader: Iterable[Any], *, patience_s: float = PATIENCE_S) -> LoaderPace:
    """Time a loader's batches without a step; its first one starts the workers and is not timed."""
    with _generator_kept(loader):
        iterator = iter(loader)
        sizes, shapes, count = [], set(), 0
        begun = time.perf_counter()
        batch_s: list[float] = []
        for batch in iterator:
            now = time.perf_counter()
            if count:
                batch_s.append(now - begun)
            count += 1
            sizes.append(batch_samples(batch))
            shapes.add(batch_shapes(batch))
            if count > _BATCHES or (count > _LEAST and sum(batch_s) > patience_s):
                break
            begun = time.perf_counter()
    if len(batch_s) < 2:
        raise ValueError(f"loader must give at least 3 batches, not {count}")
    # The mean: a loader with workers gives several batches at once and then none for a while.
    return LoaderPace(statistics.fmean(batch_s), statistics.mode(sizes), count, len(shapes))


def batch_samples(batch: Any) -> int:
    """How many samples a batch holds."""
    with suppress(ValueError, TypeError):  # not certain: its first part says it
        return BatchReader().read(batch).length
    found = sized(list(parts(batch)))
    if not found:
        raise ValueError(f"loader must give batches with tensors in them, not {type(batch).__name__}")
    return found[0].length


@contextmanager
def fed_by(loader: Iterable[Any], step: Callable[[int], object]) -> Iterator[Callable[[int], object]]:
    """Inside, a step that takes a batch from the loader first, from the beginning again where it ends."""
    with _generator_kept(loader):
        iterators = [iter(loader)]

        def fed(size: int) -> object:
            try:
                next(iterators[0])
            except StopIteration:
                iterators[0] = iter(loader)
                next(iterators[0], None)
            return step(size)

        yield fed


@contextmanager
def _generator_kept(loader: object) -> Iterator[None]:
    """A loader that shuffles with a generator of its own goes on afterwards as if nobody had looked."""
    owners = [loader, getattr(loader, "sampler", None)]
    generators = [getattr(owner, "generator", None) for owner in owners]
    states = [(one, one.get_state()) for one in generators if isinstance(one, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


@contextmanager
def without_exchange(state: Iterable[object]) -> Iterator[bool]:
    """Inside, DDP models exchange no gradients; False where there is none, so that steps are as they were."""
    from torch.nn.parallel import DistributedDataParallel

    found = [one for one in state if isinstance(one, DistributedDataParallel)]
    with ExitStack() as stack:
        for one in found:
            stack.enter_context(one.no_sync())
        yield bool(found)
