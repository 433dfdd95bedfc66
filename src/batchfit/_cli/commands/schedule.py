"""`batchfit schedule show`: what a schedule will do, before it is trained with.

Rules: updates are counted as the loader makes them, not by a formula; a plan that asks for more than fits is
shown with the way out (microbatches). Nothing is trained, and torch is not loaded.
"""

from __future__ import annotations

import json as json_text
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._charts.text_charts import Line, bar
from batchfit._cli.commands.schedule_flags import ShowSettings
from batchfit._cli.commands.schedule_limit import ScheduleLimit
from batchfit._cli.delivery import Delivery, RenderedAnswer, deliver
from batchfit._cli.exits import Code, CommandFailed, wrong_flag
from batchfit._engine.sizing.pure.sizes import balanced
from batchfit._schedule.pure.bound_plan import BoundPlan
from batchfit._schedule.pure.lr_rules import LRRule
from batchfit._schedule.pure.phases import Constant, Foreseen, Phase, phases, updates_of
from batchfit._units import format_bytes, parse_count

if TYPE_CHECKING:
    from batchfit.schedules import AnyConfig

MOST_ROWS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSchedule:
    """A schedule followed to its end."""

    config: str
    initial: int
    samples: int
    epochs: int
    phases: tuple[Phase, ...]
    factors: tuple[float, ...]
    lr: float | None
    updates: int
    constant_updates: int
    over: tuple[str, ...] = field(default=())  # where it asks for more than fits, and what to do
    beyond: tuple[str, ...] = field(default=())  # where it asks for more than an epoch has
    world_size: int = 1
    room: ScheduleLimit | None = None

    def peak_bytes(self, phase: Phase) -> int | None:
        """What a rank's part of a batch of this phase takes at once, where that is known."""
        return None if self.room is None else self.room.peak_bytes_at(-(-phase.size // self.world_size))

    @property
    def saved(self) -> float:
        """The share of updates that the constant initial size would make more."""
        return 1 - self.updates / self.constant_updates if self.constant_updates else 0.0

    def to_json(self) -> str:
        """All of it as JSON text."""
        rows = [
            {
                "from_epoch": phase.from_epoch,
                "to_epoch": phase.to_epoch,
                "from_step": phase.begins.step,
                "batch_size": phase.size,
                "updates": phase.updates,
                "samples": phase.samples,
                "short_batches": phase.short_batches,
                "lr_factor": factor,
                **({} if self.lr is None else {"lr": self.lr * factor}),
                **({} if (peak := self.peak_bytes(phase)) is None else {"peak_bytes": peak}),
            }
            for phase, factor in zip(self.phases, self.factors, strict=True)
        ]
        whole: dict[str, Any] = {
            "kind": "schedule",
            "schema_version": 1,
            "schedule": self.config,
            "initial_batch_size": self.initial,
            "samples": self.samples,
            "epochs": self.epochs,
            "phases": rows,
            "updates": self.updates,
            "updates_at_constant_size": self.constant_updates,
            "updates_saved": self.saved,
            "more_than_fits": list(self.over),
            "more_than_an_epoch": list(self.beyond),
        }
        if self.room is not None:
            whole |= {"fits": self.room.largest, "budget_bytes": self.room.budget_bytes}
        return json_text.dumps(whole, indent=2)


def show_schedule(config: str, settings: ShowSettings, *, delivery: Delivery) -> Code:
    """Load a schedule, follow it to its end, and show it."""
    delivery.check()
    if sys.path[:1] != [str(Path.cwd())]:
        sys.path.insert(0, str(Path.cwd()))  # where a schedule's own function may be
    try:
        shown = followed(config, settings)
    except CommandFailed:
        raise
    except ValueError as error:
        if getattr(error, "__notes__", None):  # of the schedule's function
            raise CommandFailed(Code.RAISED, _raised(error)) from None
        raise wrong_flag(error, "schedule show") from None
    except Exception as error:  # noqa: BLE001  the schedule's function may raise anything
        raise CommandFailed(Code.RAISED, _raised(error)) from None
    answer = RenderedAnswer(
        json=shown.to_json(),
        lines=lambda width, plain: schedule_lines(shown, width=width, plain=plain),
        draw=lambda path: _draw_file(shown, path),
    )
    deliver(answer, sys.stdout, delivery)
    return answer.code


def followed(config: str, settings: ShowSettings) -> FollowedSchedule:
    """The phases of a schedule, and what a constant size would do."""
    from batchfit.schedules import load_schedule

    for name in ("epochs", "world_size", "initial", "microbatch_size", "tokens_per_sample"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be a positive integer, not {value!r}")
    if settings.lr is not None and not 0 < settings.lr < math.inf:
        raise ValueError(f"lr must be more than 0, not {settings.lr!r}")
    samples = parse_count(settings.samples, name="samples", at_least=max(1, settings.world_size))
    rule = LRRule.parse(settings.lr_rule, name="lr_rule")
    room = None if settings.fits is None else ScheduleLimit.of(settings.fits)
    try:
        schedule = load_schedule(config)
    except ValueError as error:
        # Of the schedule and not of a flag: named by its file, which the message about a field does not.
        file = f"{config}: " if Path(config).is_file() and config not in str(error) else ""
        raise CommandFailed(Code.USAGE, f"{file}{error}") from None
    assert schedule is not None
    initial, plan = bound(schedule, settings)
    how: dict[str, Any] = {
        "samples": samples,
        "epochs": settings.epochs,
        "drop_last": settings.drop_last,
        "world_size": settings.world_size,
    }
    found = phases(plan, **how)
    if updates_of(found) == 0:
        raise ValueError(
            f"samples must be at least a batch of {found[0].size} with --drop-last, not {samples}: there "
            "would be no update at all"
        )
    return FollowedSchedule(
        config=config,
        initial=initial,
        samples=samples,
        epochs=settings.epochs,
        phases=found,
        factors=tuple(rule.factor(phase.size / initial) for phase in found),
        lr=settings.lr,
        updates=updates_of(found),
        constant_updates=updates_of(phases(BoundPlan(Constant(), initial), **how)),
        over=over_what_fits(found, None if room is None else room.largest, settings.world_size),
        beyond=beyond_an_epoch(found, samples),
        world_size=settings.world_size,
        room=room,
    )


def bound(schedule: AnyConfig, settings: ShowSettings) -> tuple[int, Foreseen]:
    """The initial size, and the plan from there, as `BatchSizeScheduler` would make it."""
    from batchfit._schedule.pure.run_plan import multiple, plan_of, starts_by_itself

    if schedule.type == "noise":
        raise ValueError(
            "config must be a schedule that can be foreseen, not one by noise: it decides in training"
        )
    if settings.initial is None and not starts_by_itself(schedule):
        raise ValueError("initial must be given, such as --initial 256, not None")
    ranks = settings.world_size
    plan = plan_of(
        schedule,
        settings.initial,
        world_size=ranks,
        multiple_of=multiple(world_size=ranks, ranks=ranks, microbatch_size=settings.microbatch_size),
        tokens_per_sample=settings.tokens_per_sample,
    )
    return plan.initial_batch_size, plan


def over_what_fits(found: Sequence[Phase], fits: int | None, world_size: int) -> tuple[str, ...]:
    """Where a rank's part is more than fits, and the microbatches that do."""
    warnings: dict[int, str] = {}
    for phase in found:
        local = -(-phase.size // world_size)
        if fits is None or local <= fits or phase.size in warnings:
            continue
        sizes = balanced(local, fits)
        part = "" if world_size == 1 else f" ({local} on a rank)"
        warnings[phase.size] = (
            f"from epoch {phase.from_epoch} on {phase.size}{part} is more than the {fits} that fit: run it "
            f"as {len(sizes)} microbatches of {sizes[0]} (batchfit.Microbatcher), with no more samples/s"
        )
    return tuple(warnings.values())


def beyond_an_epoch(found: Sequence[Phase], samples: int) -> tuple[str, ...]:
    """Where no batch of an epoch is as large as the schedule says; each size once."""
    warnings: dict[int, str] = {}
    for phase in found:
        if phase.size <= samples or phase.size in warnings:
            continue
        what = f"from epoch {phase.from_epoch} on {phase.size} is more than the {samples} samples of an epoch"
        warnings[phase.size] = (
            f"{what}, and --drop-last leaves them out: nothing is trained. Set max_batch_size"
            if phase.updates == 0
            else f"{what}, which are one batch, with the learning rate of {phase.size}. Set max_batch_size"
        )
    return tuple(warnings.values())


def schedule_lines(shown: FollowedSchedule, *, width: int, plain: bool) -> list[Line]:
    """The plan as a table: phases, then what they add up to."""
    rows = list(zip(shown.phases, shown.factors, strict=True))
    left_out = max(0, len(rows) - MOST_ROWS)
    if left_out:
        rows = [*rows[: MOST_ROWS - 6], *rows[-6:]]
    has_lr = shown.lr is not None or any(factor != 1 for factor in shown.factors)
    heads = ["epochs", "from step", "batch size", "updates"]
    heads += ["LR" if shown.lr else "LR factor"] if has_lr else []
    has_memory = any(shown.peak_bytes(phase) is not None for phase, _ in rows)
    heads += ["memory", "of budget"] if has_memory else []
    cells = [_cells(phase, factor, shown.lr, has_lr) for phase, factor in rows]
    if has_memory:
        cells = [[*row, *_memory(shown, phase)] for row, (phase, _) in zip(cells, rows, strict=True)]
    widths = [max(len(row[i]) for row in (heads, *cells)) for i in range(len(heads))]
    top = max((phase.size for phase in shown.phases), default=1)
    room = max(8, min(40, width - sum(widths) - 2 * len(widths) - 4))
    title = "  ".join(head.rjust(w) for head, w in zip(heads, widths, strict=True))
    lines: list[Line] = [[("  " + title, "head")]]
    for number, ((phase, _), row) in enumerate(zip(rows, cells, strict=True)):
        if left_out and number == MOST_ROWS - 6:
            lines.append([(f"  ... {left_out} more; every= in the schedule makes fewer sizes", "dim")])
        text = "  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
        lines.append([(text + "  ", ""), (bar(phase.size / top, room, plain=plain), "curve")])
    saved = f"{abs(shown.saved):.1%} {'fewer' if shown.saved >= 0 else 'more'}"
    total = f"{shown.updates:,} updates in {shown.epochs} epochs of {shown.samples:,} samples"
    against = f"{saved} than with a constant {shown.initial} ({shown.constant_updates:,})"
    lines += [[], [(total, "strong")], [(f"  {against}", "")]]
    short = sum(phase.short_batches for phase in shown.phases)
    if short:
        lines.append([(f"  {short:,} of them with a short last batch of an epoch", "dim")])
    for text in (*shown.over, *shown.beyond):
        parts = textwrap.wrap(text, width - 4, break_on_hyphens=False)
        lines += [[(("  " if n == 0 else "    ") + part, "warn")] for n, part in enumerate(parts)]
    return lines


def _cells(phase: Phase, factor: float, lr: float | None, has_lr: bool) -> list[str]:
    first, last = phase.from_epoch, phase.to_epoch
    span = f"{first}-{last}" if last > first else str(first)
    rate = [f"{factor if lr is None else lr * factor:.4g}"] if has_lr else []
    return [span, f"{phase.begins.step:,}", f"{phase.size:,}", f"{phase.updates:,}", *rate]


def _memory(shown: FollowedSchedule, phase: Phase) -> list[str]:
    """A batch of this phase, uncut, and its share of the budget."""
    peak, budget = shown.peak_bytes(phase), shown.room and shown.room.budget_bytes
    if peak is None:
        return ["-", "-"]
    return [format_bytes(peak), f"{peak / budget:.0%}" if budget else "-"]


def _raised(error: BaseException) -> str:
    notes = "; ".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def _draw_file(shown: FollowedSchedule, path: Path) -> None:
    from batchfit._charts.svg import Rule
    from batchfit._cli.png import draw_charts
    from batchfit._report.files import SchedulePlan, Source
    from batchfit._report.sections import charts

    sizes, *rates = charts([Source(SchedulePlan.from_json(shown.to_json()))])
    if shown.room is not None:
        fits = shown.room.largest * shown.world_size
        sizes = replace(sizes, rules=(Rule(fits, f"{fits:,} fit at once"),))
    title = f"{shown.config}: {shown.updates:,} updates, {shown.saved:.1%} fewer than at {shown.initial}"
    draw_charts([sizes, *rates], path, title=title)
