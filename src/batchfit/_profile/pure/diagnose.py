"""The bottleneck: from readings to findings, each with its figures and what to change.

Rules:
- Nothing is named without a reading that shows it, and the reading is in the sentence.
- Each finding has a threshold well above what timings wobble by, so that a clean run names nothing.
  "compute-bound" is named only where nothing else is and the time grows with the size.
- The order is the order of advice: what costs most first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, final

from batchfit._units import format_bytes
from batchfit.results import Bottleneck, BottleneckKind

# Where a batch comes from: the caller's function, a dataset that we collate, an example that we copy.
BatchFrom = Literal["make_batch", "dataset", "example"]

_DATA = 0.10  # of the time that loading and stepping take together, spent waiting for data
MAKING = 0.30  # of a step's time, spent making the batch
_IDLE = 0.20  # of a step's time in which the device had nothing to do
_RETRIES = 0.25  # allocation retries a step
_SHAPES = 0.15  # of the time, spent on what first-seen shapes cost
_RAGGED = 0.25  # of batches with a shape that no batch before had
_LAG = 0.10  # of a step's time by which one rank is behind
_EXCHANGE = 0.20  # of a step's time spent on exchange between ranks
_RISES = 1.25  # a doubling that still brings this much is cut off by memory
_BUSY = 1.6  # times the step's time at half the size: the device is busy


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A loader's readings: seconds per batch alone, and of a step with a batch of it."""

    size: int
    loader_s: float
    step_s: float
    both_s: float
    batches: int = 0
    shapes: int = 0  # distinct ones among `batches`


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeTimes:
    """The same steps twice, with shapes that were new the first time. `steps` is how many of each."""

    steps: int
    distinct: int
    cold_s: float
    warm_s: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Readings at the recommended size; None where there is none."""

    size: int
    step_s: float
    steps: int
    has_own_clock: bool  # the device runs beside the host
    busy_s: float | None = None  # of a step, in which the device worked
    host_s: float | None = None  # to issue a step
    kernels: int | None = None
    batch_s: float | None = None  # to make a batch
    batch_from: BatchFrom = "make_batch"
    alloc_retries: int = 0
    reserved_bytes: int | None = None
    budget_bytes: int = 0
    growth: float | None = None  # times the step's time at half the size
    cut_off_by_memory: bool = False
    flops_share: float | None = None
    loaded: Loaded | None = None
    shapes: ShapeTimes | None = None
    own_s: Sequence[float] = ()  # each rank's step without waiting for the others
    crowded: Sequence[tuple[int, int, int]] = field(default=())  # (size, retries, steps) of larger sizes


def diagnose(facts: Facts) -> tuple[Bottleneck, ...]:
    """What the readings show, the largest share first."""
    rules = (_data, _shape, _sync, _memory, _host)
    found = [finding for rule in rules if (finding := rule(facts)) is not None]
    kinds = {one.kind for one in found}
    # A host that makes batches or plans is busy with that; saying so twice helps nobody.
    if kinds & {"data-bound", "shape-bound"}:
        found = [one for one in found if one.kind != "host-bound"]
    found.sort(key=lambda one: -(one.share or 0.0))
    if not found and (computes := _compute(facts)) is not None:
        found.append(computes)
    return tuple(found)


def _found(kind: BottleneckKind, share: float | None, evidence: str, advice: str, size: int) -> Bottleneck:
    return Bottleneck(kind=kind, share=share, evidence=evidence, advice=advice, size=size)


def ms(seconds: float) -> str:
    """`35.2 ms`, `1.24 s`: three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _data(facts: Facts) -> Bottleneck | None:
    one = facts.loaded
    if one is None or one.both_s <= 0:
        return _making(facts)
    waiting = 1 - one.step_s / one.both_s
    # The loader has to be the reason: alone it takes about what is lost, or more.
    if waiting < _DATA or one.loader_s < 0.5 * (one.both_s - one.step_s):
        return _making(facts)
    return _found(
        "data-bound",
        waiting,
        f"a batch of {one.size} takes the loader {ms(one.loader_s)} alone and the step {ms(one.step_s)}; "
        f"together they take {ms(one.both_s)}, {waiting:.0%} of it waiting for data",
        "more loader workers (num_workers, persistent_workers, prefetch_factor), less work per sample, or "
        "samples prepared beforehand; a larger batch helps nothing",
        one.size,
    )


_REMEDIES: dict[BatchFrom, str] = {
    "make_batch": "make the batch on the device or once beforehand: make_batch is timed as a part of the "
    "step",
    "dataset": "here one process collates the samples: pass loader=, the program's own with its workers, to "
    "time what it takes there",
}


def _making(facts: Facts) -> Bottleneck | None:
    if facts.batch_from == "example":
        return None  # the copying is ours, not the program's
    if facts.batch_s is None or facts.batch_s < MAKING * facts.step_s:
        return None
    # Beside a busy device the making is hidden.
    if facts.busy_s is not None and facts.busy_s > (1 - _IDLE) * facts.step_s:
        return None
    share = min(facts.batch_s / facts.step_s, 1.0)
    return _found(
        "data-bound",
        share,
        f"making a batch of {facts.size} takes {ms(min(facts.batch_s, facts.step_s))} of a step's "
        f"{ms(facts.step_s)}",
        _REMEDIES[facts.batch_from],
        facts.size,
    )


