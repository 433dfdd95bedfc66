"""The timeline of a memory snapshot: what was live by kind, and what was reserved, up to the OOM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchfit._charts.figures import stacked_kinds
from batchfit._charts.scale import byte_axis, real
from batchfit._charts.svg import Axis, Chart, Mark, Series
from batchfit._units import format_bytes

if TYPE_CHECKING:
    from batchfit.results import OomExplanation

# What is always there lies at the bottom.
_ORDER = ("before recording", "weights", "optimizer", "gradients", "batch", "other")
_TIPS = 80  # moments that say what they hold


def oom_chart(why: OomExplanation) -> Chart:
    """Live memory by kind over the recorded history, under what the allocator had reserved."""
    unit, unit_name = byte_axis(max(why.peak_bytes, why.reserved_bytes, 1))
    moments = why.timeline
    series, floors = stacked_kinds(moments, _ORDER, unit)
    pairs = list(zip(moments, why.reserved_timeline, strict=False))
    held = [Mark(m.at, real(reserved) / unit, shape="none") for m, reserved in pairs]
    series.append(Series("reserved", tuple(held), "c5", line="dashed", named=True))
    every = max(1, len(moments) // _TIPS)
    tips = [
        Mark(
            m.at,
            floor,
            f"entry {m.at:,}{f', {m.phase}' if m.phase else ''}: {format_bytes(sum(m.kinds.values()))} live "
            f"of {format_bytes(reserved)} reserved; {_split(m.kinds)}",
            "none",
        )
        for (m, reserved), floor in list(zip(pairs, floors, strict=False))[::every]
    ]
    series.append(Series("", tuple(tips), "c5"))
    if why.requested_bytes is not None and moments:
        asked = why.requested_bytes
        end = Mark(
            moments[-1].at,
            floors[-1],
            f"OOM: {format_bytes(asked)} asked for at {why.requested_at}",
            "cross",
            role="oom",
            label="OOM",
        )
        series.append(Series("", (end,), "oom"))
    return Chart(
        "Memory over the recorded history",
        f"Live memory by kind over {why.entries:,} entries; {why.summary}.",
        Axis("entries of the history, in order"),
        Axis(f"memory, {unit_name}"),
        tuple(one for one in series if one.marks),
        zooms=True,
    )


def _split(kinds: dict[str, int]) -> str:
    most = sorted(kinds.items(), key=lambda pair: -pair[1])[:3]
    return ", ".join(f"{kind} {format_bytes(size)}" for kind, size in most)
