"""`predict_batch_size`: the largest size, from a trace with fake tensors. No step runs.

Rules:
- An oracle (`_engine.trace.oracle`) answers from a trace. With a GPU, two small real runs show what the
  trace did not see.
- Tracing issues no collectives. Under `torch.distributed` all ranks predict, and all return the same: the
  answer of the rank on which the fewest samples fit, and for each budget the fewest that fit anywhere.
- Nothing fits on one rank: that is every rank's answer. Another error is raised unchanged on its own rank,
  and as `RankFailedError` on the others; all can go on, and measure instead.
- What cannot be traced is an `UntraceableError` that names operation and line; it is never guessed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

import batchfit
from batchfit._engine.allocator.caching import AllocatorSettings
from batchfit._engine.allocator.footprint import Footprint
from batchfit._engine.allocator.gpus import Gpu
from batchfit._engine.allocator.replay import Simulation, largest, residual_of, simulate
from batchfit._engine.device.gpu import is_capped
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.device.tensors import tensors_in
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.sharding.sharding import Sharding, on_ranks, rules_on_ranks
from batchfit._engine.snapshot.snapshot import Snapshot
from batchfit._engine.torch_private.process_groups import is_fake
from batchfit._engine.trace.oracle import (
    Basis,
    Oracle,
    Oracles,
    allocator_caveats,
    allocator_rules,
    default_budget,
    held_beside,
    is_recurrent,
    margin_of,
)
from batchfit._engine.trace.trace import TraceSource
from batchfit._engine.trace.workload import (
    STRAIGHT,
    TracedWorkload,
    rules_for,
    trace_source,
    trace_workload,
)
from batchfit._engine.trial.trial import run_trial
from batchfit._engine.workload.reachable import StepReach, reach_of
from batchfit._explain.pure.holders import Peak
from batchfit._explain.shortage import Shortage, holders_of, shortage_of
from batchfit._predict.joint import joint
from batchfit._predict.one_rank import peak_of_rank
from batchfit._predict.pure.options import Budget, PredictOptions
from batchfit._units import format_bytes
from batchfit.errors import NothingFitsError
from batchfit.results import Answer, Point, Prediction, Trial
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")
_EXPLAINED_UNUSED_SHARE = 0.05  # of a budget, beside the margin: as much unused is explained
_SMALL_GAP_SHARE = 0.005  # of the peak: half of what a calibrated prediction leaves free


def predict_batch_size(
    workload: Workload | Callable[[int], object],
    *,
    budget: Budget | Sequence[Budget] | None = None,
    gpu: str | None = None,
    max_size: int | None = None,
    margin: float | None = None,
    calibrate: bool | None = None,
    expandable_segments: bool | None = None,
    ranks: int | None = None,
    shard: str | None = None,
    offload: bool = False,
) -> Prediction:
    """Predict the largest batch size that fits, without a GPU and without running a step.

    ```python
    pred = batchfit.predict_batch_size(workload, budget="80GiB")
    print(pred.batch_size, pred.peak_bytes_at(64))
    ```

    Args:
        workload: what one step is. Its state must be declared: the trace works on fakes of it.
        budget: bytes the program may use ("80GiB"), or several: then `answers` has one for each, and
            `batch_size` is the first one's. Default: what is free on the GPU, or all of `gpu`.
        gpu: the GPU to predict for ("h100", "rtx4090", or as nvidia-smi prints it): its memory and its choice
            of kernels. Of a name that is made with several memories ("a100") the smallest is taken, and a
            caveat says so.
        max_size: the largest size that is wanted.
        margin: the share of the budget to leave free; default: 2 % without a GPU, 1.5 % with one that was not
            run, 1 % calibrated; 5 % where there are recurrent layers.
        calibrate: run two small sizes on the GPU; default: where the workload is on one and its state is
            declared, so that it can be restored.
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF; default: what that says. Replayed by the
            allocator's source and measured for a few models only: a caveat of the answer says so.
        ranks: how many processes (GPUs) the program is to run on. One rank of them is traced, in this process
            and without any GPU. Default: 1, or those of `fake_ranks`.
        shard: how a model that the program does not wrap itself is spread over them: "fsdp2", "ddp",
            "hsdp:2x4" (replicas x shards), "zero1", "zero2" or "zero3"; options of FSDP2 follow a colon
            ("fsdp2:bf16,reshard=4").
        offload: FSDP2 keeps shards, their gradients and the optimizer's state on the host.

    Returns:
        A `Prediction`: `batch_size` is that of one forward/backward in one process (per GPU).

    Raises:
        UntraceableError: the step cannot be traced; names the operation and the line.
        NothingFitsError: not even one sample fits (with one budget).
    """
    keywords = {**locals()}  # every argument, by its name
    return predict_with(keywords.pop("workload"), lambda: PredictOptions(**keywords))


def predict_with(
    workload: Workload | Callable[[int], object], make_options: Callable[[], PredictOptions]
) -> Prediction:
    """Predict the largest batch size; an error of `make_options` on one rank is an error on all ranks."""
    ranks = Ranks.current()
    if ranks.world_size == 1:
        return _predicted(as_workload(workload), make_options())
    return joint(lambda: _predicted(as_workload(workload), make_options()), ranks)


def _predicted(work: Workload, options: PredictOptions) -> Prediction:
    """What this process predicts."""
    begun = time.perf_counter()
    work._check_by_samples("predict_batch_size")
    reach = reach_of(work)
    if options.ranks is None and not is_fake():
        return _of_one_process(work, reach, options, begun)
    with on_ranks(reach, options.ranks, options.layout) as sharding:
        if sharding.ranks > 1:
            return _of_one_rank(reach, sharding, options, begun)
        return _of_one_process(work, reach, options, begun)


def _of_one_process(work: Workload, reach: StepReach, options: PredictOptions, begun: float) -> Prediction:
    target, max_size, calibrate = options.target, options.max_size, options.calibrate
    rules = rules_for(work, target, reach)
    here = rules.device.type == "cuda"
    if calibrate and not here:
        raise ValueError("calibrate must be False or None where the workload is not on a GPU, not True")
    free_bytes = None if options.budgets_bytes else default_budget(target, work if here else None)
    budgets = options.budgets_bytes or ([] if free_bytes is None else [free_bytes])
    if not budgets:
        raise ValueError('budget must be given ("80GiB"), or gpu, where the workload is not on a GPU')
    capped = here and is_capped(device_to_run(work._held), min(budgets))
    settings = allocator_rules(options.expandable_segments, capped=capped)
    traced = trace_workload(work, rules=rules, budget_bytes=max(budgets), most=max_size, reach=reach)
    basis: Basis = "GPU, not run" if here else "no GPU"
    residual = (float(held_beside(reach.parts, rules.gpu)[0]) if here else 0.0, 0.0)
    trials: tuple[Trial, ...] = ()
    if here and (work.declared if calibrate is None else calibrate):
        measured, trials = calibration(work, traced, settings, budget_bytes=max(budgets))
        if trials:  # else what is held beside the workload still counts
            residual, basis = measured, "calibrated"
    why = partial(
        shortage_of,
        work,
        size=1,
        budget_bytes=budgets[0],
        settings=settings,
        rules=rules if not here else None,
        beside_bytes=round(residual[0]),
    )
    return _answered(traced, settings, residual, budgets, basis, trials, options, begun, why)


def _of_one_rank(reach: StepReach, sharding: Sharding, options: PredictOptions, begun: float) -> Prediction:
    """What one of several ranks needs, traced without a GPU."""
    if options.calibrate:
        raise ValueError("calibrate must be False or None with ranks: one process cannot run them, not True")
    budgets = options.budgets_bytes or ([] if options.target is None else [options.target.usable_bytes])
    if not budgets:
        raise ValueError('budget must be given ("80GiB"), or gpu, with ranks, not None')
    traced = trace_workload(
        reach.workload,
        rules=rules_on_ranks(reach, options.target),
        budget_bytes=max(budgets),
        most=options.max_size,
        reach=reach,
        changes=sharding.changes,
        notes=sharding.notes,
    )
    settings = allocator_rules(options.expandable_segments)
    why = partial(_held_at_one, traced.source)
    found = _answered(traced, settings, (0.0, 0.0), budgets, "no GPU", (), options, begun, why)
    size = max(found.batch_size, 1)
    return found.model_copy(
        update={
            "ranks": sharding.ranks,
            "shard": options.shard or "",
            "offload": options.offload,
            "per_rank": peak_of_rank(traced.at(size), size),
        }
    )


def predict_source(source: TraceSource, options: PredictOptions) -> Prediction:
    """What the traces of a source predict, without a GPU; they may be of a program in its own process."""
    begun = time.perf_counter()
    if options.calibrate:
        raise ValueError("calibrate must be left out where nothing can be run here")
    if options.ranks is not None:
        raise ValueError(
            f"ranks must be left out for a program in its own process, not {options.ranks!r}: name a workload"
        )
    target = options.target
    budgets = options.budgets_bytes or ([] if target is None else [target.usable_bytes])
    if not budgets:
        raise ValueError('budget must be given ("80GiB"), or gpu')
    settings = allocator_rules(options.expandable_segments)
    traced = trace_source(source, budget_bytes=max(budgets), most=options.max_size)

    why = partial(_held_at_one, source)
    return _answered(traced, settings, (0.0, 0.0), budgets, "no GPU", (), options, begun, why)


def _held_at_one(source: TraceSource, *, margin: float) -> Shortage:
    """What holds the peak of one sample."""
    peak = Peak.of(source.trace(1, steps=source.steps))
    return Shortage(1, peak.size, source.rules.gpu.name, holders_of(peak))


def _answered(
    traced: TracedWorkload,
    settings: AllocatorSettings,
    residual: tuple[float, float],
    budgets: list[int],
    basis: Basis,
    trials: Sequence[Trial],
    options: PredictOptions,
    begun: float,
    why: Callable[..., Shortage | None],
) -> Prediction:
    """The prediction for all budgets, from what was traced; `why` is asked where nothing fits."""
    share = margin_of(traced, basis) if options.margin is None else options.margin
    oracles = Oracles([Oracle(traced, settings, residual)])
    found = [oracles.largest(one, share, options.max_size) for one in budgets]
    if found[0] is None and len(budgets) == 1:
        short = why(margin=share)
        raise NothingFitsError(
            1,
            device=traced.rules.gpu.name if basis != "no GPU" or options.gpu else "a GPU of that memory",
            budget_bytes=budgets[0],
            peak_bytes=oracles.of(1).peak(1),
            state_bytes=oracles.of(1).traced.at(1).state_bytes,
            detail="predicted",
            **({} if short is None else short.for_error()),
        )
    return _prediction(oracles, budgets, found, basis, share, trials, options.target, begun, options.max_size)


def calibration(
    work: Workload, traced: TracedWorkload, rules: AllocatorSettings, *, budget_bytes: int
) -> tuple[tuple[float, float], tuple[Trial, ...]]:
    """What two small real runs need beyond the trace: fixed bytes, and bytes per sample.

    Both sizes lie above the last knee, where the peak is one straight line, and well below the end.
    """
    footprint = traced.footprint
    if footprint is None:
        return (0.0, 0.0), ()
    device = device_to_run(work._held)
    budget_bytes = min(budget_bytes, device.budget_bytes())  # what is asked about may be a larger GPU
    end = largest(
        footprint,
        capacity_bytes=round(budget_bytes * 0.9),
        rules=rules,
        may_retry=traced.may_retry,
    )
    if end is None or end.size < 4:
        return (0.0, 0.0), ()
    knee = max(line.size for line in footprint.peak_lines(end.size))
    first = min(max(int(knee) + 1, end.size // 8, 1), max(1, end.size // 4))
    second = max(first + 1, end.size // 3)
    snapshot = Snapshot.take(work.state)
    parameters = [one for one in tensors_in(work.state) if one.requires_grad]
    steps = 1 if traced.may_retry else 3  # all of a call that generates is gone after it
    trials = []
    with device.limit(budget_bytes):
        for size in (first, second):
            trial = run_trial(
                work.step, size, device=device, snapshot=snapshot, parameters=parameters, steps=steps
            )
            trials.append(trial)
            if not trial.fits or trial.peak_bytes is None:
                log.warning("batch size %d did not run, so the prediction is not calibrated", size)
                return (0.0, 0.0), ()
    gaps = [
        (trial.peak_bytes or 0)
        - simulate(footprint, trial.size, capacity_bytes=None, rules=rules, steps=steps).peak_allocated_bytes
        for trial in trials
    ]
    return residual_of(
        (first, gaps[0]), (second, gaps[1]), small=_SMALL_GAP_SHARE * (trials[1].peak_bytes or 0)
    ), tuple(trials)


def _prediction(
    oracles: Oracles,
    budgets: list[int],
    found: list[Simulation | None],
    basis: Basis,
    margin: float,
    trials: Sequence[Trial],
    target: Gpu | None,
    begun: float,
    most: int | None,
) -> Prediction:
    traced = oracles.all[0].traced
    answers = tuple(
        Answer(
            budget_bytes=budget,
            batch_size=0 if one is None else one.size,
            peak_bytes=0 if one is None else one.peak_allocated_bytes,
            name=target.name if target is not None and budget == target.usable_bytes else "",
            reason="" if one is None else _reason(oracles, one, budget, margin, most),
        )
        for budget, one in zip(budgets, found, strict=True)
    )
    top = max((answer.batch_size for answer in answers), default=0)
    size = answers[0].batch_size or 1
    phase, operation = peak_of(oracles.of(size).traced.at(size), size)
    lines = [] if traced.footprint is None else traced.footprint.peak_lines(max(top, 1))
    return Prediction(
        batch_size=answers[0].batch_size,
        budget_bytes=budgets[0],
        peak_bytes=answers[0].peak_bytes,
        peak_phase=phase,
        peak_operation=operation,
        margin=margin,
        based_on=basis,
        card=traced.rules.gpu.name,
        card_measured=traced.rules.gpu.measured,
        answers=answers,
        curve=tuple(_curve(oracles, answers)),
        knees=tuple(line.size for line in lines[1:]),
        unseen=(*_caveats(traced), *allocator_caveats(oracles.all[0].rules)),
        check=traced.check,
        trace_sizes=traced.sizes,
        trials=tuple(trials),
        trace_s=traced.trace_s,
        elapsed_s=time.perf_counter() - begun,
        batchfit_version=batchfit.__version__,
        torch_version=torch.__version__,
        samples=traced.source.samples,
    )


def _reason(oracles: Oracles, found: Simulation, budget_bytes: int, margin: float, most: int | None) -> str:
    """Why no larger size is answered; empty where little of the budget is left."""
    size, oracle = found.size, oracles.of(found.size)
    if found.peak_allocated_bytes >= (1 - margin - _EXPLAINED_UNUSED_SHARE) * budget_bytes:
        return ""
    if size == most:
        return "max_size is reached"
    if oracle.traced.footprint is None:  # the next size would need a trace of its own
        return ""
    capacity_bytes = round(budget_bytes * (1 - margin))
    if oracle.run(size + 1, capacity_bytes).sustained:
        return "of the sizes above it only some run (fragmentation)"
    free = oracle.run(size + 1, None, bare=True)
    peak, reserved = format_bytes(free.peak_allocated_bytes), format_bytes(free.peak_reserved_bytes)
    larger = f"a batch of {size + 1}"
    if free.peak_allocated_bytes > capacity_bytes:
        return f"{larger} would have a peak of {peak}"
    if free.peak_reserved_bytes > capacity_bytes:
        return f"{larger} would reserve {reserved} for a peak of {peak} (fragmentation)"
    return f"{larger} finds no room in a replay of the allocator"


def _curve(oracles: Oracles, answers: Sequence[Answer]) -> list[Point]:
    """Memory at sizes from 1 to a little beyond the largest answer."""
    top = max(2, *(answer.batch_size for answer in answers))
    sizes = {1, top, *(answer.batch_size for answer in answers if answer.batch_size)}
    for one in oracles.all:
        sizes |= {size for size in one.traced.traced_sizes if oracles.of(size) is one}
    if oracles.all[0].traced.footprint is not None:
        shares = (0.03, 0.06, 0.12, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.15, 1.3)
        for size in (2, *(max(1, round(top * share)) for share in shares)):
            # Between small sizes that were traced by themselves lines from far above would be off.
            if size > max(oracles.of(size).traced.traced_sizes, default=1):
                sizes.add(size)
    points = []
    for size in sorted(sizes):
        found = oracles.of(size).run(size, None)
        points.append(
            Point(size=size, peak_bytes=found.peak_allocated_bytes, reserved_bytes=found.peak_reserved_bytes)
        )
    return points


def peak_of(footprint: Footprint, size: int) -> tuple[str, str]:
    """The phase and the operation at the highest moment."""
    event = footprint.events[footprint.moment_of_peak(size)]
    origin = footprint.origins[event if event >= 0 else ~event]
    return origin.phase, origin.operation


def _caveats(traced: TracedWorkload) -> tuple[str, ...]:
    notes = list(traced.caveats)
    if traced.check > STRAIGHT:
        notes.append(
            f"memory is no straight line in the batch size (a check was {traced.check:.1%} off), so each "
            "size was traced"
        )
    elif traced.footprint is None:
        notes.append("the step allocates in another order at each size, so each size was traced")
    if is_recurrent(traced):
        notes.append(
            "cuDNN's recurrent layers: their workspaces are known to a tenth only, so 5 % is left free"
        )
    if made_of := traced.source.made_of:
        notes.append(f"batches are made of {made_of}: a longer sample needs more")
    return (*notes, *traced.rules.gpu.caveats)
