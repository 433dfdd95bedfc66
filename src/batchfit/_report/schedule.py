"""What the report says about a batch-size schedule: sizes and learning rates over the epochs, in stairs."""

from __future__ import annotations

from collections.abc import Iterator

from batchfit._charts.scale import real
from batchfit._charts.svg import Axis, Chart, Mark, Series, escaped
from batchfit._report.files import SchedulePhase, SchedulePlan
from batchfit._report.markup import HtmlTable, figure

_MOST_MARKS = 40  # phases that get a mark each; more would be a caterpillar


def schedule_sections(name: str, plan: SchedulePlan, number: int) -> Iterator[str]:
    """Stairs, the phases as numbers, and where the plan asks for more than fits, or than an epoch has."""
    yield f"<h2>{escaped(name)}Schedule</h2>"
    warnings = (*plan.more_than_fits, *plan.more_than_an_epoch)
    yield from (f'<p class="warn">{escaped(text)}</p>' for text in warnings)
    yield figure(size_chart(plan), _table(plan), name=f"schedule-{number}", note=plan.schedule)
    if has_rates(plan):
        yield figure(rate_chart(plan), _table(plan), name=f"rate-{number}")


def has_rates(plan: SchedulePlan) -> bool:
    """Whether the learning rate follows the batch size."""
    return any(phase.lr_factor != 1 for phase in plan.phases)


def size_chart(plan: SchedulePlan) -> Chart:
    """Batch size over the epochs."""
    marks = _stairs(plan, [float(phase.batch_size) for phase in plan.phases])
    return Chart(
        "Batch size over the epochs",
        f"{len(plan.phases)} phases, {plan.updates} updates in {plan.epochs} epochs.",
        Axis("epoch", whole=True),
        Axis("batch size", switched=True, whole=True),
        (Series("batch size", marks, "c0", line="stairs"),),
    )


def rate_chart(plan: SchedulePlan) -> Chart:
    """The learning rate that goes with it, or its factor where no rate was given."""
    known = all(phase.lr is not None for phase in plan.phases)
    rates = [phase.lr if known and phase.lr is not None else phase.lr_factor for phase in plan.phases]
    return Chart(
        "Learning rate over the epochs",
        "The learning rate follows the batch size.",
        Axis("epoch", whole=True),
        Axis("learning rate" if known else "factor of the learning rate"),
        (Series("learning rate", _stairs(plan, rates), "c1", line="stairs"),),
    )


def _stairs(plan: SchedulePlan, heights: list[float]) -> tuple[Mark, ...]:
    each = max(plan.samples, 1)
    at, marks = 0.0, []
    shape = "dot" if len(plan.phases) <= _MOST_MARKS else "none"
    for phase, height in zip(plan.phases, heights, strict=True):
        marks.append(Mark(at, real(height), _tip(phase), shape))  # type: ignore[arg-type]
        at += real(phase.samples) / each if phase.samples else phase.to_epoch - phase.from_epoch + 1
    return (*marks, Mark(at, real(heights[-1]), shape="none")) if marks else ()


def _tip(phase: SchedulePhase) -> str:
    rate = f", learning rate {phase.lr:.4g}" if phase.lr is not None else ""
    return f"epochs {_span(phase)}: batch size {phase.batch_size:,}, {phase.updates:,} updates{rate}"


def _span(phase: SchedulePhase) -> str:
    one = phase.from_epoch == phase.to_epoch
    return str(phase.from_epoch) if one else f"{phase.from_epoch}-{phase.to_epoch}"


def _table(plan: SchedulePlan) -> HtmlTable:
    rows = tuple(
        (
            _span(phase),
            f"{phase.from_step:,}",
            f"{phase.batch_size:,}",
            f"{phase.updates:,}",
            f"{phase.lr_factor:.4g}" if phase.lr is None else f"{phase.lr:.4g}",
        )
        for phase in plan.phases
    )
    rate = "LR" if any(phase.lr is not None for phase in plan.phases) else "LR factor"
    return HtmlTable(("epochs", "from step", "batch size", "updates", rate), rows)
