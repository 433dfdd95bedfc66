"""`batchfit predict`: the largest batch for GPUs and budgets, and memory drawn against the size.

Rules: each GPU is traced with its own choice of kernels, so each `--gpu` is a call of `predict_batch_size`;
a GPU on which nothing fits is a row of the table, and an error where no other GPU has an answer; how sure the
answer is and caveats are said beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchfit._charts.memory_page import fact, operation_name
from batchfit._charts.text_charts import Level, Line, curves
from batchfit._cli.commands.find_answer import dataset_note, how_to_use
from batchfit._cli.delivery import RenderedAnswer
from batchfit._cli.exits import Code, CommandFailed, wrong_flag
from batchfit._cli.progress import ProgressDisplay
from batchfit._cli.target import TargetCall, run_on_target
from batchfit._engine.allocator.gpus import GPUS
from batchfit._predict.pure.options import PredictOptions
from batchfit._units import format_bytes
from batchfit.errors import NothingFitsError

if TYPE_CHECKING:
    from batchfit.results import Prediction
    from batchfit.workload import Workload

GIB, MIB = 2**30, 2**20
_HEIGHT = 11  # rows of the picture: table, picture and facts fit on one screen


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a GPU, a budget, and what was predicted; size 0 where nothing fits."""

    card: str
    measured: bool
    budget_bytes: int
    batch_size: int
    peak_bytes: int
    reason: str = ""  # why no larger size, where much of the budget is left


@dataclass(frozen=True, slots=True)
class Predicted:
    """The answers of all GPUs."""

    rows: tuple[Row, ...]
    predictions: tuple[Prediction, ...]
    failures: tuple[NothingFitsError, ...] = ()
    gpu_named: bool = True


def predict_target(call: TargetCall) -> Code:
    """Load a target and predict its largest batch for each GPU and budget.

    The flags are options of `predict_batch_size`; `gpu` is a list.
    """
    wanted, text = options_of(call.flags), call.target

    def work(workload: Workload, progress: ProgressDisplay) -> RenderedAnswer:
        from batchfit._engine.distributed.ranks import join_launched

        join_launched()
        found = predicted(partial(predict_here, workload), wanted, progress, text)
        return rendered(found, text, next_command(found, f"batchfit explain {text}"))

    return run_on_target(call, work, command="predict")


def rendered(
    found: Predicted, text: str, next_command: str, *, use: Callable[[int], str] | None = None
) -> RenderedAnswer:
    """The answer of all GPUs, ready to go out; `text` is what was predicted, `use` how a size is used."""
    return RenderedAnswer(
        json=as_json(found),
        lines=lambda width, plain: prediction_lines(
            found, next_command=next_command, use=use, width=width, plain=plain
        ),
        draw=lambda path: _draw_file(found, path, title=text),
        code=Code.FOUND if any(row.batch_size for row in found.rows) else Code.NOTHING_FITS,
    )


def options_of(flags: Mapping[str, Any]) -> list[PredictOptions]:
    """The options for each GPU, once each; wrong flags need no torch."""
    gpus: list[str] = flags.get("gpu") or []
    shared = {name: value for name, value in flags.items() if name != "gpu"}
    try:
        chosen: dict[str, PredictOptions] = {}  # as it was written: predict says what the name left open
        for gpu in gpus:
            options = PredictOptions(**shared, gpu=gpu)
            assert options.target is not None
            chosen.setdefault(options.target.name, options)
        if not gpus:
            return [PredictOptions(**shared)]
        if shared.get("calibrate"):
            raise ValueError("calibrate must be left out with gpu: only the GPU that is here can be run")
    except (ValueError, TypeError) as error:
        raise wrong_flag(error, "predict") from None
    return list(chosen.values())