def _shape(facts: Facts) -> Bottleneck | None:
    seen, loaded = facts.shapes, facts.loaded
    if seen is not None and seen.distinct > 2 and seen.cold_s > 0:
        share = 1 - seen.warm_s / seen.cold_s
        if share >= _SHAPES:
            return _shaped(
                share,
                f"{seen.distinct} shapes in {seen.steps} steps at batch size {facts.size}: a step takes "
                f"{ms(seen.cold_s / seen.steps)} while its shape is new and {ms(seen.warm_s / seen.steps)} "
                "when it comes again",
                facts.size,
            )
        return None
    if seen is None or loaded is None or loaded.batches < 4:
        return None
    ragged = (loaded.shapes - 1) / loaded.batches
    excess = (seen.cold_s - seen.warm_s) / seen.steps
    share = ragged * excess / (facts.step_s + ragged * excess) if excess > 0 else 0.0
    if ragged < _RAGGED or share < _SHAPES:
        return None
    return _shaped(
        share,
        f"{loaded.shapes} shapes in {loaded.batches} batches of the loader, and the first step at a shape "
        f"takes {ms(excess)} more than later ones ({ms(facts.step_s)})",
        loaded.size,
    )


def _shaped(share: float, evidence: str, size: int) -> Bottleneck:
    return _found(
        "shape-bound",
        share,
        evidence,
        "pad to a few lengths (multiples of 64 or 128) or sort by length, so that shapes repeat; on Hopper "
        "torch.backends.cuda.enable_cudnn_sdp(False) makes new shapes cheaper; "
        "with torch.compile use dynamic=True",
        size,
    )


def _sync(facts: Facts) -> Bottleneck | None:
    if len(facts.own_s) < 2:
        return None
    slowest, usual = max(facts.own_s), statistics.median_low(facts.own_s)
    step_s = max(facts.step_s, slowest)
    rank = facts.own_s.index(slowest)
    if slowest - usual >= _LAG * step_s:
        lag = (slowest - usual) / step_s
        return _found(
            "sync-bound",
            lag,
            f"rank {rank} takes {ms(slowest)} for a step of its own and a usual rank {ms(usual)}: the others "
            f"wait for {lag:.0%} of each step",
            f"check what rank {rank} does besides (other programs on its device, its loader, a slower "
            "GPU), or give it fewer samples",
            facts.size,
        )
    exchange = (step_s - slowest) / step_s
    if exchange < _EXCHANGE:
        return None
    return _found(
        "sync-bound",
        exchange,
        f"a step takes {ms(step_s)} with the exchange between {len(facts.own_s)} ranks and {ms(slowest)} "
        "without it",
        "a larger batch per rank or accumulation (fewer exchanges per sample), gradients in bf16 "
        "(bf16_compress_hook), larger buckets, or a faster connection",
        facts.size,
    )


def _memory(facts: Facts) -> Bottleneck | None:
    if facts.alloc_retries >= _RETRIES * max(facts.steps, 1):
        return _retried(facts, facts.size, facts.alloc_retries, facts.steps)
    for size, retries, steps in facts.crowded:
        if retries >= _RETRIES * max(steps, 1):
            return _retried(facts, size, retries, steps)
    if facts.cut_off_by_memory and facts.growth is not None and 2 / facts.growth >= _RISES:
        return _found(
            "memory-bound",
            None,
            f"the last doubling still brought x{2 / facts.growth:.2f} the throughput when memory ended at "
            f"batch size {facts.size} ({format_bytes(facts.budget_bytes)})",
            "lower precision, activation checkpointing or a smaller optimizer state make room for a larger "
            "batch: batchfit explain says how much each brings",
            facts.size,
        )
    return None


def _retried(facts: Facts, size: int, retries: int, steps: int) -> Bottleneck:
    used = ""
    if size == facts.size and facts.reserved_bytes is not None and facts.budget_bytes:
        used = f", with {facts.reserved_bytes / facts.budget_bytes:.0%} of the budget in use"
    return _found(
        "memory-bound",
        None,
        f"the allocator had to give back its cache and try again {retries} times in {steps} steps "
        f"at batch size {size}{used}",
        "a smaller batch runs faster here; or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
        "or activation checkpointing",
        size,
    )


def _host(facts: Facts) -> Bottleneck | None:
    if not facts.has_own_clock or facts.busy_s is None:
        return None
    idle = 1 - facts.busy_s / facts.step_s
    if idle < _IDLE:
        return None
    many = f" over {facts.kernels} kernels" if facts.kernels else ""
    issue = f"; the host needs {ms(facts.host_s)} to issue a step" if facts.host_s is not None else ""
    return _found(
        "host-bound",
        idle,
        f"the device works {ms(facts.busy_s)} of a step's {ms(facts.step_s)} at batch size {facts.size}"
        f"{many} and is idle for the other {idle:.0%}{issue}",
        "torch.compile or CUDA graphs, a fused optimizer, no .item() or print of tensors in the step, less "
        "Python between launches; or a larger batch, where there is memory",
        facts.size,
    )


def _compute(facts: Facts) -> Bottleneck | None:
    if facts.growth is None or facts.growth < _BUSY:
        return None
    idle = ""
    if facts.busy_s is not None and facts.step_s > 0:
        idle = f", the device works {min(facts.busy_s / facts.step_s, 1.0):.0%} of the time"
    peak = "" if facts.flops_share is None else f", at {facts.flops_share:.0%} of its peak FLOP/s"
    return _found(
        "compute-bound",
        None,
        f"a step at batch size {facts.size} takes x{facts.growth:.2f} the time of one half the size"
        f"{idle}{peak}",
        "nothing about the batch size: lower precision (bf16, fp8), torch.compile or a smaller model make "
        "steps faster",
        facts.size,
    )
