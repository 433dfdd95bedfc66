"""`profile_throughput`: throughput by batch size, where more stops paying, and the bottleneck.

Rules:
- Arguments are checked before any device work.
- The search for the knee decides (`_profile.pure.knee`), the bench measures (`_profile.bench`), the rules of
  `_profile.pure.diagnose` judge; this file only drives.
- The recommended size has been timed. A size with an OOM is too large, and the profile goes on.
- State is restored after every size and every reading, bit for bit.
- Under `torch.distributed` all ranks time the same sizes together, and all get rank 0's result.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from batchfit._engine.device.device import Device, usable_bytes
from batchfit._engine.device.interrupts import Interrupts
from batchfit._engine.device.resolve import DeviceSpec, device_to_run
from batchfit._engine.device.tensors import ram_bytes
from batchfit._engine.distributed.ranks import Ranks, telling_others
from batchfit._profile.bench import Bench
from batchfit._profile.diagnosis import Diagnosis, diagnosed
from batchfit._profile.measuring import Measuring
from batchfit._profile.pure.options import OnPoint, ProfileOptions
from batchfit._profile.readings import PATIENCE_S, LoaderPace, loader_pace
from batchfit.results import Bottleneck, ThroughputProfile
from batchfit.workload import Workload, as_workload


def profile_throughput(
    workload: Workload | Callable[[int], object],
    *,
    smallest: int = 1,
    largest: int | None = None,
    sizes: Sequence[int] | None = None,
    within: float = 0.05,
    budget: int | str | None = None,
    time_limit_s: float | None = None,
    device: DeviceSpec | Device | None = None,
    tokens_per_sample: int | None = None,
    loader: Iterable[Any] | None = None,
    target_batch_size: int | None = None,
    diagnose: bool = True,
    on_point: OnPoint | None = None,
) -> ThroughputProfile:
    """Measure throughput by batch size, and recommend the smallest size that is close to the best.

    ```python
    profile = batchfit.profile_throughput(batchfit.training(model, optimizer, loss_fn, make_batch))
    loader = DataLoader(dataset, batch_size=profile.recommended)
    print(profile)
    ```

    Args:
        workload: what one step is; a plain `step(batch_size)` is accepted, with its state undeclared.
        smallest: the size to begin with, where a batch of 1 does not run (BatchNorm).
        largest: the largest size to time, such as `find_batch_size` has found; default: what memory readings
            at small sizes allow.
        sizes: time exactly these sizes, finely, instead of looking for the knee.
        within: how far from the best throughput the recommended size may be.
        budget: bytes the program may use ("24GiB"); default: all that is free on a GPU, and of RAM a quarter,
            at most 4 GiB, beside what the model and the optimizer hold.
        time_limit_s: stop with what was measured so far.
        device: where the workload runs; default: where its state is.
        tokens_per_sample: tokens in a sample; default: read off `input_ids`, where the model is given some.
        loader: the program's own data loader: it is timed alone and with the step.
        target_batch_size: a batch that the training wants (over all ranks); where it does not fit, the result
            says how to accumulate it.
        diagnose: look for the bottleneck: a few more steps at the recommended size.
        on_point: called with each point as it is measured.

    Returns:
        A `ThroughputProfile`: sizes are per process, and `recommended` is the one to use.

    Raises:
        NothingFitsError: not even a batch of 1 (or the smallest of `sizes`) fits.
        SearchStoppedError: `time_limit_s` was over before any size was timed.
    """
    keywords = {**locals()}  # every argument, by its name
    return profile_with(keywords.pop("workload"), lambda: ProfileOptions(**keywords))


def profile_with(
    workload: Workload | Callable[[int], object], make_options: Callable[[], ProfileOptions]
) -> ThroughputProfile:
    """Measure throughput; an error of `make_options` on one rank ends the profile on all ranks."""
    begun_s, ranks = time.perf_counter(), Ranks.current()
    with Interrupts(is_open=True), telling_others(ranks):
        work, options = as_workload(workload), make_options()
        work._check_by_samples("profile_throughput")
        with _bench(work, options, ranks, begun_s) as bench:
            measuring = Measuring(bench, options)
            pace = _loader_pace(bench, options)
            try:
                measuring.to_the_end()
                found = _diagnosed(bench, measuring, pace) if options.diagnose else ()
            except KeyboardInterrupt as stop:
                measuring.hand_over(stop, elapsed_s=time.perf_counter() - begun_s)
                raise
        profile = measuring.result(found, elapsed_s=time.perf_counter() - begun_s)
        texts = ranks.gather(profile.to_json() if ranks.is_main else "", doing="the profile")
        ranks.settle()
        return profile if ranks.is_main else ThroughputProfile.from_json(texts[0])


def _bench(work: Workload, options: ProfileOptions, ranks: Ranks, begun_s: float) -> Bench:
    """Where sizes are timed, within a budget that all ranks have agreed on."""
    device = device_to_run(work._held, options.device)
    settings = [options.knee().to_json(), options.target_batch_size, options.diagnose, options.loader is None]
    ranks.same(settings, doing="the settings")
    usable = usable_bytes(
        device, options.budget, options.budget_bytes, held_bytes=ram_bytes(work._held), says=ranks.is_main
    )
    budget_bytes = ranks.minimum(usable, doing="the budget")
    if not work.declared and ranks.is_main:
        warnings.warn(
            "the step's state is not declared, so timing changes the model and optimizer that it uses. "
            "Pass batchfit.Workload(step, state=[model, optimizer]) to have them restored afterwards.",
            stacklevel=4,  # the caller of `profile_throughput`
        )
    deadline_s = None if options.time_limit_s is None else begun_s + options.time_limit_s
    return Bench(work, device, ranks, budget_bytes=budget_bytes, deadline_s=deadline_s)


def _loader_pace(bench: Bench, options: ProfileOptions) -> LoaderPace | None:
    """The pace of the loader alone, where there is one.

    First, so that an error of the loader comes at once; with a small part of the time.
    """
    loader, limit_s = options.loader, options.time_limit_s
    if loader is None:
        return None
    patience_s = PATIENCE_S if limit_s is None else min(PATIENCE_S, limit_s / 5)
    return bench.briefly(lambda: loader_pace(loader, patience_s=patience_s))


def _diagnosed(bench: Bench, measuring: Measuring, pace: LoaderPace | None) -> tuple[Bottleneck, ...]:
    """What holds the recommended size back, from a few more steps, or without them where time is over."""
    loader, runs = measuring.options.loader, measuring.runs
    found = Diagnosis(bench, measuring.knee, runs, loader, pace, measuring.is_cut_off)
    diagnosis = diagnosed(found, measuring.points(), may_step=not bench.is_late())
    measuring.aside = diagnosis.notes
    return diagnosis.bottlenecks