def predicted(
    predict: Callable[[PredictOptions], Prediction],
    wanted: Sequence[PredictOptions],
    progress: ProgressDisplay,
    text: str,
) -> Predicted:
    """One prediction for each GPU."""
    rows: list[Row] = []
    predictions: list[Prediction] = []
    failures: list[NothingFitsError] = []
    for options in wanted:
        progress.doing(f"tracing {text}" + (f" for {options.gpu}" if options.gpu else ""))
        try:
            one = predict(options)
        except NothingFitsError as error:
            if len(wanted) == 1:
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
    return Predicted(tuple(rows), tuple(predictions), tuple(failures), gpu_named=wanted[0].gpu is not None)


def predict_here(workload: Workload, options: PredictOptions) -> Prediction:
    """Predict for one GPU, in this process."""
    from batchfit._predict.predict import predict_with

    return predict_with(workload, lambda: options)


def as_json(found: Predicted) -> str:
    """One GPU: its prediction. Several: a list with one for each, and those on which nothing fits."""
    if len(found.predictions) == 1 and not found.failures:
        return found.predictions[0].to_json()
    answers: list[object] = [json.loads(one.to_json()) for one in found.predictions]
    answers += [
        {
            "kind": "nothing_fits",
            "card": one.device,
            "budget_bytes": one.budget_bytes,
            "peak_bytes": one.peak_bytes,
            "message": str(one),
        }
        for one in found.failures
    ]
    return json.dumps(answers, indent=2)


def prediction_lines(
    found: Predicted,
    *,
    next_command: str,
    width: int,
    plain: bool,
    use: Callable[[int], str] | None = None,
) -> list[Line]:
    """The answer, the table, the picture, and the facts behind it."""
    return [
        [(_headline(found), "good")],
        [],
        *_table(found),
        [],
        *_picture(found, width, plain=plain),
        [],
        *_facts(found, next_command, use, width),
    ]


def _headline(found: Predicted) -> str:
    first = found.rows[0]
    if len(found.rows) > 1:
        return "predicted batch sizes"
    each = " per GPU" if found.predictions[0].ranks > 1 else ""
    return (
        f"batch size {first.batch_size}{each} is predicted to fit in {format_bytes(first.budget_bytes)}, "
        f"with a peak of {format_bytes(first.peak_bytes)}"
    )


def _is_assumed(found: Predicted) -> bool:
    """Nobody named a GPU, and none is here: a budget, with the kernels of some GPU."""
    return found.predictions[0].based_on == "no GPU" and not found.gpu_named


