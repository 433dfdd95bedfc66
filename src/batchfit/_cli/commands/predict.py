"""`batchfit predict`: the largest batch for cards and budgets, and memory drawn against the size.

Rules: each card is traced with its own choice of kernels, so each `--gpu` is a call of `predict_batch_size`;
a card on which nothing fits is a row of the table, and an error where no other card has more; how sure the
answer is and what was not seen is said beside it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from batchfit._charts.memory_page import fact, operation_name
from batchfit._charts.text import Level, Line, curves
from batchfit._cli.commands.find_answer import dataset_note, how_to_use
from batchfit._cli.exits import Code, CommandFailed
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.traced import Delivery, RenderedAnswer, tell, wrong_flag
from batchfit._engine.allocator.gpus import GPUS, card_named
from batchfit._units import format_bytes, parse_bytes
from batchfit.errors import NothingFitsError

if TYPE_CHECKING:
    from batchfit.results import Prediction
    from batchfit.workload import Workload

GIB, MIB = 2**30, 2**20
_HEIGHT = 11  # rows of the picture: table, picture and facts fit on one screen


class PredictSettings(TypedDict):
    """The keywords of `predict_batch_size` that are flags; `budget` and `gpu` may be given several times."""

    budget: list[str] | None
    gpu: list[str] | None
    max_size: int | None
    margin: float | None
    calibrate: bool | None
    expandable_segments: bool | None


def default_settings() -> PredictSettings:
    """What `predict_batch_size` does when it is told nothing."""
    from batchfit._predict.predict import predict_batch_size

    parameters = inspect.signature(predict_batch_size).parameters
    return cast(PredictSettings, {name: parameters[name].default for name in PredictSettings.__annotations__})


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a card, a budget, and what was predicted; size 0 where nothing fits."""

    card: str
    measured: bool
    budget_bytes: int
    batch_size: int
    peak_bytes: int
    reason: str = ""  # why no larger size, where much of the budget is left


@dataclass(frozen=True, slots=True)
class Predicted:
    """All cards' answers."""

    rows: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    failures: tuple[NothingFitsError, ...] = ()
    card_named: bool = True


def predict_target(
    text: str,
    settings: PredictSettings,
    *,
    delivery: Delivery,
    full_traceback: bool,
    arguments: Sequence[str] = (),
) -> Code:
    """Load a target and predict its largest batch for each card and budget."""
    cards = checked_flags(settings)
    delivery.check()

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        found = predicted(workload, settings, cards, progress, text)
        return RenderedAnswer(
            json=as_json(found),
            lines=lambda width, plain: prediction_lines(
                found, next_command=next_command(found, text), width=width, plain=plain
            ),
            draw=lambda path: _draw_file(found, path, title=text),
            code=Code.FOUND if any(row.batch_size for row in found.rows) else Code.NOTHING_FITS,
        )

    return tell(
        text,
        work,
        command="predict",
        flags=PredictSettings.__annotations__,
        delivery=delivery,
        full_traceback=full_traceback,
        arguments=arguments,
    )


def checked_flags(settings: PredictSettings) -> list[str | None]:
    """The cards to predict for; None stands for the GPU that is here. Wrong flags need no torch."""
    try:
        for budget in settings["budget"] or ():
            parse_bytes(budget)
        chosen: dict[str, str] = {}  # each GPU once, as it was written: predict says what the name left open
        for name in settings["gpu"] or ():
            chosen.setdefault(card_named(name).name, name)
        cards = list(chosen.values())
        size, margin = settings["max_size"], settings["margin"]
        if size is not None and size < 1:
            raise ValueError(f"max_size must be a positive integer or None, not {size!r}")
        if margin is not None and not 0 <= margin < 1:
            raise ValueError(f"margin must be at least 0 and below 1, not {margin!r}")
        if cards and settings["calibrate"]:
            raise ValueError("calibrate must be left out with gpu: only the GPU that is here can be run")
    except ValueError as error:
        raise wrong_flag(error, "predict") from None
    return [*cards] or [None]


