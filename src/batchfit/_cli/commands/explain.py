"""`batchfit explain`: the memory breakdown of a step, and what would change it.

Rules: one screen (`batchfit._charts.memory_page`), the same as `print(batchfit.explain_memory(...))` gives,
wider and in colour on a terminal; flags are keywords of `explain_memory`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from batchfit._charts.memory_page import memory_lines
from batchfit._cli.delivery import RenderedAnswer
from batchfit._cli.exits import Code, checked_options
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.target import TargetCall, run_on_target
from batchfit._explain.pure.options import ExplainOptions

if TYPE_CHECKING:
    from batchfit.results import MemoryExplanation
    from batchfit.workload import Workload


def explain_target(call: TargetCall) -> Code:
    """Load a target and explain its memory at one size; the flags are options of `explain_memory`."""
    options = checked_options(ExplainOptions, call.flags, "explain")

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._explain.explain import explain_with

        progress.doing(f"tracing {call.target} at batch size {options.batch_size}, and what would change it")
        return rendered(explain_with(workload, options), call.target)

    return run_on_target(call, work, command="explain")


def rendered(explanation: MemoryExplanation, text: str) -> RenderedAnswer:
    """The explanation, ready to go out; `text` is what was explained."""
    return RenderedAnswer(
        json=explanation.to_json(),
        lines=lambda width, plain: memory_lines(explanation, width=width, plain=plain),
        draw=lambda path: _draw_file(explanation, path, title=text),
    )


def _draw_file(explanation: MemoryExplanation, path: Path, *, title: str) -> None:
    from batchfit._charts.figures import timeline_chart
    from batchfit._cli.png import draw_charts

    draw_charts([timeline_chart(explanation)], path, title=title)