def _table(found: Predicted) -> list[Line]:
    rows = found.rows
    names = [f"like {row.card}" if _is_assumed(found) else row.card for row in rows]
    widest = max(len(name) for name in names)
    head = f"  {'GPU':<{max(widest, 4)}}  {'budget':>9}  {'batch size':>10}  {'peak':>9}  {'of budget':>9}"
    lines: list[Line] = [[(head, "head")]]
    for name, row in zip(names, rows, strict=True):
        size = str(row.batch_size) if row.batch_size else "none"
        share = f"{row.peak_bytes / row.budget_bytes:.1%}" if row.peak_bytes else "-"
        peak = format_bytes(row.peak_bytes) if row.peak_bytes else "-"
        lines.append(
            [
                (f"  {name:<{max(widest, 4)}}  {format_bytes(row.budget_bytes):>9}  ", ""),
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


def _facts(found: Predicted, next_command: str, use: Callable[[int], str] | None, width: int) -> list[Line]:
    """The facts behind the answer, and how to use it."""
    first = found.predictions[0]
    doing = f", at {operation_name(first.peak_operation)}" if first.peak_operation else ""
    facts = [("peak", f"in {first.peak_phase}{doing}"), ("confidence", _confidence(found))]
    facts += _of_ranks(found)
    facts += [("no larger", _of_row(row, found) + _why(row, first)) for row in found.rows if row.reason]
    seen: dict[str, None] = dict.fromkeys(note for one in found.predictions for note in one.unseen)
    facts += [("caveat", note) for note in seen]
    sizes = ", ".join(map(str, first.trace_sizes))
    elapsed_s = sum(one.elapsed_s for one in found.predictions)
    facts.append(("traced", f"at sizes {sizes} in {elapsed_s:.1f} s"))
    largest = max(row.batch_size for row in found.rows)
    if len(found.rows) == 1:
        facts += how_to_use(largest, first.samples, use=use)
    else:
        facts += dataset_note(largest, first.samples)
    if next_command and first.based_on == "no GPU":
        here = (
            "on the GPU, with batchfit find"
            if first.ranks == 1
            else "on the GPUs: batchfit find under torchrun"
        )
        facts.append(("verify", here))
    if next_command:
        facts.append(("next", next_command))
    return [line for label, text in facts for line in fact(label, text, width)]


def _of_ranks(found: Predicted) -> list[tuple[str, str]]:
    """What is said of several ranks: the global batch, and what each of them holds."""
    facts = []
    for one in found.predictions:
        of = f"{one.card}: " if len(found.predictions) > 1 else ""
        if one.ranks > 1:
            whole = one.batch_size * one.ranks
            facts.append(
                ("ranks", f"{of}{one.batch_size} per GPU; x {one.ranks} ranks = global batch {whole}")
            )
        if one.per_rank is not None:
            facts.append(("per rank", f"{of}{one.per_rank.summary}"))
    return facts


def _why(row: Row, first: Prediction) -> str:
    """Why no larger size is answered, with the limit where what would be reserved stays below the budget."""
    if "would reserve" not in row.reason or not first.margin:
        return row.reason
    limit = format_bytes(round(row.budget_bytes * (1 - first.margin)))
    return f"{row.reason}, more than {limit}, which is the budget less {first.margin:.1%}"


def _of_row(row: Row, found: Predicted) -> str:
    """Which row is meant, where there are several: `h100, 24.0 GiB: `."""
    if len(found.rows) == 1:
        return ""
    return f"{row.card}, {format_bytes(row.budget_bytes)}: "


def next_command(found: Predicted, explain: str, end: str = "", *, most: int | None = None) -> str:
    """The command that explains the first answer, about the same memory; none where nothing fits.

    `explain` is how it begins, `end` what comes last, `most` the largest size that can be explained.
    """
    row = next((row for row in found.rows if row.batch_size), None)
    if row is None:
        return ""
    memory = ""  # the GPU that is here
    if found.predictions[0].based_on == "no GPU":
        whole = row.budget_bytes == GPUS[row.card].usable_bytes
        memory = (
            f" --gpu {row.card}" if whole else f" --budget {format_bytes(row.budget_bytes).replace(' ', '')}"
        )
    first = found.predictions[0]
    ranks = f" --ranks {first.ranks}" if first.ranks > 1 else ""
    ranks += f" --shard {first.shard}" if first.shard else ""
    ranks += " --offload" if first.offload else ""
    size = row.batch_size if most is None else min(row.batch_size, most)
    return f"{explain} --batch-size {size}{memory}{ranks}{end}"


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
    kernels = f" (kernels of an {first.card})" if _is_assumed(found) else ""
    return f"{how}{kernels}; {share}{off}"


def _draw_file(found: Predicted, path: Path, *, title: str) -> None:
    from batchfit._cli.png import draw_charts
    from batchfit._report.files import Source
    from batchfit._report.sections import charts

    draw_charts(charts([Source(one) for one in found.predictions]), path, title=title)


def gpu_lines() -> list[Line]:
    """The GPUs that `--gpu` knows."""
    wide = max(map(len, GPUS))
    lines: list[Line] = [[(f"{'GPU':<{wide}}  {'usable':>9}  capability", "head")]]
    for gpu in GPUS.values():
        major, minor = gpu.capability
        lines.append(
            [
                (f"{gpu.name:<{wide}}  {format_bytes(gpu.usable_bytes):>9}  {f'{major}.{minor}':>10}", ""),
                (
                    f"  {'nominal figure, derived' if gpu.source == 'nominal' else gpu.source}",
                    "good" if gpu.measured else "dim",
                ),
            ]
        )
    return lines
