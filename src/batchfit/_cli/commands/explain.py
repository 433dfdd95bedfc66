"""`batchfit explain`: what holds the memory of a step, and what would change it.

Rules: one screen (`batchfit._charts.memory_page`), the same as `print(batchfit.explain_memory(...))` gives,
wider and in colour on a terminal; flags are keywords of `explain_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from batchfit._charts.memory_page import memory_lines
from batchfit._cli.exits import Code
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.traced import Delivery, RenderedAnswer, tell, wrong_flag
from batchfit._engine.allocator.gpus import card_named
from batchfit._units import parse_bytes

if TYPE_CHECKING:
    from batchfit.results import MemoryExplanation
    from batchfit.workload import Workload


class ExplainSettings(TypedDict):
    """The keywords of `explain_memory`, all of which are flags."""

    batch_size: int
    budget: str | None
    gpu: str | None
    what_if: bool


def explain_target(
    text: str,
    settings: ExplainSettings,
    *,
    delivery: Delivery,
    full_traceback: bool,
    arguments: Sequence[str] = (),
) -> Code:
    """Load a target and explain its memory at one size."""
    checked_flags(settings)
    delivery.check()

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._explain.explain import explain_memory

        progress.doing(f"tracing {text} at batch size {settings['batch_size']}, and what would change it")
        told = explain_memory(workload, **settings)
        return RenderedAnswer(
            json=told.to_json(),
            lines=lambda width, plain: memory_lines(told, width=width, plain=plain),
            draw=lambda path: _draw_file(told, path, title=text),
        )

    return tell(
        text,
        work,
        command="explain",
        flags=ExplainSettings.__annotations__,
        delivery=delivery,
        full_traceback=full_traceback,
        arguments=arguments,
    )


def checked_flags(settings: ExplainSettings) -> None:
    """Refuse wrong flags without torch, the target or a device."""
    try:
        if settings["batch_size"] < 1:
            raise ValueError(f"batch_size must be a positive integer, not {settings['batch_size']!r}")
        if settings["budget"] is not None:
            parse_bytes(settings["budget"])
        if settings["gpu"] is not None:
            card_named(settings["gpu"])
    except ValueError as error:
        raise wrong_flag(error, "explain") from None


def _draw_file(told: MemoryExplanation, path: Path, *, title: str) -> None:
    from batchfit._charts.figures import timeline_chart
    from batchfit._cli.png import draw_charts

    draw_charts([timeline_chart(told)], path, title=title)
