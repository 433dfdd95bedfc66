"""What a check says of two records: the verdict, and the changes with names and numbers of their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from batchfit._check.pure.compare import (
    Difference,
    changed_causes,
    counterpart,
    has_other_optimizer,
    line_changes,
    row_changes,
)
from batchfit._check.pure.limits import failures
from batchfit._check.pure.options import CheckOptions
from batchfit._check.pure.record import (
    PeakRecord,
    PhaseMoment,
    SourcePlace,
    TensorMade,
    TracedRecord,
    other_versions,
)
from batchfit._explain.pure.holders import by_line
from batchfit._units import format_bytes, format_change
from batchfit.results import Holder, MemoryChange, MemoryCheck

_SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\s*:[^=]+)?\s*=[^=]")
# Operations whose result is what the line's name stands for.
_COPIES = ("to", "clone", "copy", "contiguous")
_MOST_NUMBERS = 3  # of a line's text that stands in a function several times
_MOST_HOLDERS = 10
_MOST_CAUSES = 3


def answered(
    name: str,
    options: CheckOptions,
    traced: TracedRecord,
    before: PeakRecord | None,
    again: PeakRecord | str | None,
    notes: Sequence[str],
) -> MemoryCheck:
    """The check of a record against `before`.

    `again` is the baseline's program traced with the versions that are here, where they are other ones; or
    why it was not.
    """
    now, numbers = traced.record, traced.numbers
    known = again if isinstance(again, PeakRecord) else before
    caveats = [*notes, *_version_caveats(before, now, again)]
    found = failures(
        peak_bytes=now.peak.size,
        baseline_bytes=None if known is None or options.update else known.peak.size,
        allowance=options.allowance,
        max_peak_bytes=options.max_peak_bytes,
        largest=None if options.update else now.largest,
        baseline_largest=None if known is None else known.largest,
    )
    changed = line_changes(known, now) if known is not None else []
    lines = tuple(_line_change(one, numbers) for one in changed)
    earlier = None if known is None else counterpart(known, now)
    return MemoryCheck(
        name=name,
        passed=not found,
        failures=found,
        batch_size=now.batch_size,
        card=now.card,
        peak_bytes=now.peak.size,
        peak_phase=now.peak.phase,
        peak_operation=now.peak.operation,
        baseline_bytes=None if known is None else known.peak.size,
        allowed_bytes=None if known is None else known.peak.size + options.allowance.of(known.peak.size),
        max_peak_bytes=options.max_peak_bytes,
        budget_bytes=now.budget_bytes,
        largest=now.largest,
        baseline_largest=None if known is None else known.largest,
        reasons=() if known is None else tuple(_reasons(known, now, numbers, before, lines)),
        kinds=() if earlier is None else _plain(row_changes(earlier.kinds, now.peak.kinds)),
        modules=() if earlier is None else _plain(row_changes(earlier.modules, now.peak.modules)),
        lines=lines,
        holders=tuple(_holders(traced)),
        versions=dict(now.versions),
        baseline_versions={} if before is None else dict(before.versions),
        versions_bytes=again.peak.size - before.peak.size
        if isinstance(again, PeakRecord) and before is not None
        else None,
        updated=options.update,
        unseen=tuple(caveats),
    )


def _version_caveats(
    before: PeakRecord | None, now: PeakRecord, again: PeakRecord | str | None
) -> Iterator[str]:
    """What is not known where the baseline has other versions."""
    if before is None or again is None or isinstance(again, PeakRecord):
        return
    yield (
        f"the baseline was traced with {_others(before, now)}: a change may be theirs and not the program's "
        f"({again})"
    )


def _others(before: PeakRecord, now: PeakRecord) -> str:
    """`torch 2.12.0, here 2.13.0`."""
    names = other_versions(before, now)
    return "; ".join(f"{name} {before.versions[name]}, here {now.versions[name]}" for name in names)


def _reasons(
    known: PeakRecord,
    now: PeakRecord,
    numbers: Mapping[str, Sequence[int]],
    before: PeakRecord | None,
    changed: Sequence[MemoryChange],
) -> Iterator[str]:
    """What explains many changes at once."""
    if known.batch != now.batch and known.batch and now.batch:
        texts = [row.chain[-1] for row in now.peak.lines if row.kind == "batch"]
        place = place_name(texts[0], numbers) if texts and SourcePlace.parsed(texts[0]).file else ""
        at = f" ({place})" if place else ""
        yield f"the batch is another: {', '.join(now.batch)}, was {', '.join(known.batch)}{at}"
    if has_other_optimizer(known.optimizer, now.optimizer):
        yield f"the optimizer is another: {_optimizer_text(now)}, was {_optimizer_text(known)}"
    yield from _parameter_reasons(changed)
    for row in changed_causes(known, now)[:_MOST_CAUSES]:
        code = SourcePlace.parsed(row.chain[-1]).code
        made = _made_text(TensorMade.parsed(row.of), code, row.kind)
        yield f"not before: {place_name(row.chain[-1], numbers)} makes {made}: {code}"
    earlier = counterpart(known, now)
    if earlier.size != known.peak.size:
        yield (
            f"the peak is {_moment_text(now.peak, numbers)}, and was "
            f"{_moment_text(known.peak, numbers)}: below are the changes since the like moment of the "
            f"baseline, of {format_bytes(earlier.size)}"
        )
    if before is not None and known is not before:
        change = format_change(known.peak.size - before.peak.size, before.peak.size)
        shown = "no change" if known.peak.size == before.peak.size else change
        yield f"other versions ({_others(before, now)}): {shown}, not counted here"


def _moment_text(moment: PhaseMoment, numbers: Mapping[str, Sequence[int]]) -> str:
    """`in backward at losses.py:42 cross_entropy`."""
    at = f" at {place_name(moment.line, numbers)}" if moment.line else ""
    return f"in {moment.phase}{at}"


def _optimizer_text(record: PeakRecord) -> str:
    """`AdamW, whose state takes 2 x the trained weights`."""
    found = record.optimizer
    return f"{found.name}, whose state takes {found.state_per_weight:g} x the trained weights"


def _parameter_reasons(changed: Sequence[MemoryChange]) -> Iterator[str]:
    """Parameters that are larger or smaller than before: all that they make is, too."""
    others = [one for one in changed if one.kinds.get("weights") and one.before_bytes and one.after_bytes]
    others.sort(key=lambda one: -abs(one.kinds["weights"]))
    for one in others[:_MOST_CAUSES]:
        yield f"{one.name} declares other {one.what}: {one.code}"
    if len(others) > _MOST_CAUSES:
        yield f"so do {len(others) - _MOST_CAUSES} more lines"


def _plain(found: Sequence[Difference]) -> tuple[MemoryChange, ...]:
    """Changes by module or kind."""
    return tuple(_memory_change(one, ".".join(one.chain)) for one in found)


def _memory_change(one: Difference, name: str) -> MemoryChange:
    kinds = {kind: one.now.get(kind, 0) - one.before.get(kind, 0) for kind in {*one.before, *one.now}}
    return MemoryChange(
        name=name,
        before_bytes=sum(one.before.values()),
        after_bytes=sum(one.now.values()),
        kinds={kind: kinds[kind] for kind in sorted(kinds) if kinds[kind]},
    )


def _line_change(one: Difference, numbers: Mapping[str, Sequence[int]]) -> MemoryChange:
    *callers, innermost = one.chain
    place = SourcePlace.parsed(innermost)
    change = _memory_change(one, place_name(innermost, numbers))
    return change.model_copy(
        update={
            "what": _what(one, place.code if place.file else ""),
            "code": place.code if place.file else "",
            "code_before": SourcePlace.parsed(one.before_text).code,
            "called_from": tuple(place_name(text, numbers) for text in callers),
        }
    )


def place_name(text: str, numbers: Mapping[str, Sequence[int]]) -> str:
    """`src/losses.py:42 cross_entropy`; without a number where the line is gone."""
    place = SourcePlace.parsed(text)
    if not place.file:
        return place.code
    known = numbers.get(text, ())
    shown = ",".join(map(str, known[:_MOST_NUMBERS])) + (",.." if len(known) > _MOST_NUMBERS else "")
    return f"{place.file}{':' if shown else ''}{shown} {place.function}"


def _what(one: Difference, code: str) -> str:
    """`logits in fp32 [8, 512]`, `log_softmax in fp32 [8, 512], was bf16`, `activations`."""
    is_gone, is_new = not any(one.now.values()), not any(one.before.values())
    kind = max((one.before if is_gone else one.now).items(), key=lambda item: item[1], default=("", 0))[0]
    made, was = TensorMade.parsed(one.before_of if is_gone else one.now_of), TensorMade.parsed(one.before_of)
    text = kind if one.whole or not made.dtype else _made_text(made, code, kind)
    if is_gone:
        return f"{text}, gone"
    if is_new or one.whole or not was.dtype or was.operation != made.operation:
        return text
    if was.dtype != made.dtype:
        return f"{text}, was {_SHORT.get(was.dtype, was.dtype)}"
    return f"{text}, was {was.shape}" if was.shape != made.shape else text


def _made_text(made: TensorMade, code: str, kind: str) -> str:
    """`logits in fp32 [8, 512]`: by the name that the line gives it, where it is all that the line does."""
    name = made.operation or kind
    assigned = _ASSIGNED.match(code)
    if made.operation in _COPIES and assigned is not None:
        name = assigned[1]
    return f"{name} in {_SHORT.get(made.dtype, made.dtype)} {made.shape}" if made.dtype else name


def _holders(traced: TracedRecord) -> Iterator[Holder]:
    peak = traced.peak
    for one in by_line(peak)[:_MOST_HOLDERS]:
        yield Holder(
            name=one.name,
            peak_bytes=one.size,
            share=one.size / max(peak.size, 1),
            count=one.blocks,
            kinds=one.kinds,
            operations=one.operations,
        )
