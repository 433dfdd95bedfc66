"""`batchfit profile`: throughput by batch size, the size to use, and the bottleneck.

Rules: flags are keywords of `profile_throughput`; each size is a line on stderr as it is measured; the answer
is one screen, the same as `print(profile)` gives, with a picture; after Ctrl-C it is that of what was timed.
Under torchrun all ranks step together, and rank 0 speaks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchfit._charts.throughput_page import format_rate, format_seconds, throughput_lines
from batchfit._cli.delivery import RenderedAnswer
from batchfit._cli.exits import Code, checked_options, interrupt_code, wrong_flag
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.target import TargetCall, run_on_target
from batchfit._profile.pure.options import ProfileOptions
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import ThroughputPoint, ThroughputProfile
    from batchfit.workload import Workload


def profile_target(call: TargetCall) -> Code:
    """Load a target and profile it; the flags are options of `profile_throughput`."""
    options = checked_options(ProfileOptions, call.flags, "profile")

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._engine.device.resolve import device_to_run
        from batchfit._profile.profile import profile_with

        try:
            device_to_run(workload._held, options.device)
        except ValueError as error:
            raise wrong_flag(error, "profile") from None
        progress.doing("timing the first size")
        watched = workload._watched(_watched(workload.step, progress))
        code = Code.FOUND
        try:
            profile = profile_with(watched, lambda: replace(options, on_point=shown_points(progress)))
        except KeyboardInterrupt as stop:
            if (timed := getattr(stop, "profile", None)) is None:
                raise
            profile, code = timed, interrupt_code(stop)
        return rendered(profile, code, title=call.target)

    return run_on_target(call, work, command="profile")


def rendered(profile: ThroughputProfile, code: Code, *, title: str) -> RenderedAnswer:
    """The answer, ready to go out."""
    return RenderedAnswer(
        json=profile.to_json(),
        lines=lambda width, plain: throughput_lines(profile, width=width, plain=plain, picture=True),
        draw=lambda path: _draw_file(profile, path, title=title),
        code=code,
    )


def point_line(point: ThroughputPoint) -> str:
    """`size 64: 35.2 ms a step, 1.82k samples/s, 9.31 GiB`."""
    memory = "" if point.peak_bytes is None else f", {format_bytes(point.peak_bytes)}"
    unsteady = "" if point.steady else ", not steady"
    rate = format_rate(point.samples_per_s)
    return f"size {point.size}: {format_seconds(point.step_s)} a step, {rate} samples/s{memory}{unsteady}"


def shown_points(progress: ProgressDisplay) -> Callable[[ThroughputPoint], None]:
    """What notes each point as it is measured."""

    def on_point(point: ThroughputPoint) -> None:
        progress.note(point_line(point))
        progress.doing("choosing the next size")

    return on_point


def _watched(step: Callable[[int], object], progress: ProgressDisplay) -> Callable[[int], object]:
    """The step, and what is timed now on the screen; shown once per size, since drawing takes time too."""
    last = 0

    def watched(batch_size: int) -> object:
        nonlocal last
        if batch_size != last:
            last = batch_size
            progress.doing(f"timing batch size {batch_size}")
        return step(batch_size)

    return watched


def _draw_file(profile: ThroughputProfile, path: Path, *, title: str) -> None:
    from batchfit._cli.png import draw_charts
    from batchfit._report.files import Source
    from batchfit._report.sections import charts

    draw_charts(charts([Source(profile)]), path, title=title)
