"""`batchfit explain`: what holds the memory of a step, and what would change it.

Rules: one screen (`batchfit._charts.memory_page`), the same as `print(batchfit.explain_memory(...))` gives,
wider and in colour on a terminal; flags are keywords of `explain_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._charts.memory_page import memory_lines
from batchfit._cli.exits import Code
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.traced import Delivery, RenderedAnswer, run_traced, wrong_flag
from batchfit._explain.pure.options import ExplainOptions
from batchfit._options import flag_names

if TYPE_CHECKING:
    from batchfit.results import MemoryExplanation
    from batchfit.workload import Workload


def explain_target(
    text: str,
    flags: Mapping[str, Any],
    *,
    delivery: Delivery,
    full_traceback: bool,
    arguments: Sequence[str] = (),
) -> Code:
    """Load a target and explain its memory at one size; `flags` are options of `explain_memory`."""
    try:
        options = ExplainOptions(**flags)
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "explain") from None
    delivery.check()

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._explain.explain import explain_with

        progress.doing(f"tracing {text} at batch size {options.batch_size}, and what would change it")
        explanation = explain_with(workload, options)
        return RenderedAnswer(
            json=explanation.to_json(),
            lines=lambda width, plain: memory_lines(explanation, width=width, plain=plain),
            draw=lambda path: _draw_file(explanation, path, title=text),
        )

    return run_traced(
        text,
        work,
        command="explain",
        flags=flag_names(ExplainOptions),
        delivery=delivery,
        full_traceback=full_traceback,
        arguments=arguments,
    )


def _draw_file(explanation: MemoryExplanation, path: Path, *, title: str) -> None:
    from batchfit._charts.figures import timeline_chart
    from batchfit._cli.png import draw_charts

    draw_charts([timeline_chart(explanation)], path, title=title)
