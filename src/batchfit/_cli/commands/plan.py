"""`batchfit plan`: which settings of a model or a workload fit on which GPU.

Rules: a target with a colon (`train.py:make`) is a workload; anything else is a model's name or
configuration. The flags are options of `plan`; one screen (`batchfit._charts.plan_page`), as
`print(batchfit.plan(...))` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from batchfit import errors
from batchfit._charts.plan_page import microbatch, plan_lines
from batchfit._charts.text_charts import Line
from batchfit._cli.delivery import RenderedAnswer, run_answer
from batchfit._cli.exits import Code, CommandFailed, checked_options
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.target import TargetCall, run_on_target
from batchfit._plan.pure.options import PlanOptions
from batchfit._plan.pure.settings import TRAINERS
from batchfit._plan.pure.shapes import model_lines as known_models

if TYPE_CHECKING:
    from batchfit.results import Plan
    from batchfit.workload import Workload


def plan_target(call: TargetCall, paste: str | None, *, apply: bool = False) -> Code:
    """Plan a model by its name, or load a target and plan that."""
    options = checked_options(PlanOptions, call.flags, "plan")
    if paste is not None and paste not in TRAINERS:
        raise CommandFailed(Code.USAGE, f"--paste must be one of {', '.join(TRAINERS)}, not {paste!r}")
    if ":" not in call.target:
        if apply:
            raise CommandFailed(Code.USAGE, "--apply needs a program to run: a workload (file.py:name)")
        return _plan_model(call, options, paste)

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._plan.plan import plan_with

        if not apply:
            return _rendered(plan_with(workload, options, _reporting(progress)), paste)
        from batchfit._plan.apply import OtherGpuError, applied, check_machine

        try:
            check_machine(options)
        except OtherGpuError as error:
            raise CommandFailed(Code.USAGE, str(error)) from None
        planned = plan_with(workload, options, _reporting(progress))
        progress.doing("running the step as it is")
        return _rendered(applied(workload, planned, options), paste)

    return run_on_target(call, work, command="plan")


def _plan_model(call: TargetCall, options: PlanOptions, paste: str | None) -> Code:
    def answer(progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._plan.plan import plan_with

        try:
            return _rendered(plan_with(call.target, options, _reporting(progress)), paste)
        except errors.TargetError as error:
            raise CommandFailed(Code.USAGE, str(error)) from None

    call.delivery.check()
    return run_answer(call.delivery, answer)


def _reporting(progress: ProgressDisplay) -> Callable[[str, int, int], None]:
    def report(name: str, done: int, of: int) -> None:
        progress.doing(f"tracing {name} ({done + 1} of {of})")

    return report


def _rendered(found: Plan, paste: str | None) -> RenderedAnswer:
    return RenderedAnswer(
        json=found.to_json(),
        lines=lambda width, plain: [*plan_lines(found, width=width, plain=plain), *_to_paste(found, paste)],
        page=lambda: _page(found),
        code=Code.FOUND if _fits(found) else Code.NOTHING_FITS,
    )


def _fits(found: Plan) -> bool:
    return any(cell.batch_size for row in found.rows for cell in row.cells)


def _to_paste(found: Plan, paste: str | None) -> list[Line]:
    if paste is None:
        return []
    from batchfit._plan.pure.paste import pasted

    lines: list[Line] = []
    for column in found.columns:
        row = found.best(column.title)
        if row is None:
            lines += [[], [(f"# {column.title}: no row is recommended, so there is nothing to paste", "dim")]]
            continue
        cell = row.cells[found.columns.index(column)]
        cell = cell.model_copy(update={"batch_size": microbatch(found, column, cell)})
        lines += [[], [(f"# {column.title}: {row.setting}", "head")]]
        lines += [[(line, "")] for line in pasted(row, cell, paste, seq_len=found.seq_len).splitlines()]
    return lines


def _page(found: Plan) -> str:
    from batchfit._report.files import Source
    from batchfit._report.page import page

    return page([Source(found)])


def model_lines() -> list[Line]:
    """The models that are known by their names."""
    return [[(line, "")] for line in known_models()]