def predicted(
    workload: Workload,
    settings: PredictSettings,
    cards: Sequence[str | None],
    progress: ProgressDisplay,
    text: str,
) -> Predicted:
    """One prediction for each card."""
    from batchfit._engine.distributed.ranks import join_launched
    from batchfit._predict.predict import predict_batch_size

    join_launched()
    rows: list[Row] = []
    predictions: list[Prediction] = []
    failures: list[NothingFitsError] = []
    for card in cards:
        progress.doing(f"tracing {text}" + (f" for {card}" if card else ""))
        try:
            one = predict_batch_size(
                workload,
                budget=settings["budget"],
                gpu=card,
                max_size=settings["max_size"],
                margin=settings["margin"],
                calibrate=settings["calibrate"],
                expandable_segments=settings["expandable_segments"],
            )
        except NothingFitsError as error:
            if len(cards) == 1:
                raise
            failures.append(error)
            known = GPUS[error.device]
            rows.append(Row(error.device, known.measured, error.budget_bytes, 0, error.peak_bytes or 0))
            continue
        predictions.append(one)
        rows += [
            Row(one.card, one.card_measured, each.budget_bytes, each.batch_size, each.peak_bytes, each.reason)
            for each in one.answers
        ]
    if not predictions:
        raise CommandFailed(Code.NOTHING_FITS, "; ".join(map(str, failures)))
    return Predicted(tuple(rows), tuple(predictions), tuple(failures), card_named=cards[0] is not None)


def as_json(found: Predicted) -> str:
    """One card: its prediction. Several: a list with one for each, and those on which nothing fits."""
    if len(found.predictions) == 1 and not found.failures:
        return found.predictions[0].to_json()
    told: list[object] = [json.loads(one.to_json()) for one in found.predictions]
    told += [
        {
            "kind": "nothing_fits",
            "card": one.device,
            "budget_bytes": one.budget_bytes,
            "peak_bytes": one.peak_bytes,
            "message": str(one),
        }
        for one in found.failures
    ]
    return json.dumps(told, indent=2)


def prediction_lines(found: Predicted, *, next_command: str, width: int, plain: bool) -> list[Line]:
    """The answer, the table, the picture, and what it rests on."""
    return [
        [(_headline(found), "good")],
        [],
        *_table(found.rows),
        [],
        *_picture(found, width, plain=plain),
        [],
        *_facts(found, next_command, width),
    ]


def _headline(found: Predicted) -> str:
    first = found.rows[0]
    if len(found.rows) > 1:
        return "predicted batch sizes"
    return (
        f"batch size {first.batch_size} is predicted to fit in {format_bytes(first.budget_bytes)}, "
        f"with a peak of {format_bytes(first.peak_bytes)}"
    )


def _table(rows: Sequence[Row]) -> list[Line]:
    widest = max(len(row.card) for row in rows)
    head = f"  {'card':<{max(widest, 4)}}  {'budget':>9}  {'batch size':>10}  {'peak':>9}  {'of budget':>9}"
    lines: list[Line] = [[(head, "head")]]
    for row in rows:
        size = str(row.batch_size) if row.batch_size else "none"
        share = f"{row.peak_bytes / row.budget_bytes:.1%}" if row.peak_bytes else "-"
        peak = format_bytes(row.peak_bytes) if row.peak_bytes else "-"
        lines.append(
            [
                (f"  {row.card:<{max(widest, 4)}}  {format_bytes(row.budget_bytes):>9}  ", ""),
                (f"{size:>10}", "good" if row.batch_size else "warn"),
                (f"  {peak:>9}  ", ""),
                (f"{share:>9}", "dim"),
            ]
        )
    return lines


def _picture(found: Predicted, width: int, *, plain: bool) -> list[Line]:
    """Memory against size, with a line for each budget and a mark at each answer."""
    rows = found.rows
    unit, name = (GIB, "GiB") if max(row.budget_bytes for row in rows) >= GIB else (MIB, "MiB")
    several = len({row.card for row in rows}) > 1
    levels = [
        Level(
            row.budget_bytes / unit,
            f"{row.card if several else format_bytes(row.budget_bytes)}: {row.batch_size or 'none'}",
            (row.batch_size, row.peak_bytes / unit) if row.batch_size else None,
        )
        for row in rows
    ]
    end = max(row.batch_size for row in rows) * 1.2
    lines = [
        [(point.size, point.peak_bytes / unit) for point in one.curve if point.size <= end or point.size <= 2]
        for one in found.predictions
    ]
    return curves(
        lines, levels, width=min(width, 100), height=_HEIGHT, x_name="batch size", y_name=name, plain=plain
    )


def _facts(found: Predicted, next_command: str, width: int) -> list[Line]:
    """What the answer rests on, and how to use it."""
    first = found.predictions[0]
    doing = f", at {operation_name(first.peak_operation)}" if first.peak_operation else ""
    facts = [("peak", f"in {first.peak_phase}{doing}"), ("confidence", _confidence(found))]
    facts += [("no larger", _of_row(row, found) + row.reason) for row in found.rows if row.reason]
    seen: dict[str, None] = dict.fromkeys(note for one in found.predictions for note in one.unseen)
    facts += [("not seen", note) for note in seen]
    sizes = ", ".join(map(str, first.trace_sizes))
    elapsed_s = sum(one.elapsed_s for one in found.predictions)
    facts.append(("traced", f"at sizes {sizes} in {elapsed_s:.1f} s"))
    largest = max(row.batch_size for row in found.rows)
    facts += (how_to_use if len(found.rows) == 1 else dataset_note)(largest, first.samples)
    if next_command:
        facts.append(("next", next_command))
    return [line for label, told in facts for line in fact(label, told, width)]


def _of_row(row: Row, found: Predicted) -> str:
    """Which row is meant, where there are several: `h100, 24.0 GiB: `."""
    if len(found.rows) == 1:
        return ""
    return f"{row.card}, {format_bytes(row.budget_bytes)}: "


def next_command(found: Predicted, text: str) -> str:
    """The command that explains the first answer, about the same memory; none where nothing fits."""
    row = next((row for row in found.rows if row.batch_size), None)
    if row is None:
        return ""
    memory = ""  # the GPU that is here
    if found.predictions[0].based_on == "no GPU":
        whole = row.budget_bytes == GPUS[row.card].usable_bytes
        memory = (
            f" --gpu {row.card}" if whole else f" --budget {format_bytes(row.budget_bytes).replace(' ', '')}"
        )
    return f"batchfit explain {text} --batch-size {row.batch_size}{memory}"


def _confidence(found: Predicted) -> str:
    """How the numbers came about, and what was left free."""
    first = found.predictions[0]
    how = {
        "no GPU": "no GPU used",
        "GPU, not run": "this GPU's kernels, nothing was run",
        "calibrated": f"calibrated by {len(first.trials)} small runs",
    }[first.based_on]
    share = f"{first.margin:.1%} of each budget left free" if first.margin else "no margin"
    off = f"; the check was {first.check:.2%} off" if first.check >= 0.00005 else ""
    unnamed = first.based_on == "no GPU" and not found.card_named
    kernels = f" (kernels as on an {first.card})" if unnamed else ""
    return f"{how}{kernels}; {share}{off}"


def _draw_file(found: Predicted, path: Path, *, title: str) -> None:
    from batchfit._cli.png import draw_prediction

    draw_prediction(found.predictions, found.rows, path, title=title)


def card_lines() -> list[Line]:
    """The cards that `--gpu` knows."""
    wide = max(map(len, GPUS))
    lines: list[Line] = [[(f"{'card':<{wide}}  {'usable':>9}  capability", "head")]]
    for card in GPUS.values():
        major, minor = card.capability
        lines.append(
            [
                (f"{card.name:<{wide}}  {format_bytes(card.usable_bytes):>9}  {f'{major}.{minor}':>10}", ""),
                (
                    f"  {'nominal figure, derived' if card.source == 'nominal' else card.source}",
                    "good" if card.measured else "dim",
                ),
            ]
        )
    return lines
